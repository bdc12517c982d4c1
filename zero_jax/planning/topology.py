"""Devices of machines nobody here owns, for compiling only: `compile_only_devices("h100:8x8")`.

JAX asks each compiler for them (`jax.experimental.topologies`). What a topology says, by platform:

  cuda  "h100:8" is one node of 8, "h100:8x8" 8 nodes of 8. XLA's own string is partitions x hosts
        x devices per host (`GpuTopologyProto`; a partition is what NVLink joins, also over hosts).
        A node becomes one partition with one host, "8x1x8": its GPUs share a process index and the
        first of their `coords`. This matters: inside one partition jax 0.12 copies the operand of a
        reduce-scatter into memory that NVLink reaches, across partitions it does not (8 MB in a
        program of 240 MB). jax 0.10.2 compiled both alike.
  tpu   "v5p:4x4x4" is the shape of one slice's torus in chips. On v4 and tpu7x libtpu counts both
        cores of a chip as devices (v4 machines join them to one by default: compare with care).
        Devices come host by host, 2x2 chips each, so their ids do not ascend.
  cpu   "cpu:8" is 8 of JAX's virtual CPU devices. They can run programs, too.

The GPU compiler calls NVIDIA's assembler `ptxas` and reads `libdevice`. Both are in the extra
`plan`, or in a CUDA toolkit. No GPU, driver, cuDNN or NCCL is needed.

On a machine without TPUs this sets four variables, where they are not set, before libtpu is loaded:
TPU_SKIP_MDS_QUERY, or it asks a metadata server that is not there; ALLOW_MULTIPLE_LIBTPU_LOAD, or
only one process at a time may load it; TPU_WORKER_HOSTNAMES and TPU_ACCELERATOR_TYPE, or it
complains. What is compiled does not change. Where JAX has loaded libtpu before (JAX_PLATFORMS not
set), they come too late.

Not here: several slices, shapes wrapped to a twisted torus, running anything.
"""

import functools
import glob
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding

from .gpu_target import gpu_target
from .hardware import Accelerator, accelerator

Device = Any  # `jax.Device`, which pyright takes for a variable

INSTALL = "pip install 'zero_jax[plan]'"

MAX_GPUS = 2**17
"""No topology of more GPUs is described: none is built, and a slip of the pen should not hang."""

LARGEST_NODE = 16
"""GPUs that NVLink joins in one machine, at most; racks (gb200) may have more."""

# Chip generation -> sides of its torus, devices per chip, chips in the largest slice (Google Cloud
# TPU documentation, 2025). libtpu itself accepts slices that are larger than any pod.
_TORUS = {
    "v4": (3, 2, 4096),
    "v5e": (2, 1, 256),
    "v5p": (3, 1, 8960),
    "v6e": (2, 1, 256),
    "tpu7x": (3, 2, 9216),
}


@dataclass(frozen=True)
class Topology:
    """A machine, or many joined ones.

    Attributes:
      text: as it was written, tidied.
      accelerator: what kind of device.
      shape: GPU: (nodes, GPUs in each); TPU: chips along each side of the torus; CPU: (devices,).
      devices: how many in all.
      nodes: islands of fast links: nodes for GPUs, 1 for a TPU slice, whose ICI reaches every chip.
      devices_per_node: devices in one island.
    """

    text: str
    accelerator: Accelerator
    shape: tuple[int, ...]
    devices: int
    nodes: int
    devices_per_node: int


def parse_topology(text: str) -> Topology:
    """Read "h100:8x8" (nodes x GPUs), "v5p:4x4x4" (chips along the torus) or "cpu:8".

    Raises:
      ValueError: the accelerator is not known, or it has no such shape.

    >>> parse_topology("h100:8x8").devices, parse_topology("tpu7x:2x2x1").devices
    (64, 8)
    """
    tidy = text.strip().lower()
    name, _, sizes = tidy.partition(":")
    kind = accelerator(name)
    if re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", sizes) is None:
        raise _bad_shape(tidy, kind, f"a shape was expected after the name, this is {sizes!r}")
    shape = tuple(map(int, sizes.split("x")))
    if kind.platform == "cuda":
        return _gpu_topology(tidy, kind, shape)
    if kind.platform == "tpu":
        return _tpu_topology(tidy, kind, shape)
    if len(shape) != 1:
        raise _bad_shape(tidy, kind, f"one number was expected, this has {len(shape)}")
    return Topology(tidy, kind, shape, shape[0], 1, shape[0])


def compile_only_devices(topology: str | Topology) -> list[Device]:
    """The devices of a topology, in its own order, to build a `Mesh` of and to compile for.

    A second call for the same topology returns the same devices. CPU devices are those JAX has.

    Raises:
      ValueError: no such topology, or fewer CPU devices than it asks for.
      ImportError: the compiler for its platform is not installed.
      RuntimeError: the GPU compiler lacks its assembler.
    """
    topology = parse_topology(topology) if isinstance(topology, str) else topology
    platform = topology.accelerator.platform
    if platform == "cpu":
        return _cpu_devices(topology.devices)
    _speak_for_libtpu()  # before JAX looks for plugins, which may load libtpu
    if platform == "tpu":
        return list(_tpu_devices(topology))
    devices = list(_gpu_devices(topology))
    _try_gpu_compiler(topology.accelerator)
    return devices


def available_targets() -> dict[str, str]:
    """Which platforms can be compiled for here: "ok", or a letter that says what is missing.

    Loads each compiler that is installed and compiles one small program with it: a few seconds.
    """
    found: dict[str, str] = {}
    for platform, text in (("cpu", "cpu:1"), ("cuda", "h100:1"), ("tpu", "v5e:2x2")):
        try:
            _compile_something(compile_only_devices(text)[0])
            found[platform] = "ok"
        except (ImportError, RuntimeError) as error:
            found[platform] = str(error)
    return found


def _gpu_topology(text: str, kind: Accelerator, shape: tuple[int, ...]) -> Topology:
    if len(shape) > 2:
        raise _bad_shape(text, kind, f"one or two numbers were expected, this has {len(shape)}")
    nodes, per_node = shape if len(shape) == 2 else (1, *shape)
    largest = max(LARGEST_NODE, kind.devices_per_node)
    if per_node > largest:
        fault = (
            f"a node has at most {largest} GPUs (usually {kind.devices_per_node}), not {per_node}"
        )
        raise _bad_shape(text, kind, fault)
    if nodes * per_node > MAX_GPUS:
        raise _bad_shape(text, kind, f"{nodes * per_node} GPUs are more than {MAX_GPUS}")
    return Topology(text, kind, (nodes, per_node), nodes * per_node, nodes, per_node)


def _tpu_topology(text: str, kind: Accelerator, shape: tuple[int, ...]) -> Topology:
    sides, per_chip, largest = _TORUS[kind.name]
    if len(shape) != sides:
        raise _bad_shape(text, kind, f"its torus has {sides} sides, this has {len(shape)}")
    chips = math.prod(shape)
    if chips > largest:
        raise _bad_shape(text, kind, f"its largest slice has {largest} chips, this has {chips}")
    return Topology(text, kind, shape, chips * per_chip, 1, chips * per_chip)


def _bad_shape(text: str, kind: Accelerator, fault: str) -> ValueError:
    name = kind.name
    if kind.platform == "cuda":
        node = kind.devices_per_node
        how = f'Write nodes x GPUs in each, as "{name}:4x{node}", or "{name}:{node}" for one node.'
    elif kind.platform == "tpu":
        example = "4x4x4" if _TORUS[name][0] == 3 else "4x4"
        how = (
            f'Write the chips along each side, as "{name}:{example}". Hosts have 2x2 chips, so the '
            "first two sides are even; some versions also know parts of a host, 1x1 and 1x2."
        )
    else:
        how = 'Write how many devices, as "cpu:8".'
    return ValueError(f"topology {text!r}: {fault}. {how}")


def _speak_for_libtpu() -> None:
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):  # no TPU is here
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")


@functools.cache
def _gpu_devices(topology: Topology) -> tuple[Device, ...]:
    plugin = next(filter(_installed, ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")), None)
    if plugin is None:
        raise _not_installed(topology, "JAX's CUDA plugin (no GPU is needed)")

    def describe() -> tuple[Device, ...]:
        shape = f"{topology.nodes}x1x{topology.devices_per_node}"
        target = gpu_target(topology.accelerator)
        return tuple(
            get_topology_desc(platform="cuda", target_config=target, topology=shape).devices
        )

    if os.path.exists("/dev/nvidiactl"):  # a GPU is here: JAX shall check its libraries as usual
        return describe()
    with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
        try:
            return describe()
        except NotImplementedError:
            # JAX has looked for plugins before, and left this one out for want of cuDNN.
            importlib.import_module(plugin).initialize()
            return describe()


@functools.cache
def _try_gpu_compiler(kind: Accelerator) -> None:
    """Compile one line, so that a missing assembler is told here and not by a later step."""
    try:
        _compile_something(_gpu_devices(_gpu_topology(f"{kind.name}:1", kind, (1,)))[0])
    except jax.errors.JaxRuntimeError as error:
        missing = re.search(r"ptxas|nvlink|libdevice", str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"compiling for {kind.name!r} needs NVIDIA's {missing[0]}, which XLA did not find. Run "
            f"{INSTALL} (it brings nvidia-cuda-nvcc and nvidia-nvvm), or put a CUDA 13 toolkit on "
            "the PATH. No GPU is needed."
        ) from error


def _compile_something(device: Device) -> None:
    x = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=SingleDeviceSharding(device))
    jax.jit(lambda x: jnp.sin(jnp.exp(x))).lower(x).compile()  # exp and sin: from libdevice


@functools.cache
def _tpu_devices(topology: Topology) -> tuple[Device, ...]:
    if not _installed("libtpu"):
        raise _not_installed(topology, "libtpu (no TPU is needed)")
    try:
        devices = tuple(get_topology_desc(topology.text, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        code, _, reason = str(error).partition(": ")
        if code != "INVALID_ARGUMENT":
            raise
        raise _bad_shape(topology.text, topology.accelerator, f"libtpu says: {reason}") from error
    if len(devices) != topology.devices:
        raise RuntimeError(
            f"topology {topology.text!r}: {topology.devices} devices were expected, libtpu gives "
            f"{len(devices)}. This libtpu counts cores in a new way; please report it."
        )
    return devices


def _cpu_devices(count: int) -> list[Device]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"topology 'cpu:{count}': JAX has {len(devices)} CPU devices. Before the first "
            f'computation call jax.config.update("jax_num_cpu_devices", {count}), or start Python '
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
    return devices[:count]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent
        return False


def _not_installed(topology: Topology, what: str) -> ImportError:
    return ImportError(f"topology {topology.text!r} is compiled by {what}. Run {INSTALL}.")


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables that are not set, for the time of the block."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
