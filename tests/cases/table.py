"""The programs of real users, and what each is held to. Runs are made once and shared by the tests.

The programs were written for this project from public reports; each opens with what is difficult
in it. `baseline.json` holds what they do on one device.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from cases.driving import (
    Opened,
    Run,
    Tree,
    closes_over_tx,
    model_and_optimizer,
    owns_tx,
    train,
    two_optimizers,
)
from cases.measures import copy
from cases.programs import (
    c01_tied_gpt_vocab50257,
    c02_convnet_batchstats_ema,
    c03_adafactor_factored,
    c04_partition_frozen_finetune,
    c05_multisteps_masked_lm,
    c08_nnx_dropout_bn_rngs,
    c10_gan_two_optimizers,
    c11_complex_fourier_operator,
    c12_moe_unused_experts,
    c13_lstm_scan_charlm,
    c15_odd_leaves_state,
    c18_inject_hyperparams_resume,
    c19_nonfinite_on_one_slice,
)

import zero_jax

BASELINE = json.loads(Path(__file__).with_name("baseline.json").read_text())


@dataclass(frozen=True)
class Case:
    """A program, and the numbers it is held to.

    Attributes:
      program: its module.
      open: its kind.
      options: keyword arguments of its `build`.
      steps: steps over which LOSS and CHANGE are asked.
      run_for: steps it is run for, where another check asks for more.
      loss, change: the two tolerances.
      opt_share: BYTES(opt, f) on 8 devices, stages 1 to 3, where its report gives one.
      plain_law: whether the optimizer's bytes meet 1.01/8 with nothing for single elements.
      short_of_parameters: stage 3 leaves more than half of the parameters on every device, and
        has to say so.
      statistics: modules with running statistics; parameters shaped like them stay whole.
      watch: params -> what is kept of them after each step.
    """

    program: ModuleType
    open: Callable[..., Opened] = closes_over_tx
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 8
    run_for: int = 8
    loss: float = 5e-6
    change: float = 2e-5
    opt_share: float | None = None
    plain_law: bool = True
    short_of_parameters: bool = False
    statistics: tuple[str, ...] = ()
    watch: Callable[[Tree], Tree] = lambda params: params

    def build(self, **options: Any) -> dict[str, Any]:
        return self.program.build(**self.options, **options)

    def warns(self, stage: int | None) -> contextlib.AbstractContextManager[Any]:
        """What opening it at `stage` on 8 devices has to say."""
        if stage == 3 and self.short_of_parameters:
            return pytest.warns(zero_jax.ZeroWarning, match="stage 3 .* of params on every device")
        return contextlib.nullcontext()


CASES = {
    "c01": Case(
        c01_tied_gpt_vocab50257,
        run_for=20,
        opt_share=1.01 / 8,
        watch=lambda params: params["wte"]["embedding"][-5:],
    ),
    "c02": Case(
        c02_convnet_batchstats_ema,
        owns_tx,
        loss=5e-5,
        change=2e-3,
        opt_share=3_260 / 25_596,
        statistics=("bn0", "bn1", "bn2"),
    ),
    "c03": Case(c03_adafactor_factored, opt_share=0.128),
    "c04": Case(c04_partition_frozen_finetune, plain_law=False),
    "c05": Case(
        c05_multisteps_masked_lm, steps=9, run_for=9, opt_share=0.128, short_of_parameters=True
    ),
    "c08": Case(
        c08_nnx_dropout_bn_rngs,
        model_and_optimizer,
        options={"rate": 0.0},
        opt_share=12_200 / 96_220,
        statistics=("bn",),
    ),
    "c10": Case(c10_gan_two_optimizers, two_optimizers),
    "c11": Case(
        c11_complex_fourier_operator, opt_share=0.13, plain_law=False, short_of_parameters=True
    ),
    "c12": Case(c12_moe_unused_experts, run_for=20),
    "c13": Case(c13_lstm_scan_charlm, opt_share=0.127, short_of_parameters=True),
    "c15": Case(c15_odd_leaves_state, plain_law=False, short_of_parameters=True),
    "c18": Case(c18_inject_hyperparams_resume, steps=10, run_for=20, plain_law=False),
    "c19": Case(c19_nonfinite_on_one_slice, plain_law=False, short_of_parameters=True),
}


def programs(*names: str) -> pytest.MarkDecorator:
    """Parametrise `name`."""
    return pytest.mark.parametrize("name", names)


def opened(name: str, stage: int | None, **options: Any) -> Opened:
    """A program, opened at a stage (None: as it stands, on one device)."""
    case = CASES[name]
    with case.warns(stage):
        return case.open(functools.partial(case.build, **options), stage, None)


@functools.cache
def run(name: str, stage: int | None) -> Run:
    """A program, trained from its own seed on its own batches."""
    case = CASES[name]
    program = opened(name, stage)
    batches = [program.built["batch"](i) for i in range(case.run_for)]
    return train(program, batches, watch=case.watch, keep=(case.steps,))


class Recorded(NamedTuple):
    """Optimizer state of `recording`."""

    grads: Any
    norm: jax.Array


def recording(_: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that keeps the gradients it is given, with their norm, and moves nothing."""

    def init(params):
        return Recorded(jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))

    def update(grads, state, params=None):
        still = jax.tree.map(jnp.zeros_like, grads)
        return still, Recorded(grads, optax.tree.norm(grads))

    return optax.GradientTransformation(init, update)


@functools.cache
def first_gradient(name: str, stage: int | None) -> tuple[Any, list[float]]:
    """Gradients of the first batch as the optimizer sees them, and the norm it takes of them."""
    case = CASES[name]

    def build(wrap_tx=lambda tx: tx):
        return case.build(wrap_tx=lambda tx: wrap_tx(recording(tx)))

    with case.warns(stage):
        program = case.open(build, stage, None)
    done = train(program, [program.built["batch"](0)])
    records = jax.tree.leaves(
        program.unshard(done.state)[1], is_leaf=lambda x: isinstance(x, Recorded)
    )
    return copy([r.grads for r in records]), [float(r.norm) for r in records]
