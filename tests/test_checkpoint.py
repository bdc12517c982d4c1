"""Checkpoints: what is saved, what comes back, what is refused, and files that are damaged."""

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from laws import subject
from laws.offload_net import create, data, laid_out, loss
from laws.step_subjects import mesh_of

import zero_jax
from zero_jax import Nvme
from zero_jax.checkpoint import PREEMPTED, Checkpointer
from zero_jax.checkpoint.arrays import CHUNK_BYTES, chunk_of
from zero_jax.typed_keys import bits_of

TESTS = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:stage")


def lay_out(n=4, stage=2, tx=None, **options):
    state = subject.create(tx or optax.adamw(1e-2))
    return zero_jax.shard_train_state(state, stage, mesh=mesh_of(data=n), min_size=0, **options)


def bits(state, **options):
    leaves = jax.tree.leaves(zero_jax.unshard_train_state(state, **options))
    return [np.asarray(bits_of(x)) for x in leaves]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "run")
    yield made
    made.close()


def test_every_so_many_steps_and_the_last_ones_stay(tmp_path):
    with pytest.raises(ValueError, match="keep=0; expected a number of at least 1"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="every=0.5"):
        Checkpointer(tmp_path, every=0.5)  # pyright: ignore[reportArgumentType]
    checkpointer, state = Checkpointer(tmp_path, keep=2, every=3), lay_out()
    assert checkpointer.latest() is None
    saved = [i for i in range(1, 11) if checkpointer.save(i, state)]
    assert saved == [3, 6, 9]
    assert checkpointer.save(10, state, force=True) and not checkpointer.save(10, state, force=True)
    checkpointer.close()
    assert sorted(int(d.name) for d in tmp_path.iterdir() if d.name.isdigit()) == [9, 10]
    assert Checkpointer(tmp_path, read_only=True).latest() == 10


def test_extras_versions_and_the_layout_are_there(checkpointer):
    extras = {"config": {"lr": 1e-2}, "seen": [1, 2]}
    with pytest.raises(TypeError, match="extras: Object of type .* expected what JSON can hold"):
        checkpointer.save(1, lay_out(), {"x": jnp.ones(3)})
    checkpointer.save(1, lay_out(), extras)
    restored = checkpointer.restore(lay_out(2, 3))
    assert (restored.step, restored.extras) == (1, extras)
    checkpointer.wait()
    run = json.loads((checkpointer.folder / "1" / "run" / "metadata").read_text())
    assert run["versions"]["jax"] == jax.__version__ and "ZeRO stage 2" in run["layout"]


def test_the_place_of_a_data_iterator(checkpointer):
    """Grain's, in its own format; a save for one that is not given is not asked for."""

    def iterate():
        return iter(grain.MapDataset.range(100).shuffle(seed=3).to_iter_dataset())

    rows, state = iterate(), lay_out()
    for _ in range(7):
        next(rows)
    checkpointer.save(7, state, data=rows)
    expected = [next(rows) for _ in range(3)]
    fresh = iterate()
    checkpointer.restore(lay_out(), data=fresh)
    assert [next(fresh) for _ in range(3)] == expected


def test_precision_is_that_of_the_state(checkpointer):
    """Moments in bf16 stay so, and are not read into others without a word."""
    tx = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
    state, _ = subject.train_sharded(lay_out(tx=tx, offload=zero_jax.HostMemory()), 2)
    checkpointer.save(2, state)
    again = checkpointer.restore(lay_out(2, 3, tx)).state
    assert {x.dtype for x in jax.tree.leaves(again.opt_state[0].mu)} == {np.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(again.opt_state[0].nu)} == {np.dtype(np.float32)}
    with pytest.raises(ValueError, match="mu/Dense_0/bias is bfloat16.*expected float32"):
        checkpointer.restore(lay_out())


def test_what_is_donated_after_a_save_does_not_reach_the_file(checkpointer):
    state = lay_out(8, 3)
    before = bits(state)
    checkpointer.save(1, state)
    subject.train_sharded(state, 3)  # donates
    same(bits(checkpointer.restore(lay_out(2, 1)).state), before)


class Moments(NamedTuple):
    """State of an optimizer of the user's."""

    mean: Any
    nothing: None
    flag: Any


@flax.struct.dataclass
class Record:
    """A state of the user's, of odd leaves."""

    params: Any
    opt_state: Any
    key: Any
    old_key: Any
    empty: Any
    nothing: Any
    scale: Any
    average: Any


def _odd(value):
    def init(params):
        return Moments(jax.tree.map(jnp.zeros_like, params), None, jnp.bool(True))

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    params = flax.core.freeze({"a": {"w": jnp.full((9, 5), value)}, "b": [jnp.full((3,), value)]})
    wrapped = zero_jax.partition_optimizer(tx)
    record = Record(
        params, tx.init(params), jax.random.key(int(value)), jax.random.PRNGKey(int(value)),
        jnp.zeros((0, 4)), None, value * 2.0, optax.tree.cast(params, jnp.bfloat16),
    )  # fmt: skip
    return wrapped, record


def test_odd_leaves_come_back_as_the_same_types(checkpointer):
    tx, record = _odd(3.0)
    state = zero_jax.shard_train_state(record, 2, mesh=mesh_of(data=4), min_size=0, tx=tx)
    checkpointer.save(1, state, tx=tx)
    other, like = _odd(1.0)
    like = zero_jax.shard_train_state(like, 3, mesh=mesh_of(data=3), min_size=0, tx=other)
    again = checkpointer.restore(like, tx=other).state
    same(bits(again, tx=other), bits(state, tx=tx))
    assert jax.tree.structure(again) == jax.tree.structure(like)
    assert isinstance(again.params, flax.core.FrozenDict) and isinstance(again.opt_state, Moments)
    assert again.key.dtype == record.key.dtype and again.empty.shape == (0, 4)
    assert again.scale.weak_type and float(again.scale) == 6.0


def test_nnx(checkpointer):
    def lay(seed, n):
        rngs = nnx.Rngs(seed)
        norm, dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        model = nnx.Sequential(nnx.Linear(9, 6, rngs=rngs), norm, dropout)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return zero_jax.shard_train_state((model, optimizer), 3, mesh=mesh_of(data=n), min_size=0)

    def values(state):
        whole = nnx.as_pure(nnx.state(zero_jax.unshard_train_state(state)))
        return [np.asarray(bits_of(x)) for x in jax.tree.leaves(whole)]

    state = lay(0, 4)
    checkpointer.save(1, state)
    again = checkpointer.restore(lay(1, 3)).state
    assert isinstance(again[0], nnx.Sequential) and isinstance(again[1], nnx.Optimizer)
    same(values(again), values(state))


def test_two_states_in_one_checkpoint(checkpointer):
    both = {"g": lay_out(4, 2), "d": lay_out(4, 3, optax.sgd(1e-2, momentum=0.9))}
    both["d"], _ = subject.train_sharded(both["d"], 2)
    checkpointer.save(1, both)
    like = {"g": lay_out(2, 1), "d": lay_out(3, 1, optax.sgd(1e-2, momentum=0.9))}
    again = checkpointer.restore(like).state
    assert set(again) == {"g", "d"}
    for which in "gd":
        same(bits(again[which]), bits(both[which]))


@pytest.mark.parametrize("half", [False, True])
def test_files_of_a_state_are_in_it(half, checkpointer, tmp_path):
    """From `Nvme` onto devices, and onto another `Nvme`, over more devices, where it trains on."""
    precision = zero_jax.Precision.bf16() if half else None

    def lay(folder, n):
        (tmp_path / folder).mkdir()
        policy = Nvme(tmp_path / folder, buffer_bytes=50_000)
        return laid_out(optax.adamw(1e-2), 3, policy, n=n, precision=precision)

    step, state = zero_jax.make_train_step(loss), lay("a", 2)
    for i in range(2):
        state, _ = step(state, zero_jax.shard_batch(data(i), state))
    checkpointer.save(2, state)
    left = bits(state)
    resident = laid_out(optax.adamw(1e-2), 2, None, n=4, precision=precision)
    same(bits(checkpointer.restore(resident).state), left)
    again = checkpointer.restore(lay("b", 4)).state
    same(bits(again), left)
    batch = data(2)
    after, _ = step(again, zero_jax.shard_batch(batch, again))
    expected, _ = step(state, zero_jax.shard_batch(batch, state))
    for x, y in zip(bits(after), bits(expected), strict=True):
        np.testing.assert_allclose(
            x.astype(np.float32), y.astype(np.float32), atol=1e-2 if half else 1e-5
        )


def test_the_middle_of_an_accumulation_and_the_loss_scale(checkpointer):
    scale = zero_jax.DynamicScale(initial=2.0**8, growth_interval=2)
    precision = zero_jax.Precision(loss_scale=scale)

    def lay(n):
        tx = optax.MultiSteps(optax.adam(1e-2), 3)
        return laid_out(tx, 2, None, n=n, precision=precision)

    state, step = lay(4), zero_jax.make_train_step(loss)
    for i in range(4):
        state, _ = step(state, zero_jax.shard_batch(data(i), state))
    checkpointer.save(4, state)
    again = checkpointer.restore(lay(2)).state
    same(bits(again), bits(state))
    assert int(again.opt_state.inner.mini_step) == 1
    assert float(again.opt_state.scale.scale) > 2.0**8


def test_another_model_is_refused_leaf_by_leaf(checkpointer):
    checkpointer.save(1, lay_out())
    with pytest.raises(ValueError, match=r"it has, and the state has not: opt_state/0/nu/Dense_0/"):
        checkpointer.restore(lay_out(tx=optax.lion(1e-2)))
    with pytest.raises(ValueError, match="it has not: opt_state/0/trace/Dense_0/bias; .*7 more"):
        checkpointer.restore(lay_out(tx=optax.sgd(1e-2, momentum=0.9)))
    bf16 = zero_jax.Precision(params=jnp.bfloat16, master=None)
    with pytest.raises(ValueError, match=r"Dense_0/bias is float32\[24\], expected bfloat16"):
        checkpointer.restore(lay_out(precision=bf16))
    other = TrainState.create(
        apply_fn=None, params={"Dense_0": {"bias": jnp.ones(7)}}, tx=optax.adamw(1e-2)
    )
    other = zero_jax.shard_train_state(other, 1, mesh=mesh_of(data=4))
    with pytest.raises(ValueError, match=r"another shape: params/Dense_0/bias is float32\[24\]"):
        checkpointer.restore(other)


def test_weights_alone(checkpointer):
    """Fine-tuning: another optimizer and another dtype; master copies are the wide weights."""
    trained, _ = subject.train_sharded(lay_out(), 2)
    checkpointer.save(2, trained)
    like = lay_out(2, 3, optax.lion(1e-2), precision=zero_jax.Precision.bf16())
    state = checkpointer.restore(like, partial={"params"}).state
    wide = zero_jax.unshard_train_state(trained).params
    masters = zero_jax.unshard_train_state(state).opt_state.master
    same([*map(np.asarray, jax.tree.leaves(masters))], [*map(np.asarray, jax.tree.leaves(wide))])
    assert state.params["Dense_0"]["kernel"].dtype == jnp.bfloat16
    assert int(state.step) == 0
    some = checkpointer.restore(lay_out(2), partial={"params/Dense_0"}).state
    same([np.asarray(some.params["Dense_0"]["bias"])], [np.asarray(wide["Dense_0"]["bias"])])
    with pytest.raises(ValueError, match="partial=.*no leaf's name begins so; they begin with"):
        checkpointer.restore(lay_out(), partial={"weights"})


def test_what_is_not_there(checkpointer):
    with pytest.raises(FileNotFoundError, match="has not a checkpoint"):
        checkpointer.restore(lay_out())
    checkpointer.save(1, lay_out())
    with pytest.raises(FileNotFoundError, match=r"has not one of step 5; it has \[1\]"):
        checkpointer.restore(lay_out(), step=5)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted", "index"])
def test_a_damaged_checkpoint_is_passed_over(damage, checkpointer):
    state = lay_out(4, 3)
    for i in (1, 2):
        checkpointer.save(i, state)
    checkpointer.wait()
    left = bits(state)
    files = [f for f in Path(checkpointer.folder / "2" / "state").rglob("d/*") if f.is_file()]
    file = max(files, key=lambda f: f.stat().st_size)
    if damage == "flipped":
        values = np.asarray(state.params["Dense_1"]["kernel"].addressable_shards[1].data).tobytes()
        file = next(f for f in files if values in f.read_bytes())
        content = bytearray(file.read_bytes())
        content[content.index(values) + 40] ^= 4  # a number that is still one
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif damage == "deleted":
        file.unlink()
    else:
        (checkpointer.folder / "2" / "state" / "leaves.json").write_text("{")
    with pytest.warns(zero_jax.ZeroWarning, match="that of step 2 in .* is damaged"):
        restored = checkpointer.restore(lay_out(2, 1))
    assert restored.step == 1
    same(bits(restored.state), left)
    assert checkpointer.save(2, state)  # in its place
    assert checkpointer.restore(lay_out(2, 1)).step == 2


@pytest.mark.parametrize(
    ("shape", "least"),
    [((4096, 4096), 2**24), ((49999, 1024), 2**24), ((49999, 49999), 2), ((3, 2**25), 2**24)],
)
def test_a_chunk_is_a_whole_part_of_a_part(shape, least):
    """And as large as the dims' factors let it be."""
    chunk = chunk_of(shape, 4)
    assert all(n % c == 0 for n, c in zip(shape, chunk, strict=True))
    assert least <= np.prod(chunk, dtype=np.int64) * 4 <= CHUNK_BYTES


def test_a_full_disk_loses_nothing(checkpointer):
    """A write that the system refuses: the last checkpoint is there, the state trains on."""
    state = lay_out(4, 3)
    checkpointer.save(1, state)
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        with pytest.raises(OSError, match="could not be written: .*that of step 1 is complete"):
            checkpointer.save(2, state)
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpointer.latest() == 1
    assert checkpointer.restore(lay_out(2, 1)).step == 1
    state, _ = subject.train_sharded(state, 2)
    left = bits(state)
    assert checkpointer.save(2, state)
    restored = checkpointer.restore(lay_out(2, 1))
    assert restored.step == 2
    same(bits(restored.state), left)


@pytest.mark.slow
def test_two_hundred_steps_with_saves(tmp_path):
    """One compile, and no array or memory that is left behind."""
    state, step = lay_out(4, 3), subject.jit_step(donate_argnums=0)
    found = []
    with Checkpointer(tmp_path, every=5, keep=2) as checkpointer:
        for i in range(200):
            state, value = step(state, zero_jax.shard_batch(subject.batch(i), state))
            float(value)
            checkpointer.save(i + 1, state)
            if i + 1 in (50, 200):
                checkpointer.wait()
                gc.collect()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
                found.append((len(jax.live_arrays()), resident))
    assert step._cache_size() == 1
    (arrays, before), (arrays_after, after) = found
    assert arrays_after <= arrays and after - before < 50e6


def test_a_folder_has_one_run(tmp_path):
    first = Checkpointer(tmp_path)
    with pytest.raises(OSError, match=f"in use by the run of process {os.getpid()}. End that one"):
        Checkpointer(tmp_path)
    first.save(1, lay_out())
    first.wait()
    reader = Checkpointer(tmp_path, read_only=True)
    assert reader.latest() == 1
    with pytest.raises(ValueError, match="was opened with read_only=True"):
        reader.save(2, lay_out())
    first.close()
    Checkpointer(tmp_path).close()


def test_restore_or_init(tmp_path):
    checkpointer, tx = Checkpointer(tmp_path), optax.adamw(1e-2)

    def begin():
        return checkpointer.restore_or_init(
            lambda seed: create(tx).replace(step=seed), jnp.int32(0), stage=2, mesh=mesh_of(data=4)
        )

    state, step, extras = begin()
    assert (step, extras) == (0, {})
    checkpointer.save(5, state.replace(step=state.step + 5), {"a": 1})
    again = begin()
    assert (int(again.state.step), again.step, again.extras) == (5, 5, {"a": 1})
    checkpointer.close()


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import jax, numpy as np, optax, zero_jax
jax.config.update("jax_num_cpu_devices", 2)
from laws.offload_net import data, create, loss
from laws.step_subjects import EXACT
from zero_jax.checkpoint import Checkpointer
checkpointer = Checkpointer({folder!r}, every=2, keep=2)
state, start, _ = checkpointer.restore_or_init(lambda: create(optax.adamw(1e-2)), stage=2)
step = zero_jax.make_train_step(loss, compiler_options=EXACT)
print("at", start, flush=True)
for i in range(start, int(sys.argv[1])):
    state, m = step(state, zero_jax.shard_batch(data(i), state))
    print("loss", i + 1, np.asarray(m.loss).tobytes().hex(), flush=True)
    checkpointer.save(i + 1, state)
    checkpointer.exit_if_preempted(i + 1, state)
checkpointer.close()
"""


def start(folder, steps):
    """A training process of its own."""
    script = SCRIPT.format(tests=str(TESTS), folder=str(folder))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(steps)], stdout=subprocess.PIPE, text=True, env=env
    )


def until(process, line):
    """Its output up to a line that begins so."""
    seen = []
    for text in process.stdout:
        seen.append(text)
        if text.startswith(line):
            break
    return seen


def losses(lines):
    return {int(n): value for n, value in (x.split()[1:] for x in lines if x.startswith("loss"))}


@pytest.mark.slow
def test_a_run_that_is_ended_or_killed_goes_on(tmp_path):
    """SIGTERM saves and exits with status 75; kill -9 loses no step beyond the last save."""
    whole = losses(start(tmp_path / "whole", 12).communicate(timeout=300)[0].splitlines())
    assert len(whole) == 12
    seen, folder = {}, tmp_path / "ended"
    process = start(folder, 10**6)
    seen |= losses(until(process, "loss 3"))
    process.terminate()
    rest, _ = process.communicate(timeout=300)
    seen |= losses(rest.splitlines())
    assert process.returncode == PREEMPTED
    last = max(seen)
    for more in (3, 4, 5):  # in the middle of a step, or of a save
        process = start(folder, 10**6)
        lines = until(process, f"loss {last + more}")
        process.kill()
        lines += process.communicate(timeout=300)[0].splitlines()
        begun = int(lines[0].split()[1])
        assert begun >= last - (0 if more == 3 else 4)  # every second step, one still on its way
        assert more != 3 or begun == last  # what SIGTERM saved
        seen |= losses(lines)
        last = max(losses(lines))
    lines = start(folder, last + 2).communicate(timeout=300)[0].splitlines()
    seen |= losses(lines)
    assert {n: seen[n] for n in whole if n in seen} == {n: whole[n] for n in whole if n in seen}
    assert len(seen) == last + 2
