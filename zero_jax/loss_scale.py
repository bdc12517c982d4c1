"""Loss scaling: by what the loss is multiplied, and how that factor moves.

Mixed Precision Training (arXiv 1710.03740, section 3.2): fp16 loses gradients below 2^-24, so the
loss is multiplied by a scale before the backward pass and the gradients are divided by it after.
ZeRO (arXiv 1910.02054, section 3.1) trains so. The dynamic rule here follows DeepSpeed's defaults:

  a step whose gradients are    scale                              hysteresis left   clean steps
  finite                        as before                          as before         one more
  finite, `growth_interval`-th  * growth, at most `CEILING`        filled            0
  not finite, hysteresis > 1    as before                          one less          0
  not finite, hysteresis 1      * backoff, at least `floor`        1                 0

Hysteresis is filled only by a whole interval of clean steps in a row, at the ceiling too. One clean
step, or a lowering of the scale, does not fill it: in a run of overflows the first is forgiven and
each further one lowers the scale.

Not here: the multiplication, the test of the gradients (the caller passes one flag, which must be
equal on every device), the skipping, and the raising of an error. bf16 has fp32's range and needs
no scale; `StaticScale(1.0)` is none.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

CEILING = 2.0**126
"""Largest scale. Where gradients are all zero the scale grows for ever; 1 / 2^126 is the smallest
normal fp32 number, and that of a larger scale may be flushed to zero."""

SMALLEST = 2.0**-126
"""Smallest scale: the smallest normal fp32 number; a smaller scale may be flushed to zero."""

_LARGEST_COUNT = 2**31 - 1  # the counters are int32


@dataclass(frozen=True)
class StaticScale:
    """Multiply the loss by one number for ever; steps that are skipped are only counted.

    Attributes:
      value: the scale. A power of two is recommended: multiplying and dividing by it changes only
        exponents, so that what neither overflows nor underflows comes back bit for bit. Any other
        number is accepted, and rounds every gradient twice.

    Raises:
      TypeError, ValueError: `value` is no number in [2^-126, 2^126].
    """

    value: float

    def __post_init__(self) -> None:
        _check_scale("StaticScale", "value", self.value)


@dataclass(frozen=True)
class DynamicScale:
    """Raise the scale after clean steps, lower it after overflows; see the module docstring.

    Keep `initial`, `growth`, `backoff` and `floor` powers of two: then every scale is one, and
    scaling changes only exponents, bit for bit (see `StaticScale`). Others are accepted.

    Attributes:
      initial: scale of the first step.
      growth_interval: clean steps in a row after which the scale grows.
      growth: factor by which it grows, above 1.
      backoff: factor by which an overflow lowers it, between 0 and 1.
      hysteresis: the overflow, counted from 1, that is the first to lower the scale; 1 forgives
        none. A clean interval starts the count anew.
      floor: smallest scale. At 1 the loss is not scaled, and an overflow is the model's own.
      patience: steps skipped in a row at the floor after which training is hopeless. DeepSpeed
        gives up at the first (1); with 4, three bad batches in a row are survived.

    Raises:
      TypeError, ValueError: naming the argument.
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    growth: float = 2.0
    backoff: float = 0.5
    hysteresis: int = 2
    floor: float = 1.0
    patience: int = 4

    def __post_init__(self) -> None:
        _check_scale("DynamicScale", "floor", self.floor)
        _check_scale("DynamicScale", "initial", self.initial)
        for field in ("growth_interval", "hysteresis", "patience"):
            _check_count("DynamicScale", field, getattr(self, field))
        if self.initial < self.floor:
            raise ValueError(
                f"DynamicScale(initial={self.initial}, floor={self.floor}): the scale would start "
                "below its floor; raise initial or lower floor."
            )
        if not 1 < _number("DynamicScale", "growth", self.growth) <= CEILING:
            raise ValueError(
                f"DynamicScale(growth={self.growth}): expected a finite factor above 1, such as 2; "
                "for a scale that never grows, use StaticScale."
            )
        if not 0 < _number("DynamicScale", "backoff", self.backoff) < 1:
            raise ValueError(
                f"DynamicScale(backoff={self.backoff}): expected a factor between 0 and 1, such as "
                "0.5; for a scale that is never lowered, use StaticScale."
            )


LossScale: TypeAlias = StaticScale | DynamicScale


class ScaleState(NamedTuple):
    """What of a loss scale changes from step to step; part of the training state and checkpoints.

    Strongly typed scalars, so that a step that carries them compiles once.

    Attributes:
      scale: shape (), fp32; what the next loss is multiplied by.
      clean_steps: shape (), int32; finite steps in a row since the scale last grew.
      hysteresis_left: shape (), int32; which overflow from now, counted from 1, lowers the scale.
      skipped: shape (), int32; steps skipped since training began.
      skipped_at_floor: shape (), int32; steps skipped in a row with the scale at its floor.
    """

    scale: jax.Array
    clean_steps: jax.Array
    hysteresis_left: jax.Array
    skipped: jax.Array
    skipped_at_floor: jax.Array


def init_scale(policy: LossScale) -> ScaleState:
    """Return the state before the first step.

    >>> int(init_scale(DynamicScale()).scale)
    65536
    """
    dynamic = isinstance(policy, DynamicScale)

    def count(n: int) -> jax.Array:
        return jnp.asarray(n, jnp.int32)

    return ScaleState(
        scale=jnp.asarray(policy.initial if dynamic else policy.value, jnp.float32),
        clean_steps=count(0),
        hysteresis_left=count(policy.hysteresis if dynamic else 0),
        skipped=count(0),
        skipped_at_floor=count(0),
    )


def next_scale(policy: LossScale, state: ScaleState, finite: ArrayLike) -> ScaleState:
    """Return the state after a step; see the table in the module docstring. For use under jit.

    Args:
      policy: the rule; a `StaticScale` only counts the skipped steps.
      state: the state before the step.
      finite: shape (), bool; whether every gradient of the step, on every device, was finite.

    Raises:
      TypeError: `finite` is not one bool.

    Source: Mixed Precision Training (arXiv 1710.03740), section 3.2.
    """
    flag = jnp.asarray(finite)
    if flag.shape != () or flag.dtype != jnp.bool_:
        raise TypeError(
            f"finite has shape {flag.shape} and dtype {flag.dtype}; expected one bool, shape (), "
            "for all gradients of all devices, such as jnp.isfinite(norm) of the global norm."
        )
    if isinstance(policy, StaticScale):
        return state._replace(skipped=jnp.where(flag, state.skipped, state.skipped + 1))
    clean, overflow = _after_clean(policy, state), _after_overflow(policy, state)
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), clean, overflow)


def _after_clean(policy: DynamicScale, state: ScaleState) -> ScaleState:
    clean_steps = state.clean_steps + 1
    grows = clean_steps >= policy.growth_interval
    grown = jnp.minimum(state.scale * policy.growth, CEILING)
    return ScaleState(
        scale=jnp.where(grows, grown, state.scale),
        clean_steps=jnp.where(grows, 0, clean_steps),
        hysteresis_left=jnp.where(grows, policy.hysteresis, state.hysteresis_left),
        skipped=state.skipped,
        skipped_at_floor=jnp.zeros_like(state.skipped_at_floor),
    )


def _after_overflow(policy: DynamicScale, state: ScaleState) -> ScaleState:
    forgiven = state.hysteresis_left > 1
    lowered = jnp.maximum(state.scale * policy.backoff, policy.floor)
    at_floor = state.scale <= policy.floor  # the scale this step had, not the one it leaves behind
    return ScaleState(
        scale=jnp.where(forgiven, state.scale, lowered),
        clean_steps=jnp.zeros_like(state.clean_steps),
        hysteresis_left=jnp.where(forgiven, state.hysteresis_left - 1, 1),
        skipped=state.skipped + 1,
        skipped_at_floor=jnp.where(at_floor, state.skipped_at_floor + 1, 0),
    )


def hopeless(policy: LossScale, state: ScaleState) -> jax.Array:
    """Tell whether `patience` steps in a row were skipped at the floor.

    Returns:
      Shape (), bool; never true for a `StaticScale`, which has no floor to reach.
    """
    if isinstance(policy, StaticScale):
        return jnp.asarray(False)
    return state.skipped_at_floor >= policy.patience


def hopeless_letter(scale: float, step: int) -> str:
    """Write the error for a step after which training is `hopeless`.

    Args:
      scale: the loss scale of that step, at its floor.
      step: number of the step.
    """
    advice = (
        "Lower DynamicScale.floor, or compute in bfloat16."
        if scale > 1
        else "No smaller scale helps: the loss or a gradient is inf or NaN by itself. Look at the "
        "last batches, lower the learning rate, or compute in bfloat16; jax_debug_nans finds the "
        "operation."
    )
    return (
        f"the loss scale {scale} is at its floor and the gradients of step {step} still "
        f"overflow, as those before; the state was left as it was. {advice}"
    )


def _number(policy: str, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{policy}({field}={value!r}) is a {type(value).__name__}; expected a Python number."
        )
    return value


def _check_scale(policy: str, field: str, value: object) -> None:
    if not SMALLEST <= _number(policy, field, value) <= CEILING:  # false for NaN too
        raise ValueError(
            f"{policy}({field}={value}): expected a positive, finite number between 2^-126 and "
            "2^126, so that fp32 holds it and its reciprocal; a power of two is best."
        )


def _check_count(policy: str, field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{policy}({field}={value!r}) is a {type(value).__name__}; expected a number of steps."
        )
    if not 1 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{policy}({field}={value}): expected between 1 and 2^31 - 1 steps.")
