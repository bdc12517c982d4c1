"""One training step in both executors; they train alike.

The annotated one is the step that a Flax user has already: a gradient and `apply_gradients`. All
that is added is `gather_at_use` around the parameters, for stage 3. The explicit one is the
library's, made from the loss alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax.training.train_state import TrainState

import zero_jax

from .data import Batch
from .loss import mean_loss
from .microbatches import value_and_grad
from .model import GPT
from .schema import LanguageModelRun

Step = Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]


@dataclass(frozen=True)
class ExplicitStep:
    """The library's step, as the loop wants it: of its metrics only the loss."""

    step: zero_jax.TrainStep

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        """One step."""
        state, metrics = self.step(state, batch)
        return state, metrics.loss


def make_step(cfg: LanguageModelRun) -> Step:
    """Make one optimizer step on inputs and targets (B, T); its loss is a mean, in nats a byte."""
    return _explicit_step(cfg) if cfg.step.executor == "explicit" else _annotated_step(cfg)


def _explicit_step(cfg: LanguageModelRun) -> Step:
    model = GPT(cfg.model, prefetch=cfg.step.layer_loop == "prefetch")

    def loss_fn(params, batch: Batch):
        return mean_loss(model.apply({"params": params}, batch["inputs"]), batch["targets"])

    return ExplicitStep(
        zero_jax.make_train_step(
            loss_fn, microbatches=cfg.step.microbatches, clip_norm=cfg.optimizer.clip_norm
        )
    )


def _annotated_step(cfg: LanguageModelRun) -> Step:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params, batch: Batch):
            params = zero_jax.gather_at_use(params, state)
            return mean_loss(state.apply_fn({"params": params}, batch["inputs"]), batch["targets"])

        loss, grads = value_and_grad(loss_fn, state.params, batch, cfg.step.microbatches)
        return state.apply_gradients(grads=grads), loss

    return train_step


def update_traffic(
    state: TrainState, step: Step, cfg: LanguageModelRun
) -> tuple[TrainState, zero_jax.UpdateTraffic | None]:
    """What an update has moved; None where it moves nothing."""
    if isinstance(step, ExplicitStep) and step.step.traffic is not None:
        return state, step.step.traffic
    if cfg.offload.optimizer and cfg.offload.update_on == "device":
        return zero_jax.measure_update(state)
    return state, None
