"""C05: optax.MultiSteps(k=3) round AdamW, masked LM whose rows have very different numbers
of counted tokens (rows sorted by length, so a slice of the batch per device has from 2 to
40 counted tokens).  Loss is sum(nll * mask) / sum(mask): a mean of per-device means is wrong.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C05"
B, T, V, D = 16, 20, 211, 30


class LM(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(V, D)(ids)
        m = nn.make_causal_mask(ids)
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=5, name="SelfAttention_0")(h, mask=m)
        x = x + nn.Dense(D)(nn.silu(nn.Dense(77)(nn.LayerNorm()(x))))
        return nn.Dense(V, use_bias=False)(nn.LayerNorm()(x))


def build(seed=0, wrap_tx=lambda tx: tx, k=3):
    model = LM()
    params = model.init(jax.random.key(seed), jnp.zeros((1, T), jnp.int32))["params"]
    # the library sees the MultiSteps object's GradientTransformation
    every_k = optax.MultiSteps(optax.adamw(4e-3, weight_decay=0.01), every_k_schedule=k)
    tx = wrap_tx(every_k.gradient_transformation())

    def loss_fn(p, batch):
        nll = optax.softmax_cross_entropy_with_integer_labels(
            model.apply({"params": p}, batch["ids"][:, :-1]), batch["ids"][:, 1:]
        )
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    def loss_sum_and_weight(p, batch):  # the form a sharded step needs
        nll = optax.softmax_cross_entropy_with_integer_labels(
            model.apply({"params": p}, batch["ids"][:, :-1]), batch["ids"][:, 1:]
        )
        return (nll * batch["mask"]).sum(), batch["mask"].sum()

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(5000 + i)
        ids = r.integers(0, V, (B, T + 1)).astype(np.int32)
        ids[:, 1::2] = (ids[:, 0:-1:2] * 3 + 1) % V
        n = np.sort(1 + (np.arange(B) * (T - 1)) // (B - 1))
        return {"ids": ids, "mask": (np.arange(T)[None] < n[:, None]).astype(np.float32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        loss_sum_and_weight=loss_sum_and_weight,
        model=model,
    )
