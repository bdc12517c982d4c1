"""How a loss reads its parameters: found in a trace, without a compile.

Each program says what it expects of every one of its parameters. What a step makes of a reading, in
bytes on the wire, is in `laws/test_read_once.py`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from zero_jax.at_use import Partitioned, Wire
from zero_jax.at_use_nnx import hand_over
from zero_jax.collectives import Cut
from zero_jax.flax_nnx import parameters_of
from zero_jax.readings import find_readings

X = jnp.ones((4, 6, 8))


def boxed(path, value):
    """A parameter as the step hands it to a model, on one device, in bf16: so reading it shows."""
    cut = Cut(value.shape, value.shape, None, (), 1)
    return Partitioned(value, None, Wire(path, cut, cut, jnp.bfloat16, value.dtype, True))


def readings(loss, params, *more):
    """Path -> reading, for a loss of a flat dict of parameters."""

    def trace(values, *more):
        return loss({path: boxed(path, values[path]) for path in values}, *more)

    closed = jax.make_jaxpr(trace)(params, *more)
    return find_readings(closed.jaxpr, dict(zip(closed.jaxpr.invars, sorted(params), strict=False)))


def of_linen(module, *inputs):
    """Readings of a linen module's parameters."""
    flat = nn.FrozenDict(module.init(jax.random.key(0), *inputs)["params"])
    names = {"/".join(k): v for k, v in _flatten(flat)}

    def loss(params):
        tree = _nest(params)
        return jnp.sum(jax.tree.leaves(module.apply({"params": tree}, *inputs))[0])

    return readings(loss, names)


def _flatten(tree, before=()):
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from _flatten(value, (*before, key))
        else:
            yield (*before, key), value


def _nest(flat):
    tree = {}
    for path, value in flat.items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def of_nnx(model, call):
    """Readings of an NNX model's parameters."""
    graph, variables = nnx.split(model)
    values = {p: v.get_value() for p, v in parameters_of(model, nnx.Param).items()}

    def loss(params, variables):
        fresh = nnx.merge(graph, variables)
        hand_over(fresh, nnx.Param, params)
        return jnp.sum(call(fresh))

    return readings(loss, values, variables)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        twice, once = nn.Dense(8, name="twice"), nn.Dense(8, name="once")
        return once(twice(twice(x)))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(16, 8, name="table")
        return table.attend(nn.Dense(8, name="dense")(table(ids)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(8, name="dense")(x), None


class Branch(nn.Module):
    @nn.compact
    def __call__(self, x):
        def layer(module, x):
            return nn.Dense(8, name="dense")(x)

        if self.is_initializing():
            return layer(self, x)
        return nn.cond(x.sum() > 0, layer, lambda _, x: x, self, x)


def test_a_plain_module_is_gathered_at_use():
    assert of_linen(nn.Dense(3), X) == {"kernel": "at use", "bias": "at use"}


def test_a_shared_module():
    found = of_linen(Shared(), X)
    assert {found["twice/kernel"], found["twice/bias"]} == {"many times"}
    assert {found["once/kernel"], found["once/bias"]} == {"at use"}


def test_a_tied_table():
    """Linen reads the table once, in `setup`, and uses it twice: it stays gathered between."""
    found = of_linen(Tied(), jnp.zeros((2, 3), jnp.int32))
    assert found == {
        "table/embedding": "at use",
        "dense/kernel": "at use",
        "dense/bias": "at use",
    }


def test_a_recurrent_network():
    found = of_linen(nn.RNN(nn.SimpleCell(8)), X)
    assert set(found.values()) == {"in a loop"}


def test_a_scan_that_reads_the_same_layer_in_every_trip():
    loop = nn.scan(Layer, variable_broadcast="params", split_rngs={"params": False}, length=3)
    assert set(of_linen(loop(), X).values()) == {"in a loop"}


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_a_stack(remat):
    layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
    loop = nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
    assert set(of_linen(loop(), X).values()) == {"at use"}


def test_recomputing_a_layer_is_one_reading():
    assert set(of_linen(nn.remat(Layer)(), X).values()) == {"at use"}


def test_mapping_over_a_stack():
    mapped = nn.vmap(Layer, {"params": 0}, split_rngs={"params": True})
    assert set(of_linen(mapped(), X).values()) == {"at use"}


def test_a_branch():
    assert set(of_linen(Branch(), X).values()) == {"in a branch"}


def test_a_while_loop_takes_a_parameter_whole():
    def loss(params):
        value = params["w"].value
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + value, value).sum()

    assert readings(loss, {"w": jnp.ones(3)}) == {"w": "read whole"}


def test_reading_beside_modules():
    def loss(params):
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params["a"]))
        return params["a"].unbox().sum() + params["b"].unbox().sum() + decay

    found = readings(loss, {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)})
    assert found == {"a": "read whole", "b": "at use", "c": "not read"}


def test_returning_a_parameter():
    assert readings(lambda p: p["a"].value, {"a": jnp.ones(3)}) == {"a": "read whole"}


class Stack(nnx.Module):
    """Three layers in one, and one more."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers, self.one = layers(rngs), nnx.Linear(8, 8, rngs=rngs)


def _scanned(model):
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return scan(lambda layer, x: layer(x))(model.layers, X)


def _scanned_and_recomputed(model):
    scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return scan(nnx.remat(lambda layer, x: layer(x)))(model.layers, X)


def _mapped(model):
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(model.layers, X)


def _called_in_every_trip(model):
    def trip(one, x):
        return one(x)

    scan = nnx.scan(length=3, in_axes=(None, nnx.Carry), out_axes=nnx.Carry)
    return scan(trip)(model.one, X)


def _branch(model):
    return nnx.cond(X.sum() > 0, lambda one, x: one(x), lambda one, x: x, model.one, X)


@pytest.mark.parametrize(
    ("call", "layers", "one"),
    [
        (_scanned, "at use", "not read"),
        (_scanned_and_recomputed, "at use", "not read"),
        (_mapped, "at use", "not read"),
        (lambda m: nnx.remat(lambda one, x: one(x))(m.one, X), "not read", "at use"),
        (lambda m: m.one(m.one(X)), "not read", "many times"),
        (lambda m: m.one(X) @ m.one.kernel[...].T, "not read", ("many times", "at use")),
        (_called_in_every_trip, "not read", "in a loop"),
        (_branch, "not read", "in a branch"),
    ],
)
def test_nnx(call, layers, one):
    found = of_nnx(Stack(nnx.Rngs(0)), call)
    assert found == {
        "layers/kernel": layers,
        "layers/bias": layers,
        "one/kernel": one if isinstance(one, str) else one[0],
        "one/bias": one if isinstance(one, str) else one[1],
    }


def test_a_recurrent_nnx_network():
    model = nnx.RNN(nnx.SimpleCell(8, 8, rngs=nnx.Rngs(0)))
    assert set(of_nnx(model, lambda m: m(X)).values()) == {"in a loop"}
