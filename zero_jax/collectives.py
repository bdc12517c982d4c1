"""Moving one leaf between the states it can be in, inside a jitted step.

States of a leaf, as the optimizer's update meets them:

  at rest      as `Placement.rest` says; may be padded along a dim or flattened and padded
  in flight    the logical shape under `Placement.flight`; a padded dim is cut unevenly, which XLA
               allows for intermediates and not at the edge of a jit
  partitioned  each device computes on its own 1/N
  gathered     whole on every device (of the data axis)

In the annotated executor nothing here issues a collective by name: each function states where its
result lies and XLA's partitioner inserts what is needed (ZeRO, arXiv 1910.02054, section 7: a
reduce-scatter of the gradients and an all-gather of the parameters). On CPU a reduce-scatter is an
all-reduce followed by a slice; GPU and TPU compilers make it one collective.
"""

import math

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from .mesh import is_explicit
from .placement import Placement


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """State where `x` lies from here on; values are unchanged.

    Under Auto axes this is a constraint for the partitioner, under Explicit axes a reshard.
    """
    if is_explicit(sharding.mesh):
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def pin_sum(update: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return `update` such that `parameter + update`, traced, lies under `sharding`.

    The new parameter is a sum that the user's step writes (`optax.apply_updates`), so no statement
    of ours reaches it; used again in the same step, it would lie as that use likes best, and the
    state would come back with another layout. Python asks the right operand of a sum first when its
    class extends the left one's: so the update's tracer gets a class that states where the sum
    lies. In all else it is the same tracer; outside of a trace nothing is changed.
    """
    if not isinstance(update, Tracer):
        return update

    def add_and_constrain(self: jax.Array, parameter: jax.Array) -> jax.Array:
        return constrain(jnp.add(parameter, self), sharding)

    kind = type(update)
    members = {"__slots__": (), "__radd__": add_and_constrain}
    update.__class__ = type(kind.__name__, (kind,), members)
    return update


def unpad(x: jax.Array, placement: Placement) -> jax.Array:
    """From rest to flight: the logical array, without padding.

    Args:
      x: array of `placement.partition.rest_shape`.
      placement: its placement.

    Returns:
      Array of `placement.leaf.shape` under `placement.flight`.
    """
    partition, shape = placement.partition, placement.leaf.shape
    if partition.form == "flat":
        x = constrain(x, placement.flight)[: math.prod(shape)].reshape(shape)
    elif x.shape != shape:
        if is_explicit(placement.mesh):
            x = constrain(x, placement.flight)  # types cannot say uneven: gather, then slice
        x = jax.lax.slice(x, (0,) * x.ndim, shape)
    return constrain(x, placement.flight)


def pad(x: jax.Array, placement: Placement) -> jax.Array:
    """From flight to rest: zeros fill the padding, which nothing reads."""
    partition = placement.partition
    if partition.form == "flat":
        x = x.reshape(-1)
    if x.shape != partition.rest_shape:
        x = jnp.pad(x, [(0, r - s) for r, s in zip(partition.rest_shape, x.shape, strict=True)])
    return constrain(x, placement.rest)
