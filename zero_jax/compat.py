"""What differs between the versions of JAX that this package runs on, under one name each."""

from typing import Any

from jax.experimental import compute_on as _module

host_computation: Any = getattr(_module, "compute_on2", None) or _module.compute_on
"""`jax.experimental.compute_on.compute_on` of a function, which jax 0.10 calls `compute_on2`."""
