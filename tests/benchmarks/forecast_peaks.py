"""Predicted and compiled peaks of transformers, as the table `forecast_peaks.md`.

    python tests/benchmarks/forecast_peaks.py            # writes the table; about half an hour

Each row is a step that `zero-jax plan` predicts from a trace and the compiler for that machine then
compiles; `ratio` is predicted over compiled. The dtype is the one that is usual on each machine:
float32 on CPU, bfloat16 on GPU and TPU. From 1 to 1.15 is promised for gpt2-small and gpt2-medium.
The other rows are there to show where the forecast is off: below 1 where few rows leave the update
as the peak or the TPU compiler copies whole stacks, above 1.15 where a copy is not made. The TPU
compiler takes half a minute a row: only the GPT-2s, their layers recomputed.
"""

import sys
import warnings
from pathlib import Path

import jax

from zero_jax.planning.fit import Planner, make_planner
from zero_jax.planning.forecast import Forecast
from zero_jax.planning.program import Choice, find_builder

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "lm_gpt2_small.toml"
TABLE = Path(__file__).with_suffix(".md")
MACHINES = {"cpu:8": "float32", "h100:8": "bfloat16", "v5p:2x2x2": "bfloat16"}

# name -> overrides of GPT-2 small, and rows a device
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "gpt2-small": ({}, 8),
    "gpt2-medium": ({"layers": 24, "hidden": 1024, "heads": 16}, 4),
    "gpt2-xl": ({"layers": 48, "hidden": 1600, "heads": 25}, 8),
    "small vocabulary": (
        {"vocab_size": 8192, "hidden": 1024, "heads": 16, "sequence_length": 512},
        16,
    ),
    "few tokens": (
        {
            "vocab_size": 8192,
            "layers": 16,
            "hidden": 1536,
            "heads": 16,
            "sequence_length": 256,
        },
        2,
    ),
    "2048 tokens": ({"layers": 16, "hidden": 2048, "heads": 16, "sequence_length": 2048}, 2),
}


def planner(name: str, machine: str) -> Planner:
    """The planner of a model of the table on one of its machines."""
    changes, rows = MODELS[name]
    overrides = [f"model.{key}={value}" for key, value in changes.items()]
    overrides += [f"model.dtype={MACHINES[machine]}", f"data.batch_size={8 * rows}"]
    build = find_builder(CONFIG)
    return make_planner(build, CONFIG, machine, overrides=overrides, memory_bytes=2**40)


def row(name: str, machine: str, forecast: Forecast) -> str:
    """One line of the table."""
    choice, compiled = forecast.choice, forecast.compiled
    cells = [name, machine, str(choice.stage), "yes" if choice.remat else "no"]
    cells.append(f"{forecast.peak_bytes:,}")
    if compiled is None:
        cells += [forecast.refusal.split(":")[0], ""]
    else:
        ratio = forecast.peak_bytes / compiled.peak_bytes
        cells += [f"{compiled.peak_bytes:,}", f"{ratio:.3f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Fill in the table, row by row."""
    head = (__doc__ or "").strip().split("\n\n")[2].replace("\n", " ")
    columns = ["model", "machine", "stage", "remat", "predicted bytes", "compiled bytes", "ratio"]
    lines = [
        f"# Predicted and compiled peak of one device (jax {jax.__version__})",
        "",
        head,
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for machine in MACHINES:
        for name in [n for n in MODELS if n.startswith("gpt2") or not machine.startswith("v5p")]:
            for remat in (True,) if machine.startswith("v5p") else (True, False):
                for stage in (0, 1, 2, 3):
                    made = planner(name, machine).forecast(Choice(stage, remat, 1), compile=True)
                    lines.append(row(name, machine, made))
                    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
                    print(lines[-1], flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    sys.exit(main())
