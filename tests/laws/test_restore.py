"""Law: a checkpoint of any layout restores onto any other, bit for bit, and training goes on.

Saved from every stage on {8 devices, 2 replicas of 4, 4 x 2 tensor parallel, optimizer state on the
host}; restored onto every stage on these and on 6, 4, 3 and 1 devices, over which other dims are
padded, and in another process on 16. The model has dims that none of these divide.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import subject
from laws.step_subjects import mesh_of

import zero_jax
from zero_jax.checkpoint import Checkpointer

STAGES = (0, 1, 2, 3)
LIES = {
    "8": ({"data": 8}, {}),
    "hybrid": ({"replica": 2, "data": 4}, {}),
    "tensor": ({"data": 4, "model": 2}, {"rules": {"Dense_0/kernel": jax.P(None, "model")}}),
    "offloaded": ({"data": 8}, {"offload": zero_jax.HostMemory()}),
    **{str(n): ({"data": n}, {"executor": "explicit"}) for n in (6, 4, 3, 1)},
}
SAVED = ("8", "hybrid", "tensor", "offloaded")
BEGUN, STEPS = 3, 8
TESTS = Path(__file__).parents[1]


def laid_out(state, lies, stage):
    axes, options = LIES[lies]
    return zero_jax.shard_train_state(state, stage, mesh=mesh_of(**axes), min_size=0, **options)


@functools.cache
def trained():
    """The plain state after some steps on one device, and losses of the next ones."""
    state, _ = subject.train(subject.create(optax.adamw(1e-2)), BEGUN)
    left = jax.tree.map(np.asarray, state)
    losses, step = [], subject.jit_step()
    for i in range(BEGUN, STEPS):
        state, value = step(state, subject.batch(i))
        losses.append(float(value))
    return left, losses


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Layout and stage -> the folder that one of that layout was saved in."""
    folders = {}
    for lies in SAVED:
        for stage in STAGES:
            folder = tmp_path_factory.mktemp(f"{lies}_{stage}")
            checkpointer = Checkpointer(folder)
            checkpointer.save(BEGUN, laid_out(trained()[0], lies, stage))
            checkpointer.close()
            folders[lies, stage] = folder
    return folders


def described():
    return jax.eval_shape(lambda: subject.create(optax.adamw(1e-2)))


@pytest.mark.filterwarnings("ignore:stage")
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("stage", STAGES)
def test_gathered_values_are_the_same_bits(stage, lies, checkpoints):
    for at, saved in enumerate(SAVED):
        checkpointer = Checkpointer(checkpoints[saved, (stage + at) % 4], read_only=True)
        like = laid_out(described(), lies, stage)
        restored = checkpointer.restore(like)
        layout = zero_jax.layout_of(like)
        places = jax.tree.leaves((layout.params, layout.opt_state, layout.other))
        leaves = jax.tree.leaves((restored.state.params, restored.state.opt_state))
        leaves += jax.tree.leaves(restored.state.step)
        assert [x.sharding for x in leaves] == [p.rest for p in places]
        whole = zero_jax.unshard_train_state(restored.state)
        for x, y in zip(*map(jax.tree.leaves, (whole, trained()[0])), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.filterwarnings("ignore:stage")
@pytest.mark.parametrize(
    ("lies", "stage"), [*zip(LIES, (3, 2, 2, 1, 3, 3, 2, 0), strict=True), ("8", 0)]
)
def test_training_goes_on(lies, stage, checkpoints):
    """Losses of the next five steps are those of a run that was left alone."""
    folder = checkpoints["hybrid" if lies == "8" else "8", 3 - stage]
    state = Checkpointer(folder, read_only=True).restore(laid_out(described(), lies, stage)).state
    step, losses = zero_jax.make_train_step(on_subject), []
    for i in range(BEGUN, STEPS):
        state, metrics = step(state, zero_jax.shard_batch(subject.batch(i), state))
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, trained()[1], rtol=5e-6)


def on_subject(params, batch):
    return subject.loss_fn(params, batch, subject.Net().apply)


def test_nothing_has_changed_and_so_no_bit(checkpoints, tmp_path):
    """Restored onto the layout it was saved from, the very same losses."""

    def losses_of(state):
        step, losses = subject.jit_step(), []
        for i in range(BEGUN, STEPS):
            state, value = step(state, zero_jax.shard_batch(subject.batch(i), state))
            losses.append(np.asarray(value).tobytes())
        return losses

    left_alone = losses_of(laid_out(trained()[0], "8", 2))
    checkpointer = Checkpointer(checkpoints["8", 2], read_only=True)
    assert losses_of(checkpointer.restore(laid_out(described(), "8", 2)).state) == left_alone


@pytest.mark.slow
def test_more_devices_than_saved_it(checkpoints, tmp_path):
    """16, in a process of their own."""
    script = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
import jax; jax.config.update("jax_num_cpu_devices", 16)
import numpy as np, zero_jax
from laws import test_restore as law
law.LIES["16"] = ({{"data": 16}}, {{}})
like = law.laid_out(law.described(), "16", 3)
state = law.Checkpointer({str(checkpoints["tensor", 2])!r}, read_only=True).restore(like).state
assert len(state.params["Dense_1"]["kernel"].sharding.device_set) == 16
whole = zero_jax.unshard_train_state(state)
np.savez({str(tmp_path / "whole.npz")!r}, *map(np.asarray, jax.tree.leaves(whole)))
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=300)
    found = np.load(tmp_path / "whole.npz")
    for x, y in zip(found.values(), jax.tree.leaves(trained()[0]), strict=True):
        np.testing.assert_array_equal(x, jnp.asarray(y))
