"""A number that is not finite on one device: all of them skip the step, or none."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import table
from cases.driving import train
from cases.measures import change_error, loss_error, on_every_device

import zero_jax

stages = pytest.mark.parametrize("stage", [1, 2, 3])


def _skips(state) -> list[int]:
    """The counter of skipped steps, device by device."""
    return [int(x) for x in on_every_device(state["opt_state"].total_notfinite)]


@stages
def test_every_device_skips_the_two_steps(stage):
    run = table.run("c19", stage)
    assert _skips(run.state) == [2] * 8
    jax.tree.map(np.testing.assert_array_equal, run.trail[4], run.trail[2])
    assert not np.array_equal(run.trail[5]["a"], run.trail[4]["a"])


@stages
def test_padding_is_finite(stage):
    """What lies beyond a leaf's last element takes part in nothing, so it stays zero."""
    for leaf in jax.tree.leaves(table.run("c19", stage).state):
        assert np.isfinite(np.asarray(leaf)).all()


@stages
@pytest.mark.parametrize("row", [0, 7, 15])
def test_whichever_device_owns_the_row(stage, row):
    run, reference, case = table.run("c19", stage), table.run("c19", None), table.CASES["c19"]

    def batch(i):
        made = case.build()["batch"](100 + i)
        if i == 1:
            made["x"][row, 2], made["bad"][row] = np.nan if row == 7 else np.inf, True
        return made

    def go(run, state):
        opened = dataclasses.replace(run.opened, state=state)
        return train(opened, [batch(i) for i in range(4)], step=run.step)

    expected = go(reference, case.build()["state"])
    with case.warns(stage):
        tx = run.opened.built["tx"]
        state = zero_jax.shard_train_state(case.build()["state"], stage, tx=tx)
    found = go(run, state)
    assert _skips(found.state) == [1] * 8
    jax.tree.map(np.testing.assert_array_equal, found.trail[1], found.trail[0])
    assert loss_error(found.losses, expected.losses) <= case.loss
    assert change_error(expected.start, found.end, expected.end) <= case.change
