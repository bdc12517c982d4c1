"""Whether what a step leaves alone is alike on every device: seen in the trace, before it runs.

Floats that a loss changes of its state are averaged. Integers and keys have no mean: they are right
as they are if every device counts the same (steps, draws of a random stream), and wrong without a
word if they count what is in a device's own rows. The trace says which: a value is a device's own
if it depends on the batch, on the step's key, or on which device it is computed on.

In doubt a value counts as a device's own: inside of a `while` loop, or of a function with a
derivative of its own, everything depends on everything. A loss that prints its rows is not checked.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from .readings import bodies_of
from .subject import Subject


def check_alike(subject: Subject, jaxpr: Any, given: int) -> None:
    """Check what a loss carries that has neither a mean nor another rule.

    Args:
      subject: the opened state.
      jaxpr: open, of what one device does; its first outputs are what the loss carried.
      given: how many of its inputs, the last ones, are carried, batch and key, in this order.

    Raises:
      ValueError: devices may differ in one of them.
    """
    leaves, rules = jax.tree.leaves(subject.carried), jax.tree.leaves(subject.rules)
    pairs = enumerate(zip(leaves, rules, strict=True))
    stay = [at for at, (x, rule) in pairs if rule == "mean" and not _has_mean(x)]
    first, count = len(jaxpr.invars) - given, len(leaves)
    if not stay or _depends(jaxpr, set(), first, count):
        return
    if _depends(jaxpr, set(stay), first, count):
        at = next(at for at in stay if _depends(jaxpr, {at}, first, count))
        raise ValueError(
            f"collections: {subject.names[at]} is {leaves[at].dtype} and depends on the batch or "
            'the key, so that devices differ in it, and it has no mean. Give it a rule: "sum" adds '
            'up what all devices add to it, "max" and "min" choose, "read" leaves it as it was. '
            "For NNX a rule belongs to a type of Variable, else to a field of the state."
        )


def _has_mean(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _depends(jaxpr: Any, wanted: set[int], first: int, count: int) -> bool:
    """Whether an output may be a device's own.

    Args:
      jaxpr: see `check_alike`.
      wanted: the outputs that are asked for.
      first, count: where the carried ones among the inputs begin, and how many there are.
    """
    while True:
        asked = [at in wanted for at in range(len(jaxpr.outvars))]
        needed, used = partial_eval.dce_jaxpr(jaxpr, asked)
        if any(used[first + count :]) or _asks_where(needed):
            return True
        more = wanted | {at for at in range(count) if used[first + at]}
        if more == wanted:  # the next microbatch gets what this one carried
            return False
        wanted = more


def _asks_where(jaxpr: Any) -> bool:
    """Whether it computes with the number of the device it runs on."""
    return any(
        eqn.primitive.name == "axis_index" or any(map(_asks_where, bodies_of(eqn)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )
