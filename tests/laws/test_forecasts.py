"""A forecast is an upper bound within 15 %, and its operations are those the compiler counts.

GPT-2 small, 124M parameters, in the dtype that is usual on each machine. More models are in
`tests/benchmarks/forecast_peaks.md`.
"""

from functools import cache

import jax
import pytest
from benchmarks.forecast_peaks import planner

from zero_jax.planning.fit import make_planner
from zero_jax.planning.forecast import ask_compiler, lay_out
from zero_jax.planning.program import Choice
from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import trace
from zero_jax.reporting.hlo import audit

STAGES = (0, 1, 2, 3)
MACHINES = ("cpu:8", "h100:8", "v5p:2x2x2")

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def on(*names):
    """Parametrise `machine`."""
    return pytest.mark.parametrize("machine", names)


machines = on(*MACHINES)


@cache
def forecast(machine, stage):
    """With the compiler's word; layers are recomputed."""
    return planner("gpt2-small", machine).forecast(Choice(stage, True, 1), compile=True)


@machines
@pytest.mark.parametrize("stage", STAGES)
def test_the_predicted_peak_bounds_the_compiled_one(machine, stage):
    ours = forecast(machine, stage)
    assert 1 <= ours.peak_bytes / ours.compiled.peak_bytes <= 1.15


@machines
@pytest.mark.parametrize("stage", STAGES)
def test_arguments_are_the_state_and_the_batch(machine, stage):
    """To the byte, except on TPU, where small leaves fill whole tiles."""
    ours = forecast(machine, stage)
    held = ours.params_bytes + ours.optimizer_bytes + ours.other_bytes
    tiles = 0.005 * held if machine.startswith("v5p") else 0
    assert 0 <= ours.compiled.argument_bytes - held <= tiles


@machines
@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_later_stage_needs_no_more_than_an_earlier_and_a_gathered_unit(machine, stage):
    """Of a user's list: peak(k + 1) <= peak(k) + one gathered unit, here the embedding."""
    unit_bytes = 50257 * 768 * (4 if machine.startswith("cpu") else 2)
    earlier, later = (forecast(machine, s).compiled.peak_bytes for s in (stage, stage + 1))
    assert later <= earlier + unit_bytes


BLOCKS = 12 * (12 * 768**2 + 13 * 768)  # parameters of the layers, which are recomputed
REST = 50257 * 768 + 1024 * 768 + 2 * 768  # embedding, positions, last norm: read once
SENT = 7 / 8 * 2  # bytes that one of 8 devices sends of a bfloat16 parameter


def test_stage_2_sends_what_the_paper_counts():
    """A reduce-scatter and an all-gather of all parameters, to 0.2 %."""
    ours = forecast("h100:8", 2)
    for kind in ("reduce-scatter", "all-gather"):
        assert ours.wire_bytes_by_kind[kind] == SENT * (BLOCKS + REST)
        assert ours.compiled.wire_bytes_by_kind[kind] == pytest.approx(
            SENT * (BLOCKS + REST), rel=0.002
        )


def test_stage_3_gathers_every_layer_twice_and_scatters_once():
    """What `gather_at_use` asks for: forward, and again where a layer is recomputed."""
    sent = forecast("h100:8", 3).compiled.wire_bytes_by_kind
    assert sent["all-gather"] == pytest.approx(SENT * (2 * BLOCKS + REST), rel=0.002)
    assert sent["reduce-scatter"] == pytest.approx(SENT * (BLOCKS + REST), rel=0.002)


@on(*MACHINES[1:])
def test_stage_3_reduces_no_gradient_whole(machine):
    """The transpose of a gather is a reduce-scatter; what is all-reduced are norms and scalars."""
    sent = forecast(machine, 3).compiled.wire_bytes_by_kind
    assert sent["all-reduce"] <= 0.02 * SENT * (BLOCKS + REST)
    assert sent["reduce-scatter"] >= SENT * (BLOCKS + REST)  # v5p pads, and rings send more


@on(*MACHINES[:2])
@pytest.mark.parametrize("stage", [0, 3])
def test_operations_are_those_the_compiler_counts(machine, stage):
    ours = planner("gpt2-small", machine)
    program = ours.program(Choice(stage, True, 1))
    state, batch, _ = lay_out(program)
    region = trace(program.step, state, batch)
    propagate(region)
    compiled = jax.jit(program.step, donate_argnums=0).lower(state, batch).compile()
    assert region.matmul_flops == audit(compiled).matmul_flops


@on("h100:8")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches(machine, stage):
    """The peak is bounded; whole gradients are all-reduced in each, cut ones scattered in each.

    jax 0.12 copies less than 0.10 does, hence 25 %. At stage 3 the embedding, which each microbatch
    reads twice, is gathered once in each (0.10: 10 % less in all) or once a step (0.12: 18 % less).
    """
    ours = planner("gpt2-small", machine).forecast(Choice(stage, True, 4), compile=True)
    assert 1 <= ours.peak_bytes / ours.compiled.peak_bytes <= 1.25
    least = 0.81 if stage == 3 else 0.98
    assert least <= ours.compiled.wire_bytes / ours.wire_bytes <= 1.08


def test_a_compiler_that_refuses_is_an_answer():
    """GPT-2 medium without recomputing, 64 rows a device: more than a TPU v5e has."""
    ours = planner("gpt2-medium", "v5p:2x2x2")
    overrides = (*ours.overrides, "data.batch_size=256")
    small = make_planner(ours.build, ours.config, "v5e:2x2", overrides=overrides)
    refused = small.forecast(Choice(2, False, 1), compile=True)
    assert refused.compiled is None and "hbm" in refused.refusal.lower()
    assert not refused.fits and refused.missing_bytes > 0
    with pytest.raises(jax.errors.JaxRuntimeError):
        ask_compiler(small.program(Choice(2, False, 1)), small.topology)
