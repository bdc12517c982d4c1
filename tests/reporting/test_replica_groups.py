"""Groups of devices in every spelling, and the mesh axes they span."""

import pytest
from reporting.hlo.texts import F32, FLAT, mesh_of, read, versions

from zero_jax.reporting import hlo
from zero_jax.reporting.replica_groups import parse_groups


@versions("cpu_two_axes")
def test_mesh_axes(name):
    """Groups over a (of 2), b (of 4), both, and halves of b, which are no axis."""
    records = hlo.collectives(read(name), mesh_of({"a": 2, "b": 4}))
    array = 64 * 32 * F32
    expected = [
        ("all-gather", ("a",), 2, array),  # of 2 arrays, half
        ("all-gather", ("a", "b"), 8, array * 8 * 7 // 8),
        ("all-reduce", ("a", "b"), 8, array * 7 // 8 * 2),
        ("all-reduce", None, 2, array // 2 * 2),
        ("collective-permute", ("b",), 2, array * 4 // 8),
        ("reduce-scatter", ("b",), 4, array * 3 // 4),
    ]
    found = [(c.kind, c.axes, c.group_size, c.bytes_on_wire) for c in records]
    assert sorted(found, key=str) == sorted(expected, key=str)
    # The same groups, in the words of other meshes.
    flat = {c.bytes_on_wire: c.axes for c in hlo.collectives(read(name), mesh_of(FLAT))}
    assert flat[array * 7] == ("data",) and flat[array * 3 // 4] is None
    cube = {c.bytes_on_wire: c.axes for c in hlo.collectives(read(name), mesh_of(
        {"x": 2, "one": 1, "y": 2, "z": 2}))}  # fmt: skip
    assert cube[array * 3 // 4] == ("y", "z") and cube[array * 7] == ("x", "y", "z")


@versions("cpu_moved")
def test_devices_in_another_order(name):
    """jax 0.10 writes the groups of the second gather over device_ids=([2,4]T(1,0))."""
    assert ("device_ids=(" in read(name)) == name.endswith("0.10")
    records = hlo.collectives(read(name), mesh_of({"a": 2, "b": 4}))
    part, whole = 64 * 64 * F32 // 8, 64 * 64 * F32
    found = [(c.kind, c.axes, c.bytes_on_wire) for c in records]
    assert sorted(found) == [
        ("all-gather", ("a", "b"), part * 7),
        ("all-gather", ("b",), whole * 3 // 4),
        ("all-to-all", ("b",), part * 3 // 4),
        ("collective-permute", ("a", "b"), part * 6 // 8),  # two of eight keep theirs
    ]


@versions("cpu_part_of_axis")
def test_a_part_of_an_axis_is_no_axis(name):
    records = hlo.collectives(read(name), mesh_of(FLAT))
    found = {(c.kind, c.group_size): c.axes for c in records}
    assert found["all-gather", 2] is None and found["all-to-all", 4] is None
    assert found["all-to-all", 8] == ("data",)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=8] {'a':(1)4}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=1], device_ids=([2,2]T(1,0)) {'a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=2,'b'=1] {'b'}", ((0,), (1,))),
    ],
)
def test_spellings_of_groups(text, groups):
    assert parse_groups(text) == groups


def test_groups_of_an_unknown_spelling_are_an_error():
    with pytest.raises(ValueError, match="newer than this reader"):
        parse_groups("V9<0..8>")


SMALL = """HloModule small, replica_count={replicas}, num_partitions={partitions}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%inner (y: f32[40]) -> f32[40] {{
  %y = f32[40] parameter(0)
  ROOT %r = f32[40] all-reduce(%y){groups}, to_apply=%add
}}

ENTRY %main (x: f32[40]) -> f32[40] {{
  %x = f32[40] parameter(0)
  %first = f32[40] call(%x), to_apply=%inner
  ROOT %second = f32[40] call(%first), to_apply=%inner
}}
"""


@pytest.mark.parametrize(
    ("groups", "replicas", "partitions", "size"),
    [
        (", replica_groups={}", 1, 4, 4),  # all
        ("", 4, 1, 4),
        (", replica_groups={{0,1},{2,3}}", 4, 1, 2),
        (", channel_id=1, replica_groups={{0}}", 1, 4, 4),  # ids of replicas, all partitions each
        (", channel_id=1, replica_groups={{0},{1}}, use_global_device_ids=true", 1, 2, 1),
    ],
)
def test_groups_of_all_and_of_one(groups, replicas, partitions, size):
    """The computation is called twice, so its collective runs twice."""
    text = SMALL.format(groups=groups, replicas=replicas, partitions=partitions)
    records = hlo.collectives(text)
    assert [c.group_size for c in records] == [size] * 2
    assert [c.bytes_on_wire for c in records] == [2 * 40 * F32 * (size - 1) // size] * 2


def test_devices_alone_span_no_axis():
    groups = ", channel_id=1, replica_groups={" + ",".join(f"{{{i}}}" for i in range(8)) + "}"
    text = SMALL.format(groups=groups + ", use_global_device_ids=true", replicas=1, partitions=8)
    assert [c.axes for c in hlo.collectives(text, mesh_of(FLAT))] == [(), ()]
    assert "-" in str(hlo.audit(text, mesh_of(FLAT))).split("\n")[1]
