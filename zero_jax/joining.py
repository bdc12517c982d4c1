"""How values of several devices and microbatches become one.

In data parallelism (ZeRO, arXiv 1910.02054, section 1) a device sees its own rows. What a loss
returns beside, and what it changes of the state, comes out as each device has it, and one value has
to be left:

  aux      mean, sum, max or min over microbatches and devices
  carried  what went in and comes out changed; each device carries its own through its microbatches

             mean       of what devices have; what has no mean (integers, keys) is left alone, and
                        has to be alike everywhere
             sum        old + the sum of (new - old) over devices: what all of them added, once
             max, min   of what devices have
             read       stays what it was

Numbers narrower than 32 bits are joined in 32, since a sum of uint8 wraps at 256. An aux stays
wide; what is carried gets its own dtype back.

Not here: whether what is left alone is alike (`alike`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from .collectives import Combine, all_reduce
from .residence import path_of

Tree = Any
_OVER = {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max, "min": jnp.min}


def rules_of(tree: Tree, named: Any) -> Tree:
    """The rule of every leaf: that of the entry it is under, or the mean."""

    def rule(keys: Any, _: Any) -> str:
        return named.get(path_of(keys).split("/")[0], "mean")

    return jax.tree_util.tree_map_with_path(rule, tree)


def as_numbers(aux: Tree, rules: Tree) -> Tree:
    """An aux as arrays that can be joined: wide enough to be added, floats where means are asked.

    Args:
      aux: what a loss returned beside.
      rules: a `Combine` for each leaf.
    """

    def convert(x: Any, rule: Combine) -> jax.Array:
        x = jnp.asarray(x)
        if rule == "mean" and _is_count(x):
            return x.astype(jnp.float32)
        return _wide(x) if rule in ("mean", "sum") else x

    return jax.tree.map(convert, aux, rules)


def over_microbatches(aux: Tree, rules: Tree) -> Tree:
    """Join the aux of all microbatches, stacked along a first dim."""
    return jax.tree.map(lambda x, rule: _OVER[rule](x, axis=0).astype(x.dtype), aux, rules)


def over_devices(aux: Tree, rules: Tree, axes: tuple[str, ...]) -> Tree:
    """Join the aux of all devices; keys stay each device's own."""

    def join(x: jax.Array, rule: Combine) -> jax.Array:
        return x if _is_key(x) else _join(x, axes, rule)

    return jax.tree.map(join, aux, rules)


def join_carried(
    new: Tree, old: Tree, rules: Tree, moved: list[bool], axes: tuple[str, ...]
) -> Tree:
    """Join what devices carried through their microbatches.

    Args:
      new, old: trees of one structure, after and before; `old` is alike on every device.
      rules: a `Collection` for each leaf.
      moved: which leaves the loss changed; the others are alike still, and nothing is sent.
      axes: that the batch is split over.
    """
    flags = iter(moved)

    def join(new: Any, old: Any, rule: str) -> Any:
        new = jnp.asarray(new)
        if not next(flags) or rule == "read":
            return old
        if _is_key(new) or (rule == "mean" and _is_count(new)):
            return new
        if rule == "sum":
            change = all_reduce(_wide(new) - _wide(jnp.asarray(old)), axes)
            return (_wide(jnp.asarray(old)) + change).astype(new.dtype)
        return _join(_wide(new), axes, rule).astype(new.dtype)

    return jax.tree.map(join, new, old, rules)


def check_rules(carried: Tree, rules: Tree, names: list[str]) -> None:
    """Whether a rule can be followed for what it is given.

    Raises:
      ValueError: keys or flags are to be added, say.
    """
    triples = zip(jax.tree.leaves(carried), jax.tree.leaves(rules), names, strict=True)
    for x, rule, name in triples:
        if _is_key(x) and rule not in ("mean", "read"):
            raise ValueError(
                f'collections: {name} holds keys, which have no {rule}; "mean" and "read" leave '
                "them as they are."
            )
        if x.dtype == jnp.bool_ and rule == "sum":
            raise ValueError(
                f'collections: {name} is bool, which has no sum; "max" is whether any device says '
                'so, "min" whether all do.'
            )


def check_same(before: Tree, after: Tree) -> None:
    """A collection has to come out as it went in, or microbatches could not follow each other.

    Raises:
      ValueError: it has another structure, or a leaf has another shape or dtype.
    """
    had, has = (jax.tree_util.tree_leaves_with_path(t) for t in (before, after))
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            f"loss_fn: its collections went in as {jax.tree.structure(before)} and came out as "
            f"{jax.tree.structure(after)}; return the same tree."
        )
    for (keys, old), (_, new) in zip(had, has, strict=True):
        a, b = jax.typeof(old), jax.typeof(new)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"loss_fn: {path_of(keys)} went in as {a.dtype}{list(a.shape)} and came out as "
                f"{b.dtype}{list(b.shape)}; a collection keeps its shapes and dtypes."
            )


def _join(x: jax.Array, axes: tuple[str, ...], by: Any) -> jax.Array:
    if x.dtype == jnp.bool_:  # flags have no maximum for every backend
        return all_reduce(x.astype(jnp.int32), axes, by).astype(jnp.bool_)
    return all_reduce(x, axes, by)


def _wide(x: jax.Array) -> jax.Array:
    """Numbers narrower than 32 bits as int32 or fp32; flags as int32 too."""
    if _is_count(x):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def _is_count(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
