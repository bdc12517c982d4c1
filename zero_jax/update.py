"""One optimizer update of the explicit step: new parameters, where the layout says.

ZeRO (arXiv 1910.02054, sections 5 and 7): each device updates its own part of the optimizer state
and of the parameters, and below stage 3 the new parameters are gathered, in the dtype they have at
rest. Optax runs in the global view on logical shapes, as in `optimizer`; there the sum of parameter
and update is the user's, here it is ours, so that the old parameters are dead before the new ones
are gathered and a step that is skipped keeps its bits.

Not here: gradients and their reduction (`gradients`), clipping (`train_step`).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .collectives import constrain, pad
from .delayed import Pending, split_pending
from .extended_state import split_scale
from .master_weights import MasterWeights, master_leaves
from .memories import is_host
from .offload.grouping import Input, Output
from .offload.on_host import update_on_host
from .offload.streams import stream
from .offload_policy import HostMemory
from .optimizer import PartitionedOptimizer
from .placement import Placement, scalar_placement
from .precision import round_to

Tree = Any


def apply_update(
    tx: PartitionedOptimizer, pending: Pending, opt_state: Any, params: Tree, frozen: list[bool]
) -> tuple[Tree, Any]:
    """Update parameters and optimizer state.

    Args:
      tx: the wrapped optimizer.
      pending: gradients, and how they count.
      opt_state: at rest, without the loss scale and what waits.
      params: at rest.
      frozen: parameters that stay whatever the optimizer says.

    Returns:
      New parameters and optimizer state at rest.
    """
    layout = tx.layout
    assert layout is not None
    function, inputs, outputs = traced_update(tx, pending, opt_state, params, frozen)
    if layout.offload is not None:
        assert isinstance(layout.offload, HostMemory)  # a state in files has a step of its own
        pass_over = update_on_host if layout.offload.update_on == "host" else stream
        results = pass_over(function, inputs, outputs, layout.offload.chunk_bytes)
    else:
        results = function(*(i.logical() for i in inputs))
        results = [pad(x, o.place) for x, o in zip(results, outputs, strict=True)]
    leaves, structure = jax.tree.flatten(params)
    n, state_structure = len(leaves), jax.tree.structure(opt_state)
    new = [x if stays else y for x, y, stays in zip(leaves, results[:n], frozen, strict=True)]
    return structure.unflatten(new), state_structure.unflatten(results[n:])


def traced_update(
    tx: PartitionedOptimizer, pending: Pending, opt_state: Any, params: Tree, frozen: list[bool]
) -> tuple[Any, list[Input], list[Output]]:
    """The update as a function of flat logical arrays, its inputs and its outputs.

    Inputs are the gradients, the parameters, the optimizer state, then factor, keep and loss as far
    as there are any; outputs the parameters and the optimizer state. Arguments as in
    `apply_update`.
    """
    layout = tx.layout
    assert layout is not None
    structure, state_structure = jax.tree.structure(params), jax.tree.structure(opt_state)
    rests, parts = jax.tree.leaves(layout.params), jax.tree.leaves(layout.updates)
    places = jax.tree.leaves(split_pending(split_scale(layout.opt_state)[1])[1])
    leaves, state = jax.tree.leaves(params), jax.tree.leaves(opt_state)
    n, held = len(leaves), len(leaves) + len(state)
    scalars, said_structure = jax.tree.flatten(pending._replace(gradients=()))

    def scalar(dtype: Any) -> Placement:
        return scalar_placement(dtype, layout.mesh, layout.axis)

    def function(*flat: Any) -> list[Any]:
        said = said_structure.unflatten(flat[n + held :])
        gradients = [times(g, said.factor) for g in flat[:n]]
        old = [constrain(x, p.flight) for x, p in zip(flat[n : 2 * n], parts, strict=True)]
        trees = structure, state_structure.unflatten(flat[2 * n : n + held])
        moved, after = _move(
            tx, gradients, old, *trees, keep=said.keep, frozen=frozen, loss=said.loss
        )
        pairs = zip(moved, leaves, parts, strict=True)
        return [*(_narrow(m, x.dtype, part) for m, x, part in pairs), *after]

    inputs = [
        *(_gradient(g, p) for g, p in zip(pending.gradients, parts, strict=True)),
        *(Input(x, p) for x, p in zip([*leaves, *state], [*rests, *places], strict=True)),
        *(Input(x, scalar(x.dtype), in_flight=True) for x in scalars),
    ]
    outputs = [Output(p, n + at) for at, p in enumerate([*rests, *places])]
    return function, inputs, outputs


def _gradient(g: jax.Array, part: Placement) -> Input:
    """A gradient as an input of the stream."""
    if isinstance(g, jax.Array) and is_host(g):
        return Input(g, replace(part, memory="pinned_host"))
    return Input(g, part, in_flight=g.shape == part.leaf.shape)


def times(g: Any, factor: jax.Array | None) -> Any:
    """A gradient times a factor, in fp32 at least: fp16 would lose what a scale has saved."""
    if factor is None or not jnp.issubdtype(g.dtype, jnp.inexact):
        return g
    wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    return wide * factor.astype(wide.real.dtype)


def _move(
    tx: PartitionedOptimizer,
    gradients: list[Any],
    old: list[Any],
    structure: Any,
    state: Any,
    *,
    keep: jax.Array | None,
    frozen: list[bool],
    loss: jax.Array,
) -> tuple[list[Any], list[Any]]:
    """The weights after the update, wide, and the leaves of the new state; logical, in flight."""
    has_masters = isinstance(state, MasterWeights)
    masters = master_leaves(state) if has_masters else [None] * len(old)
    weights = [o if m is None else m for o, m in zip(old, masters, strict=True)]
    gradients = [g.astype(w.dtype) for g, w in zip(gradients, weights, strict=True)]
    inner = state.inner if has_masters else state
    deltas, moved_inner = tx.update_inner(
        structure.unflatten(gradients), inner, structure.unflatten(weights), {"value": loss}
    )
    moved = jax.tree.leaves(optax.apply_updates(structure.unflatten(weights), deltas))
    moved = [w if stays else m for w, m, stays in zip(weights, moved, frozen, strict=True)]
    if keep is not None:
        moved = [jnp.where(keep, m, w) for m, w in zip(moved, weights, strict=True)]
        moved_inner = jax.tree.map(lambda new, was: jnp.where(keep, new, was), moved_inner, inner)
    moved_inner = jax.tree.map(_integers_stay, moved_inner, inner)
    if has_masters:
        kept = iter([m for m, master in zip(moved, masters, strict=True) if master is not None])
        moved_inner = MasterWeights(jax.tree.map(lambda _: next(kept), state.master), moved_inner)
    return moved, [jnp.asarray(x) for x in jax.tree.leaves(moved_inner)]


def _integers_stay(new: Any, was: Any) -> Any:
    """A moment of an integer parameter in its dtype at rest: optax gives it one, and widens it."""
    widened = jnp.issubdtype(was.dtype, jnp.integer) and jnp.issubdtype(new.dtype, jnp.inexact)
    return new.astype(was.dtype) if widened else new


def _narrow(moved: jax.Array, dtype: Any, part: Placement) -> jax.Array:
    """The new parameter in its dtype at rest, which is what crosses the wire."""
    if moved.dtype != dtype:
        moved = round_to(moved, dtype)
    return constrain(moved.astype(dtype), part.flight)
