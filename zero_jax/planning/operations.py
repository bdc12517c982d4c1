"""What a traced step is made of: values, operations, regions, and what a device does of them.

A region is a straight line of operations on values that have logical shapes and cuts; `traced`
makes regions of a user's step, and `propagation` finds out how their values are cut. Counts of a
region (operations of its products, bytes that its collectives send) are those of one device and of
all trips of its loops.

Not here: which values need memory at the same time (`liveness`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Value:
    """An array in the traced step.

    Attributes:
      shape, itemsize: logical shape; bytes of an element.
      half: whether it is a 16-bit float.
      cut: parts that each dim is cut into.
      given: whether it exists outside of the region: an argument, a constant, a literal.
      on_host: whether it lies in the host's memory.
    """

    shape: tuple[int, ...]
    itemsize: int
    half: bool = False
    cut: tuple[int, ...] = ()
    given: bool = False
    on_host: bool = False

    def __post_init__(self) -> None:
        self.cut = self.cut or (1,) * len(self.shape)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device has of it; a dim that is cut unevenly is rounded up."""
        local = (math.ceil(size / parts) for size, parts in zip(self.shape, self.cut, strict=True))
        return math.prod(local) * self.itemsize

    @property
    def held_bytes(self) -> int:
        """The same in the device's own memory: nothing of what lies on the host."""
        return 0 if self.on_host else self.bytes_per_device

    @property
    def is_cut(self) -> bool:
        """Whether a device has less than all of it."""
        return any(parts > 1 for parts in self.cut)


@dataclass(eq=False)
class Operation:
    """One equation. `regions` are the bodies of a loop or the branches of a conditional."""

    name: str
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    has_effects: bool
    regions: list["Region"] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    """A straight line of operations; calls are inlined, loops and conditionals are not.

    The body of a `shard_map` is inlined too, between operations that only change the view:
    "to_local" and "to_global", whose `parts` say how many each dim is cut into. Within, shapes are
    those of one device; a collective's `devices` is the number that takes part.

    Attributes:
      operations, inputs, outputs: in order.
      wanted: how what is around a body uses its outputs: cut so.
      is_explicit: whether the rows of the batch go into a `shard_map`, so that the step's
        collectives stand in the region.
    """

    operations: list[Operation]
    inputs: list[Value]
    outputs: list[Value]
    wanted: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    is_explicit: bool = False

    @property
    def matmul_flops(self) -> int:
        """Floating-point operations in its products on one device; a loop's times its length.

        Convolutions count as the matmuls they are. Known after `propagation`.
        """
        return sum(each(op, _flops) for op in self.operations)

    @property
    def gathers(self) -> bool:
        """Whether a constraint makes something whole that was cut; known after propagation."""
        return any(
            (op.name == "sharding_constraint" and op.inputs[0].is_cut and not op.outputs[0].is_cut)
            or any(inner.gathers for inner in op.regions)
            for op in self.operations
        )

    @property
    def trips_that_reduce(self) -> int:
        """Trips of the longest loop that carries a sum which is cut; known after propagation.

        What a loop shares (a recurrent network's weights) has its gradient summed in a carry; one
        that is cut is reduced and scattered in every trip. Carries that a loop only hands on are
        not sums.
        """
        trips = [_summing_trips(op) for op in self.operations]
        inner = [region.trips_that_reduce for op in self.operations for region in op.regions]
        return max([*trips, *inner], default=0)

    @property
    def summed_bytes(self) -> int:
        """Bytes of partial results that one device all-reduces because a matmul summed over a cut.

        This is what tensor parallelism sends: by a ring over the devices of the cut.
        """
        return sum(each(op, _summed_bytes) for op in self.operations)


def _summing_trips(op: Operation) -> int:
    if op.name != "scan":
        return 0
    (body,) = op.regions
    made = {y: o for o in body.operations for y in o.outputs}
    for y, inner in zip(op.outputs, body.outputs, strict=True):
        adds = inner in made and made[inner].name in ("add", "add_any")
        if adds and y.is_cut and len(y.shape) == len(inner.shape):
            return op.params["length"]
    return 0


def carries(op: Operation) -> tuple[slice, list[Value]]:
    """Where a scan's inputs have its carries, and the carries as they leave.

    jax versions name the counts differently; the shapes tell: what is carried has the shape it has
    in the body, what is scanned or stacked has one dim more.
    """
    (body,) = op.regions
    pairs = list(zip(op.outputs, body.outputs, strict=True))
    carried = [y for y, inner in pairs if len(y.shape) == len(inner.shape)]
    scanned = sum(
        len(x.shape) > len(inner.shape) for x, inner in zip(op.inputs, body.inputs, strict=True)
    )
    constants = len(op.inputs) - scanned - len(carried)
    return slice(constants, constants + len(carried)), carried


def collective_of(op: Operation) -> str:
    """The kind of collective that an operation is, in XLA's words; "" for none."""
    return next((kind for name, kind in _KINDS.items() if op.name.startswith(name)), "")


_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
}


def each(op: Operation, count: Callable[[Operation], int]) -> int:
    """A count over an operation and what it loops over; a `while` of unknown length runs once."""
    inner = [sum(each(o, count) for o in region.operations) for region in op.regions]
    if op.name == "cond":
        return max(inner)
    if op.regions:
        return sum(inner) * op.params.get("length", 1)
    return count(op)


def _flops(op: Operation) -> int:
    """A multiplication and an addition for each term, by the cuts of the operands.

    A result that is reduced and scattered afterwards is computed whole.
    """
    if op.name == "conv_general_dilated":
        kernel, numbers = op.inputs[1], op.params["dimension_numbers"]
        spread = math.prod(op.params["lhs_dilation"])  # zeros between the inputs are skipped
        terms = math.prod(kernel.shape) // kernel.shape[numbers.rhs_spec[0]]
        return 2 * math.prod(op.outputs[0].shape) * terms // spread
    if op.name != "dot_general":
        return 0
    (_, contract), (_, batch) = op.params["dimension_numbers"]
    a, b = (math.prod(s // c for s, c in zip(x.shape, x.cut, strict=True)) for x in op.inputs)
    right = op.inputs[1]
    inner = math.prod(right.shape[d] // right.cut[d] for d in (*contract, *batch))
    return 2 * a * (b // max(1, inner))


def _summed_bytes(op: Operation) -> int:
    if op.name != "dot_general":
        return 0
    (contract, _), _ = op.params["dimension_numbers"]
    parts = math.prod(op.inputs[0].cut[d] for d in contract)
    return math.ceil(2 * (parts - 1) / parts * op.outputs[0].bytes_per_device)
