"""What a stage promised and a state does not give: said once, with leaves and bytes.

Silence is how a flag that does nothing stays in a training script. A stage that cuts nothing, or
leaves more than half of a tree on every device, is a `ZeroWarning` that names the largest such
leaves. Single small leaves that stay whole are in the layout's table.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from .layout import Layout
from .partition import RULED
from .placement import Placement
from .reporting.tables import bytes_text
from .stage import Stage


class ZeroWarning(UserWarning):
    """A stage, rule or precision that does less than its name says."""


def warn_if_short(layout: Layout) -> None:
    """Warn about trees that the stage partitions in name only.

    Warns:
      ZeroWarning: the data axis has one device; or a partitioned tree keeps more than half of its
        bytes on each device although N > 2, or all of them at N = 2.
    """
    stage, n = layout.stage, layout.size
    total = layout.total_bytes
    current = jax.sharding.get_mesh()
    if not current.empty and layout.axis not in layout.mesh.shape:
        warn(
            f"stage {int(stage)}: the mesh was refined to {dict(layout.mesh.shape)}; under "
            "jax.set_mesh set layout_of(state).mesh for the step, or it compiles twice."
        )
    if not stage.partitions_optimizer:
        return
    if n == 1:
        held = bytes_text(sum(total[t] for t in ("params", "opt_state")))
        warn(
            f"stage {int(stage)}: the axis {layout.axis!r} has one device and partitions nothing; "
            f"it holds all {held} of parameters and optimizer state."
        )
        return
    if stage == Stage.OPTIMIZER and not _divisible(layout.opt_state):
        warn("stage 1: there is no optimizer state to partition; the optimizer keeps scalars only.")
    trees = {"opt_state": layout.opt_state}
    if stage.partitions_parameters:
        trees["params"] = layout.params
    for name, tree in trees.items():
        placements = [p for p in jax.tree.leaves(tree) if p.partition.reason != RULED]
        held = sum(p.bytes_per_device for p in placements)
        whole = sum(p.total_bytes for p in placements)
        if any(p.partition.parts > 1 for p in placements) and (n == 2 or held <= whole / 2):
            continue
        if _divisible(placements):
            warn(
                f"stage {int(stage)} over {n} devices leaves {bytes_text(held)} of the "
                f"{bytes_text(whole)} of {name} on every device{_largest(placements, n)}"
            )


def _divisible(tree: Any) -> bool:
    """Whether some leaf has two elements or more."""
    return any(math.prod(p.leaf.shape) > 1 for p in jax.tree.leaves(tree))


def _largest(placements: list[Placement], n: int) -> str:
    short = [p for p in placements if p.partition.parts < n]
    short = sorted(short, key=lambda p: -p.bytes_per_device)
    if not short:
        return "."
    named = "; ".join(
        f"{p.leaf.path} {p.leaf.shape}: {bytes_text(p.bytes_per_device)} ({p.partition.reason})"
        for p in short[:3]
    )
    more = f"; and {len(short) - 3} more in str(layout)" if len(short) > 3 else ""
    return f": {named}{more}."


def warn(message: str) -> None:
    """Issue a `ZeroWarning` at the caller's line outside of this package, and of jax's tracing."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in (__package__, "jax"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ZeroWarning, stacklevel=level)


def warn_of_readings(placements: Sequence[Placement], readings: Sequence[str], why: str) -> None:
    """Warn about partitioned parameters that are gathered at the start of the loss and kept.

    Warns:
      ZeroWarning: stage 3 was to gather them layer by layer.
    """
    whole = [
        p
        for p, reading in zip(placements, readings, strict=True)
        if reading == "read whole" and p.partition.parts > 1
    ]
    if whole:
        largest = max(whole, key=lambda p: p.total_bytes)
        held = bytes_text(sum(p.total_bytes for p in whole))
        warn(
            f'regather="layer": {len(whole)} parameters, {held}, are gathered at the start of the '
            f"loss and kept until its end, the largest {largest.leaf.path!r} "
            f"({bytes_text(largest.total_bytes)}): {why}. Read parameters through a Flax module or "
            'scan_layers; regather="keep" says that this is meant.'
        )
