"""The layer loop: gradients are a plain loop's, each layer crosses the wire once a pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.at_use import Partitioned, Wire
from zero_jax.collectives import Cut
from zero_jax.layers import scan_layers
from zero_jax.layers_nnx import scan_layers_nnx
from zero_jax.reporting.hlo import audit, collectives

DEVICES, WIDTH, HIDDEN, ROWS = 8, 16, 24, 16
SAVE_ALL = jax.checkpoint_policies.everything_saveable
SAVE_DOTS = jax.checkpoint_policies.dots_saveable


def layer(params, x, scale, positions, key=None):
    """A residual layer: a broadcast input, an integer one, dropout, outputs of two kinds."""
    hidden = jnp.tanh(x @ params["up"] + params["bias"]) * scale
    if key is not None:
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    x = x + jnp.sin(positions.astype(x.dtype)) * (hidden @ params["down"])
    return x, {"aux": (hidden**2).mean(), "count": jnp.int32(hidden.size)}


def layer_of(stacked, i):
    return jax.tree.map(lambda leaf: leaf[i], stacked)


def plain_loop(stacked, x, scale, positions, rng=None):
    outs = []
    for i in range(stacked["up"].shape[0]):
        keys = () if rng is None else (jax.random.fold_in(rng, i),)
        x, out = layer(layer_of(stacked, i), x, scale, positions, *keys)
        outs.append(out)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def make_stack(layers):
    keys = jax.random.split(jax.random.key(7), 3)
    shapes = {"up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    return {
        name: jax.random.normal(key, (layers, *shape)) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


X = np.asarray(jax.random.normal(jax.random.key(1), (ROWS, WIDTH)))
SCALE = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)
POSITIONS = np.arange(WIDTH, dtype=np.int32)


def loss_of(loop):
    """The last x and the outputs, both in the loss: later layers' outputs weigh more."""

    def loss(stacked, x, scale):
        y, outs = loop(stacked, x, scale, POSITIONS)
        return (y**2).mean() + (outs["aux"] * (1 + jnp.arange(len(outs["aux"])))).sum()

    return loss


def close(got, want, tolerance=1e-6):
    """Equal to `tolerance` of each leaf's largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


SCHEDULES = [(1, 1, None), (5, 1, None), (5, 3, None), (5, "sqrt", SAVE_ALL)]
SCHEDULES += [(5, 1, SAVE_DOTS), (7, 2, SAVE_DOTS)]


@pytest.mark.parametrize("layers, every, policy", SCHEDULES)
def test_gradients_outside_of_any_step_are_those_of_a_plain_loop(layers, every, policy):
    rng = jax.random.key(3) if layers > 2 else None
    options = {"rng": rng, "checkpoint_every": every, "remat_policy": policy}
    given = make_stack(layers), X, SCALE
    want = jax.value_and_grad(loss_of(partial(plain_loop, rng=rng)), (0, 1, 2))(*given)
    loop = loss_of(partial(scan_layers, layer, **options))
    close(jax.jit(jax.value_and_grad(loop, (0, 1, 2)))(*given), want)


def test_values_without_a_gradient():
    stacked = make_stack(5)
    want = plain_loop(stacked, X, SCALE, POSITIONS)
    got = scan_layers(layer, stacked, X, SCALE, POSITIONS)
    close(got, want)
    assert got[1]["count"].dtype == jnp.int32


def test_what_the_layer_closes_over_has_its_gradient():
    stacked = make_stack(4)

    def loss(scale, loop):
        return loop(lambda p, x: layer(p, x, scale, POSITIONS)[0], stacked, jnp.asarray(X)).sum()

    def plain(fn, stacked, x):
        for i in range(4):
            x = fn(layer_of(stacked, i), x)
        return x

    close(jax.grad(loss)(SCALE, scan_layers), jax.grad(loss)(SCALE, plain))


def test_inside_remat_and_a_scan_over_microbatches():
    stacked, rows = make_stack(3), X.reshape(2, ROWS // 2, WIDTH)

    def loss(stacked, loop):
        def microbatch(total, x):
            y, outs = jax.checkpoint(loop)(stacked, x, SCALE, POSITIONS)
            return total + (y**2).sum() + outs["aux"].sum(), None

        return jax.lax.scan(microbatch, 0.0, rows)[0]

    want = jax.grad(loss)(stacked, plain_loop)
    close(jax.grad(loss)(stacked, partial(scan_layers, layer)), want)


def test_trees_integers_and_scalars_may_go_from_layer_to_layer():
    weights = jnp.arange(1.0, 4.0)

    def fn(w, carry):
        x, (steps, total) = carry
        return x * w, (steps + 1, total + x * w)

    def loss(weights, x):
        x, (steps, total) = scan_layers(fn, weights, (x, (0, 0.0)))
        return total * steps

    # x, 2x, 6x after the three layers: the sum is 9x.
    value, grads = jax.value_and_grad(loss, (0, 1))(weights, 2.0)
    assert value == 9 * 2.0 * 3 and grads[1] == 9 * 3.0
    close(grads[0], jnp.array([9.0, 8 / 2, 6 / 3]) * 6)  # 2 (a + ab + abc) 3, at 1, 2, 3


def test_cotangents_of_broadcast_inputs_are_summed_in_fp32():
    # 300 layers of 1: bf16 sums stop at 256, since 256 + 1 is 256 there.
    def loss(b):
        return scan_layers(lambda _, x, b: x + b.astype(jnp.float32), jnp.zeros(300), 0.0, b)

    assert jax.grad(loss)(jnp.bfloat16(1.0)) == 300


def wire_of(name, shape, stage):
    """The wire of a stacked leaf: cut along the first dim of a layer; the bias is padded to 24."""
    whole = Cut(shape, shape, None, (), 1)
    cut = Cut(shape, shape, 1, ("data",), DEVICES)
    rest, grad = {0: (whole, whole), 2: (whole, cut), 3: (cut, cut)}[stage]
    summed = ("data",) if stage == 0 else ()
    return Wire(name, rest, grad, jnp.float32, jnp.float32, True, summed)


def sharded(stage, layers, frozen=(), fn=layer, **options):
    """(stacked, x, scale) -> (loss, gradients of the stack) on eight devices, as a step does it."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    stack = make_stack(layers)
    wires = {name: wire_of(name, leaf.shape, stage) for name, leaf in stack.items()}
    trained = [name for name in stack if name not in frozen]

    def local(values, x, scale):
        carriers = {name: wires[name].carrier() for name in trained}

        def loss(carriers):
            handles = {n: Partitioned(values[n], carriers.get(n), wires[n]) for n in stack}
            loop = partial(scan_layers, fn, **options)
            return loss_of(loop)(handles, x, scale) / DEVICES

        value, grads = jax.value_and_grad(loss)(carriers)
        return jax.lax.psum(value, "data"), grads

    def spec(cut):
        return P() if cut.dim is None else P(None, "data")

    rest = {name: spec(wires[name].rest) for name in stack}
    grads = {name: spec(wires[name].grad) for name in trained}
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rest, P("data"), P()),
        out_specs=(P(), grads),
        check_vma=False,
    )
    return jax.jit(mapped)


STAGES = [
    (3, 1, 1),
    (3, 2, 1),
    (3, 5, 1),
    (3, 6, 1),
    (3, 7, "sqrt"),
    (0, 5, 1),
    (2, 5, 1),
    (2, 5, 3),
]


@pytest.mark.parametrize("stage, layers, every", STAGES)
def test_stages_agree_with_a_plain_loop(stage, layers, every):
    key = jax.random.key(3)
    stacked, x = make_stack(layers), jnp.tile(X[:2], (8, 1))  # dropout is the same on every device
    step = sharded(stage, layers, rng=key, checkpoint_every=every)
    plain = loss_of(partial(plain_loop, rng=key))
    close(step(stacked, x, SCALE), jax.value_and_grad(plain)(stacked, X[:2], SCALE), 2e-6)


# Of one layer the compiler keeps the gathered parameters for the backward pass.
@pytest.mark.parametrize("layers", [2, 5, 6])
def test_each_layer_is_gathered_once_a_pass_and_reduced_once(layers):
    compiled = sharded(3, layers).lower(make_stack(layers), X, SCALE).compile()
    found = collectives(compiled)
    layer_bytes = 4 * (2 * WIDTH * HIDDEN + HIDDEN)
    # To the byte: layers forward, layers backward, layers reduced.
    for kind, passes in (("all-gather", 2), ("reduce-scatter", 1)):
        sent = sum(c.total_bytes for c in found if c.kind == kind)
        assert sent == passes * layers * layer_bytes * (DEVICES - 1) // DEVICES, kind


def test_fewer_inputs_cost_one_more_gather_but_of_a_groups_last_layer():
    # Groups of 1, 3, 3 layers: 7 forward, 7 backward, and 0 + 2 + 2 to compute inputs again.
    compiled = sharded(3, 7, checkpoint_every=3).lower(make_stack(7), X, SCALE).compile()
    sent = sum(c.total_bytes for c in collectives(compiled) if c.kind == "all-gather")
    layer_bytes = 4 * (2 * WIDTH * HIDDEN + HIDDEN)
    assert sent == (7 + 7 + 4) * layer_bytes * (DEVICES - 1) // DEVICES


def test_frozen_leaves_have_no_gradient_computed_or_reduced():
    stacked, frozen = make_stack(5), ("up", "bias")
    step = sharded(3, 5, frozen)
    _, grads = step(stacked, jnp.tile(X[:2], (8, 1)), SCALE)
    want = jax.grad(loss_of(plain_loop))(stacked, X[:2], SCALE)
    close(grads, {"down": want["down"]}, 2e-6)
    report = audit(step.lower(stacked, X, SCALE).compile())
    product = 2 * (ROWS // DEVICES) * WIDTH * HIDDEN
    # Forward both products, again the first, whose result is needed; gradients of x through both,
    # of down's weight and not of up's. In the first layer nobody asks for those of x.
    assert report.matmul_flops == (5 * (2 + 1 + 3) - 2) * product
    reduced = report.bytes_by_kind["reduce-scatter"]
    assert reduced == 5 * 4 * HIDDEN * WIDTH * (DEVICES - 1) // DEVICES


def test_inputs_nobody_differentiates_cost_nothing():
    def sums_carried(argnums):
        grad = jax.grad(loss_of(partial(scan_layers, layer)), argnums)
        return str(jax.make_jaxpr(grad)(make_stack(3), X, SCALE)).count("f32[24] = add")

    assert sums_carried((0, 2)) > sums_carried((0,)) == 0


DEEP, NARROW, MANY_ROWS = 1000, 8, 64


def deep(w, x, loop):
    """A residual network of 1000 layers: three or four arrays of x's size inside of each."""

    def block(w, x):
        return x + jnp.tanh(jax.nn.relu(x @ w["a"]) @ w["b"])

    return (loop(block, w, x) ** 2).mean()


def everything_kept(block, w, x):
    return jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0]


ROOT = partial(scan_layers, checkpoint_every="sqrt", remat_policy=SAVE_ALL)


def test_a_thousand_layers_with_the_square_root_schedule():
    stack = jax.ShapeDtypeStruct((DEEP, NARROW, NARROW), jnp.float32)
    given = {"a": stack, "b": stack}, jax.ShapeDtypeStruct((MANY_ROWS, NARROW), jnp.float32)

    def report(loop):
        return audit(jax.jit(jax.grad(partial(deep, loop=loop))).lower(*given).compile())

    root, kept = report(ROOT), report(everything_kept)
    assert root.memory and kept.memory
    # 1000 times those arrays; against 32 inputs and 32 times those arrays.
    assert kept.memory.temp_bytes >= DEEP * 3 * MANY_ROWS * NARROW * 4
    assert root.memory.temp_bytes <= kept.memory.temp_bytes / 6.9
    # Forward 1, backward 2; one forward more. 1.33 in Chen et al., which is 4/3.
    assert root.matmul_flops * 3 <= kept.matmul_flops * 4


def test_a_thousand_layers_run_and_have_the_same_gradients():
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (jax.random.normal(k, (DEEP, NARROW, NARROW)) / 30 for k in keys[:2])
    x = jax.random.normal(keys[2], (MANY_ROWS, NARROW))
    root, kept = (
        jax.jit(jax.value_and_grad(partial(deep, loop=loop)))({"a": a, "b": b}, x)
        for loop in (ROOT, everything_kept)
    )
    close(root, kept, 1e-5)


BAD_LAYERS = {
    "a shape": (lambda w, x: x[:2], r"fn changed x from float32\[16, 16\] to float32\[2, 16\]"),
    "a dtype": (lambda w, x: x.astype(jnp.bfloat16), "to bfloat16"),
    "a structure": (lambda w, x: {"x": x}, "fn was given x of the structure"),
    "a pair": (lambda w, x: ([x], x), "the first of the pair it returned"),
}


@pytest.mark.parametrize("fn, letter", BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_a_layer_that_changes_x_is_told(fn, letter):
    with pytest.raises(ValueError, match=letter):
        scan_layers(fn, make_stack(2), X)


BAD_STACKS = {
    "lengths": ({"a": np.zeros((2, 3)), "b": np.zeros((4, 3))}, r"\['a'\] has 2 layers"),
    "no leaves": ({}, "no leaves"),
    "no layers": (np.zeros((0, 3)), "has 0 layers"),
    "a scalar": ({"a": np.zeros(2), "b": 1.0}, r"\['b'\] is a scalar"),
}


@pytest.mark.parametrize("stacked, letter", BAD_STACKS.values(), ids=BAD_STACKS)
def test_a_stack_that_is_none_is_told(stacked, letter):
    with pytest.raises(ValueError, match=letter):
        scan_layers(lambda w, x: x, stacked, X)


@pytest.mark.parametrize("every", [0, 1.5, "root"])
def test_a_number_of_layers_that_is_none_is_told(every):
    with pytest.raises(ValueError, match=f"every={every!r}; a number of layers"):
        scan_layers(lambda w, x: x, make_stack(2), X, checkpoint_every=every)


def test_an_nnx_stack_without_parameters_is_told():
    with pytest.raises(ValueError, match="stack: the Dropout has no parameters, so it has no num"):
        scan_layers_nnx(nnx.Dropout(0.0), X)
