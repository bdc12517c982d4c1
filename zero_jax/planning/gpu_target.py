"""What the XLA GPU compiler must know of a GPU that is not here: a `GpuTargetConfigProto` as text.

The compiler reads core counts, memory sizes and clocks from it, where it would otherwise ask the
driver. The facts are NVIDIA's (CUDA C++ Programming Guide 13.0, 2025, "Compute Capabilities": what
a generation has; datasheets and architecture whitepapers: what a GPU has). XLA's plugin holds such
texts of its own, which a test compares with these where they can be found.

Only fields that both supported versions of XLA can parse are written: jax 0.10.2 refuses
`mem_clock_ghz`, `reserved_shared_memory_per_block`, `max_blocks_per_multiprocessor` and
`collective_memory_granularity`. The rates of scalar and matrix units are left out: executables of
test programs were the same with and without them, on both versions, also under the latency-hiding
scheduler.

Not here: memory size and bandwidth (`hardware`), how many GPUs and how they are joined
(`topology`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .hardware import Accelerator


@dataclass(frozen=True)
class Generation:
    """What all GPUs of a compute capability have in common.

    Attributes:
      compute_capability: major and minor, as the target text says them.
      accelerated: code may use what only this very capability has (sm_90a, sm_100a).
      fp32_units: units for 32-bit floating point in one core (streaming multiprocessor).
      shared_memory_bytes: of one core.
      block_shared_memory_bytes: the most that one block may ask for.
    """

    compute_capability: tuple[int, int]
    accelerated: bool
    fp32_units: int
    shared_memory_bytes: int
    block_shared_memory_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    """What one GPU has, beyond its generation.

    Attributes:
      device_name: as the driver says it; becomes `device_kind` of the devices in JAX.
      generation: see `Generation`.
      cores: streaming multiprocessors.
      clock_ghz: their highest clock.
      l2_bytes: second-level cache.
      nvlinks: active NVLink links.
      pcie_gib: GiB/s over PCI Express, one direction, as XLA counts them.
    """

    device_name: str
    generation: Generation
    cores: int
    clock_ghz: float
    l2_bytes: int
    nvlinks: int
    pcie_gib: int


KIB = 2**10

# A V100 has 7.0. The assembler of CUDA 13, which the plugin calls, begins at 7.5, so it is compiled
# as that. The code is never run, and what is read off it, memory and collectives, does not differ.
VOLTA = Generation((7, 5), False, 64, 96 * KIB, 96 * KIB)
AMPERE = Generation((8, 0), False, 64, 164 * KIB, 163 * KIB)
HOPPER = Generation((9, 0), True, 128, 228 * KIB, 227 * KIB)
BLACKWELL = Generation((10, 0), True, 128, 228 * KIB, 227 * KIB)

GPU_FACTS: Mapping[str, GpuFacts] = MappingProxyType(
    {
        "v100-16": GpuFacts("Tesla V100-SXM2-16GB", VOLTA, 80, 1.53, 6 << 20, 6, 16),
        "v100-32": GpuFacts("Tesla V100-SXM2-32GB", VOLTA, 80, 1.53, 6 << 20, 6, 16),
        "a100-40": GpuFacts("NVIDIA A100-SXM4-40GB", AMPERE, 108, 1.41, 40 << 20, 12, 32),
        "a100-80": GpuFacts("NVIDIA A100-SXM4-80GB", AMPERE, 108, 1.41, 40 << 20, 12, 32),
        "h100": GpuFacts("NVIDIA H100 80GB HBM3", HOPPER, 132, 1.98, 50 << 20, 18, 32),
        "h200": GpuFacts("NVIDIA H200 141GB HBM3e", HOPPER, 132, 1.98, 50 << 20, 18, 32),
        "b200": GpuFacts("NVIDIA B200", BLACKWELL, 148, 1.965, 132644864, 18, 64),
        "gb200": GpuFacts("NVIDIA GB200", BLACKWELL, 152, 2.062, 135528448, 18, 64),
    }
)
"""Accelerator name -> facts, for every GPU of `hardware.ACCELERATORS`."""


def gpu_target(accelerator: Accelerator) -> str:
    """Write the target text of a GPU, for `get_topology_desc(..., target_config=TEXT)`.

    Raises:
      ValueError: the accelerator is not a GPU.

    >>> from zero_jax.planning.hardware import accelerator
    >>> "core_count: 132" in gpu_target(accelerator("h100"))
    True
    """
    facts = GPU_FACTS.get(accelerator.name)
    if facts is None:
        raise ValueError(f"{accelerator.name!r} is not a GPU. GPUs: {', '.join(GPU_FACTS)}.")
    major, minor = facts.generation.compute_capability
    return _TEXT.format(
        gpu=facts,
        generation=facts.generation,
        memory_bytes=accelerator.memory_bytes,
        memory_bandwidth=int(accelerator.memory_bandwidth),
        pcie_bandwidth=facts.pcie_gib << 30,
        major=major,
        minor=minor,
        features="ACCELERATED_FEATURES" if facts.generation.accelerated else "NONE",
        suffix="a" if facts.generation.accelerated else "",
        block_shared_memory=48 * KIB,
        registers=64 * KIB,
        grid=2**31 - 1,
    )


# The limits without a name in `Generation` are the same for every capability from 7.0 on. The
# versions of CUDA and cuDNN are those the older of the two plugins was built for.
_TEXT = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {block_shared_memory}
  shared_memory_per_block_optin: {generation.block_shared_memory_bytes}
  shared_memory_per_core: {generation.shared_memory_bytes}
  threads_per_core_limit: 2048
  registers_per_core_limit: {registers}
  registers_per_block_limit: {registers}
  core_count: {gpu.cores}
  fpus_per_core: {generation.fp32_units}
  block_dim_limit_x: {grid}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  clock_rate_ghz: {gpu.clock_ghz}
  l2_cache_size: {gpu.l2_bytes}
  device_memory_size: {memory_bytes}
  memory_bandwidth: {memory_bandwidth}
  pcie_bandwidth: {pcie_bandwidth}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_interconnect_info {{ active_links: {gpu.nvlinks} }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  name: "{gpu.device_name}"
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
platform_name: "CUDA"
device_description_str: "{gpu.device_name}"
"""
