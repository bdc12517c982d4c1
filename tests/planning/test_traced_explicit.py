"""Steps whose batch goes into a `shard_map`: shapes, cuts, operations and rings of one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.propagation import propagate
from zero_jax.planning.traced import trace
from zero_jax.reporting.hlo import audit

MESH = Mesh(np.array(jax.devices()), ("data",))
GRID = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def array(*shape, spec=(), mesh=MESH, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def mapped(f, specs, out):
    return jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out, check_vma=False)


def test_a_step_that_maps_its_batch_is_traced_with_all_rows():
    """16 rows over 8 devices: 2 within, and operations as the compiler counts them."""
    rows, width = 16, 8

    def local(w, x):
        whole = lax.all_gather(w, "data", tiled=True)
        g = jax.grad(lambda w: ((x @ w) ** 2).sum())(whole)
        return lax.psum_scatter(g, "data", tiled=True)

    def step(w, x):
        return w - mapped(local, P("data"), P("data"))(w, x)

    state, batch = array(width, width, spec=P("data")), array(rows, width, spec=P("data"))
    region = trace(step, state, batch)
    propagate(region)
    assert region.is_explicit and region.inputs[1].shape == (rows, width)
    mine = rows // 8
    assert region.matmul_flops == 2 * (2 * mine * width * width)  # forward, gradient of w
    compiled = jax.jit(step).lower(state, batch).compile()
    assert region.matmul_flops == audit(compiled, MESH).matmul_flops


def test_a_mapped_kernel_in_an_ordinary_step_leaves_it_one():
    """The batch is read outside of it: the step is traced with the 2 rows of a device."""

    def step(w, x):
        return mapped(jnp.sin, P(), P())(x @ w)

    region = trace(step, array(8, 8), array(16, 8, spec=P("data")))
    assert not region.is_explicit and region.inputs[1].shape == (16 // 8, 8)


def test_a_gather_that_nobody_reads_is_left_out_of_loops_too():
    """Each trip gathers the next layer's two parts; one of them is never read."""

    def local(w, x):
        def gathered(w):
            return [lax.all_gather(part, "data", tiled=True) for part in w]

        def body(carry, _):
            x, (used, _) = carry
            return (x @ used, gathered(w)), None

        return lax.scan(body, (x, gathered(w)), None, length=3)[0][0]

    def step(state, x):
        return mapped(local, P("data"), P("data"))(state, x)

    part = array(8, 8, spec=P("data"))
    region = trace(step, (part, part), array(16, 8, spec=P("data")))
    (loop,) = (op for op in region.operations if op.name == "scan")
    assert [op.name for op in loop.regions[0].operations] == ["dot_general", "all_gather"]


def test_collectives_say_how_many_devices_take_part():
    spec = P(("data", "model"))

    def local(x):
        return lax.psum(lax.all_gather(x, ("data", "model"), tiled=True).sum(), "model")

    def step(x, _):
        return jax.shard_map(local, mesh=GRID, in_specs=spec, out_specs=P(), check_vma=False)(x)

    x = array(8, spec=spec, mesh=GRID)
    ops = {op.name: op.params for op in trace(step, x, ()).operations}
    assert (ops["all_gather"]["names"], ops["all_gather"]["devices"]) == (("data", "model"), 8)
    assert (ops["psum"]["names"], ops["psum"]["devices"]) == (("model",), 4)


def test_automatic_axes_still_divide_within_a_shard_map():
    """w (8, 12), rows over data and columns over model; only data is manual."""

    def f(w, x):
        def local(w, x):
            w = lax.all_gather(w, "data", axis=0, tiled=True)
            return lax.psum_scatter(x.T @ (x @ w), "data", scatter_dimension=0, tiled=True)

        spec = P("data")
        return jax.shard_map(
            local, mesh=GRID, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False
        )(w, x)

    w = array(8, 12, spec=("data", "model"), mesh=GRID)
    region = trace(f, w, array(6, 8, spec=("data",), mesh=GRID))
    propagate(region)
    (gather,) = (op for op in region.operations if op.name == "all_gather")
    assert (gather.inputs[0].shape, gather.inputs[0].cut) == ((8 // 2, 12), (1, 4))
    assert (gather.outputs[0].shape, gather.outputs[0].cut) == ((8, 12), (1, 4))
    products = [op.outputs[0].cut for op in region.operations if op.name == "dot_general"]
    assert products == [(1, 4), (1, 4)]
    assert region.matmul_flops == 2 * (2 * 3 * 8 * 12 // 4)
    assert (region.outputs[0].shape, region.outputs[0].cut) == ((8, 12), (2, 4))
