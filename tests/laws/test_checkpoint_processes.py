"""Law: a checkpoint is one thing, however many processes write it, read it, or are told to end.

Two processes with two devices each meet over gloo; this one has all devices by itself.
"""

import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from laws.offload_net import create, data, loss
from laws.step_subjects import mesh_of

import zero_jax
from zero_jax.checkpoint import PREEMPTED, Checkpointer

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
STEPS = 6
SCRIPT = """
import functools, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, optax
rank, port, last = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{{port}}", num_processes=2, process_id=int(rank))
import zero_jax
from laws.offload_net import create, data, loss
from zero_jax.checkpoint import Checkpointer
checkpointer = Checkpointer({folder!r}, every=3)
state, start, _ = checkpointer.restore_or_init(
    functools.partial(create, optax.adamw(1e-2)), stage=3, executor="explicit",
    rules={{"blocks/*": "stacked"}}, mesh=jax.sharding.Mesh(jax.devices(), ("data",)),
)
step = zero_jax.make_train_step(loss)
for i in range(start, int(last)):
    rows = [np.split(x, 2)[int(rank)] for x in data(i)]
    lies = jax.sharding.NamedSharding(zero_jax.layout_of(state).mesh, jax.P("data"))
    batch = tuple(jax.make_array_from_process_local_data(lies, x) for x in rows)
    state, metrics = step(state, batch)
    print("loss", i + 1, float(metrics.loss), flush=True)
    checkpointer.save(i + 1, state)
    checkpointer.exit_if_preempted(i + 1, state)
checkpointer.close()
"""


def start(folder, last):
    """The two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = SCRIPT.format(tests=str(TESTS), folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(port), str(last)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip


def ended(processes, status=0):
    """Step -> its loss, as both say."""
    said = [process.communicate(timeout=300) for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == status, error
    found = [losses(output.splitlines()) for output, _ in said]
    assert found[0] == found[1]
    return found[0]


def losses(lines):
    return {int(x.split()[1]): float(x.split()[2]) for x in lines if x.startswith("loss")}


def laid_out(n, stage, tx):
    return zero_jax.init_train_state(
        functools.partial(create, tx), stage=stage, executor="explicit",
        rules={"blocks/*": "stacked"}, mesh=mesh_of(data=n),
    )  # fmt: skip


@functools.cache
def alone():
    """Losses of one process, and its state after every third step, whole."""
    state, found, left = laid_out(4, 3, optax.adamw(1e-2)), {}, {}
    step = zero_jax.make_train_step(loss)
    for i in range(STEPS):
        state, metrics = step(state, zero_jax.shard_batch(data(i), state))
        found[i + 1] = float(metrics.loss)
        left[i + 1] = jax.tree.map(np.asarray, zero_jax.unshard_train_state(state).params)
    return found, left


def test_two_write_and_one_reads_and_two_read_what_one_wrote(tmp_path):
    folder, (expected, left) = tmp_path / "run", alone()
    first = ended(start(folder, 3))
    with Checkpointer(folder, every=1) as checkpointer:
        restored = checkpointer.restore(laid_out(6, 1, optax.adamw(1e-2)))
        assert restored.step == 3
        whole = zero_jax.unshard_train_state(restored.state).params
        for x, y in zip(*map(jax.tree.leaves, (whole, left[3])), strict=True):
            np.testing.assert_allclose(np.asarray(x), y, atol=1e-5)
        step = zero_jax.make_train_step(loss)
        state, metrics = step(restored.state, zero_jax.shard_batch(data(3), restored.state))
        first[4] = float(metrics.loss)
        checkpointer.save(4, state)
    found = first | ended(start(folder, STEPS))
    assert set(found) == set(expected)
    np.testing.assert_allclose([found[i] for i in expected], [*expected.values()], rtol=1e-5)


def test_a_signal_to_one_ends_both_with_a_checkpoint(tmp_path):
    processes = start(tmp_path / "run", 10**6)
    seen = []
    for line in processes[1].stdout:
        seen.append(line)
        if line.startswith("loss 2"):
            break
    processes[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120) for process in processes]
    for process, (_, error) in zip(processes, said, strict=True):
        assert process.returncode == PREEMPTED, error
    last = max(losses(said[0][0].splitlines()))
    assert Checkpointer(tmp_path / "run", read_only=True).latest() == last
