"""Figures of a training run: its losses, and what a device holds at each ZeRO stage.

The only file that imports matplotlib. Figures are built without pyplot, so nothing global is set,
no window opens and none has to be closed: `figure.savefig(path)` draws without a display.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
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
