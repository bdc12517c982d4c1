"""What the explicit step differentiates: an opened state, and the user's loss on its leaves.

The loss becomes one function of flat lists, which `local_gradients` calls without knowing what kind
of state it was made for:

  parameters   one entry each: a `Partitioned` where it is gathered at use, or the whole array
  carried      what goes in and comes out changed: running statistics, counters

Not here: how a state is opened (`subject_linen`, `subject_nnx`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .anatomy import Anatomy
from .layout import Layout
from .optimizer import PartitionedOptimizer
from .placement import Placement
from .step_options import StepOptions

Tree = Any


@dataclass(frozen=True)
class Device:
    """What a loss has to know of the device it runs on, inside `shard_map`.

    Attributes:
      fold: key -> the key of this device and microbatch.
      axes: mesh axes that the batch is split over.
    """

    fold: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A state taken apart for one step.

    Attributes:
      anatomy: its parts; closed, it has its wrapped optimizer.
      tx, layout: the wrapped optimizer and its layout.
      values: parameters at rest, trained ones first, then those that are only read.
      placements: where each lies.
      trained: how many of `values` are the optimizer's.
      carried: tree that the loss may change.
      rules: for each leaf of it how devices' values are joined; see `joining`.
      names: for each leaf of it what letters call it.
      call: (parameters, carried, batch, key, device) -> (out, carried, aux); see `Device`.
      put_back: changed `carried` -> `anatomy.other` with it.
    """

    anatomy: Anatomy
    tx: PartitionedOptimizer
    layout: Layout
    values: list[jax.Array]
    placements: list[Placement]
    trained: int
    carried: Tree
    rules: Tree
    names: list[str]
    call: Callable[..., tuple[Any, Tree, Any]]
    put_back: Callable[[Tree], Tree]


def split_aux(out: Any, options: StepOptions) -> tuple[Any, Any]:
    """The loss and what it returned beside.

    Raises:
      TypeError: it is no pair although the options say so.
    """
    if not options.has_aux:
        return out, {}
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"loss_fn: it returned a {type(out).__name__}; with has_aux=True it has to return "
            "(loss, aux), or ((total, weight), aux)."
        )
    return out[0], out[1]
