"""A state in files: what is refused, before anything is written, and disks that fail."""

import resource
import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws.offload_net import create, data, laid_out, loss

import zero_jax
from zero_jax import DiskArray, Nvme

BUFFER = 8000


def lay_out(folder, existing="refuse", tx=None, stage=2, **options):
    """A small state over 2 devices, in a folder."""
    policy = Nvme(folder, **{"buffer_bytes": BUFFER, "existing": existing} | options)
    return laid_out(tx or optax.adamw(1e-2), stage, policy)


def train(state, steps=1, first=0):
    """The state after some steps."""
    step = zero_jax.make_train_step(loss)
    for i in range(first, first + steps):
        state, _ = step(state, zero_jax.shard_batch(data(i), state))
    return state


def disk_of(state):
    """Its directory."""
    return next(x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray)).disk


def bits(state):
    """Every leaf, whole."""
    return [np.asarray(x) for x in jax.tree.leaves(zero_jax.unshard_train_state(state))]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"path": 3}, TypeError, "path=3"),
        ({"path": ""}, TypeError, "expected a directory"),
        ({"path": "x", "params": 1}, TypeError, "params=1"),
        ({"path": "x", "buffer_bytes": 0}, ValueError, "buffer_bytes=0"),
        ({"path": "x", "gradients": "disk"}, ValueError, "'host'"),
        ({"path": "x", "existing": "yes"}, ValueError, "'resume'"),
    ],
)
def test_policy_is_checked(arguments, error, says):
    with pytest.raises(error, match=says):
        Nvme(**arguments)


def test_directory_has_to_be_there(tmp_path):
    with pytest.raises(NotADirectoryError, match="it is not there; expected a directory"):
        lay_out(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="it is a file; expected a directory"):
        lay_out(tmp_path / "file")
    with pytest.raises(OSError, match="this process cannot write there: .*Operation not permitted"):
        lay_out("/sys/kernel")


def test_two_cannot_share_a_directory(tmp_path):
    state = lay_out(tmp_path)
    with pytest.raises(OSError, match=r"process_0 is in use by process \d+; two cannot share it"):
        lay_out(tmp_path, "resume")
    disk_of(state).close()
    assert disk_of(lay_out(tmp_path, "resume")).resumes


def test_a_state_that_is_there_is_not_written_over(tmp_path):
    state = train(lay_out(tmp_path), 2)
    disk_of(state).close()
    with pytest.raises(ValueError, match="has a training state, complete after 2 steps. Pass"):
        lay_out(tmp_path)
    resumed = lay_out(tmp_path, "resume")
    assert int(resumed.step) == 2
    disk_of(resumed).close()
    assert int(lay_out(tmp_path, "replace").step) == 0


def test_another_layout_is_refused(tmp_path):
    disk_of(lay_out(tmp_path)).close()
    with pytest.raises(ValueError, match="was written by another layout: opt_state/0/mu.*expected"):
        lay_out(tmp_path, "resume", stage=0)
    with pytest.raises(ValueError, match="opt_state/0/trace.* is not there, expected"):
        lay_out(tmp_path, "resume", tx=optax.sgd(1e-2, momentum=0.9))
    disk_of(lay_out(tmp_path, "replace", buffer_bytes=2**19)).close()
    with pytest.raises(ValueError, match="opt_state/0/nu/.*, which this state has not"):
        lay_out(tmp_path, "resume", tx=optax.lion(1e-2), buffer_bytes=2**19)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    params = {"a": {"b": jnp.ones((4, 4))}, "a/b": jnp.ones((4, 4))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
    with pytest.raises(ValueError, match="two leaves are called params/a/b, which is their name"):
        zero_jax.shard_train_state(state, 2, executor="explicit", offload=Nvme(tmp_path))
    assert not any(tmp_path.iterdir())


def test_several_states_are_refused(tmp_path):
    both = {"g": create(optax.adam(1e-2)), "d": create(optax.adam(1e-2))}
    with pytest.raises(ValueError, match="one Nvme path holds one state"):
        zero_jax.shard_train_state(both, 2, executor="explicit", offload=Nvme(tmp_path))


def test_a_directory_that_goes_away_says_so(tmp_path):
    state, step = lay_out(tmp_path), zero_jax.make_train_step(loss)
    state, _ = step(state, zero_jax.shard_batch(data(0), state))
    shutil.rmtree(tmp_path)
    for says in ("failed to begin a copy: .*No such file or directory", "failed to begin"):
        with pytest.raises(OSError, match=says):
            step(state, zero_jax.shard_batch(data(1), state))


def test_an_array_in_files_is_no_argument_of_a_jit(tmp_path):
    state = lay_out(tmp_path)
    with pytest.raises(TypeError, match=r"DiskArray\(opt_state/0/mu/.*after 0 steps\)"):
        jax.jit(lambda state: state.params)(state)


def test_buffer_that_is_too_small_says_by_how_much(tmp_path):
    """Adafactor sees a stack whole: its part on one of 2 devices is four times in the buffer."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    with pytest.raises(ValueError, match="buffer_bytes=500: .*expected (?P<more>[0-9]+) more") as e:
        lay_out(tmp_path, tx=tx, buffer_bytes=500)
    assert not any(tmp_path.iterdir())
    more = int(str(e.value).split("expected ")[1].split(" more")[0])
    with pytest.raises(ValueError, match=f"buffer_bytes={500 + more - 8}"):
        lay_out(tmp_path, tx=tx, buffer_bytes=500 + more - 8)


def test_disk_that_is_too_small_says_by_how_much(tmp_path, monkeypatch):
    """Two copies of 8 bytes a parameter."""
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="is to hold two copies of .* too little. Free it"):
        lay_out(tmp_path)


def test_only_the_explicit_step_and_only_by_donation(tmp_path):
    with pytest.raises(ValueError, match='pass executor="explicit"'):
        laid_out(optax.adamw(1e-2), 2, Nvme(tmp_path), executor="annotated")
    state = lay_out(tmp_path)
    step = zero_jax.make_train_step(loss, donate=False)
    with pytest.raises(ValueError, match="donate=False: the optimizer state lies in files"):
        step(state, zero_jax.shard_batch(data(0), state))


def test_optimizer_that_needs_everything_is_refused(tmp_path):
    tx = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0), optax.scale(-1e-2))
    with pytest.raises(ValueError, match="the optimizer needs the state of 5 parameters at once"):
        lay_out(tmp_path, tx=tx)
    assert not any(tmp_path.iterdir())


def test_optimizer_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no arrays, so that there is nothing to put into"):
        lay_out(tmp_path, tx=optax.sgd(1e-2))


def test_old_state_is_stale(tmp_path):
    state = lay_out(tmp_path)
    train(state)
    old = next(x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray))
    assert old.is_deleted()
    with pytest.raises(RuntimeError, match="of the state after 0 steps, and .* the one after 1"):
        train(state)


def test_full_disk_loses_nothing(tmp_path):
    """A write that the system refuses: the letter names the step that is there, and it is."""
    state = train(lay_out(tmp_path), 2)
    before = bits(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        with pytest.raises(OSError, match="failed to write: .*the state after 2 steps is complete"):
            train(state, first=2)
        assert len([*tmp_path.glob("process_0/*/complete")]) == 1  # the other is no longer
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises((OSError, RuntimeError)):
        train(state, first=2)
    disk_of(state).close()
    resumed = lay_out(tmp_path, "resume")
    for was, now in zip(before, bits(resumed), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_damaged_piece_is_an_error(damage, tmp_path):
    """Zeros in its place would train on."""
    state = train(lay_out(tmp_path), 1)
    for chunk in tmp_path.glob("process_0/*/opt_state/0/mu/head/*/c/**/*"):
        if chunk.is_file() and damage == "deleted":
            chunk.unlink()
        elif chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(OSError, match="failed to read opt_state/0/mu/head.* is damaged. Restore"):
        train(state)


def test_layout_says_what_is_on_disk(tmp_path):
    """8 bytes a parameter, half on each of 2 devices; the table has them."""
    state = lay_out(tmp_path)
    layout = zero_jax.layout_of(state)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    assert layout.disk_bytes_per_device["opt_state"] * 2 >= 8 * parameters
    assert layout.bytes_per_device["opt_state"] == 4  # the count
    assert "on disk; " in str(layout) and "KiB on disk" in str(layout)
    assert {r.memory for r in layout.report() if r.tree == "opt_state"} == {"device", "disk"}
