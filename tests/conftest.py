"""Eight virtual CPU devices; warnings are errors (pyproject.toml).

Machine code is made with little effort, which takes a quarter of the time: no test looks at speed.
Partitioning, buffers, collectives and their schedule are decided before. Measured on steps for CPU,
H100 and TPU v5p: the same bytes on the wire and held, but for 200 with the older emitters of loops.

Strict dtype promotion is not set here: optax's own bias corrections need the standard one. The law
that our arithmetic needs none is in `laws/test_precision.py`.
"""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a compile goes into the newer emitters of fused loops; later jaxlibs have no other.
if version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
    )

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
    assert jax.device_count() == 8, jax.devices()


@pytest.fixture(autouse=True, scope="module")
def _forget_executables():
    """Compiled steps for eight devices are large; without this a worker grows to many GiB."""
    yield
    jax.clear_caches()
