"""What cannot be done is said, early and with names: an error before any compile, or a warning."""

import time

import jax
import numpy as np
import pytest
from cases import table
from cases.measures import counting_compiles
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zero_jax


def _mesh(devices, axis="data"):
    return Mesh(np.array(jax.devices()[:devices]), (axis,))


@pytest.fixture
def built():
    return table.CASES["c04"].build(wrap_tx=zero_jax.partition_optimizer)


def _partitioned_elsewhere(state):
    """The embedding over the first three devices."""
    elsewhere = NamedSharding(_mesh(3, "other"), PartitionSpec(None, "other"))
    params = dict(state["params"])
    params["backbone_embed"] = {
        "embedding": jax.device_put(params["backbone_embed"]["embedding"], elsewhere)
    }
    return {**state, "params": params}


def _of_other_parameters(state):
    params = {name: layer for name, layer in state["params"].items() if name != "norm_1"}
    return {**state, "params": params}


MISTAKES = {
    "a stage that does not exist": (ValueError, r"stage=5", {"stage": 5}, None),
    "a stage that is no number": (TypeError, r"stage='2' is a str", {"stage": "2"}, None),
    "an axis the mesh lacks": (ValueError, r"axis='data'.*'model': 8", {"mesh": "model"}, None),
    "another mesh": (
        ValueError,
        r"params/backbone_embed/embedding.*other",
        {"mesh": "data"},
        _partitioned_elsewhere,
    ),
    "other parameters": (ValueError, r"opt_state/.*norm_1", {}, _of_other_parameters),
    "a plain optimizer": (TypeError, r"tx: ", {"tx": None}, None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_that_names_it(built, mistake):
    error, words, arguments, spoil = MISTAKES[mistake]
    state = built["state"] if spoil is None else spoil(built["state"])
    arguments = {"stage": 2, "tx": built["tx"], **arguments}
    if "mesh" in arguments:
        arguments["mesh"] = _mesh(8, arguments["mesh"])
    began = time.perf_counter()
    with counting_compiles() as compiles, pytest.raises(error, match=words):
        zero_jax.shard_train_state(state, **arguments)
    assert compiles() == 0
    assert time.perf_counter() - began < 1


def test_a_state_that_is_laid_out_already_is_not_laid_out_again():
    run = table.run("c02", 2)
    with counting_compiles() as compiles, pytest.raises(ValueError, match="already.*stage 2"):
        zero_jax.shard_train_state(run.state, 3, mesh=_mesh(4))
    assert compiles() == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_batch_that_does_not_divide(stage):
    run = table.run("c04", stage)
    batch = jax.tree.map(lambda x: x[:20], run.opened.built["batch"](0))
    with counting_compiles() as compiles:
        with pytest.raises(ValueError, match=r"batch: ids has 20 rows.*data.*8"):
            run.opened.place(batch)
    assert compiles() == 0


def test_a_batch_of_unequal_leaves():
    run = table.run("c04", 2)
    batch = {**run.opened.built["batch"](0), "y": np.zeros(20, np.int32)}
    with pytest.raises(ValueError, match=r"batch: y has 20 rows"):
        run.opened.place(batch)


@pytest.mark.parametrize("name", ["c05", "c11"])
def test_no_stage_is_a_silent_no_op(name):
    """Where a setting leaves the optimizer whole, the largest leaves are named with their bytes."""
    built = table.CASES[name].build(wrap_tx=zero_jax.partition_optimizer)
    largest = max(jax.tree.leaves(built["state"]["params"]), key=lambda x: x.nbytes)
    words = rf"all|\({', '.join(map(str, largest.shape))}\): .*min_size"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        zero_jax.shard_train_state(built["state"], 1, min_size=10**9, tx=built["tx"])


def test_one_device_is_said():
    built = table.CASES["c11"].build(wrap_tx=zero_jax.partition_optimizer)
    with pytest.warns(zero_jax.ZeroWarning, match="one device and partitions nothing"):
        zero_jax.shard_train_state(built["state"], 1, mesh=_mesh(1), tx=built["tx"])
