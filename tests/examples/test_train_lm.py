"""The examples run, agree over the stages, and leave behind what they promise."""

import csv
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import train_lm
import train_lm_nnx
from lm import schema
from lm.arguments import Arguments
from lm.model import GPT
from lm.partitioning import layouts_by_stage

from zero_jax import config
from zero_jax.checkpoint import PREEMPTED, Checkpointer

ROOT = Path(__file__).parents[2]
STEPS, EVAL_EVERY = 5, 2
TINY = f"""
[model]
layers = 2
hidden = 32
heads = 2
sequence_length = 32
tied_head = false

[data]
folder = "TEXT"
batch_size = 8
val_fraction = 0.3

[optimizer]
warmup_steps = 2

[run]
steps = {STEPS}
eval_every = {EVAL_EVERY}
eval_batches = 2
sample_bytes = 8
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A configuration of a small model on a small text."""
    text = tmp_path_factory.mktemp("text")
    for i in range(30):
        (text / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n\n\n" * 8)
    path = tmp_path_factory.mktemp("configs") / "tiny.toml"
    path.write_text(TINY.replace("TEXT", text.as_posix()))
    return path


def run(example, tiny, stage, *overrides):
    """Run an example in this process."""
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
        example.main(Arguments(tiny, stage=stage, set=list(overrides)))


def metrics(folder):
    """The rows of a run's metrics, as texts."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module", params=[train_lm, train_lm_nnx], ids=["linen", "nnx"])
def folders(request, tiny, tmp_path_factory):
    """Folders of two runs of an example: stage 0, and stage 3 in a folder of our choice."""
    home = tmp_path_factory.mktemp("home")
    (home / "runs" / "tiny-001").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run(request.param, tiny, 0, "run.sample_bytes=0")
    run(request.param, tiny, 3, f"run.folder={(home / 'mine').as_posix()}")
    return home / "runs" / "tiny-002", home / "mine"


def test_stages_0_and_3_train_alike(folders):
    plain, partitioned = map(metrics, folders)
    assert [int(row["step"]) for row in partitioned] == list(range(1, STEPS + 1))
    first = float(plain[0]["loss"])
    for row, other in zip(plain, partitioned, strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), abs=1e-4 * first)
        validated = int(row["step"]) % EVAL_EVERY == 0 or int(row["step"]) == STEPS
        assert bool(row["val_loss"]) == bool(other["val_loss"]) == validated
        if validated:
            assert float(row["val_loss"]) == pytest.approx(float(other["val_loss"]), rel=1e-4)
    assert float(plain[-1]["loss"]) < first


@pytest.fixture(scope="module")
def own_losses(tiny, tmp_path_factory):
    """Of an example, the losses of the script's own step at stage 0; each is run once."""

    @functools.cache
    def losses(example):
        return quick_losses(example, tiny, 0, (), tmp_path_factory.mktemp("own") / "run")

    return losses


def quick_losses(example, tiny, stage, overrides, folder):
    """Losses of a run with 16 rows a step, and of its validations."""
    quick = ("data.batch_size=16", "run.eval_batches=1", "run.sample_bytes=0")
    run(example, tiny, stage, *quick, *overrides, f"run.folder={folder.as_posix()}")
    rows = metrics(folder)
    validated = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    return [float(row["loss"]) for row in rows] + validated


@pytest.mark.parametrize(
    "stage, overrides",
    [
        (2, ("step.microbatches=2",)),
        (1, ("zero.model_parallel=2",)),
        (3, ("step.microbatches=4", "zero.model_parallel=2")),
    ],
    ids=["microbatches", "tensor parallel", "both, at stage 3"],
)
def test_microbatches_and_tensor_parallelism_train_alike(
    stage, overrides, tiny, own_losses, tmp_path
):
    """The same 16 rows a step: losses differ by rounding."""
    expected = own_losses(train_lm)
    losses = quick_losses(train_lm, tiny, stage, overrides, tmp_path / "run")
    assert losses == pytest.approx(expected, abs=1e-4 * expected[0])
    if "zero.model_parallel=2" in overrides:
        layout = (tmp_path / "run" / "layout.txt").read_text()
        assert "data=4, model=2" in layout and "'model'" in layout


EXPLICIT = ("step.executor=explicit",)
PREFETCH = (*EXPLICIT, "step.layer_loop=prefetch", "model.remat=true")


@pytest.mark.parametrize(
    "example, stage, overrides",
    [
        (train_lm, 3, PREFETCH),
        (train_lm, 3, (*PREFETCH, "zero.model_parallel=2", "step.microbatches=2")),
        (train_lm_nnx, 2, (*EXPLICIT, "step.microbatches=2")),
        (train_lm_nnx, 3, PREFETCH),
    ],
    ids=["linen", "linen-tensor-parallel", "nnx", "nnx-prefetch"],
)
def test_executors_train_alike(example, stage, overrides, tiny, own_losses, tmp_path):
    """The library's step against the script's own, to rounding."""
    expected = own_losses(example)
    losses = quick_losses(example, tiny, stage, overrides, tmp_path / "run")
    assert losses == pytest.approx(expected, abs=1e-4 * expected[0])


@pytest.mark.parametrize(
    "example, overrides, says",
    [
        (train_lm, ("offload.params=true", "offload.chunk_mib=1"), "from host memory"),
        (train_lm, ("offload.folder=DISK",), "from disk"),
        (train_lm_nnx, ("offload.folder=DISK",), ""),
    ],
    ids=["parameters on the host", "files", "nnx, files"],
)
def test_offloaded_runs_train_alike(example, overrides, says, tiny, own_losses, tmp_path, capsys):
    """The optimizer state elsewhere, at stage 2; the linen script says what an update moves."""
    (tmp_path / "disk").mkdir()
    overrides = [o.replace("DISK", (tmp_path / "disk").as_posix()) for o in overrides]
    expected = own_losses(example)
    everything = (*PREFETCH, "offload.optimizer=true", *overrides)
    losses = quick_losses(example, tiny, 2, everything, tmp_path / "run")
    assert losses == pytest.approx(expected, abs=1e-4 * expected[0])
    assert says in capsys.readouterr().out


def test_offload_is_checked():
    for wrong in ({"params": True}, {"folder": "x"}, {"delayed": True}):
        with pytest.raises(ValueError, match="needs optimizer=true"):
            schema.Offload(**wrong)
    with pytest.raises(ValueError, match="folder: updates of files are the device's"):
        schema.Offload(optimizer=True, folder="x", update_on="host")


def test_what_the_nnx_script_does_not_do_is_said(tiny):
    for override in ("step.microbatches=2", "zero.model_parallel=2"):
        with pytest.raises(SystemExit, match="expected 1"):
            run(train_lm_nnx, tiny, 2, override)


def test_a_run_leaves_its_folder(folders):
    for stage, folder in zip((0, 3), folders, strict=True):
        assert (folder / "loss.png").stat().st_size > 1000
        assert (folder / "bytes_by_stage.png").stat().st_size > 1000
        assert list(folder.glob("events.out.tfevents.*"))
        assert f"stage {stage}" in (folder / "layout.txt").read_text()
        cfg = config.load(schema.LanguageModelRun, folder / "config.toml")
        assert cfg.zero.stage == stage and cfg.run.steps == STEPS


@pytest.mark.parametrize("example", [train_lm, train_lm_nnx], ids=["linen", "nnx"])
def test_a_run_that_is_ended_goes_on_at_another_stage(example, tiny, own_losses, tmp_path):
    """Told to end after step 3, it saves and exits; the losses are those of a run left alone."""
    expected, folder = own_losses(example), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(Checkpointer, "preempted", lambda self, step: step == 3)
        quick_losses(example, tiny, 2, (), folder)
    assert end.value.code == PREEMPTED
    quick = ["data.batch_size=16", "run.eval_batches=1", "run.sample_bytes=0"]
    with jax.numpy_dtype_promotion("standard"):
        example.main(Arguments(tiny, stage=3, set=quick, resume=folder))
    rows = metrics(folder)
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx(expected[:STEPS], abs=1e-5 * expected[0])
    assert max(int(d.name) for d in (folder / "checkpoints").glob("[0-9]*")) == STEPS


def test_there_must_be_a_checkpoint_to_resume(tiny, tmp_path):
    with pytest.raises(SystemExit, match="--resume .*: there is no checkpoint in it"):
        Arguments(tiny, resume=tmp_path).load()


def test_a_folder_that_holds_a_run_is_not_written_over(folders, tiny):
    with pytest.raises(SystemExit, match="holds a run already"):
        run(train_lm, tiny, 2, f"run.folder={folders[1].as_posix()}")


@pytest.mark.parametrize("name", ["lm_tiny", "lm_gpt2_small"])
def test_the_bytes_in_a_shipped_config_are_those_of_its_layout(name):
    path = ROOT / "configs" / f"{name}.toml"
    cfg = config.load(schema.LanguageModelRun, path)
    create = train_lm.make_create(cfg, GPT(cfg.model))
    for stage, layout in layouts_by_stage(create, cfg).items():
        held = [layout.bytes_per_device[tree] for tree in ("params", "grads", "opt_state")]
        line = rf"#\s+{stage}\s+" + r"\s+".join(f"{n:,}" for n in [*held, sum(held)])
        assert re.search(line, path.read_text()), (stage, held)


@pytest.mark.parametrize("example", ["train_lm.py", "train_lm_nnx.py"])
def test_a_wrong_key_on_the_command_line_gives_a_short_letter(example, tiny):
    command = [sys.executable, ROOT / "examples" / example, tiny, "--set", "model.layer=3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 1
    assert "[model] has no key 'layer'" in done.stderr and "Did you mean 'layers'?" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def environment():
    """This process's environment, without its devices and with the repository's package."""
    unset = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def test_the_command_makes_its_devices_and_reads_the_standard_library(tmp_path):
    """Also with what the other tests leave off: half precision, remat, lion, clipping."""
    command = [sys.executable, ROOT / "examples" / "train_lm.py", ROOT / "configs" / "lm_tiny.toml"]
    command += ["--stage", "2", "--steps", "2", "--set", f"run.folder={tmp_path.as_posix()}"]
    for override in (
        "run.eval_batches=1", "run.sample_bytes=4", "model.layers=1", "model.dtype=bfloat16",
        "model.remat=true", "model.tied_head=true", "optimizer.name=lion", "optimizer.clip_norm=1",
    ):  # fmt: skip
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout and "sampled continuation" in done.stdout
    layout = (tmp_path / "layout.txt").read_text()
    assert "data=8" in layout and "bfloat16" in layout and "master" in layout
