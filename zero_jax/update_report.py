"""What an update moves between devices, host memory and disk, and how fast.

ZeRO-Offload and ZeRO-Infinity (arXiv 2101.06840, 2104.07857) trade device memory for transfers, and
whether that pays is a matter of bandwidth. A step on a state in files is timed as it runs
(`TrainStep.traffic`). On a state in host memory the update is a part of one program, so it is run
alone here: with gradients of zero and an update that is not let through, which moves every byte and
leaves the state as it is, bit for bit.

Not here: forecasts of the same (`planning`).
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .anatomy import Anatomy, open_in_step
from .delayed import Pending, no_gradient
from .extended_state import LossScaled, split_scale
from .layout import Layout
from .offload_policy import HostMemory
from .train_state import layout_of
from .update import apply_update


@dataclass(frozen=True)
class UpdateTraffic:
    """What one update moves, of all devices of this process.

    Attributes:
      from_host_bytes, to_host_bytes: between host memory and devices.
      from_disk_bytes, to_disk_bytes: between files and host memory.
      seconds: of the update, its computation included.
    """

    from_host_bytes: int
    to_host_bytes: int
    from_disk_bytes: int
    to_disk_bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """Read and written over the slower of the two ways, in 1e9 bytes."""
        host = self.from_host_bytes + self.to_host_bytes
        return (self.from_disk_bytes + self.to_disk_bytes or host) / 1e9 / self.seconds


def measure_update(state: Any, *, tx: Any = None, rounds: int = 3) -> tuple[Any, UpdateTraffic]:
    """Run the update of a state in host memory alone, and time it.

    Args:
      state: laid out with `HostMemory`; it is donated.
      tx: the wrapped optimizer of a state that has none of its own.
      rounds: how often; the fastest counts. One more compiles.

    Returns:
      The state, with the bits that it had, and what moves. Gradients that wait on the host would
      come on top.

    Raises:
      ValueError: the state is not in host memory, or its update is the host's own.
    """
    layout = layout_of(state if tx is None else tx)
    policy = layout.offload
    if not isinstance(policy, HostMemory) or policy.update_on == "host":
        raise ValueError(
            f"state: it was laid out with offload={policy}; expected a HostMemory whose update the "
            "device computes. For a state in files see TrainStep.traffic."
        )
    opened = open_in_step(state, tx)
    run = jax.jit(lambda parts, keep: _update(opened, layout, parts, keep), donate_argnums=0)
    parts, keep = (opened.params, opened.opt_state), jnp.bool(False)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        parts = jax.block_until_ready(run(parts, keep))
        seconds.append(time.perf_counter() - start)
    mine = len(layout.mesh.local_devices)
    moved = sum(p.bytes_per_device for p in layout.placements() if p.on_host) * mine
    params, opt_state = parts
    state = opened.close(params, opt_state, opened.other)
    return state, UpdateTraffic(moved, moved, 0, 0, min(seconds[1:]))


def _update(opened: Anatomy, layout: Layout, parts: Any, keep: jax.Array) -> Any:
    """An update of nothing, traced."""
    params, opt_state = parts
    scale, opt_state = split_scale(opt_state)
    gradients = [no_gradient(p) for p in jax.tree.leaves(layout.updates)]
    given = Pending(gradients, None, keep, jnp.float32(0))
    frozen = [False] * len(gradients)
    params, after = apply_update(opened.tx, given, opt_state, params, frozen)
    return params, after if scale is None else LossScaled(scale, after)
