"""`scan_layers` around a stack of NNX blocks that the user already has.

A stack is what `nnx.vmap` makes of a constructor, each parameter with a leading dim of layers:

    @nnx.split_rngs(splits=n)
    @nnx.vmap
    def make(rngs):
        return Block(rngs)

    blocks = make(rngs)
    x = zero_jax.scan_layers_nnx(blocks, x)       # in place of a loop by nnx.scan

Not here: blocks that keep more than parameters (batch statistics, random streams): a layer of
`scan_layers` is a function.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

from .layers import scan_layers
from .remat import Remat


def scan_layers_nnx(
    stack: nnx.Module,
    x: Any,
    *broadcast: Any,
    rng: jax.Array | None = None,
    remat: Remat | None = None,
    remat_policy: Callable[..., Any] | None = None,
    checkpoint_every: int | Literal["sqrt"] = 1,
) -> Any:
    """Run `x = block(x, *broadcast)` for each block of a stack; see `scan_layers`.

    Args:
      stack: a module whose parameters all have a leading dim of layers.
      x, broadcast, remat, remat_policy, checkpoint_every: as in `scan_layers`.
      rng: a key; each block is called with one of its own after `broadcast`.

    Raises:
      ValueError: the stack has variables that are no parameters, or no parameters.
    """
    graph, params, others = nnx.split(stack, nnx.Param, ...)
    left = nnx.to_flat_state(others)
    if left:
        path, variable = left[0]
        raise ValueError(
            f"stack: {'/'.join(map(str, path))} is a {type(variable).__name__}; the blocks of "
            "scan_layers_nnx keep parameters only. Use nnx.scan, or pass keys by rng=."
        )
    flat = nnx.to_flat_state(params)
    if not flat:
        raise ValueError(
            f"stack: the {type(stack).__name__} has no parameters, so it has no number of layers; "
            "expected blocks made by nnx.vmap, each nnx.Param with a leading dim of layers."
        )
    paths, variables = zip(*flat, strict=True)

    def layer(values: list[Any], x: Any, *rest: Any) -> Any:
        whole = [v.replace(value) for v, value in zip(variables, values, strict=True)]
        state = nnx.from_flat_state(list(zip(paths, whole, strict=True)))
        return nnx.merge(graph, state, others)(x, *rest)

    return scan_layers(
        layer,
        [v.get_raw_value() for v in variables],
        x,
        *broadcast,
        rng=rng,
        remat=remat,
        remat_policy=remat_policy,
        checkpoint_every=checkpoint_every,
    )
