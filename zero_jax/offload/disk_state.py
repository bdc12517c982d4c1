"""A training state on its way to files, or back: which leaves, in which pieces, whose turn.

When a state is laid out for `Nvme` its optimizer leaves are written to files one by one, so that no
more than one of them is on the devices. How they are cut into pieces follows from the update, which
is traced here: an optimizer that cannot pass leaf by leaf is refused before anything is written.

A state that is resumed takes from the directory whatever any of its steps has changed: the
optimizer state stays in its files, parameters are read from their master copies or from files of
their own. What no step has changed (a parameter frozen from the start) is the caller's. At the
start, too, parameters are made of their master copies.

Not here: the update (`disk_update`), files (`disk`, `disk_array`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..collectives import pad, unpad
from ..delayed import Pending, no_gradient
from ..extended_state import split_scale
from ..layout import Layout
from ..master_weights import MasterWeights, master_leaves
from ..offload_policy import Existing, Nvme
from ..optimizer import PartitionedOptimizer
from ..placement import Placement
from ..precision import round_to
from ..typed_keys import bits_of, of_bits, place_of_bits
from ..update import traced_update
from .boxes import Boxes, ragged_box, write_box
from .disk import Disk
from .disk_array import DiskArray, arrive, load, looks, name_of, start_reading, write
from .disk_claim import agreed, open_disk
from .disk_passes import find_passes, piece_bytes
from .streams import open_update

Tree = Any
Make = Callable[[list[int]], list[jax.Array]]


def settle(
    layout: Layout, tx: PartitionedOptimizer, make: Make, existing: Existing | None = None
) -> list[Any]:
    """Every leaf of a state in its place, on the devices or in files.

    Args:
      layout: of the state; its policy is an `Nvme`.
      tx: the wrapped optimizer.
      make: positions in the order params, opt_state, other -> these leaves at rest, on devices.
      existing: in place of the policy's.

    Raises:
      OSError, ValueError: the directory cannot be used (see `open_disk`), there is nothing to put
        into it, or two leaves would have the same files.
    """
    policy = layout.offload
    assert isinstance(policy, Nvme)
    policy = policy if existing is None else replace(policy, existing=existing)
    twice = [name for name, n in Counter(map(name_of, _places(layout))).items() if n > 1]
    if twice:
        raise ValueError(
            f"state: two leaves are called {twice[0]}, which is their name in files; give one of "
            "them a key without '/'."
        )
    pieces = _pieces_of(layout, tx, policy)
    if not pieces:
        raise ValueError(
            "offload: the optimizer's state has no arrays, so that there is nothing to put into "
            "files; leave Nvme out."
        )
    disk, found = agreed(lambda: open_disk(policy))
    try:
        contents = disk.use_complete(found)
        if contents is None:
            return _begin(disk, layout, pieces, make)
        return _resume(disk, contents, layout, pieces, make)
    except BaseException:
        disk.close()
        raise


def _begin(disk: Disk, layout: Layout, pieces: dict[int, Boxes], make: Make) -> list[Any]:
    places = _places(layout)
    agreed(lambda: disk.check_room(sum(local_bytes(places[at]) for at in pieces)))
    disk.clear()
    disk.begin()
    for pack in _packs(places, pieces, disk.limit_bytes):
        for at, array in zip(pack, make(pack), strict=True):
            write(disk, places[at], pieces[at], array)
    disk.commit(0)
    return _assemble(disk, {}, layout, pieces, make)


def _resume(
    disk: Disk,
    contents: dict[str, Any],
    layout: Layout,
    pieces: dict[int, Boxes],
    make: Make,
) -> list[Any]:
    agreed(lambda: _check_contents(disk, contents, layout, pieces))
    return _assemble(disk, contents, layout, pieces, make)


def _check_contents(
    disk: Disk, contents: dict[str, Any], layout: Layout, pieces: dict[int, Boxes]
) -> None:
    places = _places(layout)
    for at, boxes in pieces.items():
        _check_looks(disk, places[at], contents.get(name_of(places[at])), boxes)
    unknown = contents.keys() - set(map(name_of, places))
    if unknown:
        raise ValueError(
            f"offload: {disk.path} has {min(unknown)}, which this state has not. Lay the state out "
            "with the optimizer it had, or restore a checkpoint, with existing='replace'."
        )


def _assemble(
    disk: Disk, contents: dict[str, Any], layout: Layout, pieces: dict[int, Boxes], make: Make
) -> list[Any]:
    """All leaves, those in files being there; `contents` is what is to be read of the others."""
    places, masters = _places(layout), masters_of(layout)
    leaves: list[Any] = [None] * len(places)
    for at, boxes in pieces.items():
        leaves[at] = DiskArray(disk, places[at], boxes, disk.version)
    fresh, narrowed = [], []
    for at, place in enumerate(places):
        if name_of(place) in contents and at not in pieces:
            leaves[at] = _read_other(disk, place, contents[name_of(place)])
        elif at in masters:
            narrowed.append(at)
        elif at not in pieces:
            fresh.append(at)
    for at, array in zip(fresh, make(fresh), strict=True):
        leaves[at] = array
    for at in narrowed:
        leaves[at] = _narrowed(leaves[masters[at]], places[masters[at]], places[at])
    return leaves


def _check_looks(disk: Disk, place: Placement, look: Any, boxes: Boxes) -> None:
    if look != looks(place, boxes):
        raise ValueError(
            f"offload: {disk.path} was written by another layout: {name_of(place)} is "
            f"{look or 'not there'}, expected {looks(place, boxes)}. Lay the state out as it was "
            "(stage, devices, buffer_bytes), or restore a checkpoint, which fits any."
        )


def write_other(disk: Disk, place: Placement, array: jax.Array) -> None:
    """Write a leaf that lies on the devices, so that the state in the directory is whole."""
    place, array = place_of_bits(place), bits_of(array)
    shape = place.partition.rest_shape
    stays = [entry is not None for entry in (*place.landing.spec, *[None] * len(shape))]
    most_bytes = piece_bytes(disk.limit_bytes, place.mesh)
    box = ragged_box(shape, stays[: len(shape)], place.bytes_per_device, most_bytes)
    write(disk, place, Boxes(shape, box or shape), array)


def _read_other(disk: Disk, place: Placement, look: dict[str, Any]) -> jax.Array:
    bits = place_of_bits(place)
    boxes = Boxes(bits.partition.rest_shape, tuple(look["piece"]))
    _check_looks(disk, bits, look, boxes)
    return jax.device_put(of_bits(load(disk, bits, boxes), place.leaf), place.rest)


def _narrowed(master: Any, its_place: Placement, place: Placement) -> jax.Array:
    """A parameter as its master copy says; piece by piece if that is in files."""
    shape, dtype = place.partition.rest_shape, place.leaf.dtype

    def whole(x: jax.Array) -> jax.Array:
        return pad(round_to(unpad(x, its_place), dtype).astype(dtype), place)

    if not isinstance(master, DiskArray):
        return jax.jit(whole, out_shardings=place.rest)(master)
    disk, boxes = master.disk, master.boxes
    old = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place.rest)()

    def overwrite(old: jax.Array, piece: jax.Array, i: jax.Array, like: int) -> jax.Array:
        if boxes.count == 1:
            return whole(piece)
        new = round_to(piece, dtype).astype(dtype)
        return write_box(old, new, boxes, i, place.landing, on_host=place.on_host, like=like)

    run = jax.jit(overwrite, donate_argnums=0, static_argnums=3, out_shardings=place.rest)
    for i in range(boxes.count):
        reading = start_reading(disk, its_place, boxes, i)
        piece = arrive(disk, its_place, boxes, i, reading)
        old = run(old, piece, jnp.int32(i), boxes.like(i))
    return old


def _places(layout: Layout) -> list[Placement]:
    return jax.tree.leaves((layout.params, layout.opt_state, layout.other))


def _pieces_of(layout: Layout, tx: PartitionedOptimizer, policy: Nvme) -> dict[int, Boxes]:
    """Position of a leaf in files -> its pieces."""

    def described(p: Placement) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(p.partition.rest_shape, p.leaf.dtype)

    updates = jax.tree.leaves(layout.updates)
    _, state = split_scale(layout.opt_state)
    number, truth = (jax.eval_shape(lambda d=d: d(0)) for d in (jnp.float32, jnp.bool))
    gradients = jax.eval_shape(lambda: [no_gradient(p) for p in updates])
    function, inputs, outputs = traced_update(
        tx,
        Pending(gradients, number, truth, number),
        jax.tree.map(described, state),
        jax.tree.map(described, layout.params),
        [False] * len(updates),
    )
    passes = find_passes(open_update(function, inputs, outputs), (), policy.buffer_bytes)
    n, scaled = len(updates), len(jax.tree.leaves(layout.opt_state)) - len(jax.tree.leaves(state))
    # inputs are gradients, parameters, optimizer state; leaves are parameters, scale, the rest
    files = {at: p.boxes for p in passes for at in p.files}
    shapes = {at: inputs[at].place.partition.rest_shape for at in files}
    return {at - n + scaled: boxes.of(shapes[at]) for at, boxes in files.items()}


def masters_of(layout: Layout) -> dict[int, int]:
    """Position of a parameter -> that of its master copy."""
    _, state = split_scale(layout.opt_state)
    if not isinstance(state, MasterWeights):
        return {}
    position = {id(p): at for at, p in enumerate(_places(layout))}
    masters = enumerate(master_leaves(state))
    return {at: position[id(m)] for at, m in masters if m is not None}


def copy_bytes(layout: Layout) -> int:
    """Of one copy in files, for one device: optimizer state, parameters that no master copy tells.

    A frozen parameter is not written, and what a hook of the user's changes is: neither is known
    here.
    """
    masters = masters_of(layout)
    params = enumerate(jax.tree.leaves(layout.params))
    params_bytes = sum(p.bytes_per_device for at, p in params if at not in masters)
    return params_bytes + sum(p.bytes_per_device for p in jax.tree.leaves(layout.opt_state))


def local_bytes(place: Placement) -> int:
    """Bytes of a leaf in this process's files."""
    shape = place.partition.rest_shape
    starts = {str(i) for i in place.landing.addressable_devices_indices_map(shape).values()}
    return place.bytes_per_device * len(starts)


def _packs(
    places: Sequence[Placement], pieces: dict[int, Boxes], most_bytes: int
) -> list[list[int]]:
    """Leaves that are made together: as many as are less than `most_bytes`, or one."""
    packs: list[list[int]] = []
    room = 0
    for at in pieces:
        size = places[at].bytes_per_device
        if not packs or size > room:
            packs, room = [*packs, []], most_bytes
        packs[-1].append(at)
        room -= size
    return packs
