"""The derivative rule of the layer loop: which cotangents are asked for, and where they go.

The step differentiates with respect to carriers, never to values, so values get none. A leaf or
input that nobody differentiates (a frozen parameter, a mask) has no gradient computed at all: the
rule asks JAX which are perturbed. The passes are in `layer_forward` and `layer_backward`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .layer_backward import backward
from .layer_forward import forward, shapes_kept
from .layer_loop import Arrays, Inputs, Program, inexact, merge, select
from .layer_store import kept_as


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """What is static among the residuals."""

    program: Program
    carriers_asked: tuple[bool, ...]


def differentiable(program: Program) -> Callable[..., Any]:
    """The loop with its backward pass: (values, carriers, x, extras, key) -> (x, outs).

    `carriers` are those of the trained leaves.
    """

    @jax.custom_vjp
    def loop(values: Arrays, carriers: Arrays, x: Arrays, extras: Arrays, key: Any) -> Any:
        del carriers
        return forward(program, Inputs(values, extras, key), x, keeps=False)[:2]

    def loop_forward(*primals: Any) -> Any:
        asked = [
            tuple(p.perturbed and inexact(p.value) for p in primals[n]) for n in (1, 3)
        ]  # carriers, extras
        values, carriers, x, extras, key = jax.tree.map(lambda p: p.value, primals, is_leaf=_primal)
        inputs, trained = (
            Inputs(values, extras, key),
            merge(program.trained, asked[0], program.trained),
        )
        known = replace(program, trained=tuple(trained), extras_wanted=asked[1])
        kept_shapes, inputs_kept = shapes_kept(known, inputs, x), kept_as(program.remat, x)
        known = replace(known, kept=kept_shapes, inputs_kept=inputs_kept)
        x, outs, kept = forward(known, inputs, x, keeps=True)
        static = _Static(known, asked[0])
        return (x, outs), (static, values, select(asked[0], carriers), extras, key, kept)

    def loop_backward(residuals: Any, cotangents: Any) -> Any:
        static, values, carriers, extras, key, kept = residuals
        known, inputs = static.program, Inputs(values, extras, key)
        ct_x = [_dense(ct) for ct in cotangents[0] if _inexact_tangent(ct)]
        ct_outs = [
            None if isinstance(ct, SymbolicZero) else ct
            for ct, out in zip(cotangents[1], known.outs, strict=True)
            if inexact(out)
        ]
        ct = backward(known, inputs, kept, carriers, ct_x, ct_outs)
        none = [None] * len(cotangents[0])
        return (
            None,
            merge(static.carriers_asked, ct.carriers, [None] * len(static.carriers_asked)),
            merge([_inexact_tangent(c) for c in cotangents[0]], ct.x, none),
            merge(known.extras_wanted, ct.extras, [None] * len(extras)),
            None,
        )

    loop.defvjp(loop_forward, loop_backward, symbolic_zeros=True)
    return loop


def _primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _inexact_tangent(ct: Any) -> bool:
    """Whether a cotangent is that of an inexact leaf; an integer's has the dtype float0."""
    return ct.dtype != jax.dtypes.float0


def _dense(ct: Any) -> Any:
    shape: Any = ct.aval if isinstance(ct, SymbolicZero) else None
    return ct if shape is None else jnp.zeros(shape.shape, shape.dtype)
