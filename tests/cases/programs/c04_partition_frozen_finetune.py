"""C04: fine-tuning with optax.multi_transform: frozen backbone (set_to_zero), norms on
plain momentum SGD, head on AdamW.  State is full of MaskedNode holes and the frozen
leaves own no moments at all.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C04"
B, T, V, D, C = 24, 12, 1001, 48, 11


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, ids, mask):
        x = nn.Embed(V, D, name="backbone_embed")(ids)
        for i in range(2):
            h = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.Dense(D, name=f"backbone_fc_{i}")(
                nn.gelu(nn.Dense(3 * D, name=f"backbone_up_{i}")(h))
            )
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return nn.Dense(C, name="head")(pooled)


def group_of(path, _):
    top = path[0].key
    return "frozen" if top.startswith("backbone") else "norm" if top.startswith("norm") else "head"


def build(seed=0, wrap_tx=lambda tx: tx, container=dict):
    model = Classifier()
    v = model.init(jax.random.key(seed), jnp.zeros((1, T), jnp.int32), jnp.ones((1, T)))
    params = container(v["params"])

    def labels(p):
        return jax.tree_util.tree_map_with_path(group_of, p)

    tx = wrap_tx(
        optax.multi_transform(
            {
                "frozen": optax.set_to_zero(),
                "norm": optax.sgd(0.05, momentum=0.9),
                "head": optax.adamw(5e-3, weight_decay=0.05),
            },
            labels,
        )
    )

    def loss_fn(p, batch):
        logits = model.apply({"params": p}, batch["ids"], batch["mask"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(4000 + i)
        ids = r.integers(0, V, (B, T)).astype(np.int32)
        n = r.integers(1, T + 1, B)
        return {
            "ids": ids,
            "mask": (np.arange(T)[None] < n[:, None]).astype(np.float32),
            "y": (ids[:, 0] % C).astype(np.int32),
        }

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        model=model,
    )
