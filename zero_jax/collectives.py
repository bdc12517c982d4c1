"""Moving one leaf between the states it can be in, inside a jitted step.

States of a leaf, as the optimizer's update meets them:

  at rest      as `Placement.rest` says; may be padded along a dim or flattened and padded
  in flight    the logical shape under `Placement.flight`; a padded dim is cut unevenly, which XLA
               allows for intermediates and not at the edge of a jit
  partitioned  each device computes on its own 1/N
  gathered     whole on every device (of the data axis)

In the global view (`constrain`, `unpad`, `pad`) nothing is a collective by name: each function
states where its result lies and XLA's partitioner inserts what is needed (ZeRO, arXiv 1910.02054,
section 7: a reduce-scatter of the gradients and an all-gather of the parameters). On CPU a
reduce-scatter is then an all-reduce followed by a slice; GPU and TPU compilers make it one
collective.

Inside `shard_map` (`gather`, `reduce_scatter`, `all_reduce`) a device has its piece of a leaf in
its hands and the collectives are written out: what crosses the wire is what stands here, on every
backend. Only the data axes are manual there; axes of tensor parallelism stay automatic, and shapes
are whole along them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .memories import to_device, to_host
from .mesh import axes_of_size, data_axes, is_explicit
from .placement import Placement

Combine = Literal["mean", "sum", "max", "min"]
"""How values of several devices become one."""


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """State where `x` lies from here on; values are unchanged.

    Under Auto axes this is a constraint for the partitioner, under Explicit axes a reshard.
    """
    if is_explicit(sharding.mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def pin_sum(update: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return `update` such that `parameter + update`, traced, lies under `sharding`.

    The new parameter is a sum that the user's step writes (`optax.apply_updates`), so no statement
    of ours reaches it; used again in the same step, it would lie as that use likes best, and the
    state would come back with another layout. Python asks the right operand of a sum first when its
    class extends the left one's: so the update's tracer gets a class that states where the sum
    lies. In all else it is the same tracer; outside of a trace nothing is changed.
    """
    if not isinstance(update, Tracer):
        return update

    def add_and_constrain(self: jax.Array, parameter: jax.Array) -> jax.Array:
        return constrain(jnp.add(parameter, self), sharding)

    kind = type(update)
    members = {"__slots__": (), "__radd__": add_and_constrain}
    update.__class__ = type(kind.__name__, (kind,), members)
    return update


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """From rest to flight: the logical array, without padding.

    Args:
      x: array of `placement.partition.rest_shape`.
      placement: its placement.

    Returns:
      Array of `placement.leaf.shape` under `placement.flight`.
    """
    partition, shape = placement.partition, placement.leaf.shape
    if placement.on_host:
        x = constrain(to_device(x), placement.landing)
    # Explicit types cannot say uneven: gather, then slice.
    if partition.form == "flat" or (x.shape != shape and is_explicit(placement.mesh)):
        x = constrain(x, placement.flight)
    return constrain(stripped(x, shape), placement.flight)


def pad(x: jax.Array, placement: Placement) -> jax.Array:
    """From flight to rest: zeros fill the padding, which nothing reads."""
    partition = placement.partition
    if partition.form == "flat":
        # otherwise the cut spreads to what computed it, whose results are then gathered again
        x = constrain(x, placement.flight)
    x = constrain(filled(x, partition.rest_shape), placement.landing)
    return to_host(x) if placement.on_host else x


def filled(x: jax.Array, rest_shape: tuple[int, ...]) -> jax.Array:
    """A logical array in its shape at rest: flattened if that has one dim, zeros at the ends."""
    if len(rest_shape) != x.ndim:
        x = x.reshape(-1)
    if x.shape == rest_shape:
        return x
    return jnp.pad(x, [(0, r - s) for r, s in zip(rest_shape, x.shape, strict=True)])


def stripped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logical array of `shape` in one at rest: the inverse of `filled`."""
    if len(shape) != x.ndim:
        return x[: math.prod(shape)].reshape(shape)
    return x if x.shape == shape else jax.lax.slice(x, (0,) * x.ndim, shape)


@dataclass(frozen=True)
class Cut:
    """How a leaf is cut over the data axes, as `shard_map` meets it.

    Attributes:
      shape: logical shape.
      rest_shape: shape of all pieces together, padding included; one dim for a flattened leaf.
      dim: the dim of `rest_shape` that is cut, None for a whole leaf.
      axes: mesh axes that it is cut over, major first; () for a whole leaf.
      parts: number of different pieces.
      held: for each dim of `shape` the automatic axes that hold it, None where free; () for none.
      by_axis: one collective for each of `axes`, in place of one over all; see `mesh.torus_mesh`.
    """

    shape: tuple[int, ...]
    rest_shape: tuple[int, ...]
    dim: int | None
    axes: tuple[str, ...]
    parts: int
    held: tuple[Any, ...] = ()
    by_axis: bool = False

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one device's piece."""
        if self.dim is None:
            return self.rest_shape
        piece = list(self.rest_shape)
        piece[self.dim] //= self.parts
        return tuple(piece)

    def whole(self) -> "Cut":
        """The same leaf, not cut."""
        return replace(self, rest_shape=self.shape, dim=None, axes=(), parts=1)

    def alone(self) -> "Cut":
        """The same cut with one device to a leaf: loops go the same way, on whole leaves."""
        return replace(self, rest_shape=self.shape, axes=(), parts=1)

    def layer(self) -> "Cut":
        """The cut of one layer of a stack: the first dim taken away.

        Raises:
          ValueError: the stack is cut along its layers, or flattened.
        """
        if self.dim == 0:
            raise ValueError(
                f"a stack of shape {self.shape} is cut along its first dim, its layers; a device "
                'has no layer whole. Lay the state out with the rule "stacked" for it.'
            )
        dim = None if self.dim is None else self.dim - 1
        rest_shape, held = self.rest_shape[1:], self.held[1:]
        return replace(self, shape=self.shape[1:], rest_shape=rest_shape, dim=dim, held=held)


def cut_of(placement: Placement) -> Cut:
    """The cut of a leaf at rest, over axes of its mesh.

    Raises:
      ValueError: one dim is cut over the data axis and held by another.
    """
    partition, shape = placement.partition, placement.leaf.shape
    held = tuple(placement.gathered.spec)
    held += (None,) * (len(shape) - len(held))
    held = held if any(entry is not None for entry in held) else ()
    if partition.parts == 1:
        return Cut(shape, shape, None, (), 1, held)
    axes = data_axes(placement.mesh, placement.axis)
    axes = axes_of_size(placement.mesh, axes, partition.parts)
    dim = 0 if partition.form == "flat" else partition.dim
    if held and dim is not None and held[dim] is not None:
        raise ValueError(
            f"{placement.tree}/{placement.leaf.path}: its dim {dim} is cut over {placement.axis!r} "
            f"and over {held[dim]!r}; the explicit step needs a dim for each. Change its rule."
        )
    by_axis = len(axes) > 1 and placement.mesh.devices.flat[0].platform == "tpu"
    return Cut(shape, partition.rest_shape, dim, axes, partition.parts, held, by_axis)


def gather(piece: jax.Array, cut: Cut) -> jax.Array:
    """All-gather a leaf from the pieces of all devices; inside `shard_map`.

    Args:
      piece: array of `cut.piece_shape`; its dtype is what crosses the wire.
      cut: how the leaf is cut.

    Returns:
      The logical array, without padding: every other device sends its piece once.
    """
    if cut.parts == 1:
        return piece
    return stripped(_along_held(_all_gather, cut)(piece), cut.shape)


def reduce_scatter(whole: jax.Array, cut: Cut) -> jax.Array:
    """Sum a leaf over the devices it is cut over, each keeping its piece; inside `shard_map`.

    The transpose of `gather`. A whole leaf is returned as it is: nothing is summed.

    Args:
      whole: this device's summand, the logical array; its dtype is what crosses the wire.
      cut: how the leaf is cut.
    """
    if cut.dim is None:
        return whole
    return _along_held(_psum_scatter, cut)(filled(whole, cut.rest_shape))


def all_reduce(x: Any, axes: tuple[str, ...], by: Combine = "sum") -> Any:
    """Join `x`, an array or a tree of them, over mesh axes; inside `shard_map`.

    Without axes it is `x` itself.
    """
    join = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax, "min": jax.lax.pmin}
    return join[by](x, axes) if axes else x


def mean_over_batch(x: Any) -> Any:
    """The mean of `x` over all devices that hold rows of the batch.

    For a loss with a term that is no mean over rows, a product of two batch means, say. In the
    explicit step a loss sees one device's rows, and this averages over devices (of one microbatch);
    its gradient is right. Elsewhere, where a loss sees the whole batch, it is `x` itself.

    Args:
      x: an array of inexact dtype, or a tree of them: means over the rows at hand.
    """
    return all_reduce(x, tuple(jax.sharding.get_abstract_mesh().manual_axes), "mean")


def _along_held(collective: Callable[[jax.Array, Cut], jax.Array], cut: Cut) -> Any:
    """The collective on what a device has of an array that automatic axes hold.

    A collective over manual axes knows nothing of automatic ones: the partitioner would gather over
    those first, and every device would send the whole. So they are made manual around it.
    """

    def on_device(x: jax.Array) -> jax.Array:
        return collective(x, cut)

    if not cut.held:
        return on_device
    entries = [e if isinstance(e, tuple) else (e,) for e in cut.held if e is not None]
    spec, names = PartitionSpec(*cut.held), {name for entry in entries for name in entry}
    return jax.shard_map(
        on_device, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False
    )


def _all_gather(piece: jax.Array, cut: Cut) -> jax.Array:
    assert cut.dim is not None
    for axes in reversed(cut.axes) if cut.by_axis else (cut.axes,):
        piece = jax.lax.all_gather(piece, axes, axis=cut.dim, tiled=True)
    return piece


def _psum_scatter(whole: jax.Array, cut: Cut) -> jax.Array:
    dim, n, shape = cut.dim, cut.parts, whole.shape
    assert dim is not None
    if not cut.by_axis:
        return jax.lax.psum_scatter(whole, cut.axes, scatter_dimension=dim, tiled=True)
    # Pieces as a dim of their own are whole tiles: otherwise TPU compilers pad and permute, at 3 to
    # 5 % of the bytes. In the middle of more than two dims the opposite holds.
    blocked = dim == 0 or whole.ndim == 2
    if blocked:
        whole = whole.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    for axis in cut.axes:
        whole = jax.lax.psum_scatter(whole, axis, scatter_dimension=dim, tiled=True)
    return whole.reshape(*shape[:dim], shape[dim] // n, *shape[dim + 1 :]) if blocked else whole
