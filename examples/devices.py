"""The devices that the examples run on."""

import os

import jax


def make_virtual_devices(count: int = 8) -> None:
    """Let a machine without an accelerator pass for `count` devices; call before the first array.

    The option concerns the CPU backend only, which jax chooses where it finds no accelerator: so
    nothing has to be detected, and on a GPU or TPU machine nothing changes. Whoever has chosen a
    number already, by the option or by XLA_FLAGS, is left alone.
    """
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and jax.config.values["jax_num_cpu_devices"] < 1:
        jax.config.update("jax_num_cpu_devices", count)
