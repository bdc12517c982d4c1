"""`optax.MultiSteps`: the accumulator is partitioned, and parameters move every third time."""

import jax
import pytest
from cases import table
from cases.measures import bytes_on_fullest_device

stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@stages
def test_parameters_change_only_after_the_third_micro_step(stage):
    """Bit for bit, leaf by leaf: all of them after 3, 6 and 9, none otherwise."""
    run = table.run("c05", stage)
    steps = [run.start, *run.trail]
    for micro_step, (before, after) in enumerate(zip(steps, steps[1:], strict=False), start=1):
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        moved = [b.tobytes() != a.tobytes() for b, a in pairs]
        assert all(moved) if micro_step % 3 == 0 else not any(moved)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_accumulator_lies_as_the_moments_do(stage):
    run = table.run("c05", stage)
    state = run.opened.read(run.state)[1]
    adam = state.inner_opt_state[0]
    for moment in (adam.mu, adam.nu):
        pairs = zip(jax.tree.leaves(state.acc_grads), jax.tree.leaves(moment), strict=True)
        assert all(a.sharding == m.sharding and a.shape == m.shape for a, m in pairs)
    accumulator, moments = map(bytes_on_fullest_device, (state.acc_grads, (adam.mu, adam.nu)))
    assert accumulator * 2 == moments
