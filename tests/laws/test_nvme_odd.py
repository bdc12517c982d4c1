"""Law: what is odd about a model, an optimizer or a run does not change what is in files.

Scalars, arrays without elements, integers with moments; leaves that only some steps change; one
step for several states; steps that fail before anything is given away.
"""

import dataclasses
import functools
import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws import offload_net as net
from laws.offload_runs import same_bits
from laws.step_subjects import EXACT, mesh_of

import zero_jax
from zero_jax import DiskArray, HostMemory, Nvme

BUFFER = 20_000


def create(tx):
    """A matrix, a scalar, an array without elements, integers."""
    params = {
        "w": jax.random.normal(jax.random.key(0), (24, 40)) * 0.3,
        "s": jnp.float32(1),
        "z": jnp.zeros((0, 4)),
        "i": jnp.arange(12).reshape(3, 4),
    }
    return TrainState.create(apply_fn=None, params=params, tx=tx)


def loss(params, batch):
    p = {k: x.astype(jnp.float32) for k, x in params.items()}
    return jnp.mean((batch @ p["w"] * p["s"] - p["i"][0, 1]) ** 2) + jnp.sum(p["z"])


def data(i):
    return np.random.default_rng(i).normal(size=(8, 24)).astype(np.float32)


def laid_out(offload, tx=None, half=False):
    precision = zero_jax.Precision.bf16() if half else None
    return zero_jax.shard_train_state(
        create(tx or optax.adamw(1e-2)), 2, mesh=mesh_of(data=2), min_size=0,
        executor="explicit", offload=offload, precision=precision,
    )  # fmt: skip


def make(loss=loss, **options):
    return zero_jax.make_train_step(loss, compiler_options=EXACT, **options)


def train(state, step, steps, tx=None):
    for i in range(steps):
        state, _ = step(state, zero_jax.shard_batch(data(i), tx or state))
    return state


def bits(state, tx=None):
    return jax.tree.map(np.asarray, zero_jax.unshard_train_state(state, tx=tx))


def close(state):
    """Let go of the directory."""
    next(x for x in jax.tree.leaves(state) if isinstance(x, DiskArray)).disk.close()


@pytest.mark.parametrize("half", [False, True])
def test_scalars_integers_and_nothing(half, tmp_path):
    resident = bits(train(laid_out(None, half=half), make(), 3))
    policy = Nvme(tmp_path, buffer_bytes=BUFFER)
    state = train(laid_out(policy, half=half), make(), 3)
    same_bits(bits(state), resident)
    assert state.params["i"].dtype == jnp.int32
    close(state)
    again = laid_out(dataclasses.replace(policy, existing="resume"), half=half)
    same_bits(bits(again), resident)


@pytest.mark.parametrize(
    "offload", [None, HostMemory(), HostMemory(update_on="host", delayed=True)]
)
def test_such_a_step_is_compiled_once(offload):
    """Moments of integers stay integers; a scalar's gradient waits on the device."""
    step = make()
    state = train(laid_out(offload), step, 3)
    assert step._jitted._cache_size() == 1
    assert jax.tree.leaves(state.params["s"])[0].dtype == jnp.float32


@pytest.mark.parametrize("offload", [HostMemory(), None])
def test_coefficients_of_all_parameters_stay_on_the_device(offload, tmp_path):
    """Muon's, which every update reads; it passes leaf by leaf."""
    tx, step = optax.contrib.muon(1e-2), make(net.loss)

    def trained(offload):
        state = net.laid_out(tx, 2, offload)
        for i in range(2):
            state, _ = step(state, zero_jax.shard_batch(net.data(i), state))
        return zero_jax.layout_of(state), bits(state)

    layout, ours = trained(offload or Nvme(tmp_path, buffer_bytes=10 * BUFFER))
    where = {p.leaf.path: p.memory for p in jax.tree.leaves(layout.opt_state)}
    assert {m for path, m in where.items() if path.endswith("ns_coeffs")} == {"device"}
    assert {m for path, m in where.items() if path.endswith("/head")} <= {"pinned_host", "disk"}
    for x, y in zip(*map(jax.tree.leaves, (ours, trained(None)[1])), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)  # matrix products, partitioned otherwise


def test_what_later_steps_leave_alone_is_kept(tmp_path):
    """An average whose hook is left out, a parameter that is frozen: as the first run left them."""

    def lay_out(existing):
        tx = zero_jax.partition_optimizer(optax.adamw(1e-2))
        plain = create(tx.inner)
        record = {"params": plain.params, "opt_state": plain.opt_state, "ema": plain.params}
        offload = Nvme(tmp_path, buffer_bytes=BUFFER, existing=existing)
        return tx, zero_jax.shard_train_state(
            record, 2, mesh=mesh_of(data=2), executor="explicit", tx=tx, offload=offload
        )

    def average(state):
        return {**state, "ema": jax.tree.map(lambda e, p: e + p, state["ema"], state["params"])}

    tx, state = lay_out("refuse")
    state = train(state, make(tx=tx, after_update=average), 2, tx)
    for _ in range(2):  # in this process the directory remembers; the next reads it off the mark
        state = train(state, make(tx=tx, frozen=lambda path: path == "w"), 1, tx)
        left = bits(state, tx)
        close(state)
        tx, state = lay_out("resume")
        same_bits(bits(state, tx), left)
    start = create(tx.inner).params["w"]
    assert np.any(left["params"]["w"] != start) and np.any(left["ema"]["w"] != start)


def test_one_step_for_several_states(tmp_path):
    """Each with its own optimizer, in its own files, or in none."""
    step, found = make(), []
    for at, rate in enumerate((1e-2, 1e-1)):
        (tmp_path / str(at)).mkdir()
        policy = Nvme(tmp_path / str(at), buffer_bytes=BUFFER)
        found.append(bits(train(laid_out(policy, optax.adamw(rate)), step, 2)))
        assert step.traffic.to_disk_bytes > 0
        found.append(bits(train(laid_out(None, optax.adamw(rate)), step, 2)))
        assert step.traffic is None
    same_bits(found[0], found[1])
    same_bits(found[2], found[3])
    assert np.any(found[0].params["w"] != found[2].params["w"])


def test_a_hook_that_raises_leaves_the_state(tmp_path):
    """It is traced before parameters are given away."""
    state = laid_out(Nvme(tmp_path, buffer_bytes=BUFFER))

    def mistaken(state):
        raise KeyError("typo")

    def reads_moments(state):
        return state.replace(params=jax.tree.map(jnp.add, state.params, state.opt_state[0].mu))

    with pytest.raises(KeyError, match="typo"):
        train(state, make(after_update=mistaken), 1)
    with pytest.raises(TypeError) as error:
        train(state, make(after_update=reads_moments), 1)
    assert "optimizer's state lies in files" in "".join(error.value.__notes__)
    assert int(train(state, make(), 1).step) == 1


def test_the_first_step_asks_for_all_the_room_it_takes(tmp_path, monkeypatch):
    """Two copies of moments fit, those with fp32 parameters do not; nothing is given away."""
    state = laid_out(Nvme(tmp_path, buffer_bytes=BUFFER))
    moments = 2 * 24 * 40 * 4
    there = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    usage = functools.partial(namedtuple("usage", "total used free"), 10**6, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * moments + 1000 - there))
    with pytest.raises(OSError, match="is to hold two copies of .* too little"):
        train(state, make(), 1)
    monkeypatch.undo()
    assert int(train(state, make(), 1).step) == 1


def test_a_frozen_parameter_stays_where_it_is(tmp_path):
    state = laid_out(Nvme(tmp_path, buffer_bytes=BUFFER))

    def where(state):
        return state.params["w"].addressable_shards[0].data.unsafe_buffer_pointer()

    before = where(state)
    assert where(train(state, make(frozen=lambda path: path == "w"), 2)) == before


def test_resume_with_another_buffer(tmp_path):
    """Adafactor passes whole with either; the average of a hook is cut anew."""

    def go_on(existing, buffer_bytes):
        tx = zero_jax.partition_optimizer(optax.adafactor(1e-2))
        plain = create(tx.inner)
        record = {"params": plain.params, "opt_state": plain.opt_state, "ema": jnp.ones((64, 64))}
        state = zero_jax.shard_train_state(
            record, 2, mesh=mesh_of(data=2), executor="explicit", tx=tx,
            offload=Nvme(tmp_path, buffer_bytes=buffer_bytes, existing=existing),
        )  # fmt: skip
        step = make(tx=tx, after_update=lambda s: {**s, "ema": s["ema"] / 2})
        state = train(state, step, 3, tx)
        close(state)
        return float(state["ema"][0, 0])

    assert go_on("refuse", 30_000) == 1 / 8
    assert go_on("resume", 60_000) == 1 / 64


def test_a_described_state_is_lowered(tmp_path):
    described = jax.eval_shape(lambda: create(optax.adamw(1e-2)))
    state = zero_jax.shard_train_state(
        described, 2, mesh=mesh_of(data=2), executor="explicit", offload=Nvme(tmp_path),
        precision=zero_jax.Precision(loss_scale=zero_jax.DynamicScale()),
    )  # fmt: skip
    batch = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    assert "reduce_scatter" in make().lower(state, batch).as_text()
    assert not any(tmp_path.iterdir())
