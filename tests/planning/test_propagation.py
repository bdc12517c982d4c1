"""How cuts travel through a step: each rule on a step that has little but it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import trace

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("two", "four"))
AXES = {1: None, 2: "two", 4: "four", 8: ("two", "four")}


def lies(*cut):
    return NamedSharding(MESH, P(*(AXES[parts] for parts in cut)))


def array(shape, cut, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=lies(*cut))


def constrain(x, *cut):
    return lax.with_sharding_constraint(x, lies(*cut))


def propagated(f, *arrays):
    region = trace(lambda arrays, _: f(*arrays), arrays, ())
    propagate(region)
    return region


def cut_of_result(f, *arrays):
    """The cut of the only result, which nothing constrains."""
    return propagated(f, *arrays).outputs[0].cut


def cuts(region, name):
    """Cuts of the first result of every operation called so."""
    return [op.outputs[0].cut for op in region.operations if op.name == name]


X = array((8, 16), (2, 4))
ROWS, OTHERS = array((2, 32), (1, 1)), array((2, 12), (1, 1))
ROWS_OF_3, OTHERS_OF_3 = array((3, 2, 32), (1, 1, 1)), array((3, 2, 12), (1, 1, 1))


@pytest.mark.parametrize(
    ("f", "cut"),
    [
        (jnp.sin, (2, 4)),
        (lambda x: x + 1, (2, 4)),
        (lambda x: x.astype(jnp.bfloat16), (2, 4)),
        (lambda x: constrain(x, 1, 2), (1, 2)),
        (lambda x: constrain(x, 1, 1), (1, 1)),
        (lambda x: x.T, (4, 2)),
        (lambda x: lax.broadcast_in_dim(x, (8, 3, 16), (0, 2)), (2, 1, 4)),
        (lambda x: x[:, None] * jnp.ones((8, 3, 16)), (2, 1, 4)),
        (lambda x: x.sum(), ()),
        (lambda x: x.sum(axis=0), (4,)),
        (lambda x: x.max(axis=1), (2,)),
        (lambda x: x.min(axis=1), (2,)),
        (lambda x: jnp.argmax(x, axis=1), (2,)),
    ],
)
def test_forward_rules(f, cut):
    assert cut_of_result(f, X) == cut


@pytest.mark.parametrize(
    ("shape", "cut", "into", "result"),
    [
        ((16, 3), (8, 1), (8, 2, 3), (8, 1, 1)),  # split: the outer of both
        ((16, 3), (8, 1), (2, 8, 3), (1, 1, 1)),  # 2 do not divide by 8
        ((16, 3), (2, 1), (2, 8, 3), (2, 1, 1)),
        ((8, 3), (8, 1), (24,), (8,)),  # joined: it was the outer
        ((3, 8), (1, 8), (24,), (1,)),  # joined: it was the inner, its pieces lie scattered
        ((3, 8), (1, 8), (3, 8, 1), (1, 8, 1)),
        ((3, 8), (1, 8), (3, 2, 4), (1, 1, 1)),
        ((3, 8), (1, 4), (3, 4, 2), (1, 4, 1)),
        ((4, 8), (2, 4), (32,), (2,)),
        ((16,), (8,), (1, 16), (1, 8)),
        ((2, 4, 8), (2, 1, 4), (8, 8), (2, 4)),
    ],
)
def test_a_cut_dim_that_is_reshaped(shape, cut, into, result):
    assert cut_of_result(lambda x: x.reshape(into), array(shape, cut)) == result


@pytest.mark.parametrize(
    ("x", "w", "cut"),
    [
        (((6, 8), (1, 1)), ((8, 12), (1, 4)), (1, 4)),  # columns
        (((6, 8), (2, 1)), ((8, 12), (1, 4)), (2, 4)),  # rows and columns
        (((6, 8), (1, 4)), ((8, 12), (4, 1)), (1, 1)),  # the dim that is summed over is gone
        (((4, 6, 8), (4, 1, 1)), ((4, 8, 12), (1, 1, 2)), (4, 1, 2)),  # batched: one says it
        (((4, 6, 8), (4, 1, 1)), ((4, 8, 12), (4, 1, 1)), (4, 1, 1)),  # or both do
    ],
)
def test_matmuls_hand_on_outer_and_batch_dims(x, w, cut):
    assert cut_of_result(jnp.matmul, array(*x), array(*w)) == cut


def test_elementwise_takes_the_finest_cut_of_dims_of_its_size():
    assert cut_of_result(jnp.add, array((8, 8), (2, 1)), array((8, 8), (1, 4))) == (2, 4)
    assert cut_of_result(jnp.add, array((8, 8), (2, 1)), array((8, 8), (4, 1))) == (4, 1)
    cut = (4, 1)
    assert cut_of_result(lambda x: x[:13], array((16, 3), cut)) == cut  # padding: under 4 rows
    assert cut_of_result(lambda x: jnp.pad(x, ((0, 3), (0, 0))), array((12, 3), cut)) == cut
    assert cut_of_result(lambda x: x[:12], array((16, 3), cut)) == (1, 1)  # a part of it


@pytest.mark.parametrize(
    "f",
    [
        lambda g: g,
        lambda g: g * 2,
        lambda g: g.astype(jnp.bfloat16),
        lambda g: g.T.T,
        lambda g: g.reshape(8, 4, 12).reshape(32, 12),
        lambda g: g.reshape(32, 1, 12).squeeze(1),
        lambda g: -g + 1,
    ],
)
def test_a_gradient_that_is_constrained_later_is_computed_cut(f):
    """(32, r) times (r, 12), then `f` of it, cut by 8 at last: no device makes more than 4 rows."""
    g = propagated(lambda x, y: constrain(f(x.T @ y), 8, 1), ROWS, OTHERS)
    assert cuts(g, "dot_general") == [(8, 1)]
    product = next(op for op in g.operations if op.name == "dot_general")
    assert product.outputs[0].bytes_per_device == 32 // 8 * 12 * 4


def test_a_transposed_gradient_is_cut_where_its_dim_goes():
    g = propagated(lambda x, y: constrain((y.T @ x).T, 8, 1), ROWS, OTHERS)
    assert cuts(g, "dot_general") == [(1, 8)] and cuts(g, "transpose")[-1] == (8, 1)


def test_what_is_read_whole_as_well_is_computed_whole():
    def f(x, y):
        g = x.T @ y
        return constrain(g, 8, 1), jnp.sin(g) @ y.T

    assert cuts(propagated(f, ROWS, OTHERS), "dot_general") == [(1, 1), (1, 1)]


def test_what_a_matmul_a_sum_or_a_split_reads_is_not_cut_by_its_result():
    x, y = array((8, 8), (1, 1)), array((8, 8), (1, 1))
    product = propagated(lambda x, y: constrain(jnp.sin(x) @ y, 8, 1), x, y)
    assert cuts(product, "sin") == [(1, 1)] and cuts(product, "dot_general") == [(8, 1)]
    total = propagated(lambda x: constrain(jnp.sin(x).sum(1), 8), x)
    assert cuts(total, "sin") == [(1, 1)]
    halves = propagated(lambda x: [constrain(h, 4, 1) for h in jnp.split(jnp.sin(x), 2)], x)
    assert cuts(halves, "sin") == [(1, 1)]


def test_a_constraint_is_not_overruled_by_its_reader():
    """Gathered, then cut again: the gather moves all of it."""
    f = propagated(lambda x: constrain(constrain(jnp.sin(x), 1, 1), 8, 1), array((8, 8), (8, 1)))
    assert cuts(f, "sharding_constraint") == [(1, 1), (8, 1)]


def accumulate(x, y):
    """A sum of 3 products (32, 12), its result cut by 8."""
    zeros = jnp.zeros((32, 12))
    total, _ = lax.scan(lambda total, xy: (total + xy[0].T @ xy[1], None), zeros, (x, y))
    return constrain(total, 8, 1)


def test_an_accumulator_whose_result_is_constrained_is_cut():
    region = propagated(accumulate, ROWS_OF_3, OTHERS_OF_3)
    (body,) = next(op for op in region.operations if op.name == "scan").regions
    assert cuts(region, "scan") == [(8, 1)]
    assert cuts(region, "broadcast_in_dim") == [(8, 1)]  # the zeros that it starts with
    assert cuts(body, "add") == cuts(body, "dot_general") == [(8, 1)]


def test_a_carry_that_comes_cut_stays_cut():
    def f(x, w):
        return lax.scan(lambda c, _: (c * 2, c), jnp.sin(x) * w, None, length=3)

    region = propagated(f, array((8, 8), (8, 1)), array((8, 8), (1, 1)))
    (scan,) = (op for op in region.operations if op.name == "scan")
    carry, stacked = scan.outputs
    assert carry.cut == (8, 1) and scan.regions[0].inputs[0].cut == (8, 1)
    assert cuts(scan.regions[0], "mul") == [(8, 1)]
    assert stacked.cut == (1, 1, 1)  # what is not followed counts whole


def test_a_stack_of_gradients_is_made_cut():
    """A scan stacks 3 products; the stack is cut later, so each product is."""

    def f(x, y):
        _, stack = lax.scan(lambda c, xy: (c, xy[0].T @ xy[1]), 0.0, (x, y))
        return constrain(stack, 1, 8, 1)

    region = propagated(f, ROWS_OF_3, OTHERS_OF_3)
    (scan,) = (op for op in region.operations if op.name == "scan")
    assert scan.outputs[-1].cut == (1, 8, 1)
    assert cuts(scan.regions[0], "dot_general") == [(8, 1)]


def test_loops_hand_the_cuts_of_constants_and_stacks_to_their_bodies():
    def f(stack, w, x):
        return lax.scan(lambda x, layer: (jnp.sin(x @ layer) @ w, None), x, stack)[0]

    region = propagated(
        f, array((3, 4, 16), (1, 1, 4)), array((16, 4), (1, 2)), array((5, 4), (1, 1))
    )
    (scan,) = (op for op in region.operations if op.name == "scan")
    w, _, layer = scan.regions[0].inputs
    assert (w.cut, layer.cut) == ((1, 2), (1, 4))
    assert cuts(scan.regions[0], "sin") == [(1, 4)]


def test_branches_and_whiles_get_the_cuts_of_what_they_read():
    x = array((8, 8), (8, 1))
    branch = propagated(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x)
    loop = propagated(lambda x: lax.while_loop(lambda x: x[0, 0] < 1, jnp.sin, x), x)
    for region, name in ((branch, "cond"), (loop, "while")):
        (op,) = (op for op in region.operations if op.name == name)
        assert cuts(op.regions[-1], "sin") in ([(8, 1)], []) and op.outputs[0].cut == (8, 1)
        assert all(x.cut == (8, 1) for body in op.regions for x in body.inputs)


def test_within_a_shard_map_shapes_are_those_of_one_device():
    """(16, 3) cut by 8: within it is (2, 3), of which a device has all; outside it is cut again."""

    def f(x):
        cut = lies(8, 1).spec
        return jax.shard_map(jnp.sin, mesh=MESH, in_specs=cut, out_specs=cut)(x)

    region = propagated(f, array((16, 3), (8, 1)))
    assert [op.name for op in region.operations] == ["to_local", "sin", "to_global"]
    local = region.operations[1].outputs[0]
    assert (local.shape, local.cut) == ((16 // 8, 3), (1, 1))
    assert (region.outputs[0].shape, region.outputs[0].cut) == ((16, 3), (8, 1))


@pytest.mark.parametrize(
    ("cut", "then", "gathers"),
    [
        ((8, 1), (1, 1), True),
        ((2, 4), (1, 1), True),
        ((2, 4), (2, 4), False),
        ((1, 1), (8, 1), False),
    ],
)
def test_whether_a_step_gathers(cut, then, gathers):
    def gather(x):
        return constrain(x, *then) * 2

    x = array((8, 8), cut)
    assert propagated(gather, x).gathers == gathers
    stack = array((3, 8, 8), (1, *cut))
    loop = propagated(lambda xs: lax.scan(lambda c, x: (c, gather(x)), 0.0, xs), stack)
    assert loop.gathers == gathers


@pytest.mark.parametrize("p", [2, 4])
def test_megatrons_pair_sums_its_result_once_forward_and_once_backward(p):
    """Columns of the first matrix are cut, rows of the second: the second product is a partial sum.

    An all-reduce over p devices sends 2 (p-1)/p of what is summed. Backward the gradient of the
    input is the partial sum, and is as large.
    """
    rows, width, hidden, layers = 6, 8, 16, 3

    def forward(x, up, down):
        def block(x, w):
            return jnp.tanh(x @ w[0]) @ w[1], None

        return lax.scan(block, x, (up, down))[0]

    x = array((rows, width), (1, 1))
    up, down = array((layers, width, hidden), (1, 1, p)), array((layers, hidden, width), (1, p, 1))
    result_bytes = rows * width * 4
    sent_bytes = 2 * (p - 1) * result_bytes // p
    assert propagated(forward, x, up, down).summed_bytes == layers * sent_bytes
    backward = jax.grad(lambda *a: (forward(*a) ** 2).sum(), argnums=(0, 1, 2))
    assert propagated(backward, x, up, down).summed_bytes == 2 * layers * sent_bytes


def test_a_data_parallel_step_sums_nothing_over_the_model():
    def step(w, x):
        return w - constrain(jax.grad(lambda w: ((x @ w) ** 2).sum())(w), 8, 1)

    assert propagated(step, array((16, 3), (1, 1)), array((4, 16), (1, 1))).summed_bytes == 0


def test_an_operation_without_results_passes():
    def f(x):
        jax.debug.callback(lambda x: None, jnp.sin(x))
        return constrain(x * 2, 8, 1)

    assert cuts(propagated(f, array((8, 8), (1, 1))), "mul") == [(8, 1)]
