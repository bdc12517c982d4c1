"""Master weights: wide copies of narrow parameters, kept in the optimizer state.

ZeRO (arXiv 1910.02054, section 3.1) counts mixed-precision Adam as 2 bytes a parameter at rest and
12 in the optimizer state: the fp32 master copy, momentum and variance. Where a parameter is
narrower than its master the state is `MasterWeights(master, inner)`; the inner transformation sees
the masters, and gradients cast to their dtype.

What is gathered is the new parameter in its own dtype. The update handed back is its difference to
the old parameter in the master's dtype, so that `optax.apply_updates` lands on it. That sum can
miss by one rounding of the wide dtype when a parameter almost cancels; the master then takes the
value that was reached. So `params == master.astype(params.dtype)` after every step, bit for bit.

Not here: which dtypes (`precision`), where the copies lie (`layout`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .collectives import constrain
from .layout import Layout
from .precision import Precision, round_to

Tree = Any


class MasterWeights(NamedTuple):
    """Optimizer state with master copies; `MaskedNode` where a parameter needs none."""

    master: Tree
    inner: Any


def init_with_master(tx: optax.GradientTransformation, params: Tree, precision: Precision) -> Any:
    """`tx.init` on the master copies, and those copies beside its state where there are any."""

    def widen(p: jax.Array) -> jax.Array:
        return p.astype(precision.master) if precision.keeps_master(p.dtype) else p

    wide = jax.tree.map(widen, params)
    return jax.tree.map(jnp.asarray, add_master(wide, tx.init(wide), precision, of=params))


def add_master(params: Tree, inner: Any, precision: Precision, *, of: Tree | None = None) -> Any:
    """`MasterWeights(params, inner)`; `inner` itself when no parameter needs a master, or has one.

    Args:
      params: what becomes the master copies, not cast here.
      inner: the inner transformation's state.
      precision: decides, by the dtype in which a parameter arrives, which have a master copy.
      of: the parameters whose dtypes count, if not `params`.
    """
    if isinstance(inner, MasterWeights):
        return inner
    arriving = params if of is None else of
    wanted = jax.tree.map(lambda p: precision.keeps_master(jax.typeof(p).dtype), arriving)
    if not any(jax.tree.leaves(wanted)):
        return inner
    return MasterWeights(
        jax.tree.map(lambda keep, p: p if keep else optax.MaskedNode(), wanted, params), inner
    )


def master_leaves(state: MasterWeights) -> list[jax.Array | None]:
    """The master copy of each parameter, None where it has none."""
    nodes = jax.tree.leaves(state.master, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return [None if isinstance(m, optax.MaskedNode) else m for m in nodes]


def update_with_master(
    tx: optax.GradientTransformation,
    layout: Layout,
    grads: Tree,
    state: MasterWeights,
    old: Tree,
    params: Tree,
    extra: dict[str, Any],
) -> tuple[Tree, MasterWeights]:
    structure = jax.tree.structure(params)
    old_leaves = structure.flatten_up_to(old)
    masters = master_leaves(state)
    weights = [p if m is None else m for m, p in zip(masters, old_leaves, strict=True)]
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, structure.unflatten(weights))
    deltas, inner = tx.update(grads, state.inner, structure.unflatten(weights), **extra)
    moved = optax.apply_updates(structure.unflatten(weights), deltas)

    updates, kept = [], []
    leaves = zip(
        masters,
        old_leaves,
        jax.tree.leaves(moved),
        jax.tree.leaves(deltas),
        jax.tree.leaves(params),
        jax.tree.leaves(layout.updates),
        jax.tree.leaves(layout.params),
        strict=True,
    )
    for master, p_part, new, delta, p, part, rest in leaves:
        if master is None:
            updates.append(constrain(constrain(delta, part.flight), rest.rest))
            kept.append(optax.MaskedNode())
            continue
        target = round_to(constrain(new, part.flight), p.dtype)
        gathered = constrain(target.astype(p.dtype), rest.rest)  # the wire carries p.dtype
        updates.append(gathered.astype(new.dtype) - p.astype(new.dtype))
        before = p_part.astype(new.dtype)
        reached = round_to(before + (target - before), p.dtype)
        kept.append(jnp.where(reached == target, new, reached))
    return structure.unflatten(updates), MasterWeights(structure.unflatten(kept), inner)
