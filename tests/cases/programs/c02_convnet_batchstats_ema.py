"""C02: residual conv net, BatchNorm running statistics, EMA of parameters held as a
FrozenDict in a custom TrainState (fields beyond params/opt_state), Nesterov SGD with
decay on kernels only.  Channel counts 12 / 20 / 10 are not multiples of 8.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict, freeze
from flax.training import train_state

CASE = "C02"
B = 32


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        def bn(h, name):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, name=name)(h)

        x = nn.relu(bn(nn.Conv(12, (3, 3), use_bias=False)(x), "bn0"))
        y = nn.relu(bn(nn.Conv(20, (3, 3), strides=(2, 2), use_bias=False)(x), "bn1"))
        z = bn(nn.Conv(20, (3, 3), use_bias=False)(y), "bn2")
        y = nn.relu(y + z)
        return nn.Dense(10)(y.mean((1, 2)))


class State(train_state.TrainState):
    batch_stats: Any = None
    ema: FrozenDict = None
    ema_decay: float = 0.9  # python float kept as a leaf on purpose


def build(seed=0, wrap_tx=lambda tx: tx):
    model = Net()
    v = model.init(jax.random.key(seed), jnp.zeros((2, 16, 16, 3)), False)
    kernel_only = jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key == "kernel", v["params"]
    )
    tx = wrap_tx(
        optax.chain(
            optax.add_decayed_weights(5e-4, mask=kernel_only),
            optax.sgd(optax.cosine_decay_schedule(0.1, 30), 0.9, nesterov=True),
        )
    )

    def loss_fn(params, batch_stats, batch):
        logits, upd = model.apply(
            {"params": params, "batch_stats": batch_stats},
            batch["image"],
            True,
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, upd["batch_stats"]

    def step(st, batch):
        (loss, bs), g = jax.value_and_grad(loss_fn, has_aux=True)(st.params, st.batch_stats, batch)
        st = st.apply_gradients(grads=g, batch_stats=bs)
        d = st.ema_decay
        ema = jax.tree.map(lambda e, p: d * e + (1 - d) * p, st.ema, freeze(st.params))
        return st.replace(ema=ema), loss

    def batch(i):
        r = np.random.default_rng(2000 + i)
        lab = np.arange(B) % 10  # every device slice sees other classes
        scale = 1.0 + 0.5 * (np.arange(B) // 4)[:, None, None, None]  # slices differ in statistics
        img = r.normal(size=(B, 16, 16, 3)) * scale * 0.3 + 0.2 * lab[:, None, None, None]
        return {"image": img.astype(np.float32), "label": lab.astype(np.int32)}

    st = State.create(
        apply_fn=model.apply,
        params=v["params"],
        tx=tx,
        batch_stats=v["batch_stats"],
        ema=freeze(v["params"]),
    )
    return dict(
        state=st, step=step, batch=batch, params=v["params"], tx=tx, loss_fn=loss_fn, model=model
    )
