"""Bad input: a short letter each, in under a second, before anything is compiled.

The argument, the leaf path, what it has, what was expected, what to do.
"""

import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def state():
    params = {"dense": {"kernel": jnp.ones((16, 24)), "bias": jnp.ones(24)}}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def mesh_of(shape, names):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def complain(error, words, call):
    """Assert that `call` raises with these words, quickly and without a compile."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == COMPILED else None
    )
    start = time.perf_counter()
    with pytest.raises(error, match=words) as caught:
        call()
    seconds = time.perf_counter() - start
    assert compiled == []
    assert seconds < 1
    assert len(str(caught.value)) < 500  # a short letter


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stage": 5}, ValueError, "stage=5 does not exist; expected 0"),
        ({"stage": -1}, ValueError, "stage=-1"),
        ({"stage": "2"}, TypeError, "stage='2' is a str; expected the integer"),
        ({"stage": True}, TypeError, "stage=True is a bool"),
        ({"stage": 2.0}, TypeError, "stage=2.0 is a float"),
        ({"axis": "dp"}, ValueError, r"axis='dp' is not an axis of the mesh.*\{'data': 8\}"),
        ({"mesh": "all"}, TypeError, "mesh='all' is a str"),
        ({"min_size": -1}, ValueError, "min_size=-1"),
        ({"min_size": "big"}, TypeError, "min_size='big'"),
        ({"precision": "bf16"}, TypeError, "precision='bf16'.*Precision.bf16"),
        ({"tx": optax.sgd(1.0)}, TypeError, "tx: the TrainState has its own optimizer"),
    ],
)
def test_arguments(state, options, error, words):
    given = {"stage": 2, "mesh": mesh_of((8,), ("data",))} | options
    complain(error, words, lambda: zero_jax.shard_train_state(state, **given))


@pytest.mark.parametrize(
    "thing", [3, "state", None, {"params": {}}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ()]
)
def test_not_a_state(thing):
    words = "state: a .* is not a training state; expected a TrainState"
    complain(TypeError, words, lambda: zero_jax.shard_train_state(thing, 2))


def test_a_mesh_without_the_axis(state):
    mesh = mesh_of((8,), ("x",))
    complain(ValueError, "'data'.*'x': 8", lambda: zero_jax.shard_train_state(state, 2, mesh=mesh))


def test_a_state_on_another_mesh(state):
    mesh, other = mesh_of((8,), ("data",)), mesh_of((4,), ("data",))
    kernel = jax.device_put(jnp.ones((16, 24)), NamedSharding(other, P("data")))
    moved = state.replace(params={"dense": {**state.params["dense"], "kernel": kernel}})
    words = r"params/dense/kernel is partitioned as .* over another mesh.*4 devices.*of 8"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(moved, 2, mesh=mesh))
    tensor = mesh_of((2, 4), ("data", "model"))
    kernel = jax.device_put(jnp.ones((16, 24)), NamedSharding(tensor, P(None, "model")))
    moved = state.replace(params={"dense": {**state.params["dense"], "kernel": kernel}})
    complain(ValueError, words[:40], lambda: zero_jax.shard_train_state(moved, 2, mesh=mesh))


def test_params_and_opt_state_of_different_trees(state):
    other = state.replace(params={"dense": {"kernel": jnp.ones((16, 25)), "bias": jnp.ones(24)}})
    words = r"opt_state/0/mu/dense/kernel has shape \(16, 24\).*gives shape \(16, 25\)"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(other, 2))
    other = state.replace(params={"dense": {"kernel": jnp.ones((16, 24))}})
    words = "opt_state/0/mu/dense/bias has shape .*gives no leaf"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(other, 2))
    other = state.replace(opt_state=jax.tree.map(lambda x: x, state.opt_state[0]._asdict()))
    complain(ValueError, "opt_state/", lambda: zero_jax.shard_train_state(other, 2))


def test_deleted_arrays(state):
    fresh = TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.copy, state.params), tx=state.tx
    )
    fresh.opt_state[0].mu["dense"]["bias"].delete()
    words = "opt_state/0/mu/dense/bias was deleted, most likely donated"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(fresh, 2))


def test_leaves_that_are_no_arrays(state):
    class Tagged(TrainState):
        tag: str = ""

    tagged = Tagged.create(apply_fn=None, params=state.params, tx=state.tx, tag="a")
    words = "other/tag is a str; expected an array.*static"
    complain(TypeError, words, lambda: zero_jax.shard_train_state(tagged, 2))


def test_a_wrapped_optimizer(state):
    laid_out = zero_jax.shard_train_state(state, 1)
    words = "already wrapped and laid out for stage 1 over .*unshard_train_state"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(laid_out, 2))
    complain(ValueError, "tx: .*already wrapped", lambda: zero_jax.partition_optimizer(laid_out.tx))


def test_a_plain_optimizer_beside_a_dict():
    tx, params = optax.adam(1e-3), {"w": jnp.ones((16, 8))}
    state = {"params": params, "opt_state": tx.init(params)}
    words = "tx: the dict has no optimizer of its own and .*partition_optimizer"
    complain(TypeError, words, lambda: zero_jax.shard_train_state(state, 2))
    complain(TypeError, words, lambda: zero_jax.shard_train_state(state, 2, tx=tx))
    complain(TypeError, "tx=3 is a int", lambda: zero_jax.partition_optimizer(3))


def test_one_optimizer_for_two_layouts():
    tx, params = zero_jax.partition_optimizer(optax.adam(1e-3)), {"w": jnp.ones((16, 8))}
    state = {"params": params, "opt_state": tx.init(params)}
    zero_jax.shard_train_state(state, 1, tx=tx)
    zero_jax.shard_train_state(state, 1, tx=tx)  # the same layout again is fine
    words = "tx: .*already wrapped and laid out for stage 1"
    complain(ValueError, words, lambda: zero_jax.shard_train_state(state, 3, tx=tx))


def test_a_wrapped_optimizer_without_a_layout():
    tx, params = zero_jax.partition_optimizer(optax.adam(1e-3)), {"w": jnp.ones((16, 8))}
    words = "no state was laid out for it; call zero_jax.shard_train_state"
    complain(ValueError, words, lambda: tx.update(params, tx.init(params), params))


def test_a_tree_the_optimizer_was_not_laid_out_for(state):
    laid_out = zero_jax.shard_train_state(state, 2)
    wrong = {"dense": {"kernel": jnp.ones((24, 16)), "bias": jnp.ones(24)}}
    words = r"grads/dense/kernel: has shape \(24, 16\), expected .*\(16, 24\)"
    complain(ValueError, words, lambda: laid_out.apply_gradients(grads=wrong))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": np.zeros((20, 3))}, "batch: x has 20 rows in dim 0, which data=8 does not divide"),
        (
            {"x": np.zeros((16, 3)), "n": np.float32(1)},
            r"batch: n has shape \(\); expected a dim 0",
        ),
    ],
)
def test_batches(state, batch, words):
    laid_out = zero_jax.shard_train_state(state, 2)
    complain(ValueError, words, lambda: zero_jax.shard_batch(batch, laid_out))


def test_no_layout(state):
    complain(TypeError, "carries no layout", lambda: zero_jax.layout_of(state))
    complain(TypeError, "carries no layout", lambda: zero_jax.shard_batch({}, state))


def test_an_axis_of_one_device_is_said(state):
    words = r"stage 2: the axis 'data' has one device and partitions nothing; it holds all"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        zero_jax.shard_train_state(state, 2, mesh=mesh_of((1,), ("data",)))


def test_a_stage_that_partitions_nothing_is_said(state):
    words = r"stage 2 over 8 devices leaves 3.19 KiB of the 3.19 KiB of opt_state on every device: "
    with pytest.warns(zero_jax.ZeroWarning, match=re.escape(words)[:60]):
        zero_jax.shard_train_state(state, 2, min_size=10_000)


def test_a_boxed_axis_that_the_mesh_lacks_holds_nothing():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            return nn.Dense(16, kernel_init=init)(x)

    params = Net().init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    boxed = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    with pytest.warns(zero_jax.ZeroWarning, match="params/Dense_0/kernel is boxed for .*'model'"):
        laid_out = zero_jax.shard_train_state(boxed, 1)
    assert laid_out.opt_state[0].mu["Dense_0"]["kernel"].value.sharding.spec == P("data")
