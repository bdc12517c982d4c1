"""One leaf of a training state, and where it lies: at rest between steps, in flight within one.

A `Placement` joins what is known of a leaf (`Leaf`) with how it is cut (`partition`) and the mesh,
and answers with shardings and bytes. On a refined mesh (`mesh.refine`) it spells the data axis as
the prime axes that the cut uses.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .mesh import axes_of_size, data_axes, is_explicit
from .partition import Partition, trimmed

TreeName = Literal["params", "grads", "opt_state", "other"]
Memory = Literal["device", "pinned_host", "disk"]


@dataclass(frozen=True)
class Leaf:
    """What the layout needs to know of one leaf.

    Attributes:
      path: keys from the root of its tree, joined by "/".
      shape: logical shape.
      dtype: dtype at rest.
      weak_type: whether the leaf is a Python scalar's array.
      held: spec of the partition it already has on axes other than the data axis.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    held: tuple[object, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where one leaf lies: `rest` between steps, `flight` inside the optimizer's update.

    `memory` says where it rests: on the device, in the host's memory, in files; in flight it is on
    the device.

    At rest a leaf may be padded or flattened (`partition.rest_shape`); in flight it has its logical
    `shape`, so that padding never reaches a norm, a factored mean or a mask.
    """

    tree: TreeName
    leaf: Leaf
    partition: Partition
    mesh: Mesh = field(repr=False)
    axis: str = field(repr=False)
    memory: Memory = "device"

    @property
    def on_host(self) -> bool:
        """Whether the leaf lies in host memory between steps."""
        return self.memory == "pinned_host"

    @property
    def is_away(self) -> bool:
        """Whether the leaf has to be fetched before the device can compute with it."""
        return self.memory != "device"

    @cached_property
    def rest(self) -> NamedSharding:
        """Sharding of the array between steps."""
        return self.landing.with_memory_kind(self.memory) if self.on_host else self.landing

    @cached_property
    def landing(self) -> NamedSharding:
        """Sharding of the array at rest once it is on the device."""
        return self._sharding(self.partition.spec, len(self.partition.rest_shape))

    @cached_property
    def flight(self) -> NamedSharding:
        """Sharding of the logical array inside the update; uneven for a padded leaf."""
        uneven = self.partition.form == "padded"
        if self.partition.form == "flat" or (uneven and is_explicit(self.mesh)):
            return self.gathered
        return self.landing

    @cached_property
    def gathered(self) -> NamedSharding:
        """Sharding of the leaf gathered over the data axis."""
        spec = self.leaf.held if self.partition.form == "flat" else self.partition.spec
        return self._sharding(without_axis(spec, self.axis), len(self.leaf.shape))

    def _sharding(self, spec: Iterable[object], ndim: int) -> NamedSharding:
        axes = axes_of_size(self.mesh, data_axes(self.mesh, self.axis), self.partition.parts)

        def named(entry: object) -> object:
            names = entry if isinstance(entry, tuple) else (entry,)
            if self.axis not in names or axes == (self.axis,):
                return entry
            at = names.index(self.axis)
            named = names[:at] + axes + names[at + 1 :]
            return named[0] if len(named) == 1 else named

        # Explicit types spell a spec to its full length, and the step's outputs have their spelling
        entries = [named(entry) for entry in spec]
        if is_explicit(self.mesh):
            entries += [None] * (ndim - len(entries))
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of this leaf on one device at rest, padding included."""
        if self.leaf.dtype == jax.dtypes.float0:
            return 0
        shard = self.rest.shard_shape(self.partition.rest_shape)
        return math.prod(shard) * self.leaf.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the logical leaf, unpartitioned."""
        return math.prod(self.leaf.shape) * self.leaf.dtype.itemsize


def scalar_placement(dtype: Any, mesh: Mesh, axis: str) -> Placement:
    """A number that every device has, beside the state."""
    partition = Partition("whole", PartitionSpec(), (), None, 1, "scalar")
    return Placement("other", Leaf("", (), dtype), partition, mesh, axis)


def without_axis(spec: Iterable[object], axis: str) -> PartitionSpec:
    """`spec` with `axis` taken out: what stays when the data axis is gathered."""
    kept = []
    for entry in spec:
        names = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a != axis)
        kept.append(None if names in ((), (None,)) else names[0] if len(names) == 1 else names)
    return trimmed(kept)
