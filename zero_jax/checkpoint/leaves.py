"""What a checkpoint has of a training state: its leaves by name, in parts of the devices and back.

A name says what a leaf is, and not how the state holds it: parameters, optax's own state, master
copies, the loss scale and gradients that wait are each under a name of their own, whatever is
wrapped around what.

  params/PATH  opt_state/PATH  master/PATH  loss_scale/PATH  pending/PATH  other/PATH

Not here: files (`arrays`).
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..collectives import unpad
from ..delayed import Delayed
from ..extended_state import LossScaled
from ..layout import Layout
from ..master_weights import MasterWeights
from ..offload.disk_array import DiskArray
from ..placement import Placement
from ..residence import place as put
from ..typed_keys import bits_of, implementation, is_key, of_bits, place_of_bits
from .arrays import Begin, Filed, Where, chunk_of, clipped, in_turns, is_empty

TREES = ("params", "opt_state", "master", "loss_scale", "pending", "other")
_WRAPPERS = ((LossScaled, "loss_scale"), (Delayed, "pending"), (MasterWeights, "master"))


class Part(NamedTuple):
    """What one device writes of a leaf.

    Attributes:
      name, filed: of the leaf.
      chunk: shape of a chunk of the array.
      where: the box of the logical array.
      values: that box, in host memory.
    """

    name: str
    filed: Filed
    chunk: tuple[int, ...]
    where: Where
    values: np.ndarray


def names_of(layout: Layout) -> list[str]:
    """Names of all leaves, in the order params, opt_state, other."""
    names = {id(p): f"params/{p.leaf.path or 'value'}" for p in jax.tree.leaves(layout.params)}
    names |= {id(p): f"other/{p.leaf.path or 'value'}" for p in jax.tree.leaves(layout.other)}
    state, prefix = layout.opt_state, ""
    for wrapper, name in _WRAPPERS:
        if isinstance(state, wrapper):
            held, state = state
            for p in jax.tree.leaves(held):
                path = p.leaf.path.removeprefix(prefix).partition("/")[2]
                names[id(p)] = f"{name}/{path or 'value'}"
            prefix += "inner/"
    for p in jax.tree.leaves(state):
        names[id(p)] = f"opt_state/{p.leaf.path.removeprefix(prefix) or 'value'}"
    return [names[id(p)] for p in places_of(layout)]


def parted(name: str) -> tuple[str, str, str]:
    """The key of a state in a container (with its "/", or ""), the tree, the path."""
    first = name.partition("/")[0]
    key = "" if first in TREES else f"{first}/"
    tree, _, path = name.removeprefix(key).partition("/")
    return key, tree, path


def places_of(layout: Layout) -> list[Placement]:
    """Placements of all leaves, in that order."""
    return jax.tree.leaves((layout.params, layout.opt_state, layout.other))


def filed_of(place: Placement) -> Filed:
    """How a leaf looks in files."""
    bits = place_of_bits(place)
    key = implementation(place.leaf) if is_key(place.leaf) else ""
    return Filed(tuple(bits.leaf.shape), np.dtype(bits.leaf.dtype), key)


def parts_of(name: str, place: Placement, array: Any) -> Iterator[Part]:
    """What this process writes of a leaf: boxes of the logical array that are its own.

    Each part of an array is written once, by the first device that has it. Values are in host
    memory; where that is the array's own, JAX does not give it to a step as long as it is held.
    """
    filed = filed_of(place)
    is_flat = place.partition.form == "flat"
    if isinstance(array, DiskArray) and not is_flat:
        yield from _parts_in_files(name, filed, array)
        return
    array = array.load() if isinstance(array, DiskArray) else bits_of(array)
    if is_flat:  # a part of it is no box: whole on each device, for a moment
        array = jax.jit(lambda x: unpad(x, place), out_shardings=place.gathered)(array)
    chunk = chunk_of(array.sharding.shard_shape(array.shape), filed.dtype.itemsize)
    shards = [s for s in array.addressable_shards if s.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    for shard in shards:
        where = clipped(shard.index, filed.shape)
        if not is_empty(where):
            box = tuple(slice(0, s.stop - s.start) for s in where)
            yield Part(name, filed, chunk, where, np.asarray(shard.data)[box])


def _parts_in_files(name: str, filed: Filed, array: DiskArray) -> Iterator[Part]:
    """Piece by piece, as the files of the state have them."""
    chunk: tuple[int, ...] = ()
    for where, values in array.pieces():
        chunk = chunk or chunk_of(values.shape, filed.dtype.itemsize)
        box = clipped(where, filed.shape)
        if not is_empty(box):
            inside = tuple(slice(0, s.stop - s.start) for s in box)
            yield Part(name, filed, chunk, box, values[inside])


def read_leaves(arrays: Any, wanted: Sequence[tuple[str, Filed, Placement]]) -> Iterator[jax.Array]:
    """Leaves at rest, in the dtype of their placement; each process reads what it needs.

    Args:
      arrays: the `Arrays` of a checkpoint, or what opens and reads as they do.
      wanted: the name of each there, how it looks there, where it goes.

    Raises:
      DamagedError: a file is gone, or has other bytes than were written.
    """
    laid = [(*each, _owners(place_of_bits(each[2]))) for each in wanted]
    arrays.open(name for name, filed, *_ in laid if 0 not in filed.shape)
    read = in_turns(_pieces(arrays, laid))
    for _, filed, place, owners in laid:
        bits, parts = place_of_bits(place), []
        for index, devices in owners:
            part = _at_rest(bits, index, _valued(next(read), filed, bits))
            kind = "pinned_host" if place.on_host else None
            parts += [
                jax.device_put(part, SingleDeviceSharding(d, memory_kind=kind)) for d in devices
            ]
        if place.leaf.weak_type:
            yield put(parts[0].item(), place)
            continue
        shape = bits.partition.rest_shape
        array = jax.make_array_from_single_device_arrays(shape, bits.rest, parts)
        yield of_bits(array, place.leaf)


def _pieces(arrays: Any, laid: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Begin]]:
    """Bytes of every box that is to be read, and what begins it."""
    for name, filed, place, owners in laid:
        for index, _ in owners:
            where = _box(place_of_bits(place), index)
            size = math.prod(max(0, s.stop - s.start) for s in where) * filed.dtype.itemsize
            yield size, partial(_begin, arrays, name, filed, where)


def _begin(arrays: Any, name: str, filed: Filed, where: Where) -> Any:
    if not is_empty(where):
        return arrays.read(name, where)
    nothing: Future[np.ndarray] = Future()  # padding alone, or an array without elements
    shape = [max(0, s.stop - s.start) for s in where]
    nothing.set_result(np.zeros(shape, filed.stored))
    return nothing


def _valued(box: np.ndarray, filed: Filed, place: Placement) -> np.ndarray:
    """What was read, in the dtype of the leaf."""
    box = np.asarray(box)
    values = box.reshape(-1).view(filed.dtype).reshape(box.shape)
    return values.astype(place.leaf.dtype, copy=False)


def _owners(place: Placement) -> list[tuple[Where, list[Any]]]:
    """Parts of a leaf that this process's devices have at rest, and which."""
    shape = place.partition.rest_shape
    owners: dict[str, tuple[Where, list[Any]]] = {}
    for device, index in place.rest.addressable_devices_indices_map(shape).items():
        owners.setdefault(str(index), (index or (), []))[1].append(device)
    return list(owners.values())


def _box(place: Placement, index: Where) -> Where:
    """The box of the logical array that has what part `index` at rest has."""
    shape = place.leaf.shape
    if place.partition.form != "flat":
        return clipped(index, shape)
    start, stop, row = _range(place, index)
    rows = slice(start // row, max(start // row, -(-stop // row)))
    return (rows, *(slice(0, n) for n in shape[1:]))


def _at_rest(place: Placement, index: Where, box: np.ndarray) -> np.ndarray:
    """Part `index` at rest, padded with zeros, from its box."""
    shape = place.rest.shard_shape(place.partition.rest_shape)
    if place.partition.form == "flat":
        start, stop, row = _range(place, index)
        first = start // row * row
        box = box.reshape(-1)[start - first : max(start, stop) - first]
    if box.shape == shape:
        return box
    return np.pad(box, [(0, n - m) for n, m in zip(shape, box.shape, strict=True)])


def _range(place: Placement, index: Where) -> tuple[int, int, int]:
    """First and last element of a flat part without padding, and elements of a row."""
    shape = place.leaf.shape
    size = math.prod(shape)
    (part,) = index
    start, stop = part.start or 0, size if part.stop is None else part.stop
    return min(start, size), min(stop, size), max(1, size // max(1, shape[0]))
