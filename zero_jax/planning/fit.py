"""Which candidate fits: a plan of one program on one machine.

Candidates differ from the configuration in the ZeRO stage, in recomputing layers, in microbatches
and in what lies on the host. The smallest change that fits is looked for in order: nothing changed,
then one thing, then two, then three; among changes of the same number the one with the shortest
predicted step. Only if none fits, the same with the optimizer state offloaded, and then the
parameters, too: a link to the host is slower than any of the others.

Not here: other batch sizes, other models, tensor parallelism, which change the training; disks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

import jax

from ..layout import Layout
from ..reporting.plan_words import seconds_text
from ..reporting.tables import bytes_text
from ..shortfall import ignored_pinned_limit, pinned_limit_letter
from .compiler import lay_out, row_parts
from .forecast import Forecast, forecast, verified
from .program import Builder, Choice, Offloaded, Program, offloaded
from .topology import Topology, compile_only_devices, parse_topology

STAGES = (0, 1, 2, 3)
MICROBATCHES = (1, 2, 4, 8, 16)
TRIED = 1.25
"""With the compiler at hand, candidates predicted to need up to this share of memory are tried."""


@dataclass(frozen=True)
class Plan:
    """A program on a machine.

    Attributes:
      program: its name.
      topology, memory_bytes: the machine; what one device has for a program.
      convention: how bytes are counted.
      parameters: of the model.
      forecasts: one for each stage asked for, with the configuration's other choices.
      smallest_change: the candidate nearest to the configuration that fits; None if none does.
      advice: what to do, in a sentence.
      notes: what is to be known of candidates that use the host's memory.
    """

    program: str
    topology: str
    memory_bytes: int
    convention: str
    parameters: int
    forecasts: tuple[Forecast, ...]
    smallest_change: Forecast | None
    advice: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planner:
    """A configuration on a machine: builds its program at any choice.

    Attributes:
      build: the configuration's builder (`program.find_builder`).
      config, overrides: the file, and texts `section.key=value`.
      topology: the machine.
      memory_bytes: of one device.
    """

    build: Builder
    config: Path
    overrides: tuple[str, ...]
    topology: Topology
    memory_bytes: int

    def program(self, choice: Choice | None = None) -> Program:
        """The program at a choice, by default at the configuration's own."""
        devices = compile_only_devices(self.topology)
        made = self.build(self.config, self.overrides, choice, devices)
        if not isinstance(made, Program):
            raise TypeError(
                f"{self.config}: its program returned a {type(made).__name__}; expected a "
                "zero_jax.planning.program.Program."
            )
        # A builder that knows of no offload leaves it as it is, whatever was asked for.
        return replace(made, choice=replace(made.choice, offload=offloaded(made)))

    def forecast(self, choice: Choice, *, compile: bool = False) -> Forecast:
        """What the program needs at a choice.

        Raises:
          ValueError: the program cannot be built so.
        """
        found = self.foresee(choice, compile=compile)
        if found is None:
            raise ValueError(f"{self.config}: its program has no way to make {choice}.")
        return found

    def foresee(self, choice: Choice, *, compile: bool = False) -> Forecast | None:
        """The same; None if the program has no such choice."""
        made = self.program(choice)
        if made.choice != choice:
            return None
        return forecast(made, self.topology, self.memory_bytes, compile=compile)


def make_planner(
    build: Builder,
    config: Path,
    topology: str,
    *,
    overrides: Sequence[str] = (),
    memory_bytes: int | None = None,
) -> Planner:
    """Make a planner for a machine.

    Args:
      build: from `find_builder`.
      config: the configuration's file.
      topology: such as "h100:8x8"; see `topology.parse_topology`.
      overrides: texts `section.key=value`.
      memory_bytes: of one device; by default what the accelerator has. A CPU needs it.

    Raises:
      ValueError: the topology is not known, or the memory of its devices is not.
    """
    machine = parse_topology(topology)
    memory_bytes = machine.accelerator.memory_bytes if memory_bytes is None else memory_bytes
    if memory_bytes < 1:
        raise ValueError(
            f"memory: that of {machine.accelerator.name!r} devices is not known; say how much one "
            "of them has, such as 16GiB."
        )
    return Planner(build, config, tuple(overrides), machine, memory_bytes)


def plan(planner: Planner, stages: Sequence[int] | None = None, *, compile: bool = False) -> Plan:
    """Forecast a configuration at some stages, and find the smallest change that fits.

    Args:
      planner: from `make_planner`.
      stages: of the forecasts; by default the configuration's own.
      compile: whether each of them, and the change, is verified by compiling it.
    """
    with ignored_pinned_limit():  # the notes say it
        own = planner.program()
        first = own.choice
        choices = [replace(first, stage=s) for s in stages or ()]
        forecasts = tuple(
            planner.forecast(choice, compile=compile) for choice in choices or [own.choice]
        )
        smallest, nearest = find_smallest_change(planner, own, forecasts, compile=compile)
        _, _, layout = lay_out(own)
    shown = [*forecasts, *([smallest] if smallest else [])]
    return Plan(
        program=own.name,
        topology=planner.topology.text,
        memory_bytes=planner.memory_bytes,
        convention=_convention(layout),
        parameters=forecasts[0].parameters,
        forecasts=forecasts,
        smallest_change=smallest,
        advice=" ".join([_advice(own.choice, smallest, nearest), *_refusals(forecasts)]),
        notes=_notes(shown, planner.topology),
    )


def find_smallest_change(
    planner: Planner, own: Program, known: Sequence[Forecast] = (), *, compile: bool = False
) -> tuple[Forecast | None, Forecast]:
    """Find the candidate nearest to a program that fits.

    Args:
      planner: of the program.
      own: the program as it is configured.
      known: forecasts that need not be made again.
      compile: whether a candidate has to fit by the compiler's word.

    Returns:
      The candidate, None if none fits, and the one that needs least.
    """
    made = {f.choice: f for f in known}
    nearest: Forecast | None = None
    for group in _by_number_of_changes(own.choice, own.rows // row_parts(own)):
        found = [made.get(choice) or planner.foresee(choice) for choice in group]
        for one in sorted(filter(None, found), key=_cost):
            asked = one.compiled is not None or bool(one.refusal)
            near = one.peak_bytes <= TRIED * planner.memory_bytes
            if compile and near and not asked:
                one = verified(one, planner.program(one.choice), planner.topology)
            if one.fits:
                return one, one
            if nearest is None or _lack(one) < _lack(nearest):
                nearest = one
    assert nearest is not None
    return None, nearest


def _by_number_of_changes(own: Choice, rows: int) -> Iterator[list[Choice]]:
    """All choices for a device that has so many rows of a batch, those with fewer changes first.

    What lies off the device comes last; what is there already stays there.
    """
    microbatches = sorted({*MICROBATCHES, own.microbatches})
    every = [Choice(*one) for one in product(STAGES, (False, True), microbatches)]
    levels: tuple[Offloaded, ...] = get_args(Offloaded)

    def changes(choice: Choice) -> int:
        names = ("stage", "remat", "microbatches")
        return sum(getattr(choice, name) != getattr(own, name) for name in names)

    yield [own]
    for level in levels[levels.index(own.offload) :]:
        for number in (0, 1, 2, 3):
            group = [c for c in every if changes(c) == number and rows % c.microbatches == 0]
            found = [replace(c, offload=level) for c in group]
            yield [c for c in found if c != own]


def _cost(forecast: Forecast) -> tuple[float, int, int]:
    """What a candidate is preferred for: a short step, few microbatches, an early stage."""
    choice = forecast.choice
    seconds = forecast.step_seconds
    return 0.0 if math.isnan(seconds) else seconds, choice.microbatches, choice.stage


def _lack(forecast: Forecast) -> tuple[bool, int]:
    return bool(forecast.refusal), forecast.missing_bytes


def _convention(layout: Layout) -> str:
    elements = sum(math.prod(p.leaf.shape) for p in jax.tree.leaves(layout.params))
    held = [layout.total_bytes[tree] / elements for tree in ("params", "grads", "opt_state")]
    counted = " + ".join(f"{each:.3g}" for each in held)
    return (
        f"parameters, gradients and optimizer state take {counted} bytes a parameter, counted leaf "
        "by leaf (mixed-precision Adam: 2 + 2 + 12, arXiv 1910.02054, section 3.1)"
    )


def _advice(own: Choice, smallest: Forecast | None, nearest: Forecast) -> str:
    if smallest is None:
        short = ""
        if nearest.missing_bytes:
            short = f", and is short of {bytes_text(nearest.missing_bytes)} on each device"
        return (
            f"Nothing fits: {nearest.choice} needs least{short}. Take more devices, a smaller "
            "batch, or a smaller model."
        )
    if smallest.choice == own:
        return f"Fits as it is ({own})."
    return f"The smallest change that fits: {smallest.choice} instead of {own}."


def _notes(forecasts: Sequence[Forecast], topology: Topology) -> tuple[str, ...]:
    """What the link to the host takes, of the candidate that uses it most; what GPUs may pin."""
    away = [f for f in forecasts if f.host_bytes]
    if not away:
        return ()
    rates, platform = topology.accelerator, topology.accelerator.platform
    notes = []
    longest = max(away, key=lambda f: (f.host_seconds, f.host_bytes))
    if math.isfinite(longest.host_seconds) and longest.compute_seconds:
        times = longest.host_seconds / longest.compute_seconds
        than = f"{times:.2g} times as long as" if times >= 1 else "less than"
        taken, computing = map(seconds_text, (longest.host_seconds, longest.compute_seconds))
        notes.append(
            f"The link to the host takes {taken} of a step, {than} computing ({computing}), at "
            f"{rates.host_bandwidth / 1e9:g} GB/s each way ({rates.sources['host_bandwidth']})."
        )
    letter = pinned_limit_letter(max(f.process_host_bytes for f in away), platform)
    return (*notes, letter) if letter else tuple(notes)


def _refusals(forecasts: Sequence[Forecast]) -> list[str]:
    refused = [f for f in forecasts if f.refusal]
    return [f"The compiler refuses {f.choice}: {f.refusal}" for f in refused]
