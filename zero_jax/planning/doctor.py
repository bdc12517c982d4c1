"""What is here: versions, devices, compilers, and how fast one collective is. `zero-jax doctor`.

The bandwidth is measured, not looked up: an all-gather over this process's devices, in the ring
convention of `communication`, in which each of n devices sends (n-1)/n of the whole. A message of a
few bytes is gathered between its runs: what that takes is spent on dispatch and latency, which the
bandwidth does not take out.

Not here: printing (`reporting.doctor_table`), links between processes, the vendors' figures
(`hardware`).
"""

import glob
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..mesh import resolve_mesh
from ..residence import is_compile_only
from .topology import available_targets

Device = Any  # `jax.Device`, which pyright takes for a variable

PACKAGES = ("zero_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
"""Distributions whose versions are told."""

CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""One of them is used; the version of the first that is installed is told."""

MESSAGE_BYTES = 64 * 2**20
"""Size of the array that is gathered to measure bandwidth."""

CPU_MESSAGE_BYTES = 16 * 2**20
"""The same on CPU devices, which share one machine's memory."""

RUNS = 5
"""Timed runs, of which the fastest counts."""


@dataclass(frozen=True)
class DevicesFound:
    """Devices of all processes, and those of this one."""

    count: int
    local_count: int
    processes: int
    platform: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class MemoryFound:
    """Memories of one device.

    Attributes:
      kinds: all that it can address, its own first.
      limit_bytes: what JAX may take of its own; None where the platform does not tell.
    """

    kinds: tuple[str, ...]
    limit_bytes: int | None


@dataclass(frozen=True)
class Bandwidth:
    """One measured all-gather.

    Attributes:
      devices: over how many.
      message_bytes: size of the gathered array.
      seconds: the fastest run.
      latency_seconds: the fastest run of a message of 4 bytes a device.
      bytes_per_second: what one device sent in a second.
    """

    devices: int
    message_bytes: int
    seconds: float
    latency_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.message_bytes * (self.devices - 1) / self.devices / self.seconds


@dataclass(frozen=True)
class Findings:
    """What `examine` found.

    Attributes:
      versions: name -> version, None where it is not installed; Python's first.
      devices: how many, of which kind.
      mesh: axis -> size of the mesh that a call without `mesh=` uses.
      memory: of the first device of this process.
      targets: platform -> "ok", or what is missing to compile for it.
      bandwidth: None where this process has one device, so that nothing crosses a link.
      notes: what a person should know or change, in sentences.
    """

    versions: Mapping[str, str | None]
    devices: DevicesFound
    mesh: Mapping[str, int]
    memory: MemoryFound
    targets: Mapping[str, str]
    bandwidth: Bandwidth | None
    notes: tuple[str, ...]


def examine(devices: Sequence[Device] | None = None) -> Findings:
    """Look at this machine: a few seconds, most of them for trying the compilers.

    Args:
      devices: to look at; by default all that JAX has.

    Raises:
      ValueError: no device is given, none is this process's, or they only describe a machine.
    """
    given = list(jax.devices() if devices is None else devices)
    if not given:
        raise ValueError("devices is empty; expected at least one device, or None for all.")
    mesh = resolve_mesh(None, "data") if devices is None else _line(given)
    if is_compile_only(mesh):
        raise ValueError(
            f"devices: {given[0]} belongs to a topology that is described, not present; expected "
            "devices that can run a program, such as jax.devices()."
        )
    mine = [device for device in given if device.process_index == jax.process_index()]
    if not mine:
        raise ValueError(
            f"devices: none of the {len(given)} belongs to process {jax.process_index()}; expected "
            "one of jax.local_devices() among them."
        )
    return Findings(
        versions=_versions(),
        devices=_devices_found(given, mine),
        mesh=dict(mesh.shape),
        memory=_memory_found(mine[0]),
        targets=available_targets(),
        bandwidth=measure_all_gather(mine) if len(mine) > 1 else None,
        notes=_notes(given),
    )


def measure_all_gather(devices: Sequence[Device], message_bytes: int | None = None) -> Bandwidth:
    """Time an all-gather of fp32 over devices of this process.

    Every run is waited for: virtual CPU devices hang when runs are enqueued.

    Args:
      devices: at least two.
      message_bytes: size of the whole array; rounded down to 4 bytes on each device.

    Raises:
      ValueError: fewer than two devices, or fewer than 4 bytes for each.
    """
    n = len(devices)
    if message_bytes is None:
        message_bytes = CPU_MESSAGE_BYTES if devices[0].platform == "cpu" else MESSAGE_BYTES
    if n < 2 or message_bytes < 4 * n:
        raise ValueError(
            f"devices: {n} and message_bytes={message_bytes}; expected at least two devices and "
            "4 bytes for each of them."
        )
    elements = message_bytes // 4 // n * n
    large, small = (_gather_run(devices, count) for count in (elements, n))
    large_seconds, small_seconds = zip(*((large(), small()) for _ in range(RUNS)), strict=True)
    return Bandwidth(n, 4 * elements, min(large_seconds), min(small_seconds))


def _gather_run(devices: Sequence[Device], elements: int) -> Callable[[], float]:
    """A function that gathers once and returns the seconds; compiled and warm."""
    mesh = _line(devices)
    parts = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.jit(lambda: jnp.zeros(elements, jnp.float32), out_shardings=parts)()
    gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    jax.block_until_ready(gather(x))

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(gather(x))
        return time.perf_counter() - start

    return run


def _line(devices: Sequence[Device]) -> Mesh:
    return Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))


def _versions() -> dict[str, str | None]:
    plugin = next(filter(_version, CUDA_PLUGINS), CUDA_PLUGINS[0])
    python = {"python": platform.python_version()}
    return python | {name: _version(name) for name in (*PACKAGES, plugin)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices_found(given: list[Device], mine: list[Device]) -> DevicesFound:
    kinds = dict.fromkeys(device.device_kind for device in given)
    processes = {device.process_index for device in given}
    return DevicesFound(len(given), len(mine), len(processes), given[0].platform, tuple(kinds))


def _memory_found(device: Device) -> MemoryFound:
    own = device.default_memory().kind
    others = [memory.kind for memory in device.addressable_memories() if memory.kind != own]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return MemoryFound((own, *others), limit)


def _notes(devices: list[Device]) -> tuple[str, ...]:
    notes = []
    if len(devices) == 1:
        notes.append(
            "There is one device, so stages 1 to 3 partition nothing. To try them on this machine "
            'call jax.config.update("jax_num_cpu_devices", 8) before the first computation.'
        )
    if devices[0].platform == "cpu":
        if os.path.exists("/dev/nvidiactl"):
            notes.append(
                "A GPU is here but JAX does not use it. Run pip install 'jax[cuda13]', and do not "
                "set JAX_PLATFORMS to cpu."
            )
        if glob.glob("/dev/accel*"):
            notes.append(
                "A TPU is here but JAX does not use it. Run pip install 'jax[tpu]', and do not "
                "set JAX_PLATFORMS to cpu."
            )
    return tuple(notes)
