"""A stack of blocks with tensor parallelism, as Megatron-LM cuts them, for the laws of activations.

On a mesh of data x model: the first kernel of a block is cut by columns over `model`, the second by
rows (arXiv 1909.08053, section 3), so that a block's input is the same on every device along it.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zero_jax


class Size(NamedTuple):
    """Of the model and of one device's share of a batch."""

    layers: int
    width: int
    rows: int
    tokens: int
    dtype: Any = jnp.float32

    @property
    def input_bytes(self) -> int:
        """Of the input of one layer, on one device."""
        return self.rows * self.tokens * self.width * jnp.dtype(self.dtype).itemsize


class Block(nn.Module):
    """A residual layer, four times as wide inside."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        def cut(*axes):
            return nn.with_partitioning(nn.initializers.lecun_normal(), axes)

        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        y = nn.gelu(dense(4 * x.shape[-1], kernel_init=cut(None, "model"), name="up")(x))
        return x + dense(x.shape[-1], kernel_init=cut("model", None), name="down")(y)


class Net(nn.Module):
    """The loop of blocks."""

    size: Size
    remat: zero_jax.Remat | None

    @nn.compact
    def __call__(self, x):
        block = partial(Block, self.size.dtype)
        return zero_jax.ScanLayers(block, self.size.layers, remat=self.remat, name="blocks")(x)


class PlainNet(nn.Module):
    """The same blocks one by one, and no loop."""

    size: Size
    block: Any = Block

    @nn.compact
    def __call__(self, x):
        for i in range(self.size.layers):
            x = self.block(self.size.dtype, name=f"block_{i}")(x)
        return x


def make_step(net: Net | PlainNet, devices: Any, model: int = 2, options: Any = None) -> Any:
    """The step at stage 3, and all it needs; `model` devices along the axis of that name.

    `options` are for the compiler, by default those of the library.

    Returns:
      (state, batch, step, create): the first two without numbers; `create(key)` makes a state.
    """
    mesh = Mesh(np.asarray(devices).reshape(-1, model), ("data", "model"))
    size = net.size

    def create(key):
        params = net.init(key, jnp.zeros((1, 1, size.width), size.dtype))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def loss_fn(params, x):
        return jnp.mean(net.apply({"params": params}, x).astype(jnp.float32) ** 2)

    state = zero_jax.init_train_state(
        create,
        jax.eval_shape(lambda: jax.random.key(0)),
        stage=3,
        mesh=mesh,
        executor="explicit",
        rules={"blocks/*": "stacked"} if isinstance(net, Net) else {},
        precision=None if size.dtype == jnp.float32 else zero_jax.Precision.bf16(),
    )
    rows = size.rows * mesh.shape["data"]
    x = jax.ShapeDtypeStruct((rows, size.tokens, size.width), size.dtype)
    return (
        state,
        zero_jax.shard_batch(x, state),
        zero_jax.make_train_step(loss_fn, compiler_options=options),
        create,
    )
