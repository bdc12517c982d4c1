"""Numbers of devices that divide nothing: 3, 5, 6 and 7."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from cases import table
from cases.driving import Run, train
from cases.measures import (
    bytes_of_a_share,
    bytes_on_fullest_device,
    loss_error,
    relative_error,
    total_bytes,
)
from jax.sharding import Mesh

import zero_jax

STAGE_ON = {3: 2, 5: 3, 6: 3, 7: 1}
"""Number of devices -> stage: each of the three, and stage 3 on a prime and a composite number."""
SHORT = {("c01", 5), ("c03", 5), ("c04", 5)}
"""At stage 3, programs most of whose parameters have no dim that shares a factor with N."""
STEPS = 4


def _train(opened, rows) -> Run:
    """On the first rows of the program's batches."""
    batches = [opened.built["batch"](i) for i in range(STEPS)]
    return train(opened, [jax.tree.map(lambda x: x[:rows], batch) for batch in batches])


@functools.cache
def _reference(name, rows) -> Run:
    return _train(table.opened(name, None), rows)


@pytest.mark.parametrize("devices", STAGE_ON)
@pytest.mark.parametrize(
    "name",
    ("c01", "c02", "c03", "c04", "c05"),
)
def test_any_number_of_devices(name, devices):
    case, stage = table.CASES[name], STAGE_ON[devices]
    rows = case.program.B // devices * devices
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    due = contextlib.nullcontext()
    if stage == 3 and (name, devices) in SHORT:
        due = pytest.warns(zero_jax.ZeroWarning, match="of params on every device")
    with due:
        opened = case.open(case.build, stage, mesh)
    expected, run = _reference(name, rows), _train(opened, rows)
    assert loss_error(run.losses, expected.losses) <= case.loss
    assert relative_error(run.first, expected.first) <= 1e-5
    assert sum(run.compiles[1:]) == 0 and run.strayed == []

    opt_state = opened.read(run.state)[1]
    logical = expected.opened.read(expected.state)[1]
    assert bytes_on_fullest_device(opt_state) == opened.bytes_per_device["opt_state"]
    assert bytes_on_fullest_device(opt_state) <= bytes_of_a_share(logical, devices)
    if name == "c01":
        assert bytes_on_fullest_device(opt_state) <= 1.02 * total_bytes(logical) / devices
