"""The GPT of `model.py` in Flax NNX: the same blocks, stacked over the layers and scanned.

Parameters have the shapes, initial distributions and dtypes of the linen model; only the random
draws differ. Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import zero_jax

from . import schema


class Block(nnx.Module):
    """Causal attention, then a GELU layer four times as wide; each normed first, then added."""

    def __init__(self, model: schema.Model, rngs: nnx.Rngs):
        width, dtype = model.hidden, jnp.dtype(model.dtype)
        norm = partial(nnx.LayerNorm, dtype=dtype, rngs=rngs)
        linear = partial(nnx.Linear, dtype=dtype, rngs=rngs)
        residual = nnx.initializers.variance_scaling(1 / (2 * model.layers), "fan_in", "normal")
        self.heads = model.heads
        self.norm_attention = norm(width)
        self.qkv = linear(width, 3 * width)
        self.attention_out = linear(width, width, kernel_init=residual)
        self.norm_mlp = norm(width)
        self.mlp_in = linear(width, 4 * width)
        self.mlp_out = linear(4 * width, width, kernel_init=residual)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (B, T, D) to (B, T, D)."""
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], self.heads, -1), 3, axis=3)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + self.attention_out(y)
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.norm_mlp(x))))


class GPT(nnx.Module):
    """Logits of the next token at every position; the attributes of `blocks` have a layer dim."""

    def __init__(self, model: schema.Model, rngs: nnx.Rngs, prefetch: bool = False):
        dtype, normal = jnp.dtype(model.dtype), nnx.initializers.normal
        self.remat, self.tied_head, self.prefetch = model.remat, model.tied_head, prefetch
        self.embed = nnx.Embed(
            model.vocab_size, model.hidden, embedding_init=normal(0.02), dtype=dtype, rngs=rngs
        )
        positions = normal(0.01)(rngs.params(), (model.sequence_length, model.hidden))
        self.positions = nnx.Param(positions)

        @nnx.split_rngs(splits=model.layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(model, rngs)

        self.blocks = stacked(rngs)
        self.norm_out = nnx.LayerNorm(model.hidden, dtype=dtype, rngs=rngs)
        if not model.tied_head:
            self.head = nnx.Linear(
                model.hidden, model.vocab_size, use_bias=False, dtype=dtype, rngs=rngs
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, T) integers to logits (B, T, V) in the model's dtype."""
        x = self.embed(tokens)
        x = x + self.positions[: tokens.shape[1]].astype(x.dtype)
        x = zero_jax.scan_layers_nnx(self.blocks, x) if self.prefetch else self._scan(x)
        x = self.norm_out(x)
        return self.embed.attend(x) if self.tied_head else self.head(x)

    def _scan(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        # Inside a scan the compiler cannot merge the recomputation with the forward pass anyway.
        layer = nnx.remat(layer, prevent_cse=False) if self.remat else layer
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
