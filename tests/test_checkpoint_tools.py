"""Checkpoints without a state: inspected, compared, exported, and weights read from elsewhere."""

import json
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
from zero_jax import cli
from zero_jax.checkpoint import Checkpointer, import_safetensors, open_checkpoint
from zero_jax.checkpoint.difference import differences

pytestmark = pytest.mark.filterwarnings("ignore:stage")


def lay_out(n=4, stage=3, half=True, tx=None):
    precision = zero_jax.Precision.bf16() if half else None
    return zero_jax.shard_train_state(
        subject.create(tx or optax.adamw(1e-2)), stage, mesh=mesh_of(data=n), min_size=0,
        precision=precision,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of two checkpoints of a state with master copies, and the last state, whole."""
    folder, state = tmp_path_factory.mktemp("run"), lay_out()
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
        state, _ = subject.train_sharded(state, 1)
        checkpointer.save(2, state, {"config": "lr = 0.01", "seen": {"rows": 48}})
    return folder, zero_jax.unshard_train_state(state)


def said(capsys, *arguments, status=0):
    """What a command prints."""
    if status:
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments])
        assert ended.value.code == status
    else:
        cli.main([*arguments])
    return capsys.readouterr()


def test_inspect(saved, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = said(capsys, "inspect", str(saved[0])).out
    assert f"step 2 of {saved[0]} (there are 1, 2)".replace("\n", "") in out.replace("\n", "")
    assert "params/Dense_1/kernel" in out and "[24, 37]" in out and "bfloat16" in out
    assert "master/Dense_1/kernel" in out and f"jax {jax.__version__}" in out
    assert "lr = 0.01" in out and '"rows": 48' in out
    total = sum(f.bytes for f in open_checkpoint(saved[0]).index.values())
    assert total == 14 * sum(x.size for x in jax.tree.leaves(saved[1].params)) + 8


def test_inspect_says_what_is_not_there(saved, tmp_path, capsys):
    err = said(capsys, "inspect", str(tmp_path), status=1).err
    assert err.startswith("zero-jax: ") and "there is no checkpoint in it" in err
    err = said(capsys, "inspect", str(saved[0]), "--step", "7", status=1).err
    assert "no checkpoint of step 7 in it; there are [1, 2]" in err.replace("\n", " ")


@pytest.mark.slow
def test_one_device_opens_what_four_wrote(saved, tmp_path):
    """Logical arrays, whole, where no device was asked for (C23)."""
    script = f"""
import numpy as np
from zero_jax.checkpoint import open_checkpoint
opened = open_checkpoint({str(saved[0])!r})
found = {{name: opened.read(name) for name in opened.index}}
np.savez({str(tmp_path / "found.npz")!r}, **{{n: x for n, x in found.items() if n[:6] == "master"}})
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=300)
    found = np.load(tmp_path / "found.npz")
    masters = jax.tree_util.tree_leaves_with_path(saved[1].opt_state.master)
    assert len(found.files) == len(masters)
    for path, x in masters:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(found[f"master/{name}"], np.asarray(x))


def test_diff(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder = str(saved[0])
    same = said(capsys, "diff", folder, folder).out
    leaves = len(open_checkpoint(folder).index)
    assert same.strip() == f"{leaves} of {leaves} leaves are the same, bit for bit"
    out = said(capsys, "diff", folder, folder, "--step-a", "1", status=1).out
    assert "master/Dense_1/kernel" in out and "values" in out
    found = {d.name: d for d in differences(open_checkpoint(folder, 1), open_checkpoint(folder))}
    a, b = (open_checkpoint(folder, s).read("master/Dense_1/kernel") for s in (1, 2))
    kernel = found["master/Dense_1/kernel"]
    assert kernel.largest == pytest.approx(np.abs(a.astype(float) - b).max())
    assert (kernel.differing, kernel.size) == ((a != b).sum(), a.size)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, lay_out(half=False, tx=optax.lion(1e-2)))
    kinds = {
        d.name: d.what for d in differences(open_checkpoint(folder), open_checkpoint(tmp_path))
    }
    assert kinds["master/Dense_1/kernel"] == "only in A"
    assert kinds["params/Dense_1/kernel"] == "dtype" and kinds["other/step"] == "values"


def test_a_damaged_checkpoint_is_an_error(tmp_path, capsys):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, lay_out())
    for file in Path(tmp_path / "1" / "state" / "process_0" / "d").iterdir():
        file.unlink()
    err = said(capsys, "diff", str(tmp_path), str(tmp_path), status=1).err
    assert err.startswith(f"zero-jax: {tmp_path}, step 1: ")


def test_a_folder_as_seen_from_here(saved, capsys, monkeypatch):
    """Relative, as people write it."""
    monkeypatch.chdir(saved[0].parent)
    assert "are the same" in said(capsys, "diff", saved[0].name, saved[0].name).out


def test_weights_are_the_parameters_alone(tmp_path, capsys):
    """Two states in a container, of which an optimizer keeps what it calls params."""

    def init(params):
        return {"params": params, "master": jax.tree.map(jnp.zeros_like, params)}

    slow = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"g": lay_out(half=False, tx=slow), "d": lay_out()})
    found = dict(open_checkpoint(tmp_path).weights())
    leaves = jax.tree.leaves(subject.create(optax.sgd(1.0)).params)
    assert len(found) == 2 * len(leaves)
    assert found["g/Dense_1/kernel"] == "g/params/Dense_1/kernel"
    assert found["d/Dense_1/kernel"] == "d/master/Dense_1/kernel"
    out = said(capsys, "inspect", str(tmp_path)).out
    assert "g/opt_state" in out and "d/master" in out


@pytest.mark.parametrize("sharded", [None, "0.000004GB"])
def test_out_and_in_again(sharded, saved, tmp_path, capsys):
    """Master copies go out, in fp32; they come into a state of another layout bit for bit."""
    target = tmp_path / "model.safetensors"
    options = ("--sharded", sharded) if sharded else ()
    out = said(capsys, "export", str(saved[0]), str(target), *options).out
    names = {f.name for f in tmp_path.iterdir()}
    if sharded:
        listing = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        files = set(listing["weight_map"].values())
        assert names == files | {"model.safetensors.index.json"} and len(files) > 3
        sizes = [f.stat().st_size for f in tmp_path.glob("model-*.safetensors")]
        assert listing["metadata"]["total_size"] <= sum(sizes)
        target = tmp_path / "model.safetensors.index.json"
    else:
        assert names == {"model.safetensors"}
    assert all(name in out.replace("\n", "") for name in names)
    state = import_safetensors(target, lay_out(3, 2, tx=optax.lion(1e-2)))
    whole = zero_jax.unshard_train_state(state)
    for x, y in zip(
        jax.tree.leaves((whole.opt_state.master, whole.params)),
        jax.tree.leaves((saved[1].opt_state.master, saved[1].params)),
        strict=True,
    ):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_export_in_another_dtype(saved, tmp_path, capsys):
    target = tmp_path / "half.safetensors"
    said(capsys, "export", str(saved[0]), str(target), "--dtype", "bfloat16")
    header = target.read_bytes()
    length = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + length])
    assert tensors["Dense_1.kernel"]["dtype"] == "BF16" and length % 8 == 0
    start, stop = tensors["Dense_1.kernel"]["data_offsets"]
    raw = np.frombuffer(header[8 + length :][start:stop], jnp.bfloat16).reshape(24, 37)
    master = np.asarray(saved[1].opt_state.master["Dense_1"]["kernel"])
    np.testing.assert_array_equal(raw, master.astype(jnp.bfloat16))


def test_import_says_what_does_not_fit(saved, tmp_path, capsys):
    target = tmp_path / "model.safetensors"
    said(capsys, "export", str(saved[0]), str(target))
    with pytest.raises(ValueError, match="it has Dense_0.bias, .* that are no parameters"):
        import_safetensors(target, lay_out(), rename=lambda path: f"model.{path}")
    target.write_bytes(target.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not whole; the file was cut off"):
        import_safetensors(target, lay_out())
    target.write_bytes(b"12345678")
    with pytest.raises(ValueError, match="this is no safetensors file"):
        import_safetensors(target, lay_out())


@pytest.mark.slow
def test_export_holds_one_leaf_at_a_time(tmp_path):
    """40 leaves of 16 MB: what a process that exports holds grows by little more than one."""
    script = f"""
import resource
from pathlib import Path
import jax.numpy as jnp, optax, zero_jax
from flax.training.train_state import TrainState
from zero_jax.checkpoint import Checkpointer, export, open_checkpoint
import sys
folder = {str(tmp_path)!r}
if sys.argv[1] == "save":
    params = {{f"w{{i}}": jnp.full((2000, 2000), i + 0.5) for i in range(40)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, zero_jax.shard_train_state(state, 0))
else:
    opened = open_checkpoint(folder)
    opened.read("params/w0")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(opened, Path(folder, "out.safetensors"))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for what in ("save", "export"):
        run = [sys.executable, "-W", "ignore", "-c", script, what]
        out = subprocess.run(run, check=True, env=env, timeout=300, capture_output=True, text=True)
    assert int(out.stdout) * 1024 < 16e6 + 200e6
