"""The linen model and its NNX twin are one function, whatever the options."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lm import model, model_nnx, schema
from lm.optimizer import make_optimizer

TINY = {"layers": 3, "hidden": 16, "heads": 2, "sequence_length": 12}
TOKENS = jnp.arange(24).reshape(2, 12) * 10


def make_params(cfg):
    """Parameters of the linen model, every one random, also those that start at 0 or 1."""
    shapes = jax.eval_shape(model.GPT(cfg).init, jax.random.key(0), TOKENS)["params"]
    random = np.random.default_rng(0)
    shapes = nn.unbox(shapes)
    return jax.tree.map(lambda x: random.normal(0, 0.2, x.shape).astype(x.dtype), shapes)


@pytest.mark.parametrize(("tied_head", "remat"), [(False, False), (True, True)])
def test_twins_agree_on_the_same_parameters(tied_head, remat):
    cfg = schema.Model(**TINY, tied_head=tied_head, remat=remat)
    params = make_params(cfg)
    twin = nnx.eval_shape(lambda: model_nnx.GPT(cfg, nnx.Rngs(0)))
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(twin)))
    assert shapes == jax.tree.map(jnp.shape, params)
    nnx.update(twin, params)
    logits = jax.jit(model.GPT(cfg).apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(nnx.jit(model_nnx.GPT.__call__)(twin, TOKENS), logits, atol=1e-5)


def test_a_token_does_not_see_what_follows_it():
    cfg = schema.Model(**TINY)
    params = {"params": make_params(cfg)}
    apply = jax.jit(model.GPT(cfg).apply)
    change = jnp.abs(apply(params, TOKENS) - apply(params, TOKENS.at[:, 7].set(255)))
    assert list(change.max(axis=(0, 2)) < 1e-6) == [True] * 7 + [False] * 5


def test_gpt2_small_has_the_parameters_of_gpt2_small():
    cfg = schema.Model(50257, layers=12, hidden=768, heads=12, sequence_length=1024)
    tokens = jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(model.GPT(cfg).init, jax.random.key(0), tokens)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 124_439_808


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "adafactor"])
def test_every_optimizer_moves_against_the_gradient(name):
    optimizer, run = schema.Optimizer(name=name, clip_norm=1.0), schema.Run(steps=3)
    tx = make_optimizer(schema.LanguageModelRun(optimizer=optimizer, run=run))
    params = {"w": jnp.ones((4, 4))}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update({"w": jnp.ones((4, 4))}, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers by floats
        for _ in range(2):  # the first step of the warm-up has learning rate 0
            params, state = step(params, state)
    assert (params["w"] < 1).all()
