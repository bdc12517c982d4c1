"""Experts that get no tokens and a head that no loss reads: their gradient is zero, not missing."""

import numpy as np
import pytest
from cases import table

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@stages
def test_on_an_unused_head_only_the_decay_acts(stage):
    run = table.run("c12", stage)
    learning_rate, weight_decay, steps = 6e-3, 0.1, 8
    expected = run.start["aux_head"] * (1 - learning_rate * weight_decay) ** steps
    np.testing.assert_allclose(run.kept[steps]["aux_head"], expected, rtol=1e-6)


@stages
def test_the_router_moves_and_the_unused_expert_only_decays(stage):
    run = table.run("c12", stage)
    after = run.kept[8]
    assert (run.start["router"][:, :4] != after["router"][:, :4]).any(0).all()
    for weight in ("up", "down"):
        used, unused = np.split(after["experts"][weight] / run.start["experts"][weight], [4])
        np.testing.assert_allclose(unused, (1 - 6e-3 * 0.1) ** 8, rtol=2e-6)
        assert abs(used - 1).max() > 0.01
