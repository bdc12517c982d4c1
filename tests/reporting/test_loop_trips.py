"""Trips of loops: told by the text, derived from it, or not known and said so."""

import pytest
from reporting.hlo.texts import F32, read, versions

from zero_jax.reporting import hlo


@versions("cpu_loops", "h100_loops", "cpu_constraints", "h100_prefetch")
def test_derived_trips_are_those_that_the_text_tells(name):
    told = read(name)
    silent = told.replace("known_trip_count", "nothing")
    assert silent != told
    assert [c.trips for c in hlo.collectives(silent)] == [c.trips for c in hlo.collectives(told)]
    assert all(c.trips_known for c in hlo.collectives(silent))


LOOP = """HloModule loop, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] {by}(%i, %step)
  %y = f32[4] all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[4]) tuple(%next, %y)
}}

%cond (q: (s32[], f32[4])) -> pred[] {{
  %q = (s32[], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant({end})
  ROOT %c = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (x0: f32[4]) -> (s32[], f32[4]) {{
  %x0 = f32[4] parameter(0)
  %start = s32[] constant({start})
  %t0 = (s32[], f32[4]) tuple(%start, %x0)
  ROOT %w = (s32[], f32[4]) while(%t0), condition=%cond, body=%body
}}
"""


@pytest.mark.parametrize(
    ("start", "step", "end", "direction", "by", "compared", "trips"),
    [
        (0, 1, 7, "LT", "add", "%j, %end", 7),
        (0, 2, 7, "LT", "add", "%j, %end", 4),  # 0 2 4 6
        (1, 3, 7, "LE", "add", "%j, %end", 3),  # 1 4 7
        (1, 3, 6, "LE", "add", "%j, %end", 2),  # 1 4
        (7, 1, 7, "LT", "add", "%j, %end", 0),
        (9, 1, 7, "LT", "add", "%j, %end", 0),
        (7, 2, 0, "GT", "subtract", "%j, %end", 4),  # 7 5 3 1
        (6, 2, 0, "GE", "subtract", "%j, %end", 4),  # 6 4 2 0
        (0, 3, 9, "NE", "add", "%j, %end", 3),
        (0, 1, 7, "GT", "add", "%end, %j", 7),  # 7 > j
        (0, 3, 10, "NE", "add", "%j, %end", None),  # never meets
        (0, 1, 7, "GT", "add", "%j, %end", None),  # not a loop that counts up to something
    ],
)
def test_trips_by_arithmetic(start, step, end, direction, by, compared, trips):
    text = LOOP.format(
        start=start, step=step, end=end, direction=direction, by=by, compared=compared
    )
    (record,) = hlo.collectives(text)
    assert record.bytes_on_wire == 4 * F32 // 2 * 2  # n = 2: half, twice
    assert (record.trips, record.trips_known) == ((1, False) if trips is None else (trips, True))


NESTED = """HloModule nested, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%next (k: s32[], one: s32[]) -> s32[] {
  %k = s32[] parameter(0)
  %one = s32[] parameter(1)
  ROOT %k1 = s32[] add(%k, %one)
}

%less (l: s32[], m: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %m = s32[] parameter(1)
  ROOT %lm = pred[] compare(%l, %m), direction=LT
}

%inner_body (p: (s32[], f32[4], s32[], s32[])) -> (s32[], f32[4], s32[], s32[]) {
  %p = (s32[], f32[4], s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4] get-tuple-element(%p), index=1
  %bound = s32[] get-tuple-element(%p), index=2
  %by = s32[] get-tuple-element(%p), index=3
  %i1 = s32[] fusion(%i, %by), kind=kLoop, calls=%next
  %y = f32[4] all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[4], s32[], s32[]) tuple(%i1, %y, %bound, %by)
}

%inner_cond (q: (s32[], f32[4], s32[], s32[])) -> pred[] {
  %q = (s32[], f32[4], s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] get-tuple-element(%q), index=2
  ROOT %c = pred[] fusion(%j, %limit), kind=kLoop, calls=%less
}

%outer_body (r: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %r = (s32[], f32[4], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%r), index=0
  %z = f32[4] get-tuple-element(%r), index=1
  %carried = s32[] get-tuple-element(%r), index=2
  %zero = s32[] constant(0)
  %step = s32[] constant(1)
  %copied = s32[] copy(%zero)
  %in = (s32[], f32[4], s32[], s32[]) tuple(%copied, %z, %carried, %step)
  %inner = (s32[], f32[4], s32[], s32[]) while(%in), condition=%inner_cond, body=%inner_body
  %z1 = f32[4] get-tuple-element(%inner), index=1
  %n1 = s32[] add(%n, %step)
  ROOT %u = (s32[], f32[4], s32[]) tuple(%n1, %z1, PASSED_ON)
}

%outer_cond (v: (s32[], f32[4], s32[])) -> pred[] {
  %v = (s32[], f32[4], s32[]) parameter(0)
  %h = s32[] get-tuple-element(%v), index=0
  %three = s32[] constant(3)
  ROOT %d = pred[] compare(%h, %three), direction=LT
}

ENTRY %main (x0: f32[4]) -> (s32[], f32[4], s32[]) {
  %x0 = f32[4] parameter(0)
  %none = s32[] constant(0)
  %five = s32[] constant(5)
  %t0 = (s32[], f32[4], s32[]) tuple(%none, %x0, %five)
  ROOT %w = (s32[], f32[4], s32[]) while(%t0), condition=%outer_cond, body=%outer_body
}
"""


@pytest.mark.parametrize(("passed_on", "trips"), [("%carried", 5 * 3), ("%n1", None)])
def test_a_bound_that_loops_carry(passed_on, trips):
    """As the TPU compiler does it: constants outside of both loops, fusions around the counter."""
    (record,) = hlo.collectives(NESTED.replace("PASSED_ON", passed_on))
    # A bound that grows with the outer loop is not known; the outer loop's three trips are.
    assert (record.trips, record.trips_known) == ((3, False) if trips is None else (trips, True))
