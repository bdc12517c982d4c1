"""`scan_layers` around a linen block that the user already has.

Where a model says

    stack = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=n)
    x, _ = stack(*args, name="blocks")(x, None)

it says instead

    x, _ = zero_jax.ScanLayers(partial(Block, *args), n, name="blocks")(x, None)

The tree of parameters is the same, so that states and checkpoints of one fit the other; initial
values are drawn from other keys. The block is an ordinary module that maps x, and what is the same
for every layer, to x or to (x, outputs), as `nn.scan` has it.

Not here: blocks that keep more than parameters (batch statistics, caches): those need `nn.scan`.
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
from flax.core import meta

from .at_use import Partitioned
from .flax_linen import is_box
from .layers import scan_layers
from .remat import Remat


class ScanLayers(nn.Module):
    """A stack of equal blocks, run by `scan_layers`.

    Attributes:
      block: makes one block: a class, or `functools.partial` of it with its fields.
      length: number of layers.
      remat_policy, checkpoint_every: as in `scan_layers`.
      rngs: names of random streams that the block draws from, dropout's, say; each layer has keys
        of its own.
      remat: as in `scan_layers`.
    """

    block: Callable[..., nn.Module]
    length: int
    remat_policy: Callable[..., Any] | None = None
    checkpoint_every: int | Literal["sqrt"] = 1
    rngs: tuple[str, ...] = ("dropout",)
    remat: Remat | None = None

    @nn.compact
    def __call__(self, x: Any, *broadcast: Any) -> Any:
        """Map x through all layers; see `scan_layers`."""
        block = self.block(parent=None)
        if self.is_initializing():
            self._draw(block, x, broadcast)
        params = jax.tree.map(_unboxed, dict(self.variables["params"]), is_leaf=is_box)
        streams = [name for name in self.rngs if self.has_rng(name)]
        keys = {name: self.make_rng(name) for name in streams}
        return scan_layers(
            _apply(block, tuple(keys)),
            params,
            x,
            *broadcast,
            rng=next(iter(keys.values()), None),
            remat=self.remat,
            remat_policy=self.remat_policy,
            checkpoint_every=self.checkpoint_every,
        )

    def _draw(self, block: nn.Module, x: Any, broadcast: Any) -> None:
        """Initial parameters, one key for each layer."""

        def draw(key: jax.Array) -> Any:
            streams = {name: key for name in ("params", *self.rngs)}
            return block.init(streams, x, *broadcast)

        keys = jax.random.split(self.make_rng("params"), self.length)
        drawn = dict(jax.vmap(draw)(keys))
        params = drawn.pop("params", {})
        if drawn:
            raise ValueError(
                f"ScanLayers: the block has a collection {next(iter(drawn))!r} beside its "
                "parameters; a layer of scan_layers keeps parameters only. Use nn.scan for it."
            )
        stacked = meta.add_axis(params, 0, {nn.PARTITION_NAME: None})
        for name, value in stacked.items():
            self.put_variable("params", name, value)


def _apply(block: nn.Module, streams: tuple[str, ...]) -> Callable[..., Any]:
    """One layer as `scan_layers` wants it; its key serves every stream."""

    def layer(params: Any, x: Any, *rest: Any) -> Any:
        broadcast, key = (rest[:-1], rest[-1]) if streams else (rest, jax.random.key(0))
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}
        return block.apply({"params": params}, x, *broadcast, rngs=rngs)

    return layer


def _unboxed(node: Any) -> Any:
    """The content of a box, but of parameters on their way: `scan_layers` gathers those."""
    return node if isinstance(node, Partitioned) else meta.unbox(node)
