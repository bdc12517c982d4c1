"""C11: 1-D Fourier neural operator: complex64 spectral weights beside float32 ones, Adam.
Gradients are conjugated before the update, as JAX's convention for complex needs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C11"
B, N, W, M = 16, 64, 10, 9


def init(seed):
    k = iter(jax.random.split(jax.random.key(seed), 12))

    def f(*s):
        return jax.random.normal(next(k), s) / np.sqrt(s[0])

    def spec():
        return (f(W, W, M) + 1j * f(W, W, M)).astype(jnp.complex64) * 0.3

    return {
        "lift": f(2, W),
        "blocks": [{"spec": spec(), "skip": f(W, W), "b": jnp.zeros(W)} for _ in range(2)],
        "proj": f(W, 1),
        "phase": jnp.asarray(0.1 + 0.2j, jnp.complex64),
    }


def forward(p, u):
    grid = jnp.broadcast_to(jnp.linspace(0, 1, N)[None, :, None], u.shape)
    h = jnp.concatenate([u, grid], -1) @ p["lift"]
    for blk in p["blocks"]:
        f = jnp.fft.rfft(h, axis=1)[:, :M]
        f = jnp.einsum("bmi,iom->bmo", f, blk["spec"]) * p["phase"]
        f = jnp.pad(f, ((0, 0), (0, N // 2 + 1 - M), (0, 0)))
        h = jax.nn.gelu(jnp.fft.irfft(f, n=N, axis=1) + h @ blk["skip"] + blk["b"])
    return h @ p["proj"]


def build(seed=0, wrap_tx=lambda tx: tx):
    params = init(seed)
    tx = wrap_tx(optax.adam(optax.exponential_decay(5e-3, 10, 0.9)))

    def loss_fn(p, batch):
        return jnp.mean((forward(p, batch["u0"]) - batch["u1"]) ** 2)

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        g = jax.tree.map(jnp.conj, g)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(11000 + i)
        x = np.linspace(0, 1, N, endpoint=False)
        a, b = r.normal(size=(2, B, 4))
        k = np.arange(1, 5)

        def wave(t):
            return (
                a[..., None] * np.sin(2 * np.pi * k[:, None] * (x - t))
                + b[..., None] * np.cos(2 * np.pi * k[:, None] * (x - t))
            ).sum(1)[..., None] * 0.3

        return {"u0": wave(0.0).astype(np.float32), "u1": wave(0.13).astype(np.float32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        grad_post=lambda g: jax.tree.map(jnp.conj, g),
    )
