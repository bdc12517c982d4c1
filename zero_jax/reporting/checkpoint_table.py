"""What `zero-jax inspect` and `zero-jax diff` print.

Not here: reading checkpoints (`zero_jax.checkpoint`).
"""

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..checkpoint.difference import Difference
from ..checkpoint.leaves import parted
from ..checkpoint.opened import Opened
from .tables import bytes_text


def inspect_table(opened: Opened) -> RenderableType:
    """Leaves of a checkpoint, sums of its trees, and what was saved beside them."""
    leaves = Table(box=None, pad_edge=False)
    for title in ("leaf", "shape", "dtype"):
        leaves.add_column(title, overflow="fold")
    leaves.add_column("bytes", justify="right")
    sums: dict[str, int] = {}
    for name, filed in sorted(opened.index.items()):
        tree = "".join(parted(name)[:2])
        sums[tree] = sums.get(tree, 0) + filed.bytes
        dtype = f"{filed.dtype.name}, {filed.key} keys" if filed.key else filed.dtype.name
        leaves.add_row(name, str(list(filed.shape)), dtype, bytes_text(filed.bytes))
    trees = Table(box=None, pad_edge=False, show_header=False)
    for tree, size in (*sums.items(), ("all", sum(sums.values()))):
        trees.add_row(tree, bytes_text(size))
    versions = ", ".join(f"{k} {v}" for k, v in opened.run["versions"].items())
    others = ", ".join(str(s) for s in opened.steps)
    parts: list[RenderableType] = [
        Text(f"step {opened.step} of {opened.folder} (there are {others})"),
        Text(f"saved by {versions}"),
        Text(),
        leaves,
        Text(),
        trees,
    ]
    for name, value in opened.run["extras"].items():
        said = value if isinstance(value, str) else json.dumps(value, indent=1)
        parts += [Text(), Text(name, style="bold"), Text(said.rstrip())]
    return Group(*parts)


def diff_table(found: Sequence[Difference]) -> RenderableType:
    """Leaves that differ, and how many do not."""
    apart = [d for d in found if d.what]
    same = Text(f"{len(found) - len(apart)} of {len(found)} leaves are the same, bit for bit")
    if not apart:
        return same
    table = Table(box=None, pad_edge=False)
    for title in ("leaf", "differs in", ""):
        table.add_column(title, overflow="fold")
    for d in apart:
        detail = d.detail
        if d.what == "values" and not detail:
            detail = f"by {d.largest:.3g} at most ({d.relative:.2g} of the largest), "
            detail += f"{d.differing:,} of {d.size:,} elements"
        table.add_row(d.name, d.what, detail)
    return Group(table, Text(), same)
