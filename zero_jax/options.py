"""What every entry point takes, checked before anything is read or compiled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from .choices import check_choice
from .mesh import resolve_mesh
from .offload_policy import HostMemory, Nvme, Offload
from .precision import Precision
from .rules import Rule
from .stage import Stage, parse_stage

Executor = Literal["annotated", "explicit"]

DEFAULT_MIN_SIZE = 8
"""Leaves with fewer elements stay whole. Eight fp32 numbers are 32 bytes, the smallest piece of GPU
memory that is ever moved: cutting less saves nothing that an allocator could give to somebody else,
and costs an entry in a collective. Larger leaves are all cut, since the promise is 1/N of the whole
state; raise it (1e5, say) where many small gathers show up in a profile."""


@dataclass(frozen=True)
class Options:
    """A stage, where to partition, and how. See `shard_train_state` for each."""

    stage: Stage
    mesh: Mesh
    axis: str = "data"
    min_size: int = DEFAULT_MIN_SIZE
    precision: Precision = field(default_factory=Precision)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    executor: Executor = "annotated"
    offload: Offload | None = None

    @property
    def delayed(self) -> bool:
        """Whether the optimizer's update is one step late."""
        return isinstance(self.offload, HostMemory) and self.offload.delayed


def check_options(
    state: Any,
    stage: int,
    mesh: Mesh | None,
    axis: str,
    min_size: int,
    precision: Precision | None,
    rules: Mapping[str, Rule] | None,
    executor: Executor,
    offload: Offload | None = None,
) -> Options:
    """Read the arguments of an entry point.

    Args:
      state: the state, or None; with mesh=None its own mesh is used where it has one.
      stage, mesh, axis, min_size, precision, rules, executor, offload: as in `shard_train_state`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    parsed = parse_stage(stage)
    if isinstance(min_size, bool) or not isinstance(min_size, int):
        raise TypeError(
            f"min_size={min_size!r} is a {type(min_size).__name__}; expected a number of elements."
        )
    if min_size < 0:
        raise ValueError(f"min_size={min_size}; expected 0 or more elements.")
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(
            f"precision={precision!r} is a {type(precision).__name__}; expected a "
            "zero_jax.Precision, such as Precision.bf16()."
        )
    check_choice("executor", executor, Executor)
    if offload is not None and not isinstance(offload, Offload):
        raise TypeError(
            f"offload={offload!r} is a {type(offload).__name__}; expected a zero_jax.HostMemory, "
            "such as HostMemory(), a zero_jax.Nvme, or None."
        )
    resolved = resolve_mesh(mesh if mesh is not None else _found_mesh(state, axis), axis)
    if offload is not None:
        if isinstance(offload, Nvme) and executor != "explicit":
            raise ValueError(
                "offload: optimizer state in files (Nvme) is updated by make_train_step alone; "
                'pass executor="explicit".'
            )
        if isinstance(offload, HostMemory) or offload.params:
            _check_memory(resolved)
        if isinstance(offload, HostMemory) and offload.delayed and executor != "explicit":
            raise ValueError(
                "offload: a delayed update is made by make_train_step alone; pass "
                'executor="explicit".'
            )
        if offload.params and executor != "explicit":
            raise ValueError(
                "offload: parameters on the host (HostMemory(params=True)) are fetched by "
                'make_train_step alone; pass executor="explicit".'
            )
    return Options(
        parsed, resolved, axis, min_size, precision or Precision(), rules or {}, executor, offload
    )


def _check_memory(mesh: Mesh) -> None:
    """Raise if the mesh's devices reach no pinned memory; described GPUs do not say."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and "pinned_host" not in kinds:
        raise ValueError(
            f"offload: {device.device_kind} has the memories {', '.join(kinds)}; expected "
            "pinned_host among them. Leave offload= out on this backend."
        )


def _found_mesh(state: Any, axis: str) -> Mesh | None:
    """The mesh that is set, or that some leaf is partitioned over, if it has the data axis."""
    current = jax.sharding.get_mesh()
    if not current.empty and axis in current.axis_names:
        return current
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            continue
        if isinstance(sharding.mesh, Mesh) and axis in sharding.mesh.axis_names:
            return sharding.mesh
    return None
