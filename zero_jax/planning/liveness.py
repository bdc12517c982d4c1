"""The most memory that a step's temporaries need at once: a forecast, before any compiler.

The traced step (`traced`) is walked in order with the buffers that are alive (`buffers`), and these
rules of what XLA makes of it; each was read off executables for CPU, H100 and TPU v5p:

  late       in a loop's body the matmuls that only make weight gradients come last, so that their
             operands live until then
  update     parameters and optimizer state are written where they were (donated)
  turned     on GPU a stack of cut parameters that a loop gathers is copied, its cut dim first

and of explicit steps, whose collectives are buffers and want their operands in memory:

  ahead      on GPU the first trip of a loop that gathers or scatters is taken out of it, and its
             recomputation begins before the loss ends: up to the largest buffer of it
             (`scan_layers` is not taken apart: its barriers forbid it). On CPU barriers are gone
             before operations are ordered: what does not wait for a loop or scatter precedes it
  kept       on CPU moments are copied first, as the step may leave them as they are

and of steps that use the host's memory:

  head       weight gradients come late outside of loops too: that of the output head before the
             update, and the gradient of the logits lives until then
  next       while a loop of the update fetches, what the next one begins with is fetched

Buffers are packed, operations reordered and copies made that the walk does not see; `MARGIN` and
half of the largest gathered leaf, which may exist twice, make it an upper bound within 15 % for
GPT-2 small and medium on all three, and mostly within 25 % else: the figures and the exceptions are
in `tests/benchmarks/forecast_peaks.md`. Not promised: steps of few rows, where the update needs
most and XLA transposes what it reads; 16-bit models on CPU, where XLA copies parameters besides;
32-bit models on TPU, where it stores in 16 bits what only matmuls read; convolutions on CPU; small
programs.

What lies on the host is not counted here, and since arguments are then few, a share of the
temporaries is what a forecast adds (`HOST_MARGIN`). On 19 steps for H100 it came out at 1.01 to
1.13 of the compiled peak; TPU compilers copy more. The CPU compiler has one memory: it does not
tell.
"""

from collections.abc import Mapping, Sequence

from .buffers import PRODUCTS, VIEWS, Buffers, find_buffers, readers_of
from .hardware import Platform
from .operations import Operation, Region, Value, carries, collective_of
from .propagation import propagate

MICROBATCH_MARGIN = 0.08
"""As much more for a step in microbatches, whose accumulators XLA copies."""

MARGIN: dict[str, float] = {"cpu": 0.11, "cuda": 0.085, "tpu": 0.125}
"""Share of a step's peak, arguments included, that a forecast adds for what the walk misses."""

HOST_MARGIN: dict[str, float] = {"cpu": 0.25, "cuda": 0.14, "tpu": 0.48}
"""For a step that uses the host's memory, the share of its temporaries instead."""

_LATE = PRODUCTS | VIEWS | {"transpose", "sharding_constraint", "convert_element_type", "add_any"}


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
    return _peak(region, platform, False, {} if uses_host(region) else None) + copies


def uses_host(region: Region) -> bool:
    """Whether a step moves arrays between the device and the host."""
    return any(
        op.name == "device_put" or any(map(uses_host, op.regions)) for op in region.operations
    )


def _kept_bytes(region: Region) -> int:
    """Bytes of state that a step may leave as it is and whose new value is read besides."""
    readers = readers_of(region.operations)
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


def _peak(
    region: Region, platform: Platform, in_loop: bool, carried: Mapping[Value, int] | None
) -> int:
    """A buffer counts from the operation that makes it to the last one that reads it.

    `carried` are the bytes of what a loop's body is given of its carry; None: the caller counts.
    """
    late = in_loop or (carried is not None and platform != "cpu")
    operations = _products_late(region) if late else region.operations
    if region.is_explicit and platform == "cpu":
        operations = _waiting_for_loops_only(operations)
    memory = find_buffers(operations, region.outputs, platform, carried)
    if region.is_explicit and platform == "cuda":
        _begin_loops_early(operations, memory)
    ahead = {} if carried is None or in_loop else _fetched_ahead(region.operations)
    alive, peak = set(memory.early), 0
    for time, op in enumerate(operations):
        passed = None if carried is None else memory.carried.get(op, {})
        inner = max((_peak(body, platform, True, passed) for body in op.regions), default=0)
        alive.update(memory.made[op])
        ending = [b for b in alive if memory.last.get(b, -1) <= time]
        within = memory.within[op] & {*ending, *memory.made[op]}
        held = sum(memory.bytes[b] for b in alive - within) + ahead.get(op, 0)
        peak = max(peak, held + inner - _taken_over(op, ending, memory))
        alive.difference_update(ending)
    return peak


def _fetched_ahead(operations: Sequence[Operation]) -> dict[Operation, int]:
    """Bytes that are fetched for the next loop of the update while one fetches."""
    ahead: dict[Operation, int] = {}
    following = 0
    for op in reversed(operations):
        if op.name == "to_global":  # before it there are gradients
            break
        if op.name == "device_put":
            following += sum(y.held_bytes for y in op.outputs)
        elif op.regions and uses_host(op.regions[0]):
            ahead[op], following = following, 0
    return ahead


def _products_late(region: Region) -> list[Operation]:
    """Each product, and what only moves or converts it, right before its first reader."""
    readers = readers_of(region.operations)
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


def _begin_loops_early(operations: Sequence[Operation], memory: Buffers) -> None:
    """Keep what a loop's first trip makes without the carry, from when it can until the loop."""
    for time, op in enumerate(operations):
        head = _made_without_carry(op) if op.name == "scan" else None
        if head is not None:
            starts, _ = carries(op)
            others = {*op.inputs[: starts.start], *op.inputs[starts.stop :]}
            places = [i for i in range(time) if not others.isdisjoint(operations[i].outputs)]
            memory.made[operations[max(places, default=0)]].append(head)
            memory.bytes[head], memory.last[head] = head.held_bytes, time - 1


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
    memory = find_buffers(body.operations, body.outputs, "cuda")
    made = {
        y
        for op, is_late in zip(body.operations, late, strict=True)
        if not is_late
        for y in memory.made[op]
    }
    kept = [y for y in made if memory.last.get(y, len(late)) == len(late) or late[memory.last[y]]]
    return max(kept, key=lambda y: memory.bytes[y], default=None)


def _taken_over(op: Operation, ending: Sequence[Value], memory: Buffers) -> int:
    """Bytes of results that lie where an operand lay which ends here."""
    saved, free = 0, [b for b in ending if b in memory.beneath[op]]
    for y in memory.made[op]:
        same = next((b for b in free if memory.bytes[b] == memory.bytes[y]), None)
        if same is not None and y not in memory.early:
            free.remove(same)
            saved += memory.bytes[y]
    return saved
