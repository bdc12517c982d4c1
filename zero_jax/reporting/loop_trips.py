"""How often a `while` of a compiled module runs its body.

GPU and CPU texts say it (`known_trip_count`). TPU texts do not, so it is computed: the loop carries
a tuple; one element of it starts at a constant, grows by a constant in each trip, and is compared
with a constant. All three constants are looked for through copies, fusions, calls and the elements
that enclosing loops pass on unchanged (the TPU compiler moves constants out of loops).
A loop that ends on data (`lax.while_loop` with a tolerance) has no count, and None is returned.

Not here: counters that do not step by a constant, overflow of the counter's type.
"""

import re
from dataclasses import dataclass

from .hlo_text import Computation, Instruction, Module

_SAME_VALUE = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, eq=False)
class Scope:
    """A computation as one call reaches it: the instruction that called it and the caller's scope.

    Attributes:
      module: the module.
      computation: what runs.
      call: the instruction that calls it, None for the entry.
      parent: the scope that `call` stands in, None for the entry.
    """

    module: Module
    computation: Computation
    call: Instruction | None = None
    parent: "Scope | None" = None

    def enter(self, call: Instruction, name: str) -> "Scope":
        """The scope of the computation `name` that `call`, an instruction of this one, calls."""
        return Scope(self.module, self.module.computations[name.lstrip("%")], call, self)

    def enter_loop(self, loop: Instruction, part: str) -> "Scope":
        """The scope of a while's "body" or "condition"."""
        return self.enter(loop, loop.attribute(part) or "")

    @property
    def loop(self) -> "Scope | None":
        """The innermost scope, this one included, that is part of a while; None outside of all."""
        if self.call is None or self.parent is None:
            return None
        return self if self.call.opcode == "while" else self.parent.loop


def trip_count(loop: Instruction, scope: Scope) -> int | None:
    """How often `loop`, a while in `scope`, runs its body; None if the text does not tell."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = scope.enter_loop(loop, "condition")
    compared = _comparison(condition.computation.root.name, condition)
    if compared is None:
        return None
    left, right, direction = compared
    for counter, limit, way in ((left, right, direction), (right, left, _MIRRORED.get(direction))):
        if len(counter.elements) != 1 or way is None:
            continue
        (element,) = counter.elements
        body = scope.enter_loop(loop, "body")
        after = _element(body.computation.root.name, element, body)
        if after is None or element not in after.elements:
            continue
        added = list(after.elements)
        added.remove(element)
        step = _number(_Value(tuple(added), after.offset), body)
        start = _number(_element(loop.operands[0], element, scope), scope)
        end = _number(limit, condition)
        if start is not None and end is not None and step is not None:
            return _count(start, end - counter.offset, step, way)
    return None


@dataclass(frozen=True)
class _Value:
    """A whole number: `offset`, plus what these elements of the loop's tuple hold."""

    elements: tuple[int, ...]
    offset: int


def _count(start: int, end: int, step: int, direction: str) -> int | None:
    """Trips of a counter that is compared before each."""
    if direction in ("GT", "GE"):
        start, end, step, direction = -start, -end, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        end += 1
    if direction == "NE":
        return (end - start) // step if step and (end - start) % step == 0 else None
    return max(0, -((start - end) // step)) if direction in ("LT", "LE") and step > 0 else None


def _comparison(name: str, scope: Scope) -> tuple[_Value, _Value, str] | None:
    """Both sides and the direction of the comparison that `name` is."""
    instruction = scope.computation.by_name[name]
    if instruction.opcode in ("fusion", "call"):
        inner = scope.enter(instruction, instruction.called[0])
        return _comparison(inner.computation.root.name, inner)
    if instruction.opcode in _SAME_VALUE:
        return _comparison(instruction.operands[0], scope)
    if instruction.opcode != "compare":
        return None
    left, right = (_value(operand, scope) for operand in instruction.operands)
    direction = instruction.attribute("direction")
    return (left, right, direction) if left and right and direction else None


def _value(name: str, scope: Scope) -> _Value | None:
    """What the scalar `name` is, None if it is not a sum of constants and elements."""
    instruction = scope.computation.by_name[name]
    match instruction.opcode:
        case "constant":
            whole = re.fullmatch(r"-?\d+", instruction.arguments)
            return _Value((), int(whole[0])) if whole else None
        case "parameter" if scope.parent and scope.call and scope.call.opcode != "while":
            return _value(scope.call.operands[int(instruction.arguments)], scope.parent)
        case "get-tuple-element":
            index = int(instruction.attribute("index") or 0)
            return _element(instruction.operands[0], index, scope)
        case "add" | "subtract":
            left, right = (_value(operand, scope) for operand in instruction.operands)
            return _sum(left, right, 1 if instruction.opcode == "add" else -1)
        case "fusion" | "call":
            inner = scope.enter(instruction, instruction.called[0])
            return _value(inner.computation.root.name, inner)
        case same if same in _SAME_VALUE:
            return _value(instruction.operands[0], scope)
    return None


def _element(name: str, index: int, scope: Scope) -> _Value | None:
    """Element `index` of the tuple `name`."""
    instruction = scope.computation.by_name[name]
    match instruction.opcode:
        case "parameter" if scope.call and scope.call.opcode == "while":
            return _Value((index,), 0)
        case "parameter" if scope.call and scope.parent:
            return _element(scope.call.operands[int(instruction.arguments)], index, scope.parent)
        case "tuple":
            return _value(instruction.operands[index], scope)
        case "fusion" | "call":
            inner = scope.enter(instruction, instruction.called[0])
            return _element(inner.computation.root.name, index, inner)
        case "copy" | "opt-barrier":
            return _element(instruction.operands[0], index, scope)
    return None


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None or (right.elements and sign < 0):
        return None
    return _Value(left.elements + right.elements, left.offset + sign * right.offset)


def _number(value: _Value | None, scope: Scope) -> int | None:
    """A value as a number, where elements that loops pass on unchanged are followed outwards."""
    if value is None or not value.elements:
        return value and value.offset
    inside = scope.loop
    if inside is None or inside.call is None or inside.parent is None:
        return None
    body = inside.parent.enter_loop(inside.call, "body")
    total = value.offset
    for element in value.elements:
        if _element(body.computation.root.name, element, body) != _Value((element,), 0):
            return None
        before = _element(inside.call.operands[0], element, inside.parent)
        number = _number(before, inside.parent)
        if number is None:
            return None
        total += number
    return total
