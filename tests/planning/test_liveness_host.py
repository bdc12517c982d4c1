"""The walk's peaks of steps that use the host's memory, each rule on a step that has little else.

Names of sizes: R rows of a device, D width, K a large width, N boxes; `F` bytes of a float.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.memories import as_host, to_device
from zero_jax.offload.boxes import Column, pass_in_boxes
from zero_jax.planning.liveness import temporaries_bytes
from zero_jax.planning.traced import trace

MESH = Mesh(np.array(jax.devices()), ("data",))
WHOLE = NamedSharding(MESH, P())
MACHINES = ("cuda", "tpu")
R, D, K, F = 4, 32, 1024, 4
TINY = 1  # float


def array(*shape, spec=()):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


def peak(step, state, on_host, platform="cuda"):
    return temporaries_bytes(trace(step, state, array(8 * R, D, spec=("data",)), on_host), platform)


def passing(*widths):
    """A step whose update streams arrays (N, D, width), a moment on the host and a parameter."""

    def one(moment, weight):
        columns = [Column(moment, WHOLE, True, True), Column(weight, WHOLE, False, True)]
        return pass_in_boxes(
            lambda boxes: [boxes[0] * 0.9, boxes[1] - boxes[0]],
            columns, (0, 1), (1, *moment.shape[1:]), moment.shape,
        )  # fmt: skip

    def step(state, batch):
        return [one(as_host(m), w) for m, w in state]

    return step


def streamed(n, *widths):
    state = [(array(n, D, w), array(n, D, w)) for w in widths]
    return peak(passing(*widths), state, [True, False] * len(widths))


def test_of_what_is_streamed_up_to_three_boxes_are_there_however_many_there_are():
    """The box that is computed, the next one, and the new one on its way to the host."""
    box = D * K * F
    few, many = streamed(4, K), streamed(40, K)
    assert 2 * box <= few <= 3 * box and many == few


def test_the_first_box_of_the_next_stream_is_there_during_the_one_before():
    small = D * D * F
    assert streamed(4, K, D) == streamed(4, K) + small
    assert streamed(4, D, K) < streamed(4, K) + small  # the last one has none after it


def test_the_whole_of_an_array_that_is_fetched_is_a_buffer():
    def step(state, batch):
        return (batch @ to_device(as_host(state))).sum()

    assert peak(step, array(D, K), [True]) == (D * K + R * K) * F


@pytest.mark.parametrize("platform", MACHINES)
def test_what_a_loop_carries_lies_in_one_place(platform):
    """(R, K) is read once in a trip and then made again; `small` (R, D) is between them."""

    def step(state, batch):
        down, up, tiny = state
        scale = to_device(as_host(tiny))

        def trip(carry, _):
            return (carry @ down) @ up, None

        return lax.scan(trip, batch @ up, None, length=3)[0].sum() * scale.sum()

    state = array(K, D), array(D, K), array(TINY)
    assert peak(step, state, [False, False, True], platform) == (R * K + R * D + TINY) * F


@pytest.mark.parametrize("platform", MACHINES)
def test_the_gradient_of_a_head_is_made_last(platform):
    """Its operand (R, K) lives through the loop, (R, H) wide, and not the gradient (D, K)."""
    h = 100 * K

    def step(state, batch):
        head, wide, narrow, tiny = state
        scale = to_device(as_host(tiny))
        logits = batch @ head
        grad = batch.T @ logits

        def trip(x, _):
            return (x @ wide) @ narrow, None

        last = lax.scan(trip, logits @ head.T, None, length=3)[0]
        return head - grad * last.sum() * scale.sum()

    state = array(D, K), array(D, h), array(h, D), array(TINY)
    found = peak(step, state, [False, False, False, True], platform)
    assert found == (R * K + R * h + R * D + TINY) * F
