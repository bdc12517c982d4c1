"""The audit of a compiled step: what crosses the wire, how often, and what hides it.

`collectives` lists every collective of a step with the bytes that one device sends; `audit` adds
them up by kind and mesh axes, with the memory that the compiler planned and, given an accelerator's
rates, the seconds of communication that no matrix product hides. Both need only what
`jit(step).lower(...).compile()` returned, or its text, also where it was compiled for a GPU or TPU
that is not here.

The rooms behind it: `hlo_text` reads the text, `loop_trips` counts loops, `replica_groups` finds
mesh axes, `wire` has the convention of bytes, `rings` and `hlo_walk` the spellings, `matmul_flops`
and `schedule` the overlap; each says what it does not see.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from .audit_table import collectives_table, sums_table
from .hlo_text import Module, parse_module
from .hlo_walk import Found, walk
from .replica_groups import Groups, moved_axes, spanned_axes
from .schedule import (
    Accelerator,
    Event,
    Timing,
    covered_seconds,
    scheduled_flops,
    total_flops,
    transfer_seconds,
)
from .wire import Sent


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled step.

    Attributes:
      kind: all-gather, reduce-scatter, all-reduce, all-to-all, ragged-all-to-all,
        collective-broadcast or collective-permute.
      bytes_on_wire: bytes that one device sends in one execution (convention: `wire`).
      group_size: devices that meet.
      axes: axes of the given mesh that the groups span; None if they are no axes' groups, or no
        mesh was given; () where every device is alone.
      trips: executions in one step, the product over the loops around it.
      trips_known: every loop around it told its trips; one that did not is counted once.
      in_loop: there is a loop around it.
      dtype: element type on the wire, several joined with "+".
      spelling: how the compiler wrote it.
      is_async: it has a start and a done with a schedule between them.
      matmul_flops: operations of the products between start and done, in one execution.
      op_name: what the user's program called it, "" if the compiler does not say.
      name: its instruction.
      groups: positions of the devices that meet; of a permute, its (source, target) pairs.
    """

    kind: str
    bytes_on_wire: int
    group_size: int
    axes: tuple[str, ...] | None
    trips: int
    trips_known: bool
    in_loop: bool
    dtype: str
    spelling: str
    is_async: bool
    matmul_flops: int
    op_name: str
    name: str
    groups: Groups = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return self.bytes_on_wire * self.trips


@dataclass(frozen=True)
class Memory:
    """What the compiler planned on one device, in bytes (`memory_analysis` of the executable)."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_alias_bytes: int
    host_temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most that the device holds: arguments, outputs that reuse none of them, temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The same in the host's memory."""
        host = self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes
        return host + self.host_temp_bytes


@dataclass(frozen=True)
class Audit:
    """Everything that `audit` found.

    Attributes:
      collectives: in order of starting.
      matmul_flops: operations of all matrix products of one device in one step.
      memory: None where only a text was given.
      timings: one per collective, for one execution; None without an accelerator.
    """

    collectives: tuple[Collective, ...]
    matmul_flops: int
    memory: Memory | None
    timings: tuple[Timing, ...] | None

    @property
    def bytes_on_wire(self) -> int:
        """Bytes that one device sends in one step."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that one device sends in one step, by kind of collective."""
        return self._bytes_by(lambda c: c.kind)

    @property
    def bytes_by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...] | None], int]:
        """The same, by kind and mesh axes."""
        return self._bytes_by(lambda c: (c.kind, c.axes))

    @property
    def transfer_seconds(self) -> float | None:
        """Seconds a step's transfers take one after another; None without an accelerator."""
        return self._seconds(lambda t: t.transfer_seconds)

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of them in a step that no product hides; None without an accelerator."""
        return self._seconds(lambda t: t.exposed_seconds)

    def __str__(self) -> str:
        """A table of the collectives, alike ones in one row, largest first; then the sums."""
        return "\n".join([*collectives_table(self), "", *sums_table(self)])

    def _bytes_by(self, key: Callable[[Collective], Any]) -> dict[Any, int]:
        sums: dict[Hashable, int] = {}
        for c in self.collectives:
            sums[key(c)] = sums.get(key(c), 0) + c.total_bytes
        return sums

    def _seconds(self, seconds: Callable[[Timing], float]) -> float | None:
        if self.timings is None:
            return None
        pairs = zip(self.collectives, self.timings, strict=True)
        return sum(seconds(timing) * c.trips for c, timing in pairs)


def collectives(compiled: Any, mesh: Mesh | None = None) -> list[Collective]:
    """List the collectives that one device takes part in during one step.

    Args:
      compiled: a compiled step (`jit(step).lower(...).compile()`) or its text.
      mesh: the mesh that it was compiled for; names the axes of each collective.

    Raises:
      TypeError: `compiled` is neither.
      ValueError: the text is not that of a compiled module, or the mesh has another size.
    """
    module = _module(compiled, mesh)
    found, events = walk(module)
    return list(_records(module, found, events, mesh))


def audit(
    compiled: Any,
    mesh: Mesh | None = None,
    accelerator: Accelerator | None = None,
    devices_per_node: int | None = None,
) -> Audit:
    """Audit a compiled step: collectives, totals, memory, and what of the transfers is exposed.

    Args:
      compiled: a compiled step (`jit(step).lower(...).compile()`) or its text.
      mesh: the mesh that it was compiled for; names the axes of each collective.
      accelerator: rates of one device (`matmul_flops`, `link_bandwidth`, `network_bandwidth`);
        without it no seconds are told.
      devices_per_node: devices of the mesh, in order, that share the links; None means all, as in
        one TPU slice.

    Raises:
      TypeError, ValueError: as `collectives`.
    """
    module = _module(compiled, mesh)
    found, events = walk(module)
    records = _records(module, found, events, mesh)
    memory = None if isinstance(compiled, str) else _memory(compiled)
    if accelerator is None:
        return Audit(records, total_flops(events), memory, None)
    seconds = {
        number: transfer_seconds(
            each.kind, each.sent.bytes, each.sent.groups, accelerator, devices_per_node
        )
        for number, each in found.items()
    }
    schedule = events if module.is_scheduled else []
    covered = covered_seconds(schedule, seconds, accelerator.matmul_flops)
    timings = tuple(Timing(seconds[n], covered.get(n, 0.0)) for n in found)
    return Audit(records, total_flops(events), memory, timings)


def _module(compiled: Any, mesh: Mesh | None) -> Module:
    text = compiled
    if not isinstance(compiled, str):
        if not hasattr(compiled, "as_text"):
            raise TypeError(
                f"compiled is a {type(compiled).__name__}; expected a compiled step or its text. "
                "Pass jax.jit(step).lower(...).compile()."
            )
        text = compiled.as_text()
    module = parse_module(text)
    if mesh is not None and mesh.size != module.devices:
        raise ValueError(
            f"mesh has {mesh.size} devices {dict(mesh.shape)}, but the step was compiled for "
            f"{module.devices}; pass the mesh that it was compiled for."
        )
    return module


def _records(
    module: Module, found: dict[int, Found], events: list[Event], mesh: Mesh | None
) -> tuple[Collective, ...]:
    """What was found, with mesh axes and the products between start and done."""
    flops = scheduled_flops(events) if module.is_scheduled else {}
    # Alike collectives are many; each is compared with the mesh once.
    axes = {what: _axes(what, mesh) for what in {each.sent for each in found.values()}}
    return tuple(
        Collective(
            kind=each.kind,
            bytes_on_wire=each.sent.bytes,
            group_size=each.sent.group_size,
            axes=axes[each.sent],
            trips=each.repeat.trips,
            trips_known=each.repeat.known,
            in_loop=each.repeat.in_loop,
            dtype=each.sent.dtype,
            spelling=each.spelling,
            is_async=each.is_async,
            matmul_flops=flops.get(number, 0),
            op_name=each.op_name,
            name=each.name,
            groups=each.sent.groups,
        )
        for number, each in found.items()
    )


def _axes(what: Sent, mesh: Mesh | None) -> tuple[str, ...] | None:
    if mesh is None:
        return None
    return (moved_axes if what.is_permute else spanned_axes)(what.groups, mesh)


def _memory(compiled: Any) -> Memory | None:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    names = ("argument", "output", "alias", "temp")
    device = [int(getattr(analysis, f"{name}_size_in_bytes")) for name in names]
    host = [int(getattr(analysis, f"host_{name}_size_in_bytes", 0)) for name in names]
    return Memory(*device, *host)
