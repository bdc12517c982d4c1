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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from . import rules as path_rules
from .mesh import data_axes, is_explicit, refine
from .partition import RULED, Partition, partition_leaf, whole
from .placement import Leaf, Placement, TreeName
from .reporting.tables import aligned, bytes_text
from .stage import Stage

Tree = Any


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
        """A table: tree, leaf, shape, dtype, spec, bytes per device, and why; then the sums."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        present = jax.device_count()
        devices = "" if self.mesh.size == present else f" ({present} present)"
        rows = [
            (r.tree, r.path, str(r.shape), r.dtype, str(r.spec).removeprefix("PartitionSpec"),
             bytes_text(r.bytes_per_device), r.reason)
            for r in self.report()
        ]  # fmt: skip
        held, total = self.bytes_per_device, self.total_bytes
        sums = [
            (tree, bytes_text(held[tree]), "per device of", bytes_text(total[tree]),
             f"({held[tree] / total[tree]:.4f})" if total[tree] else "")
            for tree in total
        ]  # fmt: skip
        header = ("tree", "leaf", "shape", "dtype", "spec", "per device", "why")
        return "\n".join(
            [
                f"ZeRO stage {int(self.stage)} over {self.axis!r} of mesh ({axes}), "
                f"{self.mesh.size} devices{devices}",
                "",
                *aligned([header, *rows], right={5}),
                "",
                *aligned(sums, right={1, 3}),
            ]
        )

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
    leaves = jax.tree.leaves(params)
    by_path = {leaf.path: leaf for leaf in leaves}
    rule_of = path_rules.match(rules or {}, list(by_path))
    statistics = _statistics(by_path, jax.tree.leaves(other))

    def cut(leaf: Leaf, rule: path_rules.Rule | None, on: bool, may_pad: bool) -> Partition:
        if not on:
            return whole(leaf.shape, leaf.held, "not partitioned at this stage")
        if not _is_numeric(leaf.dtype):
            return whole(leaf.shape, leaf.held, f"{leaf.dtype.name} is not a number")
        if rule == "whole":
            return whole(leaf.shape, leaf.held, RULED)
        if isinstance(rule, PartitionSpec):
            return path_rules.fit(rule, leaf.path, leaf.shape, mesh, axis)
        return partition_leaf(
            leaf.shape,
            axis,
            n,
            held=leaf.held,
            min_size=min_size,
            stacked=rule == "stacked",
            may_pad=may_pad,
        )

    def cut_update(leaf: Leaf) -> Partition:
        return cut(leaf, rule_of.get(leaf.path), stage.partitions_optimizer, may_pad=True)

    def cut_gradient(leaf: Leaf) -> Partition:
        if not stage.partitions_gradients:
            return cut(leaf, None, on=False, may_pad=True)
        partition = cut_update(leaf)
        if partition.form == "flat" or (partition.form == "padded" and is_explicit(mesh)):
            return whole(leaf.shape, leaf.held, f"whole in flight; {partition.reason}")
        return partition

    def cut_parameter(leaf: Leaf) -> Partition:
        rule = rule_of.get(leaf.path)
        if rule is None and _module_and_shape(leaf) in statistics:
            return whole(leaf.shape, leaf.held, "statistics of its module lie whole beside it")
        partition = cut(leaf, rule, stage.partitions_parameters, may_pad=False)
        if partition.form == "factor" and is_explicit(mesh):
            reason = f"no dim divides by {n}, and an Explicit axis is not refined"
            return whole(leaf.shape, leaf.held, reason)
        return partition

    def cut_state(leaf: Leaf) -> Partition:
        owner = _owner(leaf, by_path)
        if owner is not None and owner.shape == leaf.shape:
            return cut_update(owner)
        rule = rule_of.get(owner.path) if owner else None
        rule = None if isinstance(rule, PartitionSpec) else rule  # a spec is for the owner's shape
        return cut(leaf, rule, stage.partitions_optimizer, may_pad=True)

    def cut_other(leaf: Leaf) -> Partition:
        owner = _owner(leaf, by_path)
        if owner is not None and owner.shape == leaf.shape:  # an average of the parameters
            return cut_parameter(owner)
        return whole(leaf.shape, leaf.held, "not a model state")

    if any(cut_parameter(leaf).form == "factor" for leaf in leaves):
        lies_on = refine(mesh, axis)
    else:
        lies_on = mesh

    def placed(tree: TreeName, cut: Callable[[Leaf], Partition], of: Tree) -> Tree:
        return jax.tree.map(lambda leaf: Placement(tree, leaf, cut(leaf), lies_on, axis), of)

    return Layout(
        stage=stage,
        mesh=lies_on,
        axis=axis,
        size=n,
        params=placed("params", cut_parameter, params),
        grads=placed("grads", cut_gradient, params),
        updates=placed("opt_state", cut_update, params),
        opt_state=placed("opt_state", cut_state, opt_state),
        other=placed("other", cut_other, other),
    )


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


def _is_numeric(dtype: Any) -> bool:
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
