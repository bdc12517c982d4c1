"""Gradients of a batch, from outside of `shard_map`: specs in, gradients in flight out.

The state and the batch go in as they lie, each device gets its pieces, and the reduced gradients
come out under the optimizer's partition. Only the axes that the batch is split over are manual;
axes of tensor parallelism stay automatic (ZeRO, arXiv 1910.02054, section 1, on ZeRO with model
parallelism).

Not here: what a device does (`local_gradients`), which collective a parameter takes (`wires`), how
the loss reads it (`rehearsal`).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .at_use import Wire
from .collectives import constrain, unpad
from .delayed import no_gradient
from .layout import Layout
from .local_gradients import make_local_gradient
from .memories import as_host, is_host
from .rehearsal import rehearse
from .residence import path_of
from .step_options import StepOptions
from .subject import Subject
from .wires import Axes, axes_of, wires_of

Tree = Any
_ALIKE = PartitionSpec()


class Gradients(NamedTuple):
    """What a batch gave.

    Attributes:
      gradients: one for each parameter, times the loss scale, in flight: logical shapes under
        `layout.updates`. Zeros for a frozen one. One that was sent to the host is at rest.
      carried: the collections, changed.
      aux: what the loss returned beside.
      total, weight: fp32 (): sums over the batch; the loss is their quotient.
      norm: fp32 (): global norm of the gradients, times the loss scale.
      weighted: whether the loss says what its rows weigh.
    """

    gradients: list[jax.Array]
    carried: Tree
    aux: Tree
    total: jax.Array
    weight: jax.Array
    norm: jax.Array
    weighted: bool


def compute_gradients(
    subject: Subject, batch: Tree, key: Any, scale: jax.Array, options: StepOptions
) -> Gradients:
    """Differentiate the subject's loss on a batch.

    Args:
      subject: the opened state.
      batch: tree of arrays (B, ...), split over the batch's axes; scalars are alike everywhere.
      key: a key or None.
      scale: fp32 (), by which the loss is multiplied.
      options: of the step.

    Raises:
      ValueError: rows do not divide by devices and microbatches.
    """
    layout = subject.layout
    axes = axes_of(layout)
    _check_batch(batch, axes, options)
    wires = wires_of(subject, options, axes)
    trains = [not frozen for frozen in frozen_parameters(layout, options)]
    trains += [False] * (len(subject.values) - len(trains))
    readings = rehearse(subject, wires, trains, batch, key, axes, options)
    local = make_local_gradient(subject, wires, readings, trains, axes, options)
    rows = jax.tree.map(lambda x: PartitionSpec(axes.batch) if x.ndim else _ALIKE, batch)
    lie = [replace(p, mesh=axes.mesh).rest.spec for p in subject.placements]
    come = [_manual_entries(spec, axes.batch) for spec in lie]
    leave = [_gradient_spec(w) for w, t in zip(wires, trains, strict=True) if t]
    mapped = axes.on_devices(
        local, (come, _ALIKE, rows, _ALIKE, _ALIKE), (leave, _ALIKE, _ALIKE, _ALIKE)
    )
    values = [
        as_host(v) if p.on_host else v
        for v, p in zip(subject.values, subject.placements, strict=True)
    ]
    reduced, carried, aux, sums = mapped(values, subject.carried, batch, key, scale)
    full = _in_flight(reduced, subject, trains)
    norm, weight = jnp.sqrt(sums["squared_norm"]), sums.get("weight")
    means = jnp.float32(axes.size * options.microbatches)
    return Gradients(
        full,
        carried,
        aux,
        sums["total"],
        means if weight is None else weight,
        norm,
        weight is not None,
    )


def _check_batch(batch: Tree, axes: Axes, options: StepOptions) -> None:
    """Whether every device and microbatch gets as many rows as the others.

    Raises:
      ValueError: naming the leaf and both numbers.
    """
    m = options.microbatches
    over = " x ".join(f"{a}={axes.mesh.shape[a]}" for a in axes.batch)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        rows = leaf.shape[0] if leaf.ndim else axes.size * m
        if rows % axes.size:
            raise ValueError(
                f"batch: {path_of(keys)} has {rows} rows, which {over} does not divide; pad or cut "
                f"it to a multiple of {axes.size * m}."
            )
        if (rows // axes.size) % m:
            raise ValueError(
                f"microbatches={m}: batch {path_of(keys)} has {rows // axes.size} rows on each "
                f"device ({rows} over {over}), which {m} does not divide."
            )


def frozen_parameters(layout: Layout, options: StepOptions) -> list[bool]:
    """Which parameters stay as they are: those that are frozen, or no real or complex numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(layout.params)
    frozen = options.frozen
    if frozen is None:
        stays = [False] * len(leaves)
    elif callable(frozen):
        stays = [bool(frozen(p.leaf.path)) for _, p in leaves]
    else:
        stays = _frozen_leaves(frozen, layout.params)
    numbers = [jnp.issubdtype(p.leaf.dtype, jnp.inexact) for _, p in leaves]
    return [s or not n for n, s in zip(numbers, stays, strict=True)]


def _frozen_leaves(frozen: Tree, params: Tree) -> list[bool]:
    """A tree of bools, or the upper part of one, spread over the parameters."""
    try:
        stays = jax.tree.leaves(jax.tree.broadcast(frozen, params))
    except ValueError as error:
        raise ValueError(
            f"frozen: its tree is not that of the parameters, nor the upper part of it: {error}"
        ) from None
    strange = [s for s in stays if not isinstance(s, bool)]
    if strange:
        raise TypeError(
            f"frozen: it has a {type(strange[0]).__name__} in it; expected a tree of bools, or a "
            "function of a parameter's path."
        )
    return stays


def _manual_entries(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The entries of a spec that are manual axes; the others stay automatic."""

    def entry(names: Any) -> Any:
        kept = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if n in axes)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    return PartitionSpec(*map(entry, spec))


def _gradient_spec(wire: Wire) -> PartitionSpec:
    """Where `shard_map` leaves a gradient."""
    if wire.grad.dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * wire.grad.dim, wire.grad.axes)


def _in_flight(gradients: list[jax.Array], subject: Subject, trains: list[bool]) -> list[jax.Array]:
    """A gradient for every parameter, logical shapes under `layout.updates`; zeros if frozen."""
    come = iter(gradients)
    placements = jax.tree.leaves(subject.layout.updates)
    full = []
    for placement, trained in zip(placements, trains, strict=False):
        shape = placement.leaf.shape
        if not trained:
            full.append(no_gradient(placement))
            continue
        g = next(come)
        if is_host(g):
            full.append(g)
            continue
        full.append(unpad(g, placement) if g.shape != shape else constrain(g, placement.flight))
    return full
