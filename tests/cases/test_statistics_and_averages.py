"""What a state keeps beside its parameters: running statistics, an average, fields of its own."""

import functools

import jax
import numpy as np
import pytest
from cases import table
from cases.measures import copy, on_every_device, relative_error
from flax import nnx
from flax.core import FrozenDict, freeze

import zero_jax

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@functools.cache
def _one_step_from(stage):
    """Statistics and average one step on from the state a run ended in: here, and on one device."""
    run, plain = table.run("c02", stage), table.run("c02", None)
    batch = run.opened.built["batch"](8)
    whole = copy(zero_jax.unshard_train_state(run.state)).replace(tx=plain.state.tx)
    whole = whole.replace(apply_fn=plain.state.apply_fn)
    expected, _ = plain.step(whole, batch)
    mine = jax.tree.map(lambda x: x.copy(), run.state)
    found, _ = run.step(mine, run.opened.place(batch))
    return found, expected


@stages
def test_statistics_are_of_the_whole_batch(stage):
    """The slices of the batch differ in scale: statistics of one device's slice would show."""
    found, expected = _one_step_from(stage)
    assert relative_error(found.batch_stats, expected.batch_stats) <= 1e-5
    trained, reference = table.run("c02", stage).state, table.run("c02", None).state
    noise = table.CASES["c02"].loss  # that of its trajectory, as in LOSS
    assert relative_error(trained.batch_stats, reference.batch_stats) <= noise


@stages
def test_nnx_statistics_are_those_of_one_device(stage):
    """The mean without what the bias in front of it adds: that bias moves by rounding noise."""

    def statistics(run):
        bn = nnx.to_pure_dict(run.state)[0]["bn"]
        biases = [p["conv"]["bias"] for p in (run.start, *run.trail[:-1])]
        momentum, steps = 0.9, len(biases)
        added = sum((1 - momentum) * momentum ** (steps - 1 - i) * b for i, b in enumerate(biases))
        return {"mean": bn["mean"] - added, "var": bn["var"]}

    expected = statistics(table.run("c08", None))
    assert relative_error(statistics(table.run("c08", stage)), expected) <= 1e-5


@stages
@pytest.mark.parametrize("name", ["c02", "c08"])
def test_statistics_are_the_same_bits_on_every_device(name, stage):
    state = table.run(name, stage).state
    statistics = state.batch_stats if name == "c02" else nnx.filter_state(state, nnx.BatchStat)
    for leaf in jax.tree.leaves(statistics):
        assert len({x.tobytes() for x in on_every_device(leaf)}) == 1
        assert leaf.sharding.is_fully_replicated


@stages
def test_the_average_follows_the_updated_parameters(stage):
    run = table.run("c02", stage)
    average = run.start
    for params in run.trail:
        average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, average, params)
    assert relative_error(run.state.ema, freeze(average)) <= 1e-6
    found, expected = _one_step_from(stage)
    assert relative_error(found.ema, expected.ema) <= 1e-5


@stages
def test_types_of_the_state_and_its_fields_are_kept(stage):
    run, reference = table.run("c02", stage), table.run("c02", None)
    whole = zero_jax.unshard_train_state(run.state)
    for state in (run.state, whole):
        assert type(state) is type(reference.state)
        assert type(state.ema) is FrozenDict
    assert jax.tree.structure(whole.opt_state) == jax.tree.structure(reference.state.opt_state)


@stages
def test_fields_that_are_no_arrays_are_left_alone(stage):
    """Functions stay the user's own objects."""
    run = table.run("c02", stage)
    assert run.state.apply_fn == run.opened.built["model"].apply
    assert zero_jax.unshard_train_state(run.state).tx is run.opened.built["tx"]
    assert float(run.state.ema_decay) == np.float32(0.9)
    assert int(run.state.step) == 8


def test_a_python_number_goes_on_working():
    run = table.run("c02", 3)
    batch = run.opened.place(run.opened.built["batch"](8))
    after, _ = jax.jit(run.opened.step)(run.state.replace(ema_decay=1.0), batch)
    assert relative_error(after.ema, run.state.ema) == 0.0
