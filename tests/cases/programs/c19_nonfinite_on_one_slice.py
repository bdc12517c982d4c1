"""C19: optax.apply_if_finite(adamw) and a batch whose row 5 holds inf at steps 3 and 4.  Only
the device that owns row 5 (and, after reduction, some shards) sees a non-finite number; the
decision to skip must be the same everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C19"
B, DIN, DH = 16, 18, 61


def init(seed):
    k = jax.random.split(jax.random.key(seed), 2)
    return {
        "a": jax.random.normal(k[0], (DIN, DH)) / 4,
        "ab": jnp.zeros(DH),
        "b": jax.random.normal(k[1], (DH, 1)) / 8,
        "bb": jnp.zeros(1),
        "feat_gain": jnp.ones(DIN),
    }


def build(seed=0, wrap_tx=lambda tx: tx):
    params = init(seed)
    tx = wrap_tx(
        optax.apply_if_finite(optax.adamw(5e-3, weight_decay=0.01), max_consecutive_errors=5)
    )

    def loss_fn(p, batch):
        x = batch["x"] * p["feat_gain"]
        h = jnp.tanh(jnp.nan_to_num(x, posinf=0.0) @ p["a"] + p["ab"])
        pred = (h @ p["b"] + p["bb"])[:, 0]
        # inf reaches only the gradient of feat_gain[2]: most shards stay finite
        reg = 1e-3 * jnp.sum(jnp.where(batch["bad"][:, None], x, 0.0)[:, 2])
        return jnp.mean((pred - batch["y"]) ** 2) + reg

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, jnp.where(
            jnp.isfinite(loss), loss, -1.0
        )

    def batch(i):
        r = np.random.default_rng(19000 + i)
        x = r.normal(size=(B, DIN)).astype(np.float32)
        y = np.tanh(x[:, :3].sum(1)).astype(np.float32)
        bad = np.zeros(B, bool)
        if i in (3, 4):
            x[5, 2] = np.inf
            bad[5] = True
        return {"x": x, "y": y, "bad": bad}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
    )
