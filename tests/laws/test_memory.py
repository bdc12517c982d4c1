"""Law: what the layout says is what a device holds.

ZeRO (arXiv 1910.02054, section 3.1 and table 1) counts 2 bytes a parameter, 2 for its gradient and
12 for the optimizer state (fp32 master, momentum, variance): stage 1 holds 4 + 12/N, stage 2
2 + 14/N, stage 3 16/N bytes a parameter.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from laws import subject

import zero_jax

N = 8
STATE = ("params", "opt_state", "other")


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def laid_out(request):
    state = zero_jax.shard_train_state(subject.create(optax.adamw(1e-3)), request.param)
    return request.param, state


def test_the_layout_counts_the_shards(laid_out):
    _, state = laid_out
    layout = zero_jax.layout_of(state)
    assert subject.bytes_on_device(state.params) == layout.bytes_per_device["params"]
    assert subject.bytes_on_device(state.opt_state) == layout.bytes_per_device["opt_state"]
    assert subject.bytes_on_device(state.step) == layout.bytes_per_device["other"]


def test_the_compiled_step_takes_what_the_layout_counts(laid_out):
    _, state = laid_out
    layout = zero_jax.layout_of(state)
    batch = zero_jax.shard_batch(subject.batch(0), layout)
    compiled = jax.jit(subject.step, donate_argnums=0).lower(state, batch).compile()
    memory = compiled.memory_analysis()
    state_bytes = sum(layout.bytes_per_device[tree] for tree in STATE)
    assert memory.argument_size_in_bytes == state_bytes + subject.bytes_on_device(batch)
    # donation is used: everything but the batch is written in place
    assert memory.alias_size_in_bytes == state_bytes


def test_optimizer_bytes(laid_out):
    """1/N of the logical bytes, and what exceeds it: one element a leaf, leaves under min_size."""
    stage, state = laid_out
    layout = zero_jax.layout_of(state)
    leaves = jax.tree.leaves(layout.opt_state)
    total, held = layout.total_bytes["opt_state"], layout.bytes_per_device["opt_state"]
    if stage == 0:
        assert held == total
        return
    small = sum(p.total_bytes for p in leaves if p.partition.form == "whole")
    rounding = sum(p.leaf.dtype.itemsize for p in leaves if p.partition.form == "flat")
    padding = sum(0.01 * p.total_bytes / N for p in leaves if p.partition.form == "padded")
    assert small == 4 + 2 * (4 + 3 * 4)  # count; temperature and the head's bias, twice
    assert total / N <= held <= (total - small) / N + small + rounding + padding


class Wide(nn.Module):
    """Two layers whose every dim divides by 64."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(128, use_bias=False)(x)
        return x


@pytest.mark.parametrize(
    ("stage", "params", "grads"), [(0, 1, 1), (1, 1, 1), (2, 1, 1 / N), (3, 1 / N, 1 / N)]
)
def test_table_1_of_the_paper(stage, params, grads):
    net = Wide()

    def create(key):
        variables = net.init(key, jnp.zeros((1, 64)))
        return TrainState.create(
            apply_fn=net.apply, params=variables["params"], tx=optax.adam(1e-3)
        )

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = zero_jax.init_train_state(create, key, stage=stage, precision=zero_jax.Precision.bf16())
    psi = 64 * 128 + 128 * 128
    held = zero_jax.layout_of(state).bytes_per_device
    assert held["params"] == 2 * psi * params
    assert held["grads"] == 2 * psi * grads
    count = 4
    assert held["opt_state"] == 12 * psi * (1 / N if stage else 1) + count
