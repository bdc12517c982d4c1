"""C12: top-1 mixture of experts: 5 experts (stacked leading axis 5), tokens of each batch
slice go to different experts, expert 4 is never chosen, and an auxiliary head is never used
by the loss (its gradient is exactly zero).  Global-norm clipping is always active.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C12"
B, T, D, F, E, C = 16, 6, 22, 45, 5, 8


def init(seed):
    k = iter(jax.random.split(jax.random.key(seed), 8))

    def f(*s):
        return jax.random.normal(next(k), s) / np.sqrt(s[-2])

    return {
        "inp": f(12, D),
        "router": f(D, E) * 3,
        "experts": {"up": f(E, D, F), "down": f(E, F, D)},
        "head": f(D, C),
        "aux_head": f(D, 3),
        "scale": jnp.ones((1,)),
    }


def forward(p, x):
    h = x @ p["inp"]
    logits = h @ p["router"] + jnp.array([0.0] * (E - 1) + [-1e9])
    prob = jax.nn.softmax(logits)
    pick = jnp.argmax(logits, -1)
    one = jax.nn.one_hot(pick, E)
    y = jnp.einsum("btd,edf->btef", h, p["experts"]["up"])
    y = jnp.einsum("btef,efd->bted", jax.nn.relu(y), p["experts"]["down"])
    h = h + (y * (one * prob)[..., None]).sum(2)
    load = one.mean((0, 1)), prob.mean((0, 1))
    return p["scale"] * (h.mean(1) @ p["head"]), load


def build(seed=0, wrap_tx=lambda tx: tx):
    params = init(seed)
    tx = wrap_tx(optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(6e-3, weight_decay=0.1)))

    def loss_fn(p, batch):
        logits, (frac, prob) = forward(p, batch["x"])
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        # balance term is a product of two batch means: not a mean over examples
        return ce + 0.05 * E * jnp.sum(frac * prob)

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(12000 + i)
        y = np.arange(B) // 2
        x = r.normal(size=(B, T, 12)) * 0.5
        x[np.arange(B), :, y] += 2.0
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
    )
