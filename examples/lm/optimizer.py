"""The `[optimizer]` section as an optax transformation."""

import optax

from . import schema


def make_optimizer(o: schema.Optimizer, steps: int) -> optax.GradientTransformation:
    """Build optimizer, schedule and clipping for a run of `steps`.

    The learning rate rises linearly and falls along a cosine to `final_fraction` of its top. A run
    shorter than two warm-ups warms up during its first half.
    """
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=o.learning_rate,
        warmup_steps=min(o.warmup_steps, steps // 2),
        decay_steps=steps,
        end_value=o.learning_rate * o.final_fraction,
    )
    if o.name == "adamw":
        tx = optax.adamw(rate, o.b1, o.b2, weight_decay=o.weight_decay)
    elif o.name == "lion":
        tx = optax.lion(rate, o.b1, o.b2, weight_decay=o.weight_decay)
    elif o.name == "lamb":
        tx = optax.lamb(rate, o.b1, o.b2, weight_decay=o.weight_decay)
    else:
        tx = optax.adafactor(rate, weight_decay_rate=o.learning_rate * o.weight_decay)
    if o.clip_norm is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(o.clip_norm), tx)
