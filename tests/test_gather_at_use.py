"""Stage 3 gathers a parameter where a linen model reads it, and changes nothing else."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zero_jax

LAYERS, WIDTH, ROWS = 3, 24, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = nn.with_logical_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(2 * WIDTH, kernel_init=hidden, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(y)), None


class Model(nn.Module):
    """An embedding, scanned and recomputed blocks, a head that N does not divide."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(40, WIDTH, name="embed")(tokens)
        block = nn.remat(Block, prevent_cse=False)
        scanned = nn.scan(
            block,
            {"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = scanned(name="blocks")(x, None)
        return nn.Dense(7, name="head")(x)


def create(key):
    params = Model().init(key, jnp.zeros((1,), jnp.int32))["params"]
    return TrainState.create(apply_fn=Model().apply, params=params, tx=optax.sgd(0.1, 0.9))


def make_step(gathers):
    @jax.jit
    def step(state, tokens):
        def loss_fn(params):
            params = zero_jax.gather_at_use(params, state) if gathers else params
            return (state.apply_fn({"params": params}, tokens) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss, grads

    return step


def start(stage, mesh=None):
    rules = {"blocks/*": "stacked"}
    key = jax.random.key(0)
    return zero_jax.init_train_state(create, key, stage=stage, mesh=mesh, rules=rules)


TOKENS = np.arange(ROWS) % 40
MESHES = {"data 8": (8, 1), "data 4, model 2": (4, 2)}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_losses_and_gradients_are_those_of_the_plain_model(stage, shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    plain, gathered = start(0), start(stage, mesh)
    for _ in range(3):
        plain, want, want_grads = make_step(False)(plain, TOKENS)
        tokens = zero_jax.shard_batch(TOKENS, gathered)
        gathered, loss, grads = make_step(True)(gathered, tokens)
        np.testing.assert_allclose(loss, want, rtol=2e-6)
        for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            largest = float(jnp.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * largest)


def test_gradients_leave_in_the_partition_of_their_parameters():
    state = start(3)
    _, _, grads = make_step(True)(state, zero_jax.shard_batch(TOKENS, state))
    up, kernel = grads["blocks"]["up"]["kernel"].value, state.params["blocks"]["up"]["kernel"].value
    assert up.sharding.is_equivalent_to(kernel.sharding, 3)
    assert not up.sharding.is_fully_replicated


def test_below_stage_3_the_tree_is_the_same():
    state = start(2)
    assert jax.tree.leaves(zero_jax.gather_at_use(state.params, state)) == jax.tree.leaves(
        state.params
    )
    same = jax.tree.structure(zero_jax.gather_at_use(state.params, state))
    assert same == jax.tree.structure(state.params)


def test_letters():
    state = start(3)
    with pytest.raises(ValueError, match="params: they have the structure"):
        zero_jax.gather_at_use(state.params["head"], state)
    with pytest.raises(TypeError, match="carries no layout"):
        zero_jax.gather_at_use(state.params, create(jax.random.key(0)))
