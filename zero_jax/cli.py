"""The command line: `zero-jax plan`, `doctor`, and `inspect`, `diff`, `export` of checkpoints.

All but the last only read. What they print is made elsewhere (`planning`, `checkpoint`,
`reporting`); here are the words of the command line, and that a mistake ends in a letter and not in
a traceback.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.text import Text

from .planning import doctor as examination
from .planning.fit import STAGES, Plan, make_planner
from .planning.fit import plan as make_plan
from .planning.hardware import memory_size
from .planning.memory import whole_number
from .planning.program import find_builder
from .planning.topology import parse_topology
from .reporting.doctor_table import doctor_table
from .reporting.page import plan_page
from .reporting.plan_table import plan_json, plan_table
from .reporting.tables import bytes_text

_EXAMPLES = """\
examples:
  zero-jax plan configs/lm_gpt2_small.toml --topology h100:8 --stage all
  zero-jax plan configs/gpt_175b.toml --topology a100-80:64x8 --compile --html plan.html
  zero-jax plan configs/gpt_13b.toml --topology a100-40:16x8 --memory 32GB --set data.batch_size=128
  zero-jax doctor
  zero-jax inspect runs/lm_tiny-001/checkpoints
  zero-jax export runs/lm_tiny-001/checkpoints model.safetensors --dtype bfloat16
  zero-jax --tyro-print-completion bash        # a completion script, also for zsh and tcsh

An error is a sentence; with ZERO_JAX_TRACEBACK=1 it is a traceback.
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 1 and a letter where something cannot be done."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # which is what importing JAX sets
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # what XLA logs is repeated in what it raises
    commands: dict[str, Callable[..., Any]] = {
        "plan": plan,
        "doctor": doctor,
        "inspect": inspect,
        "diff": diff,
        "export": export,
    }
    try:
        with _warnings_as_notes():
            tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="zero-jax",
                description=f"ZeRO for JAX: know before you run.\n\n{_EXAMPLES}",
                args=arguments,
            )
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if os.environ.get("ZERO_JAX_TRACEBACK"):
            raise
        Console(stderr=True).print(Text(f"zero-jax: {error}"), soft_wrap=True)
        raise SystemExit(1) from None


def plan(
    config: tyro.conf.Positional[Path],
    /,
    topology: str,
    stage: Literal["own", "all", "0", "1", "2", "3"] = "own",
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    memory: str | None = None,
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    plot: Path | None = None,
    html: Path | None = None,
) -> None:
    """Say what a run will need: memory, communication and time on each device, and whether it fits.

    Predicted in seconds from shapes and a trace; with --compile the real compiler for that machine
    answers too, without the machine. The smallest change that fits is named.

    Args:
      config: TOML file of the run, such as configs/gpt_175b.toml.
      topology: The machine: h100:8x8 (nodes x GPUs), v5p:4x4x4 (TPU torus), cpu:8.
      stage: ZeRO stage; all for 0 to 3, own for the configuration's.
      compile: Compile every candidate for the machine; needs the extra plan.
      memory: Memory of one device, such as 32GB or 24GiB; by default the accelerator's.
      set: Override a key of the file, as section.key=value. May be given many times.
      json: Print JSON instead of tables; bytes and seconds.
      plot: Write a picture of the memory, PNG, SVG or PDF.
      html: Write one self-contained page.
    """
    machine = parse_topology(topology)
    for name, path in {"html": html, "plot": plot}.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.parent}.")
    # Planning must not take the devices of a run that is going on here.
    jax.config.update("jax_platforms", "cpu")
    if machine.accelerator.platform == "cpu":
        with suppress(RuntimeError):  # JAX runs already and keeps its devices: these are planned on
            jax.config.update("jax_num_cpu_devices", machine.devices)
    memory_bytes = None if memory is None else memory_size(memory)
    planner = make_planner(
        find_builder(config), config, topology, overrides=set, memory_bytes=memory_bytes
    )
    stages = None if stage == "own" else STAGES if stage == "all" else [int(stage)]
    made = make_plan(planner, stages, compile=compile)
    if json:
        sys.stdout.write(plan_json(made) + "\n")
    else:
        Console().print(plan_table(made))
    _write_pictures(made, plot, html)


def doctor(cpu_devices: int = 8) -> None:
    """Say what is here: versions, devices, memory, compile targets, one collective's bandwidth.

    Args:
      cpu_devices: Where there is no accelerator, virtual CPU devices that stand in.
    """
    files = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")
    if not any(found for name in files for found in Path("/dev").glob(name)):
        # JAX would try every plugin that is installed, and print why each of them fails.
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
        jax.config.update("jax_num_cpu_devices", whole_number("cpu_devices", cpu_devices))
    Console().print(doctor_table(examination.examine()))


def inspect(folder: tyro.conf.Positional[Path], /, step: int | None = None) -> None:
    """Say what a checkpoint has: every leaf, sums, configuration, versions.

    Args:
      folder: Folder of checkpoints.
      step: Which; by default the last.
    """
    from .checkpoint.opened import open_checkpoint  # Orbax, which takes its time
    from .reporting.checkpoint_table import inspect_table

    Console().print(inspect_table(open_checkpoint(folder, step)))


def diff(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path],
    /,
    step_a: int | None = None,
    step_b: int | None = None,
) -> None:
    """Compare two checkpoints leaf by leaf; exits with 0 if all bits are the same, else with 1.

    Args:
      a: Folder of checkpoints.
      b: Another, or the same one.
      step_a: Which of the first; by default the last.
      step_b: Which of the second.
    """
    from .checkpoint.difference import differences
    from .checkpoint.opened import open_checkpoint
    from .reporting.checkpoint_table import diff_table

    found = [*differences(open_checkpoint(a, step_a), open_checkpoint(b, step_b))]
    Console().print(diff_table(found))
    if any(d.what for d in found):
        raise SystemExit(1)


def export(
    folder: tyro.conf.Positional[Path],
    target: tyro.conf.Positional[Path],
    /,
    step: int | None = None,
    dtype: str | None = None,
    sharded: str | None = None,
) -> None:
    """Write the parameters of a checkpoint as safetensors, master copies where there are any.

    Args:
      folder: Folder of checkpoints.
      target: File to write.
      step: Which checkpoint; by default the last.
      dtype: Of real parameters, such as bfloat16; by default as they are.
      sharded: Size of one file, such as 5GB; several are written then, and an index.
    """
    from .checkpoint.opened import open_checkpoint
    from .checkpoint.safetensors import export as write

    most_bytes = None if sharded is None else memory_size(sharded)
    for file in write(open_checkpoint(folder, step), target, dtype, most_bytes):
        Console().print(Text(f"{file}: {bytes_text(file.stat().st_size)}"))


def _write_pictures(made: Plan, plot: Path | None, html: Path | None) -> None:
    if html is not None:
        html.write_text(plan_page(made), encoding="utf-8")
    if plot is not None:
        from .reporting.plots import plot_plan  # matplotlib, which a plan in text does not need

        plot_plan(made).savefig(plot)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Collect what the library warns of, and say each thing once, after the rest."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    console = Console(stderr=True)
    for text in dict.fromkeys(str(w.message) for w in caught):
        console.print(Text(f"note: {text}"), soft_wrap=True)
