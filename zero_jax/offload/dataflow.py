"""Which inputs an output of a traced function needs, and computing it alone.

An optax update is one function of all leaves. What streams through device memory leaf by leaf is
the same function taken apart: the jaxpr is laid out as one list of equations (calls inlined), and
the part that a few outputs need is found by walking it backward. Conditionals are taken apart too:
`optax.MultiSteps` holds the whole update in one, and of a leaf's part only that leaf goes through.

A part whose equations all work element by element on arrays of one shape may run on pieces of them
(`is_elementwise`); any other runs on whole leaves.

Not here: moving arrays, the order of parts (`streams`), loops taken apart (`scan` and `while` are
one equation each).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

INLINED = dict.fromkeys(("jit", "pjit", "checkpoint"), "jaxpr") | dict.fromkeys(
    ("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"
)
"""Primitives that call a function and do no more, and the parameter it is in."""

ELEMENTWISE = frozenset(
    """abs add add_any and atan2 cbrt ceil clamp conj convert_element_type copy copy_p cos cosh div
    eq erf exp exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt max
    min mul ne neg nextafter not or pow real reduce_precision rem reshard round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor""".split()
)
"""Primitives whose results at an index depend on their operands at that index."""

PLACING = ("reshard", "sharding_constraint")
"""Of these, those that only say where an array lies."""

Name = int
Values = Mapping[Name, Any]


@dataclass(frozen=True)
class Constant:
    """A value that is known when the function is traced."""

    value: Any


@dataclass(frozen=True)
class Equation:
    """One primitive's application.

    Attributes:
      equation: of the jaxpr it comes from.
      reads: a name or a constant for each operand.
      writes: a name for each result.
      branches: of a conditional.
    """

    equation: Any
    reads: tuple[Name | Constant, ...]
    writes: tuple[Name, ...]
    branches: "tuple[Graph, ...]" = ()

    @property
    def primitive(self) -> str:
        """Its name."""
        return self.equation.primitive.name

    def reads_for(self, wanted: set[Name]) -> tuple[Name | Constant, ...]:
        """The operands that some results need."""
        if not self.branches:
            return self.reads
        needed = {0} | {at + 1 for at in self._operands(wanted)}
        return tuple(read for at, read in enumerate(self.reads) if at in needed)

    def run(self, wanted: set[Name], values: Values, shape: Any, placed: bool) -> dict[Name, Any]:
        """The wanted results; `shape` and `placed` as in `Part.run`."""
        if self.branches:
            return self._choose(wanted, values, shape, placed)
        operands = [_value(read, values) for read in self.reads]
        if not placed and self.primitive in PLACING:
            return {self.writes[0]: operands[0]}
        if shape is not None and self.primitive == "broadcast_in_dim":
            return {self.writes[0]: jnp.broadcast_to(operands[0], shape)}
        params = self.equation.primitive.get_bind_params(self.equation.params)
        results = self.equation.primitive.bind(*operands, **params)
        results = results if self.equation.primitive.multiple_results else [results]
        return dict(zip(self.writes, results, strict=True))

    def _operands(self, wanted: set[Name]) -> list[int]:
        """Positions among the operands of the branches that the wanted results need."""
        found: set[int] = set()
        for branch, outs in zip(self.branches, self.outs_of(wanted), strict=True):
            needed = branch.part(outs).inputs
            found |= {at for at, name in enumerate(branch.inputs) if name in needed}
        return sorted(found)

    def outs_of(self, wanted: set[Name]) -> list[list[Name | Constant]]:
        """Of each branch, what the wanted results are there."""
        chosen = [at for at, name in enumerate(self.writes) if name in wanted]
        return [[branch.outputs[at] for at in chosen] for branch in self.branches]

    def _choose(self, wanted: set[Name], values: Values, shape: Any, placed: bool) -> Any:
        used = self._operands(wanted)

        def run(branch: "Graph", outs: list[Name | Constant]) -> Any:
            def on(*operands: Any) -> list[Any]:
                given = {branch.inputs[at]: x for at, x in zip(used, operands, strict=True)}
                return branch.part(outs).run(given, shape, placed)

            return on

        branches = [run(b, o) for b, o in zip(self.branches, self.outs_of(wanted), strict=True)]
        operands = [_value(self.reads[at + 1], values) for at in used]
        results = lax.switch(_value(self.reads[0], values), branches, *operands)
        return dict(zip([name for name in self.writes if name in wanted], results, strict=True))


@dataclass(frozen=True)
class Graph:
    """A function as one list of equations.

    Attributes:
      inputs: a name for each argument.
      outputs: a name or a constant for each result.
      equations: in order.
      shapes, dtypes: name -> those of what it names.
    """

    inputs: tuple[Name, ...]
    outputs: tuple[Name | Constant, ...]
    equations: tuple[Equation, ...]
    shapes: Mapping[Name, tuple[int, ...]]
    dtypes: Mapping[Name, Any]

    def part(
        self, outputs: Sequence[Name | Constant], known: frozenset[Name] = frozenset()
    ) -> "Part":
        """What computes some outputs from inputs and from what is `known`."""
        wanted = {out for out in outputs if not isinstance(out, Constant)}
        needed: dict[int, set[Name]] = {}  # equation -> its results that are needed
        reads: set[Name] = set()
        later: list[int] = []  # a heap: equations are expanded last first, when all uses are known

        def need(name: Name) -> None:
            at = None if name in known else self._producers.get(name)
            if at is None:
                reads.add(name)
            elif at in needed:
                needed[at].add(name)
            else:
                needed[at] = {name}
                heapq.heappush(later, -at)

        for name in wanted:
            need(name)
        while later:
            at = -heapq.heappop(later)
            for name in _names(self.equations[at].reads_for(needed[at])):
                need(name)
        chosen = tuple((self.equations[at], frozenset(needed[at])) for at in sorted(needed))
        return Part(tuple(outputs), chosen, frozenset(reads), self.shapes)

    @cached_property
    def _producers(self) -> dict[Name, int]:
        return {name: at for at, e in enumerate(self.equations) for name in e.writes}

    def touched_by(self, names: set[Name]) -> set[Name]:
        """Everything that depends on `names`."""
        touched = set(names)
        for equation in self.equations:
            for name in equation.writes:
                if touched.intersection(_names(equation.reads_for({name}))):
                    touched.add(name)
        return touched


@dataclass(frozen=True)
class Part:
    """What computes a few outputs of a graph.

    Attributes:
      outputs: which.
      equations: with the results that are wanted of each.
      inputs: names that it has to be given.
      shapes: those of the graph.
    """

    outputs: tuple[Name | Constant, ...]
    equations: tuple[tuple[Equation, frozenset[Name]], ...]
    inputs: frozenset[Name]
    shapes: Mapping[Name, tuple[int, ...]]

    def run(self, values: Values, shape: Any = None, placed: bool = True) -> list[Any]:
        """Compute the outputs.

        Args:
          values: name -> array, for every one of `inputs`.
          shape: of the pieces, where an elementwise part runs on pieces; None: whole.
          placed: what the function says of where arrays lie is stated again.
        """
        known = dict(values)
        for equation, wanted in self.equations:
            known |= equation.run(set(wanted), known, shape, placed)
        return [_value(out, known) for out in self.outputs]

    def is_elementwise(self, shape: tuple[int, ...]) -> bool:
        """Whether it may run on pieces of arrays of `shape`: all else it reads is scalar."""
        if any(isinstance(out, Constant) or self.shapes[out] != shape for out in self.outputs):
            return False
        return all(self.fits(equation, wanted, shape) for equation, wanted in self.equations)

    def fits(self, equation: Equation, wanted: frozenset[Name], shape: tuple[int, ...]) -> bool:
        """Whether one equation does."""
        reads = [
            jnp.shape(r.value) if isinstance(r, Constant) else self.shapes[r]
            for r in equation.reads_for(set(wanted))
        ]
        writes = [self.shapes[name] for name in wanted]
        if all(s == () for s in reads + writes):
            return True
        if any(s not in ((), shape) for s in reads + writes):
            return False
        if equation.branches:
            outs = equation.outs_of(set(wanted))
            parts = (b.part(o) for b, o in zip(equation.branches, outs, strict=True))
            return reads[0] == () and all(p.is_elementwise(shape) for p in parts)
        if equation.primitive == "broadcast_in_dim":
            return reads == [()]
        return equation.primitive in ELEMENTWISE


def trace(function: Any, *args: Any) -> Graph:
    """Trace a function of arrays or `ShapeDtypeStruct`s to a graph.

    Args:
      function: of flat arguments; returns a list of arrays.
      args: its arguments.
    """
    return _Reader().graph(jax.make_jaxpr(function)(*args))


class _Reader:
    """Gives every value a name of its own while calls are inlined."""

    def __init__(self) -> None:
        self._last = -1
        self._shapes: dict[Name, tuple[int, ...]] = {}
        self._dtypes: dict[Name, Any] = {}

    def graph(self, closed: Any) -> Graph:
        """A closed jaxpr as a graph."""
        jaxpr = closed.jaxpr
        inputs = tuple(self._name(v) for v in jaxpr.invars)
        known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        equations: list[Equation] = []
        outputs = self._inline(jaxpr, closed.consts, known, equations)
        return Graph(inputs, tuple(outputs), tuple(equations), self._shapes, self._dtypes)

    def _inline(self, jaxpr: Any, consts: Any, known: dict[Any, Any], into: list[Equation]) -> Any:
        known |= {v: Constant(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        for equation in jaxpr.eqns:
            reads = [self._read(v, known) for v in equation.invars]
            inner = equation.params.get(INLINED.get(equation.primitive.name, ""), None)
            if inner is not None:
                closed = inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())
                own = dict(zip(closed.jaxpr.invars, reads, strict=True))
                results = self._inline(closed.jaxpr, closed.consts, own, into)
                known |= dict(zip(equation.outvars, results, strict=True))
                continue
            names = tuple(self._name(v) for v in equation.outvars)
            known |= dict(zip(equation.outvars, names, strict=True))
            branches = ()
            if equation.primitive.name == "cond":
                branches = tuple(map(self.graph, equation.params["branches"]))
            into.append(Equation(equation, tuple(reads), names, branches))
        return [self._read(v, known) for v in jaxpr.outvars]

    def _read(self, variable: Any, known: dict[Any, Any]) -> Name | Constant:
        return Constant(variable.val) if isinstance(variable, core.Literal) else known[variable]

    def _name(self, variable: Any) -> Name:
        self._last += 1
        self._shapes[self._last] = variable.aval.shape
        self._dtypes[self._last] = variable.aval.dtype
        return self._last


def _value(read: Name | Constant, values: Mapping[Name, Any]) -> Any:
    return read.value if isinstance(read, Constant) else values[read]


def _names(reads: tuple[Name | Constant, ...]) -> set[Name]:
    return {r for r in reads if not isinstance(r, Constant)}
