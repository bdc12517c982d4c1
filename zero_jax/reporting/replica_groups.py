"""Which devices meet in a collective, and which mesh axes those groups span.

A device is a position in the executable's device list, which is `mesh.devices.flat` of the mesh
that the step was compiled for, not `Device.id`. Groups are printed in four spellings:

  {{0,1},{2,3}}                                  a list; {} means all devices
  [4,2]<=[8]    [2,4]<=[4,2]T(1,0)               an iota, transposed or not: [groups, size]
  mesh['a'=2,'b'=4] {'b'}                        axes of a mesh, `'b':(2)2` part of one: of four
                                                 devices the 2 after a major part of 2
  mesh['a'=8], device_ids=([2,4]T(1,0)) {'a'}    the same over devices in another order

The meshes in the text are the compiler's own (axis_0, ...), so names are not believed: groups are
compared with those of the user's mesh. Source: openxla/xla `replica_group.h`, `mesh_and_axis.h`.
"""

import re
from functools import lru_cache
from itertools import combinations

import numpy as np
from jax.sharding import Mesh

from .hlo_text import Instruction, Module

Groups = tuple[tuple[int, ...], ...]

_JOINED = ("all-gather", "all-reduce", "reduce-scatter")


def replica_groups(instruction: Instruction, module: Module) -> Groups:
    """The groups of device positions that communicate with each other.

    Raises:
      ValueError: a spelling that is not known.
    """
    everyone = (tuple(range(module.devices)),)
    text = instruction.attribute("replica_groups") or "{}"
    # With a channel and without global ids, ids are replicas and each brings all its partitions.
    by_replica = instruction.attribute("channel_id") and (
        instruction.attribute("use_global_device_ids") != "true"
    )
    if text == "{}" or (
        by_replica and module.replicas == 1 and instruction.opcode.startswith(_JOINED)
    ):
        return everyone
    return parse_groups(text)


def source_target_pairs(instruction: Instruction) -> Groups:
    """The (source, target) pairs of a collective-permute that move data to another device."""
    pairs = parse_groups(instruction.attribute("source_target_pairs") or "{}")
    return tuple(pair for pair in pairs if pair[0] != pair[1])


@lru_cache(maxsize=256)
def parse_groups(text: str) -> Groups:
    """Read groups in any spelling.

    Raises:
      ValueError: a spelling that is not known.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)")
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=4] {'b':(2)2}")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """
    if text.startswith("{"):
        found = re.findall(r"\{([\d,\s]*)\}", text)
        return tuple(tuple(_numbers(group)) for group in found if group)
    iota = re.fullmatch(r"\[([\d,]+)\]<=(\[.*)", text)
    if iota:
        return _rows(_iota(iota[2]).reshape(_numbers(iota[1])))
    meshed = re.fullmatch(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    if meshed:
        return _mesh_groups(*meshed.groups())
    raise ValueError(
        f"replica_groups={text[:80]!r} is not a spelling that is known ({{{{0,1}}}}, [1,2]<=[2], "
        "mesh['a'=2] {'a'}); the XLA that printed it is newer than this reader."
    )


def spanned_axes(groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of `mesh` that the groups span, None if they are no axes' groups.

    The fewest axes are named, so none of size 1; groups of one device span ().
    """
    wanted = {frozenset(group) for group in groups}
    size = max(map(len, wanted))
    positions = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    for count in range(positions.ndim + 1):
        for chosen in combinations(range(positions.ndim), count):
            if np.prod([positions.shape[i] for i in chosen]) != size:
                continue
            rows = _rows(_grouped(positions, chosen))
            if {frozenset(row) for row in rows} == wanted:
                return tuple(mesh.axis_names[i] for i in chosen)
    return None


def moved_axes(pairs: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` along which the pairs of a collective-permute move data."""
    if not pairs:
        return ()
    places = np.stack(np.unravel_index(np.asarray(pairs), tuple(mesh.shape.values())))
    moved = (places[..., 0] != places[..., 1]).any(axis=1)
    return tuple(name for name, moves in zip(mesh.axis_names, moved, strict=True) if moves)


def linked_size(pairs: Groups) -> int:
    """Devices in the largest ring or chain that pairs of a collective-permute form."""
    group = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        joined = group[source] | group[target]
        group.update(dict.fromkeys(joined, joined))
    return max(map(len, group.values()), default=1)


def _mesh_groups(axes: str, device_ids: str | None, used: str) -> Groups:
    """Split every axis where a part of it begins or ends, then gather the parts that are used."""
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)]
    parts = [
        (name, int(before or 1), int(size) if size else dict(sizes)[name])
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used)
    ]
    dims: list[int] = []
    where: dict[tuple[str, int], int] = {}
    for name, size in sizes:
        ends = {e for n, before, s in parts if n == name for e in (before, before * s)}
        cuts = sorted(ends | {1, size})
        for start, end in zip(cuts, cuts[1:], strict=False):
            where[name, start] = len(dims)
            dims.append(end // start)
    chosen = tuple(
        dim
        for name, before, size in parts
        for (axis, start), dim in where.items()
        if axis == name and before <= start < before * size
    )
    ids = _iota(device_ids) if device_ids else np.arange(np.prod(dims, dtype=int))
    return _rows(_grouped(ids.reshape(dims), chosen))


def _iota(text: str) -> np.ndarray:
    """Ids in order, `[2,4]` or `[2,4]T(1,0)`, or as a list `0,2,1,3`; flat."""
    found = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        return np.array(_numbers(text))
    shape = _numbers(found[1])
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(found[2])).reshape(-1) if found[2] else ids.reshape(-1)


def _grouped(positions: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """A row per group: `dims` vary in the row, the others from row to row."""
    others = tuple(d for d in range(positions.ndim) if d not in dims)
    size = int(np.prod([positions.shape[d] for d in dims], dtype=int))
    return positions.transpose(others + dims).reshape(-1, size)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in ids)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
