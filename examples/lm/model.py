"""A GPT in Flax linen: one block, scanned over the layers.

The model knows nothing of ZeRO or of devices: it is what a Flax user has already; one line of it
(`prefetch`) can be the library's layer loop instead of Flax's. Layers are
stacked by `nn.scan`, so each parameter of a block has a leading layer dimension and the program
is compiled once for all layers.

Where the mesh has a `model` axis, the matrices of a block are cut over it as in Megatron-LM
(Shoeybi et al., 2019, arXiv 1909.08053, section 3): the first of each pair along its outputs, the
second along its inputs, so that a block needs two all-reduces forward and two backward; the
embedding is cut along the vocabulary. The model only names the dims; XLA's partitioner follows with
the activations. Without such an axis the names mean nothing.

Shapes: B rows, T tokens, D hidden, H heads, V vocabulary. No dropout: a byte-level run of this
size sees each byte about once.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import zero_jax

from . import schema

MODEL_AXIS = "model"


class Block(nn.Module):
    """Causal attention, then a GELU layer four times as wide; each normed first, then added."""

    model: schema.Model

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Map (B, T, D) to (B, T, D); the second value is what `nn.scan` would stack."""
        width, heads = self.model.hidden, self.model.heads
        norm = partial(nn.LayerNorm, dtype=x.dtype)
        initial = nn.initializers.lecun_normal()
        # Both branches add to the residual stream: scaled so that its variance at the start does
        # not grow with the depth.
        residual = nn.initializers.variance_scaling(1 / (2 * self.model.layers), "fan_in", "normal")

        def cut_outputs(size: int, name: str) -> nn.Dense:
            kernel, bias = _cut(initial, None, MODEL_AXIS), _cut(_zeros, MODEL_AXIS)
            return nn.Dense(size, name=name, dtype=x.dtype, kernel_init=kernel, bias_init=bias)

        def cut_inputs(size: int, name: str) -> nn.Dense:
            kernel = _cut(residual, MODEL_AXIS, None)
            return nn.Dense(size, name=name, dtype=x.dtype, kernel_init=kernel)

        qkv = cut_outputs(3 * width, "qkv")(norm(name="norm_attention")(x))
        # Query, key and value of a head lie side by side: cut along heads, no device lacks a part.
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], heads, 3 * width // heads), 3, axis=3)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + cut_inputs(width, "attention_out")(y)

        y = nn.gelu(cut_outputs(4 * width, "mlp_in")(norm(name="norm_mlp")(x)))
        return x + cut_inputs(width, "mlp_out")(y), None


class GPT(nn.Module):
    """Logits of the next token at every position.

    Parameters are created in float32; `model.dtype` is what they are read as. With `prefetch` the
    loop over the layers is `zero_jax.scan_layers`; the parameters are the same tree.
    """

    model: schema.Model
    prefetch: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens (B, T) integers to logits (B, T, V) in the model's dtype."""
        m, dtype = self.model, jnp.dtype(self.model.dtype)
        normal = nn.initializers.normal
        rows = _cut(normal(0.02), MODEL_AXIS, None)
        embed = nn.Embed(m.vocab_size, m.hidden, embedding_init=rows, dtype=dtype, name="embed")
        positions = self.param("positions", normal(0.01), (m.sequence_length, m.hidden))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(dtype)

        x, _ = self._stack()(x, None)

        x = nn.LayerNorm(dtype=dtype, name="norm_out")(x)
        if m.tied_head:
            return embed.attend(x)
        return nn.Dense(m.vocab_size, use_bias=False, dtype=dtype, name="head")(x)

    def _stack(self) -> nn.Module:
        """The blocks, one after the other."""
        m = self.model
        if self.prefetch:
            return zero_jax.ScanLayers(partial(Block, m), m.layers, name="blocks")
        # Inside a scan the compiler cannot merge the recomputation with the forward pass anyway.
        block = nn.remat(Block, prevent_cse=False) if m.remat else Block
        return nn.scan(
            block,
            {"params": 0},
            split_rngs={"params": True},
            length=m.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )(m, name="blocks")


def _cut(initial: nn.initializers.Initializer, *axes: str | None) -> Any:
    """An initializer whose parameter names the mesh axis that each of its dims is cut over."""
    return nn.with_logical_partitioning(initial, axes)


_zeros = nn.initializers.zeros_init()
