"""The batch of a data-parallel step: split over the data axis, checked before any compile.

Every device computes the gradient of its own slice (ZeRO, arXiv 1910.02054, section 2.1: ZeRO is
data parallelism). A batch that is not placed is copied whole to every device, and each computes all
of it: correct, N times too slow, and silent. So a training loop places its batches.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .layout import Layout
from .residence import path_of
from .train_state import layout_of

B = TypeVar("B")


def shard_batch(batch: B, state: Any, *, axes: tuple[str, ...] | None = None) -> B:
    """Split the first dim of every leaf over the data axis and all replica axes.

    Args:
      batch: tree of arrays (numpy, jax or `ShapeDtypeStruct`), each with the batch as first dim.
      state: a laid-out state, its `tx`, or its `Layout`.
      axes: mesh axes to split over; by default the data axis and those that no leaf holds.

    Returns:
      The same tree of `jax.Array`s on the state's mesh.

    Raises:
      ValueError: a leaf is a scalar, or its first dim does not divide by the size of the axes.
    """
    layout = state if isinstance(state, Layout) else layout_of(state)
    axes = layout.batch_axes if axes is None else axes
    parts = int(np.prod([layout.mesh.shape[a] for a in axes]))
    sharding = NamedSharding(layout.mesh, PartitionSpec(axes))
    over = " x ".join(f"{a}={layout.mesh.shape[a]}" for a in axes)

    def check(keys: Any, leaf: Any) -> None:
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(
                f"batch: {path_of(keys)} is a scalar; expected a first dim to split over {over}."
            )
        if shape[0] % parts:
            raise ValueError(
                f"batch: {path_of(keys)} has {shape[0]} rows, which {over} does not divide; pad "
                f"or cut it to a multiple of {parts}."
            )

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    jax.tree_util.tree_map_with_path(check, batch)
    return jax.tree.map(put, batch)
