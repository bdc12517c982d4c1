"""What one candidate will need: predicted from its trace, and on request the compiler's word.

  model states      exact, leaf by leaf, from the layout (`memory.from_layout`)
  activations       the traced step's temporaries (`liveness`), with its margin
  wire bytes        of an explicit step counted where its collectives stand (`traced_traffic`), else
                    leaf by leaf, from the layout (`communication.from_layout`); and what tensor
                    parallelism sums (`operations.Region.summed_bytes`)
  seconds           at the accelerator's peak rates: matmuls of the traced step, or the transfers if
                    those take longer (all that can be hidden is), then the state read and written
                    once by the update, through the link to the host where it lies there
                    (`host_link`). A bound from below, not a promise: a loop that prefetches
                    (`scan_layers`) comes near it, a plain scan waits for more than that

Compiled, the same program answers for itself (`compiler`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..layout import Layout
from ..mesh import data_axes
from ..offload.disk_state import copy_bytes
from ..offload_policy import HostMemory, Nvme
from ..placement import Placement
from ..reporting.schedule import transfer_seconds
from ..rules import match
from ..shortfall import devices_of_a_process, ignored_pinned_limit, warn
from . import communication, host_link, memory, traced_traffic
from .compiler import Compiled, ask_compiler, lay_out, leaves_on_host
from .liveness import HOST_MARGIN, MARGIN, MICROBATCH_MARGIN, temporaries_bytes, uses_host
from .operations import Region
from .program import Choice, Program
from .topology import Topology
from .traced import trace

Tree = Any


@dataclass(frozen=True)
class Forecast:
    """What one candidate needs, on each device.

    Attributes:
      choice: the candidate.
      topology, devices: where it runs.
      memory_bytes: what a device has for a program.
      parameters: of the model.
      params_bytes, optimizer_bytes: at rest, exact.
      grads_bytes: exact, or what of them lives at the peak, if that is less.
      other_bytes: further leaves of the state, and the batch.
      temporaries_bytes: what the predicted peak has beyond those: activations, and the rest.
      host_bytes: in the host's memory, state and what a step keeps there; for this device.
      disk_bytes: in files, both copies of the state; for this device.
      devices_per_process: devices that one host process has, and so many times its bytes.
      wire_bytes_by_kind: kind of collective -> bytes sent in a step, predicted.
      from_host_bytes, to_host_bytes: that pass between device and host in a step.
      compute_seconds, transfer_seconds, host_seconds, step_seconds: predicted; NaN where rates are
        not known. Transfers are those between devices; `host_seconds` is of the link to the host.
      compiled: the compiler's word, if it was asked and compiled the step.
      refusal: why it did not, in its words; "" if it did.
    """

    choice: Choice
    topology: str
    devices: int
    memory_bytes: int
    parameters: int
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    other_bytes: int
    temporaries_bytes: int
    host_bytes: int
    wire_bytes_by_kind: Mapping[str, int]
    compute_seconds: float
    transfer_seconds: float
    step_seconds: float
    compiled: Compiled | None = None
    refusal: str = ""
    disk_bytes: int = 0
    devices_per_process: int = 1
    from_host_bytes: int = 0
    to_host_bytes: int = 0
    host_seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds, predicted."""
        states_bytes = self.params_bytes + self.grads_bytes + self.optimizer_bytes
        return states_bytes + self.other_bytes + self.temporaries_bytes

    @property
    def process_host_bytes(self) -> int:
        """Bytes in the memory of one host process, for all of its devices."""
        return self.host_bytes * self.devices_per_process

    @property
    def missing_bytes(self) -> int:
        """By how much a device is too small: the compiler's word, else the prediction; 0 if not."""
        peak_bytes = self.compiled.peak_bytes if self.compiled else self.peak_bytes
        return max(0, peak_bytes - self.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory, and the compiler, if asked, compiled the step."""
        return not self.missing_bytes and not self.refusal

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step, predicted."""
        return sum(self.wire_bytes_by_kind.values())


def forecast(
    program: Program, topology: Topology, memory_bytes: int, *, compile: bool = False
) -> Forecast:
    """Predict what a program needs, and ask the compiler if `compile`.

    A step on a state in files is no single program. It is planned, and compiled, as the same step
    on a state in host memory: what devices do is the same, in pieces of the same size.

    Args:
      program: built for the devices of `topology`.
      topology: the machine.
      memory_bytes: of one device.
    """
    policy = program.options.get("offload")
    with ignored_pinned_limit():
        if isinstance(policy, Nvme):
            return _of_files(program, policy, topology, memory_bytes, compile)
        return _forecast(program, topology, memory_bytes, compile)


def _of_files(
    program: Program, policy: Nvme, topology: Topology, memory_bytes: int, compile: bool
) -> Forecast:
    _, _, layout = lay_out(program)
    filed_bytes = sum(layout.disk_bytes_per_device.values())
    mine = len(devices_of_a_process(layout.mesh))
    chunk_bytes = max(1, policy.buffer_bytes // (3 * mine))  # of which a box is three quarters
    host = HostMemory(policy.params, policy.gradients, chunk_bytes)
    stand_in = replace(program, options={**program.options, "offload": host})
    found = _forecast(stand_in, topology, memory_bytes, compile)
    more, said = policy.buffer_bytes // mine - filed_bytes, found.compiled
    said = said and replace(said, host_bytes=said.host_bytes + more)
    host_bytes = found.host_bytes + more
    disk_bytes = 2 * copy_bytes(layout)
    return replace(found, host_bytes=host_bytes, disk_bytes=disk_bytes, compiled=said)


def _forecast(program: Program, topology: Topology, memory_bytes: int, compile: bool) -> Forecast:
    state, batch, layout = lay_out(program)
    region = trace(program.step, state, batch, leaves_on_host(state, layout))
    platform = topology.accelerator.platform
    temporaries = temporaries_bytes(region, platform)
    params: list[Placement] = jax.tree.leaves(layout.params)
    _warn_of_what_is_not_seen(program, layout, region)
    states = memory.from_layout(layout)
    held_bytes = states.params_bytes + states.optimizer_bytes
    other_bytes = states.other_bytes + _batch_bytes(batch)
    beyond_bytes = temporaries + _margin_bytes(
        program, region, platform, held_bytes + other_bytes, temporaries
    )
    beyond_bytes += _gathered_leaf_bytes(layout, program.options) // 2
    link = host_link.from_region(region)
    waiting_bytes = max(0, states.grads_bytes - link.stacks_bytes)
    grads_bytes = min(waiting_bytes, beyond_bytes)
    traffic = _traffic(program, layout, region)
    rates, sent = topology.accelerator, traffic.total
    compute = region.matmul_flops / rates.matmul_flops
    transfer = _transfer_seconds(layout, traffic, region.summed_bytes, topology)
    passages = [p.seconds(rates.host_bandwidth) for p in (link.gradient, link.update)]
    update = 2 * held_bytes / rates.memory_bandwidth
    predicted = Forecast(
        choice=program.choice,
        topology=topology.text,
        devices=layout.mesh.size,
        memory_bytes=memory_bytes,
        parameters=sum(math.prod(p.leaf.shape) for p in params),
        params_bytes=states.params_bytes,
        grads_bytes=grads_bytes,
        optimizer_bytes=states.optimizer_bytes,
        other_bytes=other_bytes,
        temporaries_bytes=beyond_bytes - grads_bytes,
        host_bytes=states.host_bytes + link.stacks_bytes,
        wire_bytes_by_kind={
            "all-gather": sent.all_gather_bytes,
            "reduce-scatter": sent.reduce_scatter_bytes,
            "all-reduce": sent.all_reduce_bytes + region.summed_bytes,
        },
        compute_seconds=compute,
        transfer_seconds=transfer,
        step_seconds=max(compute, transfer, passages[0]) + max(update, passages[1]),
        devices_per_process=len(devices_of_a_process(layout.mesh)),
        from_host_bytes=link.fetched_bytes,
        to_host_bytes=link.sent_bytes,
        host_seconds=sum(passages),
    )
    return verified(predicted, program, topology) if compile else predicted


def _margin_bytes(
    program: Program, region: Region, platform: str, held_bytes: int, temporaries: int
) -> int:
    """What the walk misses: a share of what a device holds, or of the temporaries; see there."""
    if uses_host(region):
        return math.ceil(HOST_MARGIN[platform] * temporaries)
    margin = MARGIN[platform]
    margin += MICROBATCH_MARGIN if program.choice.microbatches > 1 else 0.0
    return math.ceil(margin * (held_bytes + temporaries))


def verified(predicted: Forecast, program: Program, topology: Topology) -> Forecast:
    """The same forecast with the compiler's word."""
    try:
        return replace(predicted, compiled=ask_compiler(program, topology))
    except jax.errors.JaxRuntimeError as error:  # out of memory on TPU, say: that is an answer
        return replace(predicted, refusal=str(error).partition("\n")[0])


def _traffic(program: Program, layout: Layout, region: Region) -> communication.Traffic:
    if region.is_explicit:
        return traced_traffic.from_region(region, layout)
    return communication.from_layout(
        layout,
        microbatches=program.choice.microbatches,
        regather="layer" if program.choice.remat else "use",
        local_sums=False,
    )


def _transfer_seconds(
    layout: Layout, traffic: communication.Traffic, summed_bytes: int, topology: Topology
) -> float:
    """Seconds of all rings of a step, one after another; tensor parallelism has its own axes."""
    rings = [(axes, wire.total_bytes) for axes, wire in traffic.by_axes.items()]
    if summed_bytes:
        model_axes = tuple(a for a in layout.mesh.axis_names if a not in layout.batch_axes)
        rings.append((model_axes, summed_bytes))
    rates, node = topology.accelerator, topology.devices_per_node
    return sum(
        transfer_seconds("ring", sent_bytes, _groups(layout.mesh, axes), rates, node)
        for axes, sent_bytes in rings
    )


def _warn_of_what_is_not_seen(program: Program, layout: Layout, region: Region) -> None:
    if region.is_explicit:
        return  # what is gathered and reduced stands in the trace
    placements: list[Placement] = jax.tree.leaves(layout.params)
    is_cut = any(p.rest != p.gathered for p in placements)
    if layout.stage.partitions_parameters and is_cut and not region.gathers:
        warn(
            f"{program.name}, stage {int(layout.stage)}: the step gathers no parameter where it is "
            "used, so XLA may move activations instead and the predicted peak is no bound. Use "
            "zero_jax.gather_at_use in the loss, or ask the compiler."
        )
    trips = region.trips_that_reduce
    if trips > program.choice.microbatches:
        warn(
            f"{program.name}, stage {int(layout.stage)}: a loop shares weights over its {trips} "
            "trips and sums their gradient in parts; XLA may reduce it in every trip, which is not "
            "in the predicted wire bytes. Stages 0 and 1 reduce once; or ask the compiler."
        )


def _batch_bytes(batch: Tree) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(batch)
    )


def _gathered_leaf_bytes(layout: Layout, options: Mapping[str, Any]) -> int:
    """The largest parameter as a layer reads it: gathered over the data axis, one of a stack."""
    placements: list[Placement] = jax.tree.leaves(layout.params)
    rules = match(options.get("rules") or {}, [p.leaf.path for p in placements])

    def unit(p: Placement) -> int:
        whole = math.prod(p.gathered.shard_shape(p.leaf.shape)) * p.leaf.dtype.itemsize
        stacked = rules.get(p.leaf.path) == "stacked"
        return whole // max(1, p.leaf.shape[0]) if stacked else whole

    return max(map(unit, placements), default=0)


def _groups(mesh: Mesh, axes: Sequence[str]) -> Sequence[Sequence[int]]:
    """Positions of the devices that meet in rings over `axes`, all other axes fixed."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    names = [name for axis in axes for name in data_axes(mesh, axis)]
    last = [mesh.axis_names.index(name) for name in names]
    first = [d for d in range(positions.ndim) if d not in last]
    size = math.prod(mesh.shape[name] for name in names)
    return positions.transpose(*first, *last).reshape(-1, size).tolist()
