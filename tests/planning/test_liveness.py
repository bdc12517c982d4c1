"""The walk's peaks, each rule on a step that has little but it. Every number is a sum of buffers.

Names of sizes: R rows, D and H widths, K a large width, L layers. `F` bytes of a float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.liveness import MARGIN, temporaries_bytes
from zero_jax.planning.traced import trace

MESH = Mesh(np.array(jax.devices()), ("data",))
PLATFORMS = ("cpu", "cuda", "tpu")
R, D, H, K, L, F = 4, 8, 32, 64, 3, 4


def array(*shape, spec=(), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def peak(platform, f, *arrays):
    return temporaries_bytes(trace(lambda arrays, _: f(*arrays), arrays, ()), platform)


def constrain(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


X = array(R, D)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_elementwise_work_between_matmuls_is_fused(platform):
    """Three elementwise operations leave one buffer, over that of the product before them."""

    def f(x, w, v):
        return jnp.sin(jnp.exp(jnp.tanh(x @ w) * 2) @ v).sum()

    first, second = R * H * F, R * K * F
    assert peak(platform, f, X, array(D, H), array(H, K)) == first + second


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_read_again_stays(platform):
    """The first product is an operand of the third, so it lives beside what was made of it."""

    def f(x, w, v, u):
        first = x @ w
        return (jnp.sin(first) @ v) @ u + first.sum(axis=1, keepdims=True)

    first, activated, second, third = R * H * F, R * H * F, R * K * F, R * 2 * F
    at_second = first + activated + second
    assert at_second > first + second + third
    assert peak(platform, f, X, array(D, H), array(H, K), array(K, 2)) == at_second


def test_an_elementwise_result_takes_one_operands_place():
    """a * b is wanted by a matmul; it lies over one of its operands, and the other ends too."""

    def f(x, w, v):
        return ((x @ w) * (x @ v)) @ v.T

    factor, result = R * H * F, R * D * F
    at_product = 2 * factor
    assert at_product > factor + result
    assert peak("cuda", f, X, array(D, H), array(D, H)) == at_product


def test_on_tpu_also_an_operands_place_that_was_reshaped_first():
    def f(x, w, v):
        return jnp.sin((x @ w).reshape(H, R)) @ v

    product, result = R * H * F, H * 2 * F
    assert 2 * product > product + result
    assert peak("tpu", f, X, array(D, H), array(R, 2)) == product + result
    assert peak("cuda", f, X, array(D, H), array(R, 2)) == 2 * product


def test_a_transposition_is_a_view_or_on_cpu_a_copy():
    def f(x, w):
        return (x @ w) @ w.T

    product, result, transposed = R * H * F, R * D * F, H * D * F
    assert peak("cuda", f, X, array(D, H)) == product + result
    assert peak("tpu", f, X, array(D, H)) == product + result
    assert peak("cpu", f, X, array(D, H)) == product + transposed + result


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_scatter_is_in_place_over_what_it_scatters_into(platform):
    def f(x, w, at):
        return (x @ w).at[at].set(0.0, mode="promise_in_bounds")

    at = array(1, dtype=jnp.int32)
    assert peak(platform, f, X, array(D, H), at) <= R * H * F + 4 + H * F  # row number, one row


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_scatter_is_not_in_place_over_its_updates(platform):
    """Zeros as large as the updates: compiled for CPU and H100 they are two buffers."""

    def f(x, w, at):
        return jnp.zeros((R, H)).at[at].add(x @ w, mode="promise_in_bounds")

    updates, result, places = R * H * F, R * H * F, R * 4
    at = array(R, dtype=jnp.int32)
    assert updates + result <= peak(platform, f, X, array(D, H), at) <= updates + result + places


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_filled_array_costs_nothing(platform):
    def filled(w):
        return jnp.ones((R, D)).astype(jnp.bfloat16).astype(jnp.float32) @ w

    def computed(w, x):
        return jnp.full((R, D), x.sum()) @ w

    result, total, spread = R * H * F, F, R * D * F
    assert peak(platform, filled, array(D, H)) == result
    found = peak(platform, computed, array(D, H), X)
    assert found == max(total + spread, spread + result) > result


def test_halves_are_whole_floats_on_cpu():
    """Both products (R, H) and (R, K) are bfloat16: 2 bytes, on CPU 4."""

    def f(x, w, v):
        return jnp.tanh(x @ w) @ v

    arrays = [array(*shape, dtype=jnp.bfloat16) for shape in ((R, D), (D, H), (H, K))]
    assert peak("cuda", f, *arrays) == peak("tpu", f, *arrays) == (R * H + R * K) * 2
    assert peak("cpu", f, *arrays) == (R * H + R * K) * 4


def test_a_stack_is_whole_when_its_loop_starts_and_on_cpu_when_the_step_does():
    """A loop stacks its L carries; before it there is a product of K columns, by itself."""

    def f(x, large, layers):
        start = x * (x @ large).sum()
        last, stack = lax.scan(lambda c, w: (c @ w, c), start, layers)
        return last.sum() + stack.sum()

    def most(k):
        arrays = X, array(D, k), array(L, D, D)
        return {platform: peak(platform, f, *arrays) for platform in PLATFORMS}

    stack, carry = L * R * D * F, R * D * F
    loop = stack + 3 * carry  # as it comes, as it leaves, and the body's product
    assert most(1) == dict.fromkeys(PLATFORMS, loop)
    before, its_sum = R * K * F, F
    assert before > loop
    assert most(K) == {
        "cpu": stack + before + its_sum,
        "cuda": before + its_sum,
        "tpu": before + its_sum,
    }


def backward_of(block):
    """The gradient of a scan of blocks, for a cotangent that is given."""

    def f(x, g, ws):
        forward = lambda ws: lax.scan(lambda c, w: (block(c, w), None), x, ws)[0]  # noqa: E731
        return jax.vjp(forward, ws)[1](g)

    return f


def block(c, w):
    return jnp.sin(c @ w[0]) @ w[1]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_backward_loop_with_and_without_recomputation(platform):
    """L blocks, (R, D) to (R, H) to (R, D). Products of weight gradients come last in the body."""
    ws = array(L, D, H), array(L, H, D)
    inputs, gradients, carry = L * R * D * F, 2 * L * D * H * F, R * D * F
    hidden, gradient = R * H * F, D * H * F

    # Recomputed: the sine and the gradient of its argument wait for the two late products; with
    # the second of them the body holds that gradient, both products and the carry it hands on.
    recomputed = hidden + 2 * gradient + carry
    assert recomputed > 3 * hidden
    again = backward_of(jax.checkpoint(block, prevent_cse=False))
    expected = inputs + gradients + carry + recomputed
    assert peak(platform, again, X, X, ws) == expected

    # Kept: sine and cosine are stacked, and the body makes the same without them.
    kept = 2 * L * hidden
    assert peak(platform, backward_of(block), X, X, ws) == expected + kept


def test_products_that_only_make_weight_gradients_come_late_in_a_loop():
    """`first` is an operand of a gradient that is traced before `second`, and made after it."""

    def part(total, x, w, v):
        first = x @ w
        gradient = first.T @ x
        second = jnp.exp(jnp.exp(first) @ v).sum()
        return total + gradient, second

    def f(xs, w, v):
        zeros = jnp.zeros((H, D))
        return lax.scan(lambda total, x: part(total, x, w, v), zeros, xs)

    arrays = array(L, R, D), array(D, H), array(H, 3 * K)
    accumulator, sums = H * D * F, L * F
    first, activated, second, gradient = R * H * F, R * H * F, R * 3 * K * F, H * D * F
    late = first + activated + second
    in_order = max(first + gradient, gradient + activated + second)
    assert late < in_order
    assert peak("cuda", f, *arrays) == accumulator + sums + late
    once = peak("cuda", lambda x, w, v: part(jnp.zeros((H, D)), x, w, v), X, *arrays[1:])
    assert once == in_order  # where there is no loop


def test_what_is_gathered_is_a_buffer_and_what_is_cut_counts_in_part():
    def f(x, w):
        return constrain(x.T @ (x @ constrain(w, None, None)), "data")

    w = array(D, H, spec=("data",))
    gathered, product, gradient = D * H * F, R * H * F, D * H * F // 8
    assert gathered + product > product + gradient
    assert peak("cuda", f, X, w) == gathered + product


def test_a_stack_that_a_loop_gathers_is_copied_on_gpu():
    """A stack (L, D, D) whose rows are cut by 8: its copy is as large as a device's part."""

    def f(x, stack):
        return lax.scan(lambda c, w: (jnp.sin(c @ constrain(w, None, None)), None), x, stack)[0]

    stack = array(L, D, D, spec=(None, "data"))
    carry, gathered, product = R * D * F, D * D * F, R * D * F
    assert peak("tpu", f, X, stack) == carry + gathered + product
    copied = L * D * D * F // 8
    assert peak("cuda", f, X, stack) == carry + gathered + product + copied
    whole = array(L, D, D)  # nothing is gathered
    assert peak("cuda", f, X, whole) == carry + product


def test_results_written_over_arguments_are_not_counted():
    def f(x, w):
        return w - 0.1 * (x.T @ (x @ w))

    product, gradient = R * H * F, D * H * F
    assert peak("cuda", f, X, array(D, H)) == product + gradient


def test_a_callback_is_walked_over():
    def f(x, w):
        h = x @ w
        jax.debug.callback(lambda x: None, h)
        return h.sum()

    product, total = R * H * F, F
    for platform in PLATFORMS:
        assert peak(platform, f, X, array(D, H)) == product + total


def test_every_platform_has_a_margin():
    assert set(MARGIN) == set(PLATFORMS) and all(0 < share < 0.2 for share in MARGIN.values())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_that_are_constrained_to_the_data_axis_are_not_cut_again(platform):
    """A step is traced with one device's rows, whatever its constraints say of the whole batch."""
    batch = array(8 * R, D, spec=("data",))

    def step(w, x):
        return constrain(x @ w, "data").sum()

    region = trace(step, array(D, H), batch)
    product, total = R * H * F, F
    assert temporaries_bytes(region, platform) == product + total
