"""What one device puts on the wire in an explicit step: its collectives, counted where they stand.

A step made by `zero_jax.make_train_step` has its all-gathers and reduce-scatters in the trace, each
as often as the loop around it runs. What XLA adds outside, in the global view, is the gather of
updated parameters (ZeRO, arXiv 1910.02054, section 7.2.1), which `communication` reads off the
layout. Rings are counted as there: a gather sends the pieces of n-1 others, a sum twice (n-1)/n of
the whole.

Not here: sums of scalars that the optimizer asks for (a global norm), gathers that XLA makes once
for several readers or takes out of a loop.
"""

from collections.abc import Iterator, Sequence

from ..layout import Layout
from ..mesh import data_axes
from .communication import from_layout
from .operations import Operation, Region, collective_of
from .traffic import Axes, Traffic, WireBytes, add_up


def from_region(region: Region, layout: Layout) -> Traffic:
    """Count what one device sends in one step.

    Args:
      region: of an explicit step, from `traced.trace`, its cuts propagated.
      layout: of its state.

    Returns:
      Traffic by axes of the layout's mesh, the parts of a data axis that is split as one.
    """
    inside = [(_axes(op, layout), _sent(op, trips)) for op, trips in _collectives(region, 1)]
    return add_up([*inside, *_after_the_update(layout)])


def _collectives(region: Region, trips: int) -> Iterator[tuple[Operation, int]]:
    """Each collective and how often it runs; of a conditional, those of the branch with most."""
    for op in region.operations:
        if collective_of(op):
            yield op, trips
        bodies: Sequence[Region] = op.regions
        if op.name == "cond":
            bodies = [max(bodies, key=_total_bytes)]
        for body in bodies:
            yield from _collectives(body, trips * op.params.get("length", 1))


def _total_bytes(region: Region) -> int:
    return sum(_sent(op, trips).total_bytes for op, trips in _collectives(region, 1))


def _sent(op: Operation, trips: int) -> WireBytes:
    others, kind = op.params["devices"] - 1, collective_of(op)
    if kind == "all-gather":
        return WireBytes(all_gather_bytes=trips * others * _size_bytes(op.inputs))
    if kind == "reduce-scatter":
        return WireBytes(reduce_scatter_bytes=trips * others * _size_bytes(op.outputs))
    whole_bytes = 2 * others * _size_bytes(op.outputs)
    return WireBytes(all_reduce_bytes=trips * -(-whole_bytes // op.params["devices"]))


def _size_bytes(values: Sequence) -> int:
    return sum(x.bytes_per_device for x in values)


def _axes(op: Operation, layout: Layout) -> Axes:
    """The axes of a ring as the layout's mesh has them; on TPU the step splits the data axis."""
    named = {a if a in layout.mesh.shape else layout.axis for a in op.params["names"]}
    if named == set(data_axes(layout.mesh, layout.axis)):
        return (layout.axis,)
    return tuple(sorted(named, key=[layout.axis, *layout.mesh.axis_names].index))


def _after_the_update(layout: Layout) -> Iterator[tuple[Axes, WireBytes]]:
    """Gathers in the global view: all of a layout's, less those that the loss asks for.

    The loss asks twice as often with "layer" as with "keep", so the difference is once.
    """
    twice, once = (from_layout(layout, regather=how) for how in ("layer", "keep"))
    for axes, wire in once.by_axes.items():
        more_bytes = twice.by_axes[axes].all_gather_bytes - wire.all_gather_bytes
        yield axes, WireBytes(all_gather_bytes=wire.all_gather_bytes - more_bytes)
