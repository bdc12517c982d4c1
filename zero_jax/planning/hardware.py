"""Accelerators and their numbers: memory, arithmetic, links. Each number has its source.

The vendors' figures, at their peak; nothing here was measured except where a source says so. A
number is that of one *device* as JAX counts devices: where libtpu reports each of a chip's two
cores as a device (v4, tpu7x), it is half of the chip's.

Bandwidths count one direction. Vendors mostly print both directions together; such figures are
halved, and the source says "both directions".

Not here: what a program makes of these numbers (latency, contention, the share of a torus's links
that one ring uses), and what the GPU compiler must know of a chip (`gpu_target`).
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal

GIB = 2**30

Platform = Literal["cuda", "tpu", "cpu"]


@dataclass(frozen=True)
class Accelerator:
    """One kind of device.

    Attributes:
      name: how a topology names it, as in "h100:8x8".
      title: the vendor's name.
      platform: which compiler serves it.
      memory_bytes: HBM that a program can use; 0 where it is not known (cpu).
      memory_bandwidth: bytes/s between the device and its HBM.
      matmul_flops: dense FLOP/s of a bf16 matmul with fp32 sums; fp16 on V100, which has no bf16.
      link_bandwidth: bytes/s that one device sends inside its node (NVLink) or slice (ICI), summed
        over its links. A ring along one axis of a torus uses two of them.
      network_bandwidth: bytes/s that one device sends between nodes or slices.
      host_bandwidth: bytes/s between one device and host memory.
      devices_per_node: GPUs that NVLink joins, or TPU devices on one host, in the usual machine.
      sources: field -> the document its number is from.
    """

    name: str
    title: str
    platform: Platform
    memory_bytes: int
    memory_bandwidth: float
    matmul_flops: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    devices_per_node: int
    sources: Mapping[str, str] = field(compare=False, repr=False)


def accelerator(name: str) -> Accelerator:
    """Look up an accelerator; "v100" means "v100-32". Case does not matter.

    Raises:
      ValueError: no accelerator is called so.

    >>> accelerator("H100").matmul_flops
    989000000000000.0
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in ACCELERATORS:
        return ACCELERATORS[key]
    longer = [known for known in ACCELERATORS if key and known.startswith(key)]
    near = longer or difflib.get_close_matches(key, [*ACCELERATORS, *ALIASES], n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"unknown accelerator {name!r}.{hint} Known: {', '.join(ACCELERATORS)}.")


def memory_size(text: str) -> int:
    """Read a number of bytes as people write it: "80GB", "32 GiB", "1.5 TB", "24e9".

    GB is 10**9 and GiB 2**30. Units in small letters are taken as bytes ("80gb"), because nobody
    measures memory in bits; "80Gb" is refused, because it spells gigabits, and "80G", because it
    may mean either of two sizes.

    Raises:
      ValueError: not a positive size, or no unit of bytes.

    >>> memory_size("80GB"), memory_size("32 gib"), memory_size("24e9")
    (80000000000, 34359738368, 24000000000)
    """
    how = "Write 80GB (10**9 bytes each), 80GiB (2**30 bytes each) or a number of bytes (8e10)."
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError(f"a memory size was expected, this is {text!r}. {how}")
    number, unit = Decimal(match[1]), match[2]
    known = {"": 1, **UNITS, **{name.lower(): size for name, size in UNITS.items()}}
    if unit not in known:
        fault = "counts bits" if unit.endswith("b") else "is no unit of bytes"
        raise ValueError(f"memory size {text!r}: the unit {unit!r} {fault}. {how}")
    if not unit and 0 < number < 10**6:
        raise ValueError(f"memory size {text!r}: without a unit this is {number} bytes. {how}")
    size = int(number * known[unit])
    if size <= 0:
        raise ValueError(f"memory size {text!r}: this is {size} bytes, it must be positive. {how}")
    return size


UNITS = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40,
}  # fmt: skip

ALIASES = {"v100": "v100-32"}


def _entry(name: str, title: str, platform: Platform, **numbers: tuple[float, str]) -> Accelerator:
    values: dict[str, Any] = {key: value for key, (value, _) in numbers.items()}
    sources = MappingProxyType({key: source for key, (_, source) in numbers.items()})
    return Accelerator(name, title, platform, sources=sources, **values)


_DRIVER = "total memory as the CUDA driver reports it (XLA GPU target description)"
_CLOCK = "2 x memory clock x bus width (XLA GPU target description); the datasheet rounds it"
_LIBTPU = "libtpu 0.0.52: 'available HBM' in its error about a program that is too large"
_CLOUD = "Google Cloud TPU documentation, {}, 2025"
_BOOK = "Austin et al., How to Scale Your Model, 2025, part 2"
_HALF = "; half of the chip, which is two devices"
_GEN3 = (15.75e9, "PCI Express 3.0, 16 lanes")
_GEN4 = (31.5e9, "PCI Express 4.0, 16 lanes")
_GEN5 = (63e9, "PCI Express 5.0, 16 lanes")
_NVLINK2 = (150e9, "NVIDIA Tesla V100 datasheet, 2018: 6 links, 300 GB/s both directions")
_NVLINK3 = (300e9, "NVIDIA A100 datasheet, 2021: 12 links, 600 GB/s both directions")
_NVLINK4 = (450e9, "NVIDIA H100 and H200 datasheets, 2023: 18 links, 900 GB/s both directions")
_NVLINK5 = (900e9, "NVIDIA Blackwell datasheet, 2024: 18 links, 1.8 TB/s both directions")
_V100 = (125e12, "NVIDIA Tesla V100 datasheet, 2018: tensor performance, fp16")
_A100 = (312e12, "NVIDIA A100 datasheet, 2021")
_HOPPER = (989e12, "NVIDIA H100 and H200 datasheets, 2023: 1979 TFLOPS with sparsity, half dense")
_V100_CLOCK = (898.048e9, _CLOCK + " to 900 GB/s")
_DGX1 = "NVIDIA DGX-1 with V100 datasheet, 2017"
_DGX2 = "NVIDIA DGX-2 datasheet, 2018"
_DGX_A100 = "NVIDIA DGX A100 datasheet, 2020"
_DGX_H100 = "NVIDIA DGX H100 and H200 datasheets, 2023"
_DGX_B200 = "NVIDIA DGX B200 datasheet, 2024"
_NONE = "no figure: virtual devices share this machine"
_NAN = (math.nan, _NONE)
_NVL72 = "NVIDIA GB200 NVL72 datasheet, 2024"

_TABLE = (
    _entry(
        "v100-16", "Tesla V100-SXM2-16GB", "cuda",
        memory_bytes=(16935682048, _DRIVER),
        memory_bandwidth=_V100_CLOCK,
        matmul_flops=_V100,
        link_bandwidth=_NVLINK2,
        network_bandwidth=(6.25e9, f"{_DGX1}: 4 x 100 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN3,
        devices_per_node=(8, _DGX1),
    ),
    _entry(
        "v100-32", "Tesla V100-SXM2-32GB", "cuda",
        memory_bytes=(32510 * 2**20, "total memory as PyTorch prints it: 32510 MB"),
        memory_bandwidth=_V100_CLOCK,
        matmul_flops=_V100,
        link_bandwidth=_NVLINK2,
        network_bandwidth=(6.25e9, f"{_DGX2}: 8 x 100 Gbit/s for 16 GPUs"),
        host_bandwidth=_GEN3,
        devices_per_node=(16, f"{_DGX2}; the machine of the ZeRO papers"),
    ),
    _entry(
        "a100-40", "NVIDIA A100-SXM4-40GB", "cuda",
        memory_bytes=(42331013120, _DRIVER),
        memory_bandwidth=(1555.2e9, _CLOCK + " to 1555 GB/s"),
        matmul_flops=_A100,
        link_bandwidth=_NVLINK3,
        network_bandwidth=(25e9, f"{_DGX_A100}: 8 x 200 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN4,
        devices_per_node=(8, _DGX_A100),
    ),
    _entry(
        "a100-80", "NVIDIA A100-SXM4-80GB", "cuda",
        memory_bytes=(85100068864, _DRIVER),
        memory_bandwidth=(2039.04e9, _CLOCK + " to 2039 GB/s"),
        matmul_flops=_A100,
        link_bandwidth=_NVLINK3,
        network_bandwidth=(25e9, f"{_DGX_A100}: 8 x 200 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN4,
        devices_per_node=(8, _DGX_A100),
    ),
    _entry(
        "h100", "NVIDIA H100 80GB HBM3 (SXM)", "cuda",
        memory_bytes=(84942979072, _DRIVER),
        memory_bandwidth=(3352.32e9, _CLOCK + " to 3.35 TB/s"),
        matmul_flops=_HOPPER,
        link_bandwidth=_NVLINK4,
        network_bandwidth=(50e9, f"{_DGX_H100}: 8 x 400 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN5,
        devices_per_node=(8, _DGX_H100),
    ),
    _entry(
        "h200", "NVIDIA H200 141GB HBM3e (SXM)", "cuda",
        memory_bytes=(13981 * GIB // 100, "total memory as PyTorch prints it: 139.81 GiB"),
        memory_bandwidth=(4800e9, "NVIDIA H200 datasheet, 2023"),
        matmul_flops=_HOPPER,
        link_bandwidth=_NVLINK4,
        network_bandwidth=(50e9, f"{_DGX_H100}: 8 x 400 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN5,
        devices_per_node=(8, _DGX_H100),
    ),
    _entry(
        "b200", "NVIDIA B200 (HGX, DGX)", "cuda",
        memory_bytes=(191514411008, _DRIVER),
        memory_bandwidth=(7672.32e9, _CLOCK + " to 8 TB/s"),
        matmul_flops=(2250e12, "NVIDIA Blackwell datasheet, 2024: HGX B200, dense"),
        link_bandwidth=_NVLINK5,
        network_bandwidth=(50e9, f"{_DGX_B200}: 8 x 400 Gbit/s for 8 GPUs"),
        host_bandwidth=_GEN5,
        devices_per_node=(8, _DGX_B200),
    ),
    _entry(
        "gb200", "NVIDIA GB200 (one of the two GPUs)", "cuda",
        memory_bytes=(197897748480, _DRIVER),
        memory_bandwidth=(7928.064e9, _CLOCK + " to 8 TB/s"),
        matmul_flops=(2500e12, f"{_NVL72}, dense"),
        link_bandwidth=_NVLINK5,
        network_bandwidth=(50e9, "NVIDIA DGX GB200 datasheet, 2024: 400 Gbit/s per GPU"),
        host_bandwidth=(225e9, f"{_NVL72}: 900 GB/s both directions, shared by two GPUs"),
        devices_per_node=(72, f"{_NVL72}: one NVLink domain"),
    ),
    _entry(
        "v4", "Cloud TPU v4 (one of the chip's two cores)", "tpu",
        memory_bytes=(1525 * GIB // 100, _LIBTPU),
        memory_bandwidth=(600e9, _CLOUD.format("v4") + _HALF),
        matmul_flops=(137.5e12, _CLOUD.format("v4") + _HALF),
        link_bandwidth=(150e9, "Jouppi et al., TPU v4, 2023: 6 links of 50 GB/s" + _HALF),
        network_bandwidth=(3.125e9, "no figure for v4; taken as v5p's" + _HALF),
        host_bandwidth=(8e9, f"{_BOOK}: 16 GB/s" + _HALF),
        devices_per_node=(8, "libtpu 0.0.52: 2x2 chips"),
    ),
    _entry(
        "v5e", "Cloud TPU v5e", "tpu",
        memory_bytes=(1575 * GIB // 100, _LIBTPU),
        memory_bandwidth=(819e9, _CLOUD.format("v5e")),
        matmul_flops=(197e12, _CLOUD.format("v5e")),
        link_bandwidth=(200e9, _CLOUD.format("v5e") + ": 400 GB/s both directions"),
        network_bandwidth=(3.125e9, _CLOUD.format("v5e") + ": 6.4 Tbit/s for 256 chips"),
        host_bandwidth=(16e9, f"{_BOOK}: 16 GB/s"),
        devices_per_node=(4, "libtpu 0.0.52: 2x2 chips"),
    ),
    _entry(
        "v5p", "Cloud TPU v5p", "tpu",
        memory_bytes=(9573 * GIB // 100, _LIBTPU),
        memory_bandwidth=(2765e9, _CLOUD.format("v5p")),
        matmul_flops=(459e12, _CLOUD.format("v5p")),
        link_bandwidth=(600e9, _CLOUD.format("v5p") + ": 1200 GB/s both directions"),
        network_bandwidth=(6.25e9, _CLOUD.format("v5p") + ": 50 Gbit/s per chip"),
        host_bandwidth=(16e9, f"{_BOOK}: 16 GB/s"),
        devices_per_node=(4, "libtpu 0.0.52: 2x2 chips"),
    ),
    _entry(
        "v6e", "Cloud TPU v6e (Trillium)", "tpu",
        memory_bytes=(3124 * GIB // 100, _LIBTPU),
        memory_bandwidth=(1638e9, _CLOUD.format("v6e")),
        matmul_flops=(918e12, _CLOUD.format("v6e")),
        link_bandwidth=(400e9, _CLOUD.format("v6e") + ": 800 GB/s both directions"),
        network_bandwidth=(12.5e9, _CLOUD.format("v6e") + ": 100 Gbit/s per chip"),
        host_bandwidth=(32e9, f"{_BOOK}: 32 GB/s"),
        devices_per_node=(4, "libtpu 0.0.52: 2x2 chips"),
    ),
    _entry(
        "tpu7x", "Cloud TPU7x (Ironwood, one of the chip's two cores)", "tpu",
        memory_bytes=(9474 * GIB // 100, _LIBTPU),
        memory_bandwidth=(3690e9, _CLOUD.format("tpu7x") + _HALF),
        matmul_flops=(1153.5e12, _CLOUD.format("tpu7x") + _HALF),
        link_bandwidth=(300e9, _CLOUD.format("tpu7x") + ": 1200 GB/s both ways" + _HALF),
        network_bandwidth=(6.25e9, _CLOUD.format("tpu7x") + ": 100 Gbit/s" + _HALF),
        host_bandwidth=(16e9, "no figure for tpu7x; taken as v6e's" + _HALF),
        devices_per_node=(8, "libtpu 0.0.52: 2x2 chips"),
    ),
    _entry(
        "cpu", "a virtual device of this machine", "cpu",
        memory_bytes=(0, _NONE), memory_bandwidth=_NAN, matmul_flops=_NAN, link_bandwidth=_NAN,
        network_bandwidth=_NAN, host_bandwidth=_NAN, devices_per_node=(8, _NONE),
    ),
)  # fmt: skip

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType({a.name: a for a in _TABLE})
"""All accelerators by name. The cpu entry is for trying things: JAX's virtual CPU devices share one
machine, so their memory is not known (0) and seconds computed from their numbers are NaN."""
