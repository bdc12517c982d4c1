"""Which values of a traced step need memory, and from when to when: its buffers.

A straight line of operations is read in order, by these rules of what XLA makes of it:

  fusion     results of matmuls, reductions, scatters, loops, transfers and of constraints that move
             data are buffers; an elementwise operation is computed where it is read, and keeps
             alive what it reads. Read by a matmul, a scatter, a loop or a transfer, it is a buffer
  views      a transposition or reshape in front of a matmul costs nothing (on CPU a transposition
             is a copy), nor does a constraint that moves nothing
  in place   an elementwise result takes over the memory of an operand of its shape that ends there
  stacks     what a loop stacks is whole from its start (on CPU from the start of the step)
  halves     on CPU a 16-bit operand or result of a matmul is a 32-bit one

and in steps that use the host's memory, whose parameters pass through loops:

  carried    what a loop carries lies in one place, which is free between the last operation that
             reads it and the one that makes the next; what was an argument stays where it was
  written    a slice is written where an array lies, when it is there

Not here: the order of operations, and what is alive at once (`liveness`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .operations import Operation, Value, carries, collective_of

PRODUCTS = {"dot_general", "conv_general_dilated"}
_SOLVERS = {"sort", "top_k", "fft", "cholesky", "eigh", "qr", "svd", "triangular_solve"}
_PREFIXES = ("reduce_", "scatter", "cum", "arg", "select_and_", "custom_call", "ffi_call")
VIEWS = {"reshape", "squeeze", "expand_dims", "to_local", "to_global"}
_MOVES = {"transpose", "broadcast_in_dim", "gather", "dynamic_slice", "slice", "pad", "concatenate"}
_FILLS = {"broadcast_in_dim", "convert_element_type", "reshape"}


@dataclass
class Buffers:
    """What a straight line of operations keeps in memory.

    Attributes:
      made: the buffers that each operation makes.
      bytes: of each buffer on one device.
      last: time of the last operation that reads it.
      beneath: buffers that an operation may write its result over.
      early: buffers that exist from the start.
      within: buffers that are a loop's carry, before it and after.
      carried: bytes of what the body of a loop is given of its carry.
      behind: the buffers that a value is computed from.
      aligned: those of them that are read element by element.
      views: values that need no memory of their own.
    """

    made: dict[Operation, list[Value]] = field(default_factory=dict)
    bytes: dict[Value, int] = field(default_factory=dict)
    last: dict[Value, int] = field(default_factory=dict)
    beneath: dict[Operation, set[Value]] = field(default_factory=dict)
    early: set[Value] = field(default_factory=set)
    within: dict[Operation, set[Value]] = field(default_factory=dict)
    carried: dict[Operation, dict[Value, int]] = field(default_factory=dict)
    behind: dict[Value, set[Value]] = field(default_factory=dict)
    aligned: dict[Value, set[Value]] = field(default_factory=dict)
    views: set[Value] = field(default_factory=set)

    def add(self, op: Operation, y: Value, size: int) -> None:
        """A buffer that an operation makes."""
        self.behind[y] = self.aligned[y] = {y}
        self.made[op].append(y)
        self.bytes[y] = size

    def is_argument(self, x: Value) -> bool:
        """Whether a value lies where an argument lies."""
        return not self.behind.get(x) and (x.given or x in self.views)


def find_buffers(
    operations: Sequence[Operation],
    outputs: Sequence[Value],
    platform: str,
    carried: Mapping[Value, int] | None = None,
) -> Buffers:
    """Find the buffers of operations in order.

    Args:
      operations, outputs: of a region.
      platform: whose compiler.
      carried: in a step that uses the host's memory, bytes of what a loop's body is given of its
        carry; None: in any other.
    """
    memory, readers = Buffers(), readers_of(operations)
    constants: set[Value] = set()
    for x, size in (carried or {}).items():
        memory.behind[x], memory.aligned[x], memory.bytes[x] = {x}, {x}, size
        memory.early.add(x)
    for time, op in enumerate(operations):
        read = set().union(*(memory.behind.get(x, ()) for x in op.inputs))
        memory.last.update(dict.fromkeys(read, time))
        memory.beneath[op] = _beneath(op, read, memory.aligned, platform)
        memory.made[op], memory.within[op] = [], set()
        if op.name in _FILLS and all(x in constants or _is_scalar(x) for x in op.inputs):
            constants.update(op.outputs)
        _see_views(op, memory, platform)
        if carried is not None and op.name == "dynamic_update_slice":
            _write_into(op, memory)
            continue
        for y in op.outputs:
            wanted = any(_reads_buffers(r) for r in readers.get(y, ()))
            memory.behind[y], memory.aligned[y] = read, memory.beneath[op]
            if _makes_buffers(op) or (wanted and y not in constants and y not in memory.views):
                wide = 2 if platform == "cpu" and y.half and op.name != "scan" else 1
                memory.add(op, y, wide * y.held_bytes)
        if carried is not None and op.name == "scan":
            _carry(op, memory)
        if platform == "cpu" and op.name == "scan":
            pairs = zip(op.outputs, op.regions[0].outputs, strict=True)
            memory.early.update(y for y, inner in pairs if len(y.shape) > len(inner.shape))
    for y in outputs:
        memory.last.update(dict.fromkeys(memory.behind.get(y, ()), len(operations)))
    return memory


def readers_of(operations: Sequence[Operation]) -> dict[Value, list[Operation]]:
    """Value -> the operations that read it."""
    readers: dict[Value, list[Operation]] = {}
    for op in operations:
        for x in op.inputs:
            readers.setdefault(x, []).append(op)
    return readers


def _see_views(op: Operation, memory: Buffers, platform: str) -> None:
    still = op.name == "sharding_constraint" and not _makes_buffers(op)
    if still or op.name in (VIEWS if platform == "cpu" else VIEWS | {"transpose"}):
        (x,) = op.inputs
        if x.given or x in memory.bytes or x in memory.views:
            memory.views.update(op.outputs)


def _write_into(op: Operation, memory: Buffers) -> None:
    """Write a slice where an array lies; zeros that it is written into are a buffer from here."""
    (x, *_), (y,) = op.inputs, op.outputs
    if memory.behind.get(x) or memory.is_argument(x):
        memory.behind[y], memory.aligned[y] = (
            memory.behind.get(x, set()),
            memory.aligned.get(x, set()),
        )
        memory.views.add(y)
    else:
        memory.add(op, y, y.held_bytes)


def _carry(op: Operation, memory: Buffers) -> None:
    """Count what a loop carries within it, where it is read and made again."""
    starts, after = carries(op)
    inner = op.regions[0].inputs[starts]
    memory.carried[op] = {}
    for x, given, y in zip(op.inputs[starts], inner, after, strict=True):
        if memory.is_argument(x):
            memory.bytes[y] = 0
        memory.carried[op][given] = memory.bytes[y]
        memory.within[op] |= {y, *memory.behind.get(x, ())}


def _is_scalar(x: Value) -> bool:
    return x.given and not x.shape


def _makes_buffers(op: Operation) -> bool:
    """Whether the results of an operation lie in memory, whoever reads them."""
    if op.name == "sharding_constraint":
        return op.inputs[0].cut != op.outputs[0].cut
    computes = op.name in PRODUCTS | _SOLVERS or op.name.startswith(_PREFIXES)
    computes = computes or bool(collective_of(op))
    computes = computes or op.name == "device_put"  # between the memories; see `traced`
    return bool(op.regions) or (computes and op.name != "reduce_precision")


def _reads_buffers(op: Operation) -> bool:
    """Whether an operation wants its operands in memory."""
    computes = op.name in PRODUCTS | _SOLVERS or op.name.startswith("scatter")
    return bool(op.regions or collective_of(op)) or computes or op.name == "device_put"


def _beneath(
    op: Operation, read: set[Value], aligned: dict[Value, set[Value]], platform: str
) -> set[Value]:
    if op.name.startswith("scatter"):
        return aligned.get(op.inputs[0], set())
    if platform == "tpu" and op.name in VIEWS | {"transpose"}:
        return aligned.get(op.inputs[0], set())
    if not op.outputs or _makes_buffers(op) or op.name in VIEWS | _MOVES:
        return set()
    shape = op.outputs[0].shape
    return set().union(*(aligned.get(x, ()) for x in op.inputs if x.shape == shape))
