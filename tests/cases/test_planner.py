"""What the planner says of each program's state is what its shards take, on 1 to 8 devices."""

import jax
import numpy as np
import pytest
from cases import table
from cases.measures import bytes_on_fullest_device
from jax.sharding import Mesh

import zero_jax
from zero_jax.planning import memory

pytestmark = pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@table.programs(*table.CASES)
def test_predicted_state_bytes_are_those_of_the_shards(name, stage, n):
    case = table.CASES[name]
    opened = case.open(case.build, stage, Mesh(np.array(jax.devices()[:n]), ("data",)))
    predicted = [memory.from_layout(layout) for layout in opened.layouts]
    params, opt_state = map(bytes_on_fullest_device, opened.read(opened.state))
    assert sum(states.params_bytes for states in predicted) == params
    assert sum(states.optimizer_bytes for states in predicted) == opt_state
    assert all(layout.mesh.size == n for layout in opened.layouts)


def test_shapes_alone_say_the_same():
    """The layout of an abstract state is that of the placed one, leaf by leaf."""
    built = table.CASES["c02"].build()["state"]
    shapes = jax.eval_shape(lambda: built)
    for stage in (1, 2, 3):
        placed, abstract = (zero_jax.shard_train_state(s, stage) for s in (built, shapes))
        reports = [zero_jax.layout_of(state).report() for state in (placed, abstract)]
        assert reports[0] == reports[1]
