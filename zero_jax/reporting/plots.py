"""Figures of a run: its losses, what a device holds at each ZeRO stage, the candidates of a plan.

The only file that imports matplotlib, which is no dependency but comes with the extra `plan`.
Figures are built without pyplot, so nothing global is set, no window opens and none has to be
closed: `figure.savefig(path)` draws without a display.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .plan_words import (
    PARTS,
    candidates,
    place_text,
    scale_end_bytes,
    sizes_text,
    verdict_text,
)
from .tables import bytes_text

try:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "figures are drawn by matplotlib, which is not installed. Run pip install 'zero_jax[plan]'."
    ) from error

if TYPE_CHECKING:
    from ..planning.fit import Plan
    from ..planning.forecast import Forecast

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
PART_COLORS = (*COLORS[:3], "#999999", COLORS[3])
STATES = {"params": "parameters", "grads": "gradients", "opt_state": "optimizer state"}
STAGES = ("replicated", "optimizer state\npartitioned", "and gradients", "and parameters")


def plot_losses(
    curves: Mapping[str, Sequence[tuple[int, float]]], unit: str = "nats per token"
) -> Figure:
    """Draw losses over training steps, a line for each curve, its last value in the legend.

    A curve of 80 points or more is drawn faint, under its running mean over a fortieth of them. Of
    such a curve the first 5 % may lie above the figure, which their fall would otherwise fill.

    Args:
      curves: name -> points (step, loss), steps increasing; at most 4 with points.
      unit: of the losses, for the axis.

    Raises:
      ValueError: no curve has a point.
    """
    drawn = {name: points for name, points in curves.items() if points}
    if not drawn:
        raise ValueError(f"curves {list(curves)} have no points; expected at least one.")
    figure, axes = _figure("training step", f"loss ({unit})")
    tops, bottoms = [], []
    for color, (name, points) in zip(COLORS, drawn.items(), strict=False):
        steps, losses = zip(*points, strict=True)
        many = len(points) >= 80
        shown = _running_mean(losses, len(points) // 40) if many else losses
        label = f"{name}: {shown[-1]:.3f}"
        if many:
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(steps, shown, color=color, label=label)
        else:
            axes.plot(steps, shown, color=color, marker="o", markersize=4, label=label)
        tops.append(max(losses[len(losses) // 20 :] if many else losses))
        bottoms.append(min(losses))
    margin = 0.05 * (max(tops) - min(bottoms)) or 0.1
    axes.set_ylim(min(bottoms) - margin, max(tops) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.legend(frameon=False)
    return figure


def plot_bytes_by_stage(bytes_by_stage: Mapping[int, Mapping[str, int]], devices: int) -> Figure:
    """Draw what one device holds of the model states at each stage, as stacked bars.

    Args:
      bytes_by_stage: stage -> `Layout.bytes_per_device` at that stage; what is not parameters,
        gradients or optimizer state is left out.
      devices: number of devices that the state is partitioned over, for the title.

    Raises:
      ValueError: no stage is given.
    """
    if not bytes_by_stage:
        raise ValueError("bytes_by_stage is empty; expected at least one stage.")
    stages = sorted(bytes_by_stage)
    totals = [sum(bytes_by_stage[stage][state] for state in STATES) for stage in stages]
    unit_bytes, unit = _unit(max(totals))
    figure, axes = _figure("ZeRO stage", f"bytes on one device ({unit})")
    bottoms = [0.0] * len(stages)
    for color, (state, label) in zip(COLORS, STATES.items(), strict=False):
        heights = [bytes_by_stage[stage][state] / unit_bytes for stage in stages]
        axes.bar(range(len(stages)), heights, 0.6, bottoms, color=color, label=label)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for x, (top, total) in enumerate(zip(bottoms, totals, strict=True)):
        share = f"{100 * total / max(totals):.3g}%" if total < max(totals) else ""
        text = f"{top:.3g} {unit}\n{share}".rstrip()
        axes.annotate(text, (x, top), (0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(stages)), [f"{stage}\n{STAGES[stage]}" for stage in stages])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.2 * max(bottoms) or 1)
    axes.set_title(f"model states, partitioned over {devices} devices", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return figure


def plot_plan(plan: "Plan") -> Figure:
    """Draw what one device holds for each candidate of a plan, as stacked horizontal bars.

    Device memory is a line, the compiler's peak a diamond; bars of what does not fit are hatched. A
    bar of several device memories is cut off where others are not. Each bar tells its size.

    Args:
      plan: from `zero_jax.planning.fit`.
    """
    end_bytes, shown = scale_end_bytes(plan), candidates(plan)
    unit_bytes, unit = _unit(end_bytes)
    end = end_bytes / unit_bytes
    figure, axes = _figure(f"predicted peak on one device ({unit})", "")
    figure.set_size_inches(9.5, 1.9 + 0.42 * max(len(shown), 2))
    for y, forecast in enumerate(shown):
        _stack(axes, y, forecast, unit_bytes, end)
        text, beside = f"{sizes_text(forecast)}, {verdict_text(plan, forecast)}", (1.02, y)
        axes.text(*beside, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    _compiled_peaks(axes, shown, unit_bytes, end)
    memory, title = plan.memory_bytes / unit_bytes, place_text(plan)
    if memory <= end:
        label = f"device memory {bytes_text(plan.memory_bytes)}"
        axes.axvline(memory, color="black", linewidth=1.4, linestyle="--", label=label)
    else:
        title += ", more than is drawn"
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.set_yticks(range(len(shown)), [str(forecast.choice) for forecast in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, 1.02 * end)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="0.9")
    figure.legend(*_plan_legend(axes), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _stack(axes: Axes, y: int, forecast: "Forecast", unit_bytes: int, end: float) -> None:
    """One bar: its parts, with their sizes where there is room."""
    left, hatch = 0.0, "" if forecast.fits else "////"
    above = y if forecast.compiled is None else y - 0.14  # the compiler's peak is marked below
    for color, (field, label) in zip(PART_COLORS, PARTS.items(), strict=True):
        part_bytes = getattr(forecast, field)
        width = part_bytes / unit_bytes
        axes.barh(
            y, width, 0.72, left, color=color, label=label, hatch=hatch, edgecolor="white",
            linewidth=0,
        )  # fmt: skip
        seen = min(left + width, end) - left
        if seen >= 0.11 * end:
            ink = "white" if color == COLORS[0] else "black"
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.0}
            text, where = bytes_text(part_bytes), left + 0.01 * end
            axes.text(where, above, text, color=ink, va="center", fontsize=7.5, bbox=box)
        left += width
    if left > end:  # the bar is cut off: an arrow at the edge
        edge = axes.get_yaxis_transform()
        axes.plot(1, y, ">", color="black", markersize=5, transform=edge, clip_on=False)


def _compiled_peaks(axes: Axes, shown: Sequence["Forecast"], unit_bytes: int, end: float) -> None:
    peaks = {
        y + 0.17: forecast.compiled.peak_bytes / unit_bytes
        for y, forecast in enumerate(shown)
        if forecast.compiled is not None
    }
    drawn = {y: peak for y, peak in peaks.items() if peak <= end}
    if drawn:
        axes.plot(
            list(drawn.values()), list(drawn), "D", color="white", markeredgecolor="black",
            markersize=6, zorder=4, label="compiler's peak",
        )  # fmt: skip


def _plan_legend(axes: Axes) -> tuple[list[Artist], list[str]]:
    """Handles and labels, one of each: the parts that some bar shows, hatching, lines, markers."""
    parts: dict[str, Artist] = {}
    marks: dict[str, Artist] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        if not isinstance(handle, BarContainer):
            marks[label] = handle
            continue
        if handle[0].get_width() >= 0.002 * axes.get_xlim()[1]:
            parts[label] = Patch(facecolor=handle[0].get_facecolor())
        if handle[0].get_hatch():
            marks["does not fit"] = Patch(facecolor="0.6", hatch="////", edgecolor="white")
    handles = {label: parts[label] for label in PARTS.values() if label in parts} | marks
    return list(handles.values()), list(handles)


def _figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), dpi=144, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    return figure, axes


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window - 1` before it; of fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(math.fsum(recent) / len(recent))
    return means


def _unit(count: int) -> tuple[int, str]:
    """The binary unit, as bytes and name, in which `count` is at least 1."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(max(count, 1).bit_length() - 1, 10 * len(names) - 1) // 10
    return 1024**power, names[power]
