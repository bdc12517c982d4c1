"""A pass over the boxes of one leaf: fetch the next, compute this one, write it where it was.

The arrays of a leaf (its moments and master copy on the host; its gradient and parameter on the
device) have one logical shape and are gone through together, a box of it at a time. The box leaves
dims whole that a device axis cuts, so that each device passes over its own part.

In place: a box is written where it was read, and the host holds no second copy. For that XLA must
see that the next box is read before this one is written; a barrier says so. Beside the box that is
computed, the next one and the results are on the device: up to three boxes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from ..collectives import constrain
from ..memories import as_host, to_device, to_host

Arrays = list[Any]


@dataclass(frozen=True)
class Boxes:
    """How a leaf is gone through.

    Attributes:
      shape: of all boxes together.
      box: of each; it is shorter in one dim, or in none. In files the last one may be smaller.

    >>> boxes = Boxes((50, 1024), (16, 1024))
    >>> boxes.count, boxes.corner(3), boxes.own((50, 1032)), boxes.own((50, 1032), 3)
    (4, [48, 0], (16, 1032), (2, 1032))
    """

    shape: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def dim(self) -> int | None:
        """The dim that is divided, None if none is."""
        return next((d for d, size in enumerate(self.shape) if self.box[d] != size), None)

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.dim is None else -(-self.shape[self.dim] // self.box[self.dim])

    def corner(self, i: Any) -> list[Any]:
        """Where box `i` begins."""
        return [i * self.box[d] if d == self.dim else 0 for d in range(len(self.shape))]

    def own(self, shape: tuple[int, ...], i: int = 0) -> tuple[int, ...]:
        """Shape of box `i` of an array that may be padded along dims that boxes leave whole."""
        if self.dim is None:
            return shape
        size = min(self.box[self.dim], self.shape[self.dim] - i * self.box[self.dim])
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def of(self, shape: tuple[int, ...]) -> "Boxes":
        """Those of an array that passes with others; see `own`."""
        return Boxes(shape, self.own(shape))

    def like(self, i: int) -> int:
        """A box that stands for all of the size of box `i`: the first, or the last for itself."""
        return i if i == self.count - 1 else 0


@dataclass(frozen=True)
class Column:
    """One array of the leaf.

    Attributes:
      value: the array; its shape is the leaf's, or padded along a dim that boxes leave whole.
      lies: how it is cut over devices, on the device.
      on_host: whether its boxes are fetched.
      is_read: whether its old value matters.
    """

    value: jax.Array
    lies: NamedSharding
    on_host: bool
    is_read: bool


def box_of(
    shape: tuple[int, ...], stays: Sequence[bool], leaf_bytes: int, most_bytes: int
) -> tuple[int, ...] | None:
    """The largest box of a leaf within `most_bytes`, or else the smallest; None: the whole leaf.

    Boxes are of equal size. One dim is divided, since TPUs slice in one, and into whole tiles of
    their memory (16 x 128 in the last two dims).

    Args:
      shape: of the leaf at rest.
      stays: by dim: it is not divided.
      leaf_bytes: of the leaf on one device.
      most_bytes: of a box.

    >>> box_of((48, 1024, 4096), (False, True, False), 48 * 2**25, 2**25)
    (1, 1024, 4096)
    >>> box_of((50304, 4096), (True, False), 50304 * 4096 * 12, 2**28)
    (50304, 256)
    """
    if leaf_bytes <= most_bytes:
        return None
    boxes = []
    for dim in (d for d, stay in enumerate(stays) if not stay):
        sizes, per_row = _parts(shape, dim), leaf_bytes // shape[dim]
        size = max((s for s in sizes if s * per_row <= most_bytes), default=min(sizes))
        boxes.append((*shape[:dim], size, *shape[dim + 1 :]))
    fitting = [b for b in boxes if math.prod(b) * leaf_bytes <= most_bytes * math.prod(shape)]
    if fitting:
        enough = max(map(math.prod, fitting)) / 2  # the first dims are those of the longest rows
        return next(b for b in fitting if math.prod(b) >= enough)
    best = min(boxes, key=math.prod, default=shape)
    return None if best == shape else best


def ragged_box(
    shape: tuple[int, ...], stays: Sequence[bool], leaf_bytes: int, most_bytes: int
) -> tuple[int, ...] | None:
    """A box of a leaf in files, of nearly equal size; the last one may be smaller. As `box_of`.

    >>> ragged_box((50257, 1600), (False, False), 50257 * 1600 * 12, 2**28)
    (12565, 1600)
    """
    free = [d for d, stay in enumerate(stays) if not stay and shape[d] > 1]
    if leaf_bytes <= most_bytes or not free:
        return None
    dim = next((d for d in free if leaf_bytes // shape[d] <= most_bytes), None)
    if dim is None:  # one row is too much, whichever dim they are counted along
        dim = max(free, key=lambda d: shape[d])
    count = -(-shape[dim] // max(1, most_bytes * shape[dim] // leaf_bytes))
    return (*shape[:dim], -(-shape[dim] // count), *shape[dim + 1 :])


def _parts(shape: tuple[int, ...], dim: int) -> list[int]:
    """Sizes into which a dim divides."""
    tile = {1: 128, 2: 16}.get(len(shape) - dim, 1)
    small = [d for d in range(1, math.isqrt(shape[dim]) + 1) if shape[dim] % d == 0]
    both = small + [shape[dim] // d for d in small]
    return [d for d in both if d % tile == 0 or d == shape[dim]]


def pass_in_boxes(
    compute: Callable[[Arrays], Arrays],
    columns: Sequence[Column],
    replaces: Sequence[int],
    box: tuple[int, ...],
    shape: tuple[int, ...],
) -> list[jax.Array]:
    """Compute new values of some columns, box by box.

    Args:
      compute: boxes of the columns that are read, in order, of shape `box` and cut as the first
        column is -> new boxes.
      columns: the arrays.
      replaces: for each new value, the column in whose memory it is written.
      box: shape of a box.
      shape: of all boxes together: the first column's.

    Returns:
      The new values, cut as the columns that they replace.
    """
    boxes, cut = Boxes(shape, box), columns[0].lies
    count = boxes.count
    state = [as_host(c.value) if c.on_host else c.value for c in columns]

    def read(i: Any, state: Arrays, on_host: bool) -> Arrays:
        chosen = [c.is_read and c.on_host == on_host for c in columns]
        pairs = zip(state, chosen, strict=True)
        return [read_box(x, boxes, i, cut, on_host=on_host) for x, c in pairs if c]

    def write(i: Any, state: Arrays, fetched: Arrays) -> Arrays:
        theirs, ours = iter(fetched), iter(read(i, state, on_host=False))
        results = compute([next(theirs) if c.on_host else next(ours) for c in columns if c.is_read])
        for at, new in zip(replaces, results, strict=True):
            column = columns[at]
            new = write_box(state[at], new, boxes, i, column.lies, on_host=column.on_host)
            state = [*state[:at], new, *state[at + 1 :]]
        return state

    def trip(i: Any, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        state, fetched = carry
        following = read(i + 1, state, on_host=True)
        state, following = lax.optimization_barrier((state, following))
        return write(i, state, fetched), following

    carry = (state, read(0, state, on_host=True))
    state, fetched = lax.fori_loop(0, count - 1, trip, carry)
    state = write(count - 1, state, fetched)
    return [state[at] for at in replaces]


def read_box(
    array: jax.Array, boxes: Boxes, i: Any, lies: NamedSharding, *, on_host: bool, like: int = 0
) -> jax.Array:
    """Box `i` of an array in either memory, on the device, without padding.

    Args:
      array: its shape is that of the boxes, or padded along a dim that they leave whole.
      i: may be traced.
      lies: how the box is cut.
      on_host: whether it has to be fetched.
      like: a box of the size of box `i`.
    """
    x = lax.dynamic_slice(array, boxes.corner(i), boxes.own(array.shape, like))
    return fitted(to_device(x) if on_host else x, boxes.own(boxes.shape, like), lies)


def write_box(
    array: jax.Array,
    new: jax.Array,
    boxes: Boxes,
    i: Any,
    lies: NamedSharding,
    *,
    on_host: bool,
    like: int = 0,
) -> jax.Array:
    """The array with `new` as its box `i`; arguments as those of `read_box`, `lies` the array's."""
    new = fitted(new.astype(array.dtype), boxes.own(array.shape, like), lies)
    return lax.dynamic_update_slice(array, to_host(new) if on_host else new, boxes.corner(i))


def fitted(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """A box, its padding taken off or added, cut as `sharding` says."""
    if x.shape != shape:
        x = x[tuple(slice(0, size) for size in shape)]
        x = jnp.pad(x, [(0, want - has) for want, has in zip(shape, x.shape, strict=True)])
    return constrain(x, sharding)
