"""What an explicit step sends, counted in its trace: hand arithmetic, and the compiled step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import trace
from zero_jax.planning.traced_traffic import from_region
from zero_jax.reporting.hlo import audit

N, LAYERS, WIDTH, ROWS, F = 8, 3, 16, 16, 4
MESH = Mesh(np.array(jax.devices()), ("data",))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None


class Network(nn.Module):
    """LAYERS recomputed layers in a loop, and a head."""

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(
            nn.remat(Block),
            {"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return nn.Dense(WIDTH, use_bias=False, name="head")(loop(name="blocks")(x, None)[0])


def region_of(stage):
    """The traced step, its layout and the compiled step."""
    model = Network()

    def create(key):
        params = model.init(key, jnp.zeros((1, WIDTH)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, 0.9))

    def loss(params, x):
        return jnp.square(jnp.asarray(model.apply({"params": params}, x))).mean()

    state = zero_jax.init_train_state(
        create,
        jax.eval_shape(lambda: jax.random.key(0)),
        stage=stage,
        mesh=MESH,
        rules={"blocks/*": "stacked"},
        executor="explicit",
    )
    batch = zero_jax.shard_batch(jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), state)
    step = zero_jax.make_train_step(loss)
    region = trace(step, state, batch)
    propagate(region)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return region, zero_jax.layout_of(state), compiled


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_traffic_is_that_of_hand_arithmetic_and_of_the_compiled_step(stage):
    blocks, head = LAYERS * WIDTH**2 * F, WIDTH**2 * F
    ring = (N - 1) / N
    region, layout, compiled = region_of(stage)
    sent = from_region(region, layout).total
    found = audit(compiled, MESH).bytes_by_kind

    gathered = {0: 0, 2: blocks + head, 3: 2 * blocks + head}[stage]
    scattered = 0 if stage == 0 else blocks + head
    assert sent.all_gather_bytes == ring * gathered == found.get("all-gather", 0)
    assert sent.reduce_scatter_bytes == ring * scattered == found.get("reduce-scatter", 0)
    scalars = -(-2 * (N - 1) * 2 * F // N)  # loss and squared norm
    whole = 2 * ring * (blocks + head) if stage == 0 else 0
    assert sent.all_reduce_bytes == whole + scalars


def test_a_conditional_counts_the_branch_that_sends_most():
    def local(x):
        def much(x):
            return lax.all_gather(x, "data", tiled=True).sum()

        return lax.cond(x[0] > 0, much, jnp.sum, x)

    def step(x, _):
        spec = P("data")
        return jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=P(), check_vma=False)(x)

    _, layout, _ = region_of(3)
    x = jax.ShapeDtypeStruct((N * 5,), jnp.float32, sharding=NamedSharding(MESH, P("data")))
    sent = from_region(trace(step, x, ()), layout).total
    assert sent.all_gather_bytes == (N - 1) * 5 * F
