"""C18: optax.inject_hyperparams(adamw) with a schedule for the learning rate and another for
b2; the state keeps hyperparameters as scalars the user reads and edits.  Used for resume:
steps 0..9 in one go must equal 0..4, save, restore on another mesh / stage, 5..9.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C18"
B = 16


class ViTiny(nn.Module):
    up_init: Any = nn.linear.default_kernel_init
    down_init: Any = nn.linear.default_kernel_init

    @nn.compact
    def __call__(self, img):
        x = nn.Conv(28, (4, 4), strides=(4, 4), name="patch")(img)
        x = x.reshape(x.shape[0], -1, 28)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, 28))
        x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, 28)), x], 1)
        x = x + self.param("pos", nn.initializers.normal(0.02), (1, 17, 28))
        for i in range(2):
            attend = nn.MultiHeadDotProductAttention(num_heads=4, name=f"SelfAttention_{i}")
            x = x + attend(nn.LayerNorm()(x))
            down = nn.Dense(28, kernel_init=self.down_init)
            up = nn.Dense(70, kernel_init=self.up_init)
            x = x + down(nn.gelu(up(nn.LayerNorm()(x))))
        return nn.Dense(5)(nn.LayerNorm()(x)[:, 0])


def build(seed=0, wrap_tx=lambda tx: tx, **inits):
    model = ViTiny(**inits)
    params = model.init(jax.random.key(seed), jnp.zeros((1, 16, 16, 3)))["params"]
    tx = wrap_tx(
        optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
            learning_rate=optax.warmup_cosine_decay_schedule(0.0, 4e-3, 3, 20),
            b2=optax.linear_schedule(0.9, 0.99, 10),
            weight_decay=0.05,
            mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p),
        )
    )

    def loss_fn(p, batch):
        logits = model.apply({"params": p}, batch["img"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(18000 + i)
        y = r.integers(0, 5, B)
        img = r.normal(size=(B, 16, 16, 3)) * 0.5
        for j, c in enumerate(y):
            img[j, 3 * c : 3 * c + 3] += 1.0
        return {"img": img.astype(np.float32), "y": y.astype(np.int32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        model=model,
        read_lr=lambda s: float(s["opt_state"].hyperparams["learning_rate"]),
    )
