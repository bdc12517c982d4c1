"""A small GPT of awkward sizes for the laws of bytes and memory; linen, layers scanned, recomputed.

Over 8 and 4 devices it has dims that divide (36 over 4), that are padded (94, 206), leaves that no
dim cuts and that are flattened (norms of 36, over 8), and a scalar. Kernels name the `model` axis
as Megatron-LM does (arXiv 1909.08053, section 3), which means nothing on a mesh without it.

  blocks          read in recomputed layers: gathered forward and backward
  last bias       of a block: recomputing a layer for its backward pass does not need it
  the rest        embedding, positions, last norm, head, temperature: read once
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zero_jax

LAYERS, WIDTH, HEADS, HIDDEN, VOCAB, TOKENS, ROWS = 3, 36, 6, 94, 206, 7, 32
RULES = {"blocks/*": "stacked"}
FAST = {"xla_backend_optimization_level": 0}
"""Compiler option: halves what a compile for the CPU takes; the collectives stay as they are."""

_draw, _zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()


def _cut(initial: Any, *axes: str | None) -> Any:
    return nn.with_logical_partitioning(initial, axes)


class Block(nn.Module):
    """Attention and a layer HIDDEN wide, each normed first, then added."""

    @nn.compact
    def __call__(self, x, _):
        def outputs(size, name):
            kernel, bias = _cut(_draw, None, "model"), _cut(_zeros, "model")
            return nn.Dense(size, name=name, kernel_init=kernel, bias_init=bias)

        inputs = partial(nn.Dense, WIDTH, kernel_init=_cut(_draw, "model", None))
        y = outputs(3 * WIDTH, "qkv")(nn.LayerNorm(name="norm_attention")(x))
        q, k, v = jnp.split(y.reshape(*x.shape[:2], HEADS, -1), 3, axis=3)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + inputs(name="out")(y)
        y = jnp.tanh(outputs(HIDDEN, "up")(nn.LayerNorm(name="norm_mlp")(x)))
        return x + inputs(name="down")(y), None


class SmallGPT(nn.Module):
    """Logits (B, T, VOCAB) of tokens (B, T)."""

    @nn.compact
    def __call__(self, tokens):
        normal = nn.initializers.normal
        rows = _cut(normal(0.02), "model", None)
        x = nn.Embed(VOCAB, WIDTH, embedding_init=rows, name="embed")(tokens)
        x = x + self.param("positions", normal(0.01), (TOKENS, WIDTH))
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            {"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x = nn.LayerNorm(name="norm")(blocks(name="blocks")(x, None)[0])
        x = nn.Dense(VOCAB, use_bias=False, name="head")(x)
        return x * self.param("temperature", nn.initializers.ones, ())


def regather(path: str) -> str:
    """How stage 3 gathers a parameter; see the module docstring."""
    return "layer" if path.startswith("blocks/") and path != "blocks/down/bias" else "use"


def loss_fn(params, batch):
    """Mean cross entropy."""
    logits = SmallGPT().apply({"params": params}, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def compile_step(axes: dict[str, int], stage: int, **options: Any) -> tuple[Any, Any]:
    """The layout and the compiled explicit step on a mesh of the first axis-by-axis devices."""
    grid = np.array(jax.devices()).reshape([*axes.values()])
    mesh = Mesh(grid, tuple(axes))

    def create(key):
        params = SmallGPT().init(key, jnp.zeros((1, TOKENS), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = zero_jax.init_train_state(
        create, key, stage=stage, mesh=mesh, executor="explicit", rules=RULES
    )
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    batch = zero_jax.shard_batch({"inputs": tokens, "targets": tokens}, state)
    step = zero_jax.make_train_step(loss_fn, compiler_options=FAST, **options)
    return zero_jax.layout_of(state), step.lower(state, batch).compile()
