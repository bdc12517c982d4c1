"""What the optimizer state holds beside optax's own: the loss scale and master weights.

Both are model states of mixed-precision training (ZeRO, arXiv 1910.02054, section 3.1): they are
laid out, donated and checkpointed with the optimizer's. Outermost is `LossScaled(scale, inner)`
where the precision has a loss scale, then `Delayed(pending, inner)` where the update is one step
late, then `MasterWeights(master, inner)` where parameters are narrower than their master copies,
then what optax made.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from .delayed import Delayed, nothing_pending, split_pending
from .loss_scale import ScaleState, init_scale
from .master_weights import add_master, init_with_master
from .precision import Precision

Tree = Any


class LossScaled(NamedTuple):
    """Optimizer state of a step that scales its loss."""

    scale: ScaleState
    inner: Any


def init_extended(
    tx: optax.GradientTransformation, params: Tree, precision: Precision, delayed: bool = False
) -> Any:
    """`tx.init` on the master copies, with what the precision and a delayed update add."""
    inner = init_with_master(tx, params, precision)
    inner = Delayed(nothing_pending(params, precision), inner) if delayed else inner
    policy = precision.loss_scale
    return inner if policy is None else LossScaled(init_scale(policy), inner)


def extend(params: Tree, opt_state: Any, precision: Precision, delayed: bool = False) -> Any:
    """An existing optimizer state with what is added to it; what is there already stays.

    Args:
      params: what becomes the master copies, arrays or `ShapeDtypeStruct`s.
      opt_state: what `tx.init(params)` gave.
      precision: dtypes and loss scale.
      delayed: whether the update is one step late.
    """
    described = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))

    def made(make: Callable[[], Any]) -> Any:
        return jax.eval_shape(make) if described else make()

    scale, inner = split_scale(opt_state)
    pending, inner = split_pending(inner)
    inner = add_master(params, inner, precision)
    if delayed:
        pending = made(lambda: nothing_pending(params, precision)) if pending is None else pending
        inner = Delayed(pending, inner)
    policy = precision.loss_scale
    if scale is None and policy is not None:
        scale = made(lambda: init_scale(policy))
    return inner if scale is None else LossScaled(scale, inner)


def split_scale(opt_state: Any) -> tuple[ScaleState | None, Any]:
    """The loss scale, None without one, and the rest."""
    if isinstance(opt_state, LossScaled):
        return opt_state.scale, opt_state.inner
    return None, opt_state
