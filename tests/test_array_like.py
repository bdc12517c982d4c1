"""A parameter on its way is read as an array, by whatever reads arrays.

Each use is compared with the same use of the array that it makes, in bf16, so that reading shows.
What a step makes of it (gathered once, and where) is at the end.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws.step_subjects import FAST

import zero_jax
from zero_jax.at_use import Partitioned, Wire
from zero_jax.collectives import Cut
from zero_jax.reporting.hlo import audit

VALUE, X = jnp.arange(12.0).reshape(3, 4), jnp.ones((2, 3))


def boxed(value):
    cut = Cut(value.shape, value.shape, None, (), 1)
    wire = Wire("w", cut, cut, jnp.bfloat16, value.dtype, True)
    return Partitioned(value, wire.carrier(), wire)


USES = {
    "array @ w": lambda w: X @ w,
    "numpy @ w": lambda w: np.ones((2, 3), np.float32) @ w,
    "w.T @ numpy": lambda w: w.T @ np.ones((3, 2), np.float32),
    "arithmetic": lambda w: 2 * w - w / 3 + w**2 + (-w) // 2,
    "comparison": lambda w: (w == 0) | (w != 3) & (w > 5),
    "index": lambda w: w[jnp.array([0, 2])] + w[None, 1, :2].sum(),
    "at": lambda w: w.at[0].set(1.0),
    "methods": lambda w: w.astype(jnp.float32).reshape(-1).sum() + w.sum(0).mean() + w.max(),
    "words": lambda w: jnp.ones(w.shape, w.dtype) * w.size * w.ndim * len(w),
    "iteration": lambda w: sum(w),
    "jnp": lambda w: jnp.sum(jnp.square(w)) + jnp.linalg.norm(w) + jnp.cos(w).mean(),
    "asarray": lambda w: jnp.asarray(w) + jnp.array(w) + jnp.zeros_like(w),
    "einsum": lambda w: jnp.einsum("ij,jk->ik", X, w) + jnp.dot(X, w) + jnp.tensordot(X, w, 1),
    "take": lambda w: jnp.take(w, jnp.array([0, 1]), axis=0),
    "stack": lambda w: jnp.concatenate([jnp.stack([w, w]), w[None]]),
    "where": lambda w: jnp.where(w > 2, w, 0),
    "nn": lambda w: jax.nn.softmax(w) + jax.nn.relu(w) + jax.nn.logsumexp(w),
    "optax": lambda w: optax.l2_loss(w),
    "transformed": lambda w: jax.jit(lambda a: a * 2)(w) + jax.checkpoint(lambda a: a * 2)(w),
    "closed over": lambda w: jax.lax.fori_loop(0, 2, lambda _, c: c + w, jnp.zeros_like(w)),
}


@pytest.mark.parametrize("use", USES)
def test_uses(use):
    expected = USES[use](VALUE.astype(jnp.bfloat16))
    found = jax.jit(lambda value: USES[use](boxed(value)))(VALUE)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=1e-2
    )


def test_what_has_no_number_raises_as_a_traced_array_does():
    for use in (bool, float, np.asarray):
        with pytest.raises(jax.errors.JAXTypeError):
            jax.jit(lambda value, use=use: use(boxed(value[0, 0])))(VALUE)


N, ROWS, WIDTH, WORDS = 8, 16, 24, 40
IDS = np.random.default_rng(0).integers(0, WORDS, (ROWS, 5)).astype(np.int32)


class Net(nn.Module):
    """An embedding and a layer."""

    @nn.compact
    def __call__(self, ids):
        return nn.Dense(WIDTH, name="dense")(nn.Embed(WORDS, WIDTH, name="embed")(ids))


def hidden(params, batch):
    return jnp.tanh(Net().apply({"params": params}, batch["ids"]))


def tied(params, batch):
    logits = hidden(params, batch) @ params["embed"]["embedding"].T
    return jnp.mean(jnp.sin(logits) ** 2)


def penalised(params, batch):
    penalty = jnp.sum(jnp.square(params["dense"]["kernel"]))
    return jnp.mean(hidden(params, batch) ** 2) + penalty


def plain(params, batch):
    """No module at all."""
    h = jnp.tanh(params["embed"]["embedding"][batch["ids"]])
    return jnp.mean((h @ params["dense"]["kernel"] + params["dense"]["bias"]) ** 2)


def by_lax(params, batch):
    """`jax.lax` takes arrays only."""
    return jnp.mean(hidden(params, batch) ** 2) + jnp.sum(jax.lax.sin(params["dense"]["kernel"]))


def start(stage):
    params = Net().init(jax.random.key(0), IDS[:1])["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))
    state = zero_jax.shard_train_state(state, stage, executor="explicit")
    return params, state, zero_jax.shard_batch({"ids": IDS}, state)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("loss", [tied, penalised, plain])
def test_a_plain_use_is_one_more_point_of_use(loss, stage):
    """Nothing is warned about, and what is read twice crosses the wire once."""
    params, state, batch = start(stage)
    step = zero_jax.make_train_step(loss, compiler_options=FAST)
    found = audit(step.lower(state, batch).compile(), zero_jax.layout_of(state).mesh)
    once = sum(4 * p.size for p in jax.tree.leaves(params)) * (N - 1) // N
    assert found.bytes_by_kind["all-gather"] == once
    assert found.bytes_by_kind["reduce-scatter"] == once
    value, grads = jax.value_and_grad(loss)(params, {"ids": IDS})
    _, metrics = step(state, batch)
    np.testing.assert_allclose(float(metrics.loss), float(value), rtol=1e-6)
    np.testing.assert_allclose(float(metrics.grad_norm), optax.tree.norm(grads), rtol=1e-6)


def test_what_is_no_array_for_jax_lax_is_handed_over_whole_alone():
    """The kernel of 24 x 24, and not the embedding of 40 x 24 or the bias."""
    params, state, batch = start(3)
    step = zero_jax.make_train_step(by_lax, compiler_options=FAST)
    words = "1 parameters, 2.25 KiB, are gathered at the start.*'dense/kernel' .2.25 KiB.*Trigger"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        _, metrics = step(state, batch)
    value, grads = jax.value_and_grad(by_lax)(params, {"ids": IDS})
    np.testing.assert_allclose(float(metrics.loss), float(value), rtol=1e-6)
    np.testing.assert_allclose(float(metrics.grad_norm), optax.tree.norm(grads), rtol=1e-6)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(WIDTH, use_bias=False, name="dense")(x)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False)
        loop = nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
        return loop(name="layers")(x, None)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("decay", ["leaves", "kernel"])
def test_a_penalty_on_a_stack_is_said_at_every_stage(decay, stage):
    """Its gradient is summed up whole, layer after layer: 3 x 24 x 24 in fp32, 6.75 KiB."""
    x = np.ones((ROWS, WIDTH), np.float32)

    def loss(params, batch):
        kernels = jax.tree.leaves(params) if decay == "leaves" else [params["layers"]["dense"]]
        kernels = kernels if decay == "leaves" else [kernels[0]["kernel"]]
        penalty = sum(jnp.sum(jnp.square(w)) for w in kernels)
        return jnp.mean(Stack().apply({"params": params}, batch["x"]) ** 2) + penalty

    params = Stack().init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))
    rules = {"layers/*": "stacked"}
    state = zero_jax.shard_train_state(state, stage, rules=rules, executor="explicit")
    batch = zero_jax.shard_batch({"x": x}, state)
    whole = "are gathered at the start" if stage == 3 else "stay whole on each device until the"
    words = f"1 (parameters|stacks of layers), 6.75 KiB, {whole}.*'layers/dense/kernel' .6.75 KiB"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        zero_jax.make_train_step(loss).lower(state, batch)
    zero_jax.make_train_step(loss, regather="keep").lower(state, batch)  # it is meant: says nothing
