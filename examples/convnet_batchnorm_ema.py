"""A ConvNet with BatchNorm and an average of its parameters (EMA), at ZeRO stage 3.

    python examples/convnet_batchnorm_ema.py

The state is a subclass of TrainState with two more fields. Claim: each of N devices holds 1/N of
the parameters, of their average and of the optimizer state (scales and biases of BatchNorm, 0.5 %
of them here, may stay whole); BatchNorm sees the whole batch, not a device's part of it, so losses
and running statistics are those of one device. Without an accelerator: 8 virtual CPU devices.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from measure import compare_arrays, compare_losses, share_on_device
from small_model import Batch, train

import zero_jax


class ConvNet(nn.Module):
    """Logits (B, 8) of images (B, 12, 12, 3)."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (64, 128):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            x = nn.gelu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(8)(x.mean((1, 2)))


class State(TrainState):
    batch_stats: Any
    ema: Any  # of the parameters, for evaluation


def create_state(key: jax.Array) -> State:
    model = ConvNet()
    variables = jax.jit(partial(model.init, train=True))(key, jnp.zeros((1, 12, 12, 3)))
    ema = jax.tree.map(jnp.copy, variables["params"])
    return State.create(apply_fn=model.apply, tx=optax.adamw(1e-2), ema=ema, **variables)


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, new["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    ema = jax.tree.map(lambda e, p: 0.95 * e + 0.05 * p, state.ema, state.params)
    return state.replace(ema=ema), loss


def make_batches(steps: int) -> list[Batch]:
    """Noise with one of 8 patterns in it, which is the label."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(8, 12, 12, 3))
    ys = rng.integers(0, 8, (steps, 64)).astype(np.int32)
    xs = 0.3 * patterns[ys] + rng.normal(size=(steps, 64, 12, 12, 3))
    return [{"x": x.astype(np.float32), "y": y} for x, y in zip(xs, ys, strict=True)]


def main() -> dict[str, float]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))

    state = zero_jax.shard_train_state(single, stage=3)  # the one call
    sharded = [zero_jax.shard_batch(batch, state) for batch in batches]
    state, losses = train(state, sharded, train_step)

    single, expected = train(single, batches, train_step)
    print(f"ConvNet at stage 3 over {n} devices")
    difference = compare_losses(losses, expected)
    statistics = compare_arrays("running statistics", state.batch_stats, single.batch_stats)
    optimizer = share_on_device("optimizer state", state.opt_state, single.opt_state)
    params = share_on_device("parameters", state.params, single.params)
    ema = share_on_device("their average", state.ema, single.ema)

    assert losses[-1] < 0.8 * losses[0], "it learns"
    assert difference < 1e-5, "the losses are those of one device"
    assert statistics < 1e-3, "BatchNorm saw the whole batch"
    assert max(optimizer, params, ema) < 1.05 / n, "each device holds 1/N of all three"
    return {"losses": difference, "optimizer": optimizer, "params": params, "ema": ema}


if __name__ == "__main__":
    main()
