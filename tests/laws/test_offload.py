"""Law: a state on the host trains as one on the device, bit for bit.

Ten steps, explicit and annotated. Chunks are small, so that leaves pass in many boxes. The compiler
is kept from instructions that multiply and add with one rounding: where it uses them depends on the
loop around, and shows in the last bit; so does a schedule's rate on jax 0.12, a scalar that one
step computes inside of loops and the other before them. Where gradients wait on the host their norm
is summed layer by layer, and only its last bits may differ: those runs do not clip.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws.offload_net import ROWS, STEPS, create, data, laid_out, loss, memories
from laws.step_subjects import EXACT, mesh_of

import zero_jax
from zero_jax import HostMemory

N = 4

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "sgd momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    "masked": lambda: optax.chain(
        optax.scale_by_adam(),
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(jnp.ndim, p)),
        optax.scale(-1e-2),
    ),
}


@functools.cache
def run(optimizer, stage, executor, offload, microbatches=1, half=False):
    """Losses of the steps, and the last parameters; every state is where it should be."""
    precision = zero_jax.Precision.bf16() if half else None
    state = laid_out(OPTIMIZERS[optimizer](), stage, offload, executor, N, precision=precision)
    step = zero_jax.make_train_step(loss, microbatches=microbatches, compiler_options=EXACT)
    if executor == "annotated":
        step = annotated_step
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero_jax.shard_batch(data(i), state))
        losses.append(np.asarray(metrics.loss if executor == "explicit" else metrics))
        if offload is not None:
            where = memories(state.opt_state)
            assert where[True] == {"pinned_host"} and where[False] <= {"device"}
    return losses, jax.tree.map(np.asarray, zero_jax.unshard_train_state(state).params)


@functools.partial(jax.jit, donate_argnums=0, compiler_options=EXACT)
def annotated_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads), value


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


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
    found = {}
    for policy in (None, HostMemory(gradients=gradients, chunk_bytes=1600)):
        state = laid_out(optax.adamw(1e-2), 2, policy, n=N)
        step = zero_jax.make_train_step(
            loss, clip_norm=1.0, nonfinite="skip", compiler_options=EXACT, donate=False
        )
        for i in range(3):
            state, metrics = step(state, zero_jax.shard_batch(data(i), state))
            assert metrics.grad_norm > 1  # it was clipped
        x, y = data(3)
        x[ROWS // 2] = np.inf
        after, metrics = step(state, zero_jax.shard_batch((x, y), state))
        assert metrics.skipped == 1
        same_bits(after.params, state.params)
        same_bits(after.opt_state, state.opt_state)
        found[policy] = after.params
    a, b = (jax.tree.leaves(p) for p in found.values())
    for x, y in zip(a, b, strict=True):
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
