"""What the `[zero]` section asks of `zero_jax`, and the layouts of one model at every stage."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

import zero_jax
from zero_jax import config


def zero_options(cfg: config.LanguageModelRun) -> dict[str, Any]:
    """Keyword arguments of `zero_jax.init_train_state` for this run.

    The rule says that the parameters of the blocks are stacked, layer by layer: their first dim is
    the loop over the layers, and a device that held some layers only would have to gather all.
    """
    half = cfg.model.dtype == "bfloat16"
    return {
        "stage": cfg.zero.stage,
        "axis": cfg.zero.axis,
        "min_size": cfg.zero.min_size,
        "precision": zero_jax.Precision.bf16() if half else None,
        "rules": {"blocks/*": "stacked"},
    }


def layouts_by_stage(
    create: Callable[[jax.Array], Any], cfg: config.LanguageModelRun
) -> dict[int, zero_jax.Layout]:
    """Stage -> layout of the state that `create(key)` makes. From shapes: nothing is allocated."""
    key = jax.eval_shape(jax.random.key, 0)
    layouts = {}
    for stage in range(4):
        options = zero_options(replace(cfg, zero=replace(cfg.zero, stage=stage)))
        state = zero_jax.init_train_state(create, key, **options)
        layouts[stage] = zero_jax.layout_of(state)
    return layouts
