"""A step as a list of operations, with the bytes that one device has of each value.

`jax.make_jaxpr` traces the user's step without a compiler, in well under a second at any size.
Activations have the size that one device has of them, in one of two ways:

  explicit    the batch goes into a `shard_map` that divides its rows (`zero_jax.make_train_step`).
              Within, shapes are those of one device as they stand; what automatic axes divide
              (tensor parallelism) `propagation` finds out, and all that is outside
  otherwise   the step is traced with the rows that one device has. Parameters, gradients and
              optimizer state have their logical shapes, and `propagation` follows how they are cut

Not here: what an operation is and costs (`operations`); which values need memory at the same time
(`liveness`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec

from ..memories import DEVICE, HOST
from .operations import Operation, Region, Value, carries, collective_of

Tree = Any


def trace(
    step: Callable[..., Any], state: Tree, batch: Tree, on_host: Sequence[bool] = ()
) -> Region:
    """Trace a step on abstract arguments.

    Args:
      step: `step(state, batch)`, jitted or not.
      state: tree whose array leaves carry shardings: a state from `init_train_state`.
      batch: tree of arrays or `jax.ShapeDtypeStruct`s with shardings: from `shard_batch`.
      on_host: for each leaf of the state whether it lies on the host, which devices that are only
        compiled for cannot say; () for none.
    """
    region = _traced(step, state, batch, on_host)
    region.is_explicit = _maps_rows(region, len(jax.tree.leaves(batch)))
    if not region.is_explicit:
        region = _traced(step, state, jax.tree.map(_rows_of_one_device, batch), on_host)
        _leave_rows(region, {row for row in map(_row_dim, jax.tree.leaves(batch)) if row})
    return region


def _traced(step: Callable[..., Any], state: Tree, batch: Tree, on_host: Sequence[bool]) -> Region:
    closed = jax.make_jaxpr(step)(state, batch)
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    inputs = [
        _value(var.aval, cut=cut_of(np.shape(leaf), getattr(leaf, "sharding", None)))
        for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
    ]
    for value, is_away in zip(inputs, on_host, strict=False):
        value.on_host = is_away
    return _region(closed, inputs)


def _maps_rows(region: Region, leaves: int) -> bool:
    """Whether all that reads the batch, the last inputs, is a `shard_map` that cuts it as it lies.

    A `shard_map` around a kernel within an annotated step reads activations.
    """
    rows = set(region.inputs[len(region.inputs) - leaves :])
    readers = [op for op in region.operations if not rows.isdisjoint(op.inputs)]
    return bool(readers) and all(
        op.name == "to_local" and op.params["parts"] == op.inputs[0].cut for op in readers
    )


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
    return _parts(len(shape), sharding.spec, sharding.mesh.shape)


def _parts(rank: int, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    entries = [*spec, *(None,) * (rank - len(spec))]
    names = [e if isinstance(e, tuple) else () if e is None else (e,) for e in entries]
    return tuple(math.prod(sizes[name] for name in axes) for axes in names)


def _value(aval: Any, cut: tuple[int, ...] = (), given: bool = True) -> Value:
    dtype = getattr(aval, "dtype", np.dtype(bool))
    half = dtype in (jax.numpy.bfloat16, np.float16)
    away = getattr(aval, "memory_space", DEVICE) == HOST
    return Value(tuple(getattr(aval, "shape", ())), dtype.itemsize, half, cut, given, away)


def _region(jaxpr: Any, inputs: Sequence[Value]) -> Region:
    """The region of a jaxpr, open or closed, that nothing outside reads but through its outputs."""
    operations: list[Operation] = []
    outputs = _inline(jaxpr, list(inputs), operations, {})
    return Region(_needed(operations, outputs)[0], list(inputs), outputs)


def _needed(
    operations: Sequence[Operation], wanted: Iterable[Value]
) -> tuple[list[Operation], set[Value]]:
    """The operations behind what is wanted or has effects, and all values that they read."""
    needed, kept = set(wanted), []
    for op in reversed(operations):
        if op.has_effects or not needed.isdisjoint(op.outputs):
            needed.update(_read_by(op, needed))
            kept.append(op)
    return kept[::-1], needed


def _read_by(op: Operation, needed: Set[Value]) -> list[Value]:
    """What an operation reads; a scan drops what it carries for nobody."""
    if op.name != "scan":
        return op.inputs
    (body,) = op.regions
    starts, carried = carries(op)
    loop = [*zip(body.inputs[starts], body.outputs[: len(carried)], strict=True)]
    wanted = {y for outer, y in zip(op.outputs, body.outputs, strict=True) if outer in needed}
    while True:
        operations, read = _needed(body.operations, wanted)
        again = {y for x, y in loop if x in read} - wanted
        if not again:
            break
        wanted |= again
    body.operations = operations
    return [x for x, inner in zip(op.inputs, body.inputs, strict=True) if inner in read]


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
        if name == "shard_map":
            outputs = _inline_map(eqn, args, into, gathers)
        elif called is not None and name not in _LOOPS:
            outputs = _inline(called, args, into, gathers)
        elif name in _NOTHING or _stays(eqn, args):
            outputs = args
        elif same in gathers:
            outputs = gathers[same]
        else:
            outputs = [_value(v.aval, given=False) for v in eqn.outvars]
            op = Operation(name, params, args, outputs, _has_effects(eqn))
            op.regions = [*_bodies(op)]
            if collective_of(op):
                op.params = {**params, **_ring(eqn)}
            into.append(op)
            gathers[same] = outputs
        gathers.pop(None, None)
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, inner.outvars)]


_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LOOPS = ("scan", "while", "cond")
_NOTHING = ("optimization_barrier", "stop_gradient", "pvary", "pcast")
"""What orders events, which are in order here, or speaks to derivatives and types."""


def _stays(eqn: Any, inputs: Sequence[Value]) -> bool:
    """Whether it is a move into the memory that the arrays are in already."""
    spaces = [getattr(v.aval, "memory_space", DEVICE) == HOST for v in eqn.outvars]
    return eqn.primitive.name == "device_put" and spaces == [x.on_host for x in inputs]


def _has_effects(eqn: Any) -> bool:
    """Whether it matters even if nobody reads it; that it names an axis is an effect to jax."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _inline_map(
    eqn: Any, inputs: list[Value], into: list[Operation], gathers: dict[Any, list[Value]]
) -> list[Value]:
    """The body of a `shard_map` between changes of the view; see `Region`."""
    body, sizes = eqn.params["jaxpr"], eqn.params["mesh"].shape
    inner: Jaxpr = getattr(body, "jaxpr", body)

    def seen(name: str, x: Value, aval: Any, spec: PartitionSpec) -> Value:
        y, parts = _value(aval, given=x.given), _parts(len(x.shape), spec, sizes)
        into.append(Operation(name, {"parts": parts}, [x], [y], False))
        return y

    def all_seen(name: str, values: list[Value], variables: Any, specs: Any) -> list[Value]:
        triples = zip(values, variables, specs, strict=True)
        return [seen(name, x, v.aval, spec) for x, v, spec in triples]

    local = all_seen("to_local", inputs, inner.invars, eqn.params["in_specs"])
    outputs = _inline(body, local, into, gathers)
    return all_seen("to_global", outputs, eqn.outvars, eqn.params["out_specs"])


def _ring(eqn: Any) -> dict[str, Any]:
    """The axes of a collective and the number of devices; jax names the parameter in two ways."""
    params, sizes = eqn.params, eqn.outvars[0].aval.sharding.mesh.shape
    axes = params["axes"] if "axes" in params else params["axis_name"]
    names = tuple(a for a in (axes if isinstance(axes, tuple) else (axes,)) if a in sizes)
    return {"names": names, "devices": math.prod(sizes[a] for a in names)}


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
