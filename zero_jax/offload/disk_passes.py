"""How the streams of an update pass when its state lies in files: in what pieces, from where.

A stream (`grouping`) is a parameter with its moments and its master copy. Of its arrays some are
read from files piece by piece; its gradient and its parameter are in memory, of the device or the
host, and are given whole.

Not here: the pass itself (`disk_update`).
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from ..reporting.tables import bytes_text
from .boxes import Boxes, ragged_box
from .dataflow import Name
from .grouping import Stream, Update, find_streams, scalars_of, why_whole

ON_THE_WAY = 4
"""Pieces of one stream in host memory."""


@dataclass(frozen=True)
class Pass:
    """One stream on its way.

    Attributes:
      stream: what computes it.
      boxes: its pieces.
      files: positions of inputs that are read from files.
      reads, replaces: positions of inputs in memory: of those that are only read, and of those that
        are replaced.
      numbers: scalars that it needs.
      shared: those of them that other streams need, too, or outputs of none.
      filed: positions of outputs that are written to files; parameters without a master copy, too.
    """

    stream: Stream
    boxes: Boxes
    files: tuple[int, ...]
    reads: tuple[int, ...]
    replaces: tuple[int, ...]
    numbers: tuple[Name, ...]
    shared: tuple[Name, ...]
    filed: tuple[int, ...]


def piece_bytes(buffer_bytes: int, mesh: Mesh) -> int:
    """Of a piece on one device, so that the host memory of this process holds those on the way."""
    return buffer_bytes // ON_THE_WAY // len(mesh.local_devices)


def find_passes(
    update: Update,
    filed: Sequence[int],
    buffer_bytes: int,
    boxes: Mapping[int, Boxes] | None = None,
) -> list[Pass]:
    """Take an update apart.

    Args:
      update: traced; inputs in files have placements that say so.
      filed: positions of outputs in memory that are written to files, too.
      buffer_bytes: host memory of this process for pieces.
      boxes: position of an input in files -> its pieces, where they are there already.

    Raises:
      ValueError: the optimizer needs the state of several parameters at once, or a leaf that has to
        pass whole is too large for the buffer.
    """
    mesh = update.outputs[0].place.mesh
    devices, most_bytes = len(mesh.local_devices), piece_bytes(buffer_bytes, mesh)
    streams = find_streams(update, sys.maxsize if boxes else most_bytes, ragged_box)
    if boxes:
        first = [next((boxes[at] for at in s.fetches if at in boxes), None) for s in streams]
        pairs = zip(streams, first, strict=True)
        streams = [replace(s, box=b.box if b and b.count > 1 else None) for s, b in pairs]
    for s in streams:
        if s.box is None and not boxes and s.fetched_bytes > most_bytes:
            name, why = why_whole(update, s)
            needed = s.fetched_bytes * devices * ON_THE_WAY
            raise ValueError(
                f"offload: buffer_bytes={buffer_bytes}: {name} and what belongs to it pass whole, "
                f"since {why}, and {ON_THE_WAY} pieces of {bytes_text(s.fetched_bytes)} on each of "
                f"{devices} devices take {needed} bytes; expected {needed - buffer_bytes} more."
            )
    passes = [_pass(update, s, filed) for s in _packed(update, streams, most_bytes)]
    replaced = {position: at for at, p in enumerate(passes) for position in p.replaces}
    for at, one in enumerate(passes):
        for position in (*one.reads, *one.replaces):
            if replaced.get(position, at) != at:
                place = update.inputs[position].place
                raise ValueError(
                    f"offload: the optimizer computes several parameters from "
                    f"{place.tree}/{place.leaf.path}, so that it cannot pass leaf by leaf. Keep "
                    "its state on the device or the host (HostMemory)."
                )
    graph, written = update.graph, {w for p in passes for w in p.stream.writes}
    rest = [name for at, name in enumerate(graph.outputs) if at not in written]
    counts = Counter(name for p in passes for name in p.numbers)
    counts.update(graph.part(rest, scalars_of(update)).inputs)
    return [replace(p, shared=tuple(n for n in p.numbers if counts[n] > 1)) for p in passes]


def _packed(update: Update, streams: Sequence[Stream], most_bytes: int) -> list[Stream]:
    """The streams, small ones that pass whole joined into one."""
    graph, scalars = update.graph, scalars_of(update)
    packed: list[Stream] = []
    for s in streams:
        last = packed[-1] if packed else s
        fits = last.fetched_bytes + s.fetched_bytes <= most_bytes
        if not packed or last.box or s.box or not fits:
            packed.append(s)
            continue
        writes = (*last.writes, *s.writes)
        packed[-1] = Stream(
            graph.part([graph.outputs[at] for at in writes], scalars),
            (*last.fetches, *s.fetches),
            writes,
            None,
            last.fetched_bytes + s.fetched_bytes,
        )
    return packed


def _pass(update: Update, s: Stream, filed: Sequence[int]) -> Pass:
    graph, inputs, outputs = update.graph, update.inputs, update.outputs
    needed = {at for at, name in enumerate(graph.inputs) if name in s.part.inputs}
    replaced = {at for at in (outputs[w].replaces for w in s.writes) if at is not None}
    files = {at for at in needed | replaced if inputs[at].place.memory == "disk"}
    scalar = {at for at in needed if inputs[at].place.leaf.shape == ()} - replaced
    names = {*s.part.inputs - set(graph.inputs), *(graph.inputs[at] for at in scalar)}
    rest_shape = inputs[min(files or s.fetches)].place.partition.rest_shape
    return Pass(
        s,
        Boxes(rest_shape, s.box or rest_shape),
        tuple(sorted(files)),
        tuple(sorted(needed - files - scalar - replaced)),
        tuple(sorted(replaced - files)),
        tuple(sorted(names)),
        (),
        tuple(w for w in s.writes if outputs[w].place.memory == "disk" or w in filed),
    )
