"""Parameters of a linen model, gathered where the model reads them (ZeRO stage 3).

Stage 3 gathers a parameter just before a layer uses it, again in the backward pass where the layer
is recomputed, and reduce-scatters its gradient (ZeRO, arXiv 1910.02054, sections 5.3 and 7.2.2). A
layout alone does not say so: left to itself, XLA's partitioner may move activations instead, at
several times the memory. Here the gather is written down, for a model that knows nothing of it:
flax unboxes every metadata box when a module reads the parameter, also inside `nn.scan` and
`nn.remat`, and the boxes made here unbox to the gathered array.

The gather is a constraint whose transpose is another constraint, back to the parameter's own
partition: a plain constraint would make the gradient whole too.

`gather_params` gathers all of them at once, for any model: what evaluation needs.

Not here: collectives by name (`at_use`), prefetching the next layer (`layers`), NNX models at use.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import struct
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec

from .collectives import constrain, stripped
from .flax_linen import is_box
from .memories import is_host, to_device
from .placement import Placement
from .train_state import layout_of

Params = Any


def gather_at_use(params: Params, state: Any) -> Params:
    """Return `params` such that a linen model gathers each one where it reads it.

    For use inside the user's loss, at any stage; parameters that lie whole are left as they are::

        def loss_fn(params):
            logits = state.apply_fn({"params": zero_jax.gather_at_use(params, state)}, batch["x"])

    Without `nn.remat` gathered parameters are kept for the backward pass, as any value is that the
    backward pass reads; with it they are gathered again.

    Args:
      params: the parameters, as the state has them.
      state: the state they are from, traced or not, or its wrapped `tx`.

    Returns:
      A tree for a linen model's `apply`. Values and gradients are those of `params`.

    Raises:
      TypeError: `state` carries no layout.
      ValueError: `params` is not the tree that was laid out.

    Source: ZeRO, arXiv 1910.02054, section 5.3.
    """
    placements = layout_of(state).params
    given, laid_out = (jax.tree.structure(tree, is_leaf=is_box) for tree in (params, placements))
    if given != laid_out:
        raise ValueError(
            f"params: they have the structure {given}; the state was laid out with {laid_out}. "
            "Pass the whole tree of parameters that the state holds."
        )
    return jax.tree.map(_boxed, params, placements, is_leaf=is_box)


def gather_params(params: Params, state: Any) -> Params:
    """Return all parameters whole, in their logical shapes; for evaluation, inside jit.

    Args:
      params: the parameters, as a state from any executor has them.
      state: the state they are from, traced or not, or its wrapped `tx`.

    Raises:
      TypeError, ValueError: as `gather_at_use`.
    """
    boxed = gather_at_use(params, state)
    return jax.tree.map(
        lambda x: x.unbox() if isinstance(x, _GatheredAtUse) else x, boxed, is_leaf=is_box
    )


def _boxed(param: Any, placement: Any) -> Any:
    """One parameter in its box. A box it already has names the same axes, and is replaced."""
    array, lies = meta.unbox(param), meta.unbox(placement)
    assert isinstance(lies, Placement)
    if not lies.on_host and (lies.rest == lies.gathered or lies.partition.form == "whole"):
        return param
    at_rest = lies.partition.rest_shape
    gathered = NamedSharding(lies.mesh, lies.gathered.spec)
    return _GatheredAtUse(
        array, _full(gathered, at_rest), _full(lies.landing, at_rest), lies.leaf.shape
    )


def _full(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The same sharding, its spec written to the full length."""
    missing = (None,) * (len(shape) - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *missing))


class _GatheredAtUse(meta.AxisMetadata[Any], struct.PyTreeNode):
    """A partitioned parameter that unboxes to the gathered one, of a logical `shape`.

    One that lies on the host is fetched first, of a stack the layer at hand. Specs have an entry
    per dim at rest, where the parameter may be padded or flattened.
    """

    value: Any
    gathered: NamedSharding = struct.field(pytree_node=False)
    partitioned: NamedSharding = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        here = to_device(self.value) if is_host(self.value) else self.value
        whole: Any = _gather(here, self.gathered, self.partitioned)
        return stripped(whole, self.shape)

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A dim more, which lies whole: one that a vmap or scan puts back."""
        del params
        shape = self.shape[:index] + (1,) + self.shape[index:]
        return self._edited(lambda spec: spec[:index] + (None,) + spec[index:], shape)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A dim less: the one that a vmap or scan goes through."""
        del params
        shape = self.shape[:index] + self.shape[index + 1 :]
        return self._edited(lambda spec: spec[:index] + spec[index + 1 :], shape)

    def _edited(
        self, edit: Callable[[tuple[Any, ...]], tuple[Any, ...]], shape: tuple[int, ...]
    ) -> Any:
        gathered, partitioned = (
            NamedSharding(s.mesh, PartitionSpec(*edit(tuple(s.spec))))
            for s in (self.gathered, self.partitioned)
        )
        return self.replace(gathered=gathered, partitioned=partitioned, shape=shape)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, gathered: NamedSharding, partitioned: NamedSharding) -> jax.Array:
    del partitioned
    return constrain(x, gathered)


def _gather_forward(x: jax.Array, gathered: NamedSharding, partitioned: NamedSharding) -> Any:
    return _gather(x, gathered, partitioned), None


def _gather_backward(gathered: NamedSharding, partitioned: NamedSharding, _: None, g: Any) -> Any:
    del gathered
    return (constrain(g, partitioned),)


_gather.defvjp(_gather_forward, _gather_backward)
