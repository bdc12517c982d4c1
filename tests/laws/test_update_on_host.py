"""Law: an update that the host computes trains as one on the device, bit for bit.

Options of the compiler as in `test_offload`. Leaves pass in many boxes, and whole as GPUs need it.
Compiled for H100 and TPU v5p, gradients and new parameters cross the link, and nothing else.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws.offload_net import memories
from laws.offload_runs import clipped_then_skipped, run, same_bits

import zero_jax
from zero_jax import HostMemory
from zero_jax.planning.topology import compile_only_devices
from zero_jax.reporting.hlo import audit
from zero_jax.reporting.hlo_text import parse_module

ON_HOST = HostMemory(chunk_bytes=1600, update_on="host")
WHOLE = HostMemory(chunk_bytes=2**20, update_on="host")
PARAMS_TOO = HostMemory(params=True, chunk_bytes=1600, update_on="host")


@pytest.mark.parametrize(
    ("optimizer", "stage", "executor", "policy", "microbatches", "half"),
    [
        ("adamw", 1, "explicit", ON_HOST, 1, False),
        ("adamw", 1, "explicit", ON_HOST, 3, True),
        ("adamw", 3, "explicit", PARAMS_TOO, 1, True),
        ("adamw", 1, "explicit", PARAMS_TOO, 3, True),
        ("adamw", 2, "annotated", ON_HOST, 1, False),
        ("lion", 1, "explicit", WHOLE, 1, False),
        ("sgd momentum", 2, "annotated", ON_HOST, 1, False),
        ("MultiSteps", 2, "explicit", WHOLE, 1, False),
        ("masked", 3, "explicit", ON_HOST, 1, False),
    ],
)
def test_the_update_on_the_host(optimizer, stage, executor, policy, microbatches, half):
    """Every state is where it was, and `half` keeps master copies."""
    found = run(optimizer, stage, executor, policy, microbatches, half)
    same_bits(found, run(optimizer, stage, executor, None, microbatches, half))


def test_clipping_a_loss_scale_and_a_skipped_step():
    """The factor and the verdict come from the device; a step with an inf changes no bit."""
    found = []
    for policy in (None, dataclasses.replace(ON_HOST, gradients="device")):
        scale = zero_jax.DynamicScale(initial=2.0**10, hysteresis=1)
        after = clipped_then_skipped(policy, zero_jax.Precision(loss_scale=scale))
        assert after.opt_state.scale.scale == 2.0**9
        assert policy is None or memories(after.opt_state)[True] == {"pinned_host"}
        found.append(after.params)
    same_bits(*found)


LAYERS, ROWS_OF, COLUMNS = 48, 1024, 4096
HELD = LAYERS * ROWS_OF * COLUMNS
CHUNK = 4 * ROWS_OF * COLUMNS * (4 + 4 + 4)


def compiled(machine, n, update_on):
    """A step on two stacks of matrices in bf16, gradients in bf16, Adam, clipped."""
    mesh = jax.sharding.Mesh(np.array(compile_only_devices(machine)[:n]), ("data",))

    def create():
        params = {name: jnp.zeros((LAYERS // 2, ROWS_OF, COLUMNS)) for name in "vw"}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    state = zero_jax.init_train_state(
        create, stage=2, mesh=mesh, executor="explicit", rules={"?": "stacked"},
        precision=dataclasses.replace(zero_jax.Precision.bf16(), reduce=jnp.bfloat16),
        offload=HostMemory(chunk_bytes=CHUNK, gradients="device", update_on=update_on),
    )  # fmt: skip

    def loss(params, batch):
        squares = [jnp.mean(jnp.square(w.astype(jnp.float32))) for w in params.values()]
        return sum(squares) * jnp.mean(batch)

    batch = zero_jax.shard_batch(jax.ShapeDtypeStruct((8,), jnp.float32), state)
    executable = zero_jax.make_train_step(loss, clip_norm=1.0).lower(state, batch).compile()
    return executable.as_text(), audit(executable, mesh).memory


def crossing(text):
    """Element types of arrays that an instruction on the device takes from or puts on the host.

    Memory 5 is the host's. Instructions that only name arrays are passed over, and what stands
    inside of a fusion or runs on the host itself.
    """
    module, found = parse_module(text), []
    fused = {name for c in module.computations.values() for i in c.instructions
             if "fusion" in i.opcode or i.opcode == "call" for name in i.called}  # fmt: skip
    hosted = set(re.findall(r"called_computations=\{%([^\s}]+)\}", text))
    naming = {"tuple", "get-tuple-element", "parameter", "while", "bitcast", "opt-barrier"}
    for name, computation in module.computations.items():
        if name in fused | hosted:
            continue
        for i in computation.instructions:
            if i.opcode in naming or i.opcode.endswith("-done"):
                continue
            shapes = [i.shape]
            if not i.opcode.endswith("-start"):
                shapes += [computation.by_name[o].shape for o in i.operands]
            arrays = re.findall(r"([a-z]+\d+)\[([\d,]+)\](\{[^}]*\})?", " ".join(shapes))
            large = [(dtype, "S(5)" in at) for dtype, dims, at in arrays if str(COLUMNS) in dims]
            if {on_host for _, on_host in large} == {True, False}:
                found += [dtype for dtype, on_host in large if not on_host]
    return found


@pytest.mark.aot
@pytest.mark.parametrize("n", [1, 4])
def test_moments_and_master_copies_never_leave(n):
    """Of one device beside the gradients there is a chunk, of its host nothing more."""
    text, memory = compiled("v5p:2x2x1", n, "host")
    assert set(crossing(text)) == {"bf16"}
    assert memory.host_peak_bytes <= 12 * HELD // n + 2**20
    assert n > 1 or memory.temp_bytes <= 2 * HELD + CHUNK


@pytest.mark.aot
def test_gpus_write_beside_the_state():
    """The host holds it twice, and the gradients; the device nothing but those, and a little."""
    with pytest.warns(zero_jax.ZeroWarning, match="its memory holds 2.25 GiB a device more"):
        text, memory = compiled("h100:1x1", 1, "host")
    assert set(crossing(text)) == {"bf16"}
    assert memory.host_peak_bytes <= (2 * 12 + 2) * HELD + 2**20
    assert memory.temp_bytes <= 2 * HELD + CHUNK


@pytest.mark.aot
def test_a_state_that_passes_through_the_device_crosses():
    """What the law above would see."""
    text, _ = compiled("h100:1x1", 1, "device")
    assert "f32" in crossing(text)
