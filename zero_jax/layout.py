"""The layout of a training state: for every leaf where it lies, and why.

A layout is data. It is decided here once, from shapes alone, for the three model states of ZeRO
(arXiv 1910.02054, section 3.1: parameters, gradients, optimizer state), and everything else reads
it: the step, the planner, the checkpointer, the reports.

Not here: the rule for each tree (`cuts`) and each leaf (`partition`), moving an array
(`collectives`, `residence`), reading a state's fields (`anatomy`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from .cuts import Cuts
from .mesh import data_axes, refine
from .offload_policy import Nvme, Offload, streams_by_layer
from .partition import Partition
from .placement import Leaf, Memory, Placement, TreeName
from .reporting.tables import aligned, bytes_text
from .rules import Rule
from .stage import Stage

Tree = Any
_WHERE: dict[Memory, str] = {"device": "", "pinned_host": "on the host; ", "disk": "on disk; "}


@dataclass(frozen=True)
class LeafReport:
    """One line of `Layout.report`. Bytes are integers; `spec` names axes of the mesh at rest.

    `memory` is the one it rests in, and `bytes_per_device` are those there.
    """

    tree: TreeName
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_per_device: int
    total_bytes: int
    reason: str
    memory: Memory = "device"


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
      stacked: paths of parameters that a rule calls "stacked": layers along their first dim.
      offload: what lies in host memory or in files, None: nothing does.
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
    stacked: frozenset[str] = frozenset()
    offload: Offload | None = None

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
                p.memory,
            )
            for p in self.placements()
        ]

    def placements(self) -> list[Placement]:
        """All placements, in the order params, grads, opt_state, other."""
        return jax.tree.leaves((self.params, self.grads, self.opt_state, self.other))

    @cached_property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on one device at rest, by tree. Gradients live only during a step."""
        return self._sum(lambda p: 0 if p.is_away else p.bytes_per_device)

    @cached_property
    def host_bytes_per_device(self) -> dict[str, int]:
        """Bytes in host memory for one device, by tree; a host holds them for each of its own."""
        return self._sum(lambda p: p.bytes_per_device if p.on_host else 0)

    @cached_property
    def disk_bytes_per_device(self) -> dict[str, int]:
        """Bytes at rest in files for one device, by tree; `Nvme` says what else is written."""
        return self._sum(lambda p: p.bytes_per_device if p.memory == "disk" else 0)

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
            for entry in p.partition.spec
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
             bytes_text(r.bytes_per_device),
             f"{_WHERE[r.memory]}{r.reason}")
            for r in self.report()
        ]  # fmt: skip
        held, total = self.bytes_per_device, self.total_bytes
        away, filed = self.host_bytes_per_device, self.disk_bytes_per_device
        sums = [
            (tree, bytes_text(held[tree]), "per device of", bytes_text(total[tree]),
             f"({held[tree] / total[tree]:.4f})" if total[tree] else "",
             f"and {bytes_text(away[tree])} on the host" if away[tree] else "",
             f"and {bytes_text(filed[tree])} on disk" if filed[tree] else "")
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
    rules: Mapping[str, Rule] | None = None,
    frozen: Collection[str] = (),
    pads_parameters: bool = False,
    offload: Offload | None = None,
) -> Layout:
    """Decide where every leaf lies.

    Args:
      params: tree of `Leaf`, the parameters.
      opt_state: tree of `Leaf`, the optimizer state, with its master copy if it has one.
      other: tree of `Leaf`, everything else.
      stage, mesh, axis: as in `Layout`.
      min_size: leaves with fewer elements stay whole.
      rules: path pattern -> rule; see `rules`.
      frozen: paths of leaves of `other` that are parameters the optimizer does not train.
      pads_parameters: parameters may be padded at rest, since no user's code reads them.
      offload: what lies in host memory or in files: the optimizer state, but for its scalars and
        coefficients of all parameters (muon's).

    Raises:
      ValueError: a rule matches no parameter, or its spec does not fit the leaf.
    """
    others = jax.tree.leaves(other)
    cuts = Cuts(
        stage=stage,
        mesh=mesh,
        axis=axis,
        min_size=min_size,
        params={leaf.path: leaf for leaf in jax.tree.leaves(params)},
        others=others,
        rules=rules or {},
        frozen=frozen,
        pads_parameters=pads_parameters,
    )
    at_rest = [*map(cuts.parameter, jax.tree.leaves(params)), *map(cuts.other, others)]
    needs_factor = any(partition.form == "factor" for partition in at_rest)
    lies_on = refine(mesh, axis) if needs_factor else mesh

    def placed(tree: TreeName, cut: Callable[[Leaf], Partition], of: Tree) -> Tree:
        return jax.tree.map(lambda leaf: Placement(tree, leaf, cut(leaf), lies_on, axis), of)

    states = placed("opt_state", cuts.optimizer, opt_state)
    parameters = placed("params", cuts.parameter, params)
    if offload is not None:
        kept_in: Memory = "disk" if isinstance(offload, Nvme) else "pinned_host"
        states = jax.tree.map(lambda p: p if cuts.is_of_all(p.leaf) else _away(p, kept_in), states)
    if offload is not None and offload.params:
        parameters = jax.tree.map(
            lambda p: (
                _away(p, "pinned_host")
                if streams_by_layer(p.leaf.path, p.leaf.shape, cuts.stacked)
                else p
            ),
            parameters,
        )

    return Layout(
        stage=stage,
        mesh=lies_on,
        axis=axis,
        size=mesh.shape[axis],
        params=parameters,
        grads=placed("grads", cuts.gradient, params),
        updates=placed("opt_state", cuts.update, params),
        opt_state=states,
        other=placed("other", cuts.other, other),
        stacked=cuts.stacked,
        offload=offload,
    )


def _away(placement: Placement, memory: Memory) -> Placement:
    """The placement in another memory; a scalar, read all over, stays, and what has no elements."""
    shape = placement.leaf.shape
    return placement if shape == () or 0 in shape else replace(placement, memory=memory)
