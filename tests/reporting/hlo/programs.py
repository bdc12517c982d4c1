"""Small programs whose compiled texts lie beside this file, and that tests compute the bytes of.

Each takes a mesh and returns a jitted step and what to lower it with.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def every_kind(mesh):
    """Each collective once; the second permute moves data between two of the pairs only."""
    n = mesh.size
    ring = [(i, (i + 1) % n) for i in range(n)]

    def step(a, b, c, d):
        return (
            lax.all_gather(a, "data", tiled=True),
            lax.psum_scatter(b, "data", tiled=True),
            lax.psum(c, "data"),
            lax.all_to_all(d, "data", 0, 0, tiled=True),
            lax.ppermute(d, "data", ring),
            lax.ppermute(c, "data", [(0, 1), (2, 3)]),
        )

    specs = (P("data"), P(), P(), P()), (P(), P("data"), P(), P(), P(), P())
    shapes = (n * 16, 128), (n * 32, 256), (64, 512), (n * 8, 128)
    dtypes = jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16
    args = [arg(mesh, *each) for each in zip(shapes, dtypes, specs[0], strict=True)]
    return manual(step, mesh, *specs), args


def loops(mesh):
    """An all-gather in a loop of 5 in a loop of 3, a reduce-scatter in the outer one."""

    def step(weights, x):
        def layer(x, shard):
            return jnp.tanh(x @ lax.all_gather(shard, "data", tiled=True)), None

        def outer(x, shards):
            x, _ = lax.scan(layer, x, shards)
            return lax.psum_scatter(jnp.tile(x, (mesh.size, 1)), "data", tiled=True), None

        return lax.scan(outer, x, weights)[0]

    specs = P(None, None, "data"), P("data")
    args = [
        arg(mesh, (3, 5, 1024, 1024), jnp.bfloat16, specs[0]),
        arg(mesh, (mesh.size * 256, 1024), jnp.bfloat16, specs[1]),
    ]
    return manual(step, mesh, specs, P("data")), args


def prefetch(mesh):
    """Seven layers; the next one's weight is gathered while one multiplies."""

    def step(shards, x):
        def layer(carry, shard):
            x, weight = carry
            return (x @ weight, lax.all_gather(shard, "data", tiled=True)), None

        first = lax.all_gather(shards[0], "data", tiled=True)
        (x, last), _ = lax.scan(layer, (x, first), shards[1:])
        return x @ last

    specs = P(None, "data"), P("data")
    args = [
        arg(mesh, (7, 4096, 4096), jnp.bfloat16, specs[0]),
        arg(mesh, (mesh.size * 1024, 4096), jnp.bfloat16, specs[1]),
    ]
    return manual(step, mesh, specs, P("data")), args


def gradients(mesh):
    """Two weights gathered and their gradients reduce-scattered, written out."""

    def step(shards, x):
        def loss(shards):
            w, v = (lax.all_gather(shard, "data", tiled=True) for shard in shards)
            return jnp.sum(jnp.tanh(x @ w) @ v, dtype=jnp.float32)

        return jax.grad(loss)(shards)

    specs = (P("data"), P("data")), P("data")
    weights = arg(mesh, (1024, 2048), jnp.bfloat16, P("data"))
    back = arg(mesh, (2048, 1024), jnp.bfloat16, P("data"))
    x = arg(mesh, (mesh.size * 512, 1024), jnp.bfloat16, P("data"))
    return manual(step, mesh, specs, specs[0]), [(weights, back), x]


def constraints(mesh):
    """Gradients of three microbatches added under a partition, left to the partitioner."""
    cut = NamedSharding(mesh, P("data"))

    def step(x, y):
        def microbatch(total, xy):
            gradient = lax.with_sharding_constraint(xy[0].T @ xy[1], cut)
            return total + gradient, None

        zero = lax.with_sharding_constraint(jnp.zeros((2048, 1024), jnp.bfloat16), cut)
        return lax.scan(microbatch, zero, (x, y))[0]

    spec = P(None, "data")
    args = [arg(mesh, (3, mesh.size * 512, width), jnp.bfloat16, spec) for width in (2048, 1024)]
    return jax.jit(step), args


def gathered_product(mesh):
    """A product over a dimension that its left side is cut along, left to the partitioner."""
    out = NamedSharding(mesh, P(None, "data"))

    def step(x, w):
        return lax.with_sharding_constraint(x @ w, out)

    args = [arg(mesh, (8192, 8192), jnp.bfloat16, P(None, "data"))] * 2
    return jax.jit(step), args


def one_axis(mesh):
    """A gradient reduce-scattered over the axis x: its rows, then the columns of another."""

    def step(x, y):
        rows = lax.psum_scatter(x.T @ y, "x", scatter_dimension=0, tiled=True)
        columns = lax.psum_scatter(x.T @ (y * y), "x", scatter_dimension=1, tiled=True)
        return rows, columns

    specs = (P("x"), P("x")), (P("x"), P(None, "x"))
    args = [arg(mesh, (mesh.shape["x"] * 512, 4096), jnp.bfloat16, P("x"))] * 2
    return manual(step, mesh, *specs), args


def two_axes(mesh):
    """Groups over each axis of (a, b), over both, and over none that the mesh has."""
    a, b, *_ = mesh.axis_names

    def step(x):
        return [
            jnp.sum(y)
            for y in (
                lax.all_gather(x, a, tiled=True),
                lax.psum_scatter(x, b, tiled=True),
                lax.psum(x, (a, b)),
                lax.all_gather(x, (b, a), tiled=True),
                lax.ppermute(x, b, [(0, 1), (1, 0)]),
                lax.psum(x, b, axis_index_groups=[[0, 1], [2, 3]]),
            )
        ]

    return manual(step, mesh, (P(),), [P()] * 6), [arg(mesh, (64, 32), jnp.float32, P())]


def moved(mesh):
    """An array cut over (b, a), then along another dim over b, then whole: the partitioner's."""
    cuts = [NamedSharding(mesh, spec) for spec in (P(("b", "a")), P(None, "b"), P())]

    def step(x):
        for factor, cut in enumerate(cuts, 2):
            x = lax.with_sharding_constraint(x * factor, cut)
        return x

    return jax.jit(step), [arg(mesh, (64, 64), jnp.float32, P("a", "b"))]


def part_of_axis(mesh):
    """Heads that not all devices divide among them: groups of a part of the axis."""
    cut = NamedSharding(mesh, P(None, "data"))

    def step(x):
        x = lax.with_sharding_constraint(x * 2, cut).reshape(64, 12, 64)
        return lax.with_sharding_constraint(x * 3, NamedSharding(mesh, P("data")))

    return jax.jit(step), [arg(mesh, (64, 768), jnp.float32, P("data"))]


def branches(mesh):
    """A conditional whose second branch sends more, and a loop that ends on data."""
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    def few(x):
        return lax.psum(x, "data")

    def many(x):
        return lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True)

    def step(x, i):
        x = lax.cond(i[0] > 0, many, few, x)
        return lax.while_loop(
            lambda x: lax.pmax(jnp.max(x), "data") < 100,
            lambda x: x * 2 + lax.ppermute(x, "data", ring),
            x,
        )

    args = [arg(mesh, (64, 64), jnp.float32, P("data")), arg(mesh, (1,), jnp.int32, P())]
    return manual(step, mesh, (P("data"), P()), P("data")), args


def products(mesh):
    """Attention scores and values for 3 heads and 4 examples, and one plain product."""

    def step(q, k, v, w):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return mixed.reshape(4 * 256, 3 * 128) @ w

    heads = arg(mesh, (4, 256, 3, 128), jnp.bfloat16, P())
    return jax.jit(step), [heads, heads, heads, arg(mesh, (384, 512), jnp.bfloat16, P())]


def arg(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def manual(step, mesh, in_specs, out_specs):
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)
