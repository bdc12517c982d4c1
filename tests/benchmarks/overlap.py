"""What hides behind compute, compiled for GPUs, as the table `overlap.md`.

    python tests/benchmarks/overlap.py              # writes the table; about half an hour

The language models of `configs/gpt_13b.toml` and `configs/gpt_175b.toml` at stage 3, bf16 with
gradients reduced in fp32, 2 rows of 2048 tokens on each device; the whole step with its optimizer,
compiled for machines that are not here. `in loops, hidden`: of the bytes that a device sends inside
the loops over layers, the share with matrix products between start and done. `exposed`: seconds of
communication that no product hides, over the predicted seconds of the step: its operations at peak
rate and what is exposed. `state bytes`, `temporaries`: of one device, as compiled.

  prefetch    the library's step on `zero_jax.scan_layers`, its compiler options
  lifted      the same, with XLA's memory limit lifted: its scheduler takes a step for a fifth
              larger than the program becomes, and hides little where that is beyond the limit
  plain scan  the library's step on `nn.scan` and `nn.remat`, the same options
  annotated   the user's own step, XLA placing the collectives, default options
"""

import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".md")
sys.path.insert(0, str(ROOT / "examples"))

EXPLICIT = ("step.executor=explicit",)
PREFETCH = (*EXPLICIT, "step.layer_loop=prefetch")
EXECUTORS = {"prefetch": PREFETCH, "lifted": PREFETCH, "plain scan": EXPLICIT, "annotated": ()}
LIFTED = {"xla_gpu_memory_limit_slop_factor": 200}
MACHINES = ("h100:8x8", "a100-80:64x8")
CONFIGS = ("gpt_13b", "gpt_175b")
ROWS, TOKENS = 2, 2048


def compiled_step(config, machine, executor, *overrides):
    """The compiled step and its layout.

    Args:
      config: name of a file in `configs/`.
      machine: a topology, "h100:8x8".
      executor: a key of `EXECUTORS`.
      overrides: more of "section.key=value".
    """
    from plan_lm import program

    import zero_jax
    from zero_jax.planning.topology import compile_only_devices, parse_topology

    devices = np.asarray(compile_only_devices(parse_topology(machine))).flatten().tolist()
    changes = (f"data.batch_size={ROWS * len(devices)}", f"model.sequence_length={TOKENS}")
    changes = (*changes, *EXECUTORS[executor], *overrides)
    built = program(ROOT / "configs" / f"{config}.toml", changes, None, devices)
    state = zero_jax.init_train_state(built.create, *built.arguments, stage=3, **built.options)
    batch = zero_jax.shard_batch(built.batch, state)
    jitted = jax.jit(built.step, donate_argnums=0)
    options = dict(built.compiler_options(state)) | (LIFTED if executor == "lifted" else {})
    compiled = jitted.lower(state, batch).compile(compiler_options=options)
    return compiled, zero_jax.layout_of(state)


def overlap(compiled, layout, machine):
    """(hidden share of the bytes in loops, exposed share of the step, seconds of the step)."""
    from zero_jax.planning.topology import parse_topology
    from zero_jax.reporting.hlo import audit

    topology = parse_topology(machine)
    rates = topology.accelerator
    seen = audit(compiled, layout.mesh, rates, topology.devices_per_node)
    looped = [c for c in seen.collectives if c.in_loop]
    moved = sum(c.total_bytes for c in looped)
    hidden = sum(c.total_bytes for c in looped if c.matmul_flops)
    seconds = seen.matmul_flops / rates.matmul_flops + seen.exposed_seconds
    return hidden / moved, seen.exposed_seconds / seconds, seconds


def main():
    """Fill in the table, row by row."""
    head = (__doc__ or "").strip().split("\n\n", 2)[2]
    columns = ["model", "machine", "loop", "in loops, hidden", "exposed", "step s"]
    columns += ["state bytes", "temporaries"]
    lines = [
        f"# Communication behind compute (jax {jax.__version__}, compile-only)",
        "",
        "```text",
        *head.split("\n"),
        "```",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for config in CONFIGS:
        for machine in MACHINES:
            for executor in EXECUTORS:
                started = time.time()
                compiled, layout = compiled_step(config, machine, executor)
                hidden, exposed, seconds = overlap(compiled, layout, machine)
                held = compiled.memory_analysis()
                cells = [config, machine, executor, f"{hidden:.1%}", f"{exposed:.2%}"]
                cells += [f"{seconds:.2f}", f"{held.argument_size_in_bytes:,}"]
                cells += [f"{held.temp_size_in_bytes:,}"]
                lines.append(f"| {' | '.join(cells)} |")
                TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
                print(lines[-1], f"({time.time() - started:.0f} s to compile)", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    sys.exit(main())
