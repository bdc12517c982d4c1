"""What each program's report asks of it beside the common checks, with the library's own step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.explicit import opened, without_padding
from cases.explicit_run import reference, run
from cases.measures import copy, on_every_device, relative_error
from flax import nnx
from flax.core import FrozenDict

import zero_jax

stages = pytest.mark.parametrize("stage", [1, 2, 3])


@stages
def test_every_row_of_the_tied_table_trains(stage):
    """50257 rows over 8 devices: the last ones lie beside padding, and are in every batch."""
    found, expected = run("c01", stage), reference("c01")

    def rows(params):
        return params["wte"]["embedding"][-5:]

    for before, after in zip(found.trail, found.trail[1:], strict=False):
        assert (np.linalg.norm(rows(after) - rows(before), axis=1) > 0).all()
    moved, plain = (rows(r.trail[-1]) - rows(r.trail[0]) for r in (found, expected))
    assert (np.linalg.norm(moved - plain, axis=1) <= 1e-5 * np.linalg.norm(plain, axis=1)).all()
    grads = [r.first[0]["wte"]["embedding"] for r in (found, expected)]
    assert relative_error(*grads) <= 1e-6  # as a table and as the output
    assert int(found.state["step"]) == len(found.losses)


@stages
def test_statistics_are_of_the_whole_batch(stage):
    """BatchNorm names no axis; slices of the batch differ in scale, so a slice's own would show."""
    found, expected = run("c02", stage).state, reference("c02").state
    assert relative_error(found.batch_stats, expected.batch_stats) <= 1e-5
    for leaf in jax.tree.leaves(found.batch_stats):
        assert leaf.sharding.is_fully_replicated
        assert len({x.tobytes() for x in on_every_device(leaf)}) == 1


@stages
def test_the_average_follows_the_updated_parameters(stage):
    found, expected = run("c02", stage), reference("c02")
    ema = without_padding(found.state.ema, found.opened.layouts[""].other.ema)
    assert relative_error(ema, expected.state.ema) <= 1e-5
    assert type(found.state.ema) is FrozenDict and type(found.state) is type(expected.state)
    assert int(found.state.step) == len(found.losses)
    assert float(found.state.ema_decay) == np.float32(0.9)


@stages
def test_frozen_parameters_keep_their_bits(stage):
    """And have no gradient; at stage 3 they are partitioned as the others are."""
    found = run("c04", stage)
    frozen = [name for name in found.trail[0] if name.startswith("backbone")]
    assert len(frozen) == 5
    for name in frozen:
        for params in found.trail[1:]:
            jax.tree.map(np.testing.assert_array_equal, params[name], found.trail[0][name])
        assert not any(g.any() for g in jax.tree.leaves(found.first[0][name]))
    assert relative_error(found.trail[-1]["head"], found.trail[0]["head"]) > 1e-3


@stages
def test_parameters_change_with_every_third_microstep(stage):
    trail = run("c05", stage).trail
    for i, (before, after) in enumerate(zip(trail, trail[1:], strict=False), start=1):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        same = [np.array_equal(b, a) for b, a in pairs]
        assert not any(same) if i % 3 == 0 else all(same)


@stages
def test_nnx_statistics_are_those_of_one_device(stage):
    """The mean without what the bias in front of it adds: that bias moves by rounding noise."""
    found, expected = run("c08", stage), reference("c08")

    def mean(bn, trail):
        added = [0.1 * 0.9 ** (len(trail) - 2 - i) * p["conv"]["bias"] for i, p in enumerate(trail)]
        return np.asarray(bn["mean"]) - sum(added[:-1])

    bn, plain = found.state[0].bn, nnx.to_pure_dict(expected.state)[0]["bn"]
    bn = {"mean": bn.mean[...], "var": bn.var[...]}
    assert relative_error(bn["var"], plain["var"]) <= 1e-5
    assert relative_error(mean(bn, found.trail), mean(plain, expected.trail)) <= 1e-5
    assert all(x.sharding.is_fully_replicated for x in bn.values())


def test_the_generators_half_step_reads_the_discriminator_and_leaves_it_alone():
    """At stage 3 it differentiates through parameters that lie in parts."""
    gan = opened("c10", 3)
    before = copy(gan.state)
    batch = zero_jax.shard_batch(gan.built["batch"](0), gan.layouts["gen"])
    states, metrics = gan.half(gan.state, "gen", batch)
    pairs = zip(*(jax.tree.leaves(s["disc"]) for s in (before, states)), strict=True)
    assert all(b.tobytes() == np.asarray(a).tobytes() for b, a in pairs)
    plain = gan.built["params"]
    of_loss = jax.jit(jax.value_and_grad(gan.built["loss_fn"]["gen"]))
    loss, grads = of_loss(plain["gen"], plain["disc"], gan.built["batch"](0))
    assert abs(float(metrics.loss) - loss) <= 5e-6 * loss
    noted = gan.grads(states)[1]
    assert relative_error(noted, grads) <= 1e-6


@stages
def test_the_last_bias_of_one_element_trains(stage):
    found, expected = run("c10", stage).trail, reference("c10").trail
    moved, plain = (t[-1]["disc"]["Dense_0"]["bias"] - t[0]["disc"]["Dense_0"]["bias"]
                    for t in (found, expected))  # fmt: skip
    assert moved.shape == (1,) and moved[0] != 0
    assert abs(moved - plain) <= 1e-4 * abs(plain)


@stages
def test_imaginary_parts_train(stage):
    found, expected = run("c11", stage), reference("c11")
    moved, plain = (r.trail[-1]["phase"] - r.trail[0]["phase"] for r in (found, expected))
    assert moved.imag != 0 and abs(moved.imag - plain.imag) <= 1e-4 * abs(plain.imag)
    (adam, _), expected_adam = found.state["opt_state"].inner, expected.opt_state[0]
    for tree, plain in ((adam.mu, expected_adam.mu), (adam.nu, expected_adam.nu)):
        dtypes = [[x.dtype for x in jax.tree.leaves(t)] for t in (tree, plain)]
        assert dtypes[0] == dtypes[1]
    assert adam.mu["phase"].dtype == np.complex64 and adam.mu["phase"].shape == ()


@stages
def test_a_head_without_gradient_decays_and_the_router_trains(stage):
    """Weight decay 0.1 at rate 6e-3 is all that the head gets; expert 4 gets no token either."""
    found = run("c12", stage)
    start, end = found.trail[0], found.trail[-1]
    decay = (1 - 6e-3 * 0.1) ** len(found.losses)
    assert relative_error(end["aux_head"], decay * start["aux_head"]) <= 1e-6
    assert relative_error(end["router"], start["router"]) > 1e-3
    for name in ("up", "down"):
        unused = decay * start["experts"][name][4]
        assert relative_error(end["experts"][name][4], unused) <= 1e-6


@stages
def test_awkward_leaves_come_out_as_they_went_in(stage):
    found, expected = run("c15", stage), reference("c15").state
    state, start = found.state, found.opened.built["state"]
    assert jax.tree.structure(state) == jax.tree.structure(found.opened.state)
    assert jax.tree.structure(state.params) == jax.tree.structure(start.params)
    assert state.tag == "odd" and state.extra is None and state.params["adapter"] is None
    assert state.params["prompt"].shape == (0, 7)
    assert int(state.step) == len(found.losses) and state.step.dtype == jnp.asarray(0).dtype
    for tree in ("tables", "params", "old_rng"):
        pairs = [getattr(s, tree) for s in (state, start)]
        dtypes = [[x.dtype for x in jax.tree.leaves(t)] for t in pairs]
        assert dtypes[0] == dtypes[1]
    jax.tree.map(np.testing.assert_array_equal, state.tables, start.tables)
    np.testing.assert_array_equal(jax.random.key_data(state.rng), jax.random.key_data(expected.rng))
    np.testing.assert_array_equal(state.old_rng, expected.old_rng)
    for x, y in zip(*map(jax.tree.leaves, (found.trail[-1], expected.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@stages
def test_every_device_skips_the_two_steps(stage):
    """`nonfinite="pass"`: optax counts them, as the user's own step would."""
    found = run("c19", stage)
    counters = on_every_device(found.state["opt_state"].inner.total_notfinite)
    assert [int(x) for x in counters] == [2] * 8
    jax.tree.map(np.testing.assert_array_equal, found.trail[5], found.trail[3])
    assert not np.array_equal(found.trail[6]["a"], found.trail[5]["a"])
    for leaf in jax.tree.leaves(found.opened.held(found.state)):
        assert np.isfinite(np.asarray(leaf)).all()  # padding is zero and stays so
