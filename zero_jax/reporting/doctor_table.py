"""What `zero-jax doctor` prints of its findings.

Not here: finding them (`zero_jax.planning.doctor`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plan_words import seconds_text
from .tables import bytes_text

if TYPE_CHECKING:
    from ..planning.doctor import Bandwidth, DevicesFound, Findings, MemoryFound


def doctor_table(findings: "Findings") -> RenderableType:
    """Lay out findings for a terminal: a small table under each heading, notes last.

    Args:
      findings: from `zero_jax.planning.doctor.examine`.
    """
    mesh = ", ".join(f"{axis}={size}" for axis, size in findings.mesh.items())
    sections = {
        "versions": _versions(findings.versions),
        "devices": _rows(
            {
                **_devices(findings.devices),
                "default mesh": mesh,
                **_memory(findings.memory),
            }
        ),
        "can be compiled for here": _targets(findings.targets),
        "measured all-gather": _bandwidth(findings),
        "notes": [("", Text(note)) for note in findings.notes],
    }
    blocks: list[RenderableType] = []
    for heading, rows in sections.items():
        if rows:
            blocks += [Text(heading, style="bold"), _table(rows), Text()]
    return Group(*blocks[:-1])


def _table(rows: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row("", Text(name), value)
    return table


def _rows(values: Mapping[str, str]) -> list[tuple[str, Text]]:
    return [(name, Text(value)) for name, value in values.items()]


def _versions(versions: Mapping[str, str | None]) -> list[tuple[str, Text]]:
    absent = {"zero_jax": "not installed: this is a copy of its sources"}
    return _rows({k: v or absent.get(k, "not installed") for k, v in versions.items()})


def _devices(found: "DevicesFound") -> dict[str, str]:
    kinds = " and ".join(found.kinds)
    in_all = f"{found.count} x {kinds}"
    in_all += "" if kinds == found.platform else f" ({found.platform})"
    if found.processes == 1:
        return {"devices": in_all, "processes": "1"}
    return {"devices": in_all, "processes": f"{found.processes}; this one has {found.local_count}"}


def _memory(found: "MemoryFound") -> dict[str, str]:
    limit = "the platform does not tell" if found.limit_bytes is None else None
    return {
        "memory kinds": ", ".join(found.kinds),
        "memory that JAX may take": limit or f"{bytes_text(found.limit_bytes or 0)} a device",
    }


def _targets(targets: Mapping[str, str]) -> list[tuple[str, Text]]:
    return [
        (platform, Text("yes", style="green") if word == "ok" else Text(f"no: {word}"))
        for platform, word in targets.items()
    ]


def _bandwidth(findings: "Findings") -> list[tuple[str, Text]]:
    measured: Bandwidth | None = findings.bandwidth
    if measured is None:
        return [("", Text("nothing to measure: this process has one device"))]
    speed = f"{measured.bytes_per_second / 1e9:.3g} GB/s sent by each of {measured.devices} devices"
    return _rows(
        {
            "bandwidth": speed,
            "message": f"{bytes_text(measured.message_bytes)} in "
            f"{seconds_text(measured.seconds)}; 4 bytes a device in "
            f"{seconds_text(measured.latency_seconds)}",
        }
    )
