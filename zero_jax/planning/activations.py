"""Activations of a transformer in closed form: kept, checkpointed, partitioned.

Sources: ZeRO (arXiv 1910.02054, sections 3.2 and 6.1), ZeRO-Infinity (arXiv 2104.07857, section 3),
Chen et al. 2016 (arXiv 1604.06174, section 4). Each is a round figure for GPT-2-like blocks in 16
bits; what a step really holds is the compiler's word (`fit`).

Words: a *checkpoint* is the input of a block, kept by the forward pass; the backward pass computes
the block again from it. `interval` blocks lie between two checkpoints.

Not here: logits and losses, dropout masks, attention that never stores its scores, and what tensor
parallelism saves inside of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from math import isqrt

from .memory import whole_number

RECOMPUTATION = Fraction(1, 3)
"""Time that checkpointing adds: one more forward pass beside a forward and a backward of two."""

HALF_BYTES = 2
"""Width of an activation in the papers' formulas."""


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of a GPT-2-like decoder: biases, two norms a block, one at the end, learned positions.

    Attributes:
      layers, hidden, heads: depth, width, attention heads.
      vocab, sequence: rows of the embedding and of the positions; tokens in a row of the batch.
      tied_head: the embedding is the output head; untied, a second one without bias.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    tied_head: bool = True

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name != "tied_head":
                whole_number(f.name, getattr(self, f.name))
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}.")

    @property
    def parameters(self) -> int:
        """Number of parameters.

        >>> TransformerShape(12, 768, 12, 50257, 1024).parameters  # GPT-2 small
        124439808
        """
        h = self.hidden
        attention = (h * 3 * h + 3 * h) + (h * h + h)
        mlp = (h * 4 * h + 4 * h) + (4 * h * h + h)
        norm = 2 * h
        embeddings = (self.vocab + self.sequence) * h
        head = 0 if self.tied_head else self.vocab * h
        return self.layers * (attention + mlp + 2 * norm) + embeddings + norm + head


def activation_elements(shape: TransformerShape, batch: int) -> int:
    """Count the activations of one forward pass without checkpointing.

    About 12 x hidden x batch x sequence x layers elements (ZeRO, section 3.2), which leaves out the
    scores of attention.

    Args:
      shape: of the model.
      batch: rows on one device.
    """
    return 12 * shape.hidden * _tokens(shape, batch) * shape.layers


def checkpoint_bytes(
    shape: TransformerShape, batch: int, *, interval: int = 1, partitioned_over: int = 1
) -> int:
    """Count the bytes of all checkpoints on one device.

    2 x batch x sequence x hidden x layers / interval (ZeRO-Infinity, section 3). With P_a (ZeRO,
    section 6.1) each is partitioned over the model-parallel group, which otherwise holds copies.

    Args:
      shape, batch: as in `activation_elements`.
      interval: blocks between two checkpoints.
      partitioned_over: size of the model-parallel group under P_a; 1 without.
    """
    checkpoints = -(-shape.layers // whole_number("interval", interval))
    one_bytes = HALF_BYTES * _tokens(shape, batch) * shape.hidden
    return checkpoints * -(-one_bytes // whole_number("partitioned_over", partitioned_over))


def working_bytes(shape: TransformerShape, batch: int, *, interval: int = 1) -> int:
    """Count the activations between two checkpoints, alive while they are computed again.

    batch x sequence x interval x (16 hidden + 2 heads x sequence), the activation working memory of
    ZeRO-Infinity, section 3; the second term is the scores of attention. Arguments as in
    `checkpoint_bytes`.
    """
    at_once = min(whole_number("interval", interval), shape.layers)
    return _tokens(shape, batch) * at_once * (16 * shape.hidden + 2 * shape.heads * shape.sequence)


def checkpointed_bytes(
    shape: TransformerShape, batch: int, *, interval: int = 1, partitioned_over: int = 1
) -> int:
    """Count the activations with checkpointing: all checkpoints and one working set.

    Arguments as in `checkpoint_bytes`.
    """
    kept_bytes = checkpoint_bytes(
        shape, batch, interval=interval, partitioned_over=partitioned_over
    )
    return kept_bytes + working_bytes(shape, batch, interval=interval)


def state_working_bytes(shape: TransformerShape) -> int:
    """Count the model states of the largest operator, gathered: 4 hidden x 4 hidden bytes.

    Parameters and gradients in 16 bits of the linear layer from hidden to 4 hidden, without which
    stage 3 cannot compute at all (model state working memory, ZeRO-Infinity, section 3).
    """
    weights = shape.hidden * 4 * shape.hidden
    return 2 * HALF_BYTES * weights


def sublinear_bytes(layer_bytes: Sequence[int], interval: int | None = None) -> int:
    """Count the bytes of a chain of layers that is checkpointed every `interval` layers.

    The kept outputs and the largest segment that is computed again (Chen et al., section 4). With
    equal layers and an interval of sqrt(n) it is 2 sqrt(n) layers.

    Args:
      layer_bytes: bytes of the feature maps of each layer, in order; the last map of a segment is
        taken to be all of its layer.
      interval: layers in a segment; by default the integer square root of their number.

    >>> sublinear_bytes([10] * 100)  # 10 kept and a segment of 10
    200
    """
    n = whole_number("len(layer_bytes)", len(layer_bytes))
    step = isqrt(n) if interval is None else whole_number("interval", interval)
    segments = [layer_bytes[start : start + step] for start in range(0, n, step)]
    return sum(segment[-1] for segment in segments) + max(map(sum, segments))


def _tokens(shape: TransformerShape, batch: int) -> int:
    return whole_number("batch", batch) * shape.sequence
