"""The two memories an array may be in, inside a jitted step: the device's and the host's.

JAX types an array by its memory, and refuses operations between the two; each device moves its own
part. Transfers are copies that the compilers make asynchronous; a slice that is read from, or
written into, an array on the host moves alone.

Not here: where a leaf lies between steps (`placement`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .compat import host_computation

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def to_device(x: jax.Array) -> jax.Array:
    """Fetch an array from the host."""
    return jax.device_put(x, DEVICE)


def to_host(x: jax.Array) -> jax.Array:
    """Send an array to the host."""
    return jax.device_put(x, HOST)


def is_host(x: jax.Array) -> bool:
    """Whether an array is typed as one on the host."""
    return jax.typeof(x).memory_space == HOST


def as_host(x: jax.Array) -> jax.Array:
    """An array that lies on the host, typed so; nothing is moved.

    Devices that are only compiled for may have no memories in JAX, and arrays on them no such type.
    """
    return x if is_host(x) else to_host(x)


def zeros_on_host(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros on the host, to be written piece by piece.

    Where the first thing that happens to them is that a slice is written, in a loop or before it,
    compilers allocate them on the host. Zeros that are sent there are made on the device first.
    """
    return _zeros.bind(shape=tuple(shape), dtype=jnp.dtype(dtype))


def barrier(tree: Any) -> Any:
    """`tree`, each array after all of them are there; what lies on the host passes by.

    Zeros on the host are allocated there only where the compiler sees from them to the slice that
    is written.
    """
    leaves, structure = jax.tree.flatten(tree)
    passed = iter(jax.lax.optimization_barrier([leaf for leaf in leaves if not is_host(leaf)]))
    return structure.unflatten(leaf if is_host(leaf) else next(passed) for leaf in leaves)


def zeros(shape: tuple[int, ...], dtype: Any, *, on_host: bool) -> jax.Array:
    """Zeros to be written piece by piece, in either memory."""
    return zeros_on_host(shape, dtype) if on_host else jnp.zeros(shape, dtype)


def compute_on_host(
    function: Callable[..., list[Any]], memories: Sequence[Any]
) -> Callable[..., list[Any]]:
    """`function`, computed by the host's processor; each process computes its devices' parts.

    Args:
      function: of trees of arrays; returns a list of arrays. It meets all of them as if they were
        on the device, so that constants of its own can be among them.
      memories: where each result is wanted, `HOST` or `DEVICE`.

    Returns:
      A function of the same trees, arrays on the host.
    """

    def untyped(*args: Any) -> list[Any]:
        return function(*jax.tree.map(_forget_memory.bind, args))

    spaces = list(memories)
    return host_computation(untyped, compute_type="device_host", out_memory_spaces=spaces)


_forget_memory = Primitive("forget_memory")
_forget_memory.def_abstract_eval(lambda x: x.update(memory_space=DEVICE))
mlir.register_lowering(_forget_memory, lambda _, x: [x])

_zeros = Primitive("zeros_on_host")
_zeros.def_impl(lambda **how: jax.jit(lambda: _zeros.bind(**how))())  # outside of any jit
_zeros.def_abstract_eval(lambda *, shape, dtype: ShapedArray(shape, dtype, memory_space=HOST))
mlir.register_lowering(
    _zeros,
    mlir.lower_fun(lambda *, shape, dtype: jnp.zeros(shape, dtype), multiple_results=False),
)
