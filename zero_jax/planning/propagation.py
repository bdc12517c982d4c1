"""How the values of a traced step are cut, followed from the arguments and the constraints.

Dim by dim, first forward and then backward:

  forward    an elementwise operation hands a cut on, a matmul those of its outer dims, a
             transposition or reshape moves them, a constraint states them
  backward   a value that is only used cut is computed cut: a gradient that the update constrains to
             its partition, say, and the accumulator it is summed in

This is a small part of what XLA's partitioner does (GSPMD, Xu et al., 2021, arXiv 2105.04663): as
much as data-parallel steps and Megatron's cuts need. What is not followed counts whole, that is too
much. Rows of the batch are not cut here: a step is traced with those of one device, or they are
inside of a `shard_map`.
"""

import math
from collections.abc import Sequence

from .operations import Operation, Region, Value, carries
from .traced import cut_of

Cut = tuple[int, ...]


def propagate(region: Region) -> None:
    """Fill in the cuts of all values in a region and the regions within it."""
    for op in region.operations:
        for value, cut in zip(op.outputs, _forward(op), strict=True):
            value.cut = cut
    uses: dict[Value, list[Cut]] = {value: [cut] for value, cut in region.wanted.items()}
    for op in reversed(region.operations):
        for value in op.outputs:
            found = set(uses.get(value, ()))
            if len(found) == 1 and op.name != "sharding_constraint":
                (only,) = found
                value.cut = value.cut if value.is_cut else only
        for value in op.inputs:
            uses.setdefault(value, []).append(_backward(op, value))
        for inner in op.regions:
            _enter(op, inner)
            propagate(inner)


def _forward(op: Operation) -> list[Cut]:
    """Cuts of an operation's outputs, from those of its inputs."""
    x = op.inputs[0] if op.inputs else None
    if op.name == "sharding_constraint":
        return [cut_of(op.outputs[0].shape, op.params["sharding"])]
    if op.name in ("to_local", "to_global"):
        return [_seen(op, op.inputs[0].cut, op.name == "to_local")]
    if op.name == "scan":
        return _through_scan(op)
    if op.name == "dot_general":
        return [_of_matmul(op)]
    if x is not None and op.name == "transpose":
        return [tuple(x.cut[d] for d in op.params["permutation"])]
    if x is not None and op.name == "reshape":
        return [_reshaped(x.shape, x.cut, op.outputs[0].shape)]
    if x is not None and op.name == "broadcast_in_dim":
        at = op.params["broadcast_dimensions"]
        return [_broadcast(x, at, op.outputs[0].shape)]
    if x is not None and op.name in ("reduce_sum", "reduce_max", "reduce_min", "argmax"):
        kept = tuple(c for d, c in enumerate(x.cut) if d not in op.params["axes"])
        return [kept] * len(op.outputs)
    return [_elementwise(y, op.inputs) for y in op.outputs]


def _backward(op: Operation, value: Value) -> Cut:
    """The cut in which this operation reads one of its inputs, from those of its outputs."""
    whole = (1,) * len(value.shape)
    if not op.outputs:  # a callback
        return whole
    (y, *more) = op.outputs
    if op.name in ("to_local", "to_global"):
        return _seen(op, y.cut, op.name == "to_global")
    if op.name == "transpose":
        return tuple(y.cut[op.params["permutation"].index(d)] for d in range(len(value.shape)))
    if op.name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(y.shape, y.cut, value.shape)
    if op.name == "scan":
        start, carried = carries(op)
        initial = op.inputs[start][: len(carried)]
        return op.outputs[initial.index(value)].cut if value in initial else whole
    if op.regions or more or op.name in ("dot_general", "conv_general_dilated"):
        return whole
    return y.cut if y.shape == value.shape else whole


def _seen(op: Operation, cut: Cut, locally: bool) -> Cut:
    """The same cut seen from the other side of a `shard_map`, whose own parts come off or on."""
    pairs = zip(cut, op.params["parts"], strict=True)
    return tuple(max(1, c // p) if locally else c * p for c, p in pairs)


def _through_scan(op: Operation) -> list[Cut]:
    """A carry leaves as it came; what is stacked is cut only where its uses say so."""
    start, carried = carries(op)
    initial = op.inputs[start][: len(carried)]
    stacked = op.outputs[len(carried) :]
    return [x.cut for x in initial] + [(1,) * len(y.shape) for y in stacked]


def _enter(op: Operation, body: Region) -> None:
    """Cut the inputs of a body as they are outside, and its outputs as they are used there."""
    outside = op.inputs[len(op.inputs) - len(body.inputs) :]
    for x, inner in zip(outside, body.inputs, strict=True):
        inner.cut = x.cut[len(x.shape) - len(inner.shape) :]
    for y, inner in zip(op.outputs, body.outputs, strict=True):
        if not inner.given:
            body.wanted[inner] = y.cut[len(y.shape) - len(inner.shape) :]


def _of_matmul(op: Operation) -> Cut:
    (contract, batch), (a, b) = op.params["dimension_numbers"], op.inputs
    shared = [max(a.cut[i], b.cut[j]) for i, j in zip(*batch, strict=True)]
    outer = [
        x.cut[d]
        for x, ours, theirs in zip((a, b), contract, batch, strict=True)
        for d in range(len(x.shape))
        if d not in (*ours, *theirs)
    ]
    return (*shared, *outer)


def _elementwise(output: Value, inputs: Sequence[Value]) -> Cut:
    """Each dim as the most finely cut input of this rank has it, where its size is the same."""
    cut = [1] * len(output.shape)
    for x in inputs:
        if len(x.shape) == len(cut):
            for d, (size, parts) in enumerate(zip(x.shape, x.cut, strict=True)):
                padded = abs(size - output.shape[d]) < parts  # unpadded for the update, or padded
                cut[d] = max(cut[d], parts if padded else 1)
    return tuple(cut)


def _broadcast(x: Value, at: Sequence[int], shape: tuple[int, ...]) -> Cut:
    cut = [1] * len(shape)
    for d, size, parts in zip(at, x.shape, x.cut, strict=True):
        cut[d] = parts if size == shape[d] else 1
    return tuple(cut)


def _reshaped(shape: tuple[int, ...], cut: Cut, into: tuple[int, ...]) -> Cut:
    """A cut dim that is split or joined with others stays cut if it is the outermost of them."""
    result, outer = [1] * len(into), 1
    for size, parts in zip(shape, cut, strict=True):
        if parts > 1:
            before = 1
            for d, other in enumerate(into):
                if before == outer and other % parts == 0:
                    result[d] = parts
                    break
                before *= other
        outer *= size
    return tuple(result) if math.prod(shape) == math.prod(into) else (1,) * len(into)
