"""The wires of a step: for each parameter, what is gathered, reduced, when and in which dtype.

One table, read off the layout and the step's options (ZeRO, arXiv 1910.02054, section 7):

  a gradient is   with one microbatch, or "each" at stages 2, 3   otherwise
  partitioned     scattered where it arises                       summed whole, scattered once
  whole           all-reduced there; with microbatches once       all-reduced once

Sums over replica axes follow the scatter; with microbatches they wait for the last one. Whole
gradients are those of stage 0 and of leaves that no dim cuts (the layout names them).
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .at_use import Wire
from .collectives import Cut, cut_of
from .layout import Layout
from .mesh import spelled, torus_mesh
from .offload_policy import streams_by_layer
from .placement import Placement
from .precision import Precision
from .step_options import StepOptions
from .subject import Subject


@dataclass(frozen=True)
class Axes:
    """The mesh axes of a step.

    Attributes:
      mesh: the mesh of `shard_map`: the layout's, its data axis perhaps split.
      batch: its axes that the batch is split over; the manual ones.
    """

    mesh: Mesh
    batch: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of devices that the batch is split over."""
        return prod(self.mesh.shape[a] for a in self.batch)

    def on_devices(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """`function`, run on every device on its pieces."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.batch),
            check_vma=False,
        )


def axes_of(layout: Layout) -> Axes:
    """The axes of a step on a state of this layout."""
    mesh = torus_mesh(layout.mesh, layout.axis)
    return Axes(mesh, spelled(layout.batch_axes, mesh, layout.axis))


def wires_of(subject: Subject, options: StepOptions, axes: Axes) -> list[Wire]:
    """One wire for each of the subject's values.

    Args:
      subject: the opened state.
      options: of the step.
      axes: of the step.
    """
    layout, precision = subject.layout, subject.tx.precision
    stage, many = layout.stage, options.microbatches > 1
    early = not many or (stage.partitions_gradients and options.reduce == "each")
    updates = [*jax.tree.leaves(layout.updates), *subject.placements[subject.trained :]]
    sent = _sent_to_host(layout, options, early)
    wires = []
    for pair in zip(subject.placements, updates, strict=True):
        rest, update = (replace(placement, mesh=axes.mesh) for placement in pair)
        grad = gradient_cut(update) if stage.partitions_optimizer else cut_of(update).whole()
        others = tuple(a for a in axes.batch if a not in grad.axes)
        wires.append(
            Wire(
                path=rest.leaf.path,
                rest=cut_of(rest),
                grad=grad,
                compute=_compute(rest, precision),
                reduce=precision.reduced(rest.leaf.dtype),
                scatters_at_use=early,
                summed_at_use=() if many else others,
                summed_late=others if many else (),
                on_host=rest.on_host,
                grad_on_host=rest.leaf.path in sent,
            )
        )
    return wires


def _sent_to_host(layout: Layout, options: StepOptions, early: bool) -> frozenset[str]:
    """Paths of parameters whose gradients wait in host memory.

    Raises:
      ValueError: the policy says so, and the step cannot.
    """
    where = "device" if layout.offload is None else layout.offload.gradients
    leaves = [p.leaf for p in jax.tree.leaves(layout.params)]
    able = frozenset(x.path for x in leaves if streams_by_layer(x.path, x.shape, layout.stacked))
    hinders = [
        *(["it sums them over microbatches"] if options.microbatches > 1 or not early else []),
        *(["transform_grads wants them on the device"] if options.transform_grads else []),
        *([] if able else ['no parameter of three dims or more has the rule "stacked"']),
    ]
    if where == "host" and hinders:
        raise ValueError(
            f'offload: HostMemory(gradients="host"), but this step cannot send them: {hinders[0]}. '
            'Use gradients="auto", or change the step.'
        )
    return able if where != "device" and not hinders else frozenset()


def gradient_cut(update: Placement) -> Cut:
    """The cut in which a gradient is reduced: the update's, unless it is whole in flight."""
    cut = cut_of(update)
    return cut.whole() if update.flight == update.gathered else cut


def layer_bytes(layout: Layout, precision: Precision) -> int | None:
    """Bytes of one layer of the stacked parameters, whole, in the widest dtype that crosses.

    None without a stack.
    """
    leaves = [p for p in jax.tree.leaves(layout.params) if p.leaf.path in layout.stacked]
    widths = [
        max(jnp.dtype(_compute(p, precision)).itemsize, precision.reduced(p.leaf.dtype).itemsize)
        for p in leaves
    ]
    sizes = [prod(p.leaf.shape[1:]) * width for p, width in zip(leaves, widths, strict=True)]
    return sum(sizes) or None


def _compute(rest: Placement, precision: Precision) -> Any:
    dtype = rest.leaf.dtype
    real = jnp.issubdtype(dtype, jnp.floating)
    return precision.compute if real and precision.compute is not None else dtype
