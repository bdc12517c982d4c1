"""Mixed precision: which dtype each copy of a number has.

ZeRO (arXiv 1910.02054, section 3.1) counts 2 bytes a parameter at rest, 2 for its gradient and 12
in the optimizer state (fp32 master copy, momentum, variance). `Precision` names those dtypes. A
master copy exists only where `params` is narrower than `master`: fp32 parameters never get a second
one.

`make_train_step` carries out all of them: parameters are cast to `compute` before they are gathered
and read, gradients are reduced in `reduce`, and the loss is scaled by `loss_scale`, which fp16
needs and bf16 does not. In the user's own step (the annotated executor) `params` and `master` are
carried out; `compute` and `reduce` belong there to whoever writes the forward pass, so they are
checked when the step is traced, and a difference is warned about.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .loss_scale import DynamicScale, LossScale, StaticScale


@dataclass(frozen=True)
class Precision:
    """Dtypes of the copies of a parameter; None leaves a dtype as the state has it.

    Attributes:
      params: parameters at rest, and so what crosses the wire when they are gathered.
      compute: what `make_train_step` gathers parameters in and the loss reads; by default their
        own.
      master: the copy the optimizer updates, kept in its state.
      reduce: what `make_train_step` reduces gradients in; by default fp32, or what is wider. Sums
        over microbatches are in fp32 at least.
      loss_scale: a `StaticScale` or `DynamicScale`, for `make_train_step` only; its state lies in
        the optimizer's.

    Raises:
      ValueError: a dtype is not a real floating dtype, or `master` is not wider than `params`.
    """

    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    master: DTypeLike | None = None
    reduce: DTypeLike | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        for field in ("params", "compute", "master", "reduce"):
            value = getattr(self, field)
            if value is None:
                continue
            dtype = jnp.dtype(value)
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision({field}={dtype.name}): expected a real floating dtype, such as "
                    "bfloat16 or float32; complex, integer and key leaves keep their own."
                )
            object.__setattr__(self, field, dtype)
        if not isinstance(self.loss_scale, (StaticScale, DynamicScale, type(None))):
            raise TypeError(
                f"Precision(loss_scale={self.loss_scale!r}): expected a StaticScale or a "
                "DynamicScale."
            )
        if self.master is not None and self.params is not None:
            if _mantissa(self.master) <= _mantissa(self.params):
                raise ValueError(
                    f"Precision(params={self.params}, master={self.master}): the master copy is "
                    "not wider than the parameters; leave master=None."
                )

    @classmethod
    def bf16(cls) -> "Precision":
        """bf16 parameters, fp32 master copy: 2 + 2 + 12 bytes a parameter with Adam."""
        return cls(params=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)

    def stored(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype at rest of a parameter that arrives as `dtype`."""
        if self.params is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return jnp.dtype(self.params)

    def reduced(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype in which the gradient of a parameter is reduced that lies as `dtype`."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return jnp.dtype(self.reduce or jnp.promote_types(dtype, jnp.float32))

    def keeps_master(self, dtype: jnp.dtype) -> bool:
        """Whether a parameter that arrives as `dtype` has a master copy in the optimizer state."""
        if self.master is None or not jnp.issubdtype(dtype, jnp.floating):
            return False
        return _mantissa(self.stored(dtype)) < _mantissa(self.master)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round `x` to the values of a narrower float `dtype`, keeping its own dtype.

    A pair of converts may be removed by XLA, which is allowed excess precision; `reduce_precision`
    may not.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _mantissa(dtype: DTypeLike) -> int:
    return int(jnp.finfo(dtype).nmant)
