"""The forward pass of a layer loop: run the layers, and keep what the backward pass starts from.

Of each layer, or of each group of layers, that is its input, and what a policy keeps inside of it.
See `layer_loop` for the order of events.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .layer_loop import (
    Arrays,
    Index,
    Inputs,
    Order,
    Program,
    complete,
    fetch,
    layer_key,
    pullback,
    put,
    stacks,
    walk,
)
from .layer_store import keep, open_stacks


def forward(program: Program, inputs: Inputs, x: Arrays, keeps: bool) -> Any:
    """Run all layers.

    Returns:
      (x, outs, kept): the last x; stacked outs; what the backward pass needs, () unless `keeps`.
    """
    k, n, short = program.every, program.count, program.every - program.first_group
    first = x
    kept, inner_kept = program.inputs_kept, program.inner_kept
    store = open_stacks(kept, x, n if k == 1 else program.groups) if keeps else []
    inner = open_stacks(inner_kept, program.kept, n) if keeps and k == 1 else []

    def step(i: Index, whole: Arrays, state: Any) -> Any:
        x, outs, store, inner = state
        if keeps:
            # A slot is written until the input of its own layer is there: the last one to come.
            # The first group's input is `x`; a last slot takes what no group begins with.
            store = keep(kept, store, x, i if k == 1 else jnp.maximum(i + short - 1, 0) // k)
        if inner:
            (x, out), _, own = pullback(program, inputs, i, whole, x)
            inner = keep(inner_kept, inner, own, i)
        else:
            full = complete(program, inputs, i, whole)
            x, out = program.layer(full, x, inputs.extras, layer_key(inputs, i))
        return x, put(outs, out, i), store, inner

    state = (x, stacks(program.outs, n), store, inner)
    whole = fetch(program, inputs, 0)
    _, (x, outs, store, inner) = walk(program, inputs, Order(0, n, 1), step, whole, state)
    return x, outs, (first if k > 1 else [], store, inner)


def shapes_kept(program: Program, inputs: Inputs, x: Arrays) -> tuple[Any, ...]:
    """Shapes of what the policy keeps of one layer."""
    if program.policy is None:
        return ()

    def one(values: Arrays, extras: Arrays, key: Any, x: Arrays) -> Any:
        inputs = Inputs(values, extras, key)
        return pullback(program, inputs, 0, fetch(program, inputs, 0), x)[2]

    return tuple(jax.eval_shape(one, inputs.values, inputs.extras, inputs.key, x))
