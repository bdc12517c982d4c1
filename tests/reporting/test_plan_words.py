"""What table, figure and page share: who is shown, what is said of it, where the scale ends."""

import math

import pytest
from reporting import plans

from zero_jax.reporting import plan_words

GIB = plans.GIB


def test_the_advised_candidate_is_shown_once():
    asked = plans.forecast(0), plans.forecast(1)
    other = plans.forecast(1, remat=True)
    assert plan_words.candidates(plans.plan(*asked)) == [*asked]
    assert plan_words.candidates(plans.plan(*asked, advised=plans.forecast(1))) == [*asked]
    assert plan_words.candidates(plans.plan(*asked, advised=other)) == [*asked, other]


def test_verdicts():
    over, fitting = plans.forecast(0, 6 * 10**9), plans.forecast(3, 6 * 10**9)
    plan = plans.plan(over, fitting, advised=fitting)
    # 20 bytes of each of 6e9 parameters are 111.76 GiB, the device has 79
    assert plan_words.verdict_text(plan, over) == "short of 32.8 GiB"
    assert plan_words.verdict_text(plan, fitting) == "fits, advised"
    assert plan_words.verdict_text(plans.plan(fitting), fitting) == "fits"


def test_the_compilers_word_decides():
    asked = plans.compiled(plans.forecast(3, 6 * 10**9), 80 * GIB)
    assert plan_words.verdict_text(plans.plan(asked), asked) == "short of 1.00 GiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (1.5e-6, "1.50 us"),
        (999.6e-6, "1.00 ms"),
        (0.0456, "45.6 ms"),
        (0.009999, "10.0 ms"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
        (7200, "7,200 s"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_seconds(seconds, text):
    assert plan_words.seconds_text(seconds) == text


def test_exposed_is_what_computing_does_not_cover():
    f = plans.forecast(1)  # transfers 0.28125 s, computing 0.25 s
    assert plan_words.exposed_seconds(f) == 0.03125
    assert math.isnan(plan_words.exposed_seconds(plans.without_figures(f)))


def test_kinds_are_those_that_are_sent():
    assert plan_words.kinds(plans.plan(plans.forecast(0))) == ["all-reduce"]
    asked = plans.compiled(plans.forecast(3))
    assert plan_words.kinds(plans.plan(asked)) == ["all-gather", "all-to-all", "reduce-scatter"]


def with_peaks(memory_gib, *peaks_gib):
    """Where the scale ends, in GiB; a candidate of n parameters at stage 0 holds 20 n + 16."""
    forecasts = [
        plans.forecast(0, peak * GIB // 20, memory_bytes=memory_gib * GIB) for peak in peaks_gib
    ]
    return round(plan_words.scale_end_bytes(plans.plan(*forecasts)) / GIB)


@pytest.mark.parametrize(
    ("memory", "peaks", "end"),
    [
        (80, (40, 60), 80),  # all fit: the line is drawn
        (80, (40, 120), 120),  # the longest bar
        (80, (1, 2), 2),  # the line is 40 bars away
        (80, (1, 2000), 80),  # the long bar is cut off at device memory
        (80, (200, 2000), 200),  # and here at the longest of up to three memories
        (80, (1000, 2000), 2000),  # nothing is near
    ],
)
def test_the_scale_ends_where_candidates_near_the_memory_are_seen(memory, peaks, end):
    assert with_peaks(memory, *peaks) == end
