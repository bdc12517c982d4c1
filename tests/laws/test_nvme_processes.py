"""Law: two processes, each with the files of its own devices, train as one does.

They meet over gloo. Each has a directory of its own; a run goes on where the last one ended.
"""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
from laws.offload_net import create, data, loss
from laws.step_subjects import mesh_of

import zero_jax

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
SCRIPT = """
import functools, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, optax
rank, port, existing, last = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{{port}}", num_processes=2, process_id=int(rank))
import zero_jax
from laws.offload_net import create, data, loss
policy = zero_jax.Nvme({folder!r}, buffer_bytes=8000, existing=existing)
state = zero_jax.init_train_state(
    functools.partial(create, optax.adamw(1e-2)), stage=2, executor="explicit", offload=policy,
    rules={{"blocks/*": "stacked"}}, mesh=jax.sharding.Mesh(jax.devices(), ("data",)),
)
step = zero_jax.make_train_step(loss)
while int(state.step) < int(last):
    rows = [np.split(x, 2)[int(rank)] for x in data(int(state.step))]
    lies = jax.sharding.NamedSharding(zero_jax.layout_of(state).mesh, jax.P("data"))
    batch = tuple(jax.make_array_from_process_local_data(lies, x) for x in rows)
    state, metrics = step(state, batch)
    print("loss", float(metrics.loss), flush=True)
"""


def ran(folder, existing, last):
    """Exit status, output and errors of the two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = SCRIPT.format(tests=str(TESTS), folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(port), existing, str(last)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def train(folder, existing, last):
    """Losses that the two processes print."""
    found = ran(folder, existing, last)
    for status, _, error in found:
        assert status == 0, error
    outputs = [out.splitlines() for _, out, _ in found]
    return [[float(x.split()[1]) for x in lines if x[:4] == "loss"] for lines in outputs]


def test_two_processes_train_and_resume_as_one(tmp_path):
    state = zero_jax.init_train_state(
        functools.partial(create, optax.adamw(1e-2)), stage=2, executor="explicit",
        rules={"blocks/*": "stacked"}, mesh=mesh_of(data=4),
    )  # fmt: skip
    step, expected = zero_jax.make_train_step(loss), []
    for i in range(5):
        state, metrics = step(state, zero_jax.shard_batch(data(i), state))
        expected.append(float(metrics.loss))
    first = train(tmp_path, "refuse", 3)
    assert {d.name for d in tmp_path.iterdir()} == {"process_0", "process_1"}
    second = train(tmp_path, "resume", 5)
    for losses in zip(first, second, strict=True):
        np.testing.assert_allclose([*losses[0], *losses[1]], expected, rtol=1e-5)
    held = [sum(f.stat().st_size for f in d.rglob("c/**/*")) for d in tmp_path.iterdir()]
    assert held[0] == pytest.approx(held[1], rel=0.02)  # a half each


def test_a_letter_to_one_process_ends_both(tmp_path):
    """The other would wait for it."""
    (tmp_path / "process_1").touch()
    (first, _, others), (second, _, own) = ran(tmp_path, "refuse", 1)
    assert first and second
    assert "OSError: process 1 refused; its own letter says why." in others
    assert "this process cannot write there: [Errno 20] Not a directory" in own
