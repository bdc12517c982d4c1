"""What `[zero]` and `[offload]` ask of `zero_jax`, and the layouts of one model at every stage."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import zero_jax

from . import schema
from .model import MODEL_AXIS


def zero_options(
    cfg: schema.LanguageModelRun, devices: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments of `zero_jax.init_train_state` for this run.

    The rule says that the parameters of the blocks are stacked, layer by layer: their first dim is
    the loop over the layers, and a device that held some layers only would have to gather all.

    Args:
      cfg: the run.
      devices: what it runs on; None for all there are.

    Raises:
      ValueError: `zero.model_parallel` does not divide the devices, the heads or the vocabulary.
    """
    return {
        "stage": cfg.zero.stage,
        "mesh": _mesh(cfg, devices),
        "axis": cfg.zero.axis,
        "min_size": cfg.zero.min_size,
        "precision": _precision(cfg),
        "rules": {"blocks/*": "stacked"},
        "executor": cfg.step.executor,
        "offload": _offload(cfg.offload),
    }


def _precision(cfg: schema.LanguageModelRun) -> zero_jax.Precision:
    half = cfg.model.dtype == "bfloat16"
    precision = zero_jax.Precision.bf16() if half else zero_jax.Precision()
    return (
        replace(precision, reduce=jnp.bfloat16)
        if cfg.step.reduce_dtype == "bfloat16"
        else precision
    )


def _offload(o: schema.Offload) -> zero_jax.HostMemory | zero_jax.Nvme | None:
    if not o.optimizer:
        return None
    kept, size = {"params": o.params, "gradients": o.gradients}, o.chunk_mib * 2**20
    if o.folder is not None:
        return zero_jax.Nvme(o.folder, buffer_bytes=size, existing=o.existing, **kept)
    how = {"update_on": o.update_on, "delayed": o.delayed}
    return zero_jax.HostMemory(chunk_bytes=size, **kept, **how)


def _mesh(cfg: schema.LanguageModelRun, devices: Sequence[Any] | None) -> Mesh:
    """The data axis, and inside of it the model axis: its devices are neighbours."""
    grid, parts = np.array(jax.devices() if devices is None else devices), cfg.zero.model_parallel
    if parts == 1:
        return Mesh(grid, (cfg.zero.axis,))
    divided = {
        "the number of devices": grid.size,
        "model.heads": cfg.model.heads,
        "model.vocab_size": cfg.model.vocab_size,
    }
    for name, size in divided.items():
        if size % parts:
            raise ValueError(
                f"zero.model_parallel={parts} does not divide {name}, which is {size}; expected a "
                "divisor of it."
            )
    return Mesh(grid.reshape(-1, parts), (cfg.zero.axis, MODEL_AXIS))


def layouts_by_stage(
    create: Callable[[jax.Array], Any], cfg: schema.LanguageModelRun
) -> dict[int, zero_jax.Layout]:
    """Stage -> layout of the state that `create(key)` makes. From shapes: nothing is allocated."""
    key = jax.eval_shape(jax.random.key, 0)
    layouts = {}
    for stage in range(4):
        options = zero_options(replace(cfg, zero=replace(cfg.zero, stage=stage)))
        state = zero_jax.init_train_state(create, key, **options)
        layouts[stage] = zero_jax.layout_of(state)
    return layouts
