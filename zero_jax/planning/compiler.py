"""The compiler's word on a program: its step compiled for a machine, which need not be here.

Memory is from the executable, bytes on the wire and exposed transfers from its audit
(`reporting.hlo`).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import flax_nnx
from ..anatomy import open_laid_out
from ..batch import shard_batch
from ..layout import Layout
from ..offload.described import describe_memories
from ..reporting.hlo import audit
from ..train_state import init_train_state, layout_of
from .program import Program
from .topology import Topology

Tree = Any


@dataclass(frozen=True)
class Compiled:
    """The compiler's word on one candidate, for one device.

    Attributes:
      argument_bytes, temp_bytes, peak_bytes, host_bytes: of its memory, and of the host's.
      wire_bytes_by_kind: kind of collective -> bytes sent in a step.
      exposed_seconds: transfers that no matmul hides; NaN where rates are not known.
      compile_seconds: what lowering and compiling took here.
    """

    argument_bytes: int
    temp_bytes: int
    peak_bytes: int
    host_bytes: int
    wire_bytes_by_kind: Mapping[str, int]
    exposed_seconds: float
    compile_seconds: float

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return sum(self.wire_bytes_by_kind.values())


def lay_out(program: Program) -> tuple[Tree, Tree, Layout]:
    """The program's state and batch, abstract and laid out, and the layout.

    Raises:
      ValueError: the rows do not divide, by the devices that share them and the microbatches.
    """
    state = _state(program)
    layout = layout_of(state)
    parts = _row_parts(layout) * program.choice.microbatches
    if program.rows % parts:
        raise ValueError(
            f"{program.name}: a batch of {program.rows} rows is computed in {parts} parts (devices "
            f"that share it, times {program.choice.microbatches} microbatches); expected a "
            "multiple of that."
        )
    return state, shard_batch(program.batch, state), layout


def leaves_on_host(state: Tree, layout: Layout) -> list[bool]:
    """For each leaf of a laid-out state whether it lies in the host's memory."""
    places = open_laid_out(state, None).close(layout.params, layout.opt_state, layout.other)
    places = nnx.split(places)[1] if flax_nnx.is_nnx(state) else places
    return [place.on_host for place in jax.tree.leaves(places)]


def row_parts(program: Program) -> int:
    """Into how many parts the program's mesh divides the rows of a batch."""
    return _row_parts(layout_of(_state(program)))


def ask_compiler(program: Program, topology: Topology) -> Compiled:
    """Compile a program's step for its devices, and audit it.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses; that for TPU does so when memory is short.
    """
    state, batch, layout = lay_out(program)
    began = time.perf_counter()
    lowered = jax.jit(program.step, donate_argnums=0).lower(state, batch)
    lowered = describe_memories(lowered, state)
    compiled = lowered.compile(compiler_options=dict(program.compiler_options(state)))
    seconds = time.perf_counter() - began
    nodes = topology.devices_per_node if topology.nodes > 1 else None
    found = audit(compiled, layout.mesh, topology.accelerator, nodes)
    assert found.memory is not None
    return Compiled(
        argument_bytes=found.memory.argument_bytes,
        temp_bytes=found.memory.temp_bytes,
        peak_bytes=found.memory.peak_bytes,
        host_bytes=found.memory.host_peak_bytes,
        wire_bytes_by_kind=found.bytes_by_kind,
        exposed_seconds=math.nan if found.exposed_seconds is None else found.exposed_seconds,
        compile_seconds=seconds,
    )


def _state(program: Program) -> Tree:
    """The state, abstract also where its devices are here and `create` needs no argument."""
    described = jax.ShapeDtypeStruct((), np.bool_)  # one such argument, and nothing is allocated

    def create(_: Any, *arguments: Any) -> Any:
        return program.create(*arguments)

    stage = program.choice.stage
    return init_train_state(create, described, *program.arguments, stage=stage, **program.options)


def _row_parts(layout: Layout) -> int:
    return math.prod(layout.mesh.shape[a] for a in layout.batch_axes)
