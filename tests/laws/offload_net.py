"""A small model with stacked layers for the tests of offload; leaves that divide, and some not."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from laws.step_subjects import mesh_of

import zero_jax

STEPS, ROWS, WIDTH, LAYERS = 10, 24, 16, 5


def create(tx):
    """A plain TrainState."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": jax.random.normal(keys[0], (21, WIDTH)) * 0.3,
        "blocks": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 3 * WIDTH)) * 0.3,
            "down": jax.random.normal(keys[2], (LAYERS, 3 * WIDTH, WIDTH)) * 0.3,
            "bias": jnp.zeros((LAYERS, WIDTH)),
        },
        "head": jax.random.normal(keys[3], (WIDTH, 5)),
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def laid_out(tx, stage, offload, executor="explicit", n=2, **options):
    """The state over `n` devices, its blocks stacked."""
    return zero_jax.shard_train_state(
        create(tx),
        stage,
        mesh=mesh_of(data=n),
        executor=executor,
        offload=offload,
        rules={"blocks/*": "stacked"},
        **options,
    )


def data(i):
    """Features (rows, 21) and targets (rows, 5)."""
    rng = np.random.default_rng(i)
    return (
        rng.normal(size=(ROWS, 21)).astype(np.float32),
        rng.normal(size=(ROWS, 5)).astype(np.float32),
    )


def loss(params, batch):
    """Mean squared error through the layer loop."""

    def layer(p, x):
        return x + jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]

    x, y = batch
    h = x.astype(params["embed"].dtype) @ params["embed"]
    h = zero_jax.scan_layers(layer, params["blocks"], h)
    return jnp.mean((h @ params["head"] - y).astype(jnp.float32) ** 2)


def memories(tree):
    """Whether a leaf has dims -> the memories that such leaves are in."""
    found = {True: set(), False: set()}
    for leaf in jax.tree.leaves(tree):
        found[leaf.ndim > 0].add(leaf.sharding.memory_kind)
    return found
