"""The most memory that a step's temporaries need at once: a forecast, before any compiler.

The traced step (`traced`) is walked in order with the values that are alive, and these rules of
what XLA makes of it; each was read off executables for CPU, H100 and TPU v5p:

  fusion     results of matmuls, reductions, scatters, loops and of constraints that move data are
             buffers; an elementwise operation is computed where it is read, and keeps alive what it
             reads. Read by a matmul, a scatter or a loop, it is a buffer too
  views      a transposition or reshape in front of a matmul costs nothing (on CPU a transposition
             is a copy), nor does a constraint that moves nothing
  in place   an elementwise result takes over the memory of an operand of its shape that ends there
  stacks     what a loop stacks is whole from its start (on CPU from the start of the step)
  late       in a loop's body the matmuls that only make weight gradients come last, so that their
             operands live until then
  halves     on CPU a 16-bit operand or result of a matmul is a 32-bit one
  update     parameters and optimizer state are written where they were (donated)
  turned     on GPU a stack of cut parameters that a loop gathers is copied, its cut dim first

and of explicit steps, whose collectives are buffers and want their operands in memory:

  ahead      on GPU the first trip of a loop that gathers or scatters is taken out of it, and its
             recomputation begins before the loss ends: up to the largest buffer of it
             (`scan_layers` is not taken apart: its barriers forbid it). On CPU barriers are gone
             before operations are ordered: what does not wait for a loop or scatter precedes it
  kept       on CPU moments are copied first, as the step may leave them as they are

Buffers are packed, operations reordered and copies made that the walk does not see; `MARGIN` and
half of the largest gathered leaf, which may exist twice, make it an upper bound within 15 % for
GPT-2 small and medium on all three, and mostly within 25 % else: the figures and the exceptions are
in `tests/benchmarks/forecast_peaks.md`. Not promised: steps of few rows, where the update needs
most and XLA transposes what it reads; 16-bit models on CPU, where XLA copies parameters besides;
32-bit models on TPU, where it stores in 16 bits what only matmuls read; convolutions on CPU; small
programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .hardware import Platform
from .operations import Operation, Region, Value, carries, collective_of
from .propagation import propagate

MICROBATCH_MARGIN = 0.08
"""As much more for a step in microbatches, whose accumulators XLA copies."""

MARGIN: dict[str, float] = {"cpu": 0.11, "cuda": 0.085, "tpu": 0.125}
"""Share of a step's peak, arguments included, that a forecast adds for what the walk misses."""

_PRODUCTS = {"dot_general", "conv_general_dilated"}
_SOLVERS = {"sort", "top_k", "fft", "cholesky", "eigh", "qr", "svd", "triangular_solve"}
_PREFIXES = ("reduce_", "scatter", "cum", "arg", "select_and_", "custom_call", "ffi_call")
_VIEWS = {"reshape", "squeeze", "expand_dims", "to_local", "to_global"}
_MOVES = {"transpose", "broadcast_in_dim", "gather", "dynamic_slice", "slice", "pad", "concatenate"}
_FILLS = {"broadcast_in_dim", "convert_element_type", "reshape"}
_LATE = _PRODUCTS | _VIEWS | {"transpose", "sharding_constraint", "convert_element_type", "add_any"}


def temporaries_bytes(region: Region, platform: Platform) -> int:
    """Bytes of a traced step's temporaries that are alive at once, on one device.

    Arguments are not counted, nor results that are written over them.

    Args:
      region: from `traced.trace`.
      platform: whose compiler.
    """
    propagate(region)
    copies = sum(map(_turned_stacks_bytes, region.operations)) if platform == "cuda" else 0
    if region.is_explicit and platform == "cpu":
        copies += _kept_bytes(region)
    return _peak(region, platform, in_loop=False) + copies


def _kept_bytes(region: Region) -> int:
    """Bytes of state that a step may leave as it is and whose new value is read besides."""
    readers = _readers(region.operations)
    arguments = {
        op.outputs[0]: op.inputs[0] for op in region.operations if op.outputs and op.inputs
    }
    selects = [op.inputs for op in region.operations if op.name == "select_n"]
    kept = {old for _, old, new, *_ in selects if len(readers[old]) > 1 and len(readers[new]) > 1}
    return sum(x.bytes_per_device for x in kept if x in arguments and arguments[x].given)


def _turned_stacks_bytes(op: Operation) -> int:
    """Bytes of the stacks that a loop goes through and gathers: copied with the cut dim first."""
    if op.name != "scan":
        return 0
    (body,) = op.regions
    gathers = [o for o in body.operations if o.name in ("sharding_constraint", "all_gather")]
    explicit = [o.inputs[0] for o in gathers if o.name == "all_gather"]
    gathered = {o.inputs[0] for o in gathers if o.inputs[0].cut != o.outputs[0].cut}.union(explicit)
    pairs = zip(op.inputs, body.inputs, strict=True)
    stacks = {x for x, inner in pairs if inner in gathered and len(inner.shape) > 1}
    return sum(x.bytes_per_device for x in stacks if x.given and x.cut[0] == 1)


def _peak(region: Region, platform: Platform, in_loop: bool) -> int:
    """A buffer counts from the operation that makes it to the last one that reads it."""
    operations = _products_late(region) if in_loop else region.operations
    if region.is_explicit and platform == "cpu":
        operations = _waiting_for_loops_only(operations)
    memory = _lay_out(operations, region.outputs, platform)
    if region.is_explicit and platform == "cuda":
        _begin_loops_early(operations, memory)
    alive, peak = set(memory.early), 0
    for time, op in enumerate(operations):
        inner = max((_peak(body, platform, in_loop=True) for body in op.regions), default=0)
        alive.update(memory.made[op])
        ending = [b for b in alive if memory.last.get(b, -1) <= time]
        held = sum(memory.bytes[b] for b in alive)
        peak = max(peak, held + inner - _taken_over(op, ending, memory))
        alive.difference_update(ending)
    return peak


def _products_late(region: Region) -> list[Operation]:
    """Each product, and what only moves or converts it, right before its first reader."""
    readers = _readers(region.operations)
    place: dict[Operation, tuple[int, int]] = {}
    for time in range(len(region.operations) - 1, -1, -1):
        op = region.operations[time]
        place[op] = (time, 0)
        if op.name in _LATE:
            end = (len(region.operations), 0)
            first = min((place[r] for y in op.outputs for r in readers.get(y, ())), default=end)
            place[op] = (first[0], first[1] - 1)
    return sorted(region.operations, key=place.__getitem__)


def _waiting_for_loops_only(operations: Sequence[Operation]) -> list[Operation]:
    """Operations before the loops and scatters that they do not wait for, else in order."""
    place: dict[Value, int] = {}
    at: dict[Operation, int] = {}
    for time, op in enumerate(operations):
        stays = op.regions or op.name.startswith("scatter")
        at[op] = time if stays else max((place.get(x, -1) for x in op.inputs), default=-1)
        place.update(dict.fromkeys(op.outputs, at[op]))
    return sorted(operations, key=at.__getitem__)


def _begin_loops_early(operations: Sequence[Operation], memory: "_Memory") -> None:
    """Keep what a loop's first trip makes without the carry, from when it can until the loop."""
    for time, op in enumerate(operations):
        head = _made_without_carry(op) if op.name == "scan" else None
        if head is not None:
            starts, _ = carries(op)
            others = {*op.inputs[: starts.start], *op.inputs[starts.stop :]}
            places = [i for i in range(time) if not others.isdisjoint(operations[i].outputs)]
            memory.made[operations[max(places, default=0)]].append(head)
            memory.bytes[head], memory.last[head] = head.bytes_per_device, time - 1


def _made_without_carry(loop: Operation) -> Value | None:
    """What a loop that gathers or scatters makes without its carry: the largest that it needs."""
    (body,) = loop.regions
    if not {"all-gather", "reduce-scatter"} & set(map(collective_of, body.operations)):
        return None
    behind_carry = set(body.inputs[carries(loop)[0]])
    late = []
    for op in body.operations:
        late.append(not behind_carry.isdisjoint(op.inputs))
        behind_carry.update(op.outputs if late[-1] else ())
    memory = _lay_out(body.operations, body.outputs, "cuda")
    made = {
        y
        for op, is_late in zip(body.operations, late, strict=True)
        if not is_late
        for y in memory.made[op]
    }
    kept = [y for y in made if memory.last.get(y, len(late)) == len(late) or late[memory.last[y]]]
    return max(kept, key=lambda y: memory.bytes[y], default=None)


def _readers(operations: Sequence[Operation]) -> dict[Value, list[Operation]]:
    readers: dict[Value, list[Operation]] = {}
    for op in operations:
        for x in op.inputs:
            readers.setdefault(x, []).append(op)
    return readers


def _taken_over(op: Operation, ending: Sequence[Value], memory: "_Memory") -> int:
    """Bytes of results that lie where an operand lay which ends here."""
    saved, free = 0, [b for b in ending if b in memory.beneath[op]]
    for y in memory.made[op]:
        same = next((b for b in free if memory.bytes[b] == memory.bytes[y]), None)
        if same is not None and y not in memory.early:
            free.remove(same)
            saved += memory.bytes[y]
    return saved


@dataclass
class _Memory:
    """What a straight line of operations keeps in memory.

    Attributes:
      made: the buffers that each operation makes.
      bytes: of each buffer on one device.
      last: time of the last operation that reads it.
      beneath: buffers that an operation may write its result over.
      early: buffers that exist from the start.
    """

    made: dict[Operation, list[Value]] = field(default_factory=dict)
    bytes: dict[Value, int] = field(default_factory=dict)
    last: dict[Value, int] = field(default_factory=dict)
    beneath: dict[Operation, set[Value]] = field(default_factory=dict)
    early: set[Value] = field(default_factory=set)


def _lay_out(operations: Sequence[Operation], outputs: Sequence[Value], platform: str) -> _Memory:
    memory, readers = _Memory(), _readers(operations)
    behind: dict[Value, set[Value]] = {}  # the buffers that a value is computed from
    aligned: dict[Value, set[Value]] = {}  # those of them that are read element by element
    constants: set[Value] = set()
    views: set[Value] = set()
    for time, op in enumerate(operations):
        read = set().union(*(behind.get(x, ()) for x in op.inputs))
        memory.last.update(dict.fromkeys(read, time))
        memory.beneath[op] = _beneath(op, read, aligned, platform)
        memory.made[op] = []
        if op.name in _FILLS and all(x in constants or _is_scalar(x) for x in op.inputs):
            constants.update(op.outputs)
        still = op.name == "sharding_constraint" and not _makes_buffers(op)
        if still or op.name in (_VIEWS if platform == "cpu" else _VIEWS | {"transpose"}):
            (x,) = op.inputs
            views.update(op.outputs if x.given or x in memory.bytes or x in views else ())
        for y in op.outputs:
            wanted = any(_reads_buffers(r) for r in readers.get(y, ()))
            behind[y], aligned[y] = read, memory.beneath[op]
            if _makes_buffers(op) or (wanted and y not in constants and y not in views):
                behind[y] = aligned[y] = {y}
                memory.made[op].append(y)
                memory.bytes[y] = y.bytes_per_device
                if platform == "cpu" and y.half and op.name != "scan":
                    memory.bytes[y] *= 2
        if platform == "cpu" and op.name == "scan":
            pairs = zip(op.outputs, op.regions[0].outputs, strict=True)
            memory.early.update(y for y, inner in pairs if len(y.shape) > len(inner.shape))
    for y in outputs:
        memory.last.update(dict.fromkeys(behind.get(y, ()), len(operations)))
    return memory


def _is_scalar(x: Value) -> bool:
    return x.given and not x.shape


def _makes_buffers(op: Operation) -> bool:
    """Whether the results of an operation lie in memory, whoever reads them."""
    if op.name == "sharding_constraint":
        return op.inputs[0].cut != op.outputs[0].cut
    computes = op.name in _PRODUCTS | _SOLVERS or op.name.startswith(_PREFIXES)
    computes = computes or bool(collective_of(op))
    return bool(op.regions) or (computes and op.name != "reduce_precision")


def _reads_buffers(op: Operation) -> bool:
    """Whether an operation wants its operands in memory."""
    computes = op.name in _PRODUCTS | _SOLVERS or op.name.startswith("scatter")
    return bool(op.regions or collective_of(op)) or computes


def _beneath(
    op: Operation, read: set[Value], aligned: dict[Value, set[Value]], platform: str
) -> set[Value]:
    if op.name.startswith("scatter"):
        return aligned.get(op.inputs[0], set())
    if platform == "tpu" and op.name in _VIEWS | {"transpose"}:
        return aligned.get(op.inputs[0], set())
    if not op.outputs or _makes_buffers(op) or op.name in _VIEWS | _MOVES:
        return set()
    shape = op.outputs[0].shape
    return set().union(*(aligned.get(x, ()) for x in op.inputs if x.shape == shape))
