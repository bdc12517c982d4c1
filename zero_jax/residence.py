"""Arrays on their way into a layout: read, check, cast, pad, place.

Leaf by leaf, so that beside the state itself one leaf exists twice and no more. A placed array
never shares memory with the one it came from: `jax.device_put` may alias, and donating the result
would delete the user's original.

Abstract leaves (`jax.ShapeDtypeStruct`) go through the same functions and come back abstract, with
shardings.

Not here: where a leaf goes (`layout`), host memory and disks.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from .collectives import filled, stripped
from .offload.disk_array import DiskArray
from .placement import Leaf, Placement, without_axis

Tree = Any


def read_leaves(
    name: str, tree: Tree, mesh: Mesh, axis: str, boxes: Mapping[str, tuple[object, ...]]
) -> Tree:
    """Describe every leaf of a tree as a `Leaf`.

    Args:
      name: name of the tree, for errors.
      tree: arrays, numpy arrays, Python scalars or `ShapeDtypeStruct`s.
      mesh, axis: the mesh the leaves are going to lie on, and its data axis.
      boxes: path -> spec that a metadata box or variable annotation gives.

    Raises:
      ValueError: an array was deleted (donated), or is partitioned over another mesh.
      TypeError: a leaf is no array.
    """

    scales = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_loss_scale)[0]
    strong = tuple(f"{path_of(keys)}/" for keys, node in scales if _is_loss_scale(node))

    def read(keys: Any, leaf: Any) -> Leaf:
        path = path_of(keys)
        aval = _aval(f"{name}/{path}", leaf)
        boxed = tuple(without_axis(boxes.get(path, ()), axis))
        held = boxed or _held(f"{name}/{path}", leaf, mesh, axis)
        # A Python float must not widen bf16 arithmetic, so it stays weak. Any other weak type, and
        # that of flax's loss scale, would be lost in a step.
        weak = name == "other" and aval.shape == () and jnp.issubdtype(aval.dtype, jnp.inexact)
        weak = weak and not path.startswith(strong)
        return Leaf(path, aval.shape, aval.dtype, aval.weak_type and weak, held)

    return jax.tree_util.tree_map_with_path(read, tree)


def _is_loss_scale(node: Any) -> bool:
    return isinstance(node, DynamicScale)


def path_of(keys: tuple[Any, ...]) -> str:
    """Keys joined by "/", without the `value` step of a metadata box."""
    if keys and getattr(keys[-1], "name", None) == "value":
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _aval(where: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
        raise ValueError(
            f"state: {where} was deleted, most likely donated to a jitted step; pass the state "
            "that the step returned."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return jax.typeof(leaf)
    raise TypeError(
        f"state: {where} is a {type(leaf).__name__}; expected an array, a Python number or a "
        "ShapeDtypeStruct (keep functions and strings in static fields)."
    )


def _held(where: str, leaf: Any, mesh: Mesh, axis: str) -> tuple[object, ...]:
    """The partition that `leaf` has on axes other than the data axis."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return ()
    same_devices = (
        not isinstance(sharding.mesh, Mesh)
        or sharding.mesh.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    )
    unknown = [a for a in jax.tree.leaves(tuple(sharding.spec)) if a not in mesh.shape]
    if unknown or not same_devices:
        raise ValueError(
            f"state: {where} is partitioned as {sharding.spec} over another mesh, "
            f"{dict(sharding.mesh.shape)} of {sharding.mesh.size} devices; expected "
            f"{dict(mesh.shape)} of {mesh.size}. Pass mesh= the mesh it lies on, or gather it "
            "first (zero_jax.unshard_train_state)."
        )
    return tuple(without_axis(sharding.spec, axis))


def place(leaf: Any, placement: Placement) -> Any:
    """Put one logical leaf at rest: a new array, or a `ShapeDtypeStruct` for an abstract leaf.

    Args:
      leaf: array of `placement.leaf.shape`, any dtype that casts to `placement.leaf.dtype`.
      placement: where it goes.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return abstract(placement)
    array = filled(strengthen(jnp.asarray(leaf), placement), placement.partition.rest_shape)
    return jax.device_put(jnp.copy(array), placement.rest)


def strengthen(array: jax.Array, placement: Placement) -> jax.Array:
    """Cast to the dtype at rest; Python scalars keep their weak type where the layout says so."""
    return array if placement.leaf.weak_type else jnp.asarray(array, dtype=placement.leaf.dtype)


def abstract(placement: Placement) -> jax.ShapeDtypeStruct:
    """The leaf at rest, as a `ShapeDtypeStruct` with its sharding."""
    return jax.ShapeDtypeStruct(
        placement.partition.rest_shape,
        placement.leaf.dtype,
        sharding=placement.rest,
        weak_type=placement.leaf.weak_type,
    )


def gather(leaf: Any, placement: Placement) -> Any:
    """The logical leaf, whole over the data axis: the inverse of `place`."""
    target = placement.gathered
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            placement.leaf.shape, leaf.dtype, sharding=target, weak_type=leaf.weak_type
        )
    if isinstance(leaf, DiskArray):
        leaf = leaf.load()
    return stripped(jax.device_put(jnp.copy(leaf), target), placement.leaf.shape)


def is_compile_only(mesh: Mesh) -> bool:
    """Whether some device of `mesh` cannot hold an array in this process (a described topology)."""
    platform = mesh.devices.flat[0].platform
    try:
        present = set(jax.devices(platform))
    except RuntimeError:
        return True
    return not set(mesh.devices.flat) <= present
