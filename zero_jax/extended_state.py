"""What the optimizer state holds beside optax's own: the loss scale and master weights.

Both are model states of mixed-precision training (ZeRO, arXiv 1910.02054, section 3.1): they are
laid out, donated and checkpointed with the optimizer's. Outermost is `LossScaled(scale, inner)`
where the precision has a loss scale, then `MasterWeights(master, inner)` where parameters are
narrower than their master copies, then what optax made.
"""

from typing import Any, NamedTuple

import jax
import optax

from .loss_scale import ScaleState, init_scale
from .master_weights import add_master, init_with_master
from .precision import Precision

Tree = Any


class LossScaled(NamedTuple):
    """Optimizer state of a step that scales its loss."""

    scale: ScaleState
    inner: Any


def init_extended(tx: optax.GradientTransformation, params: Tree, precision: Precision) -> Any:
    """`tx.init` on the master copies, with what the precision adds."""
    inner = init_with_master(tx, params, precision)
    policy = precision.loss_scale
    return inner if policy is None else LossScaled(init_scale(policy), inner)


def extend(params: Tree, opt_state: Any, precision: Precision) -> Any:
    """An existing optimizer state with what the precision adds; what is there already stays.

    Args:
      params: what becomes the master copies, arrays or `ShapeDtypeStruct`s.
      opt_state: what `tx.init(params)` gave.
      precision: dtypes and loss scale.
    """
    if isinstance(opt_state, LossScaled):
        return opt_state
    inner, policy = add_master(params, opt_state, precision), precision.loss_scale
    if policy is None:
        return inner
    described = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    scale = jax.eval_shape(lambda: init_scale(policy)) if described else init_scale(policy)
    return LossScaled(scale, inner)


def split_scale(opt_state: Any) -> tuple[ScaleState | None, Any]:
    """The loss scale, None without one, and the rest."""
    if isinstance(opt_state, LossScaled):
        return opt_state.scale, opt_state.inner
    return None, opt_state
