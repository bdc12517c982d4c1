"""The batch of a data-parallel step: split over the data axis, checked before any compile.

Every device computes the gradient of its own slice (ZeRO is data parallelism: arXiv 1910.02054,
section 1). A batch that is not placed is copied whole to every device, and what they compute of it
is then XLA's choice: possibly all of it, N times, without a word. So a training loop places its
batches.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .anatomy import is_container
from .layout import Layout
from .mesh import spelled
from .residence import path_of
from .train_state import layout_of

B = TypeVar("B")


def shard_batch(batch: B, state: Any, *, dim: int = 0, axes: Sequence[str] | None = None) -> B:
    """Split a dim of every leaf over the data axis and all replica axes.

    Args:
      batch: tree of arrays (numpy, jax or `ShapeDtypeStruct`), each with the batch as dim `dim`.
      state: a laid-out state, its `tx`, its `Layout`, or a container of states on one mesh.
      dim: the dim to split: 1 where dim 0 counts microbatches.
      axes: mesh axes to split over; by default the data axis and those that no leaf holds.

    Returns:
      The same tree of `jax.Array`s on the state's mesh.

    Raises:
      TypeError: `state` carries no layout.
      ValueError: a leaf has no such dim, or its size does not divide by that of the axes.
    """
    layout = _layout(state)
    if dim < 0:
        raise ValueError(f"dim={dim}; expected the dim to split counted from the front.")
    axes = layout.batch_axes if axes is None else _spelled(axes, layout)
    parts = math.prod(layout.mesh.shape[a] for a in axes)
    sharding = NamedSharding(layout.mesh, PartitionSpec(*[None] * dim, axes))
    over = " x ".join(f"{a}={layout.mesh.shape[a]}" for a in axes)

    def check(keys: Any, leaf: Any) -> None:
        shape = np.shape(leaf)
        if len(shape) <= dim:
            raise ValueError(
                f"batch: {path_of(keys)} has shape {shape}; expected a dim {dim} to split over "
                f"{over}."
            )
        if shape[dim] % parts:
            raise ValueError(
                f"batch: {path_of(keys)} has {shape[dim]} rows in dim {dim}, which {over} does "
                f"not divide; pad or cut it to a multiple of {parts}."
            )

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    jax.tree_util.tree_map_with_path(check, batch)
    return jax.tree.map(put, batch)


def _spelled(axes: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """The axes as the layout's mesh has them: a refined data axis is several."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    known = {*layout.mesh.shape, layout.axis}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"axes={axes!r}: the mesh has no axis {unknown[0]!r}, only {known}.")
    return spelled(names, layout.mesh, layout.axis)


def _layout(state: Any) -> Layout:
    if isinstance(state, Layout):
        return state
    if is_container(state):
        return layout_of(next(iter(state.values())) if isinstance(state, Mapping) else state[0])
    return layout_of(state)
