"""One optimizer update of the explicit step: new parameters, where the layout says.

ZeRO (arXiv 1910.02054, sections 5 and 7): each device updates its own part of the optimizer state
and of the parameters, and below stage 3 the new parameters are gathered, in the dtype they have at
rest. Optax runs in the global view on logical shapes, as in `optimizer`; there the sum of parameter
and update is the user's, here it is ours, so that the old parameters are dead before the new ones
are gathered and a step that is skipped keeps its bits.

Not here: gradients and their reduction (`gradients`), clipping (`train_step`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .collectives import constrain, pad, unpad
from .extended_state import split_scale
from .master_weights import MasterWeights, master_leaves
from .optimizer import PartitionedOptimizer
from .placement import Placement
from .precision import round_to

Tree = Any


def apply_update(
    tx: PartitionedOptimizer,
    gradients: list[jax.Array],
    opt_state: Any,
    params: Tree,
    *,
    keep: jax.Array,
    frozen: list[bool],
    loss: jax.Array,
) -> tuple[Tree, Any]:
    """Update parameters and optimizer state.

    Args:
      tx: the wrapped optimizer.
      gradients: one for each parameter, in flight: logical shapes under `layout.updates`.
      opt_state: at rest, without the loss scale.
      params: at rest.
      keep: a bool (); if False everything stays as it is, bit for bit.
      frozen: parameters that stay whatever the optimizer says.
      loss: of the step, for transformations that ask for a `value`.

    Returns:
      New parameters and optimizer state at rest.
    """
    layout = tx.layout
    assert layout is not None
    leaves, structure = jax.tree.flatten(params)
    rests, parts = jax.tree.leaves(layout.params), jax.tree.leaves(layout.updates)
    _, placed_state = split_scale(layout.opt_state)
    places, shape_of_state = jax.tree.leaves(placed_state), jax.tree.structure(opt_state)
    state = [unpad(x, p) for x, p in zip(jax.tree.leaves(opt_state), places, strict=True)]
    state = shape_of_state.unflatten(state)
    old = [constrain(unpad(x, r), p.flight) for x, r, p in zip(leaves, rests, parts, strict=True)]
    has_masters = isinstance(state, MasterWeights)
    masters = master_leaves(state) if has_masters else [None] * len(leaves)
    weights = [o if m is None else m for o, m in zip(old, masters, strict=True)]
    gradients = [g.astype(w.dtype) for g, w in zip(gradients, weights, strict=True)]
    inner = state.inner if has_masters else state
    deltas, moved_inner = tx.update_inner(
        structure.unflatten(gradients), inner, structure.unflatten(weights), {"value": loss}
    )
    moved = jax.tree.leaves(optax.apply_updates(structure.unflatten(weights), deltas))
    moved = [w if stays else m for w, m, stays in zip(weights, moved, frozen, strict=True)]
    moved = [jnp.where(keep, m, w) for m, w in zip(moved, weights, strict=True)]
    moved_inner = jax.tree.map(lambda new, was: jnp.where(keep, new, was), moved_inner, inner)
    new = [
        x if stays else _to_rest(m, x.dtype, rest, part)
        for x, m, stays, rest, part in zip(leaves, moved, frozen, rests, parts, strict=True)
    ]
    if has_masters:
        kept = iter([m for m, master in zip(moved, masters, strict=True) if master is not None])
        moved_inner = MasterWeights(jax.tree.map(lambda _: next(kept), state.master), moved_inner)
    after = jax.tree.leaves(moved_inner)
    at_rest = [pad(jnp.asarray(x), p) for x, p in zip(after, places, strict=True)]
    return structure.unflatten(new), jax.tree.structure(moved_inner).unflatten(at_rest)


def _to_rest(moved: jax.Array, dtype: Any, rest: Placement, part: Placement) -> jax.Array:
    """The new parameter in its dtype at rest, which is what crosses the wire."""
    if moved.dtype != dtype:
        moved = round_to(moved, dtype)
    return pad(constrain(moved.astype(dtype), part.flight), rest)
