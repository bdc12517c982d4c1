"""C13: character LSTM (hidden 37, vocabulary 83) with flax nn.RNN over variable lengths and a
zero initial carry created inside the model; RMSProp (centered, momentum) after value clipping.
The zero carry is what trips varying-axes checks when the step runs inside shard_map.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CASE = "C13"
B, T, V, H = 16, 15, 83, 37


class CharLSTM(nn.Module):
    @nn.compact
    def __call__(self, ids, lengths):
        x = nn.Embed(V, 19)(ids)
        x = nn.RNN(nn.OptimizedLSTMCell(H), name="rnn0")(x, seq_lengths=lengths)
        x = nn.RNN(nn.OptimizedLSTMCell(H), name="rnn1")(x, seq_lengths=lengths)
        return nn.Dense(V)(x)


def build(seed=0, wrap_tx=lambda tx: tx):
    model = CharLSTM()
    v = model.init(jax.random.key(seed), jnp.zeros((2, T), jnp.int32), jnp.full((2,), T))
    params = v["params"]
    tx = wrap_tx(
        optax.chain(optax.clip(0.05), optax.rmsprop(3e-3, decay=0.95, centered=True, momentum=0.8))
    )

    def loss_fn(p, batch):
        logits = model.apply({"params": p}, batch["ids"][:, :-1], batch["len"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
        m = (jnp.arange(T)[None] < batch["len"][:, None]).astype(jnp.float32)
        return jnp.mean((nll * m).sum(1) / m.sum(1))  # per-example mean, then batch mean

    def step(s, batch):
        loss, g = jax.value_and_grad(loss_fn)(s["params"], batch)
        up, o = tx.update(g, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

    def batch(i):
        r = np.random.default_rng(13000 + i)
        start = r.integers(0, V, (B, 1))
        ids = (start + np.arange(T + 1)[None] * r.integers(1, 4, (B, 1))) % V
        return {"ids": ids.astype(np.int32), "len": r.integers(1, T + 1, B).astype(np.int32)}

    return dict(
        state={"params": params, "opt_state": tx.init(params)},
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        model=model,
    )
