"""Law: a state on the host trains as one on the device, bit for bit.

Ten steps, explicit and annotated. Chunks are small, so that leaves pass in many boxes. The compiler
is kept from instructions that multiply and add with one rounding: where it uses them depends on the
loop around, and shows in the last bit; so does a schedule's rate on jax 0.12, a scalar that one
step computes inside of loops and the other before them. Where gradients wait on the host their norm
is summed layer by layer, and only its last bits may differ: those runs do not clip.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws.offload_net import ROWS, create, memories
from laws.offload_runs import N, clipped_then_skipped, run, same_bits
from laws.step_subjects import EXACT, mesh_of

import zero_jax
from zero_jax import HostMemory


@pytest.mark.parametrize(
    ("optimizer", "stage", "executor"),
    [
        *(("adamw", stage, "explicit") for stage in (1, 2, 3)),
        ("adamw", 2, "annotated"),
        ("lion", 1, "explicit"),
        ("sgd momentum", 2, "annotated"),
        ("adafactor", 3, "explicit"),
        ("MultiSteps", 1, "annotated"),
        ("MultiSteps", 2, "explicit"),
        ("masked", 3, "explicit"),
    ],
)
def test_the_optimizer_state_on_the_host(optimizer, stage, executor):
    """`MultiSteps` passes whole: in boxes XLA rounds its division by a count otherwise."""
    chunk_bytes = 2**20 if optimizer == "MultiSteps" else 1600
    policy = HostMemory(gradients="device", chunk_bytes=chunk_bytes)
    same_bits(run(optimizer, stage, executor, policy), run(optimizer, stage, executor, None))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_and_parameters_there_too(stage, microbatches):
    policy = HostMemory(params=True, chunk_bytes=1600)
    found = run("adamw", stage, "explicit", policy, microbatches, True)
    same_bits(found, run("adamw", stage, "explicit", None, microbatches, True))


@pytest.mark.parametrize("gradients", ["host", "device"])
def test_clipping_and_a_skipped_step(gradients):
    """Parameters to 1e-6 of the resident run's; the step with an inf changes no bit."""
    policy = HostMemory(gradients=gradients, chunk_bytes=1600)
    a, b = (clipped_then_skipped(p).params for p in (None, policy))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("policy", [HostMemory(), HostMemory(gradients="host")])
def test_no_microbatch_is_lost(policy):
    """Each row has one feature; the gradient of sgd's first step tells which rows came."""
    microbatches = 1 if policy.gradients == "host" else 3
    w = {"blocks": {"w": jnp.zeros((2, ROWS, 4))}}
    state = TrainState.create(apply_fn=None, params=w, tx=optax.sgd(1.0, momentum=0.9))
    state = zero_jax.shard_train_state(
        state, 2, mesh=mesh_of(data=N), executor="explicit", offload=policy,
        rules={"blocks/*": "stacked"},
    )  # fmt: skip

    def tagged(params, batch):
        out = zero_jax.scan_layers(
            lambda p, x: x + jnp.pad(batch @ p["w"], ((0, 0), (0, ROWS - 4))),
            params["blocks"],
            jnp.zeros((batch.shape[0], ROWS)),
        )
        return jnp.mean(jnp.sum(out, axis=1))

    step = zero_jax.make_train_step(tagged, microbatches=microbatches, compiler_options=EXACT)
    state, _ = step(state, zero_jax.shard_batch(np.eye(ROWS, dtype=np.float32), state))
    w = np.asarray(zero_jax.unshard_train_state(state).params["blocks"]["w"])
    np.testing.assert_allclose(w, np.full((2, ROWS, 4), -1 / ROWS), rtol=1e-6)


def test_placing_it_twice_copies_and_leaves_it_where_it_was():
    state = zero_jax.shard_train_state(create(optax.adamw(1e-2)), 1, offload=HostMemory())
    layout = zero_jax.layout_of(state)
    held = sum(p.bytes_per_device for p in jax.tree.leaves(layout.opt_state) if not p.on_host)
    assert held == 4  # the count of steps, all that is on the device
    again = zero_jax.shard_train_state(zero_jax.unshard_train_state(state), 1, offload=HostMemory())
    assert memories(again.opt_state) == memories(state.opt_state)
    same_bits(again.opt_state, state.opt_state)
