"""Topologies: what their names mean, and that both supported compilers compile for them."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning import topology as planning_topology
from zero_jax.planning.gpu_target import GPU_FACTS
from zero_jax.planning.hardware import GIB, accelerator
from zero_jax.planning.topology import available_targets, compile_only_devices, parse_topology

aot = pytest.mark.aot


@pytest.mark.parametrize(
    ("text", "name", "shape", "devices", "nodes", "per_node"),
    [
        ("h100:8x8", "h100", (8, 8), 64, 8, 8),
        ("h100:8", "h100", (1, 8), 8, 1, 8),
        ("h100:1", "h100", (1, 1), 1, 1, 1),
        (" A100-80:64x8 ", "a100-80", (64, 8), 512, 64, 8),
        ("v100:2x16", "v100-32", (2, 16), 32, 2, 16),
        ("gb200:2x72", "gb200", (2, 72), 144, 2, 72),
        ("v5p:4x4x4", "v5p", (4, 4, 4), 64, 1, 64),
        ("v6e:16x16", "v6e", (16, 16), 256, 1, 256),
        ("v5e:1x1", "v5e", (1, 1), 1, 1, 1),
        ("v4:2x2x1", "v4", (2, 2, 1), 8, 1, 8),  # 4 chips of 2 devices
        ("tpu7x:2x2x1", "tpu7x", (2, 2, 1), 8, 1, 8),
        ("cpu:8", "cpu", (8,), 8, 1, 8),
    ],
)
def test_names(text, name, shape, devices, nodes, per_node):
    t = parse_topology(text)
    assert t.accelerator is accelerator(name)
    assert (t.shape, t.devices, t.nodes, t.devices_per_node) == (shape, devices, nodes, per_node)
    assert t.text == text.strip().lower()


@pytest.mark.parametrize(
    ("text", "fault", "advice"),
    [
        ("h100", "this is ''", '"h100:4x8"'),
        ("h100:0x8", "this is '0x8'", '"h100:4x8"'),
        ("h100:axb", "this is 'axb'", '"h100:4x8"'),
        ("h100:-8", "this is '-8'", '"h100:8" for one node'),
        ("h100:8x8x8", "this has 3", '"h100:4x8"'),
        ("h100:512", "a node has at most 16 GPUs (usually 8), not 512", '"h100:4x8"'),
        ("h100:99999999x8", "799999992 GPUs are more than 131072", '"h100:4x8"'),
        ("v5p:4x4", "its torus has 3 sides, this has 2", '"v5p:4x4x4"'),
        ("v6e:2x2x1", "its torus has 2 sides, this has 3", '"v6e:4x4"'),
        ("v6e:0x0", "this is '0x0'", '"v6e:4x4"'),  # libtpu would end the process
        ("v6e:32x32", "its largest slice has 256 chips, this has 1024", '"v6e:4x4"'),
        ("cpu:2x4", "one number was expected, this has 2", '"cpu:8"'),
        ("h10:8", "unknown accelerator 'h10'", "Did you mean 'h100'"),
        ("v7x:2x2x1", "unknown accelerator 'v7x'", "Did you mean 'tpu7x'"),
        ("", "unknown accelerator ''", "Known: "),
    ],
)
def test_names_that_mean_nothing(text, fault, advice):
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        parse_topology(text)
    assert advice in str(caught.value)


def test_cpu_devices_are_those_of_jax():
    assert compile_only_devices("cpu:8") == jax.devices("cpu")
    assert compile_only_devices("cpu:3") == jax.devices("cpu")[:3]
    with pytest.raises(ValueError, match=r"has 8 CPU devices.*jax_num_cpu_devices\", 9\).*XLA_FL"):
        compile_only_devices("cpu:9")


@pytest.mark.parametrize("text", ["h100:8x7", "v5p:2x2x3"])
def test_without_its_compiler_a_target_names_the_extra(monkeypatch, text):
    monkeypatch.setattr(planning_topology, "_installed", lambda module: False)
    with pytest.raises(ImportError, match=rf"'{text}'.*pip install 'zero_jax\[plan\]'"):
        compile_only_devices(text)
    planning_topology._tpu_devices.cache_clear()
    planning_topology._gpu_devices.cache_clear()
    targets = available_targets()
    assert targets["cpu"] == "ok"
    assert "zero_jax[plan]" in targets["cuda"]
    assert "zero_jax[plan]" in targets["tpu"]


def build(devices, rows=64):
    """A matmul on split rows, its sum over all devices; x and w in bf16, one row block each."""
    mesh = Mesh(np.array(devices), ("data",))

    def step(x, w):
        return jax.lax.psum((x @ w).astype(jnp.float32).sum(), "data")

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    x, w = abstract((rows * len(devices), 256), P("data")), abstract((256, 256), P())
    return jax.jit(mapped).lower(x, w).compile()


@aot
@pytest.mark.parametrize("name", GPU_FACTS)
def test_every_gpu_compiles(name):
    devices = compile_only_devices(f"{name}:8")
    assert [d.device_kind for d in devices] == [GPU_FACTS[name].device_name] * 8
    compiled = build(devices)
    x_bytes = 64 * 256 * 2
    w_bytes = 256 * 256 * 2
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == x_bytes + w_bytes
    assert memory.output_size_in_bytes == 4
    assert "all-reduce" in compiled.as_text()


@aot
@pytest.mark.parametrize("text", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_tpu_compiles(text):
    devices = compile_only_devices(text)
    assert len(devices) == parse_topology(text).devices
    compiled = build(devices)
    assert compiled.memory_analysis().argument_size_in_bytes >= (64 + 256) * 256 * 2
    assert "all-reduce" in compiled.as_text()


@aot
@pytest.mark.parametrize("text", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_tpu_memory_is_what_libtpu_leaves_to_a_program(text):
    device = compile_only_devices(text)[0]
    too_large = jax.ShapeDtypeStruct((2**35,), jnp.float32, sharding=SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        jax.jit(lambda x: x + 1).lower(too_large).compile()
    available = re.search(r"available HBM \(([\d.]+)G\)", str(caught.value))
    assert available is not None
    memory_bytes = parse_topology(text).accelerator.memory_bytes
    # printed to 0.01, and libtpu 0.0.42 leaves 0.01 GiB more than 0.0.50
    assert memory_bytes / GIB == pytest.approx(float(available[1]), abs=0.015)


@aot
def test_gpus_of_a_node_share_host_and_partition():
    devices = compile_only_devices("a100-80:64x8")
    assert len(devices) == 512
    assert [d.process_index for d in devices] == [i // 8 for i in range(512)]
    assert [list(d.coords) for d in devices] == [[i // 8, 0, i % 8] for i in range(512)]


@aot
def test_a_large_slice_is_described():
    devices = compile_only_devices("v5p:8x8x16")
    assert len(devices) == len(set(devices)) == 1024
    assert len({tuple(d.coords) for d in devices}) == 1024
    assert [d.process_index for d in devices] == [i // 4 for i in range(1024)]  # 2x2 chips a host


@aot
def test_tpu_shapes_that_libtpu_refuses():
    with pytest.raises(ValueError, match="'v5p:3x5x7': libtpu says: .*first two sides are even"):
        compile_only_devices("v5p:3x5x7")


@aot
def test_one_process_holds_all_targets_beside_its_own_devices():
    total = float(jax.jit(jnp.sum)(jnp.arange(8.0)))
    gpus, tpus = compile_only_devices("h100:8x8"), compile_only_devices("v5e:2x2")
    build(gpus), build(tpus)
    assert compile_only_devices("h100:8x8") == gpus
    assert all(a is b for a, b in zip(compile_only_devices("v5e:2x2"), tpus, strict=True))
    assert jax.device_count() == 8
    assert jax.devices()[0].platform == "cpu"
    assert float(jax.jit(jnp.sum)(jnp.arange(8.0))) == total == 28
    assert available_targets() == {"cpu": "ok", "cuda": "ok", "tpu": "ok"}


@aot
@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("INTERNAL: libdevice not found at ./libdevice.10.bc", "libdevice"),
        ("UNAVAILABLE: No PTX compilation provider: ptxas_path: none found", "ptxas"),
    ],
)
def test_a_missing_assembler_is_told_with_the_extra(monkeypatch, said, missing):
    def compile_something(device):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(planning_topology, "_compile_something", compile_something)
    planning_topology._try_gpu_compiler.cache_clear()
    with pytest.raises(RuntimeError, match=rf"NVIDIA's {missing}.*pip install 'zero_jax\[plan\]'"):
        compile_only_devices("h100:8")


@aot
@pytest.mark.parametrize("first", ["pass", "jax.devices()"])
def test_without_jax_platforms(first):
    """JAX then wants to check its CUDA libraries, which are not here, and leaves its plugin out.

    Two processes hold libtpu at once here.
    """
    compile_only_devices("v5e:2x2")
    program = f"""
import jax
{first}
from zero_jax.planning.topology import compile_only_devices
counts = [len(compile_only_devices(text)) for text in ("h100:2x8", "v5p:2x2x1")]
assert counts == [16, 4], counts
assert jax.devices()[0].platform == "cpu"
"""
    hidden = ("JAX_PLATFORMS", "TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if first == "pass":
        assert "Traceback" not in done.stderr
        assert "Source Location Trace" not in done.stderr
