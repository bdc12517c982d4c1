"""C01: small GPT, input embedding reused as output head, vocab 50257, width 36.

Neither 50257 nor 36 divides by 8, so no axis of the largest parameter can be cut
evenly over 8 devices.  AdamW with a decay mask by rank, global-norm clipping and
warm-up + cosine schedule.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C01"
V, D, H, L, T, B = 50257, 36, 3, 2, 16, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=H)(h, h, mask=mask)
        h = nn.Dense(4 * D + 2)(nn.LayerNorm()(x))  # 146: also not a multiple of 8
        return x + nn.Dense(D)(nn.gelu(h))


class TiedLM(nn.Module):
    @nn.compact
    def __call__(self, ids):
        wte = nn.Embed(V, D, embedding_init=nn.initializers.normal(0.02), name="wte")
        pos = self.param("wpe", nn.initializers.normal(0.01), (T, D))
        x = wte(ids) + pos[None, : ids.shape[1]]
        for i in range(L):
            x = Block(name=f"block_{i}")(x)
        return wte.attend(nn.LayerNorm(name="ln_f")(x))


def no_decay_on_vectors(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def build(seed=0, wrap_tx=lambda tx: tx):
    model = TiedLM()
    params = model.init(jax.random.key(seed), jnp.zeros((1, T), jnp.int32))["params"]
    sched = optax.warmup_cosine_decay_schedule(1e-5, 3e-3, 3, 40)
    tx = wrap_tx(
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adamw(sched, b2=0.95, weight_decay=0.1, mask=no_decay_on_vectors),
        )
    )

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["ids"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["ids"][:, 1:]
        ).mean()

    def step(state, batch):
        loss, g = jax.value_and_grad(loss_fn)(state["params"], batch)
        up, opt = tx.update(g, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], up),
            "opt_state": opt,
            "step": state["step"] + 1,
        }, loss

    def batch(i):
        r = np.random.default_rng(1000 + i)
        # zipf-like ids that also touch the very last rows of the table
        ids = np.minimum(r.zipf(1.3, (B, T + 1)), V).astype(np.int32) - 1
        ids[:, -3:] = V - 1 - (np.arange(B)[:, None] % 5)
        return {"ids": ids}

    state = {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}
    return dict(
        state=state, step=step, batch=batch, params=params, tx=tx, loss_fn=loss_fn, model=model
    )
