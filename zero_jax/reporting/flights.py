"""Asynchronous instructions: which one waits for what a start began.

A start hands its flight on as an operand: to a `...-done`, through `...-update`s (TPU SparseCore),
or, in the TPU compiler's asynchronous collective fusions (v5e), to fusions that carry it on beside
a product. Those return the flight's buffers as elements of their tuple, aliased to the operands
they came in by, and a last fusion waits. Such fusions print the collective again; only the one that
starts it counts.

Not here: a flight that leaves its computation (GPU pipelines of send and recv).
"""

import re
from collections.abc import Callable

from .hlo_text import Computation, Instruction
from .loop_trips import Scope

_CARRIED = "async_collective_fusion_config"


def starts_flight(computation: Computation) -> bool:
    """Whether a fusion of `computation` starts a collective that later fusions carry on."""
    return '"AsyncCollectiveStart"' in computation.root.attributes


def is_carried(collective: Instruction, computation: Computation) -> bool:
    """Whether `collective` was started by an earlier fusion and is printed here once more."""
    return _CARRIED in collective.attributes and not starts_flight(computation)


def landing(start: Instruction, scope: Scope) -> str | None:
    """The instruction that waits for what `start` began, None if `start` waits itself."""
    if '"is_sync":true' in start.attributes:
        return None
    if not start.opcode.endswith("-start") and not _fuses(start, scope, starts_flight):
        return None
    # Who holds the flight: names, and of a tuple the elements that do (None: the whole value).
    held: dict[str, set[int] | None] = {start.name: None}
    holders = [start.name]
    while holders:
        holder = holders.pop(0)
        for user in scope.computation.users.get(holder, ()):
            if user.opcode.endswith("-done") or _fuses(user, scope, _ends_flight):
                return user.name
            elements = _held_elements(user, held[holder], held, scope)
            if elements != set() and user.name not in held:
                held[user.name] = elements
                holders.append(user.name)
    return None


def _held_elements(
    user: Instruction,
    of_holder: set[int] | None,
    held: dict[str, set[int] | None],
    scope: Scope,
) -> set[int] | None:
    """The elements of `user` that hold the flight, which came in by an operand holding it."""
    if user.opcode.endswith("-update"):
        return None
    if user.opcode == "get-tuple-element":
        index = int(user.attribute("index") or 0)
        return None if of_holder is None or index in of_holder else set()
    if _fuses(user, scope, _carries_flight):
        aliases = user.attribute("output_to_operand_aliasing") or ""
        pairs = re.findall(r"\{(\d+)\}: \((\d+),", aliases)
        return {int(out) for out, operand in pairs if user.operands[int(operand)] in held}
    return set()


def _fuses(instruction: Instruction, scope: Scope, what: Callable[[Computation], bool]) -> bool:
    """Whether `instruction` is a fusion of a computation that is `what`."""
    if instruction.opcode != "fusion":
        return False
    return any(what(scope.module.computations[name]) for name in instruction.called)


def _carries_flight(computation: Computation) -> bool:
    return any(_CARRIED in instruction.attributes for instruction in computation.instructions)


def _ends_flight(computation: Computation) -> bool:
    return '"AsyncCollectiveDone"' in computation.root.attributes
