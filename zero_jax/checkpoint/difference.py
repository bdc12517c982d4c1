"""What two checkpoints differ in, leaf by leaf: names, shapes, dtypes, values."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .opened import Opened


@dataclass(frozen=True)
class Difference:
    """Of one leaf.

    Attributes:
      name: of the leaf.
      what: "only in A", "only in B", "shape", "dtype", "values"; "" where all bits are the same.
      detail: the two shapes or dtypes, or why values have no distance.
      largest, relative: of values, the largest |a - b|, and by what part of the largest |a|.
      differing: elements that differ, of `size`.
    """

    name: str
    what: str
    detail: str = ""
    largest: float = 0.0
    relative: float = 0.0
    differing: int = 0
    size: int = 0


def differences(a: Opened, b: Opened) -> Iterator[Difference]:
    """Every leaf of either, in the order of names; two leaves are in memory at a time."""
    for name in sorted({*a.index, *b.index}):
        if name not in b.index:
            yield Difference(name, "only in A")
        elif name not in a.index:
            yield Difference(name, "only in B")
        else:
            yield _compare(name, a, b)


def _compare(name: str, a: Opened, b: Opened) -> Difference:
    ours, theirs = a.index[name], b.index[name]
    if ours.shape != theirs.shape:
        return Difference(name, "shape", f"{list(ours.shape)} and {list(theirs.shape)}")
    if (ours.dtype, ours.key) != (theirs.dtype, theirs.key):
        return Difference(name, "dtype", f"{ours.dtype.name} and {theirs.dtype.name}")
    x, y = a.read(name), b.read(name)
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}") if x.dtype.itemsize <= 8 else np.dtype("V16")
    apart = x.reshape(-1).view(bits) != y.reshape(-1).view(bits)
    if not apart.any():
        return Difference(name, "", size=x.size)
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    left, right = (v.reshape(-1)[apart].astype(wide) for v in (x, y))
    with np.errstate(invalid="ignore"):
        distance = np.abs(left - right)
    if not np.isfinite(distance).all():
        return Difference(
            name, "values", "some are not finite", np.inf, np.inf, int(apart.sum()), x.size
        )
    largest, scale = float(distance.max()), float(np.abs(x.astype(wide)).max())
    return Difference(
        name, "values", "", largest, largest / scale if scale else np.inf, int(apart.sum()), x.size
    )
