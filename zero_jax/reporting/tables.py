"""Tables that a person reads: the layout, leaf by leaf.

Plain text without colour, so that the same table goes to a terminal, a log and a file. Bytes are
shown in binary units; the records behind them (`Layout.report`) have integers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..layout import Layout


def bytes_text(count: int) -> str:
    """A byte count as a person reads it: three significant digits, binary unit.

    >>> bytes_text(1536)
    '1.50 KiB'
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    if units[0] == "B":
        return f"{count} B"
    return f"{size:.{max(0, 2 - len(str(int(size))) + 1)}f} {units[0]}"


def layout_table(layout: "Layout") -> str:
    """The layout as a table: tree, leaf, shape, dtype, spec, bytes per device, reason."""
    import jax

    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    used, present = layout.mesh.size, jax.device_count()
    devices = f"{used} devices" if used == present else f"{used} devices ({present} present)"
    head = f"ZeRO stage {int(layout.stage)} over {layout.axis!r} of mesh ({axes}), {devices}"
    rows = [
        (r.tree, r.path, str(r.shape), r.dtype, str(r.spec).removeprefix("PartitionSpec"),
         bytes_text(r.bytes_per_device), r.reason)
        for r in layout.report()
    ]  # fmt: skip
    header = ("tree", "leaf", "shape", "dtype", "spec", "per device", "why")
    sums = [
        f"{tree:<9} {bytes_text(layout.bytes_per_device[tree]):>10} per device of "
        f"{bytes_text(total):>10}{_share(layout.bytes_per_device[tree], total)}"
        for tree, total in layout.total_bytes.items()
    ]
    return "\n".join([head, "", *aligned([header, *rows], right={5}), "", *sums])


def _share(part: int, total: int) -> str:
    return f"  ({part / total:.4f})" if total else ""


def aligned(rows: Sequence[Sequence[str]], right: set[int] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """Pad each column to its widest cell; columns in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
