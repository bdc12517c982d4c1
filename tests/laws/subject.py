"""The small model that the laws are told of: an ordinary linen program with awkward shapes.

Over 8 devices it has dims that divide (24), that only 4 divides (20), that nothing does (53, 37), a
bias of 3 and a scalar.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zero_jax

ROWS = 48


class Net(nn.Module):
    """Embedding, two layers and a head, with a scalar temperature."""

    @nn.compact
    def __call__(self, ids, x):
        h = nn.Embed(53, 24)(ids) + nn.Dense(24)(x)
        h = jnp.tanh(nn.Dense(37)(h))
        h = h + nn.Dense(37)(jnp.tanh(nn.Dense(20)(h)))
        return nn.Dense(3)(h) * self.param("temperature", nn.initializers.ones, ())


def create(tx: optax.GradientTransformation) -> TrainState:
    """A fresh state; the same values for every call."""
    net = Net()
    params = net.init(jax.random.key(0), jnp.zeros((1,), jnp.int32), jnp.zeros((1, 9)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def batch(i: int) -> dict[str, np.ndarray]:
    """Batch number `i`: ids (48,), features (48, 9) float32, targets (48, 3) float32."""
    r = np.random.default_rng(i)
    ids = r.integers(0, 53, ROWS).astype(np.int32)
    x = r.normal(size=(ROWS, 9)).astype(np.float32)
    return {"ids": ids, "x": x, "y": np.stack([np.sin(x[:, 0]), x[:, 1] * 0.3, ids / 53.0], 1)}


def loss_fn(params, batch, apply_fn):
    """Mean squared error over the batch."""
    y = apply_fn({"params": params}, batch["ids"], batch["x"]).astype(jnp.float32)
    return jnp.mean((y - batch["y"].astype(jnp.float32)) ** 2)


def step(state: TrainState, batch):
    """The user's own step. `value` is for transformations that ask for it."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, state.apply_fn)
    return state.apply_gradients(grads=grads), loss


def jit_step(**options):
    """The step, jitted anew: `jax.jit` of one function twice shares one cache."""
    return jax.jit(lambda state, batch: step(state, batch), **options)


def train(state: TrainState, steps: int, place=lambda b: b) -> tuple[TrainState, list[float]]:
    """Run the jitted step, waiting for each loss."""
    jitted, losses = jit_step(), []
    for i in range(steps):
        state, loss = jitted(state, place(batch(i)))
        losses.append(float(loss))
    return state, losses


def train_sharded(state: TrainState, steps: int) -> tuple[TrainState, list[float]]:
    """The same on a laid-out state, with placed batches."""
    layout = zero_jax.layout_of(state)
    return train(state, steps, lambda b: zero_jax.shard_batch(b, layout))


def change(before, after, reference) -> float:
    """||after - reference|| / ||reference - before|| over all parameters."""

    def flat(tree):
        return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])

    a, b, c = flat(before), flat(after), flat(reference)
    return float(np.linalg.norm(b - c) / np.linalg.norm(c - a))


def bytes_on_device(tree) -> int:
    """Bytes of a tree's shards on the device that holds most."""
    held: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)
