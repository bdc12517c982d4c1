"""A step as a list of operations, with the bytes that one device has of each value.

`jax.make_jaxpr` traces the user's step without a compiler, in well under a second at any size. The
step is traced with the rows of the batch that one device has, so that activations have their own
size; parameters, gradients and optimizer state have their logical shapes, and `propagation` follows
how they are cut.

Not here: which values need memory at the same time (`liveness`).
"""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any


@dataclass(eq=False)
class Value:
    """An array in the traced step.

    Attributes:
      shape, itemsize: logical shape; bytes of an element.
      half: whether it is a 16-bit float.
      cut: parts that each dim is cut into.
      given: whether it exists outside of the region: an argument, a constant, a literal.
    """

    shape: tuple[int, ...]
    itemsize: int
    half: bool = False
    cut: tuple[int, ...] = ()
    given: bool = False

    def __post_init__(self) -> None:
        self.cut = self.cut or (1,) * len(self.shape)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device has of it; a dim that is cut unevenly is rounded up."""
        local = (math.ceil(size / parts) for size, parts in zip(self.shape, self.cut, strict=True))
        return math.prod(local) * self.itemsize

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

    `wanted` says how what is around a body uses its outputs: cut so.
    """

    operations: list[Operation]
    inputs: list[Value]
    outputs: list[Value]
    wanted: dict[Value, tuple[int, ...]] = field(default_factory=dict)

    @property
    def matmul_flops(self) -> int:
        """Floating-point operations in its products on one device; a loop's times its length.

        Convolutions count as the matmuls they are. Known after `propagation`.
        """
        return sum(_each(op, _flops) for op in self.operations)

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
        return sum(_each(op, _summed_bytes) for op in self.operations)


def trace(step: Callable[..., Any], state: Tree, batch: Tree) -> Region:
    """Trace a step on abstract arguments.

    Args:
      step: `step(state, batch)`, jitted or not.
      state: tree whose array leaves carry shardings: a state from `init_train_state`.
      batch: tree of arrays or `jax.ShapeDtypeStruct`s with shardings: from `shard_batch`.
    """
    mine = jax.tree.map(_rows_of_one_device, batch)
    closed = jax.make_jaxpr(step)(state, mine)
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(mine)]
    inputs = [
        _value(var.aval, cut=cut_of(np.shape(leaf), getattr(leaf, "sharding", None)))
        for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
    ]
    region = _region(closed, inputs)
    _leave_rows(region, {row for row in map(_row_dim, jax.tree.leaves(batch)) if row})
    return region


def _leave_rows(region: Region, rows: Set[tuple[int, Any]]) -> None:
    """Take the first dim out of constraints on activations: their rows are one device's already.

    An activation is known by its first dim: as many rows as a device has of the batch, over the
    axes that the batch is split over.
    """
    for op in region.operations:
        sharding = op.params.get("sharding") if op.name == "sharding_constraint" else None
        if isinstance(sharding, NamedSharding) and sharding.spec:
            if (op.outputs[0].shape[0], sharding.spec[0]) in rows:
                spec = PartitionSpec(None, *sharding.spec[1:])
                op.params = {**op.params, "sharding": NamedSharding(sharding.mesh, spec)}
        for inner in op.regions:
            _leave_rows(inner, rows)


def _row_dim(leaf: Any) -> tuple[int, Any] | None:
    """Rows that one device has of a batch's leaf, and the axes that they are split over."""
    sharding = getattr(leaf, "sharding", None)
    if not leaf.shape or not isinstance(sharding, NamedSharding) or not sharding.spec:
        return None
    return sharding.shard_shape(leaf.shape)[0], sharding.spec[0]


def _rows_of_one_device(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def cut_of(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Parts that each dim is cut into; () where the sharding names none."""
    if not isinstance(sharding, NamedSharding):
        return ()
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    names = [e if isinstance(e, tuple) else () if e is None else (e,) for e in entries]
    return tuple(math.prod(sharding.mesh.shape[name] for name in axes) for axes in names)


def _value(aval: Any, cut: tuple[int, ...] = (), given: bool = True) -> Value:
    dtype = getattr(aval, "dtype", np.dtype(bool))
    half = dtype in (jax.numpy.bfloat16, np.float16)
    return Value(tuple(getattr(aval, "shape", ())), dtype.itemsize, half, cut, given)


def _region(jaxpr: Any, inputs: Sequence[Value]) -> Region:
    """The region of a jaxpr, open or closed, that nothing outside reads but through its outputs."""
    operations: list[Operation] = []
    outputs = _inline(jaxpr, list(inputs), operations, {})
    needed, kept = set(outputs), []
    for op in reversed(operations):
        if op.has_effects or not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return Region(kept[::-1], list(inputs), outputs)


def _inline(
    jaxpr: Any, inputs: list[Value], into: list[Operation], gathers: dict[Any, list[Value]]
) -> list[Value]:
    """Append the operations of a jaxpr; returns its outputs. The same gather is made once."""
    inner: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(inner.constvars, map(_value, (v.aval for v in inner.constvars)), strict=True))
    known.update(zip(inner.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        return _value(atom.aval) if isinstance(atom, Literal) else known[atom]

    for eqn in inner.eqns:
        name, params, args = eqn.primitive.name, eqn.params, [*map(read, eqn.invars)]
        called = next((params[key] for key in _CALLS if key in params), None)
        same = (args[0], params["sharding"]) if name == "sharding_constraint" else None
        if called is not None and name not in _LOOPS:
            outputs = _inline(called, args, into, gathers)
        elif same in gathers:
            outputs = gathers[same]
        else:
            outputs = [_value(v.aval, given=False) for v in eqn.outvars]
            op = Operation(name, params, args, outputs, bool(eqn.effects))
            op.regions = [*_bodies(op)]
            into.append(op)
            gathers[same] = outputs
        gathers.pop(None, None)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, inner.outvars)]


_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LOOPS = ("scan", "while", "cond", "shard_map")


def _bodies(op: Operation) -> Iterable[Region]:
    """Regions of a loop or conditional; their inputs are given, and cut as outside."""
    if op.name == "while":
        conds = op.params["cond_nconsts"]
        jaxprs, args = [op.params["body_jaxpr"]], op.inputs[conds:]
    elif op.name == "cond":
        jaxprs, args = op.params["branches"], op.inputs[1:]
    elif op.name in _LOOPS:
        jaxprs, args = [op.params["jaxpr"]], op.inputs
    else:
        return
    for jaxpr in jaxprs:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        yield _region(jaxpr, [_value(v.aval) for v in inner.invars[: len(args)]])


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


def _each(op: Operation, count: Callable[[Operation], int]) -> int:
    """A count over an operation and what it loops over; a `while` of unknown length runs once."""
    inner = [sum(_each(o, count) for o in region.operations) for region in op.regions]
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
