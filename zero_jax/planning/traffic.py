"""What rings send: bytes of one device, by kind of collective and by mesh axes.

The convention is that of ZeRO (arXiv 1910.02054, section 7) and of the audit (`reporting.wire`),
for a ring of n devices:

  all-gather, reduce-scatter   (n-1)/n of the whole, padding included        all-reduce   twice that

Not here: what a training step sends (`communication`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Axes = tuple[str, ...]


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one device sends in one step, by kind of collective."""

    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return self.all_gather_bytes + self.reduce_scatter_bytes + self.all_reduce_bytes

    def __add__(self, other: "WireBytes") -> "WireBytes":
        """Kind by kind."""
        return WireBytes(
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in one step, by the mesh axes of the ring.

    Attributes:
      by_axes: names of the axes that a ring runs over, the data axis first -> what is sent in it. A
        ring over data and replicas is an entry of its own: it is as fast as its slowest link.
    """

    by_axes: Mapping[Axes, WireBytes] = field(default_factory=dict)

    @property
    def total(self) -> WireBytes:
        """Over all axes, by kind."""
        return sum(self.by_axes.values(), WireBytes())

    @property
    def total_bytes(self) -> int:
        """Over all axes and kinds."""
        return self.total.total_bytes


def reduction(
    elements: int, width: int, parts: int, n: int, r: int, times: int, data: Axes, across: Axes
) -> list[tuple[Axes, WireBytes]]:
    """A gradient summed over n devices and r replicas; `parts` is n, or 1 for a whole one.

    A whole gradient can be summed over microbatches where it is, and is reduced once.
    """
    if parts == 1:
        axes = (data if n > 1 else ()) + (across if r > 1 else ())
        return [(axes, WireBytes(all_reduce_bytes=whole_ring_bytes(elements, width, n * r)))]
    part = -(-elements // parts)
    return [
        (data, WireBytes(reduce_scatter_bytes=times * ring_bytes(elements, width, parts))),
        (across, WireBytes(all_reduce_bytes=whole_ring_bytes(part, width, r))),
    ]


def gather(
    elements: int, parts: int, width: int, times: int, axes: Axes
) -> list[tuple[Axes, WireBytes]]:
    """A leaf of so many parts gathered over the data axis, `times` a step."""
    return [(axes, WireBytes(all_gather_bytes=times * ring_bytes(elements, width, parts)))]


def ring_bytes(elements: int, width: int, devices: int) -> int:
    """What one device sends of an array in a ring: every part but one, in devices - 1 turns."""
    return (devices - 1) * -(-elements // devices) * width


def whole_ring_bytes(elements: int, width: int, devices: int) -> int:
    """What one device sends to sum an array that nothing cuts: 2 (n-1)/n of it, rounded up."""
    return -(-2 * elements * width * (devices - 1) // devices)


def add_up(sent: Iterable[tuple[Axes, WireBytes]]) -> Traffic:
    """The sum, by axes; what sends nothing is left out."""
    by_axes: dict[Axes, WireBytes] = {}
    for axes, wire in sent:
        if wire.total_bytes:
            by_axes[axes] = by_axes.get(axes, WireBytes()) + wire
    return Traffic(by_axes)
