"""What leaves the device between steps: policies, as data.

ZeRO-Offload (arXiv 2101.06840, section 4) keeps the optimizer state and the fp32 parameters of
mixed-precision training in host memory; ZeRO-Infinity (arXiv 2104.07857, section 5.1) the
parameters, too. A policy says what goes; `layout` writes it down leaf by leaf, and the step streams
what it needs back (`streams`).

Not here: the transfers, and what activations are kept on the host (`remat`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

Where = Literal["auto", "host", "device"]

CHUNK_BYTES = 256 * 2**20
"""Of the state that is on its way to or from one device at a time. A PCIe link reaches its full
rate with pieces of a few MiB; larger ones only cost memory, of which three are held."""


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
        device at once. A layer of a stack, and a leaf that the optimizer must see whole (its norm,
        say), is moved in one piece whatever its size.
    """

    params: bool = False
    gradients: Where = "auto"
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.params, bool):
            raise TypeError(f"params={self.params!r}; expected True or False.")
        if self.gradients not in get_args(Where):
            raise ValueError(
                f"gradients={self.gradients!r}; expected one of "
                f"{', '.join(map(repr, get_args(Where)))}."
            )
        if not isinstance(self.chunk_bytes, int) or self.chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={self.chunk_bytes!r}; expected a number of bytes.")
