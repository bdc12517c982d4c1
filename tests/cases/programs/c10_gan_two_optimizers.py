"""C10: small DCGAN: two models, two optimizers, two losses, one train step that updates the
discriminator and then the generator through the *new* discriminator.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C10"
B, Z = 16, 25


class Gen(nn.Module):
    @nn.compact
    def __call__(self, z):
        x = nn.relu(nn.Dense(4 * 4 * 18)(z)).reshape(z.shape[0], 4, 4, 18)
        x = nn.relu(nn.ConvTranspose(11, (4, 4), strides=(2, 2))(x))
        return jnp.tanh(nn.ConvTranspose(1, (4, 4), strides=(2, 2))(x))


class Disc(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(11, (4, 4), strides=(2, 2))(x), 0.2)
        x = nn.leaky_relu(nn.Conv(18, (4, 4), strides=(2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]  # final bias has shape (1,)


def bce(logit, target):
    return optax.sigmoid_binary_cross_entropy(logit, jnp.full_like(logit, target)).mean()


def build(seed=0, wrap_tx=lambda tx: tx):
    gen, disc = Gen(), Disc()
    kg, kd = jax.random.split(jax.random.key(seed))
    params = {
        "gen": gen.init(kg, jnp.zeros((1, Z)))["params"],
        "disc": disc.init(kd, jnp.zeros((1, 16, 16, 1)))["params"],
    }
    tx = {
        "gen": wrap_tx(optax.adam(2e-3, b1=0.5)),
        "disc": wrap_tx(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b1=0.5))),
    }

    def disc_loss(pd, pg, batch):
        fake = gen.apply({"params": pg}, batch["z"])
        return bce(disc.apply({"params": pd}, batch["real"]), 0.9) + bce(
            disc.apply({"params": pd}, fake), 0.0
        )

    def gen_loss(pg, pd, batch):
        return bce(disc.apply({"params": pd}, gen.apply({"params": pg}, batch["z"])), 1.0)

    def upd(name, s, loss, *args):
        val, g = jax.value_and_grad(loss)(s["params"][name], *args)
        up, o = tx[name].update(g, s["opt"][name], s["params"][name])
        return {
            "params": {**s["params"], name: optax.apply_updates(s["params"][name], up)},
            "opt": {**s["opt"], name: o},
        }, val

    def gen_half(s, batch):
        return upd("gen", s, gen_loss, s["params"]["disc"], batch)

    def step(s, batch):
        s, ld = upd("disc", s, disc_loss, s["params"]["gen"], batch)
        s, lg = gen_half(s, batch)
        return s, ld + 10 * lg  # one number that depends on both

    def batch(i):
        r = np.random.default_rng(10000 + i)
        yy, xx = np.mgrid[0:16, 0:16] / 8.0 - 1
        c = r.uniform(-0.5, 0.5, (B, 2))
        real = np.exp(-8 * ((yy - c[:, :1, None]) ** 2 + (xx - c[:, 1:, None]) ** 2)) * 2 - 1
        return {
            "real": real[..., None].astype(np.float32),
            "z": r.normal(size=(B, Z)).astype(np.float32),
        }

    state = {"params": params, "opt": {k: tx[k].init(params[k]) for k in params}}
    return dict(
        state=state,
        step=step,
        gen_half=gen_half,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn={"disc": disc_loss, "gen": gen_loss},
        model={"gen": gen, "disc": disc},
    )
