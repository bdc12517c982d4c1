"""ZeRO stage 1: the optimizer state is partitioned, and training does not change.

    python examples/stage1.py

Claim: over N devices each holds 1/N of the optimizer state and all parameters, and the losses are
those of one device. Without an accelerator, 8 virtual CPU devices stand in for real ones.
"""

import jax
from devices import make_virtual_devices
from measure import compare_losses, share_on_device
from small_model import create_state, make_batches, train

import zero_jax


def main() -> dict[str, float]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))

    state = zero_jax.shard_train_state(single, stage=1)  # the one call
    state, losses = train(state, [zero_jax.shard_batch(batch, state) for batch in batches])

    single, expected = train(single, batches)
    print(f"stage 1 over {n} devices")
    difference = compare_losses(losses, expected)
    optimizer = share_on_device("optimizer state", state.opt_state, single.opt_state)
    params = share_on_device("parameters", state.params, single.params)

    assert losses[-1] < 0.8 * losses[0], "it learns"
    assert difference < 1e-5, "the losses are those of one device"
    assert optimizer < 1.01 / n, "each device holds 1/N of the optimizer state"
    assert params == 1, "and all parameters"
    return {"losses": difference, "optimizer": optimizer, "params": params}


if __name__ == "__main__":
    main()
