"""One-step delayed update: the optimizer works on gradients of the step before.

ZeRO-Offload (arXiv 2101.06840, section 5.2): where the update is slow because the optimizer's state
is far from the device, a step computes its gradients while those of the step before are applied.
With gradients g of parameters p and the update U it is

    p[t+1] = p[t] - U(g[t-1]),    g[t] = gradient at p[t]

so that the first step changes no parameter, and the gradients of the last one are never applied.
What waits is part of the optimizer's state, in host memory: gradients in the reduction dtype, and
the numbers they count with. The optimizer's own counts and schedules go with the updates.

The gradient and the update of a step do not depend on each other; when the host computes is the
compiler's choice. Those for H100 and v6e (jax 0.10.2) let most of it pass before the gradients: the
freedom is there, the time is not gained yet.

Not here: when to begin; the paper does so after some tens of steps, which is another layout of the
same state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .collectives import constrain, pad
from .layout import Layout
from .memories import as_host, is_host, to_host
from .placement import Placement
from .precision import Precision

Tree = Any


class Pending(NamedTuple):
    """What a step has found out and the optimizer is still to be given.

    Attributes:
      gradients: one for each parameter, in flight: logical shapes under `layout.updates`; or on
        the host, at rest as `layout.updates` says. In a state: a tree, on the host but for
        scalars.
      factor: fp32 (), by which gradients are multiplied (clipping, the loss scale); None is 1.
      keep: a bool (); if False everything stays as it is, bit for bit. None is True.
      loss: of the step, for transformations that ask for a `value`.
    """

    gradients: Any
    factor: Any
    keep: Any
    loss: Any


class Delayed(NamedTuple):
    """Optimizer state of a delayed update: what it is given next, and what optax has made."""

    pending: Pending
    inner: Any


def nothing_pending(params: Tree, precision: Precision) -> Pending:
    """What waits before the first step: an update that keeps everything as it is."""

    def zeros(p: Any) -> Any:
        if not jnp.issubdtype(p.dtype, jnp.inexact):
            return optax.MaskedNode()
        return jnp.zeros(p.shape, precision.reduced(precision.stored(p.dtype)))

    gradients = jax.tree.map(zeros, params)
    return Pending(gradients, jnp.float32(1), jnp.bool(False), jnp.float32(0))


def has_gradient(place: Placement) -> bool:
    """Whether a parameter has one: real and complex numbers do."""
    return jnp.issubdtype(place.leaf.dtype, jnp.inexact)


def no_gradient(place: Placement) -> jax.Array:
    """The gradient of a parameter that has none, in flight: zeros, of JAX's float0 for integers."""
    if not has_gradient(place):
        return jnp.zeros(place.leaf.shape, jax.dtypes.float0)
    return constrain(jnp.zeros(place.leaf.shape, place.leaf.dtype), place.flight)


def split_pending(opt_state: Any) -> tuple[Pending | None, Any]:
    """What waits, None if the update is not delayed, and the rest."""
    return opt_state if isinstance(opt_state, Delayed) else (None, opt_state)


def take(pending: Pending, layout: Layout) -> Pending:
    """What has waited, as an update is given it."""
    kept = zip(jax.tree.leaves(pending.gradients), _kept_in(layout), strict=True)
    waiting = (as_host(g) if place.on_host else g for g, place in kept)
    places = jax.tree.leaves(layout.updates)
    gradients = [next(waiting) if has_gradient(p) else no_gradient(p) for p in places]
    return pending._replace(gradients=gradients)


def put(found: Pending, waited: Pending, layout: Layout) -> Pending:
    """What a step has found, in the place of what has waited."""
    old, structure = jax.tree.flatten(waited.gradients)
    places = jax.tree.leaves(layout.updates)
    pairs = [(g, p) for g, p in zip(found.gradients, places, strict=True) if has_gradient(p)]
    gradients = []
    for (g, p), o, place in zip(pairs, old, _kept_in(layout), strict=True):
        if not is_host(g):
            g = pad(g.astype(o.dtype), p)
            g = to_host(g) if place.on_host else g
        gradients.append(g)
    numbers = (
        jnp.float32(1) if found.factor is None else found.factor,
        jnp.bool(True) if found.keep is None else found.keep,
        found.loss,
    )
    everywhere = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    return Pending(structure.unflatten(gradients), *(constrain(x, everywhere) for x in numbers))


def _kept_in(layout: Layout) -> list[Placement]:
    """Where each gradient waits: on the host, but for scalars."""
    state = layout.opt_state  # with a loss scale around it, or not
    delayed = state if isinstance(state, Delayed) else state.inner
    return jax.tree.leaves(delayed.pending.gradients)
