"""The small model of the stage examples: an ordinary Flax linen program, on an ordinary device.

Nothing here knows of ZeRO. `stage1.py`, `stage2.py` and `stage3.py` train this model, unchanged.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

FEATURES, HIDDEN, CLASSES = 64, 512, 16
ROWS = 128

Batch = dict[str, np.ndarray]
Step = Callable[[Any, Any], tuple[Any, Any]]


class Classifier(nn.Module):
    """Logits (B, CLASSES) of features (B, FEATURES), through three hidden layers.

    GELU is smooth. At the kink of a ReLU two runs that differ in the last bit can part.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.gelu(nn.Dense(HIDDEN)(x))
        return nn.Dense(CLASSES)(x)


def create_state(key: jax.Array) -> TrainState:
    """Parameters and AdamW moments, all fp32."""
    model = Classifier()
    params = jax.jit(model.init)(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params, state: TrainState, batch: Batch) -> jax.Array:
    """Mean cross entropy of a batch, in nats."""
    logits = state.apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    """One optimizer step; the new state and the loss."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state, batch)
    return state.apply_gradients(grads=grads), loss


def train(state: Any, batches: Iterable[Any], step: Step = train_step) -> tuple[Any, list[Any]]:
    """Take a step with each batch; the last state and the losses."""
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(jax.device_get(loss))  # waits for the step: virtual CPU devices need that
    return state, losses


def make_batches(steps: int) -> list[Batch]:
    """Random features; the class is the largest of CLASSES fixed linear functions of them."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(FEATURES, CLASSES))
    xs = rng.normal(size=(steps, ROWS, FEATURES)).astype(np.float32)
    return [{"x": x, "y": (x @ teacher).argmax(-1).astype(np.int32)} for x in xs]
