"""Writing text with a trained model, a byte at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import schema
from .loss import Apply, Params

BYTES = 256  # a vocabulary may have more rows; only these are bytes


def continue_text(apply: Apply, params: Params, prompt: bytes, run: schema.Run) -> bytes:
    """Sample the `run.sample_bytes` bytes that follow `prompt`.

    The model sees the last `len(prompt)` bytes at each step, so the prompt is as long as the
    sequences it was trained on. Every byte costs a whole forward pass: there is no cache of keys
    and values, which would be another model.
    """
    if run.sample_bytes == 0:
        return b""
    tokens = jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32)
    key = jax.random.key(run.seed)
    sampled = _continue(apply, run.sample_bytes, params, tokens, key, jnp.float32(run.temperature))
    return np.asarray(sampled).astype(np.uint8).tobytes()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
    apply: Apply,
    count: int,
    params: Params,
    tokens: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Tokens (T,) int32 -> the next `count` tokens."""

    def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = apply(params, window[None])[0, -1, :BYTES].astype(jnp.float32)
        token = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        return jnp.append(window[1:], token), token

    return jax.lax.scan(step, tokens, jax.random.split(key, count))[1]
