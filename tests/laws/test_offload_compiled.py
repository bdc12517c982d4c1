"""Law: with its state on the host, a model trains on a device that could not hold it.

Whole steps of the language model in one executable, compiled for one H100: bf16 parameters, fp32
master copies and moments on the host, gradients in bf16, clipping, four rows of 1024 tokens. The
one of 13 billion parameters is in `test_forecasts_offload`.
"""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from plan_lm import program

import zero_jax
from zero_jax import HostMemory
from zero_jax.planning.compiler import ask_compiler, lay_out
from zero_jax.planning.topology import compile_only_devices, parse_topology
from zero_jax.reporting.hlo import audit

pytestmark = [
    pytest.mark.aot,
]
CONFIGS = Path(__file__).parents[2] / "configs"
HALF = dataclasses.replace(zero_jax.Precision.bf16(), reduce=jnp.bfloat16)
GIB = 2**30


@cache
def compiled(layers, width, params):
    """Number of parameters, and the compiler's word on the step."""
    topology = parse_topology("h100:1x1")
    model = {"layers": layers, "hidden": width, "heads": width // 128, "sequence_length": 1024}
    said = [f"model.{key}={value}" for key, value in model.items()] + ["data.batch_size=4"]
    said += ["step.executor=explicit", "step.layer_loop=prefetch", "model.remat=true"]
    said += ["zero.stage=1", "model.vocab_size=50304"]
    devices = compile_only_devices(topology)
    p = program(CONFIGS / "lm_gpt2_small.toml", said, None, devices)
    options = p.options | {"precision": HALF, "offload": HostMemory(params=params)}
    p = dataclasses.replace(p, options=options)
    with pytest.warns(zero_jax.ZeroWarning, match=r"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=\d\d\d"):
        _, _, layout = lay_out(p)
        word = ask_compiler(p, topology)
    return sum(int(np.prod(p.leaf.shape)) for p in jax.tree.leaves(layout.params)), word


def test_40_billion_with_the_parameters_on_the_host():
    """Twice the depth: what is kept of the layers more is their inputs, and nothing else."""
    size, memory = compiled(50, 8192, True)
    _, half = compiled(25, 8192, True)
    assert size > 40e9
    assert memory.peak_bytes < 32 * GIB
    assert memory.host_bytes <= 1.05 * (14 + 2) * size
    inputs = 25 * 4 * 1024 * 8192 * 2
    vectors = 25 * 13 * 8192 * 2 * 2  # biases and norms stay, and so do their gradients
    assert memory.peak_bytes - half.peak_bytes <= inputs + vectors + 2**20


@pytest.mark.parametrize("machine", ["h100:1x1", "v6e:2x2"])
def test_an_update_passes_in_three_chunks_and_in_place(machine):
    """48 matrices of 4 million, Adam: a chunk is a twelfth of them, in three arrays."""
    mesh = jax.sharding.Mesh(np.array(compile_only_devices(machine)[:1]), ("data",))
    held, chunk = 48 * 1024 * 4096, 4 * 1024 * 4096 * (4 + 4 + 4)

    def create():
        params = {"w": jnp.zeros((48, 1024, 4096))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = zero_jax.init_train_state(
        create, stage=1, mesh=mesh, executor="explicit", rules={"w": "stacked"},
        precision=zero_jax.Precision.bf16(),
        offload=HostMemory(chunk_bytes=chunk, gradients="device"),
    )  # fmt: skip

    def loss(params, batch):
        return jnp.mean(jnp.square(params["w"].astype(jnp.float32))) * jnp.mean(batch)

    batch = zero_jax.shard_batch(jax.ShapeDtypeStruct((8,), jnp.float32), state)
    executable = zero_jax.make_train_step(loss).lower(state, batch).compile()
    memory = audit(executable, mesh).memory
    assert memory.host_peak_bytes <= 12 * held + 2 * chunk
    gradients = 4 * held  # in fp32, as they are reduced
    assert memory.temp_bytes <= gradients + 3 * chunk


@pytest.mark.parametrize("offload", [None, HostMemory()])
def test_nothing_is_computed_again_for_the_host_bytes(offload):
    """XLA for GPUs counts them as the device's, and is kept from making room."""
    mesh = jax.sharding.Mesh(np.array(compile_only_devices("h100:1x1")), ("data",))
    state = zero_jax.shard_train_state(
        jax.eval_shape(lambda: TrainState.create(
            apply_fn=None, params={"w": jnp.zeros((64, 64))}, tx=optax.adam(1e-3)
        )), 1 if offload else 0, mesh=mesh, offload=offload,
    )  # fmt: skip
    options = zero_jax.step_compiler_options(state)
    assert options.get("xla_disable_hlo_passes") == (offload and "rematerialization")
