"""Text that a person reads: columns, and byte counts in binary units.

Plain and without colour, so that the same table goes to a terminal, a log and a file. Records
behind a table keep integers.
"""

from collections.abc import Sequence, Set


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


def aligned(rows: Sequence[Sequence[str]], right: Set[int] = frozenset()) -> list[str]:
    """Pad each column to its widest cell; columns in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
