"""Where ONE leaf is cut: shape and axis size in, a partition out.

ZeRO (arXiv 1910.02054, section 5) partitions a flat buffer. JAX arrays keep their shapes, so a leaf
is cut along one dimension, and XLA moves it without a copy. The rule, first match wins:

  whole    a rule says so, the leaf has fewer than `min_size` elements, or N = 1
  divided  the first free dim that N divides: pieces are blocks of memory, so that gathering them
           moves no element twice (on CPU twice as fast as along the last dim)
  padded   (optimizer state, gradients) the dim with the least padding to a multiple of N, when that
           adds at most 1 % or another axis already holds a dim; logical again in flight, uneven
  flat     (optimizer state) all dims flattened and padded to a multiple of N: at most one element
           per device is lost; in flight the leaf is whole, so its moments are gathered for the
           update. Only leaves that no dim can cut within 1 % come here: small ones.
  factor   (parameters at rest, whose shape the user's step reads) the largest factor of N that
           divides a dim; replicated over the rest of the axis

A dim is free when no prior partition (tensor parallelism, metadata boxes) holds it, and, for leaves
that a rule calls "stacked", when it is not the first: a stack of scanned layers cut along its
layers is gathered whole in every iteration.

Not here: which trees a stage partitions (`layout`), meshes and bytes (`layout`), data movement.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec

RULED = "a rule keeps it whole"
"""Reason of a leaf that is whole because the user said so."""

Form = Literal["whole", "divided", "padded", "flat", "factor"]

MAX_PADDING = 0.01
"""Largest share of padding for which a leaf is padded along one dim rather than flattened."""


@dataclass(frozen=True)
class Partition:
    """One leaf's partition over the data axis.

    Attributes:
      form: whole, divided, padded, flat or factor (see the module docstring).
      spec: what the array at rest is partitioned over; names the data axis unless whole (and for
        factor, where it stands for `parts` of it).
      rest_shape: shape of the array at rest, padding included.
      dim: the dim that is cut, None for whole and flat.
      parts: number of different pieces over the data axis, 1 for whole.
      reason: why, for the layout's report.
    """

    form: Form
    spec: PartitionSpec
    rest_shape: tuple[int, ...]
    dim: int | None
    parts: int
    reason: str


def partition_leaf(
    shape: tuple[int, ...],
    axis: str,
    n: int,
    *,
    held: Sequence[object] = (),
    min_size: int = 0,
    stacked: bool = False,
    may_pad: bool = True,
) -> Partition:
    """Choose the partition of one leaf.

    Args:
      shape: logical shape of the leaf.
      axis: name of the data axis.
      n: size of the data axis.
      held: prior spec, an entry per dim (None where free); short specs are filled with None.
      min_size: leaves with fewer elements stay whole.
      stacked: the first dim counts layers and is never cut.
      may_pad: the leaf may be padded at rest; if False its shape is kept.

    >>> partition_leaf((50257, 36), "data", 8).rest_shape
    (50264, 36)
    >>> partition_leaf((50257, 36), "data", 8, may_pad=False).parts
    4
    """
    held = tuple(held) + (None,) * (len(shape) - len(held))
    size = math.prod(shape)
    if n == 1:
        return whole(shape, held, f"{axis} has one device")
    if size < 2:
        return whole(shape, held, f"{size} elements")
    if size < min_size:
        return whole(shape, held, f"{size} elements, under min_size {min_size}")
    free = [d for d, h in enumerate(held) if h is None and not (stacked and d == 0)]
    if not free:
        return whole(shape, held, "no free dim")
    dim = next((d for d in free if shape[d] % n == 0), None)
    if dim is not None:
        spec = _insert(held, dim, axis)
        return Partition("divided", spec, shape, dim, n, f"dim {dim}: {shape[dim]} over {n}")
    if may_pad:
        return _padded(shape, axis, n, held, free)
    return _factor(shape, axis, n, held, free)


def whole(shape: tuple[int, ...], held: Iterable[object], reason: str) -> Partition:
    """The partition that cuts nothing over the data axis and keeps what other axes hold."""
    return Partition("whole", trimmed(held), shape, None, 1, reason)


def _padded(
    shape: tuple[int, ...], axis: str, n: int, held: tuple[object, ...], free: list[int]
) -> Partition:
    dim = min(free, key=lambda d: (-shape[d] % n / shape[d], d))
    target = shape[dim] + -shape[dim] % n
    can_flatten = len(free) == len(shape)
    if target / shape[dim] - 1 <= MAX_PADDING or not can_flatten:
        rest = shape[:dim] + (target,) + shape[dim + 1 :]
        reason = f"dim {dim}: {shape[dim]} padded to {target}"
        return Partition("padded", _insert(held, dim, axis), rest, dim, n, reason)
    size = math.prod(shape)
    rest = (size + -size % n,)
    reason = f"no dim divides: {size} elements flattened to {rest[0]}"
    return Partition("flat", PartitionSpec(axis), rest, None, n, reason)


def _factor(
    shape: tuple[int, ...], axis: str, n: int, held: tuple[object, ...], free: list[int]
) -> Partition:
    for parts in (f for f in range(n - 1, 1, -1) if n % f == 0):
        dim = next((d for d in free if shape[d] % parts == 0), None)
        if dim is not None:
            spec = _insert(held, dim, axis)
            reason = f"dim {dim}: {shape[dim]} over {parts} of {n}, {n // parts} copies"
            return Partition("factor", spec, shape, dim, parts, reason)
    return whole(shape, held, f"no dim shares a factor with {n}")


def _insert(held: tuple[object, ...], dim: int, axis: str) -> PartitionSpec:
    return trimmed(held[:dim] + (axis,) + held[dim + 1 :])


def trimmed(entries: Iterable[object]) -> PartitionSpec:
    """A `PartitionSpec` without trailing Nones, so that equal partitions compare equal."""
    entries = list(entries)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
