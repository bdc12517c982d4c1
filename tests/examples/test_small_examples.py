"""The small examples: each runs, proves its claim by its own asserts, and is short.

They run in this process, to share its devices and one import of jax; one also runs as a user runs
it. What `main` returns is compared with fractions counted by hand, so that an example which lost
its asserts fails here.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_model

ROOT = Path(__file__).parents[2]
N = 8

# Fractions of a whole tree on one device. Moments are 1 / N but for the 4 bytes of Adam's count.
ALL_CUT = {"optimizer": 1 / N, "params": 1 / N}
SHARES = {
    "stage1": {"optimizer": 1 / N, "params": 1.0},
    "stage2": {"optimizer": 1 / N, "saved": 1 - 1 / N},
    "stage3": ALL_CUT,
    "convnet_batchnorm_ema": ALL_CUT | {"ema": 1 / N},
    "gan": ALL_CUT,
    "lora": {"optimizer": 1 / N, "base": 1 / N},
    "tensor_parallel": {"params": 1 / (4 * 2), "moments": 1 / (4 * 2)},
}

# The jit cache of a step has one entry for the partitioned state, and two for the state of one
# device, whose `step` is a Python int at first and an array then.
ENTRIES = 1 + 2


@pytest.mark.parametrize("name", SHARES)
def test_claim(name, capsys):
    example = importlib.import_module(name)
    own = [v for k, v in vars(example).items() if k in ("train_step", "accumulating_step")]
    steps = {small_model.train_step, *own}
    entries_before = sum(step._cache_size() for step in steps)

    result = example.main()

    assert 4 <= len(capsys.readouterr().out.splitlines()) <= 10
    for network in result.values() if name == "gan" else [result]:
        assert network["losses"] < 1e-5
        shares = {key: network[key] for key in SHARES[name]}
        assert shares == pytest.approx(SHARES[name], rel=0.05)
    entries = sum(step._cache_size() for step in steps) - entries_before
    assert entries == ENTRIES


def test_offload(capsys):
    """Of 16 bytes a parameter, gradients included, 8 are the moments', which are elsewhere."""
    result = importlib.import_module("offload").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and all("GB/s" in lines[at] for at in (1, 7))
    for where in ("host", "disk"):
        assert result[f"{where} losses"] < 1e-6
        assert result[f"{where} share"] == pytest.approx((4 + 4) / (4 + 4 + 8), rel=0.01)


def test_command_line():
    """As the docstring says: from the root, and with devices that the example makes itself."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/stage1.py"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("stage 1 over 8 devices\n")


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_is_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert ("def main(" in text) == (f"python examples/{path.name}" in text)
