"""Typed PRNG keys as the bits they are, for what stores arrays; other dtypes that files have not.

A key array of shape S has a dtype that no file format knows; its bits are an array of uint32 whose
shape is S and one dim more.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from .placement import Placement


def is_key(x: Any) -> bool:
    """Whether an array, or a description of one, is of typed keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def implementation(x: Any) -> str:
    """The name of the generator that keys belong to."""
    return x.dtype._impl.name


def place_of_bits(place: Placement) -> Placement:
    """Where the bits of a leaf lie; any other leaf's is its own."""
    if not is_key(place.leaf):
        return place
    key = jax.ShapeDtypeStruct(place.leaf.shape, place.leaf.dtype)
    data = jax.eval_shape(jax.random.key_data, key)
    leaf = replace(place.leaf, shape=data.shape, dtype=data.dtype)
    return replace(place, leaf=leaf, partition=replace(place.partition, rest_shape=data.shape))


def bits_of(array: jax.Array) -> jax.Array:
    """Keys as their bits; any other array as it is."""
    return jax.random.key_data(array) if is_key(array) else array


def of_bits(array: jax.Array, leaf: Any) -> jax.Array:
    """The inverse, for a leaf of this dtype."""
    if not is_key(leaf):
        return array
    return jax.random.wrap_key_data(array, impl=implementation(leaf))


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """How files have a dtype: as unsigned integers where tensorstore has none such."""
    try:
        return tensorstore.dtype(dtype.name).numpy_dtype
    except (TypeError, ValueError):
        return np.dtype(f"uint{8 * dtype.itemsize}")
