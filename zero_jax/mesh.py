"""The mesh that a state is partitioned over: chosen, checked, made Auto, refined.

Words: an *axis* is a mesh axis, a *dim* an array's. The *data axis* is the one ZeRO partitions
over; N is its size. Every other axis is either held by some leaf (tensor parallelism) or a
replica axis (hybrid sharding).

`jax.make_mesh` gives Explicit axes, in which unmodified models raise. An Explicit mesh passed as an
argument is therefore used with the same devices and Auto axes. Under `jax.set_mesh(mesh)` the user
has chosen to program with sharding in types, and the mesh stays Explicit.

Not here: a global mesh. Nothing in this package remembers a mesh except the layout of a state.
"""

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh


def resolve_mesh(mesh: Mesh | None, axis: str) -> Mesh:
    """Return the mesh to lay a state out on.

    Args:
      mesh: the user's mesh, or None for all devices along `axis`.
      axis: name of the data axis.

    Raises:
      TypeError: `mesh` is not a `jax.sharding.Mesh`, or `axis` not a string.
      ValueError: `mesh` has no axis called `axis`.
    """
    if not isinstance(axis, str):
        raise TypeError(f"axis={axis!r} is a {type(axis).__name__}; expected the name of an axis.")
    if mesh is None:
        return Mesh(np.asarray(jax.devices()), (axis,), axis_types=(AxisType.Auto,))
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r} is a {type(mesh).__name__}; expected a jax.sharding.Mesh with devices."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"axis={axis!r} is not an axis of the mesh, which has {dict(mesh.shape)}; "
            "pass axis= one of those, or a mesh with that axis."
        )
    return mesh if is_explicit(mesh) and _is_current(mesh) else auto_twin(mesh)


def auto_twin(mesh: Mesh) -> Mesh:
    """The same devices and axis names, every axis Auto."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether any axis of `mesh` is Explicit (shardings are part of array types)."""
    return AxisType.Explicit in mesh.axis_types


def _is_current(mesh: Mesh) -> bool:
    return jax.sharding.get_abstract_mesh() == mesh.abstract_mesh


def refine(mesh: Mesh, axis: str) -> Mesh:
    """Split the data axis into one axis per prime factor: data=8 into data_0=2, data_1=2, data_2=2.

    Devices keep their order. On such a mesh a leaf can be cut by any factor of N and replicated
    over the rest. A whole state lies on one mesh, refined or not: an output whose sharding the
    user's jit leaves open is named after the mesh of the first argument.
    """
    at, n = mesh.axis_names.index(axis), mesh.shape[axis]
    primes = prime_factors(n)
    shape = mesh.devices.shape
    devices = mesh.devices.reshape(shape[:at] + tuple(primes) + shape[at + 1 :])
    split = tuple(f"{axis}_{i}" for i in range(len(primes)))
    names = mesh.axis_names[:at] + split + mesh.axis_names[at + 1 :]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)


def data_axes(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The axes of `mesh` that make up the data axis: itself, or its prime factors."""
    if axis in mesh.shape:
        return (axis,)
    prefix = f"{axis}_"
    return tuple(a for a in mesh.axis_names if a.startswith(prefix) and a[len(prefix) :].isdigit())


def axes_of_size(mesh: Mesh, axes: tuple[str, ...], parts: int) -> tuple[str, ...]:
    """The first of `axes` whose sizes multiply to `parts`, taking each that still divides."""
    taken, left = [], parts
    for name in axes:
        if left % mesh.shape[name] == 0 and left > 1:
            taken.append(name)
            left //= mesh.shape[name]
    assert left == 1, (mesh.shape, axes, parts)
    return tuple(taken)


def prime_factors(n: int) -> list[int]:
    """Prime factors in rising order: 12 -> [2, 2, 3]."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return factors
