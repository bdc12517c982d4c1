"""A parameter as the loss of the explicit step meets it: gathered where it is read.

Stage 3 gathers a parameter just before a layer uses it and again where the layer is recomputed, and
reduce-scatters its gradient as soon as it is known (ZeRO, arXiv 1910.02054, sections 5.2, 5.3 and
7.2). Inside `shard_map` both are written down in one place, `Wire`, and the parameter travels
through the user's model as a `Partitioned`:

  value     this device's piece at rest, or the whole parameter below stage 3
  carrier   zeros, shaped and typed as this device's piece of the *gradient*; None for a frozen
            parameter. Its value is never read. The step differentiates with respect to carriers, so
            that a gradient's dtype and cut depend on nothing but the `Wire`: fp32 for bf16
            parameters, 1/N for whole ones
  wire      how the first is gathered and the second reduced

It is a flax metadata box: linen unboxes it at every `self.param`, also inside `nn.scan`, `nn.remat`
and `nn.vmap`. NNX reads it through `at_use_nnx`, the layer loop through `layers`, and a loss that
computes with it as with an array through `array_like`.

Not here: which parameters can be handed over like this (`readings`), when to sum microbatches
(`gradients`).
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta
from jax.typing import DTypeLike

from .array_like import ArrayLike
from .collectives import Cut, all_reduce, gather, reduce_scatter
from .memories import to_device, to_host, zeros


@dataclass(frozen=True)
class Wire:
    """How one parameter and its gradient cross the wire, inside `shard_map`.

    Attributes:
      path: of the parameter.
      rest: cut of the parameter as it lies.
      grad: cut of its gradient.
      compute: dtype the model reads it in, and in which it is gathered.
      reduce: dtype its gradient is reduced in; sums over microbatches are wider.
      scatters_at_use: the gradient is scattered in the backward pass, where it arises; else it
        stays whole, this device's summand, until `finish`.
      summed_at_use: axes it is summed over there, beside those of `grad`.
      summed_late: axes it is summed over in `finish`, once a step.
      on_host: the parameter lies in host memory, and is fetched before it is gathered.
      grad_on_host: the gradient is sent to host memory where it is reduced, in the backward pass.
    """

    path: str
    rest: Cut
    grad: Cut
    compute: DTypeLike
    reduce: DTypeLike
    scatters_at_use: bool
    summed_at_use: tuple[str, ...] = ()
    summed_late: tuple[str, ...] = ()
    on_host: bool = False
    grad_on_host: bool = False

    def gather(self, value: jax.Array) -> jax.Array:
        """The logical parameter in the compute dtype: cast first, then gathered."""
        return gather_at_use(value, self.rest, self.compute, self.on_host)

    def reduce_gradient(self, g: jax.Array) -> jax.Array:
        """What becomes of a gradient where it arises: an array of the carrier's shape."""
        g = g.astype(self.reduce)
        if not self.scatters_at_use:
            return g
        g = all_reduce(reduce_scatter(g, self.grad), self.summed_at_use)
        return to_host(g) if self.grad_on_host else g

    def finish(self, g: jax.Array) -> jax.Array:
        """The rest of the reduction, once all microbatches are summed: this device's piece."""
        scatters = not self.scatters_at_use and self.grad.dim is not None
        if scatters or self.summed_late:
            g = g.astype(self.reduce)
        return all_reduce(reduce_scatter(g, self.grad) if scatters else g, self.summed_late)

    def carrier(self) -> jax.Array:
        """Zeros of the shape and dtype in which the gradient leaves the backward pass."""
        shape = self.grad.piece_shape if self.scatters_at_use else self.grad.shape
        return zeros(shape, self.reduce, on_host=self.grad_on_host)

    def layer(self) -> "Wire":
        """The wire of one layer of a stack."""
        try:
            rest, grad = self.rest.layer(), self.grad.layer()
        except ValueError as error:
            raise ValueError(f"params/{self.path}: {error}") from None
        return replace(self, rest=rest, grad=grad)

    def gathered(self) -> "Wire":
        """The wire of the same parameter once it is gathered and cast."""
        return replace(self, rest=self.rest.whole(), on_host=False)


READING = ("gather_at_use", "read_stack")
"""Names of the jitted functions that read a parameter; `readings` looks for them in traces."""


@partial(jax.jit, static_argnums=(1, 2, 3))
def gather_at_use(value: jax.Array, cut: Cut, dtype: DTypeLike, on_host: bool) -> jax.Array:
    """Cast a piece and gather it."""
    value = to_device(value) if on_host else value
    return gather(value.astype(dtype), cut)


@jax.jit
def read_stack(value: jax.Array) -> jax.Array:
    """A stack that is going to be read layer by layer; `readings` looks for it by its name."""
    return jax.lax.stop_gradient(value)


class Partitioned(ArrayLike, meta.AxisMetadata[Any], struct.PyTreeNode, eq=False):
    """A parameter on its way through a model; see the module docstring."""

    value: Any
    carrier: Any
    wire: Wire = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The whole parameter in the compute dtype; its gradient goes to the carrier.

        Raises:
          ValueError: a scan or vmap took away a dim that is no dim of layers.
        """
        wire = self.wire_here()
        if self.carrier is None:
            return jax.lax.stop_gradient(wire.gather(self.value))
        return _cross(wire, self.value, self.carrier)

    def wire_here(self) -> Wire:
        """The wire, less the layers that a scan or vmap has taken away from the stack."""
        wire, shape = self.wire, jnp.shape(self.value)
        while len(wire.rest.piece_shape) > len(shape):
            wire = wire.layer()
        if wire.rest.piece_shape != shape:
            raise ValueError(
                f"params/{wire.path}: a piece of shape {wire.rest.piece_shape} came as {shape}; "
                "parameters are gathered where they are read only in loops over their first dim."
            )
        return wire

    def replace_boxed(self, val: Any) -> Any:
        """The same box around another value; flax asks for it."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Nothing: `wire_here` counts dims."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Nothing: `wire_here` counts dims."""
        del index, params
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.wire.rest.shape

    @property
    def ndim(self) -> int:
        """Number of logical dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype that the model reads."""
        return jnp.dtype(self.wire.compute)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross(wire: Wire, value: jax.Array, carrier: jax.Array) -> jax.Array:
    del carrier
    return wire.gather(value)


def _cross_forward(wire: Wire, value: jax.Array, carrier: jax.Array) -> Any:
    del carrier
    return wire.gather(value), None  # spelled out: a policy of remat sees the gather (`remat`)


def _cross_backward(wire: Wire, _: None, g: jax.Array) -> Any:
    return None, wire.reduce_gradient(g)


_cross.defvjp(_cross_forward, _cross_backward)
