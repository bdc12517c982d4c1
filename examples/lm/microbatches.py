"""Gradients of a batch that is computed in parts, one after the other.

A device then keeps the activations of one part only. The parts are as large as each other, so the
mean of their means is the mean of the batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def value_and_grad(
    loss_fn: Callable[[Tree, Tree], jax.Array], params: Tree, batch: Tree, microbatches: int
) -> tuple[jax.Array, Tree]:
    """Mean loss and its gradient, computed in `microbatches` parts.

    Args:
      loss_fn: maps parameters and a batch to a mean over the batch's rows.
      params: tree of arrays.
      batch: tree of arrays (B, ...); B a multiple of `microbatches`.
      microbatches: 1 computes the batch at once, with gradients in the dtype of the parameters;
        more sum them in float32.
    """
    compute = jax.value_and_grad(loss_fn)
    if microbatches == 1:
        return compute(params, batch)

    def part(sums: Tree, microbatch: Tree) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, sums, _as_float32(compute(params, microbatch))), None

    # Rows are dealt out like cards, so that each part has rows of every device.
    parts = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(-1, microbatches, *x.shape[1:]), 0, 1), batch
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.zeros(()), params))
    sums, _ = jax.lax.scan(part, zeros, parts)
    return jax.tree.map(lambda x: x / microbatches, sums)


def _as_float32(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
