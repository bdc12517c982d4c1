"""The mesh that a state is partitioned over: chosen, checked, made Auto, refined.

Words: an *axis* is a mesh axis, a *dim* an array's. The *data axis* is the one ZeRO partitions
over; N is its size. Every other axis is either held by some leaf (tensor parallelism) or a
replica axis (hybrid sharding).

`jax.make_mesh` gives Explicit axes, in which unmodified models raise. An Explicit mesh passed as an
argument is therefore used with the same devices and Auto axes. Under `jax.set_mesh(mesh)` the user
has chosen to program with sharding in types, and the mesh stays Explicit.

Not here: a global mesh. Nothing in this package remembers a mesh except the layout of a state.
"""

from collections.abc import Sequence

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
    return _split(mesh, axis, prime_factors(mesh.shape[axis]))


def _split(mesh: Mesh, axis: str, sizes: Sequence[int]) -> Mesh:
    at, shape = mesh.axis_names.index(axis), mesh.devices.shape
    devices = mesh.devices.reshape(shape[:at] + tuple(sizes) + shape[at + 1 :])
    split = tuple(f"{axis}_{i}" for i in range(len(sizes)))
    names = mesh.axis_names[:at] + split + mesh.axis_names[at + 1 :]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)


def torus_mesh(mesh: Mesh, axis: str) -> Mesh:
    """On TPU, split the data axis into the axes of the torus that it runs along.

    A reduce-scatter over several axes of a torus at once is compiled to an all-reduce, at twice the
    bytes; one along each axis in turn is not. Devices keep their order, so that arrays lie on both
    meshes alike. Elsewhere, and where the order follows no axes, the mesh itself.
    """
    if mesh.devices.flat[0].platform != "tpu" or axis not in mesh.shape:
        return mesh
    at = mesh.axis_names.index(axis)
    line = np.moveaxis(mesh.devices, at, 0).reshape(mesh.shape[axis], -1)[:, 0]
    sizes = torus_sizes([(*d.coords, getattr(d, "core_on_chip", 0)) for d in line])
    return _split(mesh, axis, sizes) if len(sizes) > 1 else mesh


def torus_sizes(coords: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sizes of the axes along which a list of coordinates runs, the slowest first.

    >>> torus_sizes([(0, 0), (0, 1), (1, 0), (1, 1)])
    (2, 2)
    >>> torus_sizes([(0, 0), (0, 1), (1, 1), (1, 0)])  # a ring: no axes
    (4,)
    """
    found, sizes, step = np.asarray(coords), [], 1
    n, differs = len(coords), found != found[:1]
    while step < n:
        changed = differs[step]
        size = 1
        while size * step < n and (differs[size * step] == changed).all():
            size += 1
        if changed.sum() != 1 or n % (size * step):
            return (n,)
        sizes.insert(0, size)
        step *= size
    grid = found.reshape(*sizes, -1)
    lines = [
        np.moveaxis(grid, k, 0)[(slice(None), *[0] * (len(sizes) - 1))] for k in range(len(sizes))
    ]
    moved = sum(
        (line - found[0]).reshape(
            [-1 if k == a else 1 for a in range(len(sizes))] + [found.shape[1]]
        )
        for k, line in enumerate(lines)
    )
    return tuple(sizes) if n > 1 and (grid == found[0] + moved).all() else (n,)


def data_axes(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The axes of `mesh` that make up the data axis: itself, or its prime factors."""
    if axis in mesh.shape:
        return (axis,)
    prefix = f"{axis}_"
    return tuple(a for a in mesh.axis_names if a.startswith(prefix) and a[len(prefix) :].isdigit())


def spelled(names: Sequence[str], mesh: Mesh, axis: str) -> tuple[str, ...]:
    """Names of axes as `mesh` has them: a data axis that is split is several."""
    return tuple(a for name in names for a in (data_axes(mesh, name) if name == axis else (name,)))


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
