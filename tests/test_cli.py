"""The command line, called in this process: what it prints, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import zero_jax
from zero_jax import cli
from zero_jax.planning import doctor

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "lm_tiny.toml")
ON_CPU = ("--topology", "cpu:8", "--memory", "1GiB")
PROGRAM = f'program = "{(ROOT / "examples" / "plan_lm.py").as_posix()}:program"\n'


@pytest.fixture(autouse=True)
def _imports_end_with_the_test(monkeypatch):
    """`find_builder` puts a folder on `sys.path`; a reader's own settings do not matter here."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # `main` may set it: undone afterwards
    for name in ("ZERO_JAX_TRACEBACK", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def letter(capsys, *arguments: str) -> str:
    """What is said where something cannot be done."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and out == ""
    assert err.startswith("zero-jax: ") and "Traceback" not in err
    return err


def test_a_plan_in_tables(capsys):
    cli.main(["plan", TINY, *ON_CPU, "--stage", "all"])
    out, err = capsys.readouterr()
    assert out.startswith("lm_tiny on cpu:8 (8 devices with 1.00 GiB each)\n")
    assert "867,072 parameters" in out and err == ""
    lines = [line.split() for line in out.splitlines()]
    verdicts = {words[0]: words[4:] for words in lines if "fits" in " ".join(words[4:5])}
    assert sorted(verdicts) == ["0", "1", "2", "3"]
    assert verdicts["2"] == ["fits,", "advised"]  # the configuration's own
    assert out.rstrip().endswith("Fits as it is (stage 2, no remat).")


def test_a_plan_as_json(capsys):
    """The bytes that the configuration's header has: fp32, so 4 a parameter and 8 for moments."""
    cli.main(["plan", TINY, *ON_CPU, "--stage", "all", "--json"])
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert err == "" and plan["parameters"] == 867_072 and plan["memory_bytes"] == 2**30
    found = plan["forecasts"]
    whole, eighth = 4 * 867_072, 4 * 867_072 // 8
    assert [f["choice"]["stage"] for f in found] == [0, 1, 2, 3]
    assert [f["params_bytes"] for f in found] == [whole, whole, whole, eighth]
    assert [f["grads_bytes"] for f in found] == [whole, whole, eighth, eighth]
    counters = 8
    moments = [2 * whole + counters] + 3 * [2 * eighth + counters]
    assert [f["optimizer_bytes"] for f in found] == moments
    for f in found:
        parts = ("params", "grads", "optimizer", "other", "temporaries")
        assert f["peak_bytes"] == sum(f[f"{part}_bytes"] for part in parts)
        assert f["step_seconds"] is None and f["compiled"] is None  # NaN is no JSON
    assert plan["smallest_change"]["choice"] == found[2]["choice"]


@pytest.mark.parametrize(("stage", "stages"), [("own", [2]), ("3", [3])])
def test_which_stages(capsys, stage, stages):
    cli.main(["plan", TINY, *ON_CPU, "--stage", stage, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert [f["choice"]["stage"] for f in plan["forecasts"]] == stages


def test_overrides_and_the_advice(capsys):
    """24 MiB are too little for 64 rows, unless layers are computed again."""
    small = ("--topology", "cpu:8", "--memory", "24MiB")
    overrides = ("--set", "zero.stage=3", "--set", "data.batch_size=64")
    cli.main(["plan", TINY, *small, *overrides, "--json"])
    plan = json.loads(capsys.readouterr().out)
    (own,), found = plan["forecasts"], plan["smallest_change"]
    choice = {"stage": 3, "remat": False, "microbatches": 1, "offload": "none"}
    assert own["choice"] == choice and not own["fits"]
    assert own["missing_bytes"] == own["peak_bytes"] - 24 * 2**20
    assert found["fits"] and found["peak_bytes"] <= 24 * 2**20
    assert found["choice"] == {**choice, "remat": True}
    assert plan["advice"].startswith("The smallest change that fits: ")


def test_a_plan_with_the_optimizer_state_on_the_host(capsys):
    """Two moments of an eighth of the parameters, with a little padding."""
    cli.main(["plan", TINY, *ON_CPU, "--set", "offload.optimizer=true"])
    out, err = capsys.readouterr()
    assert "loaded" in out and "link to" in out and err == ""
    assert out.rstrip().endswith("Fits as it is (stage 2, no remat, optimizer offloaded).")
    cli.main(["plan", TINY, *ON_CPU, "--set", "offload.optimizer=true", "--json"])
    plan = json.loads(capsys.readouterr().out)
    (found,) = plan["forecasts"]
    assert found["choice"]["offload"] == "optimizer" and found["optimizer_bytes"] == 8
    assert 867_072 <= found["host_bytes"] <= 1.01 * 867_072  # 8 bytes, an eighth
    assert found["process_host_bytes"] == 8 * found["host_bytes"]
    assert plan["notes"] == []  # the link of a CPU is not known, and nothing is pinned


def test_a_page_and_a_picture(capsys, tmp_path):
    html, plot = tmp_path / "plan.html", tmp_path / "plan.svg"
    cli.main(["plan", TINY, *ON_CPU, "--html", str(html), "--plot", str(plot)])
    assert "Fits as it is" in capsys.readouterr().out
    page = html.read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>") and "lm_tiny" in page
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_what_the_library_warns_of_is_a_note(capsys):
    cli.main(["plan", TINY, *ON_CPU, "--set", "zero.min_size=100000000"])
    out, err = capsys.readouterr()
    assert err.startswith("note: stage 2 over 8 devices leaves ") and "Fits as it is" in out
    assert len(set(err.splitlines())) == len(err.splitlines())  # each said once


def test_planning_leaves_the_devices_of_this_process(capsys):
    """JAX runs here with 8 CPU devices: fewer are taken from them, more are a letter."""
    cli.main(["plan", TINY, "--topology", "cpu:4", "--memory", "1GiB", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["forecasts"][0]["devices"] == 4
    said = letter(capsys, "plan", TINY, "--topology", "cpu:16", "--memory", "1GiB")
    assert "topology 'cpu:16': JAX has 8 CPU devices" in said
    assert jax.device_count() == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--topology", "h1000:8"), "unknown accelerator 'h1000'. Did you mean 'h100'"),
        (("--topology", "h100"), "topology 'h100': a shape was expected"),
        (("--topology", "cpu:8"), "memory: that of 'cpu' devices is not known"),
        (("--topology", "cpu:8", "--memory", "80Gb"), "the unit 'Gb' counts bits. Write 80GB"),
        (("--topology", "cpu:8", "--memory", "80G"), "the unit 'G' is no unit of bytes"),
        (("--topology", "cpu:8", "--memory", "-1GB"), "it must be positive"),
        ((*ON_CPU, "--set", "data.batch_size=0"), "batch_size=0; expected at least 1"),
        ((*ON_CPU, "--set", "data.batch_size=-8"), "batch_size=-8; expected at least 1"),
        ((*ON_CPU, "--set", "data.batch_size=12"), "12 rows is computed in 8 parts"),
        ((*ON_CPU, "--set", "zero.stage=4"), "zero.stage is the integer 4; expected one of 0, 1"),
        ((*ON_CPU, "--set", "batch_size"), "expected section.key=value"),
        ((*ON_CPU, "--set", "step.reduce_dtype=bfloat16"), 'needs executor="explicit"'),
        ((*ON_CPU, "--set", "zero.model_parallel=3"), "does not divide the number of devices"),
    ],
)
def test_letters_about_arguments(capsys, arguments, words):
    assert words in letter(capsys, "plan", TINY, *arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PROGRAM + "[model]\nlayer = 3", "[model] has no key 'layer'; expected one of vocab_size,"),
        (PROGRAM + "[model]\nlayer = 3", "Did you mean 'layers'?"),
        (PROGRAM + "[modle]\nlayers = 3", "there is no section 'modle'; expected one of program,"),
        (PROGRAM + "[data]\nbatch_size = 0", "[data] batch_size=0; expected at least 1."),
        (PROGRAM + "[model", "is not a TOML file"),
        ("[model]\nlayers = 3", "program is None; expected 'FILE.py:FUNCTION'"),
        ("program = 'none.py:program'", "there is no file none.py there"),
    ],
)
def test_letters_about_configurations(capsys, tmp_path, text, words):
    config = tmp_path / "run.toml"
    config.write_text(text)
    said = letter(capsys, "plan", str(config), *ON_CPU)
    assert words in said and "run.toml" in said


def test_letters_about_files(capsys, tmp_path):
    assert "nothing.toml" in letter(capsys, "plan", str(tmp_path / "nothing.toml"), *ON_CPU)
    with pytest.raises(SystemExit):
        cli.main(["plan", TINY, *ON_CPU, "--html", str(tmp_path / "no folder" / "plan.html")])
    assert "plan.html: there is no folder" in capsys.readouterr().err


def test_a_traceback_for_those_who_ask(monkeypatch):
    monkeypatch.setenv("ZERO_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown accelerator"):
        cli.main(["plan", TINY, "--topology", "h1000:8"])


def test_the_doctor(capsys, monkeypatch):
    words = {"cpu": "ok", "cuda": "ok", "tpu": "Run pip install 'zero_jax[plan]'."}
    monkeypatch.setattr(doctor, "available_targets", lambda: words)
    monkeypatch.setattr(doctor, "CPU_MESSAGE_BYTES", 2**16)
    cli.main(["doctor"])
    out, err = capsys.readouterr()
    assert jax.__version__ in out and "optax" in out and "8 x " in out and "data=8" in out
    assert "cuda" in out and "no: Run pip install 'zero_jax[plan]'." in out and err == ""


def test_help(capsys):
    for arguments, words in (
        (["--help"], ("zero-jax plan configs/lm_gpt2_small.toml --topology h100:8", "doctor")),
        (["plan", "--help"], ("--topology", "--memory", "32GB or 24GiB", "--html", "h100:8x8")),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out = capsys.readouterr().out
        assert ended.value.code == 0
        for each in words:
            assert each in out, each


def test_as_a_module():
    command = [sys.executable, "-m", "zero_jax", "--help"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0].startswith("usage: zero-jax") and ran.stderr == ""
    assert "examples:" in ran.stdout and str(Path(zero_jax.__file__).parent) not in ran.stdout
