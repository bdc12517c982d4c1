"""Tensor parallelism times ZeRO: a mesh of 4 x 2, ZeRO stage 3.

    python examples/tensor_parallel.py

The model says with `nn.with_partitioning` which dim of a kernel lies over the mesh axis "model", as
for tensor parallelism alone; ZeRO adds the axis "data" to another dim. Claim: the kernels and their
moments are cut both ways, so a device holds 1 / (4 * 2) of them; the losses are those of one
device. Without an accelerator, 8 virtual CPU devices stand in for real ones.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from measure import compare_losses, share_on_device
from small_model import CLASSES, FEATURES, make_batches, train

import zero_jax

WIDTH, HIDDEN = 128, 512


def kernel_over(*axes: str | None):
    """Initializer of a kernel whose dims lie over these mesh axes."""
    return nn.with_partitioning(nn.initializers.lecun_normal(), axes)


class Classifier(nn.Module):
    """Two residual blocks; in each the first kernel is cut by columns, the second by rows."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        for i in range(2):
            y = nn.LayerNorm()(x)
            y = nn.Dense(HIDDEN, kernel_init=kernel_over(None, "model"), name=f"up_{i}")(y)
            y = nn.gelu(y)
            x += nn.Dense(WIDTH, kernel_init=kernel_over("model", None), name=f"down_{i}")(y)
        return nn.Dense(CLASSES)(x)


def create_state(key: jax.Array) -> TrainState:
    """The parameters of the blocks are boxes that carry their axes' names."""
    model = Classifier()
    params = jax.jit(model.init)(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def kernels(*trees: dict) -> list[jax.Array]:
    """The kernels of the blocks, of parameters or of moments."""
    blocks = [tree[name] for tree in trees for name in tree if name.startswith(("up", "down"))]
    return jax.tree.leaves([block["kernel"] for block in blocks])


def main() -> dict[str, float]:
    """Train on all devices and on one, and compare."""
    make_virtual_devices()
    n, batches = jax.device_count(), make_batches(20)
    single = create_state(jax.random.key(0))

    mesh = jax.make_mesh((n // 2, 2), ("data", "model"))
    state = zero_jax.shard_train_state(single, stage=3, mesh=mesh)  # the one call
    state, losses = train(state, [zero_jax.shard_batch(batch, state) for batch in batches])
    specs = {name: state.params[name]["kernel"].value.sharding.spec for name in ("up_0", "down_0")}

    single, expected = train(single, batches)
    print(f"ZeRO stage 3 on a mesh of {dict(mesh.shape)}")
    difference = compare_losses(losses, expected)
    params = share_on_device("kernels", kernels(state.params), kernels(single.params))
    adam, adam_of_one = state.opt_state[0], single.opt_state[0]
    moments = share_on_device(
        "their moments", kernels(adam.mu, adam.nu), kernels(adam_of_one.mu, adam_of_one.nu)
    )
    print(f"  kernels lie as             {specs['up_0']} and {specs['down_0']}")

    assert difference < 1e-5, "the losses are those of one device"
    assert specs == {"up_0": P("data", "model"), "down_0": P("model", "data")}, "cut both ways"
    assert params == moments == 1 / n, "a device holds 1 / (4 * 2) of them and of moments"
    return {"losses": difference, "params": params, "moments": moments}


if __name__ == "__main__":
    main()
