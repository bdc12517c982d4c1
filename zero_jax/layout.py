"""The layout of a training state: for every leaf where it lies, and why.

A layout is data. It is decided here once, from shapes alone, for the three model states of ZeRO
(arXiv 1910.02054, section 3.1: parameters, gradients, optimizer state), and everything else reads
it: the step, the planner, the checkpointer, the reports.

Which leaf of the optimizer state belongs to which parameter is not written anywhere in optax. What
holds for every transformation is: a leaf whose path ends in a parameter's path and whose shape is
that parameter's is one of its moments and lies as they do; any other leaf (adafactor's factored
moments, say) is cut by its own shape; scalars stay whole.

Not here: moving an array (`collectives`, `residence`), reading a state's fields (`train_state`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import rules as path_rules
from .mesh import axes_of_size, data_axes, is_explicit, refine
from .partition import Partition, partition_leaf, trimmed, whole
from .stage import Stage

Tree = Any
TreeName = Literal["params", "grads", "opt_state", "other"]


@dataclass(frozen=True)
class Leaf:
    """What the layout needs to know of one leaf.

    Attributes:
      path: keys from the root of its tree, joined by "/".
      shape: logical shape.
      dtype: dtype at rest.
      weak_type: whether the leaf is a Python scalar's array.
      held: spec of the partition it already has on axes other than the data axis.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    held: tuple[object, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where one leaf lies: `rest` between steps, `flight` inside the optimizer's update.

    At rest a leaf may be padded or flattened (`partition.rest_shape`); in flight it has its logical
    `shape`, so that padding never reaches a norm, a factored mean or a mask.
    """

    tree: TreeName
    leaf: Leaf
    partition: Partition
    mesh: Mesh = field(repr=False)
    axis: str = field(repr=False)

    @cached_property
    def rest(self) -> NamedSharding:
        """Sharding of the array between steps."""
        return self._sharding(self.partition.spec, len(self.partition.rest_shape))

    @cached_property
    def flight(self) -> NamedSharding:
        """Sharding of the logical array inside the update; uneven for a padded leaf."""
        uneven = self.partition.form == "padded"
        if self.partition.form == "flat" or (uneven and is_explicit(self.mesh)):
            return self.gathered
        return self.rest

    @cached_property
    def gathered(self) -> NamedSharding:
        """Sharding of the leaf gathered over the data axis."""
        spec = self.leaf.held if self.partition.form == "flat" else self.partition.spec
        return self._sharding(without_axis(spec, self.axis), len(self.leaf.shape))

    def _sharding(self, spec: Sequence[object], ndim: int) -> NamedSharding:
        axes = axes_of_size(self.mesh, data_axes(self.mesh, self.axis), self.partition.parts)

        def named(entry: object) -> object:
            names = entry if isinstance(entry, tuple) else (entry,)
            if self.axis not in names or axes == (self.axis,):
                return entry
            at = names.index(self.axis)
            named = names[:at] + axes + names[at + 1 :]
            return named[0] if len(named) == 1 else named

        # Explicit types spell a spec to its full length, and the step's outputs have their spelling
        fill = (None,) * (ndim - len(spec)) if is_explicit(self.mesh) else ()
        return NamedSharding(self.mesh, PartitionSpec(*map(named, spec), *fill))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of this leaf on one device at rest, padding included."""
        if self.leaf.dtype == jax.dtypes.float0:
            return 0
        shard = self.rest.shard_shape(self.partition.rest_shape)
        return math.prod(shard) * self.leaf.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the logical leaf, unpartitioned."""
        return math.prod(self.leaf.shape) * self.leaf.dtype.itemsize


@dataclass(frozen=True)
class LeafReport:
    """One line of `Layout.report`. Bytes are integers; `spec` names axes of the mesh at rest."""

    tree: TreeName
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    total_bytes: int
    reason: str


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every leaf of a training state lies.

    Attributes:
      stage: the ZeRO stage.
      mesh: the mesh that all leaves lie on; refined when only a factor of N divides some parameter.
      axis: the data axis, as the user named it.
      size: its size, N.
      params: tree of `Placement`, structure of the parameters.
      grads: the same, for gradients as the step keeps them.
      updates: the same, for the parameter inside the update: the optimizer's partition.
      opt_state: tree of `Placement`, structure of the optimizer state.
      other: tree of `Placement` of all other leaves (statistics, keys, counters, averages).
    """

    stage: Stage
    mesh: Mesh
    axis: str
    size: int
    params: Tree
    grads: Tree
    updates: Tree
    opt_state: Tree
    other: Tree

    def report(self) -> list[LeafReport]:
        """One record per leaf, in the order params, grads, opt_state, other."""
        return [
            LeafReport(
                p.tree,
                p.leaf.path,
                p.leaf.shape,
                p.leaf.dtype.name,
                p.partition.spec,
                p.bytes_per_device,
                p.total_bytes,
                p.partition.reason,
            )
            for p in self.placements()
        ]

    def placements(self) -> list[Placement]:
        """All placements, in the order params, grads, opt_state, other."""
        return jax.tree.leaves((self.params, self.grads, self.opt_state, self.other))

    @cached_property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on one device at rest, by tree. Gradients live only during a step."""
        return self._sum(lambda p: p.bytes_per_device)

    @cached_property
    def total_bytes(self) -> dict[str, int]:
        """Bytes of the logical trees, unpartitioned."""
        return self._sum(lambda p: p.total_bytes)

    def _sum(self, count: Any) -> dict[str, int]:
        sums = {"params": 0, "grads": 0, "opt_state": 0, "other": 0}
        for p in self.placements():
            sums[p.tree] += count(p)
        return sums

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes a batch is split over: the data axis and every axis that no leaf holds."""
        held = {
            name
            for p in self.placements()
            for entry in p.leaf.held
            if entry is not None
            for name in (entry if isinstance(entry, tuple) else (entry,))
        }
        data = data_axes(self.mesh, self.axis)
        return tuple(a for a in self.mesh.axis_names if a in data or a not in held)

    def __str__(self) -> str:
        from .reporting.tables import layout_table  # a table is a report; the layout only has one

        return layout_table(self)

    def same_as(self, other: "Layout") -> bool:
        """Whether both place the same leaves alike."""
        trees = [(o.params, o.updates, o.opt_state, o.other) for o in (self, other)]
        return (
            self.stage == other.stage
            and jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
            and jax.tree.leaves(trees[0]) == jax.tree.leaves(trees[1])
        )


def build_layout(
    params: Tree,
    opt_state: Tree,
    other: Tree,
    *,
    stage: Stage,
    mesh: Mesh,
    axis: str,
    min_size: int = 0,
    rules: Mapping[str, path_rules.Rule] | None = None,
) -> Layout:
    """Decide where every leaf lies.

    Args:
      params: tree of `Leaf`, the parameters.
      opt_state: tree of `Leaf`, the optimizer state, with its master copy if it has one.
      other: tree of `Leaf`, everything else.
      stage, mesh, axis: as in `Layout`.
      min_size: leaves with fewer elements stay whole.
      rules: path pattern -> "whole", "stacked" or a `PartitionSpec`; see `rules`.

    Raises:
      ValueError: a rule matches no parameter, or its spec does not fit the leaf.
    """
    n = mesh.shape[axis]
    rule_of = path_rules.match(rules or {}, [leaf.path for leaf in jax.tree.leaves(params)])
    if (
        stage.partitions_parameters
        and not is_explicit(mesh)
        and _needs_factor(jax.tree.leaves(params), rule_of, axis, n, min_size)
    ):
        mesh = refine(mesh, axis)
    cut = _Cutter(mesh, axis, n, min_size)
    by_path = {leaf.path: leaf for leaf in jax.tree.leaves(params)}
    statistics = _statistics(by_path, jax.tree.leaves(other))

    def updates(leaf: Leaf) -> Placement:
        rule = rule_of.get(leaf.path)
        return cut("opt_state", leaf, rule, stage.partitions_optimizer, may_pad=True)

    def grads(leaf: Leaf) -> Placement:
        rule, on = rule_of.get(leaf.path), stage.partitions_gradients
        placed = cut("grads", leaf, rule, on, may_pad=True)
        if placed.flight == placed.rest:
            return placed
        return _whole("grads", leaf, mesh, axis, f"whole in flight; {placed.partition.reason}")

    def at_rest(tree: TreeName, leaf: Leaf, owner: Leaf) -> Placement:
        on, rule = stage.partitions_parameters, rule_of.get(owner.path)
        if on and rule is None and _module_and_shape(owner) in statistics:
            return _whole(tree, leaf, mesh, axis, "statistics of its module lie whole beside it")
        return cut(tree, leaf, rule, on, may_pad=False, factor=not is_explicit(mesh))

    def state_leaf(leaf: Leaf) -> Placement:
        owner = _owner(leaf, by_path)
        rule = rule_of.get(owner.path) if owner else None
        if owner is not None and owner.shape == leaf.shape:
            leaf = Leaf(leaf.path, leaf.shape, leaf.dtype, leaf.weak_type, owner.held)
        elif isinstance(rule, PartitionSpec):
            rule = None  # a spec is for the parameter's own shape
        return cut("opt_state", leaf, rule, stage.partitions_optimizer, may_pad=True)

    def other_leaf(leaf: Leaf) -> Placement:
        owner = _owner(leaf, by_path)
        if owner is not None and owner.shape == leaf.shape:  # an average of the parameters
            return at_rest("other", leaf, owner)
        return _whole("other", leaf, mesh, axis, "not a model state")

    return Layout(
        stage=stage,
        mesh=mesh,
        axis=axis,
        size=n,
        params=jax.tree.map(lambda leaf: at_rest("params", leaf, leaf), params),
        grads=jax.tree.map(grads, params),
        updates=jax.tree.map(updates, params),
        opt_state=jax.tree.map(state_leaf, opt_state),
        other=jax.tree.map(other_leaf, other),
    )


def _needs_factor(
    params: Iterable[Leaf], rule_of: Mapping[str, Any], axis: str, n: int, min_size: int
) -> bool:
    """Whether some parameter is cut by a factor of N only."""
    return any(
        partition_leaf(
            leaf.shape,
            axis,
            n,
            held=leaf.held,
            min_size=min_size,
            stacked=rule_of.get(leaf.path) == "stacked",
            may_pad=False,
        ).form
        == "factor"
        for leaf in params
        if rule_of.get(leaf.path) in (None, "stacked") and _is_numeric(leaf.dtype)
    )


@dataclass(frozen=True)
class _Cutter:
    """`partition_leaf` with a mesh, rules and the stage's answer applied."""

    mesh: Mesh
    axis: str
    n: int
    min_size: int

    def __call__(
        self,
        tree: TreeName,
        leaf: Leaf,
        rule: path_rules.Rule | None,
        on: bool,
        *,
        may_pad: bool,
        factor: bool = True,
    ) -> Placement:
        if not on:
            return _whole(tree, leaf, self.mesh, self.axis, "not partitioned at this stage")
        if rule == "whole":
            return _whole(tree, leaf, self.mesh, self.axis, "a rule keeps it whole")
        if not _is_numeric(leaf.dtype):
            return _whole(tree, leaf, self.mesh, self.axis, f"{leaf.dtype.name} is not a number")
        if isinstance(rule, PartitionSpec):
            fitted = path_rules.fit(rule, leaf.path, leaf.shape, self.mesh, self.axis)
            return Placement(tree, leaf, fitted, self.mesh, self.axis)
        partition = partition_leaf(
            leaf.shape,
            self.axis,
            self.n,
            held=leaf.held,
            min_size=self.min_size,
            stacked=rule == "stacked",
            may_pad=may_pad,
        )
        if partition.form == "factor" and not factor:
            reason = f"no dim divides by {self.n}, and an Explicit axis is not refined"
            partition = whole(leaf.shape, leaf.held, reason)
        return Placement(tree, leaf, partition, self.mesh, self.axis)


def _whole(tree: TreeName, leaf: Leaf, mesh: Mesh, axis: str, reason: str) -> Placement:
    return Placement(tree, leaf, whole(leaf.shape, leaf.held, reason), mesh, axis)


def _owner(leaf: Leaf, by_path: Mapping[str, Leaf]) -> Leaf | None:
    """The parameter whose path is the longest suffix of this leaf's path."""
    keys = leaf.path.split("/")
    suffixes = ("/".join(keys[i:]) for i in range(len(keys)))
    return next((by_path[s] for s in suffixes if s in by_path), None)


def _module_and_shape(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    return leaf.path.rpartition("/")[0], leaf.shape


def _statistics(by_path: Mapping[str, Leaf], other: list[Leaf]) -> set[tuple[str, tuple[int, ...]]]:
    """Module and shape of leaves kept beside parameters: running means, say.

    They are computed elementwise with their module's parameters in the user's step, where nothing
    pins them: a parameter that is cut would pull them along, and the step would compile again.
    """
    found = set()
    for leaf in other:
        owner = _owner(leaf, by_path)
        if owner is None or owner.shape != leaf.shape:
            module = leaf.path.split("/")[:-1]
            found |= {("/".join(module[i:]), leaf.shape) for i in range(len(module))}
    return found


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """`spec` with `axis` taken out: what stays when the data axis is gathered."""
    kept = []
    for entry in spec:
        names = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a != axis)
        kept.append(None if names in ((), (None,)) else names[0] if len(names) == 1 else names)
    return trimmed(kept)


def _is_numeric(dtype: Any) -> bool:
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
