"""Every program under every stage on 8 devices, beside itself on one device without the library."""

import dataclasses
import math

import jax
import pytest
from cases import table
from cases.driving import train
from cases.measures import (
    MIN_SIZE,
    bytes_of_a_share,
    bytes_on_fullest_device,
    change_error,
    loss_error,
    path_of,
    relative_error,
    total_bytes,
)
from jax.sharding import NamedSharding

import zero_jax

N = 8
STAGES = (0, 1, 2, 3)

programs = table.programs(*table.CASES)
stages = pytest.mark.parametrize("stage", STAGES)
sharded_stages = pytest.mark.parametrize("stage", STAGES[1:])


@programs
def test_on_one_device_it_is_the_recorded_program(name):
    run, recorded = table.run(name, None), table.BASELINE[name]
    assert loss_error(run.losses[: table.CASES[name].steps], recorded["single"]) <= (
        table.CASES[name].loss
    )
    params, opt_state = run.opened.read(run.state)
    assert total_bytes(params) == recorded["param_bytes"]
    assert total_bytes(opt_state) == recorded["opt_bytes"]


@stages
@programs
def test_it_trains_as_on_one_device(name, stage):
    case, run, reference = table.CASES[name], table.run(name, stage), table.run(name, None)
    steps = case.steps
    assert loss_error(run.losses[:steps], reference.losses[:steps]) <= case.loss
    assert change_error(reference.start, run.kept[steps], reference.kept[steps]) <= (case.change)


@stages
@programs
def test_the_first_moments_are_those_of_one_device(name, stage):
    """After one step a first moment, a trace or an accumulator is the gradient times a number."""
    run, reference = table.run(name, stage), table.run(name, None)
    assert relative_error(run.first, reference.first) <= 1e-5


@stages
@table.programs("c01", "c12", "c18")
def test_the_first_gradient_is_that_of_one_device(name, stage):
    """As it reaches the optimizer: reduced over the devices and partitioned."""
    expected, _ = table.first_gradient(name, None)
    grads, _ = table.first_gradient(name, stage)
    assert relative_error(grads, expected) <= 1e-5


@stages
@programs
def test_bytes_are_those_of_the_stage(name, stage):
    """Counted on the arrays; the layout says the same to the byte."""
    case, run = table.CASES[name], table.run(name, stage)
    params, opt_state = run.opened.read(run.state)
    params_bytes, opt_bytes = map(bytes_on_fullest_device, (params, opt_state))
    assert run.opened.bytes_per_device == {"params": params_bytes, "opt_state": opt_bytes}

    logical_params, logical = table.run(name, None).opened.read(table.run(name, None).state)
    total = total_bytes(logical)
    if stage == 0:
        assert opt_bytes == total
    else:
        assert opt_bytes <= bytes_of_a_share(logical, N)
        if case.plain_law:
            assert opt_bytes <= 1.01 * total / N
        if case.opt_share is not None:
            assert opt_bytes <= case.opt_share * total
    if stage < 3:
        assert params_bytes == total_bytes(logical_params)
    else:
        assert params_bytes == _params_in_their_own_shape(logical_params, case.statistics)


def _params_in_their_own_shape(params, statistics) -> int:
    """Bytes a device: each leaf over the largest factor of N that divides one of its dims."""

    def parts(path, leaf):
        beside_statistics = any(module in path.split("/") for module in statistics)
        if leaf.size < MIN_SIZE or beside_statistics:
            return 1
        return max(math.gcd(dim, N) for dim in leaf.shape)

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return sum(x.nbytes // parts(path_of(keys), x) for keys, x in leaves)


@stages
@programs
def test_one_compile_and_every_leaf_comes_out_as_it_went_in(name, stage):
    run = table.run(name, stage)
    assert sum(run.compiles[1:]) == 0
    assert run.strayed == []
    has_key = any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in _leaves(run))
    # jax before 0.11 keys its dispatch cache on the spelling of a typed key's base sharding, and
    # enters the same executable twice: nothing is traced or compiled again
    entered_twice = has_key and jax.__version_info__ < (0, 11)
    assert run.cache_size == (2 if entered_twice else 1)


@stages
@programs
def test_donation_is_really_used(name, stage):
    """That a donated buffer was not usable would be a warning, and warnings are errors here."""
    run = table.run(name, stage)
    batch = run.opened.place(run.opened.built["batch"](0))
    memory = run.step.lower(run.state, batch).compile().memory_analysis()
    held = sum(x.addressable_shards[0].data.nbytes for x in _leaves(run))
    assert memory.alias_size_in_bytes >= 0.95 * held
    kept = [x for x in jax.tree.leaves(run.opened.state) if not x.is_deleted()]
    assert all(x.size == 1 for x in kept)  # adafactor's placeholders and the like: never read


@stages
@programs
def test_specs_fit_their_leaves(name, stage):
    """No longer than the leaf, and every cut dim divides: the arrays themselves say so."""
    run = table.run(name, stage)
    for leaf in _leaves(run):
        assert isinstance(leaf.sharding, NamedSharding)
        assert len(leaf.sharding.spec) <= leaf.ndim
        for dim, entry in zip(leaf.shape, leaf.sharding.spec, strict=False):
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            assert dim % math.prod(leaf.sharding.mesh.shape[axis] for axis in axes) == 0
        if leaf.ndim == 0 or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            assert leaf.sharding.is_fully_replicated  # counts, hyperparameters, keys, tables


@sharded_stages
@programs
def test_unsharded_it_is_the_plain_optimizer_state(name, stage):
    """Containers, shapes, dtypes and values: padding is gone, nothing else changed."""
    run, reference = table.run(name, stage), table.run(name, None)
    params, opt_state = run.opened.unshard(run.state)
    expected_params, expected = reference.opened.read(reference.state)
    for tree, plain in ((params, expected_params), (opt_state, expected)):
        assert jax.tree.structure(tree) == jax.tree.structure(plain)
        assert _avals(tree) == _avals(plain)
    assert relative_error(opt_state, expected) <= table.CASES[name].change


@sharded_stages
@table.programs("c03", "c04", "c05", "c11", "c12", "c13", "c15", "c18", "c19")
def test_other_values_train_alike_in_the_same_executable(name, stage):
    """Another seed and other batches, laid out anew for the optimizer that the step closes over."""
    case = table.CASES[name]

    def again(run, seed):
        state = case.build(seed=seed)["state"]
        if run.opened.layouts:
            with case.warns(stage):
                tx = run.opened.built["tx"]
                state = zero_jax.shard_train_state(state, stage, tx=tx)
        batches = [run.opened.built["batch"](100 * seed + i) for i in range(3)]
        return train(dataclasses.replace(run.opened, state=state), batches, step=run.step)

    seeds = (stage, stage + 3)
    reference = [again(table.run(name, None), seed) for seed in seeds]
    found = [again(table.run(name, stage), seed) for seed in seeds]
    for run, expected in zip(found, reference, strict=True):
        assert loss_error(run.losses, expected.losses) <= case.loss
        assert relative_error(run.first, expected.first) <= 1e-5
    assert sum(found[0].compiles[1:] + found[1].compiles) == 0
    assert found[0].losses != found[1].losses


def _leaves(run) -> list[jax.Array]:
    return jax.tree.leaves(run.state)


def _avals(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, jax.tree.leaves(tree))]
