"""The loss of a language model, in nats a token, for training and for validation.

Both examples speak of a model as a pure function, `apply(params, tokens) -> logits`; with linen it
is the model's own `apply`, with NNX a merge and a call.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zero_jax

from .data import Batch, Corpus

Params = Any
Apply = Callable[[Params, jax.Array], Any]


def mean_loss(logits: Any, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in float32; logits (B, T, V) in any float dtype, targets (B, T)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def make_validation(apply: Apply, corpus: Corpus, batches: int) -> Callable[[Params, Any], float]:
    """Make `validation_loss(params, state)`: the mean over the first `batches` validation batches.

    One device sees its own rows of a batch only, as in training; `state` says where the rows go.
    """

    @jax.jit
    def batch_loss(params: Params, batch: Batch) -> jax.Array:
        return mean_loss(apply(params, batch["inputs"]), batch["targets"])

    def validation_loss(params: Params, state: Any) -> float:
        count = min(batches, len(corpus.validation))
        # float() waits for each batch; see the training loop.
        losses = [
            float(batch_loss(params, zero_jax.shard_batch(corpus.validation[i], state)))
            for i in range(count)
        ]
        return sum(losses) / count

    return validation_loss
