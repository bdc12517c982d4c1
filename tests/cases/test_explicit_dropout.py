"""Random streams of an NNX model in the explicit step: own masks everywhere, and drawn again."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import table
from cases.explicit import NOT_OPTIMIZED, make_step, opened
from flax import nnx

import zero_jax

PROGRAM = table.CASES["c08"].program
ROWS, WIDTH, N = PROGRAM.B, 50, 8


def _bits(tree):
    return jax.tree.map(lambda key: np.array(jax.random.key_data(key)), tree)


def _streams(model, kind):
    return nnx.to_pure_dict(nnx.state(model, kind))


def _counts(model):
    return [int(c) for c in jax.tree.leaves(_streams(model, nnx.RngCount))]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_streams_count_on_and_keys_stay(stage):
    """As on one device, whose masks are others."""
    program = opened("c08", stage, build={"rate": 0.25})
    plain = PROGRAM.build(rate=0.25)
    step = jax.jit(plain["step_of"](plain["graphdef"]), compiler_options=NOT_OPTIMIZED)
    pair, state = program.state, plain["state"]
    before = _bits(_streams(pair[0], nnx.RngKey))
    for i in range(2):
        batch = plain["batch"](i)
        pair, loss, metrics = program.step(pair, zero_jax.shard_batch(batch, program.layouts[""]))
        state, expected = step(state, batch)
        assert np.isfinite(loss) and float(loss) != float(expected) and int(metrics.fault) == 0
    model, _ = nnx.merge(plain["graphdef"], state)
    assert _counts(pair[0]) == _counts(model) and 2 in _counts(pair[0])
    after = _streams(pair[0], nnx.RngKey)
    assert all(jax.dtypes.issubdtype(k.dtype, jax.dtypes.prng_key) for k in jax.tree.leaves(after))
    jax.tree.map(np.testing.assert_array_equal, _bits(after), before)
    for leaf in jax.tree.leaves(nnx.state(pair[0], nnx.RngState)):
        assert leaf.shape == () and leaf.sharding.is_fully_replicated


def _probe(model, batch):
    """The program's loss; every device puts the mask that it drew into its rows of (16, 50)."""
    hidden = model.hidden(batch["x"])
    mask = model.drop(jnp.ones_like(hidden))
    nll = optax.softmax_cross_entropy_with_integer_labels(model.fc2(hidden * mask), batch["y"])
    drawn = jnp.zeros((ROWS, WIDTH)).at[batch["row"]].set(mask)
    return nll.mean(), {"mask": drawn}


@functools.cache
def _drawn(microbatches):
    """Losses and masks (steps, 16, 50) of two runs from the same seed, at stage 3 and rate 0.5."""
    built = PROGRAM.build(rate=0.5)
    state = zero_jax.shard_train_state((built["model"], built["optimizer"]), 3, executor="explicit")
    options = {"microbatches": microbatches, "aux": {"mask": "sum"}}
    step = make_step(_probe, has_aux=True, donate=False, **options)
    runs = []
    for pair in (state, jax.tree.map(lambda x: x, state)):
        losses, masks = [], []
        for i in range(2):
            batch = built["batch"](i) | {"row": np.arange(ROWS)}
            pair, metrics = step(pair, zero_jax.shard_batch(batch, zero_jax.layout_of(state)))
            losses.append(float(metrics.loss))
            masks.append(np.array(metrics.aux["mask"]))
        runs.append((losses, np.stack(masks)))
    return runs


@pytest.mark.parametrize("microbatches", [1, 2])
def test_masks_differ_between_devices_microbatches_and_steps(microbatches):
    _, masks = _drawn(microbatches)[0]
    assert set(np.unique(masks)) == {0, 2} and 0.45 < (masks == 0).mean() < 0.55
    drawn = masks.reshape(len(masks) * N * microbatches, -1)
    for a, b in itertools.combinations(drawn, 2):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_same_seed_draws_the_same_masks(microbatches):
    """Bit for bit, and so the losses."""
    (losses, masks), (again_losses, again) = _drawn(microbatches)
    assert losses == again_losses
    np.testing.assert_array_equal(masks, again)


@functools.cache
def _noise(microbatches):
    """Numbers (16, 50) that a loss drew from the key it is given, with the key's run repeated."""
    tx = zero_jax.partition_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones(WIDTH)}
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(state, 2, executor="explicit", tx=tx)

    def loss_fn(params, batch, rng):
        noise = jax.random.uniform(rng, (batch["row"].size, WIDTH))
        drawn = jnp.zeros((ROWS, WIDTH)).at[batch["row"]].set(noise)
        return jnp.mean(noise @ params["w"]), {"noise": drawn}

    options = {"microbatches": microbatches, "aux": {"noise": "sum"}}
    step = make_step(loss_fn, tx, has_aux=True, donate=False, **options)
    batch = zero_jax.shard_batch({"row": np.arange(ROWS)}, tx.layout)
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    return [np.array(step(state, batch, key)[1].aux["noise"]) for key in keys]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_key_is_another_one_on_every_device_and_in_every_microbatch(microbatches):
    first, again, other = _noise(microbatches)
    np.testing.assert_array_equal(first, again)
    drawn = np.concatenate([first, other]).reshape(2 * N * microbatches, -1)
    for a, b in itertools.combinations(drawn, 2):
        assert not np.array_equal(a, b)
