"""A leaf in files, and its pieces on their way.

A leaf is cut into pieces along one dim that no device axis cuts, so that every device has its part
of each; a file holds one device's part of one piece, once for devices that have the same. In the
training state such a leaf is a `DiskArray`: it knows shape, dtype and sharding, and can be loaded.

Not here: which dim (`boxes.box_of`), when a piece moves (`disk_update`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from ..placement import Placement
from .boxes import Boxes
from .disk import Disk, Filed

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False, repr=False)
class DiskArray:
    """A leaf of a training state that lies in files; no argument of a jitted function.

    Attributes:
      disk: the directory.
      placement: where the leaf lies once it is on the devices.
      boxes: its pieces.
      version: of the state that it belongs to; a step that goes on from there makes it stale, as
        donation does with an array.
    """

    disk: Disk
    placement: Placement
    boxes: Boxes
    version: int

    def __repr__(self) -> str:
        what = f"{name_of(self.placement)}, shape={self.shape}, dtype={self.dtype}"
        return f"DiskArray({what}, after {self.version} steps)"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array at rest, padding included."""
        return self.placement.partition.rest_shape

    @property
    def dtype(self) -> Any:
        """At rest."""
        return self.placement.leaf.dtype

    @property
    def sharding(self) -> NamedSharding:
        """Of the array once it is on the devices."""
        return self.placement.landing

    def describe(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype, for what is traced without it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def is_deleted(self) -> bool:
        """Whether a later step has taken its files."""
        return self.version != self.disk.version

    def check(self) -> None:
        """Raise a RuntimeError if a later step has taken its files."""
        if self.is_deleted():
            raise RuntimeError(
                f"state: {name_of(self.placement)} is of the state after {self.version} steps, and "
                f"{self.disk.path} holds the one after {self.disk.version}; pass the state that "
                "the last step returned."
            )

    def pieces(self) -> Iterator[tuple[Index, np.ndarray]]:
        """What this process's devices are the first to have: boxes of the array at rest.

        Raises:
          RuntimeError, OSError: as for `load`.
        """
        self.check()
        for at, start in _first_owned(self.placement):
            for i in range(self.boxes.count):
                where = _where(self.placement, self.boxes, i)
                piece = self.disk.arrived(
                    self.disk.read(_filed(self.placement, self.boxes, at), where)
                )
                pairs = zip(start, where, strict=True)
                yield tuple(slice(o + s.start, o + s.stop) for o, s in pairs), piece

    def load(self) -> jax.Array:
        """The leaf at rest, whole, on its devices; the host holds this process's part meanwhile.

        Raises:
          RuntimeError: a later step has taken its files.
          OSError: a file cannot be read.
        """
        self.check()
        return load(self.disk, self.placement, self.boxes)


def name_of(placement: Placement) -> str:
    """The name of a leaf: its tree and its path."""
    return f"{placement.tree}/{placement.leaf.path or 'value'}"


def looks(place: Placement, boxes: Boxes) -> dict[str, Any]:
    """What the files of a leaf look like, for JSON."""
    part = place.landing.shard_shape(place.partition.rest_shape)
    return {
        "shape": list(place.leaf.shape),
        "dtype": str(place.leaf.dtype),
        "part": list(part),
        "piece": list(boxes.own(place.partition.rest_shape)),
    }


def start_reading(disk: Disk, place: Placement, boxes: Boxes, i: int) -> list[tuple[Any, Any]]:
    """Start to read piece `i` of a leaf; give what comes back to `arrive`."""
    where = _where(place, boxes, i)
    return [
        (devices, disk.read(_filed(place, boxes, at), where))
        for at, devices in _owners(place).items()
    ]


def arrive(disk: Disk, place: Placement, boxes: Boxes, i: int, reading: list[Any]) -> jax.Array:
    """Wait for a piece and put it on its devices."""
    parts = []
    for devices, each in reading:
        part = disk.arrived(each)
        parts += [jax.device_put(part, device) for device in devices]
    whole = boxes.own(place.partition.rest_shape, i)
    return jax.make_array_from_single_device_arrays(whole, place.landing, parts)


def write_piece(disk: Disk, place: Placement, boxes: Boxes, i: int, piece: jax.Array) -> None:
    """Write piece `i` of a leaf from its devices."""
    disk.contents[name_of(place)] = looks(place, boxes)
    where, written = _where(place, boxes, i), set()
    for shard in piece.addressable_shards:
        filed = _filed(place, boxes, _starts(shard.index))
        if filed not in written:
            written.add(filed)
            disk.write(filed, where, np.asarray(shard.data))


def write(disk: Disk, place: Placement, boxes: Boxes, array: jax.Array) -> None:
    """Write a leaf at rest, piece by piece."""
    for i, piece in enumerate(_pieces(array, boxes)):
        write_piece(disk, place, boxes, i, piece)


def load(disk: Disk, place: Placement, boxes: Boxes) -> jax.Array:
    """Read a leaf at rest."""
    rest_shape = place.partition.rest_shape
    parts = []
    for at, devices in _owners(place).items():
        part = np.empty(place.landing.shard_shape(rest_shape), place.leaf.dtype)
        for i in range(boxes.count):
            where = _where(place, boxes, i)
            part[where] = disk.arrived(disk.read(_filed(place, boxes, at), where))
        parts += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(rest_shape, place.landing, parts)


def _pieces(array: jax.Array, boxes: Boxes) -> Iterator[jax.Array]:
    if boxes.count == 1:
        yield array
        return
    cut = jax.jit(lax.dynamic_slice, static_argnums=2, out_shardings=array.sharding)
    for i in range(boxes.count):
        yield cut(array, boxes.corner(i), boxes.own(array.shape, i))


def _where(place: Placement, boxes: Boxes, i: int) -> tuple[slice, ...]:
    """Where piece `i` lies in a device's part of the leaf."""
    shape = place.landing.shard_shape(boxes.own(place.partition.rest_shape, i))
    starts = [0] * len(shape) if boxes.dim is None else boxes.corner(i)
    return tuple(slice(s, s + size) for s, size in zip(starts, shape, strict=True))


def _owners(place: Placement) -> dict[str, list[Any]]:
    """Which of this process's devices have a part, by where it starts."""
    owners: dict[str, list[Any]] = {}
    shape = place.partition.rest_shape
    for device, index in place.landing.addressable_devices_indices_map(shape).items():
        owners.setdefault(_starts(index), []).append(device)
    return owners


def _first_owned(place: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """Parts whose first device is of this process, and where they start."""
    seen, mine = set(), []
    shape = place.partition.rest_shape
    for device, index in place.landing.devices_indices_map(shape).items():
        at = _starts(index)
        if at not in seen and device.process_index == jax.process_index():
            mine.append((at, tuple(s.start or 0 for s in index)))
        seen.add(at)
    return mine


def _starts(index: Index | None) -> str:
    """Where a device's part starts; "0" for a scalar."""
    return "-".join(str(s.start or 0) for s in index or ()) or "0"


def _filed(place: Placement, boxes: Boxes, starts: str) -> Filed:
    """A part of a leaf in files."""
    rest_shape, cut = place.partition.rest_shape, place.landing
    chunk = cut.shard_shape(boxes.own(rest_shape))
    dtype = np.dtype(place.leaf.dtype)
    return Filed(f"{name_of(place)}/{starts}", cut.shard_shape(rest_shape), chunk, dtype)
