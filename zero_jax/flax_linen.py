"""Linen and plain states: where their parameters, optimizer state and the rest are.

A state here is a record with `params` and `opt_state`: `flax.training.train_state.TrainState` and
subclasses, a `flax.struct` or dataclass, a NamedTuple, a dict or FrozenDict. `tx` is a field of it,
or given beside it. All other fields are "other": statistics, averages, keys, counters.

Metadata boxes (`nn.with_partitioning`, `nn.with_logical_partitioning`) stay in the tree; the axes
they name and the mesh has are a prior partition. Names that the mesh lacks are the model's logical
names, resolved through the box's rules where it has any, and otherwise hold nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
from flax.core import meta
from flax.linen import spmd
from jax.sharding import Mesh

from .residence import path_of
from .shortfall import warn

Tree = Any
_FIELDS = ("params", "opt_state")


def is_record(state: Any) -> bool:
    """Whether `state` has `params` and `opt_state`."""
    if isinstance(state, Mapping):
        return all(name in state for name in _FIELDS)
    return all(hasattr(state, name) for name in _FIELDS)


def get(state: Any, name: str) -> Any:
    """A field of a record, None where it has no such field."""
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def replace(state: Any, **fields: Any) -> Any:
    """The same record with some fields replaced; the type is kept.

    Raises:
      TypeError: the record is of a kind that cannot be rebuilt.
    """
    if isinstance(state, Mapping):
        return cast(Callable[..., Any], type(state))({**state, **fields})
    if hasattr(state, "replace"):
        return state.replace(**fields)
    if hasattr(state, "_replace"):
        return state._replace(**fields)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return dataclasses.replace(state, **fields)
    raise TypeError(
        f"state: a {type(state).__name__} has params and opt_state but cannot be rebuilt; expected "
        "a TrainState, a flax.struct or other dataclass, a NamedTuple or a dict."
    )


def is_box(node: Any) -> bool:
    """Whether `node` is a metadata box."""
    return isinstance(node, meta.AxisMetadata)


def box_specs(tree: Tree, mesh: Mesh) -> dict[str, tuple[object, ...]]:
    """Path -> prior spec of every metadata box in `tree`, axes the mesh lacks left out."""
    boxed = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]
    specs = {}
    for keys, box in boxed:
        if isinstance(box, nn.LogicallyPartitioned) and box.rules:
            names = tuple(spmd.logical_to_mesh_axes(box.names, box.rules) or ())
        elif isinstance(box, nn.LogicallyPartitioned):
            names = box.names  # logical names without rules; those that are axes of the mesh count
        elif isinstance(box, nn.Partitioned):
            names = box.names
            _warn_of_missing(path_of(keys), names, mesh)
        else:
            continue
        specs[path_of(keys)] = on_mesh(names, mesh)
    return specs


def _warn_of_missing(path: str, names: Any, mesh: Mesh) -> None:
    missing = [n for n in jax.tree.leaves(tuple(names)) if n not in mesh.shape]
    if missing:
        warn(
            f"params/{path} is boxed for the axis {missing[0]!r}, which the mesh "
            f"{dict(mesh.shape)} lacks; it is not partitioned over it."
        )


def on_mesh(names: Any, mesh: Mesh) -> tuple[object, ...]:
    """The entries of `names` that are axes of `mesh`, None elsewhere."""

    def entry(name: Any) -> object:
        if isinstance(name, (tuple, list)):
            kept = tuple(n for n in name if n in mesh.shape)
            return kept or None
        return name if name in mesh.shape else None

    return tuple(entry(name) for name in names or ())
