"""ZeRO stage 2: the gradients are partitioned too.

    python examples/stage2.py

Gradients live inside the step only, so this is a step that keeps them for a while: it adds up those
of 4 microbatches. Claim: at stage 2 the same step adds them up in a buffer of 1/N their size, so it
needs less memory than at stage 1, by (N - 1) / N of the gradients; the losses are those of one
device and of whole batches. Without an accelerator, 8 virtual CPU devices stand in for real ones.
"""

from functools import partial

import jax
import jax.numpy as jnp
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from measure import bytes_on_device, compare_losses, share_on_device
from small_model import Batch, create_state, loss_fn, make_batches, train

import zero_jax

MICROBATCHES = 4


@partial(jax.jit, donate_argnums=0)
def accumulating_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    """One optimizer step on the mean gradient of the microbatches; the new state and the loss."""

    def split(x: jax.Array) -> jax.Array:
        # Every device takes a part of its own rows in each turn, so no row changes its device.
        return x.reshape(-1, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)

    def add(total, microbatch: Batch):
        one = jax.value_and_grad(loss_fn)(state.params, state, microbatch)
        return jax.tree.map(jnp.add, total, one), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
    total, _ = jax.lax.scan(add, zero, jax.tree.map(split, batch))
    loss, grads = jax.tree.map(lambda x: x / MICROBATCHES, total)
    return state.apply_gradients(grads=grads), loss


def temporary_bytes(state: TrainState, batch: Batch) -> int:
    """Bytes that the compiled step needs on a device beside its arguments and results."""
    compiled = accumulating_step.lower(state, zero_jax.shard_batch(batch, state)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend does not say"
    return analysis.temp_size_in_bytes


def main() -> dict[str, float]:
    """Compile the step for stages 1 and 2, train at stage 2 and on one device, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))
    gradients = bytes_on_device(single.params)  # their shapes and dtypes are those of parameters

    at_stage_1 = temporary_bytes(zero_jax.shard_train_state(single, stage=1), batches[0])
    state = zero_jax.shard_train_state(single, stage=2)  # the one call
    at_stage_2 = temporary_bytes(state, batches[0])
    saved = (at_stage_1 - at_stage_2) / gradients

    sharded = [zero_jax.shard_batch(batch, state) for batch in batches]
    state, losses = train(state, sharded, accumulating_step)

    single, expected = train(single, batches)
    print(f"stage 2 over {n} devices, {MICROBATCHES} microbatches a step")
    difference = compare_losses(losses, expected)
    optimizer = share_on_device("optimizer state", state.opt_state, single.opt_state)
    print(f"  gradients                  {gradients:,} bytes, whole")
    print(f"  temporaries at stage 1     {at_stage_1:,} bytes a device")
    print(f"  temporaries at stage 2     {at_stage_2:,}: less by {saved:.3f} of the gradients")

    assert difference < 1e-5, "the losses are those of one device"
    assert optimizer < 1.01 / n, "each device holds 1/N of the optimizer state"
    assert saved > 0.99 * (1 - 1 / n), "the accumulator is 1/N of the gradients"
    return {"losses": difference, "optimizer": optimizer, "saved": saved}


if __name__ == "__main__":
    main()
