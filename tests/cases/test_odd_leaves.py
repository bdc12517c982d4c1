"""Leaves that are no ordinary arrays: empty, scalar, None, keys, tables, strings; tiny states."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import table
from cases.driving import closes_over_tx, train
from cases.measures import bytes_on_fullest_device, change_error, loss_error

import zero_jax

stages = pytest.mark.parametrize("stage", [1, 2, 3])


@stages
def test_every_odd_leaf_is_what_it_was(stage):
    start, run = table.CASES["c15"].build()["state"], table.run("c15", stage)
    state = run.state
    assert jax.tree.structure(state.replace(opt_state=None)) == jax.tree.structure(
        start.replace(opt_state=None)
    )
    assert state.tag == "odd" and state.extra is None and state.params["adapter"] is None
    for field in ("tables", "rng", "old_rng", "params"):
        found, expected = (jax.tree.leaves(getattr(s, field)) for s in (state, start))
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert state.params["prompt"].shape == (0, 7)
    assert state.step.dtype == jnp.int32 and int(state.step) == 8


@stages
def test_values_follow_those_on_one_device(stage):
    run, reference = table.run("c15", stage), table.run("c15", None)
    for found, expected in zip(
        jax.tree.leaves(run.end), jax.tree.leaves(reference.end), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    keys = [[jax.random.key_data(s.rng), s.old_rng] for s in (run.state, reference.state)]
    np.testing.assert_array_equal(*keys)
    jax.tree.map(np.testing.assert_array_equal, run.state.tables, reference.state.tables)


def _five_parameters(optimizer):
    def build(wrap_tx=lambda tx: tx):
        tx = wrap_tx(optimizer)
        params = {"w": jnp.array([0.3, -0.2, 0.1]), "b": jnp.array([0.5]), "scale": jnp.array(1.5)}

        def loss_fn(p, batch):
            return jnp.mean((p["scale"] * (batch["x"] @ p["w"] + p["b"][0]) - batch["y"]) ** 2)

        def step(s, batch):
            loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
            up, o = tx.update(g, s["opt_state"], s["params"])
            return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

        def batch(i):
            x = np.random.default_rng(i).normal(size=(16, 3)).astype(np.float32)
            return {"x": x, "y": np.sin(x).sum(1)}

        return {
            "state": {"params": params, "opt_state": tx.init(params)},
            "step": step,
            "batch": batch,
            "tx": tx,
        }

    return build


TINY = {
    "adam": optax.adam(1e-2),
    "a group of one leaf": optax.multi_transform(
        {"three": optax.adam(1e-2), "rest": optax.sgd(1e-2)},
        {"w": "three", "b": "rest", "scale": "rest"},
    ),
}


@stages
@pytest.mark.parametrize("name", TINY)
def test_fewer_elements_than_devices(name, stage):
    """All of it stays whole, which is said; and it trains."""
    build = _five_parameters(TINY[name])
    with pytest.warns(zero_jax.ZeroWarning, match="3 elements, under min_size 8"):
        opened = closes_over_tx(build, stage, None)
    reference = closes_over_tx(build, None, None)
    batches = [opened.built["batch"](i) for i in range(6)]
    expected, run = train(reference, batches), train(opened, batches)
    assert loss_error(run.losses, expected.losses) <= 5e-6
    assert change_error(expected.start, run.end, expected.end) <= 2e-5
    assert sum(run.compiles[1:]) == 0 and run.strayed == []


@pytest.mark.parametrize("name", TINY)
def test_fewer_elements_than_devices_can_be_cut(name):
    """With min_size=0 the leaf of three is one element on each of three devices."""
    built = _five_parameters(TINY[name])(wrap_tx=zero_jax.partition_optimizer)
    tx = built["tx"]
    due = contextlib.nullcontext()
    if name == "adam":  # two moments of two single elements, and a count, still lie everywhere
        due = pytest.warns(zero_jax.ZeroWarning, match=r"\(1 elements\)")
    with due:
        state = zero_jax.shard_train_state(built["state"], 2, min_size=0, tx=tx)
    step, reference = jax.jit(built["step"]), _five_parameters(TINY[name])()
    plain, plain_step = reference["state"], jax.jit(reference["step"])
    for i in range(6):
        state, loss = step(state, zero_jax.shard_batch(built["batch"](i), tx))
        plain, expected = plain_step(plain, built["batch"](i))
        assert abs(float(loss) - float(expected)) <= 5e-6 * float(expected)
    moments = [x for x in jax.tree.leaves(state["opt_state"]) if x.shape == (8,)]
    assert len(moments) == 2 and bytes_on_fullest_device(moments) == 2 * 4
