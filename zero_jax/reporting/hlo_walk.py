"""Every collective that a compiled step executes, and the schedule it stands in.

The walk starts at the entry and follows each call as often as it is made: the body of a `while` for
its trips, its condition once more, of a `conditional` the branch that sends most (of equal ones,
the one that multiplies most), and everything that a fusion, a call or an asynchronous wrapper
calls. Each is met once per caller, and a start with its done is one collective. How a collective is
written, by target:

  all-gather, all-reduce-start ...       as such, several arrays in one as well
  fusion-start, custom-call-start ...    a wrapper whose computation has the collective (GPU
                                         all-reduce kernels, TPU SparseCore)
  a fusion of %all-reduce-scatter        TPU, a ring along a physical axis: an all-reduce of which
                                         each device keeps a slice, in one emitter. It counts as one
                                         reduce-scatter of what is all-reduced, padding included
  an async-collective-start              TPU v5e: fusions that carry a collective on, see `flights`
  a ring of collective-permutes          see `rings`

An all-reduce and a slice that are not one fusion are an all-reduce. Not seen: `send` and `recv`,
custom-calls that communicate, MegaScale transfers between TPU slices.
"""

from dataclasses import dataclass, field, replace

from .flights import is_carried, landing, starts_flight
from .hlo_text import Instruction, Module
from .loop_trips import Scope, trip_count
from .matmul_flops import matmul_flops
from .rings import ring_kind
from .schedule import Done, Event, Loop, Matmul, Start, total_flops
from .wire import Sent, collective_kind, sent


@dataclass(frozen=True)
class Repeat:
    """How often something runs in one step.

    Attributes:
      trips: product over the loops around it; a loop that does not tell counts once.
      known: every loop around it told.
      in_loop: there is a loop around it.
    """

    trips: int = 1
    known: bool = True
    in_loop: bool = False

    def inside(self, trips: int | None) -> "Repeat":
        """The same in a further loop of so many trips, None if it does not tell."""
        if trips is None:
            return Repeat(self.trips, False, True)
        return Repeat(self.trips * trips, self.known, True)


@dataclass(frozen=True)
class Found:
    """A collective where the walk met it: what it is, sends, is called, and how often it runs."""

    kind: str
    spelling: str
    sent: Sent
    name: str
    op_name: str
    repeat: Repeat
    is_async: bool = False


def walk(module: Module) -> tuple[dict[int, Found], list[Event]]:
    """All collectives of a step by number, in order of starting, and the step's events."""
    walking = _Walk()
    events = walking.computation(Scope(module, module.entry), Repeat())
    return walking.found, events


@dataclass
class _Walk:
    """Collectives found so far; `count` numbers them, dropped branches included."""

    found: dict[int, Found] = field(default_factory=dict)
    count: int = 0

    def computation(self, scope: Scope, repeat: Repeat) -> list[Event]:
        """Events of one execution of a computation."""
        events: list[Event] = []
        waited_for: dict[str, list[Event]] = {}
        for instruction in scope.computation.instructions:
            begun = self.instruction(instruction, scope, repeat)
            end = landing(instruction, scope) if begun else None
            if end is not None:
                flying = [event for event in begun if isinstance(event, Done)]
                begun = [event for event in begun if not isinstance(event, Done)]
                waited_for.setdefault(end, []).extend(flying)
                for event in flying:
                    self.found[event.index] = replace(self.found[event.index], is_async=True)
            events += begun
            events += waited_for.pop(instruction.name, [])
        return events

    def instruction(self, instruction: Instruction, scope: Scope, repeat: Repeat) -> list[Event]:
        """Events of one instruction, as if it waited for all that it begins."""
        opcode = instruction.opcode
        if collective_kind(opcode):
            return self.collective(instruction, scope, repeat)
        if opcode == "while":
            return self.loop(instruction, scope, repeat)
        if opcode == "conditional":
            return self.largest_branch(instruction, scope, repeat)
        if opcode.endswith(("-done", "-update")):
            return []
        flops = matmul_flops(instruction, scope.computation)
        events: list[Event] = [Matmul(flops)] if flops else []
        for name in instruction.called:
            events += self.computation(scope.enter(instruction, name), repeat)
        return events

    def collective(self, instruction: Instruction, scope: Scope, repeat: Repeat) -> list[Event]:
        """Note a collective."""
        if is_carried(instruction, scope.computation):
            return []
        kind, spelling = _kind_and_spelling(instruction, scope)
        sends = sent(instruction, kind, scope.computation, scope.module)
        name = _op_name(instruction, scope)
        number = self.count
        self.count += 1
        self.found[number] = Found(kind, spelling, sends, instruction.name, name, repeat)
        return [Start(number), Done(number)]

    def loop(self, instruction: Instruction, scope: Scope, repeat: Repeat) -> list[Event]:
        """A while: its condition is asked once more than its body runs."""
        trips = trip_count(instruction, scope)
        checks = None if trips is None else trips + 1
        events: list[Event] = []
        for part, times in (("condition", checks), ("body", trips)):
            inner = self.computation(scope.enter_loop(instruction, part), repeat.inside(times))
            if inner:
                events.append(Loop(1 if times is None else times, inner))
        return events

    def largest_branch(self, instruction: Instruction, scope: Scope, repeat: Repeat) -> list[Event]:
        """A conditional: of its branches only the one that sends most stays found."""
        before, largest, most, events = self.found, {}, (-1, -1), []
        for name in instruction.called:
            self.found = {}
            branch = self.computation(scope.enter(instruction, name), repeat)
            total = sum(each.sent.bytes * each.repeat.trips for each in self.found.values())
            if (total, total_flops(branch)) > most:
                largest, most, events = self.found, (total, total_flops(branch)), branch
        self.found = before | largest
        return events


def _kind_and_spelling(instruction: Instruction, scope: Scope) -> tuple[str, str]:
    opcode = instruction.opcode
    kind = collective_kind(opcode)
    assert kind is not None, opcode
    if kind == "collective-permute":
        ring = ring_kind(instruction, scope)
        return (ring, "ring of collective-permute") if ring else (kind, opcode)
    if kind == "all-reduce" and scope.computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter", "fusion of all-reduce-scatter"
    if starts_flight(scope.computation):
        return kind, f"async-collective-start of {opcode}"
    wrapper = scope.call.opcode if scope.call else "call"
    return kind, opcode if wrapper in ("call", "while", "conditional") else f"{wrapper} of {opcode}"


def _op_name(instruction: Instruction, scope: Scope) -> str:
    """The instruction's own, or that of the nearest wrapper around it that has one."""
    if instruction.op_name or scope.call is None or scope.parent is None:
        return instruction.op_name
    return "" if scope.call.opcode == "while" else _op_name(scope.call, scope.parent)
