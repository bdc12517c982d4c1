"""The small program on which options of the library's step are measured.

A linen model of which every parameter but one divides by 8; steps of it that are run, and steps
that are only compiled.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from laws.step_subjects import FAST, leaves

import zero_jax
from zero_jax.reporting.hlo import audit

ROWS, N = 16, 8
X = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
COMPILED = "/jax/core/compile/backend_compile_duration"


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(24, name="dense")(x)), None


class Net(nn.Module):
    """A first layer, a loop of three that are recomputed in the backward pass, a last one."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(24, name="first")(x))
        layer = nn.remat(Layer, prevent_cse=False)
        loop = nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = loop(name="middle")(x, None)
        return nn.Dense(3, name="last")(x)


def loss_fn(params, batch):
    return jnp.mean((Net().apply({"params": params}, batch["x"]) - 1) ** 2)


def create(key=None, tx=None):
    params = Net().init(jax.random.key(0) if key is None else key, X[:1])["params"]
    tx = optax.sgd(1.0, momentum=0.9) if tx is None else tx
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def start(stage, tx=None, **options):
    options = {"rules": RULES, "executor": "explicit"} | options
    return zero_jax.shard_train_state(create(tx=tx), stage, **options)


def make(loss=loss_fn, **options):
    return zero_jax.make_train_step(loss, **{"compiler_options": FAST} | options)


def one_step(stage, tx=None, **options):
    """The state after a step, and its metrics."""
    state = start(stage, tx)
    return make(**options)(state, placed(state))


def placed(state):
    return zero_jax.shard_batch({"x": X}, state)


def moved(state):
    """What a step of sgd 1.0 took from each parameter."""
    after = zero_jax.unshard_train_state(state).params
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), create().params, after)


def gradient():
    return jax.grad(loss_fn)(create().params, {"x": X})


def close(tree, expected):
    np.testing.assert_allclose(
        np.concatenate([np.ravel(x) for x in leaves(tree)]),
        np.concatenate([np.ravel(x) for x in leaves(expected)]),
        rtol=1e-5,
        atol=1e-7,
    )


def bytes_of(stage, **options):
    """Bytes on the wire of a step, by kind, as it is compiled without being run."""
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    state = zero_jax.init_train_state(create, key, stage=stage, rules=RULES, executor="explicit")
    batch = zero_jax.shard_batch({"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}, state)
    compiled = make(**options).lower(state, batch).compile()
    return audit(compiled, zero_jax.layout_of(state).mesh).bytes_by_kind


def on_the_wire(*shapes):
    """7/8 of the bytes of fp32 leaves, each padded to a multiple of 8 elements."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return sum(4 * (size + -size % N) * (N - 1) // N for size in sizes)


FIRST, MIDDLE, LAST = [(5, 24), (24,)], [(3, 24, 24), (3, 24)], [(24, 3)]
RULES = {"middle/*": "stacked"}
WHOLE = 2 * 4 * 3 * (N - 1) // N  # the head's bias of 3 stays whole: an all-reduce, twice 7/8
SCALARS = 2 * 4 * 2 * (N - 1) // N  # loss and squared norm
