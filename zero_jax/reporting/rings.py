"""Rings of collective-permutes that stand for one all-gather or reduce-scatter.

Where a matrix product follows an all-gather or precedes a reduce-scatter, XLA's partitioner may
write a loop instead ("windowed einsum", "collective matmul"; Wang et al., ASPLOS 2023): each trip
permutes a piece to the neighbour and multiplies another. TPU compilers do so by default, GPU ones
when asked. The partitioner names the loop's body `windowed_dot_general_body_...`; that name is how
a ring is told from a permute that a user wrote. Which of the two it is shows in the body: a
reduce-scatter adds to what arrived, an all-gather only multiplies with it and passes it on. A
permute just before or after the loop, which aligns the pieces, belongs to the ring.

A ring over n devices in two directions sends more than the (n-1)/n of the collective it replaces;
what is counted is what is permuted. Not seen: rings that the compiler has unrolled out of a loop.
"""

from .hlo_text import Instruction
from .loop_trips import Scope

_RING = "windowed_dot_general"
_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "transpose", "slice",
          "dynamic-slice", "pad", "select", "concatenate", "get-tuple-element")  # fmt: skip


def ring_kind(permute: Instruction, scope: Scope) -> str | None:
    """The collective that a collective-permute in `scope` is a part of, None if it stands alone."""
    loop = scope.loop
    if loop is not None and _RING in loop.computation.name:
        return _kind(loop)
    neighbour = _loop_before(permute, scope) or _loop_after(permute, scope)
    return _kind(scope.enter_loop(neighbour, "body")) if neighbour else None


def _kind(body: Scope) -> str:
    arrivals = [
        instruction
        for instruction in body.computation.instructions
        if instruction.opcode in ("collective-permute", "collective-permute-done")
    ]
    added = any(_is_added_to(arrival.name, body) for arrival in arrivals)
    return "reduce-scatter" if added else "all-gather"


def _is_added_to(name: str, scope: Scope) -> bool:
    """Whether `name`, moved and converted but not multiplied, is an operand of an addition."""
    for user in scope.computation.users.get(name, ()):
        if user.opcode == "add":
            return True
        if user.opcode in _MOVES and _is_added_to(user.name, scope):
            return True
        if user.opcode in ("fusion", "call"):
            inner = scope.enter(user, user.called[0])
            for number, operand in enumerate(user.operands):
                parameter = inner.computation.parameters.get(number)
                if operand == name and parameter and _is_added_to(parameter.name, inner):
                    return True
    return False


def _loop_before(permute: Instruction, scope: Scope) -> Instruction | None:
    """The ring's loop that the permuted value comes out of."""
    by_name = scope.computation.by_name
    source = by_name[permute.operands[0]]
    while source.opcode in _MOVES and source.operands:
        source = by_name[source.operands[0]]
    return source if _is_ring(source) else None


def _loop_after(permute: Instruction, scope: Scope) -> Instruction | None:
    """The ring's loop that the permuted value goes into."""
    names, users = [permute.name], scope.computation.users
    while names:
        for user in users.get(names.pop(), ()):
            if _is_ring(user):
                return user
            if user.opcode in (*_MOVES, "collective-permute-done", "tuple"):
                names.append(user.name)
    return None


def _is_ring(instruction: Instruction) -> bool:
    return instruction.opcode == "while" and _RING in (instruction.attribute("body") or "")
