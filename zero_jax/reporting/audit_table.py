"""The tables that an audit prints: collectives, alike ones in one row, and the sums of a step.

Text only; the numbers are `hlo.Audit`'s.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING

from .tables import aligned, bytes_text

if TYPE_CHECKING:
    from .hlo import Audit

_HEADER = ("collective", "axes", "devices", "dtype", "spelling", "times", "sent per step",
           "matmul meanwhile", "exposed")  # fmt: skip


def collectives_table(audit: "Audit") -> list[str]:
    """A row for alike collectives, most bytes first; the last column only where there are timings.

    "times" is how many there are, and "x 12" that each is in a loop of 12 trips.
    """
    if not audit.collectives:
        return ["no collectives"]
    alike: dict[Hashable, list[int]] = {}
    for index, c in enumerate(audit.collectives):
        loop = (c.in_loop, c.trips, c.trips_known)
        key = (c.kind, c.axes, c.group_size, c.dtype, c.spelling, loop)
        alike.setdefault(key, []).append(index)

    def total(indices: list[int]) -> int:
        return sum(audit.collectives[i].total_bytes for i in indices)

    rows = [_row(audit, indices) for indices in sorted(alike.values(), key=total, reverse=True)]
    shown = slice(0, len(_HEADER) if audit.timings else -1)
    return aligned([row[shown] for row in (_HEADER, *rows)], right={2, 5, 6, 7, 8})


def sums_table(audit: "Audit") -> list[str]:
    """Bytes by kind and in all, memory, seconds, and what the numbers leave out."""
    rows = [(kind, bytes_text(count)) for kind, count in sorted(audit.bytes_by_kind.items())]
    rows.append(("sent by one device in a step", bytes_text(audit.bytes_on_wire)))
    rows.append(("its matrix products", f"{audit.matmul_flops / 1e9:,.1f} GFLOP"))
    if audit.memory:
        rows.append(("device memory at the peak", bytes_text(audit.memory.peak_bytes)))
        if audit.memory.host_peak_bytes:
            rows.append(("host memory at the peak", bytes_text(audit.memory.host_peak_bytes)))
    if audit.transfer_seconds is not None and audit.exposed_seconds is not None:
        rows.append(("transfers", _milliseconds(audit.transfer_seconds)))
        rows.append(("of them exposed", _milliseconds(audit.exposed_seconds)))
    lines = aligned(rows, right={1})
    if not all(c.trips_known for c in audit.collectives):
        lines.append("times with ?: a loop does not tell its trips and is counted once")
    return lines


def _row(audit: "Audit", indices: list[int]) -> tuple[str, ...]:
    alike = [audit.collectives[i] for i in indices]
    first = alike[0]
    times = f"{len(alike)} x {first.trips}" if first.in_loop else str(len(alike))
    flops = sum(c.matmul_flops * c.trips for c in alike)
    exposed = sum(audit.timings[i].exposed_seconds for i in indices) if audit.timings else 0.0
    return (
        first.kind,
        "?" if first.axes is None else ",".join(first.axes) or "-",
        str(first.group_size),
        first.dtype,
        first.spelling,
        times if first.trips_known else times + "?",
        bytes_text(sum(c.total_bytes for c in alike)),
        f"{flops / 1e9:,.1f} GFLOP" if flops else "-",
        _milliseconds(exposed * first.trips),
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
