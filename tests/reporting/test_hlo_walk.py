"""How compilers write collectives: rings, fusions, flights over several instructions."""

import re

from reporting.hlo.texts import BF16, F32, FLAT, mesh_of, read, sends, versions

from zero_jax.reporting import hlo


@versions("v5e_gathered_product")
def test_a_ring_that_only_passes_on_is_an_all_gather(name):
    """It adds to the product, and not to what arrives. One permute comes before the loop."""
    records = hlo.collectives(read(name))
    piece = 8192 * 8192 * BF16 // 16
    assert sends(records) == [("all-gather", piece, 1)] + [("all-gather", piece, 4)] * 4
    assert {c.spelling for c in records} == {"ring of collective-permute"}


@versions("h100_gathered_product")
def test_a_ring_on_a_gpu(name):
    """With the threshold for rings at 0 jax 0.12 permutes eight times; 0.10 gathers as ever."""
    records = hlo.collectives(read(name), mesh_of(FLAT))
    piece = 8192 * 8192 * BF16 // 8
    permuted = [("all-gather", piece, 1)] * 8
    gathered = [("all-gather", piece * 7, 1)]
    assert sends(records) == (gathered if name.endswith("0.10") else permuted)
    assert all(c.axes == ("data",) and c.group_size == 8 for c in records)


def test_a_permute_that_a_user_wrote_is_no_ring():
    text = read("v5e_gathered_product_0.12").replace("windowed_dot_general", "mine")
    assert {c.kind for c in hlo.collectives(text)} == {"collective-permute"}


@versions("v5p_one_axis")
def test_a_fusion_of_all_reduce_scatter_is_one_reduce_scatter(name):
    """On one axis of a torus: columns as reduce-scatter, rows as a fusion that pads 4096 to 4256
    and moves the 80 rows too many to the neighbour, from half of the devices."""
    records = hlo.collectives(read(name), mesh_of({"x": 2, "y": 2, "z": 2}))
    assert sends(records) == [
        ("collective-permute", 80 * 4096 * BF16 * 4 // 8, 1),
        ("reduce-scatter", 4096 * 4096 * BF16 // 2, 1),
        ("reduce-scatter", 4256 * 4096 * BF16 // 2, 1),
    ]
    assert all(c.axes == ("x",) and c.group_size == 2 for c in records)
    spelled = {c.bytes_on_wire: c.spelling for c in records}
    assert spelled[4096 * 4096] == "reduce-scatter"
    assert spelled[4256 * 4096] == "fusion of all-reduce-scatter"


@versions("v6e_one_axis")
def test_two_fusions_of_all_reduce_scatter(name):
    records = hlo.collectives(read(name))
    scattered = [c for c in records if c.kind == "reduce-scatter"]
    assert [c.bytes_on_wire for c in scattered] == [4160 * 4096 * BF16 * 3 // 4] * 2
    assert {c.spelling for c in scattered} == {"fusion of all-reduce-scatter"}


@versions("v5e_prefetch")
def test_a_collective_that_fusions_carry_counts_once(name):
    """The text prints it in the fusion that starts it, in one with the product, and at the end."""
    text = read(name)
    assert text.count(" all-gather(") == 4  # three of them are one
    records = hlo.collectives(text)
    weight = 4096 * 4096 * BF16
    assert sends(records) == [
        ("all-gather", weight * 15 // 16, 1),
        ("all-gather", weight * 15 // 16, 6),
    ]
    assert [c.spelling for c in records] == ["all-gather", "async-collective-start of all-gather"]
    assert [c.is_async for c in records] == [False, True]


FLIGHTS = """HloModule flights, is_scheduled=true, num_partitions=2

%start (s: f32[4]) -> (f32[4], f32[8]) {
  %s = f32[4] parameter(0)
  %g = f32[8] all-gather(%s), dimensions={0}, backend_config={"async_collective_fusion_config":{}}
  ROOT %b = (f32[4], f32[8]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%carry (c: f32[8], d: f32[8], e: f32[4,4]) -> (f32[4,4], f32[8], f32[8]) {
  %c = f32[8] parameter(0)
  %d = f32[8] parameter(1)
  %e = f32[4,4] parameter(2)
  %m = f32[4,4] dot(%e, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %h = f32[8] all-gather(%c), dimensions={0}, backend_config={"async_collective_fusion_config":{}}
  %i = f32[8] all-gather(%d), dimensions={0}, backend_config={"async_collective_fusion_config":{}}
  ROOT %t = (f32[4,4], f32[8], f32[8]) tuple(%m, %h, %i)
}

%done (j: f32[8]) -> f32[8] {
  %j = f32[8] parameter(0)
  ROOT %k = f32[8] custom-call(%j), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[4], y: f32[4], w: f32[4,4]) -> f32[4,4] {
  %x = f32[4] parameter(0)
  %y = f32[4] parameter(1)
  %w = f32[4,4] parameter(2)
  %a = (f32[4], f32[8]) fusion(%x), kind=kCustom, calls=%start
  %a1 = f32[8] get-tuple-element(%a), index=1
  %b = (f32[4], f32[8]) fusion(%y), kind=kCustom, calls=%start
  %b1 = f32[8] get-tuple-element(%b), index=1
  %c = (f32[4,4], f32[8], f32[8]) fusion(%a1, %b1, %w), kind=kOutput, calls=%carry, ALIASING
  %b2 = f32[8] get-tuple-element(%c), index=2
  %bd = f32[8] fusion(%b2), kind=kCustom, calls=%done
  %m = f32[4,4] get-tuple-element(%c), index=0
  %p = f32[4,4] dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %a2 = f32[8] get-tuple-element(%c), index=1
  ROOT %ad = f32[8] fusion(%a2), kind=kCustom, calls=%done
}
"""


def test_two_collectives_that_one_fusion_carries():
    """The second lands before the last product, the first after it."""
    aliasing = "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}"
    first, second = hlo.collectives(FLIGHTS.replace("ALIASING", aliasing))
    product = 2 * 4 * 4 * 4
    assert (first.matmul_flops, second.matmul_flops) == (2 * product, product)
    assert first.bytes_on_wire == second.bytes_on_wire == 4 * F32


def test_a_done_that_prints_what_it_waits_for_is_not_counted():
    text = read("h100_every_kind_0.12")
    calls = re.search(r"calls=(%fused_psum\S*?)[,\s]", text)
    assert calls
    doubled = text.replace("fusion-done(%fusion-start)", f"fusion-done(%fusion-start), {calls[0]}")
    assert doubled != text
    assert sends(hlo.collectives(doubled)) == sends(hlo.collectives(text))
