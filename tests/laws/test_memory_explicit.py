"""Law: what a step holds beyond the state is what its stage and its layer loop leave no way around.

Peaks are the compiler's own: arguments + outputs - aliases + temporaries. A later stage holds less
at rest (ZeRO, arXiv 1910.02054, table 1) and pays with layers that it gathers; it must not pay more
than that. With `scan_layers`, stage 3 holds two gathered layers and no more.
"""

from dataclasses import replace

import pytest
from laws.big_gpt import BILLION, HALF, Size, compile_step

pytestmark = pytest.mark.slow
SIZES = {
    "1M": Size(layers=5, width=128),
    "10M": Size(layers=8, width=320),
    "100M": Size(layers=8, width=1024),
}
BF16, F32 = 2, 4


def peak_bytes(machine, stage, size):
    precision = None if machine == "cpu" else HALF
    return compile_step(machine, stage, precision, size).audit.memory.peak_bytes


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("machine", "size"),
    [
        *[pytest.param("cpu", s, id=n) for n, s in SIZES.items()],
        pytest.param("h100:8", BILLION, marks=pytest.mark.aot, id="1B"),
    ],
)
def test_a_later_stage_needs_no_more_than_an_earlier_and_a_gathered_layer(machine, size, stage):
    gathered_layer = size.layer * (F32 if machine == "cpu" else BF16)
    earlier, later = (peak_bytes(machine, s, size) for s in (stage, stage + 1))
    assert later <= earlier + gathered_layer


@pytest.mark.aot
@pytest.mark.parametrize("rows", [1, 4])
def test_temporaries_of_the_prefetching_loop(rows):
    """Stage 3 of a billion parameters on 8 H100, in bfloat16 with float32 sums of gradients."""
    size = replace(BILLION, rows=rows)
    tokens, width, n = rows * size.tokens, size.width, 8
    saved_inputs = size.layers * tokens * width * BF16
    gathered = 2 * size.layer * BF16
    gradients = 2 * size.layer * BF16
    shards = size.parameters // n * F32
    table = (size.vocabulary + size.tokens) * width * BF16  # tied: read first and last, so kept
    # What a layer makes: normed, query, key and value, attention, sum; normed, 4 + 4 of the MLP.
    made = (1 + 3 + 1 + 1 + 1 + 4 + 4) * tokens * width * BF16
    made += tokens * (width // size.head_width) * size.tokens * F32  # softmax
    working_set = 2 * made  # and as much of cotangents
    bound = saved_inputs + gathered + gradients + shards + table + working_set
    memory = compile_step("h100:8", 3, HALF, size, "prefetch").audit.memory
    assert memory.temp_bytes <= bound
