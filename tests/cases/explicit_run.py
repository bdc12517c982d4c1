"""Training with the library's own step, and the same on one device without the library.

Runs are made once and shared by the tests.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
from cases import table
from cases.driving import Tree
from cases.explicit import NOT_OPTIMIZED, Noted, Opened, noting, opened
from cases.measures import copy, counting_compiles, placed

import zero_jax


@dataclass
class Run:
    """What a training run left behind.

    Attributes:
      opened: the program; its state was donated to the first step.
      state: after the last step.
      losses, metrics: one for each step.
      first: the first gradients, one tree for each optimizer.
      trail: parameters before the first step and after each.
      strayed: "step i: leaf" for every leaf that came out of a step other than it went in.
      compiles: XLA's compiles in each call of the step.
    """

    opened: Opened
    state: Any
    losses: list[float] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    first: list[Tree] = field(default_factory=list)
    trail: list[Tree] = field(default_factory=list)
    strayed: list[str] = field(default_factory=list)
    compiles: list[int] = field(default_factory=list)


def train(program: Opened, batches: list[Tree]) -> Run:
    """Call the step once for each batch, waiting for every loss."""
    run, layout = Run(program, program.state), next(iter(program.layouts.values()))
    run.trail.append(program.params(run.state))
    before = placed(run.state)
    for i, batch in enumerate(batches):
        batch = zero_jax.shard_batch(batch, layout)
        with counting_compiles() as compiles:
            run.state, loss, metrics = program.step(run.state, batch)
            run.losses.append(float(loss))
        run.compiles.append(compiles())
        run.metrics.append(metrics)
        run.trail.append(program.params(run.state))
        if i == 0:
            run.first = program.grads(run.state)
        after = placed(run.state)
        run.strayed += [f"step {i}: {path}" for path in before if after[path] != before[path]]
    return run


STEPS = {"c05": 6, "c19": 6}
"""Steps that a program is trained; otherwise 4."""

MICROBATCHES = dict.fromkeys(("c01", "c03", "c05", "c11", "c13", "c18", "c19"), 2) | {"c04": 3}
"""Microbatches at stage 2, where the loss is no more than a mean over rows: with one of them it is
the step of stage 1."""


@functools.cache
def run(name: str, stage: int) -> Run:
    """A program, trained from its own seed on its own batches."""
    microbatches = MICROBATCHES.get(name, 1) if stage == 2 else 1
    program = opened(name, stage, microbatches=microbatches)
    return train(program, [program.built["batch"](i) for i in range(STEPS.get(name, 4))])


@dataclass
class Reference:
    """The same on one device, with the program's own step and `jax.grad`; fields as in `Run`."""

    state: Any
    losses: list[float]
    first: list[Tree]
    trail: list[Tree]
    opt_state: Tree


@functools.cache
def reference(name: str) -> Reference:
    """A program on one device without the library."""
    case = table.CASES[name]
    program = case.open(functools.partial(_noted, case), None, None)
    step = jax.jit(program.step, compiler_options=NOT_OPTIMIZED)
    state, losses, first, trail = program.state, [], [], [copy(program.read(program.state)[0])]
    for i in range(STEPS.get(name, 4)):
        state, loss = step(state, program.built["batch"](i))
        losses.append(float(loss))
        params, opt_state = program.read(state)
        trail.append(copy(params))
        if i == 0:
            noted = jax.tree.leaves(opt_state, is_leaf=_is_noted)
            first = copy([n.grads for n in noted])
    inner = jax.tree.map(lambda n: n.inner, program.read(state)[1], is_leaf=_is_noted)
    return Reference(state, losses, first, trail, inner)


def _noted(case: table.Case) -> dict[str, Any]:
    return case.build(wrap_tx=noting)


def _is_noted(node: Any) -> bool:
    return isinstance(node, Noted)
