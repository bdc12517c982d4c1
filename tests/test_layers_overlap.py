"""Law: on the real GPU compilers, the layer loop hides what it sends and copies no layer.

A stack of GPT blocks, 4096 wide with 32 heads, 2 x 2048 tokens on each device: the layers of a
model of 13 billion parameters. A loop's schedule does not depend on the number of its trips.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.at_use import Partitioned, Wire
from zero_jax.collectives import Cut
from zero_jax.compiler_options import compiler_options
from zero_jax.layers import scan_layers
from zero_jax.planning.topology import compile_only_devices, parse_topology
from zero_jax.reporting.hlo import audit

LAYERS, WIDTH, HEADS, BATCH, TOKENS = 9, 4096, 32, 2, 2048
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "scale": (WIDTH,),
    "bias": (4 * WIDTH,),
}
LAYER_SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())


def block(p, x):
    def normed(x):
        wide = x.astype(jnp.float32)
        size = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * size).astype(x.dtype) * p["scale"]

    q, k, v = jnp.split((normed(x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normed(x) @ p["up"] + p["bias"]) @ p["down"]


def stack_step(devices):
    """Gradients of a stack of blocks at stage 3: bf16 on the way out, fp32 on the way back."""
    mesh = Mesh(np.array(devices), ("data",))

    def wire(name, shape):
        cut = Cut((LAYERS, *shape), (LAYERS, *shape), 1, ("data",), len(devices))
        return Wire(name, cut, cut, jnp.bfloat16, jnp.float32, True)

    wires = {name: wire(name, shape) for name, shape in SHAPES.items()}

    def step(values, x):
        def loss(carriers):
            stacked = {n: Partitioned(values[n], carriers[n], wires[n]) for n in SHAPES}
            return jnp.mean(scan_layers(block, stacked, x).astype(jnp.float32) ** 2)

        return jax.grad(loss)({name: wire.carrier() for name, wire in wires.items()})

    cut = P(None, "data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(cut, P("data")), out_specs=cut, check_vma=False
    )
    values = {n: abstract(mesh, (LAYERS, *shape), cut) for n, shape in SHAPES.items()}
    x = abstract(mesh, (BATCH * len(devices), TOKENS, WIDTH), P("data"))
    return jax.jit(mapped).lower(values, x), mesh


def abstract(mesh, shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def working_set(device):
    """Temporaries of one layer computed again and differentiated, alone on one device."""
    mesh = Mesh(np.array([device]), ("data",))
    p = {n: abstract(mesh, shape, P()) for n, shape in SHAPES.items()}
    x = abstract(mesh, (BATCH, TOKENS, WIDTH), P())
    alone = jax.jit(lambda p, x, ct: jax.vjp(block, p, x)[1](ct))
    return alone.lower(p, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["h100:8x8", "a100-80:64x8"])
def test_a_loop_of_layers_hides_what_it_sends_and_copies_nothing(topology):
    devices = compile_only_devices(topology)
    machine = parse_topology(topology)
    lowered, mesh = stack_step(devices)
    options = compiler_options(devices[0], layer_bytes=4 * LAYER_SIZE)
    compiled = lowered.compile(compiler_options=options)
    report = audit(compiled, mesh, machine.accelerator, machine.devices_per_node)

    inside = [c for c in report.collectives if c.in_loop]
    sent = sum(c.total_bytes for c in inside)
    assert sent > 0
    assert sum(c.total_bytes for c in inside if c.matmul_flops) >= 0.95 * sent

    # One collective for all leaves of a layer: two gathers, one reduction, and one for the loss.
    assert sum(c.trips for c in report.collectives) <= 3 * LAYERS + 1

    # Exposed are at most the ends: the first gather of each pass and the last reduction.
    assert report.exposed_seconds <= 1.01 * report.transfer_seconds / LAYERS

    # No copy of as much as the smallest matrix of a layer.
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in copies]
    assert max(sizes, default=0) <= BATCH * TOKENS * WIDTH

    saved = LAYERS * BATCH * TOKENS * WIDTH * 2
    layers = 2 * (2 * LAYER_SIZE) + 2 * (4 * LAYER_SIZE)  # two gathered, two of gradients
    shards = LAYERS * LAYER_SIZE * 4 // len(devices)
    assert report.memory
    assert report.memory.temp_bytes <= saved + layers + shards + working_set(devices[0])
