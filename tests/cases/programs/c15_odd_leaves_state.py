"""C15: a user's own struct state with every awkward leaf at once: zero-size parameter (0, 7),
(1,) and scalar parameters, None leaves, tuples and lists as containers, non-trainable int32
and bool tables, a typed PRNG key, a legacy uint32 key, a python int step and a static string.
Optimizer: Lion with a decay mask given as a pytree of bools.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

CASE = "C15"
B = 24


@struct.dataclass
class MyState:
    step: Any
    params: Any
    opt_state: Any
    tables: Any  # int / bool constants used by the forward pass
    rng: Any  # typed key
    old_rng: Any  # legacy uint32[2] key
    extra: Any = None  # stays None
    tag: str = struct.field(pytree_node=False, default="odd")


def build(seed=0, wrap_tx=lambda tx: tx):
    k = jax.random.split(jax.random.key(seed), 4)
    params = {
        "embed": jax.random.normal(k[0], (11, 7)) * 0.3,
        "mlp": [
            (jax.random.normal(k[1], (7, 13)) * 0.4, jnp.zeros(13)),
            (jax.random.normal(k[2], (13, 1)), None),
        ],
        "prompt": jnp.zeros((0, 7)),  # soft prompt switched off
        "bias": jnp.zeros((1,)),
        "log_scale": jnp.zeros(()),
        "adapter": None,
    }
    mask = jax.tree.map(lambda p: p.ndim == 2 and p.size > 0, params)
    tx = wrap_tx(optax.lion(2e-3, weight_decay=0.3, mask=mask))
    tables = {
        "remap": jnp.asarray(np.random.default_rng(seed).permutation(11), jnp.int32),
        "keep": jnp.arange(11) % 3 != 0,
    }

    def forward(p, tables, ids):
        e = p["embed"][tables["remap"][ids]] * tables["keep"][ids][..., None]
        pr = jnp.broadcast_to(p["prompt"], (ids.shape[0],) + p["prompt"].shape)
        h = jnp.concatenate([pr, e], 1).mean(1)
        w, b = p["mlp"][0]
        h = jnp.tanh(h @ w + b) @ p["mlp"][1][0]
        return jnp.exp(p["log_scale"]) * h[:, 0] + p["bias"][0]

    def loss_fn(p, tables, batch, rng):
        noise = 0.01 * jax.random.normal(rng, batch["y"].shape)
        return jnp.mean((forward(p, tables, batch["ids"]) - batch["y"] - noise) ** 2)

    def step(s, batch):
        rng, use = jax.random.split(s.rng)
        loss, g = jax.value_and_grad(loss_fn)(s.params, s.tables, batch, use)
        up, o = tx.update(g, s.opt_state, s.params)
        return s.replace(
            step=s.step + 1,
            params=optax.apply_updates(s.params, up),
            opt_state=o,
            rng=rng,
            old_rng=jax.random.split(s.old_rng, 1)[0],
        ), loss

    def batch(i):
        r = np.random.default_rng(15000 + i)
        ids = r.integers(0, 11, (B, 5)).astype(np.int32)
        return {"ids": ids, "y": ((ids % 3 != 0).sum(1) * 0.4 - 1).astype(np.float32)}

    s = MyState(
        0, params, tx.init(params), tables, jax.random.key(seed + 7), jax.random.PRNGKey(seed + 9)
    )
    return dict(
        state=s,
        step=step,
        batch=batch,
        params=params,
        tx=tx,
        loss_fn=loss_fn,
        forward=forward,
        mask=mask,
    )
