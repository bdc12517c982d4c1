"""Gradients on one device, with explicit collectives: what runs inside `shard_map`.

ZeRO (arXiv 1910.02054, section 7). Every device computes the gradient of its own rows and the
pieces are reduced as `at_use.Wire` says:

  stage 0       all-reduced
  stage 1       reduce-scattered to the optimizer's cut; with microbatches summed whole on each
                device first and reduced once
  stages 2, 3   reduce-scattered where they arise, in every microbatch; the accumulator is 1/N
  replicas      pieces are summed over the replica axes too, once a step

Parameters are gathered by the same wires. Nothing here averages a loss and then differentiates:
each device's summand is divided by what the whole batch weighs, and sums cross the wire.

Microbatches: gradients are those of the sum of all totals over the sum of all weights, so that
microbatches and devices may hold unequal numbers of tokens. A microbatch that weighs nothing adds
nothing.

Not here: what the loss is (`subject`), the view from outside (`gradients`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from .at_use import Partitioned, Wire
from .collectives import all_reduce
from .joining import (
    as_numbers,
    check_same,
    join_carried,
    over_devices,
    over_microbatches,
    rules_of,
)
from .memories import is_host, to_device
from .readings import Reading
from .step_options import StepOptions
from .subject import Device, Subject
from .wires import Axes

Tree = Any


def make_local_gradient(
    subject: Subject,
    wires: list[Wire],
    readings: list[Reading],
    trains: list[bool],
    axes: Axes,
    options: StepOptions,
) -> Any:
    """Make the function that `shard_map` runs on every device.

    Args:
      subject: the opened state.
      wires, readings: one for each of `subject.values`.
      trains: which of them have a gradient.
      axes: of the batch.
      options: of the step.

    Returns:
      (values, carried, batch, key, scale) -> (gradients, carried, aux, sums). Gradients are pieces,
      times `scale`, in a list with an entry for each value that trains; `sums` is a dict of
      replicated fp32 scalars: total, squared_norm, and weight if the loss has one.
    """

    def step(values: list[Any], carried: Tree, batch: Tree, key: Any, scale: jax.Array) -> Any:
        values, here = _gather_kept(values, wires, readings, options)
        moved: list[bool] = []

        def one(values: list[Any], carried: Tree, microbatch: Tree, index: Any) -> Any:
            device = this_device(axes, index)

            def objective(carriers: list[Any]) -> Any:
                leaves = [*map(_hand_over, here, values, carriers, readings)]
                out, changed, aux = subject.call(leaves, carried, microbatch, key, device)
                check_same(carried, changed)
                pairs = zip(jax.tree.leaves(carried), jax.tree.leaves(changed), strict=True)
                moved[:] = [new is not old for old, new in pairs]
                total, weight = read_loss(out)
                whole = None if weight is None else all_reduce(weight, axes.batch)
                return total * _seed(scale, whole, axes), (total, whole, changed, aux)

            carriers = [w.carrier() if t else None for w, t in zip(here, trains, strict=True)]
            gradients, (total, whole, changed, aux) = jax.grad(objective, has_aux=True)(carriers)
            aux = as_numbers(aux, rules_of(aux, options.aux))
            return [g for g in gradients if g is not None], total, whole, changed, aux

        used = [w for w, t in zip(here, trains, strict=True) if t]
        if options.microbatches == 1:
            gradients, total, weight, after, aux = one(values, carried, batch, 0)
        else:
            is_cut = [w.rest.parts > 1 for w in here]
            gradients, total, weight, after, aux = _scan(
                one, values, is_cut, used, carried, batch, options
            )
        gradients = [w.finish(g) for w, g in zip(used, gradients, strict=True)]
        total, squared = all_reduce(
            jnp.stack([total, _squared_norm(gradients, used, axes)]), axes.batch
        )
        sums = {"total": total, "squared_norm": squared}
        sums |= {} if weight is None else {"weight": weight}
        changed = join_carried(after, carried, subject.rules, moved, axes.batch)
        return gradients, changed, over_devices(aux, rules_of(aux, options.aux), axes.batch), sums

    return step


def read_loss(out: Any) -> tuple[jax.Array, jax.Array | None]:
    """What a loss returned, as fp32: (mean, None) or (total, weight).

    Raises:
      TypeError: it is neither.
    """
    parts = out if isinstance(out, (tuple, list)) else (out,)
    has = [f"shape {jnp.shape(p)}" if _is_array(p) else f"a {type(p).__name__}" for p in parts]
    if len(parts) not in (1, 2) or any(one != "shape ()" for one in has):
        raise TypeError(
            f"loss_fn: it returned {' and '.join(has)}; expected a scalar, the mean over its rows, "
            "or two, (total, weight). Sum or average over rows; return other values with "
            "has_aux=True."
        )
    if not jnp.issubdtype(jnp.result_type(parts[0]), jnp.floating):
        raise TypeError(f"loss_fn: its loss is {jnp.result_type(parts[0])}; expected a real float.")
    total = jnp.asarray(parts[0], jnp.float32)
    if len(parts) == 1:
        return total, None
    return total, jax.lax.stop_gradient(jnp.asarray(parts[1], jnp.float32))


def _is_array(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) or hasattr(x, "dtype")


def _gather_kept(
    values: list[Any], wires: list[Wire], readings: list[Reading], options: StepOptions
) -> tuple[list[Any], list[Wire]]:
    """Gather what a loss would hold from its start to its end, once for all microbatches."""
    keeps = [options.regather == "keep" or reading != "at use" for reading in readings]
    gathered = [w.gather(v) if k else v for w, v, k in zip(wires, values, keeps, strict=True)]
    return gathered, [w.gathered() if k else w for w, k in zip(wires, keeps, strict=True)]


def _hand_over(wire: Wire, value: Any, carrier: Any, reading: Reading) -> Any:
    parameter = Partitioned(value, carrier, wire)
    return parameter if reading == "at use" else parameter.unbox()


def this_device(axes: Axes, index: Any) -> Device:
    """What a loss knows of it: keys differ on every device and in every microbatch."""

    def fold(key: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, jax.lax.axis_index(axes.batch))
        return jax.random.fold_in(own, index)

    return Device(fold, axes.batch)


def _seed(scale: jax.Array, weight: jax.Array | None, axes: Axes) -> jax.Array:
    """What a device's total is multiplied by, so that gradients are those of the batch's mean."""
    if weight is None:
        return scale / axes.size
    return jnp.where(weight == 0, 0, scale / jnp.where(weight == 0, 1, weight))


def _scan(
    one: Any,
    values: list[Any],
    is_cut: list[bool],
    wires: list[Wire],
    carried: Tree,
    batch: Tree,
    options: StepOptions,
) -> Any:
    """Sum gradients over microbatches, each times what it weighs.

    In fp32 at least, whatever dtype crosses the wire: weights of thousands of tokens would overflow
    in fp16, and in bf16 a sum of many no longer notices one more.
    """
    m, has_weight = options.microbatches, []

    def body(carry: Any, xs: Any) -> Any:
        carried, sums = carry
        # Compilers move what is alike in all trips out of a loop: they would gather the embedding,
        # say, once a step and hold it whole all along. So pieces are tied to what changes.
        pieces = [v for v, cut in zip(values, is_cut, strict=True) if cut]
        pieces, sums = jax.lax.optimization_barrier((pieces, sums))
        own = iter(pieces)
        own = [next(own) if cut else v for v, cut in zip(values, is_cut, strict=True)]
        gradients, total, weight, changed, aux = one(own, carried, *xs)
        has_weight.append(weight is not None)
        share = jnp.float32(1) if weight is None else weight
        gradients = [_wide(g) for g in gradients]
        added = [g * share.astype(g.real.dtype) for g in gradients], total, share
        return (changed, jax.tree.map(jnp.add, sums, added)), aux

    parts = jax.tree.map(lambda x: x.reshape(m, -1, *x.shape[1:]) if x.ndim else x, batch)
    parts = jax.tree.map(lambda x: x if x.ndim else jnp.broadcast_to(x, (m,)), parts)
    zeros = [_wide(w.carrier()) for w in wires], jnp.float32(0), jnp.float32(0)
    (carried, sums), aux = jax.lax.scan(body, (carried, zeros), (parts, jnp.arange(m)))
    gradients, total, weight = sums
    divisor = jnp.where(weight == 0, 1, weight)
    gradients = [g / divisor.astype(g.real.dtype) for g in gradients]
    return (
        gradients,
        total,
        weight if has_weight[0] else None,
        carried,
        over_microbatches(aux, rules_of(aux, options.aux)),
    )


def _wide(gradient: jax.Array) -> jax.Array:
    return gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))


def _squared_norm(gradients: list[jax.Array], wires: list[Wire], axes: Axes) -> jax.Array:
    """This device's share of the squared global norm: a piece that n devices hold counts 1/n."""
    squares = jnp.float32(0)
    for g, wire in zip(gradients, wires, strict=True):
        squares += _sum_of_squares(g) * (wire.grad.parts / axes.size)
    return squares


def _sum_of_squares(g: jax.Array) -> jax.Array:
    """Of one gradient; one on the host is fetched layer by layer."""

    def of(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))

    return jnp.sum(jax.lax.map(lambda layer: of(to_device(layer)), g)) if is_host(g) else of(g)
