"""What a forward pass keeps for its backward pass, and where: policies as data.

Activation checkpointing keeps the inputs of layers, not what lies inside of them, and computes that
again (Chen et al., arXiv 1604.06174, section 3). ZeRO-R splits the kept inputs over the devices of
tensor parallelism, which would all hold the same, and may move them to the host (P_a and P_a+cpu:
ZeRO, arXiv 1910.02054, section 6.1; ZeRO-Infinity, arXiv 2104.07857, section 5.1.2).

A `Remat` says all of it for the layer loop (`layers.scan_layers`). Elsewhere there are
`jax.checkpoint` and `nn.remat`, and for those it has a `policy`.

Also here, `regather`: a model without either keeps at ZeRO's stage 3 every parameter that it has
gathered, from its forward to its backward pass.

Not here: where the layer loop puts what it keeps (`layer_store`), what a policy costs in bytes
(`planning.activations`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import flax.linen as nn
import jax

Policy = Callable[..., Any]
Saved = Literal["nothing", "dots", "weight_dots", "all"]
Fn = TypeVar("Fn", bound=Callable[..., Any])

_POLICIES: dict[str, Policy] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "weight_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all": jax.checkpoint_policies.everything_saveable,
}

# A gathered parameter, and what is made of it before a layer computes with it: its bytes again.
_OF_A_GATHER = frozenset(
    """all_gather all_gather_invariant convert_element_type reshape transpose squeeze slice
    copy""".split()
)


@dataclass(frozen=True)
class Remat:
    """What a layer loop keeps for its backward pass, and where.

    Attributes:
      saved: what is kept inside of a layer: "nothing"; "dots", all matrix products; "weight_dots",
        those without a batch dim, so not the scores of attention; "all"; or a policy of
        `jax.checkpoint_policies`.
      every: layers between two kept inputs; "sqrt" is the root of their number, rounded.
      kept_on: "host": what each layer keeps leaves for the host's pinned memory in the forward
        pass, and is fetched in the backward pass while the layer after it computes. Scalars stay on
        the device; so does what a group of layers keeps while it is computed again (`every` > 1).
      split_over: a mesh axis over whose devices the kept inputs are split, and gathered in the
        backward pass while the layer after computes: that of tensor parallelism, along which a
        layer's input is the same. It has to be an automatic axis where the loop runs, as in the
        explicit step every axis is that splits no batch.

    Source: Chen et al., arXiv 1604.06174, section 3; ZeRO, arXiv 1910.02054, section 6.1.

    >>> Remat("dots", kept_on="host").policy is jax.checkpoint_policies.dots_saveable
    True
    """

    saved: Saved | Policy = "nothing"
    every: int | Literal["sqrt"] = 1
    kept_on: Literal["device", "host"] = "device"
    split_over: str | None = None

    def __post_init__(self) -> None:
        _named(self.saved)
        if self.every != "sqrt" and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(
                f"every={self.every!r}; a number of layers from 1, or 'sqrt', was expected."
            )
        if self.kept_on not in ("device", "host"):
            raise ValueError(f"kept_on={self.kept_on!r}; 'device' or 'host' was expected.")
        if self.split_over is not None and not isinstance(self.split_over, str):
            raise ValueError(
                f"split_over={self.split_over!r}; the name of one mesh axis was expected, or None."
            )

    @property
    def policy(self) -> Policy:
        """What is kept inside of a layer, as `jax.checkpoint(policy=)` and `nn.remat` take it."""
        return _named(self.saved)


def regather_policy(saved: Saved | Policy = "dots") -> Policy:
    """Make a policy for `jax.checkpoint` or `nn.remat` under which no gathered parameter is kept.

    The backward pass gathers it again. Refused are the outputs of gathers, and of what only changes
    the dtype or shape of an array. With "all" the rest is kept, which may be more than without any
    checkpointing, since JAX then keeps what it can and not what it needs.

    Args:
      saved: as in `Remat`: what is kept, except for that.
    """
    keeps = _named(saved)

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return primitive.name not in _OF_A_GATHER and keeps(primitive, *avals, **params)

    return policy


def regather(block: Fn, saved: Saved | Policy = "dots") -> Fn:
    """Make a block gather its parameters again in the backward pass, instead of keeping them.

    For models that run in the explicit step at stage 3 without `nn.remat` and without
    `scan_layers`. Wrap every layer, or every few: the parameters of one block are gathered together
    again, so that wrapping a whole model saves less.

    Args:
      block: a linen module class, whose `__call__` has arrays as arguments, or a function of trees
        of arrays (`nnx.Module`s are none: use `nnx.remat` with `regather_policy` for their calls).
      saved: as in `Remat`: what is kept inside of the block beside its inputs.

    Source: ZeRO, arXiv 1910.02054, section 7.2.2: parameters are discarded after use.
    """
    if isinstance(block, type) and issubclass(block, nn.Module):
        made: Any = nn.remat(block, policy=regather_policy(saved))
        return made
    if not callable(block) or isinstance(block, (type, nn.Module)):
        raise ValueError(
            f"regather: block is {block!r}; a linen module class was expected, or a function."
        )
    function: Any = jax.checkpoint(block, policy=regather_policy(saved))
    return function


def _named(saved: Saved | Policy) -> Policy:
    if callable(saved):
        return saved
    if saved not in _POLICIES:
        raise ValueError(
            f"saved={saved!r}; one of {', '.join(map(repr, _POLICIES))} was expected, or a policy "
            "of jax.checkpoint_policies."
        )
    return _POLICIES[saved]
