"""The explicit step on a traced state: the order of events, in one place.

ZeRO (arXiv 1910.02054, section 7):

  open      the state, as `shard_train_state` or `init_train_state` laid it out
  gradient  in `shard_map` over the batch's axes: gather, differentiate, reduce (`gradients`)
  fault     what is not finite shows in the global norm, alike on every device (`faults`)
  unscale, transform, clip
  update    optax in the global view, each device its own part (`update`); where it is delayed, on
            what the step before has left
  hook      what the user does after it
  close     the same type again, every leaf where it was

A step whose gradients are not finite, or whose batch weighs nothing, leaves the state as it is, bit
for bit; `Metrics.fault` says why.

Not here: jit, donation, what is done about a fault (`train_step`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from . import flax_linen, flax_nnx
from .anatomy import open_in_step
from .collectives import constrain, pad, unpad
from .delayed import Delayed, Pending, put, split_pending, take
from .extended_state import LossScaled, split_scale
from .faults import Fault, find_fault, passes
from .gradients import compute_gradients, frozen_parameters
from .loss_scale import DynamicScale, ScaleState, hopeless, next_scale
from .step_options import StepOptions
from .subject import Subject
from .subject_linen import open_linen
from .subject_nnx import open_nnx
from .update import apply_update, times

Tree = Any


class Metrics(NamedTuple):
    """What a step reports; arrays (), equal on every device.

    Attributes:
      loss: mean over the batch, or total over weight; fp32, unscaled.
      weight: what the batch weighs (tokens, say); the number of microbatches over all devices for a
        loss that returns a mean.
      grad_norm: global norm of the gradients before clipping, fp32, unscaled.
      loss_scale: by which this step's loss was multiplied, 1 without a policy.
      skipped: 1 if the state was left as it is, int32.
      fault: a `Fault`, int32; 0 is none.
      aux: what the loss returned beside, combined over microbatches and devices.
    """

    loss: jax.Array
    weight: jax.Array
    grad_norm: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    fault: jax.Array
    aux: Any


class Found(NamedTuple):
    """What a step knows before its update; every array but the gradients is () or small.

    Attributes:
      pending: for the update.
      other: the state's other leaves, changed.
      norm, weight, scale, fault, aux: as in `Metrics`.
    """

    pending: Pending
    other: Tree
    norm: jax.Array
    weight: jax.Array
    scale: jax.Array
    fault: jax.Array
    aux: Any


def explicit_step(
    state: Any, batch: Tree, key: Any, *, loss_fn: Any, tx: Any, options: StepOptions
) -> tuple[Any, Metrics]:
    """One step, traced; see the module docstring."""
    subject = open_subject(state, tx, loss_fn, options)
    before = subject.anatomy
    found = differentiate(subject, batch, key, options)
    layout, (_, opt_state) = subject.layout, split_scale(before.opt_state)
    waited, opt_state = split_pending(opt_state)
    given = found.pending if waited is None else take(waited, layout)
    frozen = frozen_parameters(layout, options)
    params, opt_state = apply_update(subject.tx, given, opt_state, before.params, frozen)
    if waited is not None:
        opt_state = Delayed(put(found.pending, waited, layout), opt_state)
    params, opt_state, other, metrics = conclude(subject, found, params, opt_state, tx, options)
    other = jax.tree.map(lambda x, p: constrain(x, p.rest), other, layout.other)
    return before.close(params, opt_state, other), metrics


def open_subject(state: Any, tx: Any, loss_fn: Any, options: StepOptions) -> Subject:
    """A state and a loss of either kind, taken apart."""
    return (open_nnx if flax_nnx.is_nnx(state) else open_linen)(state, tx, loss_fn, options)


def differentiate(subject: Subject, batch: Tree, key: Any, options: StepOptions) -> Found:
    """From a batch to what the optimizer is given."""
    scale_state, _ = split_scale(subject.anatomy.opt_state)
    scale = jnp.float32(1) if scale_state is None else scale_state.scale
    found = compute_gradients(subject, batch, key, scale, options)
    loss, norm = found.total / found.weight, found.norm / scale
    fault = find_fault(found.weight, norm)
    keep = passes(fault, scale_state is not None, found.weighted, options)
    gradients, factor = found.gradients, None if scale_state is None else 1 / scale
    if options.transform_grads is not None:
        gradients = [times(g, factor) for g in gradients]
        gradients, factor = _transform(gradients, subject, options.transform_grads), None
    pending = Pending(gradients, _clipped(factor, norm, options), keep, loss)
    other = _count_step(subject.put_back(found.carried))
    return Found(pending, other, norm, found.weight, scale, fault, found.aux)


def conclude(
    subject: Subject, found: Found, params: Tree, opt_state: Any, tx: Any, options: StepOptions
) -> tuple[Tree, Any, Tree, Metrics]:
    """The parts of the state after the update, and what the step reports.

    Args:
      subject: the state before the step.
      found: by `differentiate`.
      params, opt_state: after the update, at rest, without the loss scale.
      tx, options: of the step.

    Returns:
      Parameters at rest, the optimizer state with the loss scale, all other leaves (those that
      nothing changes are the very ones that the subject has), and the metrics.
    """
    layout, old, other = subject.layout, subject.anatomy.other, found.other
    loss, keep, fault = found.pending.loss, found.pending.keep, found.fault
    if options.after_update is not None:
        hooked, other = _hook(params, opt_state, other, subject, tx, options.after_update)
        params = jax.tree.map(lambda new, was: _choose(keep, new, was), hooked, params)
    other = jax.tree.map(lambda new, was: _choose(keep, new, was), other, old)
    scale_state, _ = split_scale(subject.anatomy.opt_state)
    if scale_state is not None:
        after, fault = _next_scale(scale_state, fault, subject.tx.precision.loss_scale)
        places, _ = split_scale(layout.opt_state)
        after = jax.tree.map(lambda x, p: constrain(x, p.rest), after, places)
        opt_state = LossScaled(after, opt_state)
    skipped = jnp.int32(0) if keep is None else 1 - keep.astype(jnp.int32)
    metrics = Metrics(loss, found.weight, found.norm, found.scale, skipped, fault, found.aux)
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return params, opt_state, other, jax.tree.map(lambda x: constrain(x, everywhere), metrics)


def _transform(gradients: list[Any], subject: Subject, transform: Any) -> list[Any]:
    """The user's function of the gradient tree; what it returns lies as the gradients did."""
    structure = jax.tree.structure(subject.anatomy.params)
    returned = transform(structure.unflatten(gradients))
    changed, places = jax.tree.leaves(returned), jax.tree.leaves(subject.layout.updates)
    shapes = [jnp.shape(g) for g in changed]
    if jax.tree.structure(returned) != structure or shapes != [p.leaf.shape for p in places]:
        raise ValueError(
            f"transform_grads: it returned {len(changed)} leaves, {shapes[:2]} and so on, in a "
            f"{type(returned).__name__}; expected the tree that it was given, with its "
            f"{len(places)} leaves and their shapes."
        )
    return [constrain(g, p.flight) for g, p in zip(changed, places, strict=True)]


def _clipped(factor: Any, norm: jax.Array, options: StepOptions) -> Any:
    """The factor of all gradients, with that of clipping; None for 1."""
    limit = options.clip_norm
    if limit is None:
        return factor
    clip = jnp.where(norm < limit, 1.0, limit / norm)
    return clip if factor is None else factor * clip


def _next_scale(state: ScaleState, fault: jax.Array, policy: Any) -> tuple[ScaleState, jax.Array]:
    """The loss scale after this step, and the fault: what a dynamic scale answers is an overflow.

    A batch without a weight says nothing of overflows, and leaves the scale alone too.
    """
    overflows = fault == Fault.NON_FINITE
    weighs = overflows | (fault == Fault.NONE)
    after = next_scale(policy, state, ~overflows)
    after = jax.tree.map(lambda new, old: jnp.where(weighs, new, old), after, state)
    if isinstance(policy, DynamicScale):
        fault = jnp.where(overflows, Fault.OVERFLOW, fault)
        fault = jnp.where(overflows & hopeless(policy, after), Fault.HOPELESS, fault)
    return after, fault.astype(jnp.int32)


def _count_step(other: Tree) -> Tree:
    """The state's own count of steps, one more."""
    step = flax_linen.get(other, "step")
    if step is None or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
        return other
    return flax_linen.replace(other, step=jnp.asarray(step) + 1)


def _choose(keep: jax.Array | None, new: Any, old: Any) -> Any:
    """`new` where the step passes, else the old bits."""
    if new is old:
        return old
    chosen = new if keep is None else jnp.where(keep, new, old)
    return chosen if chosen.dtype == old.dtype else chosen.astype(old.dtype)  # weak types stay weak


def _hook(
    params: Tree, opt_state: Any, other: Tree, subject: Subject, tx: Any, after_update: Any
) -> tuple[Tree, Tree]:
    """What the user does after the update, on logical shapes; parameters and others at rest."""
    away = [p for p in jax.tree.leaves(subject.layout.params) if p.on_host]
    if away:
        raise ValueError(
            f"after_update: it is given all parameters, and params/{away[0].leaf.path} and "
            f"{len(away) - 1} more lie on the host; leave it out, or HostMemory(params=True)."
        )
    places = subject.layout.params, subject.layout.other
    logical = jax.tree.map(unpad, (params, other), places)
    state = after_update(subject.anatomy.close(logical[0], opt_state, logical[1]))
    changed = open_in_step(state, tx)
    pairs = zip(jax.tree.leaves(changed.opt_state), jax.tree.leaves(opt_state), strict=False)
    if any(new is not old for new, old in pairs):
        raise ValueError(
            "after_update: it changed opt_state, which is the optimizer's; return it as it was. "
            "What changes with the optimizer's state belongs into the optax transformation."
        )
    return jax.tree.map(
        lambda new, was, old, place: old if new is was else pad(new, place),
        (changed.params, changed.other), logical, (params, other), places,
    )  # fmt: skip
