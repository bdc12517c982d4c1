"""Law: a step changes values and nothing else.

Sharding, dtype, weak type and memory kind of every leaf after a step are those before it, so the
second step is the first one's executable, and step 5 leaves the state where step 0 found it.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws import subject

import zero_jax

COMPILED = "/jax/core/compile/backend_compile_duration"


def facts(state):
    return [
        (x.shape, x.dtype, x.aval.weak_type, x.sharding, x.sharding.memory_kind, x.committed)
        for x in jax.tree.leaves(state)
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pinned", [False, True], ids=["open", "pinned"])
@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
def test_steady_layout(stage, pinned, donated):
    state = zero_jax.shard_train_state(subject.create(optax.adamw(1e-3)), stage)
    before, structure = facts(state), jax.tree.structure(state)
    shardings = (jax.tree.map(lambda x: x.sharding, state), None) if pinned else None
    options = {"donate_argnums": 0} if donated else {}
    jitted = subject.jit_step(out_shardings=shardings, **options)
    batches = [zero_jax.shard_batch(subject.batch(i), state) for i in range(5)]
    state, loss = jitted(state, batches[0])
    float(loss)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(seconds) if name == COMPILED else None
    )
    for batch in batches[1:]:
        state, loss = jitted(state, batch)
        float(loss)
    assert facts(state) == before
    assert jax.tree.structure(state) == structure
    assert compiled == []
    assert jitted._cache_size() == 1
    assert int(state.step) == 5


def test_the_user_keeps_the_original():
    """Donating the laid-out state does not delete, or write into, the arrays it came from."""
    original = subject.create(optax.adamw(1e-3))
    values = jax.tree.map(np.array, original.params)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    with pytest.warns(zero_jax.ZeroWarning, match="one device"):
        alone = zero_jax.shard_train_state(original, 1, mesh=mesh)
    for state in (alone, zero_jax.shard_train_state(original, 2)):
        subject_step = subject.jit_step(donate_argnums=0)
        _, loss = subject_step(state, zero_jax.shard_batch(subject.batch(0), state))
        float(loss)
        assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, original.params, values)


@pytest.mark.slow
def test_two_hundred_steps_are_flat():
    """One compile, and no array more alive after 200 steps than after 10."""
    state = zero_jax.shard_train_state(subject.create(optax.adamw(1e-3)), 2)
    jitted = subject.jit_step(donate_argnums=0)
    alive = {}
    for i in range(200):
        state, loss = jitted(state, zero_jax.shard_batch(subject.batch(i % 4), state))
        float(loss)
        alive[i] = len(jax.live_arrays())
    assert jitted._cache_size() == 1
    assert alive[199] == alive[10]


class Critic(nn.Module):
    """Two layers whose every dim divides by 8."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.leaky_relu(nn.Dense(256)(x)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_new_parameter_that_the_same_step_uses_again(stage):
    """A step of two halves, on activations that are drawn in it and lie nowhere in particular."""
    net = Critic()
    params = net.init(jax.random.key(0), jnp.zeros((1, 32)))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))
    state = zero_jax.shard_train_state(state, stage)

    def half(state, key):
        x = jax.random.normal(key, (64, 32))
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(net.apply({"params": p}, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    @jax.jit
    def step(state):
        state, _ = half(state, jax.random.key(1))
        return half(state, jax.random.key(2))

    before = facts(state)
    for _ in range(3):
        state, loss = step(state)
        float(loss)
    assert facts(state) == before
    assert step._cache_size() == 1
