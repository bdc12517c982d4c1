"""What a schedule hides: the matrix products that run while a transfer is in flight.

A scheduled module runs its instructions in the order printed. An asynchronous collective is in
flight between its start and its done; products scheduled there cover it, a synchronous one covers
nothing. Seconds are products over the accelerator's peak and bytes over its links:

  a transfer inside a node takes bytes / link_bandwidth
  one whose groups leave the node also takes, for each of the k devices of a group in one node,
  1/k of the bytes over its own network port (a ring crosses a node's edge once, and NCCL lays one
  ring per port); an all-to-all or permute sends only what is for other nodes
  transfers in flight together share the links: products are used up in order of starting

This is a bound from below on what is exposed. Not seen: latencies and message sizes, products
slower than the peak, work that is no product (the TPU compiler's `estimated_cycles` are not read),
links that are slower because a ring is not a physical one, links shared between the directions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Accelerator(Protocol):
    """One device's peak rates.

    Attributes:
      matmul_flops: dense bf16 operations a second.
      link_bandwidth: bytes a second that it sends to devices of its node, in one direction.
      network_bandwidth: bytes a second that it sends to other nodes, in one direction.
    """

    @property
    def matmul_flops(self) -> float: ...
    @property
    def link_bandwidth(self) -> float: ...
    @property
    def network_bandwidth(self) -> float: ...


@dataclass(frozen=True)
class Start:
    """The transfer number `index` begins."""

    index: int


@dataclass(frozen=True)
class Done:
    """The transfer number `index` has to be there."""

    index: int


@dataclass(frozen=True)
class Matmul:
    """Matrix products of so many operations."""

    flops: int


@dataclass(frozen=True)
class Loop:
    """Events that run `trips` times in a row."""

    trips: int
    events: "Sequence[Event]"


Event = Start | Done | Matmul | Loop


@dataclass(frozen=True)
class Timing:
    """One execution of a collective, in seconds.

    Attributes:
      transfer_seconds: bytes over links.
      covered_seconds: the part of it that products scheduled meanwhile hide.
    """

    transfer_seconds: float
    covered_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """The part that nothing hides."""
        return self.transfer_seconds - self.covered_seconds


def total_flops(events: Sequence[Event]) -> int:
    """Operations of all products in one run of the events."""
    return _count_flops(events, {})


def scheduled_flops(events: Sequence[Event]) -> dict[int, int]:
    """For every transfer, the operations of all products between its start and its done.

    Transfers that are in flight together all count the same products; `covered_seconds` does not.
    """
    found: dict[int, int] = {}
    _count_flops(events, found)
    return found


def covered_seconds(
    events: Sequence[Event], transfer_seconds: Mapping[int, float], matmul_flops: float
) -> dict[int, float]:
    """For every transfer, the seconds of it that products hide; each product hides one at a time.

    Args:
      events: the schedule of the entry computation.
      transfer_seconds: by number of the transfer, for one execution.
      matmul_flops: operations a second.
    """
    ledger = _Ledger(transfer_seconds, matmul_flops)
    ledger.run(events)
    return ledger.covered


def transfer_seconds(
    kind: str,
    sent_bytes: int,
    groups: Sequence[Sequence[int]],
    accelerator: Accelerator,
    devices_per_node: int | None,
) -> float:
    """Seconds that one device's `sent_bytes` take; see the module docstring.

    Args:
      kind: of collective.
      sent_bytes: bytes one device sends.
      groups: device positions of each group, or pairs of a collective-permute.
      accelerator: rates.
      devices_per_node: positions 0 to n-1 are in the first node, and so on; None means one node.
    """
    seconds = sent_bytes / accelerator.link_bandwidth
    if devices_per_node is None:
        return seconds
    leaving = [g for g in groups if len({device // devices_per_node for device in g}) > 1]
    if not leaving:
        return seconds
    nodes = [[device // devices_per_node for device in g] for g in leaving]
    local, size = min((min(map(n.count, n)), len(n)) for n in nodes)
    outward = 1 / local
    if kind.endswith("all-to-all"):
        outward = (size - local) / (size - 1)
    return max(seconds, sent_bytes * outward / accelerator.network_bandwidth)


def _count_flops(events: Sequence[Event], found: dict[int, int]) -> int:
    """Operations of all events; each transfer's own are written to `found`."""
    total, at_start = 0, {}
    for event in events:
        match event:
            case Start(index):
                at_start[index] = total
            case Done(index):
                found[index] = total - at_start[index]
            case Matmul(flops):
                total += flops
            case Loop(trips, inner):
                total += trips * _count_flops(inner, found)
    return total


@dataclass
class _Ledger:
    """Which seconds of which product went to which transfer."""

    transfer_seconds: Mapping[int, float]
    matmul_flops: float
    covered: dict[int, float] = field(default_factory=dict)

    def run(self, events: Sequence[Event]) -> float:
        """Go through the events once; returns the seconds of products that hid nothing."""
        in_flight: dict[int, float] = {}
        unused = 0.0
        for event in events:
            match event:
                case Start(index):
                    in_flight[index] = self.transfer_seconds[index]
                case Done(index):
                    self.covered[index] = self.transfer_seconds[index] - in_flight.pop(index)
                case Matmul(flops):
                    unused += self._use(flops / self.matmul_flops, in_flight)
                case Loop(trips, inner):
                    unused += self._use(trips * self.run(inner), in_flight)
        return unused

    @staticmethod
    def _use(seconds: float, in_flight: dict[int, float]) -> float:
        for index, left in in_flight.items():
            used = min(left, seconds)
            in_flight[index] = left - used
            seconds -= used
        return seconds
