"""Programs that stop, are restored on other devices and another stage, and go on unharmed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import table
from cases.driving import model_and_optimizer, train
from cases.measures import loss_error
from flax import nnx
from jax.sharding import Mesh

import zero_jax
from zero_jax.checkpoint import Checkpointer
from zero_jax.typed_keys import bits_of

pytestmark = pytest.mark.filterwarnings("ignore:stage")


def _opened(name, stage, devices):
    case = table.CASES[name]
    return case.open(case.build, stage, Mesh(np.array(jax.devices()[:devices]), ("data",)))


def _tx(opened):
    """The optimizer of a state that has none of its own."""
    return None if hasattr(opened.state, "tx") else opened.built["tx"]


def _bits(state, tx):
    whole = zero_jax.unshard_train_state(state, tx=tx)
    return [np.asarray(bits_of(x)) for x in jax.tree.leaves(whole)]


@pytest.mark.parametrize(
    ("name", "stopped", "resumed", "steps"),
    [
        ("c18", (2, 8), (3, 4), 5),  # schedules count on
        ("c05", (1, 8), (3, 4), 4),  # in the middle of an accumulation
        ("c04", (3, 4), (1, 8), 3),  # frozen parameters
        ("c02", (3, 8), (2, 1), 4),  # statistics and averages
        ("c15", (1, 8), (3, 2), 4),  # leaves without elements, keys, Python numbers
    ],
)
def test_a_program_goes_on_elsewhere(name, stopped, resumed, steps, tmp_path):
    case, opened, other = table.CASES[name], _opened(name, *stopped), _opened(name, *resumed)
    batches = [opened.built["batch"](i) for i in range(case.steps)]
    first = train(opened, batches[:steps])
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(steps, first.state, tx=_tx(opened))
    restored = checkpointer.restore(other.state, tx=_tx(other)).state
    checkpointer.close()
    assert jax.tree.structure(restored) == jax.tree.structure(other.state)
    jax.eval_shape(lambda p: jax.lax.cond(p, lambda: other.state, lambda: restored), True)
    left, come = _bits(first.state, _tx(opened)), _bits(restored, _tx(other))
    for x, y in zip(left, come, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    again = train(dataclasses.replace(other, state=restored), batches[steps:])
    expected = table.run(name, None).losses[: case.steps]
    assert loss_error([*first.losses, *again.losses], expected) <= case.loss
    assert sum(again.compiles[1:]) == 0 and again.strayed == []


def test_dropout_goes_on(tmp_path):
    """C08 on the same devices: losses of the last four steps have the very same bits."""
    program = table.CASES["c08"].program
    build = functools.partial(program.build, rate=0.25)
    opened, other = (model_and_optimizer(build, 2, None) for _ in range(2))
    batches = [opened.built["batch"](i) for i in range(8)]
    whole = train(model_and_optimizer(build, 2, None), batches).losses
    half = train(opened, batches[:4])
    graph = nnx.graphdef(_pair(other))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(4, nnx.merge(graph, half.state))
    restored = checkpointer.restore(nnx.merge(graph, other.state)).state
    checkpointer.close()
    go_on = dataclasses.replace(other, state=nnx.split(restored)[1])
    assert [*half.losses, *train(go_on, batches[4:]).losses] == whole


def _pair(opened):
    """The laid-out model and optimizer of a program that has split them."""
    built = opened.built
    return zero_jax.shard_train_state((built["model"], built["optimizer"]), 2)
