"""What the table, the figure and the page of a plan have in common: its words, and one scale.

The records are `zero_jax.planning`'s (`fit.Plan`, `forecast.Forecast`); they are read here, not
computed. Text is plain, so that a log reads as a terminal does.

Not here: colours and columns (`plan_table`), figures (`plots`), HTML (`page`).
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from .tables import bytes_text

if TYPE_CHECKING:
    from ..planning.fit import Plan
    from ..planning.forecast import Compiled, Forecast

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "params_bytes": "parameters",
        "grads_bytes": "gradients",
        "optimizer_bytes": "optimizer state",
        "other_bytes": "other state",
        "temporaries_bytes": "activations and temporaries",
    }
)
"""Fields of a `Forecast` whose sum is its predicted peak, in the order they are stacked."""

CUT_ABOVE = 3
"""A bar of more than so many device memories is cut off, where another one is not."""

LINE_WITHIN = 8
"""Device memory of more than so many of the longest bar is not drawn, where all of them fit."""


def candidates(plan: "Plan") -> list["Forecast"]:
    """The forecasts that were asked for, then the advised one where it is none of them."""
    advised = plan.smallest_change
    if advised is None or any(advised.choice == f.choice for f in plan.forecasts):
        return [*plan.forecasts]
    return [*plan.forecasts, advised]


def any_compiled(plan: "Plan") -> bool:
    """Whether the compiler was asked about some candidate."""
    return any(forecast.compiled is not None for forecast in candidates(plan))


def host_cells(plan: "Plan") -> dict[str, Callable[["Forecast"], str]]:
    """Heading, in two lines -> bytes that do not lie on the device; what no candidate has is left
    out."""
    cells = {
        "on the\nhost": lambda f: bytes_text(f.host_bytes),
        "on its host,\nby a process": lambda f: bytes_text(f.process_host_bytes),
        "on the host,\ncompiled": compiled_cell(lambda c: bytes_text(c.host_bytes)),
        "on\ndisk": lambda f: bytes_text(f.disk_bytes),
    }
    shown = candidates(plan)
    host = any(f.host_bytes for f in shown)
    many = any(f.devices_per_process > 1 for f in shown)
    wanted = (host, host and many, host and any_compiled(plan), any(f.disk_bytes for f in shown))
    return {name: cell for (name, cell), want in zip(cells.items(), wanted, strict=True) if want}


def link_cells(plan: "Plan") -> dict[str, Callable[["Forecast"], str]]:
    """Heading, in two lines -> what passes between device and host; {} where nothing does."""
    if not any(f.from_host_bytes or f.to_host_bytes for f in candidates(plan)):
        return {}
    return {
        "from the\nhost": lambda f: bytes_text(f.from_host_bytes),
        "to the\nhost": lambda f: bytes_text(f.to_host_bytes),
        "link to\nthe host": lambda f: seconds_text(f.host_seconds),
    }


def offload_text(forecast: "Forecast") -> str:
    """What of a candidate lies off the device, "-" for nothing."""
    return {"none": "-", "optimizer": "optimizer"}.get(forecast.choice.offload, "optimizer, params")


def compiled_cell(cell: Callable[["Compiled"], str]) -> Callable[["Forecast"], str]:
    """What `cell` says of the compiler's word on a candidate; a dash where it was not asked."""
    return lambda forecast: "-" if forecast.compiled is None else cell(forecast.compiled)


def verdict_text(plan: "Plan", forecast: "Forecast") -> str:
    """Say whether a candidate fits, what it lacks if not, and whether it is the advised one."""
    if forecast.refusal and not forecast.missing_bytes:
        return "refused by the compiler"
    if not forecast.fits:
        return f"short of {bytes_text(forecast.missing_bytes)}"
    advised = plan.smallest_change
    return "fits, advised" if advised and advised.choice == forecast.choice else "fits"


def sizes_text(forecast: "Forecast") -> str:
    """The predicted peak, and the compiler's where there is one: "75.4 GiB (compiled 70.2 GiB)"."""
    predicted = bytes_text(forecast.peak_bytes)
    if forecast.compiled is None:
        return predicted
    return f"{predicted} (compiled {bytes_text(forecast.compiled.peak_bytes)})"


def place_text(plan: "Plan") -> str:
    """Name program and machine: "gpt_13b on h100:8 (8 devices with 79.1 GiB each)"."""
    devices, memory = plan.forecasts[0].devices, bytes_text(plan.memory_bytes)
    many = f"{devices:,} devices with {memory} each" if devices > 1 else f"1 device with {memory}"
    return f"{plan.program} on {plan.topology} ({many})"


def share_text(count: int, memory_bytes: int) -> str:
    """A byte count as percent of a device's memory.

    >>> share_text(3, 4)
    '75.0%'
    """
    percent = 100 * count / memory_bytes
    return f"{percent:.1f}%" if percent < 1000 else f"{percent:,.0f}%"


def seconds_text(seconds: float) -> str:
    """Seconds as a person reads them: three significant digits; "-" for NaN, which is no figure.

    >>> seconds_text(0.0123), seconds_text(75), seconds_text(float("nan"))
    ('12.3 ms', '75.0 s', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    rounds_to_one = (u for u in units if seconds >= 0.9995 * u[1])
    unit, size = next(rounds_to_one, units[-1])
    value = seconds / size
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def exposed_seconds(forecast: "Forecast") -> float:
    """Predicted transfer time that no computing covers, when all that can be hidden is."""
    seconds = forecast.transfer_seconds - forecast.compute_seconds
    return 0.0 if seconds < 0 else seconds  # not `max`, which would make 0 of NaN


def sent_text(record: "Forecast | Compiled", kind: str) -> str:
    """Bytes that one kind of collective sends in a step, "-" for none."""
    count = record.wire_bytes_by_kind.get(kind, 0)
    return bytes_text(count) if count else "-"


def kinds(plan: "Plan") -> list[str]:
    """Kinds of collectives that any candidate sends, predicted or compiled, alphabetically."""
    records = [r for f in candidates(plan) for r in (f, f.compiled) if r is not None]
    return sorted({kind for r in records for kind, n in r.wire_bytes_by_kind.items() if n})


def scale_end_bytes(plan: "Plan") -> int:
    """Where the scale of the stacks ends, so that candidates near the device's memory are seen.

    The longest bar or compiler's peak that is not cut off, and device memory, unless all fit so
    easily that their bars would vanish beside it.
    """
    shown = candidates(plan)
    peaks = [forecast.peak_bytes for forecast in shown]
    peaks += [f.compiled.peak_bytes for f in shown if f.compiled is not None]
    memory = plan.memory_bytes
    end = max([peak for peak in peaks if peak <= CUT_ABOVE * memory] or peaks)
    if memory <= LINE_WITHIN * end or not all(forecast.fits for forecast in shown):
        end = max(end, memory)
    return max(end, 1)
