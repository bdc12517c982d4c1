"""Frozen parameters own no optimizer state, never move, and are partitioned like the others."""

import functools

import flax.core
import jax
import optax
import pytest
from cases import table
from cases.driving import closes_over_tx, train
from cases.measures import (
    bytes_on_fullest_device,
    change_error,
    loss_error,
    path_of,
    total_bytes,
)

stages = pytest.mark.parametrize("stage", [1, 2, 3])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_backbone_is_bit_identical_after_training(stage):
    run = table.run("c04", stage)
    start = jax.tree_util.tree_flatten_with_path(run.start)[0]
    moved = {
        path_of(keys).split("/")[0]
        for (keys, before), after in zip(start, jax.tree.leaves(run.end), strict=True)
        if before.tobytes() != after.tobytes()
    }
    assert moved == {"norm_0", "norm_1", "head"}


@stages
def test_frozen_leaves_own_no_state_and_are_partitioned(stage):
    run = table.run("c04", stage)
    params, opt_state = run.opened.read(run.state)
    _, logical = run.opened.unshard(run.state)
    adam_on_everything = 2 * total_bytes(params) + 4
    assert total_bytes(logical) == 5_084 and adam_on_everything == 614_492
    is_hole = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    holes = [x for x in jax.tree.leaves(opt_state, is_leaf=is_hole) if is_hole(x)]
    _, plain = table.run("c04", None).opened.read(table.run("c04", None).state)
    assert len(holes) == sum(map(is_hole, jax.tree.leaves(plain, is_leaf=is_hole))) > 0
    if stage == 3:
        assert bytes_on_fullest_device(params) <= 0.127 * total_bytes(params)


@stages
def test_frozen_dict_parameters_and_labels(stage):
    """The same program with `FrozenDict` parameters, and so with a `FrozenDict` of labels."""
    build = functools.partial(table.CASES["c04"].build, container=flax.core.freeze)
    opened, reference = closes_over_tx(build, stage, None), table.run("c04", None)
    assert type(opened.read(opened.state)[0]) is flax.core.FrozenDict
    run = train(opened, [opened.built["batch"](i) for i in range(8)])
    assert type(opened.read(run.state)[0]) is flax.core.FrozenDict
    assert type(opened.unshard(run.state)[0]) is flax.core.FrozenDict
    assert loss_error(run.losses, reference.losses) <= 5e-6
    end = flax.core.unfreeze(run.end)
    assert change_error(reference.start, end, reference.end) <= 2e-5
    assert sum(run.compiles[1:]) == 0 and run.strayed == []
    assert opened.bytes_per_device == table.run("c04", stage).opened.bytes_per_device
