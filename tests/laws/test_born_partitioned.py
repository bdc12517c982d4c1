"""Law: a state from `init_train_state` never exists whole on any device.

What a device holds while the state is born, by the compiled initialisation's memory analysis: its
part, and one leaf. And it is the same state that `create` followed by `shard_train_state` gives.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from laws import subject

import zero_jax

LEAVES, SIDE = 8, 512
LEAF_BYTES = 4 * SIDE * SIDE


def create_large(key):
    params = {
        f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (SIDE, SIDE)) for i in range(LEAVES)
    }
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def test_no_device_holds_more_than_its_part_and_one_leaf():
    lowered = zero_jax.lower_init_train_state(create_large, jax.random.key(0), stage=3)
    memory = lowered.compile().memory_analysis()
    part = 3 * LEAVES * LEAF_BYTES // 8
    scalars = 64
    assert part <= memory.output_size_in_bytes <= part + 8 * 4 * LEAVES + scalars
    # XLA's own scratch: the keys that fold_in makes, a few bytes a leaf
    scratch = 64 * 1024
    assert memory.temp_size_in_bytes <= part + LEAF_BYTES + scratch - part * 2 // 3
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= part + 1.3 * LEAF_BYTES


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", [None, zero_jax.Precision.bf16()], ids=["as is", "bf16"])
def test_born_is_created_and_laid_out(stage, precision):
    def create():
        return subject.create(optax.adamw(1e-2, eps=1e-3))

    born = zero_jax.init_train_state(create, stage=stage, precision=precision)
    made = zero_jax.shard_train_state(create(), stage, precision=precision)
    assert type(born) is type(made)
    for b, m in zip(jax.tree.leaves(born), jax.tree.leaves(made), strict=True):
        assert (b.shape, b.dtype, b.sharding, b.aval.weak_type) == (
            m.shape, m.dtype, m.sharding, m.aval.weak_type,
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(b), np.asarray(m), rtol=2e-6, atol=1e-7)
    assert str(zero_jax.layout_of(born)) == str(zero_jax.layout_of(made))
    losses = [subject.train_sharded(state, 3)[1] for state in (born, made)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_nnx_is_born_partitioned():
    def create():
        model = nnx.Linear(64, 24, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = zero_jax.init_train_state(create, stage=3)
    assert type(model) is nnx.Linear and type(optimizer) is nnx.Optimizer
    assert subject.bytes_on_device(nnx.state(model)) == 4 * (64 * 24 + 24) // 8
    expected = nnx.Linear(64, 24, rngs=nnx.Rngs(0)).kernel[...]
    np.testing.assert_allclose(np.asarray(model.kernel[...]), expected, rtol=2e-6)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    x = zero_jax.shard_batch(np.ones((16, 64), np.float32), (model, optimizer))
    first, *_, last = [float(step(model, optimizer, x)) for _ in range(5)]
    assert last < first / 2


def test_abstract_in_abstract_out():
    """Shapes alone give shapes with shardings, from both entry points."""

    def create():
        return subject.create(optax.adamw(1e-2, eps=1e-3))

    real = zero_jax.shard_train_state(create(), 2)
    described = zero_jax.shard_train_state(jax.eval_shape(create), 2)
    key = jax.eval_shape(lambda: jax.random.key(0))
    born = zero_jax.init_train_state(lambda key: create(), key, stage=2)
    for state in (described, born):
        assert type(state) is TrainState
        for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(real), strict=True):
            assert isinstance(leaf, jax.ShapeDtypeStruct)
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (
                like.shape, like.dtype, like.sharding,
            )  # fmt: skip
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, subject.batch(0)))
    lowered = jax.jit(subject.step).lower(described, zero_jax.shard_batch(batch, described))
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 0
