"""Law: the explicit step sends the paper's bytes, to the byte.

ZeRO (arXiv 1910.02054, section 7) counts 2 elements a parameter at stages 0 to 2 and 3 at stage 3.
Here is what that means leaf by leaf, for a device of a ring of n: a piece of `piece` bytes is sent
n - 1 times by a gather and by a scatter, and 2 (n - 1)/n of a whole leaf by an all-reduce.

On CPU, where bfloat16 collectives are widened, everything is float32. The machines that nobody here
owns are in `test_communication_compiled`.
"""

from collections import Counter
from dataclasses import astuple

import jax
import pytest
from laws import small_gpt

from zero_jax.planning.communication import from_layout
from zero_jax.reporting.hlo import audit

MESHES = {
    "data": {"data": 8},
    "hybrid": {"replica": 2, "data": 4},
    "tensor parallel": {"data": 4, "model": 2},
}
LOSS_AND_NORM = 2 * 4  # two float32 that every step sums


def sent(layout, compiled):
    """Bytes by kind and axes; not those of tensor parallelism, which XLA's partitioner writes."""
    found = audit(compiled, layout.mesh).bytes_by_kind_and_axes
    return {key: total for key, total in found.items() if key[1] != ("model",)}


def expected(layout, gathers, reductions):
    """The closed form.

    Args:
      gathers: path -> how often the loss of a stage 3 step gathers a parameter.
      reductions: how often gradients are scattered in a step of stage 2 or 3.
    """
    stage, n, data = int(layout.stage), layout.size, ("data",)
    replicas = layout.mesh.shape.get("replica", 1)
    everywhere = ("replica", "data") if replicas > 1 else data
    total = Counter()

    def all_reduce(whole_bytes, axes, size):
        total["all-reduce", axes] += 2 * whole_bytes * (size - 1) / size

    for rest, update in zip(*map(jax.tree.leaves, (layout.params, layout.updates)), strict=True):
        piece, form = update.bytes_per_device, update.partition.form
        moved = (n - 1) * piece
        if form in ("divided", "padded"):
            # gradient: scattered inside, its piece summed across the replicas once
            total["reduce-scatter", data] += moved * (reductions if stage >= 2 else 1)
            if replicas > 1:
                all_reduce(piece, ("replica",), replicas)
        else:
            whole = piece if form == "whole" else rest.total_bytes
            all_reduce(whole, everywhere, n * replicas)
        if form == "flat":
            # small and odd: whole in the update, for which Adam's two moments are gathered, and at
            # stage 3 the parameter
            total["all-gather", data] += (3 if stage == 3 else 2) * moved
        if form != "whole" and stage == 3:
            total["all-gather", data] += moved * gathers(rest.leaf.path)
        elif form in ("divided", "padded"):
            total["all-gather", data] += moved  # after the update
    all_reduce(LOSS_AND_NORM, everywhere, n * replicas)
    return {key: count for key, count in total.items() if count}


def predicted(layout, **options):
    """The library's own count, in the shape of the audit's."""
    traffic = from_layout(layout, **{"regather": small_gpt.regather} | options)
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    return {
        (kind, tuple(sorted(axes, reverse=True))): total
        for axes, wire in traffic.by_axes.items()
        for kind, total in zip(kinds, astuple(wire), strict=True)
        if total
    }


def without_loss_and_norm(sums, layout):
    """What a step sends for its parameters."""
    replicas = layout.mesh.shape.get("replica", 1)
    n = layout.size * replicas
    key = "all-reduce", ("replica", "data") if replicas > 1 else ("data",)
    return sums | {key: sums[key] - 2 * LOSS_AND_NORM * (n - 1) // n}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_bytes_of_a_step(mesh, stage, microbatches):
    """Stage 3 gathers what recomputed layers read twice a microbatch, the rest once."""
    layout, compiled = small_gpt.compile_step(MESHES[mesh], stage, microbatches=microbatches)

    def gathers(path):
        return microbatches * {"layer": 2, "use": 1}[small_gpt.regather(path)]

    found = sent(layout, compiled)
    assert found == expected(layout, gathers, reductions=microbatches)
    assert without_loss_and_norm(found, layout) == predicted(layout, microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_kept_parameters_are_gathered_once_a_step(microbatches):
    """Whatever the microbatches; gradients are reduced in each all the same."""
    options = {"microbatches": microbatches, "regather": "keep"}
    layout, compiled = small_gpt.compile_step(MESHES["hybrid"], 3, **options)
    found = sent(layout, compiled)
    assert found == expected(layout, lambda path: 1, reductions=microbatches)
    assert without_loss_and_norm(found, layout) == predicted(layout, **options)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_reduced_once(stage):
    """Where the user pays the memory of whole gradients, as at stage 1."""
    options = {"microbatches": 4, "reduce": "once"}
    layout, compiled = small_gpt.compile_step(MESHES["data"], stage, **options)

    def gathers(path):
        return 4 * {"layer": 2, "use": 1}[small_gpt.regather(path)]

    found = sent(layout, compiled)
    assert found == expected(layout, gathers, reductions=1)
    assert without_loss_and_norm(found, layout) == predicted(layout, **options)
