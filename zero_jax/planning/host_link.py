"""What passes between one device and its host in a step, counted where the transfers stand.

ZeRO-Offload (arXiv 2101.06840, section 4) and ZeRO-Infinity (arXiv 2104.07857, section 5.1) keep
model states in the host's memory; a step fetches them through the link that each device has to its
host (PCI Express, mostly) and sends them back. Both are operations of the traced step, each as
often as the loop around it runs.

Seconds are those of the longer of the two directions, at the link's bandwidth: a link carries both
at once. That is a bound from below: hosts whose links share a switch or a memory bus take longer.

Not here: what lies on the host between steps (`memory.from_layout`), disks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .operations import Operation, Region, each


@dataclass(frozen=True)
class Passage:
    """Bytes of one device through its link to the host."""

    fetched_bytes: int
    sent_bytes: int

    def seconds(self, bandwidth: float) -> float:
        """At `bandwidth` bytes a second in each direction; nothing takes no time on any link."""
        longer_bytes = max(self.fetched_bytes, self.sent_bytes)
        return longer_bytes / bandwidth if longer_bytes else 0.0


@dataclass(frozen=True)
class HostLink:
    """What a step does with its host's memory, for one device.

    Attributes:
      gradient: what passes while the gradient is computed: layers, gradients, activations.
      update: what passes in the update, which waits for the gradient.
      stacks_bytes: what the step makes on the host beside the state: gradients, activations.
    """

    gradient: Passage
    update: Passage
    stacks_bytes: int

    @property
    def fetched_bytes(self) -> int:
        """From the host to the device."""
        return self.gradient.fetched_bytes + self.update.fetched_bytes

    @property
    def sent_bytes(self) -> int:
        """From the device to the host."""
        return self.gradient.sent_bytes + self.update.sent_bytes


def from_region(region: Region) -> HostLink:
    """Count what passes in one step.

    Args:
      region: from `traced.trace`, its cuts propagated. In an explicit step the gradient ends where
        the `shard_map` does; in any other all of it is the update's.
    """
    ends = [at for at, op in enumerate(region.operations) if op.name == "to_global"]
    end = max(ends, default=-1) + 1
    return HostLink(
        _passage(region.operations[:end]),
        _passage(region.operations[end:]),
        _once(region, _zeros_bytes),
    )


def _passage(operations: Sequence[Operation]) -> Passage:
    return Passage(
        sum(each(op, _fetched_bytes) for op in operations),
        sum(each(op, _sent_bytes) for op in operations),
    )


def _once(region: Region, count: Callable[[Operation], int]) -> int:
    """A count over all operations, of loops in one trip: each writes where the one before did."""
    return sum(
        count(op) + sum(_once(body, count) for body in op.regions) for op in region.operations
    )


def _fetched_bytes(op: Operation) -> int:
    return 0 if op.name != "device_put" else sum(y.held_bytes for y in op.outputs)


def _sent_bytes(op: Operation) -> int:
    if op.name != "device_put":
        return 0
    return sum(y.bytes_per_device for y in op.outputs if y.on_host)


def _zeros_bytes(op: Operation) -> int:
    return sum(y.bytes_per_device for y in op.outputs) if op.name == "zeros_on_host" else 0
