"""Law: a delayed update applies the gradients of the step before, and nothing else changes.

    p[t+1] = p[t] - U(g[t-1]),    g[t] = gradient at p[t],    p[1] = p[0]

ZeRO-Offload (arXiv 2101.06840, section 5.2), held against the recurrence written out on one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws.offload_net import STEPS, create, data, laid_out, loss
from laws.step_subjects import EXACT

import zero_jax
from zero_jax import HostMemory

CLIP = 1.0


@functools.cache
def by_hand():
    """Losses and last parameters of the recurrence, clipped."""
    tx, state = optax.adamw(1e-2), create(optax.adamw(1e-2))
    params, moments, waiting, losses = state.params, state.opt_state, None, []
    differentiate = jax.jit(jax.value_and_grad(loss))
    for i in range(STEPS):
        value, found = differentiate(params, data(i))
        losses.append(float(value))
        if waiting is not None:
            updates, moments = tx.update(waiting, moments, params)
            params = optax.apply_updates(params, updates)
        factor = jnp.minimum(1.0, CLIP / optax.tree.norm(found))
        waiting = jax.tree.map(lambda g, f=factor: g * f, found)
    return losses, jax.tree.map(np.asarray, params)


def run(stage, offload, precision=None, **options):
    """The same by the step."""
    state = laid_out(optax.adamw(1e-2), stage, offload, precision=precision)
    step = zero_jax.make_train_step(loss, clip_norm=CLIP, compiler_options=EXACT, **options)
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero_jax.shard_batch(data(i), state))
        losses.append(float(metrics.loss))
    return losses, jax.tree.map(np.asarray, zero_jax.unshard_train_state(state).params), state


@pytest.mark.parametrize(("stage", "microbatches"), [(1, 1), (2, 3), (3, 1)])
def test_gradients_are_one_step_late(stage, microbatches):
    offload = HostMemory(delayed=True, update_on="host", chunk_bytes=4000)
    losses, params, state = run(stage, offload, microbatches=microbatches)
    expected, last = by_hand()
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(last), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    waiting = jax.tree.leaves(state.opt_state.pending.gradients)
    assert {g.sharding.memory_kind for g in waiting} == {"pinned_host"}


def test_what_is_not_finite_is_not_applied():
    """Bad gradients at step 1 leave out the update of step 2; the loss scale halves at once."""
    precision = zero_jax.Precision(loss_scale=zero_jax.DynamicScale(initial=2.0**4, hysteresis=1))
    offload = HostMemory(delayed=True, update_on="host")
    state = laid_out(optax.adamw(1e-2), 2, offload, precision=precision)
    step = zero_jax.make_train_step(loss)
    counts, scales = [], []
    for i in range(4):
        x, y = data(i)
        x = np.full_like(x, np.inf) if i == 1 else x
        state, metrics = step(state, zero_jax.shard_batch((x, y), state))
        counts.append(int(state.opt_state.inner.inner[0].count))
        scales.append(float(metrics.loss_scale))
    assert counts == [0, 1, 1, 2]
    assert scales == [16, 16, 8, 8]


def test_only_the_explicit_step():
    with pytest.raises(ValueError, match="a delayed update is made by make_train_step alone"):
        offload = HostMemory(delayed=True, update_on="host")
        laid_out(optax.adamw(1e-2), 2, offload, executor="annotated")


def test_only_the_host():
    with pytest.raises(ValueError, match='pass update_on="host"'):
        HostMemory(delayed=True)
