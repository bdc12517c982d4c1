"""Runs of the small model with its state on the host and not, made once for all laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from laws.offload_net import ROWS, STEPS, data, laid_out, loss, memories
from laws.step_subjects import EXACT

import zero_jax

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


def clipped_then_skipped(policy, precision=None):
    """Three clipped steps, and one with an inf that changes no bit.

    Returns:
      The last state.
    """
    state = laid_out(optax.adamw(1e-2), 2, policy, n=N, precision=precision)
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
    kept = (s.opt_state if precision is None else s.opt_state.inner for s in (after, state))
    same_bits(*kept)
    return after


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
