"""Law: however often a model reads a parameter, it crosses the wire once (stage 3).

Once gathered and once reduced, for a table tied to the output, a module used twice, a cell read in
every trip of a loop, a layer in a branch that only some devices take. Only a layer that is
recomputed is gathered again. And the gradient is the sum over all uses.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from laws.step_subjects import FAST, change, leaves

import zero_jax
from zero_jax.reporting.hlo import audit

N, ROWS, WIDTH, WORDS = 8, 16, 24, 40
IDS = np.random.default_rng(0).integers(0, WORDS, (ROWS, 5)).astype(np.int32)
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(WORDS, WIDTH)).astype(np.float32))


class Tied(nnx.Module):
    """An embedding whose table is the output's too."""

    def __init__(self, rngs):
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)

    def __call__(self, ids):
        return self.table.attend(jnp.tanh(self.table(ids)))


class Twice(nnx.Module):
    """One layer, called twice, on vectors that are no parameters."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, ids):
        return self.layer(jnp.tanh(self.layer(TABLE[ids])))


class Recurrent(nnx.Module):
    """A cell that reads its weights for every word."""

    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.SimpleCell(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, ids):
        return self.rnn(TABLE[ids])


class Branching(nnx.Module):
    """A layer that devices take or leave out, as their rows are."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, ids):
        h = TABLE[ids]
        return nnx.cond(takes_it(ids), lambda layer, h: layer(h), lambda _, h: h, self.layer, h)


def takes_it(ids):
    return ids[0, 0] % 2 == 0


MODELS = {"tied": Tied, "twice": Twice, "recurrent": Recurrent, "branching": Branching}


def loss_fn(model, batch):
    return jnp.mean(jnp.sin(model(batch["ids"])) ** 2)


def on_one_device(kind):
    """Parameters and their gradient: the mean over the devices' rows."""
    model = kind(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, ids):
        return loss_fn(nnx.merge(graph, params, rest, copy=True), {"ids": ids})

    grads = [jax.grad(loss)(params, ids) for ids in IDS.reshape(N, -1, 5)]
    return leaves(params), [np.mean(g, 0) for g in zip(*map(leaves, grads), strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_nnx(name):
    model = MODELS[name](nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(1.0, momentum=0.9), wrt=nnx.Param)
    state = zero_jax.shard_train_state(state, 3, executor="explicit")
    step = zero_jax.make_train_step(loss_fn, compiler_options=FAST)
    batch = zero_jax.shard_batch({"ids": IDS}, state)
    found = audit(step.lower(state, batch).compile(), zero_jax.layout_of(state).mesh)
    before, grads = on_one_device(MODELS[name])
    once = sum(4 * g.size for g in grads) * (N - 1) // N
    assert found.bytes_by_kind["all-gather"] == once
    assert found.bytes_by_kind["reduce-scatter"] == once
    state, metrics = step(state, batch)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads))
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-6)
    after = leaves(nnx.state(zero_jax.unshard_train_state(state)[0], nnx.Param))
    assert change(before, after, [b - g for b, g in zip(before, grads, strict=True)]) <= 2e-6


def test_devices_take_different_branches():
    """Or the law above would not have met the case."""
    taken = [bool(takes_it(ids)) for ids in IDS.reshape(N, -1, 5)]
    assert any(taken) and not all(taken)


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(WORDS, WIDTH)
        h = nn.RNN(nn.SimpleCell(WIDTH))(table(ids))
        return table.attend(h + TABLE.mean())  # what is closed over comes first in a trace


def test_linen():
    """A tied table around a recurrent network."""
    net = LinenTied()
    params = net.init(jax.random.key(0), IDS[:1])["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))
    state = zero_jax.shard_train_state(state, 3, executor="explicit")

    def loss(params, batch):
        return jnp.mean(jnp.sin(net.apply({"params": params}, batch["ids"])) ** 2)

    step = zero_jax.make_train_step(loss, compiler_options=FAST)
    batch = zero_jax.shard_batch({"ids": IDS}, state)
    found = audit(step.lower(state, batch).compile(), zero_jax.layout_of(state).mesh)
    once = sum(4 * p.size for p in jax.tree.leaves(params)) * (N - 1) // N
    assert found.bytes_by_kind["all-gather"] == once
    assert found.bytes_by_kind["reduce-scatter"] == once
    norm = optax.tree.norm(jax.grad(loss)(params, {"ids": IDS}))
    np.testing.assert_allclose(float(step(state, batch)[1].grad_norm), norm, rtol=1e-6)


def decayed(params, batch):
    """Weight decay in the loss: half the sum of squares, beside what the model makes of it."""
    decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params)) / 2
    return jnp.mean(nn.Dense(WIDTH).apply({"params": params}, TABLE[batch["ids"]])) + decay


def test_a_loss_that_computes_with_parameters():
    """It gets whole ones, gathered at its start; that they are kept is said out loud."""
    params = nn.Dense(WIDTH).init(jax.random.key(0), TABLE[:1])["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))
    state = zero_jax.shard_train_state(state, 3, executor="explicit")
    batch = zero_jax.shard_batch({"ids": IDS}, state)
    words = "2 parameters.* are gathered at the start of the loss.*the largest 'kernel'"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        state, metrics = zero_jax.make_train_step(decayed)(state, batch)
    loss, grads = jax.value_and_grad(decayed)(params, {"ids": IDS})
    np.testing.assert_allclose(float(metrics.loss), float(loss), rtol=1e-6)
    np.testing.assert_allclose(float(metrics.grad_norm), optax.tree.norm(grads), rtol=1e-6)


class Experts(nn.Module):
    """Layers stacked along the second dim, which the step does not take for layers."""

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(
            nn.Dense,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=1,
            axis_size=N,
        )
        return experts(N)(x).mean(1)


@pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_stacked_along_another_dim(stage):
    """A piece of the gradient has not the dim that is mapped over: parameters come whole."""

    def loss(params, batch):
        return jnp.mean(Experts().apply({"params": params}, batch["x"]) ** 2)

    x = np.random.default_rng(2).normal(size=(ROWS, N)).astype(np.float32)
    params = Experts().init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state = zero_jax.shard_train_state(state, stage, executor="explicit")
    _, metrics = zero_jax.make_train_step(loss)(state, zero_jax.shard_batch({"x": x}, state))
    norm = optax.tree.norm(jax.grad(loss)(params, {"x": x}))
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-5)


class Odd(nn.Module):
    """The first kernel (6, 7) has no dim that 8 divides: at rest it is flat, one dim."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(jnp.tanh(nn.Dense(7)(x)))


def decayed_kernels(params, batch):
    """Decay of what has two dims, as Flax's own ImageNet example writes it."""
    kernels = [p for p in jax.tree.leaves(params) if p.ndim > 1]
    loss = jnp.mean(Odd().apply({"params": params}, batch["x"]) ** 2)
    return loss + sum(jnp.sum(p**2) for p in kernels)


def per_element(params, batch):
    count = sum(p.size for p in jax.tree.leaves(params))
    return jnp.mean(Odd().apply({"params": params}, batch["x"]) ** 2) / count


def per_leaf(params, batch):
    count = len(jax.tree.leaves(params))
    return jnp.mean(Odd().apply({"params": params}, batch["x"]) ** 2) / count


@pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("loss", [decayed_kernels, per_element, per_leaf])
def test_a_loss_that_looks_at_shapes_of_parameters(loss, stage):
    """Pieces and carriers have other shapes and are more; such a loss gets whole parameters."""
    x = np.random.default_rng(2).normal(size=(ROWS, 6)).astype(np.float32)
    params = Odd().init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state = zero_jax.shard_train_state(state, stage, executor="explicit")
    batch = zero_jax.shard_batch({"x": x}, state)
    value, grads = jax.value_and_grad(loss)(params, {"x": x})
    _, metrics = zero_jax.make_train_step(loss)(state, batch)
    np.testing.assert_allclose(float(metrics.loss), float(value), rtol=1e-5)
    np.testing.assert_allclose(float(metrics.grad_norm), optax.tree.norm(grads), rtol=1e-5)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(6)(jnp.tanh(nn.Dense(WIDTH)(x)))


@pytest.mark.parametrize("every", [1, 2])
def test_a_prefetching_loop_is_left_alone(every):
    """Pieces of other sizes are no reason to gather a stack at the start, which would be said."""
    model = zero_jax.ScanLayers(Block, 5, checkpoint_every=every)
    x = np.random.default_rng(2).normal(size=(ROWS, 6)).astype(np.float32)
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state = zero_jax.shard_train_state(state, 3, rules={"*": "stacked"}, executor="explicit")
    step = zero_jax.make_train_step(lambda p, b: jnp.mean(model.apply({"params": p}, b["x"]) ** 2))
    step.lower(state, zero_jax.shard_batch({"x": x}, state))
