"""Rules: what a user says of single parameters, by path.

A rule maps a pattern of a parameter's path ("blocks/*/kernel", shell wildcards over the whole path)
to one of

  "whole"          never cut over the data axis
  "stacked"        the first dim counts scanned layers and is never the one that is cut
  PartitionSpec    cut exactly so; other axes may be named too
  "frozen"         of a leaf outside of `params`: a parameter that is not trained, cut at stage 3 as
                   parameters are (the base that adapters are trained on, say)

The first pattern that matches counts. A pattern that matches nothing is an error: a rule that does
nothing would look like one that works.
"""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from jax.sharding import Mesh, PartitionSpec

from .partition import RULED, Partition, trimmed

Rule = Literal["whole", "stacked", "frozen"] | PartitionSpec
_KINDS = '"whole", "stacked", "frozen" or a PartitionSpec'


def match(
    rules: Mapping[str, Rule], params: Sequence[str], other: Sequence[str] = ()
) -> dict[str, Rule]:
    """Give every path the rule of the first pattern that matches it.

    Args:
      rules: pattern -> rule; "frozen" is looked up among `other`, the rest among `params`.
      params: paths of the parameters.
      other: paths of the leaves outside of parameters and optimizer state.

    Raises:
      TypeError: `rules` is not a mapping, or a value is no rule.
      ValueError: a pattern matches no path.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules={rules!r} is a {type(rules).__name__}; expected a mapping of path patterns to "
            f"{_KINDS}."
        )
    for pattern, rule in rules.items():
        if not (isinstance(rule, PartitionSpec) or rule in ("whole", "stacked", "frozen")):
            raise TypeError(f"rules[{pattern!r}]={rule!r}; expected {_KINDS}.")
        paths, what = (
            (other, "leaf outside of params") if rule == "frozen" else (params, "parameter")
        )
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
            raise ValueError(f"rules[{pattern!r}] matches no {what}; the nearest paths are {near}.")
    found: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        for path in other if rule == "frozen" else params:
            if fnmatchcase(path, pattern):
                found.setdefault(path, rule)
    return found


def fit(spec: PartitionSpec, path: str, shape: tuple[int, ...], mesh: Mesh, axis: str) -> Partition:
    """The partition that a rule's spec asks for, checked against the leaf.

    Raises:
      ValueError: the spec is longer than the leaf, names an axis the mesh lacks, or cuts a dim
        that the axes do not divide.
    """
    start = f"rules give {path!r} with shape {shape} the spec {spec}"
    if len(spec) > len(shape):
        raise ValueError(f"{start}, which has {len(spec)} entries for {len(shape)} dims.")
    dim, parts = None, 1
    for d, entry in enumerate(spec):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ValueError(f"{start}; the mesh has no axis {unknown[0]!r}, only {mesh.shape}.")
        size = 1
        for name in names:
            size *= mesh.shape[name]
        if shape[d] % size:
            raise ValueError(f"{start}; dim {d} of size {shape[d]} does not divide by {size}.")
        if axis in names:
            dim, parts = d, mesh.shape[axis]
    form = "whole" if dim is None else "divided"
    reason = RULED if dim is None else f"a rule says {spec}"
    return Partition(form, trimmed(spec), shape, dim, parts, reason)
