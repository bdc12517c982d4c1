"""ZeRO stage 3: the parameters are partitioned too.

    python examples/stage3.py

Claim: between steps each of N devices holds 1/N of the parameters and 1/N of the optimizer state;
the losses and the trained parameters are those of one device. The program is that of `stage1.py`
with another number in the call. Without an accelerator, 8 virtual CPU devices stand in.
"""

import jax
from devices import make_virtual_devices
from measure import compare_arrays, compare_losses, share_on_device
from small_model import create_state, make_batches, train

import zero_jax


def main() -> dict[str, float]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))

    state = zero_jax.shard_train_state(single, stage=3)  # the one call
    state, losses = train(state, [zero_jax.shard_batch(batch, state) for batch in batches])
    plain = zero_jax.unshard_train_state(state)  # and the way back: whole, with the plain optimizer

    single, expected = train(single, batches)
    print(f"stage 3 over {n} devices")
    difference = compare_losses(losses, expected)
    trained = compare_arrays("trained parameters", plain.params, single.params)
    optimizer = share_on_device("optimizer state", state.opt_state, single.opt_state)
    params = share_on_device("parameters", state.params, single.params)
    print(f"  a kernel lies as           {state.params['Dense_1']['kernel'].sharding.spec}")

    assert difference < 1e-5, "the losses are those of one device"
    assert trained < 1e-4, "and the parameters, which AdamW may move by 0.02 in 20 steps"
    assert optimizer < 1.01 / n, "each device holds 1/N of the optimizer state"
    assert params < 1.01 / n, "and 1/N of the parameters"
    return {"losses": difference, "trained": trained, "optimizer": optimizer, "params": params}


if __name__ == "__main__":
    main()
