"""The text of a compiled module, taken apart into computations and instructions.

The text is what `jax.stages.Compiled.as_text()` prints: one instruction a line, with operands by
name. Source of the form: the printer of openxla/xla (`HloInstruction::ToString`); seen with
jax 0.10.2 and 0.12 for CPU, H100 and TPU v5e, v5p, v6e, tpu7x. Layouts with tiles and memory spaces
(`{1,0:T(8,128)(2,1)S(1)}`) and comments (`/*index=5*/`) are read over.

Attributes stay text until someone asks for one: most lines are never asked. Not here: what an
instruction means (`hlo`, `loop_trips`, `matmul_flops`), and other printing styles of HLO.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = ")
_OPCODE = re.compile(r" ?([\w-]+)\(")
_OPERAND = re.compile(r"%([^\s,(){}]+)")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = ("calls", "to_apply", "called_computations", "branch_computations",
           "true_computation", "false_computation")  # fmt: skip


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result: element type, dims, bits an element takes in memory."""

    dtype: str
    dims: tuple[int, ...]
    bits: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without tile padding."""
        return self.size * self.bits // 8


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line. `arguments` is the text in the parentheses, `attributes` all that follows them."""

    name: str
    opcode: str
    shape: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(_OPERAND.findall(self.arguments))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        return arrays(self.shape)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that the instruction calls; of a `while`, see its body and condition."""
        values = (self.attribute(key) for key in _CALLED)
        return tuple(name for value in values if value for name in _OPERAND.findall(value))

    @property
    def op_name(self) -> str:
        """What the user's program called it, "" if the compiler does not say."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, key: str) -> str | None:
        """The text of an attribute, None without it."""
        at = self.attributes.find(f", {key}=")
        return None if at < 0 else _value(self.attributes, at + len(key) + 3)


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of the module: its instructions in the order printed, which is the schedule's."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value is returned."""
        return next(i for i in self.instructions if i.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {int(i.arguments): i for i in found}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that have the named one as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        """The arrays of all operands of `instruction`, in order."""
        return tuple(a for o in instruction.operands for a in self.by_name[o].arrays)


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program for all its devices."""

    computations: dict[str, Computation]
    entry: Computation
    is_scheduled: bool
    partitions: int
    replicas: int

    @property
    def devices(self) -> int:
        """Number of devices that run it."""
        return self.partitions * self.replicas


def parse_module(text: str) -> Module:
    """Take the text of one compiled module apart.

    Raises:
      ValueError: the text is not that of a compiled module.

    >>> text = "HloModule m, num_partitions=2\\n\\nENTRY %f (x: f32[2]) -> f32[2] {\\n"
    >>> text += "  ROOT %x = f32[2]{0} parameter(0)\\n}\\n"
    >>> parse_module(text).entry.root.arrays[0].bytes
    8
    """
    header, _, body = text.partition("\n")
    computations, entry = {}, None
    name, lines = None, []
    for line in body.split("\n"):
        if name is None:
            opened = _COMPUTATION.match(line)
            if opened:
                name, lines = opened[2], []
                entry = name if opened[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif _INSTRUCTION.match(line):
            lines.append(_instruction(line))
    if not header.startswith("HloModule") or entry not in computations:
        raise ValueError(
            f"text begins with {text[:40]!r}; expected a compiled module ('HloModule ...' with an "
            "ENTRY computation). Pass a compiled step, or what its as_text() returned."
        )
    return Module(
        computations,
        computations[entry],
        "is_scheduled=true" in header,
        _count(header, "num_partitions"),
        _count(header, "replica_count"),
    )


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays in the text of a shape, tuples flattened.

    >>> shape = "(bf16[8,128]{1,0:T(8,128)(2,1)}, pred[], s4[6]{0:E(4)}, /*index=3*/s4[6]{0})"
    >>> [a.bytes for a in arrays(shape)]
    [2048, 1, 3, 6]
    """
    return tuple(_array(*found) for found in _ARRAY.findall(shape))


def _array(dtype: str, dims: str, layout: str) -> Array:
    """Types under a byte take a byte each unless the layout packs them (`E(4)`)."""
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else {"pred": 8}.get(dtype, 0)
    packed = re.search(r"E\((\d+)\)", layout)
    stored = int(packed[1]) if packed else -(-bits // 8) * 8
    return Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d), stored)


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None, line
    start = head.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, shape_end)
    assert opcode is not None, line
    end = _closing(line, opcode.end() - 1)
    return Instruction(
        head[2],
        opcode[1],
        line[start:shape_end],
        line[opcode.end() : end - 1],
        line[end:],
        bool(head[1]),
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` has closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    raise ValueError(f"unbalanced parentheses in {text[start : start + 80]!r}; is the text cut?")


def _value(text: str, start: int) -> str:
    """The attribute's value: up to the next attribute, brackets and quotes kept together."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[({\[]|[)}\]]|, (?!device_ids=)').finditer(
        text, start
    ):
        token = found[0]
        if token in "({[":
            depth += 1
        elif token in ")}]":
            depth -= 1
        elif token == ", " and depth == 0:
            return text[start : found.start()]
    return text[start:]


def _count(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1
