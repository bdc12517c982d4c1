"""A GAN: two training states, one call, one jitted step; ZeRO stage 3.

    python examples/gan.py

Claim: each of N devices holds 1/N of both networks and of both optimizer states, and both losses
are those of one device, although the step draws random numbers: it draws them for the whole batch,
whatever the devices. Without an accelerator, 8 virtual CPU devices stand in for real ones.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from measure import compare_losses, share_on_device
from small_model import train

import zero_jax

ROWS, LATENT, SAMPLES = 128, 16, 32


def create_state(key: jax.Array, inputs: int, outputs: int) -> TrainState:
    """A network of two hidden layers, and its optimizer."""
    # GELU is smooth. At the kinks of leaky_relu two runs that differ in the last bit can part, and
    # the game amplifies it: 2e-3 after 20 steps, with or without ZeRO.
    hidden = [nn.Dense(256), nn.gelu, nn.Dense(256), nn.gelu]
    model = nn.Sequential([*hidden, nn.Dense(outputs)])
    params = jax.jit(model.init)(key, jnp.zeros((1, inputs)))["params"]
    tx = optax.adam(1e-3, b1=0.5)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@partial(jax.jit, donate_argnums=0)
def train_step(states: dict, waves: jax.Array) -> tuple[dict, dict]:
    """A step of the discriminator, then one of the generator; the new states and the losses."""
    g, d = states["generator"], states["discriminator"]
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(2), g.step), (ROWS, LATENT))

    def generate(params) -> jax.Array:
        return g.apply_fn({"params": params}, noise)

    def judge(params, x: jax.Array, real: bool) -> jax.Array:
        logits = d.apply_fn({"params": params}, x)
        return optax.sigmoid_binary_cross_entropy(logits, jnp.full_like(logits, real)).mean()

    def loss_d(params) -> jax.Array:
        return judge(params, waves, True) + judge(params, generate(g.params), False)

    def loss_g(params) -> jax.Array:
        return judge(d.params, generate(params), True)

    d_loss, grads = jax.value_and_grad(loss_d)(d.params)
    d = d.apply_gradients(grads=grads)
    g_loss, grads = jax.value_and_grad(loss_g)(g.params)
    g = g.apply_gradients(grads=grads)
    return {"generator": g, "discriminator": d}, {"generator": g_loss, "discriminator": d_loss}


def make_batches(steps: int) -> list[np.ndarray]:
    """Sine waves of random phase and frequency."""
    rng = np.random.default_rng(0)
    phase, frequency = rng.uniform(0, 6, (steps, ROWS, 1)), rng.uniform(1, 2, (steps, ROWS, 1))
    return list(np.sin(phase + frequency * np.linspace(0, 6, SAMPLES)).astype(np.float32))


def main() -> dict[str, dict[str, float]]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = {
        "generator": create_state(jax.random.key(0), LATENT, SAMPLES),
        "discriminator": create_state(jax.random.key(1), SAMPLES, 1),
    }
    states = zero_jax.shard_train_state(single, stage=3)  # the one call, for both
    sharded = [zero_jax.shard_batch(batch, states["generator"]) for batch in batches]
    states, losses = train(states, sharded, train_step)

    single, expected = train(single, batches, train_step)
    results = {}
    for name, state in states.items():
        print(f"{name} at stage 3 over {n} devices")
        difference = compare_losses([x[name] for x in losses], [x[name] for x in expected])
        optimizer = share_on_device("optimizer state", state.opt_state, single[name].opt_state)
        params = share_on_device("parameters", state.params, single[name].params)
        results[name] = {"losses": difference, "optimizer": optimizer, "params": params}
        assert difference < 1e-5, "its losses are those of one device"
        assert max(optimizer, params) < 1.01 / n, "each device holds 1/N of it"
    return results


if __name__ == "__main__":
    main()
