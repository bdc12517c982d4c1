"""What one device puts on the wire in a training step: closed forms, and the count of a layout.

ZeRO (arXiv 1910.02054, section 7) counts elements: data parallelism moves 2 per parameter, stages 1
and 2 as much (reduce-scatter of gradients, all-gather of parameters), stage 3 one more all-gather.
Here they are bytes that one device sends in a ring over n devices, with the dtype that crosses:

  all-gather, reduce-scatter   (n-1)/n of the whole        all-reduce   twice that

When, in a step of m microbatches:

  stage 0   gradients all-reduced once, after a local sum
  stage 1   gradients reduce-scattered once, after a local sum; updated parameters gathered once
  stage 2   gradients reduce-scattered in every microbatch; updated parameters gathered once
  stage 3   gradients the same; parameters gathered in every microbatch where they are used, again
            in the backward pass where a layer is recomputed; kept, once a step; never after the
            update
  replicas  (hybrid sharding) the sums over the data axis, a part each, are all-reduced across the
            replicas once a step; a gradient that is whole is all-reduced over both axes at once

The paper's 3 elements are those of recomputed layers. What a model reads once outside of them
(embedding, head, positions) is gathered once a microbatch, and so is what no recomputation needs (a
layer's last bias); what it reads several times (a tied embedding) once a step. `from_layout` is
told by path.

Not here: ZeRO++ (quantised or hierarchical collectives), what tensor parallelism and the optimizer
(norms, factored means) exchange, and how a compiler spells a collective (`reporting`).
"""

from collections.abc import Callable
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
from .traffic import Axes, Traffic, WireBytes, add_up, gather, reduction

Regather = Literal["layer", "use", "keep"]
"""Stage 3 gathers a parameter twice a microbatch (where a recomputed layer reads it), once a
microbatch (where anything else does), or once a step, and keeps it."""

Reduce = Literal["each", "once"]
"""With microbatches, stages 2 and 3 reduce gradients in each, or their whole sum once a step."""


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
      regather: at stage 3, "layer" gathers twice a microbatch, "use" once, "keep" once a step.
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
    return add_up(
        [
            *reduction(trained, reduce_bytes, parts, n, r, reductions, ("data",), ("replica",)),
            *gather(gathered, parts, params_bytes, gathers, ("data",)),
        ]
    )


def from_layout(
    layout: Layout,
    *,
    gather_dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    microbatches: int = 1,
    reduce: Reduce = "each",
    regather: Regather | Callable[[str], Regather] = "layer",
    local_sums: bool = True,
) -> Traffic:
    """Count what one device sends in one step, leaf by leaf; exact for `zero_jax.make_train_step`.

    Partitioned gradients are reduce-scattered, padding included, whole ones all-reduced. A leaf cut
    by a factor of N is gathered over that factor; at stage 3 its updated parameter comes from
    another cut, counted as one more gather. Leaves at rest as one flat array (moments; at stage 3
    parameters without a master copy) are whole in the update, and are gathered for it. Parameters
    that the optimizer does not train are gathered, averages are not.

    Not counted: the step's own sums of a few scalars (loss, weight, norm).

    Args:
      layout: from `zero_jax.layout_of`. Replica axes are its batch's, beside the data axis.
      gather_dtype: that the loss of a stage 3 step reads parameters in; by default each in its own.
        Updated parameters are gathered in their dtype at rest. Complex parameters keep their own.
      reduce_dtype: that gradients are reduced in; by default each in its parameter's dtype. Complex
        gradients keep their own.
      microbatches: as in `step_traffic`.
      reduce: as in `zero_jax.make_train_step`.
      regather: as in `step_traffic`, for all parameters or by path.
      local_sums: whether gradients that are whole are summed over microbatches before they are
        reduced. XLA's partitioner does not: left to it, each microbatch all-reduces them.

    Raises:
      TypeError, ValueError: an argument is not as described.
    """
    rule = regather if callable(regather) else lambda path: regather
    apart = 1 if local_sums or layout.stage.partitions_gradients else microbatches
    sent: list[tuple[Axes, WireBytes]] = []
    trees = map(jax.tree.leaves, (layout.params, layout.grads, layout.updates))
    for rest, gradient, update in zip(*trees, strict=True):
        # at stage 1 a sum that is local goes straight to the optimizer's cut
        early = layout.stage.partitions_gradients and reduce == "each"
        reduced = gradient if early or apart > 1 else update
        times = microbatches if early else 1
        sent += apart * _reduced(reduced, layout, reduce_dtype, times)
        if _cut(update) != _cut(rest):
            sent += gather(*_in_flight(update), rest.leaf.dtype.itemsize, 1, (layout.axis,))
    wanted = gather_dtype if layout.stage.partitions_parameters else None
    for p in [*jax.tree.leaves(layout.params), *_frozen(layout)]:
        times, _ = _times(layout.stage, microbatches, rule(p.leaf.path))
        sent += gather(*_at_rest(p), _width(p.leaf.dtype, wanted), times, (layout.axis,))
    for p in _joined_for_update(layout):
        sent += gather(*_at_rest(p), p.leaf.dtype.itemsize, 1, (layout.axis,))
    return add_up(sent)


def _times(stage: Stage, microbatches: int, regather: Regather) -> tuple[int, int]:
    """How often a step gathers parameters at rest, and how often it reduces a partition."""
    m = whole_number("microbatches", microbatches)
    if regather not in get_args(Regather):
        raise ValueError(f"regather={regather!r}; expected one of {', '.join(get_args(Regather))}.")
    gathers = {"layer": 2 * m, "use": m, "keep": 1}[regather] if stage.partitions_parameters else 1
    return gathers, m if stage.partitions_gradients else 1


def _reduced(
    gradient: Placement, layout: Layout, dtype: DTypeLike | None, times: int
) -> list[tuple[Axes, WireBytes]]:
    """A gradient's sum over the data axis and the replicas; nothing for integers."""
    if not jnp.issubdtype(gradient.leaf.dtype, jnp.inexact):
        return []
    sizes, inside = layout.mesh.shape, data_axes(layout.mesh, layout.axis)
    across = tuple(a for a in layout.batch_axes if a not in inside and sizes[a] > 1)
    r = prod(sizes[a] for a in across)
    elements, parts = _in_flight(gradient)
    width = _width(gradient.leaf.dtype, dtype)
    return reduction(elements, width, parts, layout.size, r, times, (layout.axis,), across)


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


def _joined_for_update(layout: Layout) -> list[Placement]:
    """What is cut at rest and whole in the update: moments, and parameters without a master."""
    state: list[Placement] = jax.tree.leaves(layout.opt_state)
    keys = [p.leaf.path.split("/") for p in state]
    masters = {"/".join(k[k.index("master") + 1 :]) for k in keys if "master" in k}
    alike = zip(jax.tree.leaves(layout.params), jax.tree.leaves(layout.updates), strict=True)
    read = [p for p, u in alike if _cut(p) == _cut(u) and p.leaf.path not in masters]
    return [p for p in [*state, *read] if p.partition.parts > 1 and _in_flight(p)[1] == 1]


def _cut(placement: Placement) -> tuple[object, ...]:
    partition = placement.partition
    return partition.spec, partition.parts, partition.rest_shape


def _width(dtype: Any, wanted: DTypeLike | None) -> int:
    """Bytes of an element that crosses in the wanted dtype, if it is a real number."""
    real = jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(wanted).itemsize if real and wanted is not None else dtype.itemsize


def _frozen(layout: Layout) -> list[Placement]:
    """Parameters outside of the trained ones: what is cut there and is no average of one."""
    shapes = {p.leaf.path: p.leaf.shape for p in jax.tree.leaves(layout.params)}

    def is_average(leaf: Leaf) -> bool:
        keys = leaf.path.split("/")
        return any(shapes.get("/".join(keys[i:])) == leaf.shape for i in range(len(keys)))

    return [p for p in jax.tree.leaves(layout.other) if not is_average(p.leaf)]
