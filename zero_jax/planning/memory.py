"""What one device holds of the model states: closed forms, and the exact count of a layout.

ZeRO (arXiv 1910.02054, section 3.1 and figure 1) counts parameters, gradients and optimizer state
in bytes a parameter and divides by N what a stage partitions. How many bytes is a *convention*, and
texts differ: 16, 18 or 20 for Adam in mixed precision. Each is a record here with its source, and
its text is what a planner prints beside its numbers. `convention_of` counts any optax
transformation instead.

The closed forms know no leaf: elements are rounded up to a multiple of the devices once, leaves
that stay whole are not seen. `from_layout` counts leaf by leaf and is exact. On a mesh data x
replica x model, N is the data axis: replicas (hybrid sharding) hold copies, the model axis divides.

Not here: activations, gathered parameters, buffers of collectives; the compiler's word (`fit`).
"""

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from operator import index
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ..layout import Layout
from ..master_weights import init_with_master
from ..placement import Placement
from ..precision import Precision
from ..stage import parse_stage

Tree = Any
State = Literal["params", "grads", "opt_state"]


@dataclass(frozen=True)
class Convention:
    """Bytes a parameter of each model state, and who counts so. `str()` is the line to print.

    Attributes:
      name: of the convention; for the three of the literature their sum.
      params, grads, optimizer: bytes a parameter; fractions where leaves differ.
      source: where it is from.
    """

    name: str
    params: int | Fraction
    grads: int | Fraction
    optimizer: int | Fraction
    source: str

    def __str__(self) -> str:
        """The counts and the source, as `16: 2 + 2 + 12 bytes a parameter (...)`."""
        counts = " + ".join(f"{float(c):.4g}" for c in (self.params, self.grads, self.optimizer))
        return f"{self.name}: {counts} bytes a parameter ({self.source})"


ADAM_16 = Convention("16", 2, 2, 12, "ZeRO, arXiv 1910.02054, section 3.1")
"""16-bit parameters and gradients; fp32 master copy, momentum and variance."""

ADAM_18 = Convention("18", 2, 4, 12, "Hugging Face Transformers, model memory anatomy")
"""As 16, with gradients in fp32; that source counts the master copy with the weights, 6 + 4 + 8."""

ADAM_20 = Convention("20", 2, 2, 16, "ZeRO-Infinity, arXiv 2104.07857, section 3")
"""As 16, with an fp32 gradient beside the 16-bit one, partitioned as the optimizer state is."""

CONVENTIONS = (ADAM_16, ADAM_18, ADAM_20)


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one device is answerable for; those of `on_host` lie in its host's memory.

    Attributes:
      params_bytes, grads_bytes, optimizer_bytes: the three model states.
      accumulator_bytes: sum of gradients over microbatches, beside the gradients of the current
        one; lies where they lie.
      other_bytes: statistics, keys, counters, averages; known to layouts only.
      on_host: which of params, grads, opt_state are offloaded.
      away_bytes: what the layout itself has in host memory, beside all of these.
    """

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    accumulator_bytes: int = 0
    other_bytes: int = 0
    on_host: frozenset[State] = frozenset()
    away_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them, wherever they lie."""
        own = (self.params_bytes, self.grads_bytes, self.accumulator_bytes, self.optimizer_bytes)
        return sum(own) + self.other_bytes + self.away_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory for this one device; a host holds that for each of its devices."""
        sizes = {"params": self.params_bytes, "opt_state": self.optimizer_bytes}
        sizes["grads"] = self.grads_bytes + self.accumulator_bytes
        return self.away_bytes + sum(sizes[state] for state in self.on_host)

    @property
    def device_bytes(self) -> int:
        """Bytes in the device's own memory."""
        return self.total_bytes - self.host_bytes


def model_states(
    parameters: int,
    stage: int,
    devices: int,
    *,
    convention: Convention = ADAM_16,
    model_parallel: int = 1,
    frozen: float | Fraction = 0,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike = jnp.float32,
    offload: Collection[State] = (),
) -> ModelStates:
    """Count the model states on one device in closed form (arXiv 1910.02054, figure 1).

    Args:
      parameters: number of parameters of the whole model.
      stage, devices: 0 to 3; N, the size of the data axis, whose replicas do not count.
      convention: bytes a parameter.
      model_parallel: size of the model axis, which divides everything.
      frozen: share of the parameters, 0 to 1, that has no gradient and no optimizer state.
      microbatches, accumulate_dtype: with more than one, gradients are summed in that dtype; the
        sum is whole at stages 0 and 1, 1/N at 2 and 3.
      offload: which of params, grads, opt_state lie in host memory.

    Raises:
      TypeError, ValueError: an argument is not as described.

    >>> model_states(7_500_000_000, 2, 64).total_bytes  # 2 + 14/64 bytes a parameter
    16640625000
    """
    parsed, n = parse_stage(stage), whole_number("devices", devices)
    mp = whole_number("model_parallel", model_parallel)
    held = -(-whole_number("parameters", parameters) // mp)
    trained = ceil(held * (1 - share("frozen", frozen)))

    def count(elements: int, width: int | Fraction, partitioned: bool) -> int:
        parts = n if partitioned else 1
        return ceil(-(-elements // parts) * width)

    width = _sum_width(microbatches, accumulate_dtype)
    return ModelStates(
        params_bytes=count(held, convention.params, parsed.partitions_parameters),
        grads_bytes=count(trained, convention.grads, parsed.partitions_gradients),
        optimizer_bytes=count(trained, convention.optimizer, parsed.partitions_optimizer),
        accumulator_bytes=count(trained, width, parsed.partitions_gradients),
        on_host=_states(offload),
    )


def from_layout(
    layout: Layout,
    *,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike = jnp.float32,
    offload: Collection[State] = (),
) -> ModelStates:
    """Count the model states of one device leaf by leaf, with padding, without what is in files.

    Args:
      layout: from `zero_jax.layout_of`, also of an abstract state on described devices.
      microbatches, accumulate_dtype: as in `model_states`; the sum lies as the gradients do. A
        leaf with a wider dtype (complex) keeps its own.
      offload: as in `model_states`.
    """
    held, width = layout.bytes_per_device, _sum_width(microbatches, accumulate_dtype)

    def sum_bytes(gradient: Placement) -> int:
        own = gradient.leaf.dtype
        if not width or not jnp.issubdtype(own, jnp.inexact):  # integers have no gradient
            return 0
        return gradient.bytes_per_device // own.itemsize * max(own.itemsize, width)

    return ModelStates(
        params_bytes=held["params"],
        grads_bytes=held["grads"],
        optimizer_bytes=held["opt_state"],
        accumulator_bytes=sum(map(sum_bytes, jax.tree.leaves(layout.grads))),
        other_bytes=held["other"],
        on_host=_states(offload),
        away_bytes=sum(layout.host_bytes_per_device.values()),
    )


def convention_of(
    tx: optax.GradientTransformation, params: Tree, precision: Precision | None = None
) -> Convention:
    """Count the bytes a parameter of any optax transformation, by shapes alone.

    Args:
      tx: the transformation.
      params: tree of arrays or `ShapeDtypeStruct`s; factored moments depend on the true shapes.
      precision: dtype at rest and master copy; by default parameters stay as they arrive.

    Returns:
      Exact ratios: times the number of parameters they give the bytes of the whole trees, counters
      included. Gradients have the dtype of their parameter. ValueError if `params` is empty.
    """
    policy, leaves = precision or Precision(), jax.tree.leaves(params)
    optimizer = optimizer_bytes_per_parameter(tx, params, policy)
    rest = sum(prod(p.shape) * policy.stored(jnp.dtype(p.dtype)).itemsize for p in leaves)
    at_rest = Fraction(rest, sum(prod(p.shape) for p in leaves))
    return Convention("counted", at_rest, at_rest, optimizer, "shapes of tx.init")


def optimizer_bytes_per_parameter(
    tx: optax.GradientTransformation, params: Tree, precision: Precision | None = None
) -> Fraction:
    """Count the optimizer state alone, master copy included. All else as in `convention_of`."""
    elements = sum(prod(leaf.shape) for leaf in jax.tree.leaves(params))
    if not elements:
        raise ValueError("params: a tree without an element; expected parameters or their shapes.")
    policy = precision or Precision()
    state = jax.eval_shape(lambda p: init_with_master(tx, p, policy), params)
    held = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return Fraction(held, elements)


def largest_model(
    memory_bytes: int,
    stage: int,
    devices: int,
    *,
    convention: Convention = ADAM_16,
    model_parallel: int = 1,
    offload: Collection[State] = (),
) -> int:
    """Find the largest number of parameters whose model states one device can hold.

    The theory side of ZeRO's table 2 (arXiv 1910.02054); nothing is left for activations.

    Args:
      memory_bytes: memory of one device.
      stage, devices, convention, model_parallel, offload: as in `model_states`.

    Returns:
      Parameters of the whole model; 0 when not even one fits.

    Raises:
      ValueError: everything is offloaded, so that device memory sets no bound.
    """
    whole_number("memory_bytes", memory_bytes)

    def device_bytes(parameters: int) -> int:
        return model_states(
            parameters, stage, devices,
            convention=convention, model_parallel=model_parallel, offload=offload,
        ).device_bytes  # fmt: skip

    if not device_bytes(1):
        raise ValueError(
            f"offload={sorted(offload)} leaves nothing on the device, whose memory then sets no "
            "bound; leave one of them out."
        )
    above = 1
    while device_bytes(above) <= memory_bytes:
        above *= 2
    fits = above // 2
    return fits + bisect_right(range(fits + 1, above), memory_bytes, key=device_bytes)


def whole_number(name: str, value: Any) -> int:
    """Read an argument that counts: an integer of at least 1, or a letter that names it."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected an integer.")
    if value < 1:
        raise ValueError(f"{name}={value}; expected at least 1.")
    return index(value)


def share(name: str, value: float | Fraction) -> Fraction:
    """Read an argument from 0 to 1; a float is taken as the decimal that it prints as."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a number, 0 to 1.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}; expected a share from 0 to 1.")
    return Fraction(str(value))


def _sum_width(microbatches: int, dtype: DTypeLike) -> int:
    return jnp.dtype(dtype).itemsize if whole_number("microbatches", microbatches) > 1 else 0


def _states(offload: Collection[State]) -> frozenset[State]:
    if isinstance(offload, str) or not set(offload) <= set(get_args(State)):
        known = ", ".join(get_args(State))
        raise ValueError(f"offload={offload!r}; expected a set of some of {known}.")
    return frozenset(offload)
