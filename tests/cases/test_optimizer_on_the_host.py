"""C45: with the optimizer state on the host programs train as before, bit for bit.

Each clips, factors or accumulates in its own optimizer, which also notes its gradients there.
"""

import functools

import jax
import numpy as np
from cases import table
from cases.explicit import opened
from cases.explicit_run import reference, train
from cases.measures import relative_error
from laws.step_subjects import EXACT

from zero_jax import HostMemory

AWAY = {"pinned_host"}, {"device"}  # arrays, scalars


@functools.cache
def trained(name, policy):
    """Four steps at stage 2, of two microbatches each."""
    program = opened(name, 2, offload=policy, microbatches=2, compiler_options=EXACT)
    assert policy is None or memories(program.state) == AWAY
    return train(program, [program.built["batch"](i) for i in range(4)])


@table.programs("c01", "c03", "c05")
def test_a_program_trains_as_on_the_device(name):
    """No microbatch is missing in the first gradient, and no leaf is elsewhere after a step."""
    found, resident = trained(name, HostMemory()), trained(name, None)
    assert found.losses == resident.losses
    runs = (jax.tree.leaves((r.trail, r.first)) for r in (found, resident))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert relative_error(found.first[0], reference(name).first[0]) <= 1e-5
    assert not found.strayed and memories(found.state) == AWAY
    assert found.compiles[1:] == [0] * 3


def test_the_host_computes_a_padded_table():
    """A norm comes from the device, so that XLA rounds a gradient's division by it otherwise."""
    found, resident = trained("c01", HostMemory(update_on="host")), trained("c01", None)
    for a, b in zip(found.trail, resident.trail, strict=True):
        assert relative_error(a, b) <= 1e-7
    assert not found.strayed and memories(found.state) == AWAY


def memories(state):
    """Where the optimizer's arrays are, and where its scalars."""
    found = set(), set()
    for leaf in jax.tree.leaves(state["opt_state"]):
        found[leaf.ndim == 0].add(leaf.sharding.memory_kind)
    return found
