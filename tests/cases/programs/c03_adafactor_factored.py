"""C03: regression MLP trained with Adafactor (factored second moments + momentum).

State holds v_row / v_col vectors whose length equals other parameters' length (384),
(1,) placeholders for the unused slot, un-factored moments for small leaves, a scalar
parameter and a (1,) bias.  Statistics are means over whole rows/columns and the update
is clipped by the RMS of the whole leaf, so per-shard arithmetic is not enough.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C03"
B = 64
SHAPES = {
    "w0": (256, 384),
    "b0": (384,),
    "w1": (384, 384),
    "b1": (384,),
    "w2": (384, 130),
    "b2": (130,),
    "w3": (130, 1),
    "b3": (1,),
    "temp": (),
}


def init(seed):
    ks = jax.random.split(jax.random.key(seed), len(SHAPES))
    out = {}
    for k, (n, s) in zip(ks, SHAPES.items(), strict=False):
        out[n] = (
            jax.random.normal(k, s) / np.sqrt(s[0])
            if len(s) == 2
            else jnp.ones(s)
            if n == "temp"
            else jnp.full(s, 0.01)
        )
    return out


def forward(p, x):
    h = jnp.tanh(x @ p["w0"] + p["b0"])
    h = h + jnp.tanh(h @ p["w1"] + p["b1"])
    h = jax.nn.gelu(h @ p["w2"] + p["b2"])
    return p["temp"] * (h @ p["w3"] + p["b3"])[:, 0]


def build(seed=0, wrap_tx=lambda tx: tx):
    params = init(seed)
    tx = wrap_tx(
        optax.adafactor(
            optax.linear_schedule(3e-2, 1e-3, 50),
            momentum=0.9,
            weight_decay_rate=1e-4,
            min_dim_size_to_factor=128,
        )
    )

    def loss_fn(p, batch):
        return jnp.mean((forward(p, batch["x"]) - batch["y"]) ** 2)

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(3000 + i)
        x = r.normal(size=(B, 256)).astype(np.float32)
        return {"x": x, "y": np.sin(x[:, :7].sum(1)).astype(np.float32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
    )
