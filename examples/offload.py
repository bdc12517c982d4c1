"""Offload: a training state larger than a device may hold, in host memory or on a disk.

    python examples/offload.py

Claim: parameters, gradients and optimizer state take 8.6 MiB, the device may hold 6. With the
optimizer state in host memory, or in files, what stays fits, and so do the three pieces of it that
are on the device at once during an update; losses and trained parameters are those of the state
that lies on the device. One CPU device stands for an accelerator.
"""

import tempfile
from typing import Any

import jax
from devices import make_virtual_devices
from measure import compare_arrays, compare_losses
from small_model import create_state, loss_fn, make_batches

import zero_jax
from zero_jax.reporting.tables import bytes_text

BUDGET_BYTES = 6 * 2**20
PIECE_BYTES = 2**19


def train(
    offload: zero_jax.HostMemory | zero_jax.Nvme | None,
) -> tuple[Any, list[float], int]:
    """Twenty steps on one device: the parameters, the losses, bytes that the device holds."""
    plain = create_state(jax.random.key(0))
    state = zero_jax.shard_train_state(
        plain,
        stage=1 if offload else 0,  # a single device partitions nothing
        mesh=jax.sharding.Mesh(jax.devices()[:1], ("data",)),
        executor="explicit",
        offload=offload,
    )
    step = zero_jax.make_train_step(lambda params, batch: loss_fn(params, plain, batch))
    losses = []
    for batch in make_batches(20):
        state, metrics = step(state, zero_jax.shard_batch(batch, state))
        losses.append(float(metrics.loss))
    held_bytes = sum(zero_jax.layout_of(state).bytes_per_device.values())
    if offload is not None:
        moved = step.traffic
        if moved is None:  # host memory: the update is timed alone
            state, moved = zero_jax.measure_update(state)
        written = moved.to_disk_bytes or moved.to_host_bytes
        rate = f"{moved.gigabytes_per_second:.1f} GB/s"
        print(
            f"  an update writes           {bytes_text(written)} in {moved.seconds:.3f} s, {rate}"
        )
    return zero_jax.unshard_train_state(state).params, losses, held_bytes


def main() -> dict[str, float]:
    """Train with the state on the device, in host memory and in files, and compare."""
    make_virtual_devices()
    params, expected, whole_bytes = train(None)
    assert whole_bytes > BUDGET_BYTES, "the state does not fit"
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, offload in (
            ("host", zero_jax.HostMemory(chunk_bytes=PIECE_BYTES)),
            ("disk", zero_jax.Nvme(folder, buffer_bytes=4 * PIECE_BYTES)),
        ):
            print(f"optimizer state in {'host memory' if name == 'host' else 'files'}")
            trained, losses, held_bytes = train(offload)
            print(f"  the device holds           {bytes_text(held_bytes)}")
            difference = compare_losses(losses, expected)
            apart = compare_arrays("trained parameters", trained, params)
            assert held_bytes + 3 * PIECE_BYTES <= BUDGET_BYTES, "the state fits"
            assert difference < 1e-6, "the losses are those of a state on the device"
            assert apart < 1e-5, "and so are the parameters"
            result |= {f"{name} losses": difference, f"{name} share": held_bytes / whole_bytes}
    return result


if __name__ == "__main__":
    main()
