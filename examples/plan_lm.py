"""The language-model run of `train_lm.py` as `zero-jax plan` wants it: built, not trained.

    zero-jax plan configs/lm_gpt2_small.toml --topology h100:8

The state, the step and the options are those of the training script.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lm.model import GPT
from lm.partitioning import zero_options
from lm.schema import LanguageModelRun, Offload
from lm.step import make_step
from train_lm import make_create

import zero_jax
from zero_jax.config import load
from zero_jax.planning.program import Choice, Offloaded, Program


def program(
    config: Path, overrides: Sequence[str], choice: Choice | None, devices: Sequence[Any]
) -> Program:
    """Build the run that `config` describes, at a choice, on devices that may be compile-only.

    The prefetching loop always recomputes layers: a choice without is answered with one that does.
    Only that loop fetches parameters from the host: any other keeps them on the device.

    Raises:
      OSError, ValueError: the configuration cannot be read, or not be built on these devices.
    """
    cfg = load(LanguageModelRun, config, overrides)
    if choice is None:
        kept = _offloaded(cfg.offload)
        choice = Choice(cfg.zero.stage, cfg.model.remat, cfg.step.microbatches, kept)
    if cfg.step.layer_loop == "prefetch":
        choice = replace(choice, remat=True)
    elif choice.offload == "params":
        choice = replace(choice, offload="optimizer")
    if cfg.offload.gradients == "host" and choice.offload != "none":
        choice = replace(choice, microbatches=1)  # which are not summed there
    cfg = replace(
        cfg,
        offload=_offload(cfg.offload, choice.offload),
        model=replace(cfg.model, remat=choice.remat),
        step=replace(cfg.step, microbatches=choice.microbatches),
    )
    explicit = cfg.step.executor == "explicit"
    options = zero_options(cfg, devices)
    del options["stage"]
    tokens = jax.ShapeDtypeStruct((cfg.data.batch_size, cfg.model.sequence_length), jnp.int32)
    return Program(
        name=config.stem,
        choice=choice,
        create=make_create(cfg, GPT(cfg.model)),
        arguments=(jax.eval_shape(lambda: jax.random.key(0)),),
        step=make_step(cfg),
        batch={"inputs": tokens, "targets": tokens},
        rows=cfg.data.batch_size,
        options=options,
        **({"compiler_options": zero_jax.step_compiler_options} if explicit else {}),
    )


def _offload(o: Offload, kept: Offloaded) -> Offload:
    """The section at another choice; a state that stays on the device needs none of it."""
    if kept == "none":
        return Offload()
    return replace(o, optimizer=True, params=kept == "params")


def _offloaded(o: Offload) -> Offloaded:
    return "params" if o.params else "optimizer" if o.optimizer else "none"
