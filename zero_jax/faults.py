"""Steps that came out wrong: found on the device, said on the host, nothing lost.

A step finds a fault from numbers that are equal on every device (the global norm, the weight of the
batch), leaves the state as it is, and reports a code. The host reads codes when they are ready,
without waiting for a step, and raises before the next one starts: the state that was passed in is
the one before the fault. Dynamic loss scales are those of `loss_scale`.
"""

import enum
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .loss_scale import hopeless_letter
from .step_options import NonFinite, StepOptions


class Fault(enum.IntEnum):
    """Why a step left the state as it was."""

    NONE = 0
    NON_FINITE = 1
    """The global norm of the gradients is inf or NaN."""
    NO_WEIGHT = 2
    """The weights of the whole batch sum to 0."""
    BAD_WEIGHT = 3
    """They sum to a negative number, inf or NaN."""
    HOPELESS = 4
    """The loss scale is at its floor and gradients go on overflowing."""
    OVERFLOW = 5
    """Gradients are not finite, and a dynamic loss scale makes up for it: part of training."""


_LETTERS = {
    Fault.NON_FINITE: "the gradients of step {step} are not finite (global norm {norm}); the state "
    'was left as it was. Pass nonfinite="skip" to go on; for fp16, a Precision with a loss_scale.',
    Fault.NO_WEIGHT: "loss_fn: the weights of the batch of step {step} sum to 0, so its mean loss "
    "is not defined; the state was left as it was. Leave such batches out.",
    Fault.BAD_WEIGHT: "loss_fn: the weights of the batch of step {step} sum to {weight}; expected "
    "a positive number, the tokens or rows that count. The state was left as it was.",
}


def find_fault(weight: jax.Array, norm: jax.Array) -> jax.Array:
    """The fault of a step, int32 ()."""
    bad = ~jnp.isfinite(weight) | (weight < 0)
    fault = jnp.where(jnp.isfinite(norm), Fault.NONE, Fault.NON_FINITE)
    fault = jnp.where(weight == 0, Fault.NO_WEIGHT, fault)
    return jnp.where(bad, Fault.BAD_WEIGHT, fault).astype(jnp.int32)


def passes(
    fault: jax.Array, scaled: bool, weighted: bool, options: StepOptions
) -> jax.Array | None:
    """Whether the step may change the state, bool (); None if nothing can keep it from that.

    With `nonfinite="pass"` and no loss scale gradients go to the optimizer as they are.
    """
    if options.nonfinite == "pass" and not scaled:
        if not weighted:
            return None
        return (fault == Fault.NONE) | (fault == Fault.NON_FINITE)
    return fault == Fault.NONE


class Watch:
    """Faults of the steps of one training loop, read late; at most `depth` are outstanding."""

    def __init__(self, nonfinite: NonFinite, depth: int = 64):
        self._raises = {Fault.NO_WEIGHT, Fault.BAD_WEIGHT, Fault.HOPELESS}
        self._raises |= {Fault.NON_FINITE} if nonfinite == "raise" else set()
        self._depth, self._step = depth, 0
        self._waiting: deque[tuple[int, Any]] = deque()

    def add(self, metrics: Any) -> None:
        """Note the metrics of a step that was just enqueued."""
        self._step += 1
        if not isinstance(metrics.fault, Tracer):
            self._waiting.append((self._step, metrics._replace(aux=None)))

    def check(self, wait: bool = False) -> None:
        """Raise what has come in; with `wait`, also what is still being computed.

        Raises:
          FloatingPointError: gradients were not finite, or the loss scale is hopeless.
          ValueError: a batch weighed nothing, or its weight is no number.
        """
        waiting = self._waiting
        while waiting and (wait or len(waiting) > self._depth or waiting[0][1].fault.is_ready()):
            step, metrics = waiting.popleft()
            fault = Fault(int(metrics.fault))
            if fault in self._raises:
                waiting.clear()
                kind = ValueError if "WEIGHT" in fault.name else FloatingPointError
                raise kind(_letter(fault, step, metrics))


def _letter(fault: Fault, step: int, metrics: Any) -> str:
    if fault == Fault.HOPELESS:
        return hopeless_letter(float(metrics.loss_scale), step)
    norm, weight = float(metrics.grad_norm), float(metrics.weight)
    return _LETTERS[fault].format(step=step, norm=norm, weight=weight)
