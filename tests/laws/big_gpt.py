"""The language model of `examples/` at several sizes, compiled for the laws of bytes and memory.

At a billion parameters it has 20 layers, 2048 wide: 1,007,165,440 parameters in the blocks, which
are recomputed, and 17,829,888 that are not (embedding, positions, last norm), 1.7 % of all.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
from plan_lm import program

import zero_jax
from zero_jax.planning.topology import compile_only_devices
from zero_jax.reporting.hlo import Audit, audit

CONFIG = Path(__file__).parents[2] / "configs" / "lm_gpt2_small.toml"
HALF = zero_jax.Precision.bf16()
# Whether the compiler takes minutes to choose among equal programs changes no byte.
QUICKLY = {
    "cpu": {"xla_backend_optimization_level": 0},
    "v5p": {"optimization_level": 9},  # O0
}


@dataclass(frozen=True)
class Size:
    """Of a model; `rows` of `tokens` are what a device has of a batch."""

    layers: int
    width: int
    head_width: int = 64
    tokens: int = 64
    vocabulary: int = 256
    rows: int = 1

    @property
    def layer(self) -> int:
        """Parameters of a layer: 4 + 8 squares, and biases and norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def rest(self) -> int:
        """Parameters outside of the layers: embedding, positions, last norm."""
        return (self.vocabulary + self.tokens + 2) * self.width

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer + self.rest


BILLION = Size(layers=20, width=2048, head_width=128, tokens=512, vocabulary=8192)


@dataclass(frozen=True)
class Compiled:
    """The layout of a state and the audit of its explicit step."""

    layout: zero_jax.Layout
    audit: Audit


def compile_step(
    machine: str,
    stage: int,
    precision: zero_jax.Precision | None = HALF,
    size: Size = BILLION,
    layer_loop: str = "scan",
) -> Compiled:
    """Compile a step; each one once in a process.

    Args:
      machine: as `compile_only_devices` takes it, or "cpu".
      precision: of the state; the model computes in bfloat16 unless it is None.
      layer_loop: of the configuration.
    """
    return _compile_step(machine, stage, precision, size, layer_loop)


@cache
def _compile_step(
    machine: str, stage: int, precision: zero_jax.Precision | None, size: Size, layer_loop: str
) -> Compiled:
    devices = jax.devices() if machine == "cpu" else compile_only_devices(machine)
    devices = np.asarray(devices).reshape(-1).tolist()
    model = {"layers": size.layers, "hidden": size.width, "heads": size.width // size.head_width}
    model |= {"vocab_size": size.vocabulary, "sequence_length": size.tokens}
    model |= {"dtype": "float32" if precision is None else "bfloat16"}
    said = [f"model.{key}={value}" for key, value in model.items()]
    said += [f"step.layer_loop={layer_loop}", f"data.batch_size={size.rows * len(devices)}"]
    p = program(CONFIG, [*said, "step.executor=explicit"], None, devices)
    options = p.options | {"precision": precision}
    state = zero_jax.init_train_state(p.create, *p.arguments, stage=stage, **options)
    layout = zero_jax.layout_of(state)
    params = [math.prod(leaf.leaf.shape) for leaf in jax.tree.leaves(layout.params)]
    assert sum(params) == size.parameters
    batch = zero_jax.shard_batch(p.batch, state)
    lowered = jax.jit(p.step, donate_argnums=0).lower(state, batch)
    compiled = lowered.compile(compiler_options=QUICKLY.get(machine.partition(":")[0]))
    return Compiled(layout, audit(compiled, layout.mesh))
