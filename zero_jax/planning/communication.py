"""What one device puts on the wire in a training step: closed forms, and the count of a layout.

ZeRO (arXiv 1910.02054, section 7) counts elements: data parallelism moves 2 per parameter, stages 1
and 2 as much (reduce-scatter of gradients, all-gather of parameters), stage 3 one more all-gather.
Here they are bytes that one device sends in a ring over n devices, with the dtype that crosses:

  all-gather, reduce-scatter   (n-1)/n of the whole        all-reduce   twice that

When, in a step of m microbatches:

  stage 0   gradients all-reduced once, after a local sum
  stage 1   gradients reduce-scattered once, after a local sum; updated parameters gathered once
  stage 2   gradients reduce-scattered in every microbatch; updated parameters gathered once
  stage 3   gradients the same; parameters gathered in every microbatch, in the forward pass and,
            unless they are kept, again in the backward pass; never after the update
  replicas  (hybrid sharding) the sums over the data axis, a part each, are all-reduced across the
            replicas once a step; a gradient that is whole is all-reduced over both axes at once

Not here: ZeRO++ (quantised or hierarchical collectives), what tensor parallelism and the optimizer
(norms, factored means) exchange, and how a compiler spells a collective (`reporting`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, prod
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..layout import Layout
from ..mesh import data_axes
from ..placement import Leaf, Placement
from ..stage import Stage, parse_stage
from .memory import share, whole_number

Regather = Literal["layer", "keep"]
"""Stage 3 gathers a layer's parameters again in the backward pass, or keeps them until then."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one device sends in one step, by kind of collective."""

    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return self.all_gather_bytes + self.reduce_scatter_bytes + self.all_reduce_bytes

    def __add__(self, other: "WireBytes") -> "WireBytes":
        """Kind by kind."""
        return WireBytes(
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends in one step, by the mesh axes of the ring.

    Attributes:
      by_axes: names of the axes that a ring runs over, the data axis first -> what is sent in it. A
        ring over data and replicas is an entry of its own: it is as fast as its slowest link.
    """

    by_axes: Mapping[Axes, WireBytes] = field(default_factory=dict)

    @property
    def total(self) -> WireBytes:
        """Over all axes, by kind."""
        return sum(self.by_axes.values(), WireBytes())

    @property
    def total_bytes(self) -> int:
        """Over all axes and kinds."""
        return self.total.total_bytes


def step_traffic(
    parameters: int,
    stage: int,
    devices: int,
    *,
    replicas: int = 1,
    model_parallel: int = 1,
    params_dtype: DTypeLike = jnp.bfloat16,
    reduce_dtype: DTypeLike = jnp.float32,
    microbatches: int = 1,
    regather: Regather = "layer",
    frozen: float | Fraction = 0,
) -> Traffic:
    """Count what one device sends in one step, in closed form (arXiv 1910.02054, section 7).

    Args:
      parameters: number of parameters of the whole model.
      stage: 0 to 3.
      devices: N, the size of the data axis.
      replicas: size of the replica axis, over which a partition is repeated.
      model_parallel: size of the model axis, which divides everything.
      params_dtype: of parameters at rest, which is what is gathered.
      reduce_dtype: that gradients are reduced in.
      microbatches: forward and backward passes a step.
      regather: at stage 3, "layer" gathers twice a microbatch and "keep" once.
      frozen: share of the parameters, 0 to 1, without gradient; gathered at stage 3 all the same.

    Returns:
      Traffic over ("data",), ("replica",) and, for whole gradients, ("data", "replica").

    Raises:
      TypeError, ValueError: an argument is not as described.

    >>> step_traffic(1000, 3, 10, reduce_dtype="bfloat16").total_bytes  # 3 x 9/10 x 2 bytes
    5400
    """
    parsed, n = parse_stage(stage), whole_number("devices", devices)
    r, mp = whole_number("replicas", replicas), whole_number("model_parallel", model_parallel)
    held = -(-whole_number("parameters", parameters) // mp)
    trained = ceil(held * (1 - share("frozen", frozen)))
    gathers, reductions = _times(parsed, microbatches, regather)
    params_bytes, reduce_bytes = jnp.dtype(params_dtype).itemsize, jnp.dtype(reduce_dtype).itemsize
    parts = n if parsed.partitions_optimizer else 1  # at stage 1 of the sums, at 2 and 3 of each
    gathered = held if parsed.partitions_parameters else trained
    return _sum(
        [
            *_reduction(trained, reduce_bytes, parts, n, r, reductions, ("data",), ("replica",)),
            *_gather(gathered, parts, params_bytes, gathers, ("data",)),
        ]
    )


def from_layout(
    layout: Layout,
    *,
    reduce_dtype: DTypeLike | None = None,
    microbatches: int = 1,
    regather: Regather = "layer",
    local_sums: bool = True,
) -> Traffic:
    """Count what one device sends in one step, leaf by leaf.

    Partitioned gradients are reduce-scattered, whole ones all-reduced, padding included. A leaf cut
    by a factor of N is gathered over that factor; at stage 3 its updated parameter comes from
    another cut, counted as one more gather. Moments at rest as one flat array are gathered for the
    update. Parameters that the optimizer does not train are gathered, averages are not.

    Args:
      layout: from `zero_jax.layout_of`. Replica axes are its batch's, beside the data axis.
      reduce_dtype: that gradients are reduced in; by default each in its parameter's dtype. Complex
        gradients keep their own.
      microbatches, regather: as in `step_traffic`.
      local_sums: whether gradients that are whole are summed over microbatches before they are
        reduced. XLA's partitioner does not: left to it, each microbatch all-reduces them.

    Raises:
      TypeError, ValueError: an argument is not as described.
    """
    gathers, reductions = _times(layout.stage, microbatches, regather)
    data, n, sizes = (layout.axis,), layout.size, layout.mesh.shape
    inside = data_axes(layout.mesh, layout.axis)
    across = tuple(a for a in layout.batch_axes if a not in inside and sizes[a] > 1)
    r = prod(sizes[a] for a in across)
    apart = 1 if local_sums or layout.stage.partitions_gradients else microbatches
    sent: list[tuple[Axes, WireBytes]] = []
    trees = map(jax.tree.leaves, (layout.params, layout.grads, layout.updates))
    for rest, gradient, update in zip(*trees, strict=True):
        # at stage 1 a sum that is local goes straight to the optimizer's cut
        as_kept = layout.stage.partitions_gradients or apart > 1
        reduced = gradient if as_kept else update
        width, wide = rest.leaf.dtype.itemsize, _reduce_width(rest.leaf.dtype, reduce_dtype)
        elements, parts = _in_flight(reduced)
        sent += apart * _reduction(elements, wide, parts, n, r, reductions, data, across)
        sent += _gather(*_at_rest(rest), width, gathers, data)
        if _cut(update) != _cut(rest):
            sent += _gather(*_in_flight(update), width, 1, data)
    for moment in jax.tree.leaves(layout.opt_state):
        if _in_flight(moment)[1] == 1:
            sent += _gather(*_at_rest(moment), moment.leaf.dtype.itemsize, 1, data)
    for frozen in _frozen(layout):
        sent += _gather(*_at_rest(frozen), frozen.leaf.dtype.itemsize, gathers, data)
    return _sum(sent)


def _times(stage: Stage, microbatches: int, regather: Regather) -> tuple[int, int]:
    """How often a step gathers parameters at rest, and how often it reduces a partition."""
    m = whole_number("microbatches", microbatches)
    if regather not in get_args(Regather):
        raise ValueError(f"regather={regather!r}; expected one of {', '.join(get_args(Regather))}.")
    gathers = m * (2 if regather == "layer" else 1) if stage.partitions_parameters else 1
    return gathers, m if stage.partitions_gradients else 1


def _reduction(
    elements: int, width: int, parts: int, n: int, r: int, times: int, data: Axes, across: Axes
) -> list[tuple[Axes, WireBytes]]:
    """A gradient summed over n devices and r replicas; `parts` is n, or 1 for a whole one.

    A whole gradient can be summed over microbatches where it is, and is reduced once.
    """
    if parts == 1:
        axes = (data if n > 1 else ()) + (across if r > 1 else ())
        return [(axes, WireBytes(all_reduce_bytes=2 * _ring_bytes(elements, width, n * r)))]
    part = -(-elements // parts)
    return [
        (data, WireBytes(reduce_scatter_bytes=times * _ring_bytes(elements, width, parts))),
        (across, WireBytes(all_reduce_bytes=2 * _ring_bytes(part, width, r))),
    ]


def _gather(
    elements: int, parts: int, width: int, times: int, axes: Axes
) -> list[tuple[Axes, WireBytes]]:
    return [(axes, WireBytes(all_gather_bytes=times * _ring_bytes(elements, width, parts)))]


def _ring_bytes(elements: int, width: int, devices: int) -> int:
    """What one device sends of an array in a ring: every part but one, in devices - 1 turns."""
    return (devices - 1) * -(-elements // devices) * width


def _sum(sent: Iterable[tuple[Axes, WireBytes]]) -> Traffic:
    by_axes: dict[Axes, WireBytes] = {}
    for axes, wire in sent:
        if wire.total_bytes:
            by_axes[axes] = by_axes.get(axes, WireBytes()) + wire
    return Traffic(by_axes)


def _at_rest(placement: Placement) -> tuple[int, int]:
    """Elements of a leaf gathered over the data axis, padding included, and its parts."""
    partition = placement.partition
    part = prod(placement.rest.shard_shape(partition.rest_shape))
    return part * partition.parts, partition.parts


def _in_flight(placement: Placement) -> tuple[int, int]:
    """The same inside the update, where some leaves that are cut at rest are whole."""
    if placement.flight == placement.gathered:
        return prod(placement.gathered.shard_shape(placement.leaf.shape)), 1
    return _at_rest(placement)


def _cut(placement: Placement) -> tuple[object, ...]:
    partition = placement.partition
    return partition.spec, partition.parts, partition.rest_shape


def _reduce_width(dtype: Any, reduce_dtype: DTypeLike | None) -> int:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0  # integers have no gradient
    if reduce_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype.itemsize
    return jnp.dtype(reduce_dtype).itemsize


def _frozen(layout: Layout) -> list[Placement]:
    """Parameters outside of the trained ones: what is cut there and is no average of one."""
    shapes = {p.leaf.path: p.leaf.shape for p in jax.tree.leaves(layout.params)}

    def is_average(leaf: Leaf) -> bool:
        keys = leaf.path.split("/")
        return any(shapes.get("/".join(keys[i:])) == leaf.shape for i in range(len(keys)))

    return [p for p in jax.tree.leaves(layout.other) if not is_average(p.leaf)]
