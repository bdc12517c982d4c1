"""Plans to print and draw, built by hand: the paper's convention, invented activations and times.

1.5B parameters over 8 devices unless said otherwise: 2 bytes of parameters, 2 of gradients and 12
of optimizer state each, every one whole or cut into 8 as the stage says; 4 bytes of activations.
"""

import math
from dataclasses import replace

from zero_jax.planning.fit import Plan
from zero_jax.planning.forecast import Compiled, Forecast
from zero_jax.planning.program import Choice

GIB = 2**30


def forecast(
    stage: int,
    parameters: int = 1_500_000_000,
    *,
    devices: int = 8,
    memory_bytes: int = 79 * GIB,
    remat: bool = False,
    microbatches: int = 1,
) -> Forecast:
    """A candidate, not compiled."""
    n = parameters
    params, grads, optimizer = (n // (devices if stage >= least else 1) for least in (3, 2, 1))
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    return Forecast(
        choice=Choice(stage, remat, microbatches),
        topology=f"h100:{devices}",
        devices=devices,
        memory_bytes=memory_bytes,
        parameters=n,
        params_bytes=2 * params,
        grads_bytes=2 * grads,
        optimizer_bytes=12 * optimizer,
        other_bytes=16,
        temporaries_bytes=4 * n // microbatches // (4 if remat else 1),
        host_bytes=0,
        wire_bytes_by_kind={
            "all-gather": 2 * n * gathers,
            "reduce-scatter": 2 * n if stage else 0,
            "all-reduce": 0 if stage else 4 * n,
        },
        compute_seconds=0.25,
        transfer_seconds=0.28125,
        step_seconds=0.3,
    )


def offloaded(f: Forecast) -> Forecast:
    """The same with its optimizer state on the host, twice for two devices of a process."""
    return replace(
        f,
        choice=replace(f.choice, offload="optimizer"),
        optimizer_bytes=0,
        host_bytes=f.optimizer_bytes,
        devices_per_process=2,
        from_host_bytes=f.optimizer_bytes + 2**30,
        to_host_bytes=f.optimizer_bytes,
        host_seconds=1.5,
    )


def compiled(f: Forecast, peak_bytes: int | None = None) -> Forecast:
    """The same candidate with the compiler's word: by default nine tenths of the predicted peak."""
    peak = f.peak_bytes * 9 // 10 if peak_bytes is None else peak_bytes
    arguments = f.params_bytes + f.optimizer_bytes + f.other_bytes
    wire = {**f.wire_bytes_by_kind, "all-to-all": 2**20}
    return replace(f, compiled=Compiled(arguments, peak - arguments, peak, 0, wire, 0.015625, 2.5))


def plan(
    *forecasts: Forecast,
    advised: Forecast | None = None,
    notes: tuple[str, ...] = (),
    **fields: str,
) -> Plan:
    """A plan of these candidates; `fields` are its program and advice."""
    first = forecasts[0]
    return Plan(
        program=fields.get("program", "gpt2_xl"),
        topology=first.topology,
        memory_bytes=first.memory_bytes,
        convention="2 + 2 + 12 bytes a parameter",
        parameters=first.parameters,
        forecasts=forecasts,
        smallest_change=advised,
        advice=fields.get("advice", "Fits as it is (stage 1, no remat)."),
        notes=notes,
    )


def without_figures(f: Forecast) -> Forecast:
    """The same on an accelerator that has no figures."""
    nan = math.nan
    return replace(f, compute_seconds=nan, transfer_seconds=nan, step_seconds=nan)
