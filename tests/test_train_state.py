"""Habits of users that met the package's edges: each was a fault once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from laws import subject

import zero_jax


def test_flax_loss_scale_compiles_once():
    class Scaled(TrainState):
        loss_scale: Any = None

    plain = subject.create(optax.adam(1e-3))
    state = Scaled.create(
        apply_fn=plain.apply_fn, params=plain.params, tx=plain.tx, loss_scale=DynamicScale()
    )
    state = zero_jax.shard_train_state(state, 2)

    @jax.jit
    def step(state, batch):
        gradient = state.loss_scale.value_and_grad(subject.loss_fn)
        loss_scale, _, loss, grads = gradient(state.params, batch, state.apply_fn)
        return state.apply_gradients(grads=grads, loss_scale=loss_scale), loss

    for i in range(3):
        state, loss = step(state, zero_jax.shard_batch(subject.batch(i), state))
        float(loss)
    assert step._cache_size() == 1


def test_a_multi_steps_object_keeps_what_it_has():
    """Extra arguments reach the inner transformation; `has_updated` is still there."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = optax.MultiSteps(optax.chain(optax.adam(1e-2), plateau), every_k_schedule=2)
    state = zero_jax.shard_train_state(subject.create(tx), 2)

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(subject.loss_fn)(state.params, batch, state.apply_fn)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        done = state.tx.has_updated(opt_state)
        return state.replace(params=params, opt_state=opt_state), done

    updated = []
    for i in range(4):
        state, done = step(state, zero_jax.shard_batch(subject.batch(i), state))
        updated.append(bool(done))
    assert updated == [False, True, False, True]
    assert zero_jax.unshard_train_state(state).tx is tx


SCRIPT = """
import jax, optax
from flax.training.train_state import TrainState
import zero_jax
jax.config.update("jax_num_cpu_devices", 8)

def main():
    state = TrainState.create(apply_fn=None, params={"w": jax.numpy.ones(16)}, tx=optax.sgd(1.0))
    zero_jax.shard_train_state(state, 1)

main()
"""


def test_a_warning_points_into_the_users_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(Path(zero_jax.__file__).parents[1])}
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert f"{path}:9: ZeroWarning: stage 1: there is no optimizer state" in run.stderr


def test_optimizer_state_is_read_in_logical_shapes():
    """Helpers of optax that read the state outside of the update: unshard it, in a jit or not."""
    tx = optax.contrib.schedule_free_adamw(1e-2)
    plain, _ = subject.train(subject.create(tx), 3)
    state, _ = subject.train_sharded(zero_jax.shard_train_state(subject.create(tx), 2), 3)

    @jax.jit
    def eval_params(state):
        whole = zero_jax.unshard_train_state(state)
        return optax.contrib.schedule_free_eval_params(whole.opt_state, whole.params)

    expected = optax.contrib.schedule_free_eval_params(plain.opt_state, plain.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        eval_params(state),
        expected,
    )


def test_tensor_parallelism_by_rule():
    """A rule's other axes count at every stage, and carry no part of the batch."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rules = {"Dense_1/kernel": P("data", "model")}
    params = nn.Dense(16, name="x").init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    for stage, spec in [(0, P(None, "model")), (2, P(None, "model")), (3, P("data", "model"))]:
        state = TrainState.create(apply_fn=None, params={"Dense_1": params}, tx=optax.adam(1e-3))
        state = zero_jax.shard_train_state(state, stage, mesh=mesh, rules=rules)
        assert state.params["Dense_1"]["kernel"].sharding.spec == spec
        assert zero_jax.layout_of(state).batch_axes == ("data",)


def test_batches_along_other_dims_and_axes():
    state = zero_jax.shard_train_state(subject.create(optax.adam(1e-3)), 3)  # on a refined mesh
    assert "data" not in zero_jax.layout_of(state).mesh.shape
    x = np.zeros((3, 16), np.float32)
    for axes in (None, "data", ("data",)):
        assert zero_jax.shard_batch(x, state, dim=1, axes=axes).sharding.shard_shape(x.shape) == (
            3,
            2,
        )
    with pytest.raises(ValueError, match="dim=-1"):
        zero_jax.shard_batch(x, state, dim=-1)
    with pytest.raises(ValueError, match="no axis 'rows'"):
        zero_jax.shard_batch(x, state, axes="rows")


def test_one_optimizer_for_two_states_is_refused():
    tx, params = zero_jax.partition_optimizer(optax.adam(1e-3)), {"w": jnp.ones((16, 8))}
    state = {"params": params, "opt_state": tx.init(params)}
    for states in ((state, state), {"a": state, "b": state}):
        with pytest.raises(TypeError, match="tx: expected"):
            zero_jax.shard_train_state(states, 2, tx=tx)


def test_a_traced_state_is_refused():
    plain = subject.create(optax.adam(1e-3))
    with pytest.raises(TypeError, match="outside of jit.*init_train_state"):
        jax.jit(lambda s: zero_jax.shard_train_state(s, 2))(plain)


def test_frozen_parameters_outside_of_params():
    """A rule says that a field holds parameters: cut at stage 3, without optimizer state."""

    class Adapted(TrainState):
        base: Any = None

    state = Adapted.create(
        apply_fn=None,
        params={"adapter": jnp.ones((16, 4))},
        base={"kernel": jnp.ones((64, 16))},
        tx=optax.adam(1e-3),
    )
    state = zero_jax.shard_train_state(state, 3, rules={"base/*": "frozen"})
    assert state.base["kernel"].sharding.spec == P("data")
    with pytest.raises(ValueError, match="matches no leaf outside of params"):
        zero_jax.shard_train_state(subject.create(optax.adam(1e-3)), 3, rules={"base/*": "frozen"})
