"""Eight virtual CPU devices; warnings are errors (pyproject.toml).

Strict dtype promotion is not set here: optax's own bias corrections need the standard one. The law
that our arithmetic needs none is in `laws/test_precision.py`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
    assert jax.device_count() == 8, jax.devices()


@pytest.fixture(autouse=True, scope="module")
def _forget_executables():
    """Compiled steps for eight devices are large; without this a worker grows to many GiB."""
    yield
    jax.clear_caches()
