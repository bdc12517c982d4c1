"""Meshes: chosen, made Auto, refined."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from zero_jax import mesh as meshes


def test_all_devices_by_default():
    mesh = meshes.resolve_mesh(None, "data")
    assert dict(mesh.shape) == {"data": 8}
    assert mesh.axis_types == (AxisType.Auto,)


def test_an_explicit_mesh_is_used_with_auto_axes():
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    twin = meshes.resolve_mesh(explicit, "data")
    assert not meshes.is_explicit(twin)
    assert twin.devices.tolist() == explicit.devices.tolist()
    with jax.set_mesh(explicit):
        assert meshes.resolve_mesh(explicit, "data") is explicit


@pytest.mark.parametrize(
    ("mesh", "axis", "error", "words"),
    [
        (None, 3, TypeError, "axis=3"),
        ("data", "data", TypeError, "mesh='data'"),
        (Mesh(np.array(jax.devices()), ("x",)), "data", ValueError, "axis='data'.*'x': 8"),
    ],
)
def test_bad_meshes(mesh, axis, error, words):
    with pytest.raises(error, match=words):
        meshes.resolve_mesh(mesh, axis)


def test_a_refined_mesh_keeps_the_order_of_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    refined = meshes.refine(mesh, "data")
    assert dict(refined.shape) == {"data_0": 2, "data_1": 2, "model": 2}
    assert refined.devices.flatten().tolist() == mesh.devices.flatten().tolist()
    assert meshes.data_axes(refined, "data") == ("data_0", "data_1")
    assert meshes.data_axes(mesh, "data") == ("data",)
    assert meshes.axes_of_size(refined, ("data_0", "data_1"), 2) == ("data_0",)


@hypothesis.given(st.integers(1, 4096))
def test_prime_factors_multiply_to_the_number(n):
    factors = meshes.prime_factors(n)
    assert np.prod(factors, initial=1) == n
    assert factors == sorted(factors)
    assert all(all(f % d for d in range(2, f)) for f in factors)
