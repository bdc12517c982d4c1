"""Bytes between device and host, counted where a traced step moves them; of one device.

Names of sizes: R rows of a device, D width, L layers, N devices; `F` bytes of a float.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.memories import as_host, to_device, to_host, zeros_on_host
from zero_jax.planning import host_link
from zero_jax.planning.host_link import Passage
from zero_jax.planning.liveness import uses_host
from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import trace

N = 8
MESH = Mesh(np.array(jax.devices()), ("data",))
R, D, L, F = 2, 16, 5, 4


def array(*shape, spec=()):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


def found(step, state, on_host=()):
    """The link of a step on a batch of R rows a device, and whether it is used at all."""
    region = trace(step, state, array(N * R, D, spec=("data",)), on_host)
    propagate(region)
    return host_link.from_region(region), uses_host(region)


def layer(stack, i):
    return to_device(lax.dynamic_index_in_dim(stack, i, 0, keepdims=False))


def explicit(state, batch):
    """Layers are fetched, their gradients sent; then the gradients are fetched, layers sent."""

    def local(stack, x):
        def trip(i, carry):
            x, sent = carry
            w = layer(stack, i)
            x = jnp.tanh(x @ w)
            return x, lax.dynamic_update_index_in_dim(sent, to_host(w * x.sum()), i, 0)

        return lax.fori_loop(0, L, trip, (x, zeros_on_host(stack.shape, stack.dtype)))[1]

    mapped = jax.shard_map(
        local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    stack = as_host(state)
    grads = mapped(stack, batch)

    def update(i, stack):
        new = to_host(layer(grads, i) * 0.9)
        return lax.dynamic_update_index_in_dim(stack, new, i, 0)

    return lax.fori_loop(0, L, update, stack)


def test_transfers_count_as_often_as_their_loop_runs():
    link, used = found(explicit, array(L, D, D), [True])
    stack = L * D * D * F
    assert used and link.stacks_bytes == stack
    assert link.gradient == Passage(stack, stack) and link.update == Passage(stack, stack)
    assert (link.fetched_bytes, link.sent_bytes) == (2 * stack, 2 * stack)


def test_an_argument_that_lies_on_the_host_is_not_sent_there():
    """Devices that are only compiled for type it as one on the device; it has to be said."""
    stack = L * D * D * F
    said, _ = found(explicit, array(L, D, D), [True])
    unsaid, _ = found(explicit, array(L, D, D))
    assert unsaid.sent_bytes == said.sent_bytes + stack


def test_of_an_array_that_is_cut_a_device_moves_its_part():
    """An ordinary step: all of it is the update's."""

    def step(state, batch):
        moved = to_device(as_host(state)) * batch.sum()
        return to_host(moved)

    link, _ = found(step, array(N * D, D, spec=("data",)), [True])
    assert link.gradient == Passage(0, 0) and link.stacks_bytes == 0
    assert link.update == Passage(D * D * F, D * D * F)


def test_a_step_that_moves_nothing():
    link, used = found(lambda state, batch: state * batch.sum(), array(D, D))
    assert not used and (link.fetched_bytes, link.sent_bytes, link.stacks_bytes) == (0, 0, 0)


def test_a_link_carries_both_directions_at_once():
    assert Passage(6, 2).seconds(2.0) == 3.0 and Passage(1, 4).seconds(2.0) == 2.0
    assert Passage(0, 0).seconds(math.nan) == 0.0  # nothing to carry, on whatever link
    assert math.isnan(Passage(1, 0).seconds(math.nan))
