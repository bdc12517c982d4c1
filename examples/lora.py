"""LoRA: adapters on a frozen base, at ZeRO stage 3.

    python examples/lora.py

Claim: over N devices each holds 1/N of the frozen base, although nothing of it is trained; the
optimizer state is that of the adapters alone, and each device holds 1/N of it; after training the
base is the same to the bit, and the losses are those of one device. Without an accelerator, 8
virtual CPU devices stand in for real ones.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from measure import bytes_on_device, compare_losses, share_on_device
from small_model import CLASSES, FEATURES, HIDDEN, make_batches, train

import zero_jax

RANK = 8


class LoRADense(nn.Module):
    """A Dense layer with a low-rank correction, zero at first (arXiv 2106.09685)."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        a = self.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], RANK))
        b = self.param("lora_b", nn.initializers.zeros, (RANK, self.features))
        return nn.Dense(self.features, name="base")(x) + x @ a @ b


class Adapted(nn.Module):
    """The classifier of `small_model.py`, each layer with an adapter."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.gelu(LoRADense(HIDDEN)(x))
        return LoRADense(CLASSES)(x)


def create_state(key: jax.Array) -> TrainState:
    """The adapters are trained; the base (random here, in life pretrained) gets no update."""
    model = Adapted()
    params = jax.jit(model.init)(key, jnp.zeros((1, FEATURES)))["params"]
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "adapter" if path[-1].key.startswith("lora") else "base", params
    )
    tx = optax.partition({"adapter": optax.adamw(1e-2), "base": optax.set_to_zero()}, labels)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def split(params: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays of the base and those of the adapters."""
    base = [layer["base"] for layer in params.values()]
    adapters = [(layer["lora_a"], layer["lora_b"]) for layer in params.values()]
    return jax.tree.leaves(base), jax.tree.leaves(adapters)


def main() -> dict[str, float]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))
    base, adapters = split(single.params)
    before = [np.asarray(x).tobytes() for x in base]
    moments = 2 * bytes_on_device(adapters)

    state = zero_jax.shard_train_state(single, stage=3)  # the one call
    state, losses = train(state, [zero_jax.shard_batch(batch, state) for batch in batches])
    after = [np.asarray(x).tobytes() for x in split(state.params)[0]]

    single, expected = train(single, batches)
    print(f"LoRA at stage 3 over {n} devices")
    difference = compare_losses(losses, expected)
    frozen = share_on_device("frozen base", split(state.params)[0], split(single.params)[0])
    optimizer = share_on_device("optimizer state", state.opt_state, single.opt_state)
    print(f"  moments of the adapters    {moments:,} bytes")
    print(f"  the base is unchanged      {before == after}")

    assert losses[-1] < 0.8 * losses[0], "it learns"
    assert difference < 1e-5, "the losses are those of one device"
    assert before == after, "not a bit of the base changed"
    assert frozen < 1.01 / n, "each device holds 1/N of the base"
    assert bytes_on_device(single.opt_state) < 1.01 * moments, "moments of the adapters, no others"
    assert optimizer < 1.01 / n, "of which each device holds 1/N"
    return {"losses": difference, "optimizer": optimizer, "base": frozen}


if __name__ == "__main__":
    main()
