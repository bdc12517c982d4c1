"""Where a layer loop keeps the inputs of its layers: on the device or the host, whole or split.

ZeRO-R keeps each input once for all devices of tensor parallelism (P_a), and on the host where
device memory is short (P_a+cpu): ZeRO, arXiv 1910.02054, section 6.1. What is kept lies in a stack,
written a layer at a time in the forward pass and read in the backward pass. To the loop an array
that lies elsewhere is like a parameter that has to be gathered: it is fetched a layer ahead by the
same walk (`layer_loop`), and `Kept` is its wire.

Two things make the compilers move pieces and nothing else. A stack is on the host from the start:
they then make it there, with no copy of it on the device. And x is split and gathered in a
`shard_map` of its own over the axis, where it goes in whole: told only that the stack is split, the
partitioner splits x too, and computes the layers in another way (on TPU with more memory than the
stack had taken).

Not here: what is kept (`remat`, `layer_forward`); `jax.vmap` of a loop that keeps on the host: JAX
refuses that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .memories import to_device, to_host, zeros
from .remat import Remat


@dataclass(frozen=True)
class Kept:
    """How one array of each layer is kept.

    Attributes:
      on_host: in the host's memory.
      axis: an automatic mesh axis that it is split over, or None.
      dim: the dim that is split.
    """

    on_host: bool = False
    axis: str | None = None
    dim: int = 0

    @property
    def moves(self) -> bool:
        """Whether it takes time to read it."""
        return self.on_host or self.axis is not None

    def stack(self, like: Any, count: int) -> jax.Array:
        """Zeros for `count` arrays."""
        shape, spec = (count, *like.shape), self._spec(1)
        if self.axis is None:
            return zeros(shape, like.dtype, on_host=self.on_host)
        whole = jnp.zeros(shape, like.dtype)
        split = self._mapped(lambda pieces: pieces, spec, spec)(whole)
        return to_host(split) if self.on_host else split

    def put(self, stack: jax.Array, x: jax.Array, i: Any) -> jax.Array:
        """Write layer `i`."""
        if self.axis is not None:
            x = self._mapped(self._own_piece, PartitionSpec(), self._spec())(x)
        x = to_host(x) if self.on_host else x
        return lax.dynamic_update_index_in_dim(stack, x, i, 0)

    def gather(self, piece: jax.Array) -> jax.Array:
        """What was read of a layer: whole, on the device."""
        if self.on_host:
            piece = to_device(piece)
        if self.axis is None:
            return piece
        return self._mapped(self._whole, self._spec(), PartitionSpec())(piece)

    def _own_piece(self, x: jax.Array) -> jax.Array:
        assert self.axis is not None
        size = x.shape[self.dim] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, self.dim)

    def _whole(self, piece: jax.Array) -> jax.Array:
        return lax.all_gather(piece, self.axis, axis=self.dim, tiled=True)

    def _spec(self, stacked: int = 0) -> PartitionSpec:
        return PartitionSpec(*[None] * (self.dim + stacked), self.axis)

    def _mapped(self, function: Callable[..., Any], given: Any, result: Any) -> Any:
        return jax.shard_map(
            function, in_specs=given, out_specs=result, axis_names={self.axis}, check_vma=False
        )


def kept_as(remat: Remat, x: Sequence[Any]) -> tuple[Kept, ...]:
    """How the inputs of layers are kept, by leaf of x.

    Raises:
      ValueError: x cannot be split over the axis, or the axis is none that it could be split over.
    """
    axis = remat.split_over
    size = 1 if axis is None else _size_of(axis)
    if size == 1:
        return tuple(unsplit(remat, leaf) for leaf in x)
    dims = [_dim_to_split(leaf.shape, size) for leaf in x]
    if all(dim is None for dim in dims):
        raise ValueError(
            f"split_over={axis!r}: x has the shapes {[leaf.shape for leaf in x]}, none with a dim "
            f"that {size} devices divide. Pad one, or leave split_over out."
        )
    return tuple(
        unsplit(remat, leaf) if dim is None else Kept(remat.kept_on == "host", axis, dim)
        for leaf, dim in zip(x, dims, strict=True)
    )


def unsplit(remat: Remat, like: Any) -> Kept:
    """How an array of a layer is kept that is not split."""
    return Kept(remat.kept_on == "host" and len(like.shape) > 0)


def open_stacks(kept: Sequence[Kept], likes: Sequence[Any], count: int) -> list[jax.Array]:
    """Stacks for what is kept of `count` layers."""
    return [k.stack(like, count) for k, like in zip(kept, likes, strict=True)]


def keep(
    kept: Sequence[Kept], stacks: Sequence[jax.Array], pieces: Sequence[jax.Array], i: Any
) -> list[jax.Array]:
    """Write what is kept of layer `i`."""
    return [k.put(s, p, i) for k, s, p in zip(kept, stacks, pieces, strict=True)]


def _dim_to_split(shape: tuple[int, ...], size: int) -> int | None:
    """The first dim that divides, but the batch's, which is split otherwise, only where none does.

    Rows of it then are contiguous pieces: the middle of (batch, tokens, width).
    """
    dims = [*range(1, len(shape)), *range(min(1, len(shape)))]
    return next((dim for dim in dims if shape[dim] and shape[dim] % size == 0), None)


def _size_of(axis: str) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        has = f"the mesh here has {mesh.axis_names}" if mesh.axis_names else "no mesh is set here"
        raise ValueError(
            f"split_over={axis!r}: {has}. Run the loop inside of the explicit step of a state on a "
            "mesh with that axis, or under jax.set_mesh(mesh)."
        )
    if axis in mesh.manual_axes:
        raise ValueError(
            f"split_over={axis!r}: the axis is manual here (of a shard_map, of the batch's rows, "
            "say), so that each device along it has an x of its own. An automatic axis, of tensor "
            "parallelism, was expected."
        )
    return mesh.shape[axis]
