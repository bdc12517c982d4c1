"""Which partition each leaf of a training state gets: the stage's answer, tree by tree.

`partition` has the rule for one leaf. Here it is asked for parameters at rest, gradients, the
update, optimizer state and everything else, each with what the stage says (ZeRO, arXiv 1910.02054,
section 5), what the user's rules say, and what belongs together:

Which leaf of the optimizer state belongs to which parameter is not written anywhere in optax. What
holds for every transformation is: a leaf whose path ends in a parameter's path and whose shape is
that parameter's is one of its moments and lies as they do; any other leaf (adafactor's factored
moments, say) is cut by its own shape; scalars stay whole.

A leaf outside of parameters and optimizer state stays whole, unless it is an average of the
parameters (same path and shape), which lies as they do, or a frozen parameter.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .mesh import is_explicit
from .partition import RULED, Partition, partition_leaf, whole
from .placement import Leaf, without_axis
from .rules import Rule, fit, match
from .stage import Stage

COEFFICIENTS = 1024
"""Elements of a leaf of the optimizer state, up to which it may be coefficients, read all over."""

STATISTICS = "statistics of its module lie whole beside it"
"""Reason of a parameter that is whole because it would pull them along."""


@dataclass(frozen=True)
class Cuts:
    """A stage, a mesh and the user's wishes; its methods give a leaf's partition by tree.

    Attributes:
      params: path -> leaf of every parameter.
      others: leaves outside of parameters and optimizer state.
      rules: path pattern -> rule; see `rules`.
      frozen: paths in `others` of parameters that the optimizer does not train.
      pads_parameters: parameters may be padded at rest, and lie apart from statistics: no code of
        the user's reads them there.
    """

    stage: Stage
    mesh: Mesh
    axis: str
    min_size: int
    params: Mapping[str, Leaf]
    others: Sequence[Leaf]
    rules: Mapping[str, Rule]
    frozen: Collection[str]
    pads_parameters: bool = False

    def update(self, leaf: Leaf) -> Partition:
        """A parameter inside the optimizer's update, and so its moments."""
        rule = self._rule_of.get(leaf.path)
        return self._cut(leaf, rule, self.stage.partitions_optimizer, may_pad=True)

    def gradient(self, leaf: Leaf) -> Partition:
        """The gradient of a parameter."""
        if not self.stage.partitions_gradients:
            return self._cut(leaf, self._rule_of.get(leaf.path), on=False, may_pad=True)
        if self._rule_of.get(leaf.path) is None and _module_and_shape(leaf) in self._statistics:
            return whole(leaf.shape, leaf.held, STATISTICS)
        partition = self.update(leaf)
        uneven = partition.form == "padded" and is_explicit(self.mesh)
        if partition.form == "flat" or uneven:
            return whole(leaf.shape, leaf.held, f"whole in flight; {partition.reason}")
        return partition

    def parameter(self, leaf: Leaf) -> Partition:
        """A parameter between steps; its shape is kept, since the user's step reads it."""
        rule = self._rule_of.get(leaf.path)
        if rule is None and _module_and_shape(leaf) in self._statistics:
            return whole(leaf.shape, leaf.held, STATISTICS)
        return self._at_rest(leaf, rule)

    def optimizer(self, leaf: Leaf) -> Partition:
        """A leaf of the optimizer state."""
        owner = self._owner(leaf)
        if owner is not None and owner.shape == leaf.shape:
            return self.update(owner)
        rule = self._rule_of.get(owner.path) if owner else None
        rule = None if isinstance(rule, PartitionSpec) else rule  # a spec is for the owner's shape
        return self._cut(leaf, rule, self.stage.partitions_optimizer, may_pad=True)

    def is_of_all(self, leaf: Leaf) -> bool:
        """Whether a leaf of the optimizer state is a few numbers of no parameter: coefficients."""
        return self._owner(leaf) is None and math.prod(leaf.shape) <= COEFFICIENTS

    def other(self, leaf: Leaf) -> Partition:
        """A leaf of neither: an average, a frozen parameter, a statistic, a key, a counter."""
        owner = self._owner(leaf)
        if owner is not None and owner.path and owner.shape == leaf.shape:
            return self.parameter(owner)
        if leaf.path in self.frozen or self._rule_of.get(leaf.path) == "frozen":
            return self._at_rest(leaf, None)
        return whole(leaf.shape, leaf.held, "not a model state")

    def _at_rest(self, leaf: Leaf, rule: Rule | None) -> Partition:
        partition = self._cut(
            leaf, rule, self.stage.partitions_parameters, may_pad=self.pads_parameters
        )
        if partition.form == "factor" and is_explicit(self.mesh):
            reason = f"N={self._n} divides no dim, and an Explicit axis is not refined"
            return whole(leaf.shape, leaf.held, reason)
        return partition

    def _cut(self, leaf: Leaf, rule: Rule | None, on: bool, *, may_pad: bool) -> Partition:
        if not on:
            ruled = isinstance(rule, PartitionSpec)
            held = without_axis(rule, self.axis) if ruled else leaf.held
            return whole(leaf.shape, held, "not partitioned at this stage")
        if not _is_numeric(leaf.dtype):
            return whole(leaf.shape, leaf.held, f"{leaf.dtype.name} is not a number")
        if rule == "whole":
            return whole(leaf.shape, leaf.held, RULED)
        if isinstance(rule, PartitionSpec):
            return fit(rule, leaf.path, leaf.shape, self.mesh, self.axis)
        return partition_leaf(
            leaf.shape,
            self.axis,
            self._n,
            held=leaf.held,
            min_size=self.min_size,
            stacked=rule == "stacked",
            may_pad=may_pad,
        )

    def _owner(self, leaf: Leaf) -> Leaf | None:
        """The parameter whose path is the longest suffix of this leaf's path."""
        keys = leaf.path.split("/")
        suffixes = ("/".join(keys[i:]) for i in range(len(keys) + 1))  # "" if params is one array
        return next((self.params[s] for s in suffixes if s in self.params), None)

    @property
    def _n(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def stacked(self) -> frozenset[str]:
        """Paths of parameters with layers along their first dim."""
        rules = self._rule_of.items()
        return frozenset(p for p, rule in rules if rule == "stacked" and p in self.params)

    @cached_property
    def _rule_of(self) -> dict[str, Rule]:
        return match(self.rules, list(self.params), [leaf.path for leaf in self.others])

    @cached_property
    def _statistics(self) -> set[tuple[str, tuple[int, ...]]]:
        """Module and shape of leaves kept beside parameters: running means, say.

        They are computed elementwise with their module's parameters in the user's step, where
        nothing pins them: a parameter that is cut would pull them along, and the step would
        compile again.
        """
        found = set()
        for leaf in () if self.pads_parameters else self.others:
            owner = self._owner(leaf)
            if owner is None or owner.shape != leaf.shape:
                module = leaf.path.split("/")[:-1]
                found |= {("/".join(module[i:]), leaf.shape) for i in range(len(module) + 1)}
        return found


def _module_and_shape(leaf: Leaf) -> tuple[str, tuple[int, ...]]:
    return leaf.path.rpartition("/")[0], leaf.shape


def _is_numeric(dtype: Any) -> bool:
    return dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
