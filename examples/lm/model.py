"""A GPT in Flax linen: one block, scanned over the layers.

The model knows nothing of ZeRO or of devices: it is what a Flax user has already. Layers are
stacked by `nn.scan`, so each parameter of a block has a leading layer dimension and the program
is compiled once for all layers.

Shapes: B rows, T tokens, D hidden, H heads, V vocabulary. No dropout: a byte-level run of this
size sees each byte about once.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from zero_jax import config


class Block(nn.Module):
    """Causal attention, then a GELU layer four times as wide; each normed first, then added."""

    model: config.Model

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Map (B, T, D) to (B, T, D); the second value is what `nn.scan` would stack."""
        width, heads = self.model.hidden, self.model.heads
        norm = partial(nn.LayerNorm, dtype=x.dtype)
        dense = partial(nn.Dense, dtype=x.dtype)
        # Both branches add to the residual stream: scaled so that its variance at the start does
        # not grow with the depth.
        residual = nn.initializers.variance_scaling(1 / (2 * self.model.layers), "fan_in", "normal")

        qkv = dense(3 * width, name="qkv")(norm(name="norm_attention")(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * heads, width // heads), 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + dense(width, name="attention_out", kernel_init=residual)(y)

        y = nn.gelu(dense(4 * width, name="mlp_in")(norm(name="norm_mlp")(x)))
        return x + dense(width, name="mlp_out", kernel_init=residual)(y), None


class GPT(nn.Module):
    """Logits of the next token at every position.

    Parameters are created in float32; `model.dtype` is what they are read as.
    """

    model: config.Model

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, T) integers to logits (B, T, V) in the model's dtype."""
        m, dtype = self.model, jnp.dtype(self.model.dtype)
        normal = nn.initializers.normal
        embed = nn.Embed(
            m.vocab_size, m.hidden, embedding_init=normal(0.02), dtype=dtype, name="embed"
        )
        positions = self.param("positions", normal(0.01), (m.sequence_length, m.hidden))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(dtype)

        # Inside a scan the compiler cannot merge the recomputation with the forward pass anyway.
        block = nn.remat(Block, prevent_cse=False) if m.remat else Block
        stack = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=m.layers)
        x, _ = stack(m, name="blocks")(x, None)

        x = nn.LayerNorm(dtype=dtype, name="norm_out")(x)
        if m.tied_head:
            return embed.attend(x)
        return nn.Dense(m.vocab_size, use_bias=False, dtype=dtype, name="head")(x)
