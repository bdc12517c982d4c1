"""Forecasts of explicit steps: peak within 15 % above, bytes and operations as compiled.

GPT-2 small; the annotated step is in `test_forecasts.py`.
"""

import warnings
from dataclasses import replace
from functools import cache

import pytest
from benchmarks.forecast_peaks import planner

from zero_jax.planning.program import Choice

pytestmark = [pytest.mark.aot, pytest.mark.slow]

EXECUTED = ("step.executor=explicit",)
PREFETCHED = (*EXECUTED, "step.layer_loop=prefetch")
STEPS = [
    pytest.param(machine, stage, loop, id=name)
    for machine, stage, loop, name in (
        ("h100:8", 2, EXECUTED, "h100-2"),
        ("h100:8", 3, EXECUTED, "h100-3"),
        ("h100:8", 3, PREFETCHED, "h100-3-prefetch"),
        ("cpu:8", 3, EXECUTED, "cpu-3"),
    )
]
steps = pytest.mark.parametrize(("machine", "stage", "loop"), STEPS)


@cache
def forecast(machine, stage, loop):
    """With the compiler's word; layers are recomputed. A warning would be an error."""
    ours = planner("gpt2-small", machine)
    ours = replace(ours, overrides=(*ours.overrides, *loop))
    with warnings.catch_warnings(action="error"):
        return ours.forecast(Choice(stage, True, 1), compile=True)


@steps
def test_the_predicted_peak_bounds_the_compiled_one(machine, stage, loop):
    ours = forecast(machine, stage, loop)
    assert 1 <= ours.peak_bytes / ours.compiled.peak_bytes <= 1.15


@steps
def test_gathers_and_reductions_are_predicted_to_the_byte(machine, stage, loop):
    """In the dtypes that cross: parameters in the compute dtype, gradients in float32."""
    ours = forecast(machine, stage, loop)
    blocks = 12 * (12 * 768**2 + 13 * 768)  # parameters of the layers, which are recomputed
    rest = 50257 * 768 + 1024 * 768 + 2 * 768
    width, unread = (2, 12 * 768) if machine == "h100:8" else (4, 12 * 768)
    # a layer's last bias is not gathered again: what comes after it is not recomputed
    gathered = 2 * blocks - unread + rest if stage == 3 else blocks + rest
    sent = {"all-gather": 7 * width * gathered / 8, "reduce-scatter": 7 * 4 * (blocks + rest) / 8}
    for kind, sent_bytes in sent.items():
        assert ours.wire_bytes_by_kind[kind] == sent_bytes
        assert ours.compiled.wire_bytes_by_kind[kind] == sent_bytes
