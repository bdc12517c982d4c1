"""Eight virtual CPU devices, strict dtype promotion, warnings as errors (pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
    assert jax.device_count() == 8, jax.devices()
