"""A traced step: which operations it has, of what size on one device, and their matmuls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import Value, cut_of, trace
from zero_jax.reporting.hlo import audit

MESH = Mesh(np.array(jax.devices()), ("data",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def array(*shape, spec=(), mesh=MESH, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def names(region):
    return [op.name for op in region.operations]


def names_of(f, *shape):
    return names(trace(lambda state, batch: f(state), array(*shape), ()))


def test_flops_are_those_of_hand_arithmetic_and_of_the_compiled_step():
    """A stack of LAYERS scanned and a head, gradients cut over 8 devices; ROWS / 8 rows each."""
    rows, width, layers, classes = 16, 8, 3, 5

    def step(state, x):
        def loss(state):
            h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, state["stack"])
            return jnp.mean((h @ state["head"]) ** 2)

        grads = jax.grad(loss)(state)
        parts = {"stack": P(None, "data"), "head": P("data")}
        return {
            name: state[name] - lax.with_sharding_constraint(g, NamedSharding(MESH, parts[name]))
            for name, g in grads.items()
        }

    state = {"stack": array(layers, width, width), "head": array(width, classes)}
    batch = array(rows, width, spec=P("data"))
    region = trace(step, state, batch)
    propagate(region)

    mine, products = rows // 8, 3  # forward, gradient of the weights, gradient of the input
    layer = 2 * mine * width * width
    head = 2 * mine * width * classes
    assert region.matmul_flops == products * (layers * layer + head)
    compiled = jax.jit(step).lower(state, batch).compile()
    assert region.matmul_flops == audit(compiled, MESH).matmul_flops


def test_flops_of_operands_that_are_cut():
    """x (6, 8) times w (8, 12) over 4 devices, and a batch of 10 products of (2, 3) and (3, 5)."""

    def flops(x, w):
        return trace(lambda state, _: state[0] @ state[1], (x, w), ()).matmul_flops

    x, w = array(6, 8, mesh=GRID), array(8, 12, spec=P(None, "model"), mesh=GRID)
    assert flops(x, w) == 2 * 6 * 8 * (12 // 4)  # each device makes some columns
    x = array(6, 8, spec=P(None, "model"), mesh=GRID)
    w = array(8, 12, spec=P("model"), mesh=GRID)
    assert flops(x, w) == 2 * 6 * (8 // 4) * 12  # each device sums over some terms
    assert flops(array(10, 2, 3), array(10, 3, 5)) == 10 * 2 * 2 * 3 * 5


def test_flops_of_loops_and_branches():
    """A loop in a loop counts 4 x 3 times, a while of unknown length once, a branch if largest."""
    w, x = array(8, 8), array(2, 8)
    product = 2 * 2 * 8 * 8

    def times(n, f):
        return lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=n)[0]

    nested = trace(lambda w, x: times(4, times(3, lambda x: x @ w))(x), w, x)
    assert nested.matmul_flops == 4 * 3 * product
    unknown = trace(
        lambda w, x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w @ w, x), w, x
    )
    assert unknown.matmul_flops == 2 * product
    branches = trace(
        lambda w, x: lax.cond(x[0, 0] < 1, lambda x: x @ w, lambda x: x @ w @ w @ w, x), w, x
    )
    assert branches.matmul_flops == 3 * product


def test_a_device_has_its_rows_of_the_batch_and_the_logical_state():
    state, batch = array(64, 8, spec=P("data")), array(32, 8, spec=P("data"))
    weights, rows = trace(lambda w, x: x @ w.T, state, batch).inputs
    assert (rows.shape, rows.cut, rows.bytes_per_device) == ((32 // 8, 8), (1, 1), 4 * 8 * 4)
    assert (weights.shape, weights.cut) == ((64, 8), (8, 1))
    assert weights.bytes_per_device == 64 // 8 * 8 * 4
    both = array(32, 8, spec=P(("data", "model")), mesh=GRID)
    assert trace(lambda _, x: x + 1, (), both).inputs[0].shape == (32 // 8, 8)
    bare = jax.ShapeDtypeStruct((32, 8), jnp.float32)  # not placed: whole on every device
    assert trace(lambda _, x: x + 1, (), bare).inputs[0].shape == (32, 8)


def test_bytes_of_a_value():
    assert Value((6, 10), 2).bytes_per_device == 6 * 10 * 2
    assert Value((6, 10), 2, cut=(4, 5)).bytes_per_device == 2 * 2 * 2  # 6 / 4 is rounded up to 2
    assert Value((), 4).bytes_per_device == 4 and not Value((3,), 4).is_cut
    bf16, fp32 = trace(lambda s, _: s, (array(3, dtype=jnp.bfloat16), array(3)), ()).inputs
    assert (bf16.itemsize, bf16.half, fp32.itemsize, fp32.half) == (2, True, 4, False)


@pytest.mark.parametrize(
    ("spec", "cut"),
    [
        (P(), (1, 1, 1)),
        (P("model"), (4, 1, 1)),
        (P(None, ("data", "model"), None), (1, 2 * 4, 1)),
        (P("data", None, "model"), (2, 1, 4)),
    ],
)
def test_cuts_of_a_sharding(spec, cut):
    assert cut_of((8, 8, 8), NamedSharding(GRID, spec)) == cut


def test_a_sharding_without_axes_cuts_nothing():
    assert cut_of((8,), SingleDeviceSharding(jax.devices()[0])) == () == cut_of((8,), None)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


@jax.custom_jvp
def cosine(x):
    return jnp.cos(x)


cosine.defjvp(lambda x, t: (jnp.cos(x[0]), -t[0] * jnp.sin(x[0])))


@pytest.mark.parametrize(
    ("call", "inlined"),
    [
        (jax.jit(jnp.sin), ["sin"]),
        (jax.jit(jax.jit(jnp.sin)), ["sin"]),
        (jax.checkpoint(jnp.sin), ["sin"]),
        (sine, ["sin"]),
        (cosine, ["cos"]),
        (jax.checkpoint(jax.jit(sine)), ["sin"]),
    ],
)
def test_calls_are_inlined(call, inlined):
    assert names_of(lambda x: call(x) * x, 3) == [*inlined, "mul"]


def test_what_is_recomputed_is_traced_again():
    def loss(x):
        return jax.checkpoint(lambda x: jnp.exp(jnp.sin(x)))(x).sum()

    assert names_of(jax.value_and_grad(loss), 3).count("sin") == 2


def test_work_that_nobody_reads_is_left_out_and_effects_are_kept():
    def step(w, x):
        unused = jax.jit(lambda: x @ w)()  # in a call, whose output is dropped
        jax.debug.callback(lambda s: None, x.sum())
        return jnp.sin(w), jnp.exp(unused)

    found = names(trace(lambda w, x: step(w, x)[0], array(8, 8), array(2, 8)))
    assert "dot_general" not in found and "exp" not in found
    assert found[-1] == "sin" and "reduce_sum" in found  # which the callback reads
    assert len(found) == 3


def test_the_same_gather_twice_is_made_once():
    whole, other = NamedSharding(MESH, P(None, None)), NamedSharding(MESH, P(None, "data"))

    def gathered(w, x, again):
        once = lax.with_sharding_constraint(w, whole)
        twice = jax.jit(lambda w: lax.with_sharding_constraint(w, again))(w)
        return x @ once + x @ twice

    def count(again):
        w, x = array(8, 8, spec=P("data")), array(2, 8)
        return names(trace(lambda w, x: gathered(w, x, again), w, x)).count("sharding_constraint")

    assert (count(whole), count(other)) == (1, 2)


def test_bodies_have_inputs_of_their_own():
    """A loop over 5 of (3,): the region sees one of them, the scan all."""

    def step(state, x):
        return lax.scan(lambda c, x: (c + x, c * x), state, x)

    (scan,) = trace(step, array(3), array(5, 3)).operations
    (body,) = scan.regions
    assert scan.params["length"] == 5
    assert [x.shape for x in scan.inputs] == [(3,), (5, 3)]
    assert [x.shape for x in body.inputs] == [(3,), (3,)] and all(x.given for x in body.inputs)
    assert [y.shape for y in scan.outputs] == [(3,), (5, 3)]
    assert sorted(names(body)) == ["add", "mul"]


def test_a_while_hands_its_body_what_the_body_reads():
    """Constants of the condition come first among the inputs, and are not the body's."""

    def step(state, limit):
        scale = jnp.sin(state)
        return lax.while_loop(lambda x: x.sum() < limit.sum(), lambda x: x * scale, state)

    loop = trace(step, array(3), array(7)).operations[-1]
    assert loop.name == "while" and len(loop.inputs) == 3
    assert [x.shape for x in loop.regions[0].inputs] == [(3,), (3,)]


def test_a_convolution_counts_as_the_matmuls_it_is():
    """Forward, and backward for the kernel and the image: three times the same terms."""
    rows, side, inward, outward, window = 2, 8, 3, 5, 3
    terms = rows * side * side * outward * inward * window * window

    def forward(kernel, image):
        return lax.conv(image, kernel, (1, 1), "SAME").sum()

    arrays = array(outward, inward, window, window), array(rows, inward, side, side)

    def flops(f):
        region = trace(f, *arrays)
        propagate(region)
        return region.matmul_flops

    assert flops(forward) == 2 * terms
    both = flops(lambda *xs: jax.grad(lambda *xs: forward(*xs) ** 2, argnums=(0, 1))(*xs))
    assert both == 3 * 2 * terms


@pytest.mark.parametrize(("part", "trips"), [("data", 7), (None, 0)])
def test_weights_that_a_loop_shares_are_reduced_in_every_trip(part, trips):
    """A recurrence over 7 steps whose gradient is cut; a stack of 3 layers has no such sum."""

    def step(state, x):
        def loss(state):
            shared, stack = state
            h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ shared), None), x, None, length=7)
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stack)[0].sum()

        shared, stack = jax.grad(loss)(state)
        return lax.with_sharding_constraint(shared, NamedSharding(MESH, P(part))), stack

    region = trace(step, (array(8, 8), array(3, 8, 8)), array(4, 8))
    propagate(region)
    assert region.trips_that_reduce == trips


def test_what_a_loop_carries_for_nobody_is_left_out():
    """Of three carries the result needs the first, and that reads the second."""

    def step(state, _):
        def body(carry, _):
            a, b, c = carry
            return (a + b, jnp.sin(b), jnp.cos(c)), None

        return lax.scan(body, (state, state, state), None, length=4)[0][0]

    (loop,) = (op for op in trace(step, array(3), ()).operations if op.name == "scan")
    assert sorted(names(loop.regions[0])) == ["add", "sin"]
