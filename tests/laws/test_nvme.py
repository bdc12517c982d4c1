"""Law: a state in files trains as one on the device, bit for bit, and outlives its process.

Ten steps. The buffer is small, so that leaves pass in many pieces, the last of them smaller. The
compiler is kept from instructions that multiply and add with one rounding, as in `test_offload`;
gradients wait on the device, since a norm that is summed layer by layer may differ in its last bit.
"""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws.offload_net import STEPS, create, data, laid_out, loss
from laws.offload_runs import OPTIMIZERS
from laws.step_subjects import EXACT, mesh_of

import zero_jax
from zero_jax import DiskArray, Nvme

N = 4
TESTS = Path(__file__).parents[1]

OPTIMIZERS = OPTIMIZERS | {"sgd momentum": lambda: optax.sgd(1e-3, momentum=0.9)}
"""At ten times this rate gradients become infinite, which the explicit step refuses."""
WHOLE = {"adafactor": 2**19, "MultiSteps": 2**19}
"""Optimizers that see leaves whole, and the buffer that takes."""


@functools.cache
def run(optimizer, stage, folder, microbatches=1, half=False, clip_norm=None):
    """Losses of the steps, and the last state, whole; in a folder, or with None on the device."""
    offload = None
    if folder is not None:
        buffer_bytes = WHOLE.get(optimizer, 8000)
        offload = Nvme(folder, gradients="device", buffer_bytes=buffer_bytes)
    precision = zero_jax.Precision.bf16() if half else None
    state = laid_out(OPTIMIZERS[optimizer](), stage, offload, n=N, precision=precision)
    step = zero_jax.make_train_step(
        loss, microbatches=microbatches, clip_norm=clip_norm, compiler_options=EXACT
    )
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, zero_jax.shard_batch(data(i), state))
        losses.append(np.asarray(metrics.loss))
        if folder is not None:
            leaves = jax.tree.leaves(state.opt_state)
            assert all(isinstance(x, DiskArray) == (x.shape != ()) for x in leaves)
    return losses, jax.tree.map(np.asarray, zero_jax.unshard_train_state(state))


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("optimizer", "stage", "options"),
    [
        ("adamw", 1, {}),
        ("adamw", 2, {"half": True, "clip_norm": 0.5}),
        ("adamw", 3, {"half": True, "microbatches": 3}),
        ("lion", 2, {}),
        ("sgd momentum", 1, {}),
        ("adafactor", 3, {}),
        ("MultiSteps", 2, {"microbatches": 3}),
        ("masked", 3, {}),
    ],
)
def test_bits_are_those_of_a_resident_state(optimizer, stage, options, tmp_path):
    same_bits(run(optimizer, stage, tmp_path, **options), run(optimizer, stage, None, **options))


def test_buffer_is_bounded_and_smaller_than_the_state(tmp_path):
    """12 bytes a parameter in files, four times the buffer and more; pieces on their way fit."""
    buffer_bytes = 12_000
    policy = Nvme(tmp_path, buffer_bytes=buffer_bytes)
    state = laid_out(optax.adamw(1e-2), 2, policy, n=N, precision=zero_jax.Precision.bf16())
    held = sum(zero_jax.layout_of(state).disk_bytes_per_device.values()) * N
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    assert held >= 12 * parameters and held > 4 * buffer_bytes
    step = zero_jax.make_train_step(loss)
    state, _ = step(state, zero_jax.shard_batch(data(0), state))
    disk = jax.tree.leaves(state.opt_state.master)[0].disk
    assert 0 < disk.peak_bytes <= buffer_bytes and disk.held_bytes == 0
    assert step.traffic.from_disk_bytes == held
    assert held < step.traffic.to_disk_bytes < held + 64  # and the count, and the step


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jax, numpy as np, optax, zero_jax
jax.config.update("jax_num_cpu_devices", 2)
from laws.offload_net import data, laid_out, loss
from laws.step_subjects import EXACT
policy = zero_jax.Nvme({folder!r}, buffer_bytes=8000, existing=sys.argv[1])
state = laid_out(optax.adamw(1e-2), 2, policy)
step = zero_jax.make_train_step(loss, compiler_options=EXACT)
print("at", int(state.step), flush=True)
while int(state.step) < int(sys.argv[2]):
    state, m = step(state, zero_jax.shard_batch(data(int(state.step)), state))
    print("loss", int(state.step), np.asarray(m.loss).tobytes().hex(), flush=True)
"""


def start(folder, existing, steps):
    """A training process of its own."""
    script = SCRIPT.format(tests=str(TESTS), folder=str(folder))
    return subprocess.Popen(
        [sys.executable, "-c", script, existing, str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )


def lines(text):
    """Step -> the bits of its loss."""
    return {
        int(n): bits for n, bits in (x.split()[1:] for x in text.splitlines() if x[:4] == "loss")
    }


@pytest.mark.slow
def test_killed_run_goes_on_from_its_last_complete_step(tmp_path):
    """kill -9 in the middle of writing, three times; the losses are those of a run left alone."""
    (tmp_path / "whole").mkdir()
    out, err = start(tmp_path / "whole", "refuse", 12).communicate(timeout=300)
    whole = lines(out)
    assert len(whole) == 12, err
    folder = tmp_path / "killed"
    folder.mkdir()
    seen, last = {}, 0
    for existing, steps, pause in (
        ("refuse", 3, 0.004),
        ("resume", 2, 0.011),
        ("resume", 1, 0.0),
    ):
        process = start(folder, existing, 10**6)
        assert process.stdout is not None
        output = []
        for line in process.stdout:  # a few steps more than there were, and then a moment
            output.append(line)
            if line.startswith("loss") and int(line.split()[1]) >= last + steps:
                break
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        rest, err = process.communicate(timeout=60)
        output.append(rest)
        begun = int(output[0].split()[1])
        assert begun >= last, err  # no complete step is lost
        seen |= lines("".join(output))
        last = max(seen)
    out, err = start(folder, "resume", 12).communicate(timeout=300)
    seen |= lines(out)
    assert {n: seen[n] for n in whole} == whole, err  # and none is applied twice


@pytest.mark.parametrize("half", [False, True])
def test_state_in_files_is_whole(half, tmp_path):
    """What resumes has the bits of what was left: parameters, statistics, counts, keys."""
    model = nnx.Sequential(nnx.Linear(9, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(1)))

    def lay_out(existing):
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        precision = zero_jax.Precision.bf16() if half else None
        return zero_jax.shard_train_state(
            (model, optimizer), 3, mesh=mesh_of(data=2), executor="explicit",
            offload=Nvme(tmp_path, buffer_bytes=2000, existing=existing), precision=precision,
        )  # fmt: skip

    def mean_square(model, batch):
        return jnp.mean(model(batch.astype(jnp.bfloat16 if half else batch.dtype)) ** 2)

    state = lay_out("refuse")
    step = zero_jax.make_train_step(mean_square)
    for i in range(3):
        batch = np.random.default_rng(i).normal(size=(8, 9)).astype(np.float32)
        state, _ = step(state, zero_jax.shard_batch(batch, state))
    left = jax.tree.map(np.asarray, nnx.state(zero_jax.unshard_train_state(state)[0]))
    moments = jax.tree.map(np.asarray, nnx.state(zero_jax.unshard_train_state(state)[1]))
    for leaf in jax.tree.leaves(nnx.as_pure(nnx.state(state[1]))):
        if isinstance(leaf, DiskArray):
            leaf.disk.close()
    again = zero_jax.unshard_train_state(lay_out("resume"))
    same_bits(left, jax.tree.map(np.asarray, nnx.state(again[0])))
    same_bits(moments, jax.tree.map(np.asarray, nnx.state(again[1])))


def test_hook_and_its_averages_are_in_files(tmp_path):
    """An average that `after_update` keeps is written with the state, and comes back."""

    def with_average(existing):
        plain = create(optax.adamw(1e-2))
        record = {"params": plain.params, "opt_state": plain.opt_state, "ema": plain.params}
        tx = zero_jax.partition_optimizer(optax.adamw(1e-2))
        return tx, zero_jax.shard_train_state(
            record, 2, mesh=mesh_of(data=N), executor="explicit", tx=tx,
            offload=Nvme(tmp_path, buffer_bytes=8000, existing=existing),
        )  # fmt: skip

    def average(state):
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], state["params"])
        return {**state, "ema": ema}

    tx, state = with_average("refuse")
    before = jax.tree.map(np.asarray, state["ema"])
    step = zero_jax.make_train_step(loss, tx=tx, after_update=average)
    for i in range(2):
        state, _ = step(state, zero_jax.shard_batch(data(i), tx))
    left = jax.tree.map(np.asarray, (state["params"], state["ema"]))
    moved = [np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, left[1])), strict=True)]
    assert all(moved)
    jax.tree.leaves(state["opt_state"])[1].disk.close()
    _, again = with_average("resume")
    same_bits(left, jax.tree.map(np.asarray, (again["params"], again["ema"])))


@pytest.mark.parametrize("what", ["frozen", "hook", "params on the host"])
def test_steps_of_other_kinds(what, tmp_path):
    """Moments of a frozen parameter, parameters that a hook changes, stacks without moments."""
    options, params, tx = {}, False, optax.adamw(1e-2)
    if what == "frozen":
        options = {"frozen": lambda path: path == "embed"}
    if what == "hook":
        clip = functools.partial(jax.tree.map, lambda p: jnp.clip(p, -0.2, 0.2))
        options = {"after_update": lambda state: state.replace(params=clip(state.params))}
    if what == "params on the host":
        labels = dict.fromkeys(("embed", "head"), "a") | {"blocks": "s"}
        tx = optax.partition({"a": tx, "s": optax.sgd(1e-3)}, labels)
        params = True

    def trained(offload):
        state = laid_out(tx, 2, offload, n=2)
        step = zero_jax.make_train_step(loss, compiler_options=EXACT, **options)
        for i in range(3):
            state, _ = step(state, zero_jax.shard_batch(data(i), state))
        whole = jax.tree.map(np.asarray, zero_jax.unshard_train_state(state))
        return whole, state

    policy = Nvme(tmp_path, params=params, gradients="device", buffer_bytes=60_000)
    ours, state = trained(policy)
    same_bits(ours, trained(None)[0])
    next(x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray)).disk.close()
    again = laid_out(tx, 2, dataclasses.replace(policy, existing="resume"), n=2)
    same_bits(ours, jax.tree.map(np.asarray, zero_jax.unshard_train_state(again)))


def test_born_in_files_is_as_laid_out(tmp_path):
    """`init_train_state` makes the same state leaf by leaf, parameters of their master copies.

    XLA rounds what it draws otherwise where it is computed with other leaves.
    """
    for name in ("born", "placed"):
        (tmp_path / name).mkdir()

    def settled(make, name, *first):
        return make(
            *first, stage=2, mesh=mesh_of(data=N), executor="explicit",
            offload=Nvme(tmp_path / name, buffer_bytes=8000), precision=zero_jax.Precision.bf16(),
        )  # fmt: skip

    tx = optax.adamw(1e-2)
    born = settled(zero_jax.init_train_state, "born", functools.partial(create, tx))
    placed = settled(zero_jax.shard_train_state, "placed", create(tx))
    whole = [jax.tree.map(np.asarray, zero_jax.unshard_train_state(s)) for s in (born, placed)]
    for x, y in zip(*(jax.tree.leaves(w.opt_state) for w in whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    for w in whole:
        narrow = jax.tree.map(lambda m: np.asarray(m.astype(jnp.bfloat16)), w.opt_state.master)
        same_bits(narrow, w.params)


def test_mark_says_what_is_there(tmp_path):
    """One complete copy after every step, of the step's number."""
    state = laid_out(optax.adamw(1e-2), 1, Nvme(tmp_path, buffer_bytes=8000))
    step = zero_jax.make_train_step(loss)
    for i in range(3):
        state, _ = step(state, zero_jax.shard_batch(data(i), state))
        marks = [json.loads(f.read_text()) for f in tmp_path.glob("process_0/*/complete")]
        assert max(mark["version"] for mark in marks) == i + 1
