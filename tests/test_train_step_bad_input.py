"""Bad input to the library's step: a short letter each, before anything is compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zero_jax

COMPILED = "/jax/core/compile/backend_compile_duration"
X = np.ones((16, 8), np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="last")(jnp.tanh(nn.Dense(24, name="first")(x)))


def loss_fn(params, batch):
    return jnp.mean(Net().apply({"params": params}, batch["x"]) ** 2)


class State(TrainState):
    stats: dict


def plain_state():
    params = Net().init(jax.random.key(0), X)["params"]
    stats = {"mean": jnp.zeros(8), "seen": jnp.zeros((), jnp.int32)}
    return State.create(apply_fn=None, params=params, tx=optax.adam(1e-3), stats=stats)


@pytest.fixture(scope="module")
def state():
    return zero_jax.shard_train_state(plain_state(), 2, executor="explicit")


@pytest.fixture(scope="module")
def batch(state):
    return zero_jax.shard_batch({"x": X}, state)


def complain(error, words, call):
    """Assert that `call` raises a short letter with these words, and compiles nothing."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == COMPILED else None
    )
    with pytest.raises(error, match=words) as caught:
        call()
    assert compiled == []
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"microbatches": 0}, ValueError, "microbatches=0; expected 1 or more"),
        ({"microbatches": 2.0}, TypeError, "microbatches=2.0 is a float; expected a whole number"),
        ({"microbatches": True}, TypeError, "microbatches=True is a bool"),
        ({"reduce": "twice"}, ValueError, "reduce='twice'; expected one of 'each', 'once'"),
        ({"regather": True}, ValueError, "regather=True; expected one of 'layer', 'keep'"),
        ({"regather": []}, ValueError, r"regather=\[\]; expected one of 'layer', 'keep'"),
        ({"nonfinite": "stop"}, ValueError, "nonfinite='stop'; expected one of 'raise', 'skip'"),
        ({"statistics": None}, ValueError, "statistics=None; expected one of 'global', 'local'"),
        ({"clip_norm": 0}, ValueError, "clip_norm=0; expected a positive number, or None"),
        ({"clip_norm": float("inf")}, ValueError, "clip_norm=inf; expected a positive"),
        ({"clip_norm": "1"}, ValueError, "clip_norm='1'; expected a positive"),
        ({"collections": {"stats": "average"}}, ValueError, r"collections\['stats'\]='average'; "),
        ({"collections": ["stats"]}, TypeError, r"collections=\['stats'\]; expected a dict"),
        ({"has_aux": True, "aux": {"a": "median"}}, ValueError, r"aux\['a'\]='median'; expected"),
        ({"aux": {"a": "sum"}}, ValueError, "aux: it names values that the loss returns; pass has"),
        ({"transform_grads": 2}, TypeError, "transform_grads=2; expected a function, or None"),
        ({"after_update": "ema"}, TypeError, "after_update='ema'; expected a function, or None"),
    ],
)
def test_options(options, error, words):
    complain(error, words, lambda: zero_jax.make_train_step(loss_fn, **options))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda params: 0.0, r"loss_fn: it takes 1 positional arguments, \(params\); expected"),
        (lambda a, b, c, d: 0.0, r"takes 4 positional arguments, \(a, b, c, d\); expected"),
        (lambda params, batch, rng, stats: 0.0, "takes 4 positional arguments"),
        (None, "loss_fn=None; expected a function"),
    ],
)
def test_losses_of_another_arity(loss, words):
    complain(TypeError, words, lambda: zero_jax.make_train_step(loss))


def returns(value):
    return lambda params, batch: value(Net().apply({"params": params}, batch["x"]))


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (returns(lambda y: y.mean(1)), {}, r"it returned shape \(2,\); expected a scalar"),
        (
            returns(lambda y: (y.sum(1), 2.0)),
            {},
            r"it returned shape \(2,\) and shape \(\); expected",
        ),
        (returns(lambda y: (y.sum(), 1.0, {})), {}, r"it returned shape \(\) and .* and a dict"),
        (
            returns(lambda y: (y.mean(), {"y": y})),
            {},
            r"shape \(\) and a dict; expected.* values with has_aux",
        ),
        (returns(lambda y: jnp.int32(y.sum())), {}, "its loss is int32; expected a real float"),
        (returns(lambda y: y.sum() * 1j), {}, "its loss is complex64; expected a real float"),
        (returns(lambda y: None), {}, "loss_fn: it returned a NoneType; expected a scalar"),
        (returns(lambda y: y.mean()), {"has_aux": True}, r"with has_aux=True it has to return"),
    ],
)
def test_what_a_loss_may_return(state, batch, loss, options, words):
    step = zero_jax.make_train_step(loss, **options)
    complain(TypeError, words, lambda: step(state, batch))


def test_microbatches_that_do_not_divide(state, batch):
    step = zero_jax.make_train_step(loss_fn, microbatches=3)
    words = r"microbatches=3: batch x has 2 rows on each device \(16 over data=8\), which 3 does"
    complain(ValueError, words, lambda: step(state, batch))
    complain(ValueError, words, lambda: step.lower(state, batch))


def test_rows_that_do_not_divide(state):
    step = zero_jax.make_train_step(loss_fn)
    words = "batch: x has 12 rows, which data=8 does not divide; pad or cut it to a multiple of 8"
    complain(ValueError, words, lambda: step(state, {"x": X[:12]}))


def test_a_state_that_was_not_laid_out(batch):
    step = zero_jax.make_train_step(loss_fn)
    words = "this State carries no layout; expected a state that came from shard_train_state"
    complain(TypeError, words, lambda: step(plain_state(), batch))
    step = zero_jax.make_train_step(loss_fn, tx=optax.adam(1e-3))
    complain(TypeError, "carries no layout", lambda: step(plain_state(), batch))
    complain(TypeError, "carries no layout", lambda: zero_jax.make_train_step(loss_fn)(3, batch))


def test_a_key_that_is_missing(state, batch):
    step = zero_jax.make_train_step(lambda params, batch, rng: loss_fn(params, batch))
    words = "rng: loss_fn takes a key and none was given; call step.state, batch, rng"
    complain(TypeError, words, lambda: step(state, batch))
    complain(TypeError, words, lambda: step.lower(state, batch))


def counted(change):
    def loss(params, batch, stats):
        return loss_fn(params, batch), {"stats": change(stats)}

    return loss


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: {"mean": s["mean"]}, "its collections went in as .* and came out as"),
        (lambda s: s | {"more": s["mean"]}, "came out as .*; return the same tree"),
        (
            lambda s: s | {"mean": s["mean"].astype(jnp.bfloat16)},
            r"stats/mean went in as float32\[8\] and came out as bfloat16\[8\]",
        ),
        (
            lambda s: s | {"mean": s["mean"][:2]},
            r"stats/mean went in as float32\[8\] and came out as float32\[2\]",
        ),
    ],
)
def test_a_collection_that_does_not_stay_what_it_is(state, batch, microbatches, change, words):
    step = zero_jax.make_train_step(
        counted(change),
        has_aux=True,
        collections={"stats": "mean"},
        microbatches=microbatches,
    )
    complain(ValueError, words, lambda: step(state, batch))


def test_collections_that_are_not_there(state, batch):
    step = zero_jax.make_train_step(
        lambda params, batch, moments: (loss_fn(params, batch), {}),
        has_aux=True,
        collections={"moments": "mean"},
    )
    complain(
        ValueError, "collections: the state has no field 'moments'", lambda: step(state, batch)
    )
    step = zero_jax.make_train_step(
        lambda params, batch, stats: (loss_fn(params, batch), {}),
        has_aux=True,
        collections={"stats": "mean"},
    )
    words = "its aux has no 'stats', which is a collection that the loss changes; return it"
    complain(ValueError, words, lambda: step(state, batch))


def test_frozen(state, batch):
    def step(frozen):
        return zero_jax.make_train_step(loss_fn, frozen=frozen)

    words = "frozen: its tree is not that of the parameters, nor the upper part of it"
    complain(ValueError, words, lambda: step({"first": True})(state, batch))
    words = "frozen: it has a str in it; expected a tree of bools, or a function of a parameter's"
    complain(TypeError, words, lambda: step({"first": "yes", "last": False})(state, batch))
    words = "frozen: it freezes every parameter; nothing is left to train"
    complain(ValueError, words, lambda: step(lambda path: True)(state, batch))


@pytest.mark.parametrize(
    "transform", [lambda grads: grads["first"], lambda grads: jax.tree.map(jnp.sum, grads)]
)
def test_a_gradient_tree_of_another_structure(state, batch, transform):
    step = zero_jax.make_train_step(loss_fn, transform_grads=transform)
    words = "transform_grads: it returned . leaves, .* expected the tree that it was given, with"
    complain(ValueError, words, lambda: step(state, batch))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_read_from_around_the_step(stage):
    """The gradient would be zero, and training a straight line."""
    state = zero_jax.shard_train_state(plain_state(), stage, executor="explicit")
    batch = zero_jax.shard_batch({"x": X}, state)
    words = "loss_fn: it reads none of the 4 parameters that it is given, so nothing would train"
    step = zero_jax.make_train_step(lambda params, batch: loss_fn(state.params, batch))
    complain(ValueError, words, lambda: step(state, batch))

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    both = model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    both = zero_jax.shard_train_state(both, stage, executor="explicit")
    for around in (model, both[0]):
        step = zero_jax.make_train_step(lambda _, batch, m=around: jnp.mean(m(batch["x"]) ** 2))
        complain(ValueError, "it reads none of the 2 parameters", lambda s=step: s(both, batch))


@pytest.mark.parametrize("stage", [2, 3])
def test_some_parameters_read_from_around_the_step(stage):
    state = zero_jax.shard_train_state(plain_state(), stage, executor="explicit")
    batch = zero_jax.shard_batch({"x": X}, state)
    step = zero_jax.make_train_step(
        lambda params, batch: loss_fn({**params, "last": state.params["last"]}, batch)
    )
    words = "does not read 'last/bias', 2 such in all, and closes over an array of its shape"
    with pytest.warns(zero_jax.ZeroWarning, match=words) as caught:
        step.lower(state, batch)
    assert caught[0].filename == __file__  # the line that lowered it, not one of jax's


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(5, name="dense")(x)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        loop = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=8)
        return loop(name="layers")(x, None)[0]


def test_a_stack_that_is_cut_along_its_layers():
    """Eight layers of width 5 over eight devices: each has one layer, and no rule says stacked."""

    def state_of(rules):
        params = Stack().init(jax.random.key(0), X[:, :5])["params"]
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        return zero_jax.shard_train_state(state, 3, rules=rules, executor="explicit")

    def loss(params, batch):
        return jnp.mean(Stack().apply({"params": params}, batch["x"][:, :5]) ** 2)

    step, state = zero_jax.make_train_step(loss), state_of({})
    batch = zero_jax.shard_batch({"x": X}, state)
    words = r"2 parameters.*kept until its end.*params/layers/dense/.*cut along its first dim, its "
    with pytest.warns(
        zero_jax.ZeroWarning, match=words + r'layers.*Lay .* with the rule "stacked"'
    ):
        step.lower(state, batch)
    step.lower(state_of({"layers/*": "stacked"}), batch)  # says nothing


def test_a_plain_tree_without_its_optimizer():
    tx, params = zero_jax.partition_optimizer(optax.adam(1e-3)), {"w": jnp.ones((8, 8))}
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(state, 2, tx=tx, executor="explicit")
    step = zero_jax.make_train_step(lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2))
    words = "carries no layout.*For a dict or struct whose step closes over its optimizer, pass"
    complain(TypeError, words, lambda: step(state, {"x": X}))
