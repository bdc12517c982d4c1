"""The `[optimizer]` section as an optax transformation."""

import optax

from .schema import LanguageModelRun


def make_optimizer(cfg: LanguageModelRun) -> optax.GradientTransformation:
    """Build optimizer, schedule and clipping; the explicit executor clips by itself.

    The learning rate rises linearly and falls along a cosine to `final_fraction` of its top. A run
    shorter than two warm-ups warms up during its first half.
    """
    o, steps = cfg.optimizer, cfg.run.steps
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
    if o.clip_norm is None or cfg.step.executor == "explicit":
        return tx
    return optax.chain(optax.clip_by_global_norm(o.clip_norm), tx)
