"""Hyperparameters that the state carries: read, scheduled and edited between steps."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from cases import table
from cases.driving import Run, train
from cases.measures import change_error, loss_error

import zero_jax

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 3, 20)


def _ten_steps(stage) -> Run:
    """In the executable of the table's run: a fresh state with the same optimizer."""
    run, case = table.run("c18", stage), table.CASES["c18"]
    state = case.build()["state"]
    if stage is not None:
        state = zero_jax.shard_train_state(state, stage, tx=run.opened.built["tx"])
    return _go_on(run, state, range(10))


def _go_on(run, state, steps) -> Run:
    batches = [run.opened.built["batch"](i) for i in steps]
    return train(dataclasses.replace(run.opened, state=state), batches, step=run.step)


def _edit(state, **values):
    """As a user does: another value, placed like the one it replaces."""
    old = state["opt_state"].hyperparams
    new = {name: jnp.full_like(old[name], value) for name, value in values.items()}
    return {**state, "opt_state": state["opt_state"]._replace(hyperparams={**old, **new})}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_schedules_count_steps_and_edits_act(stage):
    expected, run = _ten_steps(None), _ten_steps(stage)
    rate = run.state["opt_state"].hyperparams["learning_rate"]
    assert rate.sharding.is_fully_replicated
    assert abs(float(rate) - float(SCHEDULE(9))) <= 1e-7

    edits = {"weight_decay": 2.0, "learning_rate": 1.0}  # the schedule writes the second again
    unedited = change_error(expected.start, run.end, expected.end)
    expected, run = (_go_on(r, _edit(r.state, **edits), range(10, 13)) for r in (expected, run))
    assert sum(run.compiles) == 0 and run.strayed == []
    assert float(run.state["opt_state"].hyperparams["weight_decay"]) == 2.0
    assert loss_error(run.losses, expected.losses) <= 5e-6
    assert change_error(expected.start, run.end, expected.end) <= 2e-5
    assert unedited <= 2e-5
    assert loss_error(run.losses, table.run("c18", None).losses[10:13]) > 1e-4  # the edit acts
