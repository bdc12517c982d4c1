"""NNX: random streams and counters, grouped optimizers, dropout over the devices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import table
from cases.driving import model_and_optimizer, train
from cases.measures import change_error, loss_error, path_of
from flax import nnx

stages = pytest.mark.parametrize("stage", [1, 2, 3])
PROGRAM = table.CASES["c08"].program


@functools.cache
def _with_dropout(stage):
    opened = model_and_optimizer(functools.partial(PROGRAM.build, rate=0.25), stage, None)
    keys = jax.tree.map(_bits, _streams(opened.state, nnx.RngKey))
    return keys, train(opened, [opened.built["batch"](i) for i in range(8)])


def _streams(state, kind):
    return nnx.to_pure_dict(nnx.filter_state(state, kind))


def _bits(key):
    return np.array(jax.random.key_data(key))


@stages
def test_dropout_streams_count_on_and_keys_stay(stage):
    """The mask is drawn in the global view, so the losses are those of one device too."""
    (_, reference), (keys, run) = _with_dropout(None), _with_dropout(stage)
    counts, expected = (
        [int(c) for c in jax.tree.leaves(_streams(r.state, nnx.RngCount))] for r in (run, reference)
    )
    assert counts == expected and 8 in counts
    after = _streams(run.state, nnx.RngKey)
    assert all(jax.dtypes.issubdtype(k.dtype, jax.dtypes.prng_key) for k in jax.tree.leaves(after))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_bits, after), keys)
    for leaf in jax.tree.leaves(nnx.filter_state(run.state, nnx.RngState)):
        assert leaf.shape == () and leaf.sharding.is_fully_replicated
    assert loss_error(run.losses, reference.losses) <= 5e-6
    assert sum(run.compiles[1:]) == 0 and run.strayed == []


def _biases_by_sgd(_):
    """Two optimizers in one, chosen by path."""

    def group(keys, _):
        return "bias" if "bias" in path_of(keys).split("/") else "rest"

    return optax.partition(
        {"bias": optax.sgd(1e-2), "rest": optax.adam(2e-3)},
        lambda params: jax.tree_util.tree_map_with_path(group, params),
    )


@functools.cache
def _grouped(stage):
    build = functools.partial(PROGRAM.build, wrap_tx=_biases_by_sgd, rate=0.0)
    opened = model_and_optimizer(build, stage, None)
    return train(opened, [opened.built["batch"](i) for i in range(8)])


@stages
def test_optimizers_grouped_by_path(stage):
    run, reference = _grouped(stage), _grouped(None)
    assert loss_error(run.losses, reference.losses) <= 5e-6
    assert change_error(reference.start, run.end, reference.end) <= 2e-5
    assert sum(run.compiles[1:]) == 0 and run.strayed == []


def _draw(opened, step, steps=3):
    """Losses, and the dropout masks that the user's own jitted step drew, (steps, 16, 50)."""
    state, losses, masks = opened.state, [], []
    for i in range(steps):
        state, (loss, mask) = step(state, opened.place(opened.built["batch"](i)))
        losses.append(float(loss))
        masks.append(np.array(mask))
    return losses, np.stack(masks)


@pytest.mark.parametrize("stage", [2, 3])
def test_dropout_masks_differ_between_devices_and_can_be_drawn_again(stage):

    def loss_fn(model, batch):
        hidden = model.hidden(batch["x"])
        mask = model.drop(jnp.ones_like(hidden))
        nll = optax.softmax_cross_entropy_with_integer_labels(model.fc2(hidden * mask), batch["y"])
        return nll.mean(), mask

    def step_of(graph):
        def step(state, batch):
            model, optimizer = nnx.merge(graph, state)
            wrt = nnx.DiffState(0, nnx.Param)
            (loss, mask), grads = nnx.value_and_grad(loss_fn, argnums=wrt, has_aux=True)(
                model, batch
            )
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), (loss, mask)

        return step

    build = functools.partial(PROGRAM.build, rate=0.5)
    first, second = (model_and_optimizer(build, stage, None, step_of=step_of) for _ in range(2))
    losses, masks = _draw(first, jax.jit(first.step))
    slices = masks.reshape(len(masks), 8, -1)
    for some in (*slices, masks):
        for a, b in itertools.combinations(some, 2):
            assert not np.array_equal(a, b)
    assert 0.4 < (masks == 0).mean() < 0.6
    again_losses, again = _draw(second, jax.jit(second.step))
    assert again_losses == losses
    np.testing.assert_array_equal(again, masks)
