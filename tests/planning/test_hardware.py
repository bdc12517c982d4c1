"""The hardware table: sources, arithmetic between its numbers, and the texts XLA itself has."""

import dataclasses
import importlib.util
import math
import mmap
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.gpu_target import GPU_FACTS, gpu_target
from zero_jax.planning.hardware import ACCELERATORS, UNITS, Accelerator, accelerator, memory_size

NUMBERS = [f.name for f in dataclasses.fields(Accelerator) if f.type in (int, float)]
CHIPS = [name for name in ACCELERATORS if name != "cpu"]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_number_has_its_source(name):
    kind = accelerator(name)
    assert kind.name == name
    assert set(kind.sources) == set(NUMBERS)
    assert len(NUMBERS) == 7
    assert all(len(source) > 10 for source in kind.sources.values())


@pytest.mark.parametrize("name", CHIPS)
def test_numbers_are_of_the_right_size(name):
    kind = accelerator(name)
    assert 15e9 < kind.memory_bytes < 200e9
    # The further away, the slower: HBM, then links, then the network or the host.
    assert kind.memory_bandwidth > kind.link_bandwidth > kind.network_bandwidth
    assert kind.link_bandwidth > kind.host_bandwidth
    # FLOPs that must be done for every byte read, for the matrix units to be the limit.
    assert 120 < kind.matmul_flops / kind.memory_bandwidth < 600


def test_the_table_agrees_with_arithmetic():
    def peak(cores, units, fused_multiply_adds, clock):
        return cores * units * fused_multiply_adds * 2 * clock

    def hbm(clock, bus_bits):
        return 2 * clock * bus_bits // 8  # double data rate

    v100, a100, h100 = map(accelerator, ("v100-16", "a100-80", "h100"))
    assert v100.matmul_flops == pytest.approx(peak(80, 8, 64, 1.53e9), rel=0.005)
    assert a100.matmul_flops == pytest.approx(peak(108, 4, 256, 1.41e9), rel=0.005)
    assert h100.matmul_flops == pytest.approx(peak(132, 4, 512, 1.83e9), rel=0.005)
    assert v100.memory_bandwidth == hbm(877_000_000, 4096)
    assert a100.memory_bandwidth == hbm(1_593_000_000, 5120)
    assert h100.memory_bandwidth == hbm(2_619_000_000, 5120)
    assert 2 * accelerator("v4").matmul_flops == 275e12  # two devices are one chip
    assert 2 * accelerator("tpu7x").matmul_flops == 2307e12
    assert accelerator("v5p").link_bandwidth == 6 * 100e9  # links of a 3D torus
    assert accelerator("v6e").link_bandwidth == 4 * 100e9  # of a 2D torus


def test_cpu_promises_nothing():
    cpu = accelerator("cpu")
    assert cpu.memory_bytes == 0
    assert math.isnan(1e9 / cpu.link_bandwidth)


def test_names():
    assert accelerator(" V100 ") is accelerator("v100-32")
    with pytest.raises(ValueError, match="Did you mean 'h100'.*Known: v100-16, .*tpu7x, cpu"):
        accelerator("h10")
    with pytest.raises(ValueError, match="Did you mean 'a100-40' or 'a100-80'"):
        accelerator("a100")
    with pytest.raises(ValueError, match="unknown accelerator 'mi300x'. .*Known"):
        accelerator("mi300x")


@hypothesis.given(st.integers(1, 10**6), st.sampled_from(list(UNITS)), st.booleans(), st.booleans())
def test_sizes_are_read_exactly(number, unit, space, small):
    text = f"{number}{' ' * space}{unit.lower() if small else unit}"
    assert memory_size(text) == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("32 GiB", 32 * 2**30),
        ("80gb", 80 * 10**9),
        (" 1.5 TiB ", 3 * 2**39),
        ("1.001kB", 1001),  # 1000 with floats
        ("24e9", 24 * 10**9),
        ("16000000000", 16 * 10**9),
    ],
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("80Gb", "'Gb' counts bits"),
        ("80Gib", "'Gib' counts bits"),
        ("80 apples", "'apples' is no unit"),
        ("80G", "'G' is no unit"),
        ("-3GB", "is -3000000000 bytes, it must be positive"),
        ("0GB", "must be positive"),
        ("0", "must be positive"),
        ("80", "without a unit this is 80 bytes"),
        ("", "was expected, this is ''"),
        ("GB", "was expected, this is 'GB'"),
        ("nan GB", "was expected"),
        ("8 0GB", "was expected"),
    ],
)
def test_sizes_that_are_none(text, fault):
    with pytest.raises(ValueError, match=re.escape(fault)) as caught:
        memory_size(text)
    assert "Write 80GB" in str(caught.value)


def test_targets_are_written_for_gpus_only():
    assert set(GPU_FACTS) == {n for n, kind in ACCELERATORS.items() if kind.platform == "cuda"}
    with pytest.raises(ValueError, match="'v5p' is not a GPU. GPUs: v100-16, "):
        gpu_target(accelerator("v5p"))


# Ours -> the device of the text that XLA has; none of the larger V100, whose chip is the same.
EMBEDDED = {name: facts.device_name for name, facts in GPU_FACTS.items()} | {
    "v100-32": "Tesla V100-SXM2-16GB"
}
SAME = [
    "core_count",
    "clock_rate_ghz",
    "fpus_per_core",
    "l2_cache_size",
    "memory_bandwidth",
    "threads_per_warp",
    "threads_per_block_limit",
    "threads_per_core_limit",
    "registers_per_core_limit",
    "registers_per_block_limit",
    "shared_memory_per_core",
    "shared_memory_per_block",
    "shared_memory_per_block_optin",
    "block_dim_limit_x",
    "block_dim_limit_y",
    "thread_dim_limit_z",
]


def embedded_text(device_name):
    """The target text of a device in the plugin's library; skips where that has none."""
    spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
    library = Path(spec.origin).with_name("xla_cuda_plugin.so")
    with library.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b'device_description_str: "%b"' % device_name.encode())
        if at < 0 and jax.__version_info__ < (0, 11):
            pytest.skip(f"the plugin of jax {jax.__version__} has no target texts in plain text")
        assert at >= 0, f"no text for {device_name}"
        return data[data.rfind(b"\0", 0, at) + 1 : data.find(b"\0", at)].decode()


def number(text, key):
    found = re.search(rf"\b{key}: ([\d.]+)", text)
    return float(found[1]) if found else 0.0  # a proto's default


@pytest.mark.aot
@pytest.mark.parametrize("name", GPU_FACTS)
def test_target_texts_agree_with_those_of_xla(name):
    ours, theirs = gpu_target(accelerator(name)), embedded_text(EMBEDDED[name])
    assert {k: number(ours, k) for k in SAME} == {k: number(theirs, k) for k in SAME}
    assert all(number(ours, k) > 0 for k in SAME)

    capability = [tuple(number(text, k) for k in ("major", "minor")) for text in (ours, theirs)]
    if name.startswith("v100"):  # see `gpu_target.VOLTA`
        assert capability == [(7, 5), (7, 0)]
    else:
        assert capability[0] == capability[1]
    features = [re.findall(r"feature_extension: (\w+)", text) for text in (ours, theirs)]
    assert features[0] == features[1]

    memory = [number(text, "device_memory_size") for text in (ours, theirs)]
    if name == "v100-32":
        assert memory[0] == pytest.approx(2 * memory[1], rel=0.01)
    elif name == "h200":  # theirs is the 141 GiB of the datasheet, a driver reports 139.81
        assert memory[0] == pytest.approx(memory[1], rel=0.01)
    else:
        assert memory[0] == memory[1]
    links = number(theirs, "active_links")  # the texts for A100 do not say
    assert number(ours, "active_links") == (links or 12)


@pytest.mark.aot
@pytest.mark.parametrize("name", GPU_FACTS)
def test_target_texts_compile_to_what_those_of_xla_do(name):
    theirs = embedded_text(EMBEDDED[name])
    if name.startswith("v100"):
        theirs = re.sub(r"major: 7", "major: 7 minor: 5", theirs)
    texts, sizes = [], []
    for target in (gpu_target(accelerator(name)), theirs):
        devices = get_topology_desc(platform="cuda", target_config=target, topology="1x1x8").devices
        mesh = Mesh(np.array(devices), ("data",))
        rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=rows)
        w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=rows)
        step = jax.jit(jax.grad(lambda w, x: jax.nn.gelu(x @ w).sum()), out_shardings=whole)
        compiled = step.lower(w, x).compile()
        texts.append(re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text()))
        memory = compiled.memory_analysis()
        sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    assert sizes[0] == sizes[1]
    assert texts[0] == texts[1]
