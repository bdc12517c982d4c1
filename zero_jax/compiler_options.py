"""What the compiler has to be told so that collectives run behind matrix products.

`layers` writes a loop in which every collective may run while a layer computes. Whether it does is
the compiler's choice, and its defaults differ by machine. Found by compiling stacks of GPT blocks
(2 x 2048 tokens on each device, layers as in models of 13 and 175 billion parameters) for
`h100:8x8` and `a100-80:64x8`: with these options all bytes moved inside of the loops have products
between start and done. Stacks as deep as those models were compiled with jax 0.10.2, nine layers of
the smaller one also with 0.12. Other GPUs accept the options; their schedules were not judged.

An option that a compiler does not know is an error there, so each is given only where it was tried.

On TPUs reductions stayed synchronous with all that was tried on v5p and v6e; so did gathers on v5p.
v5e makes some gathers asynchronous by itself.

Not here: options that change numbers.
"""

from typing import Any

# Off by default before Hopper: without it reductions start and end with nothing between.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}

# Collectives that wait for nothing from each other are joined up to so many bytes: with those of a
# layer, one gather and one reduction for it. Never more, or a model without a loop would have all
# its layers gathered at once.
_JOINED_UP_TO = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)

# Before Hopper the scheduler has no model of how long a transfer takes, and starts it too late. Let
# it start all at once, a gather beside a reduction: 13.8 % of a step were exposed, then 0.6 %. It
# costs memory (the reduction's fp32 gradients lie beside the gathered layer), and Hopper, whose
# transfers are modelled, does without: 1.0 % either way.
_EAGER = {
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
_MODELLED = ("H100", "H200", "GH200")

# The SparseCores of v6e move what is gathered while the TensorCore multiplies (seen with those of
# reductions set as well). Not for reductions, which a user of them found to be wrong on some
# versions.
_SPARSE_CORE_GATHERS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disable_megacore_partitioning": "true",
}


# XLA recomputes where it believes that memory is short, and for GPUs it counts the host's memory as
# the device's: 2.0 % more products at 13 billion parameters on one H100, 9.3 % at 40 billion, for
# nothing. Without the pass there are none, and peaks are 28.3 and 11.1 GiB, not 28.3 and 11.3.
_NOTHING_AGAIN = {"xla_disable_hlo_passes": "rematerialization"}


def compiler_options(
    device: Any, layer_bytes: int | None = None, uses_host: bool = False
) -> dict[str, Any]:
    """Return what `jax.jit(..., compiler_options=)` should be told for a device.

    Args:
      device: a `jax.Device`, also one that is only compiled for; its `platform` and `device_kind`
        are read.
      layer_bytes: bytes of the largest layer of a stack as it crosses the wire, whole, in the wider
        of the dtypes of gathers and reductions; None where there is no stack.
      uses_host: whether a part of the state lies in host memory.

    Returns:
      Options by name; none for a device that needs none.

    >>> import jax
    >>> compiler_options(jax.devices("cpu")[0])
    {}
    """
    if device.platform in ("gpu", "cuda"):
        modelled = any(name in device.device_kind for name in _MODELLED)
        joined = {} if layer_bytes is None else dict.fromkeys(_JOINED_UP_TO, layer_bytes)
        host = _NOTHING_AGAIN if uses_host else {}
        return _GPU | joined | host | ({} if modelled else _EAGER)
    if device.platform == "tpu" and device.device_kind == "TPU v6 lite":
        return dict(_SPARSE_CORE_GATHERS)
    return {}
