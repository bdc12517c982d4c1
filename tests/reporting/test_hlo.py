"""The audit against arithmetic: texts of our own programs as each compiler printed them, and steps
compiled here.

The programs are in `hlo/programs.py`, shapes and all. F32 and BF16 are bytes per element; bytes
are those that one of n devices sends over a ring. Loops, groups and how collectives are written
have files of their own: test_loop_trips, test_replica_groups, test_hlo_walk.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reporting.hlo.texts import BF16, F32, FLAT, mesh_of, read, sends, versions

from zero_jax.reporting import hlo

S32 = 4


@versions("cpu_every_kind", "h100_every_kind", "tpu7x_every_kind")
def test_every_kind(name):
    records = hlo.collectives(read(name), mesh_of(FLAT))
    width = F32 if name.startswith("cpu") else BF16  # the CPU compiler widens bf16
    n = 8
    assert sends(records) == [
        ("all-gather", n * 16 * 128 * width * 7 // 8, 1),
        ("all-reduce", 64 * 512 * F32 * 7 // 8 * 2, 1),
        ("all-to-all", n * 8 * 128 * width * 7 // 8, 1),
        ("collective-permute", n * 8 * 128 * width, 1),
        ("collective-permute", 64 * 512 * F32 * 2 // 8, 1),  # two pairs of eight devices
        ("reduce-scatter", n * 32 * 256 * F32 * 7 // 8, 1),
    ]
    assert Counter(c.dtype for c in records)["bf16"] == (0 if width == F32 else 3)
    assert all(c.axes == ("data",) and c.trips_known and not c.in_loop for c in records)
    assert [c.group_size for c in records if c.kind != "collective-permute"] == [8] * 4
    assert sorted(c.group_size for c in records if c.kind == "collective-permute") == [2, 8]


@versions("v5p_every_kind")
def test_a_reduce_scatter_that_became_an_all_reduce_is_one(name):
    """On the flat order of a torus the TPU compiler adds up everywhere and slices."""
    records = hlo.collectives(read(name))
    reduced = next(c for c in records if c.kind == "all-reduce")
    scattered, summed = 8 * 32 * 256, 64 * 512  # elements, in one collective of two arrays
    assert reduced.bytes_on_wire == (scattered + summed) * F32 * 7 // 8 * 2
    assert reduced.axes is None  # no mesh was given
    assert not [c for c in records if c.kind == "reduce-scatter"]


SPELLINGS = {
    "cpu_every_kind_0.10": {"all-gather", "all-reduce", "all-to-all", "collective-permute",
                            "reduce-scatter"},
    "h100_every_kind_0.10": {"all-gather-start", "all-reduce-start", "all-to-all-start",
                             "collective-permute-start", "reduce-scatter-start"},
    "h100_every_kind_0.12": {"all-gather", "fusion-start of all-reduce", "all-to-all-start",
                             "collective-permute", "reduce-scatter"},
    "tpu7x_every_kind_0.12": {"custom-call-start of all-gather",
                              "custom-call-start of all-reduce", "all-to-all",
                              "collective-permute-start", "custom-call-start of reduce-scatter"},
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    records = hlo.collectives(read(name))
    assert {c.spelling for c in records} == SPELLINGS[name]
    # On GPU a start with is_sync is not asynchronous; jax 0.10 without options has only those.
    flying = {c.spelling for c in records if c.is_async}
    assert flying == {s for s in SPELLINGS[name] if "start" in s and name != "h100_every_kind_0.10"}


@versions("cpu_loops", "h100_loops", "v5p_loops", "tpu7x_loops")
def test_nested_loops(name):
    """An all-gather in a loop of 5 in a loop of 3; TPU texts do not tell the trips."""
    width = F32 if name.startswith("cpu") else BF16
    gathered, scattered = 1024 * 1024 * width, 8 * 256 * 1024 * width
    reduce = ("all-reduce", 2 * scattered) if name.startswith("v5p") else (
        "reduce-scatter", scattered)  # fmt: skip
    records = hlo.collectives(read(name), mesh_of(FLAT))
    expected = [
        ("all-gather", gathered * 7 // 8, 3 * 5),
        (reduce[0], reduce[1] * 7 // 8, 3),
    ]
    assert sends(records) == expected
    assert all(c.in_loop and c.trips_known for c in records)
    assert sum(c.total_bytes for c in records) == sum(each * trips for _, each, trips in expected)
    gather = next(c for c in records if c.kind == "all-gather")
    assert re.match(r"jit\(step\)/shard_map/while/body.*/all_gather$", gather.op_name)


@versions("h100_gradients")
def test_arrays_that_travel_together_are_added(name):
    """Two weights of 2 Mi elements, gathered in one collective and scattered in one."""
    records = hlo.collectives(read(name), mesh_of(FLAT))
    both = 2 * 1024 * 2048 * BF16
    expected = [("all-gather", both * 7 // 8, 1), ("reduce-scatter", both * 7 // 8, 1)]
    assert sends(records) == expected


def test_types_that_travel_together_are_joined():
    text = read("h100_gradients_0.10").replace("= bf16[128,2048]", "= s32[128,2048]")
    gather = hlo.collectives(text)[0]
    assert (gather.kind, gather.dtype) == ("all-gather", "s32+bf16")
    assert gather.bytes_on_wire == 7 * (128 * 2048 * S32 + 256 * 1024 * BF16)


@versions("cpu_constraints", "h100_constraints", "v5p_constraints", "v5e_constraints")
def test_left_to_the_partitioner(name):
    """A gradient of (2048, 1024) in each of three microbatches: three compilers, three answers."""
    target = name.split("_")[0]
    records = hlo.collectives(read(name))
    elements = 2048 * 1024
    # A ring of v5e permutes a sixteenth four times in each of four trips, and once more at the end.
    piece = elements * BF16 // 16
    expected = {
        "cpu": [("all-reduce", 2 * elements * F32 * 7 // 8, 3)],
        "h100": [("reduce-scatter", elements * BF16 * 7 // 8, 3)],
        "v5p": [("all-reduce", 2 * elements * BF16 * 7 // 8, 3)],
        "v5e": [("reduce-scatter", piece, 3)] + [("reduce-scatter", piece, 3 * 4)] * 4,
    }
    assert sends(records) == expected[target]
    if target == "v5e":
        assert {c.spelling for c in records} == {"ring of collective-permute"}
        assert {c.group_size for c in records} == {16}
        assert sum(c.total_bytes for c in records) == 3 * 17 * piece  # 15 would do


@versions("cpu_branches")
def test_of_branches_the_one_that_sends_most_and_loops_that_do_not_tell(name):
    audit = hlo.audit(read(name), mesh_of(FLAT))
    x = 64 * 64 * F32
    assert sends(audit.collectives) == [
        ("all-gather", x * 7 // 8, 1),
        ("all-reduce", 2 * F32 * 7 // 8, 1),  # the condition's; one of 8 * 64 is not taken
        ("collective-permute", x // 8, 1),
        ("reduce-scatter", x * 7 // 8, 1),
    ]
    unknown = {c.kind: not c.trips_known for c in audit.collectives}
    assert unknown == {
        "all-gather": False,
        "reduce-scatter": False,
        "all-reduce": True,
        "collective-permute": True,
    }
    assert "1 x 1?" in str(audit) and "is counted once" in str(audit)


def shapes(mesh, *args):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in args
    ]


@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 4}])
def test_a_step_compiled_here(axes):
    """A weight gathered over data in each of three trips, its gradient scattered back, a sum."""
    mesh = mesh_of(axes)
    n = axes["data"]

    def step(shard, x):
        def trip(total, _):
            weight = lax.all_gather(shard + total, "data", tiled=True)
            gradient = x.T @ (x @ weight)
            return total + lax.psum_scatter(gradient, "data", tiled=True), None

        total, _ = lax.scan(trip, jnp.zeros_like(shard), length=3)
        return total, lax.psum(jnp.sum(total), tuple(axes))

    specs = P("data"), P(tuple(axes))
    step = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P("data"), P()), check_vma=False
    )
    args = shapes(mesh, ((96, 96), jnp.float32, specs[0]), ((800, 96), jnp.float32, specs[1]))
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    audit = hlo.audit(compiled, mesh)

    whole = 96 * 96 * F32
    part = whole * (n - 1) // n
    summed = 2 * F32 * 7 // 8
    by_kind = {"all-gather": 3 * part, "reduce-scatter": 3 * part, "all-reduce": summed}
    assert audit.bytes_by_kind == by_kind
    assert audit.bytes_by_kind_and_axes == {
        ("all-gather", ("data",)): 3 * part,
        ("reduce-scatter", ("data",)): 3 * part,
        ("all-reduce", tuple(axes)): summed,
    }
    assert audit.bytes_on_wire == sum(by_kind.values())
    assert audit.matmul_flops == 3 * 2 * (2 * 100 * 96 * 96)  # trips, products, operations
    assert audit.collectives == tuple(hlo.collectives(compiled.as_text(), mesh))

    plan = compiled.memory_analysis()
    assert audit.memory is not None
    assert audit.memory.argument_bytes == whole // n + 100 * 96 * F32
    assert audit.memory.temp_bytes == plan.temp_size_in_bytes
    assert audit.memory.alias_bytes == whole // n
    assert audit.memory.peak_bytes == (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )
    assert "device memory at the peak" in str(audit)


def test_devices_are_positions_in_the_mesh():
    """The order of a mesh's devices is the executable's; their ids play no part."""
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 4)
    mesh = Mesh(devices, ("a", "b"))
    step = jax.shard_map(
        lambda x: (lax.psum(x, "a"), lax.all_gather(x, "b", tiled=True)),
        mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
    axes = {c.kind: c.axes for c in hlo.collectives(compiled, mesh)}
    assert axes == {"all-reduce": ("a",), "all-gather": ("b",)}


def test_the_table_groups_what_is_alike():
    text = read("v5e_constraints_0.12")
    lines = str(hlo.audit(text)).split("\n")
    assert lines[1].split() == [
        "reduce-scatter", "?", "16", "bf16", "ring", "of", "collective-permute",
        "4", "x", "12", "12.0", "MiB", "12.9", "GFLOP",
    ]  # fmt: skip
    assert lines[2].split()[7:10] == ["1", "x", "3"]
    assert lines[4].split() == ["reduce-scatter", "12.8", "MiB"]
    assert "no collectives" in str(hlo.audit(read("cpu_products_0.12")))


def test_bad_input():
    with pytest.raises(ValueError, match=r"module @jit.*Pass a compiled step"):
        hlo.audit(jax.jit(jnp.sin).lower(1.0))
    with pytest.raises(ValueError, match=r"begins with ''"):
        hlo.collectives("")
    with pytest.raises(
        TypeError, match=r"compiled is a PjitFunction.*lower\(\.\.\.\)\.compile\(\)"
    ):
        hlo.collectives(jnp.sin)
    with pytest.raises(ValueError, match=r"mesh has 4 devices \{'a': 4\}.*compiled for 8"):
        hlo.audit(read("cpu_loops_0.12"), Mesh(np.array(jax.devices()[:4]), ("a",)))
    with pytest.raises(ValueError, match="is the text cut"):
        hlo.collectives(read("cpu_loops_0.12").replace("parameter(0)", "parameter(0", 1))


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100:8", "v5p:2x2x2"])
def test_the_compilers_still_print_what_the_texts_say(target):
    """The nested loops, compiled for a target that is not here, against the arithmetic again."""
    from reporting.hlo import make_texts, programs

    mesh = make_texts.make_mesh(target, {"data": 8})
    step, args = programs.loops(mesh)
    records = hlo.collectives(step.lower(*args).compile(), mesh)
    by_kind = Counter()
    for c in records:
        assert c.trips_known and c.axes == ("data",)
        by_kind[c.kind] += c.total_bytes
    gathered, scattered = 15 * 1024 * 1024 * BF16, 3 * 8 * 256 * 1024 * BF16
    assert by_kind["all-gather"] == gathered * 7 // 8
    assert by_kind["reduce-scatter"] + by_kind["all-reduce"] // 2 == scattered * 7 // 8
