"""A parameter that is used twice is one leaf: one copy, one pair of moments, summed gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import table
from cases.driving import model_and_optimizer, train
from cases.measures import (
    bytes_of_a_share,
    bytes_on_fullest_device,
    change_error,
    loss_error,
    relative_error,
)
from flax import nnx

stages = pytest.mark.parametrize("stage", [1, 2, 3])


@stages
def test_the_last_rows_of_a_tied_vocabulary_move_every_step(stage):
    """Of 50257 rows the last five are in every batch, and in the last device's part."""

    def moves(run):
        rows = [run.start["wte"]["embedding"][-5:], *run.trail[:8]]
        return np.linalg.norm(np.diff(np.stack(rows).astype(np.float64), axis=0), axis=-1)

    expected, found = moves(table.run("c01", None)), moves(table.run("c01", stage))
    assert found.shape == (8, 5) and (found > 0).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@stages
def test_the_gradient_of_a_tied_embedding_sums_both_uses(stage):
    expected = table.first_gradient("c01", None)[0][0]["wte"]
    assert relative_error(table.first_gradient("c01", stage)[0][0]["wte"], expected) <= 1e-5
    run = table.run("c01", stage)
    rows = [x for x in jax.tree.leaves(run.state) if x.ndim == 2 and x.shape[0] >= 50257]
    assert len(rows) == 3  # the parameter and its two moments


class Tied(nnx.Module):
    """Reads words through a table, and a bag of words through the same table."""

    def __init__(self, rows, width, rngs):
        self.e = nnx.Embed(rows, width, rngs=rngs)
        self.h = nnx.Linear(rows, width, use_bias=False, rngs=rngs)
        self.h.kernel = self.e.embedding
        self.out = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, ids, bag):
        return self.out(jnp.tanh(self.e(ids)) * jnp.tanh(self.h(bag)))


def _tied_loss(model, batch):
    return jnp.mean((model(batch["ids"], batch["bag"]) - batch["y"]) ** 2)


def _build(rows, width):
    model = Tied(rows, width, nnx.Rngs(0))
    r = np.random.default_rng(0)

    def batch(i):
        return {
            "ids": r.integers(0, rows, 16).astype(np.int32),
            "bag": r.random((16, rows), np.float32),
            "y": r.random((16, 8), np.float32),
        }

    def step_of(graph):
        def step(state, batch):
            model, optimizer = nnx.merge(graph, state)
            wrt = nnx.DiffState(0, nnx.Param)
            loss, grads = nnx.value_and_grad(_tied_loss, argnums=wrt)(model, batch)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        return step

    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "step_of": step_of, "batch": batch}


@stages
@pytest.mark.parametrize(("rows", "width"), [(53, 12), (64, 16)])
def test_tied_nnx_variables_stay_one(rows, width, stage):
    reference = model_and_optimizer(functools.partial(_build, rows, width), None, None)
    sharded = model_and_optimizer(functools.partial(_build, rows, width), stage, None)
    batches = [reference.built["batch"](i) for i in range(5)]
    expected, run = train(reference, batches), train(sharded, batches)
    assert loss_error(run.losses, expected.losses) <= 5e-6
    assert change_error(expected.start, run.end, expected.end) <= 2e-5

    params, opt_state = sharded.read(run.state)
    assert jax.tree.structure(params) == jax.tree.structure(
        {"e": {"embedding": 0}, "out": {"bias": 0, "kernel": 0}}
    )
    assert sharded.layouts[0].total_bytes["params"] == 4 * (rows * width + width * 8 + 8)
    logical = expected.opened.read(expected.state)[1]
    assert bytes_on_fullest_device(opt_state) <= bytes_of_a_share(logical, 8)
