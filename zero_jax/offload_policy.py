"""What leaves the device between steps: policies, as data.

ZeRO-Offload (arXiv 2101.06840, section 4) keeps the optimizer state and the fp32 parameters of
mixed-precision training in host memory; ZeRO-Infinity (arXiv 2104.07857, section 5.1) the
parameters, too, and has the optimizer state in files on a local disk. A policy says what goes;
`layout` writes it down leaf by leaf, and the step streams what it needs back (`offload.streams`,
`offload.disk_update`).

Not here: the transfers, and what activations are kept on the host (`remat`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .choices import check_choice

Where = Literal["auto", "host", "device"]
UpdateOn = Literal["device", "host"]
Existing = Literal["refuse", "resume", "replace"]

CHUNK_BYTES = 256 * 2**20
"""Of the state that is on its way to or from one device at a time. A PCIe link reaches its full
rate with pieces of a few MiB; larger ones only cost memory, of which three are held."""

BUFFER_BYTES = 256 * 2**20
"""Of pieces between a disk and this process's devices. Pieces of 16 MiB and more go at the rate of
the disk, and memory that is used again at once is faster than memory that is new."""


def streams_by_layer(path: str, shape: tuple[int, ...], stacked: Collection[str]) -> bool:
    """Whether a parameter passes between host and device a layer at a time.

    Its layers have to be matrices: TPUs read and write whole tiles, and a row is less.
    """
    return path in stacked and len(shape) > 2


@dataclass(frozen=True)
class HostMemory:
    """The optimizer state lies in the host's pinned memory, master copies included.

    Attributes:
      params: matrices of stacked layers (the rule "stacked", three dims or more) lie there, too,
        and `scan_layers` fetches each layer while the one before computes. Only the explicit step
        can. Other parameters (embeddings, norms, biases) stay on the device.
      gradients: "host": of the same matrices each layer's gradient is sent to the host as soon as
        it is reduced, and the update fetches it; only the explicit step can, without microbatches.
        "device": gradients wait there. "auto": the first where it is possible.
      chunk_bytes: how much of it is moved at a time, per device; up to three chunks are on the
        device at once. A layer of a stack, a leaf that the optimizer must see whole (its norm,
        say), and one that device axes cut along every dim are moved in one piece whatever their
        size.
      update_on: "device": the optimizer state passes through the device. "host": the host's
        processor computes the update, elementwise optimizers only; gradients go there and new
        parameters come back, moments and master copies never leave. On GPUs the host then holds
        the optimizer state twice during the update.
      delayed: the host's update of a step is made in the next one, from gradients that have waited
        in its memory (`delayed`), so that neither has to wait for the other; only the explicit step
        can.
    """

    params: bool = False
    gradients: Where = "auto"
    chunk_bytes: int = CHUNK_BYTES
    update_on: UpdateOn = "device"
    delayed: bool = False

    def __post_init__(self) -> None:
        _check_bool("params", self.params)
        check_choice("gradients", self.gradients, Where)
        _check_bytes("chunk_bytes", self.chunk_bytes)
        check_choice("update_on", self.update_on, UpdateOn)
        _check_bool("delayed", self.delayed)
        if self.delayed and self.update_on == "device":
            raise ValueError(
                "delayed=True: an update on the device takes turns with the gradients there, and "
                'holds parameters twice; pass update_on="host".'
            )


@dataclass(frozen=True)
class Nvme:
    """The optimizer state lies in files on a disk of each host, master copies included.

    ZeRO-Infinity's NVMe offload (section 5.2.2): the update reads, computes and writes piece by
    piece, the next piece being read while one is computed and the last one written. Only the
    explicit step can, and leaves are no arguments of a `jax.jit` of yours: `state.params` are.

    The directory holds two copies, one complete while the other is written: a run that is killed
    goes on from the last complete step, with everything that its steps have changed. So parameters
    without a master copy are written, too, and averages: fp32 Adam takes 12 bytes a parameter of
    each copy.

    Attributes:
      path: a directory that is there, on the disk. Each process makes one of its own in it.
      params, gradients: as in `HostMemory`, in host memory.
      buffer_bytes: host memory of a process for pieces on their way. A leaf that the optimizer must
        see whole, or that device axes cut along every dim, has to fit in a quarter of it.
      existing: if the directory has a training state: "refuse" it, "resume" from it (its layout
        must be this one; a checkpoint fits any), or "replace" it. In an empty one all three begin.
    """

    path: str | Path
    params: bool = False
    gradients: Where = "auto"
    buffer_bytes: int = BUFFER_BYTES
    existing: Existing = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise TypeError(f"path={self.path!r}; expected a directory.")
        _check_bool("params", self.params)
        check_choice("gradients", self.gradients, Where)
        _check_bytes("buffer_bytes", self.buffer_bytes)
        check_choice("existing", self.existing, Existing)


Offload = HostMemory | Nvme


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}; expected True or False.")


def _check_bytes(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}; expected a number of bytes.")
