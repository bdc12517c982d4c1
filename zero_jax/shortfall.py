"""What a stage promised and a state does not give: said once, with leaves and bytes.

Silence is how a flag that does nothing stays in a training script. A stage that cuts nothing, or
leaves more than half of a tree on every device, is a `ZeroWarning` that names the largest such
leaves. Single small leaves that stay whole are in the layout's table.
"""

import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from .layout import Layout
from .partition import RULED
from .placement import Placement
from .reporting.tables import bytes_text
from .stage import Stage

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Variable with the GB of host memory that a process may pin for its GPUs; 64 by default."""


class ZeroWarning(UserWarning):
    """A stage, rule or precision that does less than its name says."""


def warn_if_short(layout: Layout) -> None:
    """Warn about trees that the stage partitions in name only.

    Warns:
      ZeroWarning: the data axis has one device, and nothing is offloaded; the host has more than
        its GPUs may pin; or a partitioned tree keeps more than half of its
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
    _warn_of_pinned_limit(layout)
    if not stage.partitions_optimizer or (n == 1 and layout.offload is not None):
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


def _warn_of_pinned_limit(layout: Layout) -> None:
    """Say that XLA pins less host memory for a process's GPUs than its state takes."""
    first, own = layout.mesh.devices.flat[0], len(devices_of_a_process(layout.mesh))
    held = sum(layout.host_bytes_per_device.values()) * own
    letter = pinned_limit_letter(held, first.platform)
    if letter:
        warn(letter)


def pinned_limit_letter(held_bytes: int, platform: str) -> str:
    """What to do about host memory of a process that is more than its GPUs may pin; "" for none.

    Args:
      held_bytes: in host memory, for all devices of one process.
      platform: of its devices.
    """
    gigabytes = float(os.environ.get(PINNED_LIMIT, 64))
    if platform not in ("gpu", "cuda") or held_bytes <= gigabytes * 1e9:
        return ""
    return (
        f"offload: {bytes_text(held_bytes)} of a process's state lie in host memory, of which GPUs "
        f"pin at most {gigabytes:g} GB; set {PINNED_LIMIT}={math.ceil(1.25 * held_bytes / 1e9)} "
        "before JAX starts."
    )


@contextmanager
def ignored_pinned_limit() -> Iterator[None]:
    """Within it nobody warns of that limit; for who says it otherwise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "offload: .* GPUs pin at most", ZeroWarning)
        yield


def devices_of_a_process(mesh: Mesh) -> list[Any]:
    """The devices of a mesh that the process of its first device has."""
    first = mesh.devices.flat[0]
    return [d for d in mesh.devices.flat if d.process_index == first.process_index]


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


def warn_of_readings(stage: Stage, whole: Mapping[str, int], why: str) -> None:
    """Warn about parameters that a loss reads such that a device holds more than the stage says.

    Args:
      stage: of the layout.
      whole: path -> bytes that a device holds for long, of a parameter, or its gradient below
        stage 3.
      why: what the loss does.

    Warns:
      ZeroWarning: there are such.
    """
    if not whole:
        return
    held, largest = bytes_text(sum(whole.values())), max(whole, key=lambda path: whole[path])
    what = (
        f'regather="layer": {len(whole)} parameters, {held}, are gathered at the start of the loss '
        "and kept until its end"
        if stage.partitions_parameters
        else f"stage {int(stage)}: the gradients of {len(whole)} stacks of layers, {held}, stay "
        "whole on each device until the backward pass ends"
    )
    warn(
        f"{what}, the largest {largest!r} ({bytes_text(whole[largest])}): {why}. Read parameters "
        'through a Flax module or scan_layers, each once; regather="keep" says that this is meant.'
    )
