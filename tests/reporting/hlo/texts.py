"""Reading the committed texts: by name, in every version of jax that there is one of."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

F32, BF16 = 4, 2
"""Bytes per element."""

FLAT = {"data": 8}
HERE = Path(__file__).parent


def read(name):
    return (HERE / f"{name}.txt").read_text()


def versions(*names):
    """Run a test on each text of these programs; a text is named TARGET_PROGRAM_JAX."""
    found = [path.stem for name in names for path in sorted(HERE.glob(f"{name}_0.*.txt"))]
    missing = [name for name in names if not any(f.startswith(f"{name}_0.") for f in found)]
    assert not missing, missing
    return pytest.mark.parametrize("name", found)


def mesh_of(axes):
    """The eight devices here, in their order."""
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def sends(records):
    """(kind, bytes of one execution, trips) of each record, sorted."""
    return sorted((c.kind, c.bytes_on_wire, c.trips) for c in records)
