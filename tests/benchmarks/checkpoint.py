"""Checkpoints against plain Orbax on the same arrays: seconds to save, to block, to restore.

    python tests/benchmarks/checkpoint.py [--folder DIR] [--mib 768] [--rounds 5]  # checkpoint.md

A training state at stage 3 over 8 CPU devices, its values random, is saved and restored by
`Checkpointer` and by Orbax's `CheckpointManager` with `StandardSave`, in turns; the ratio is that
of the medians. A second state of the same kind has 1800 small leaves. The host's peak memory is
measured while one restores, beyond what was held before.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import zero_jax  # noqa: E402
from zero_jax.checkpoint import Checkpointer  # noqa: E402

TABLE = Path(__file__).with_suffix(".md")


def make_state(layers: int, width: int) -> TrainState:
    """Matrices and biases, with random moments."""

    def create(key: jax.Array) -> TrainState:
        params = {
            f"layer{i}": {"w": jax.random.normal(jax.random.fold_in(key, i), (width, width)),
                          "b": jnp.zeros(width)}
            for i in range(layers)
        }  # fmt: skip
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        moments = jax.tree.map(lambda p: p * 0.1, params)
        adam = state.opt_state[0]._replace(mu=moments, nu=jax.tree.map(jnp.square, moments))
        return state.replace(opt_state=(adam, *state.opt_state[1:]))

    return zero_jax.init_train_state(create, jax.random.key(0), stage=3)


def ours(folder: Path, state: TrainState) -> dict[str, float]:
    """Seconds of one save and one restore."""
    checkpointer = Checkpointer(folder)
    described = jax.tree.map(_described, state)
    found = _seconds(
        lambda: checkpointer.save(1, state),
        checkpointer.wait,
        lambda: checkpointer.restore(described).state,
    )
    checkpointer.close()
    return found


def orbax(folder: Path, state: TrainState) -> dict[str, float]:
    """The same by Orbax."""
    manager = ocp.CheckpointManager(folder)
    arrays = state.params, state.opt_state
    described = jax.tree.map(_described, arrays)
    found = _seconds(
        lambda: manager.save(1, args=ocp.args.StandardSave(arrays)),
        manager.wait_until_finished,
        lambda: manager.restore(1, args=ocp.args.StandardRestore(described)),
    )
    manager.close()
    return found


def _described(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _seconds(
    save: Callable[[], Any], wait: Callable[[], Any], restore: Callable[[], Any]
) -> dict[str, float]:
    start = time.perf_counter()
    save()
    blocked = time.perf_counter()
    wait()
    saved = time.perf_counter()
    with _Peak() as peak:
        jax.block_until_ready(jax.tree.leaves(restore()))
    restored = time.perf_counter()
    return {
        "save": saved - start,
        "blocked": blocked - start,
        "restore": restored - saved,
        "peak": peak.bytes,
    }


class _Peak:
    """Resident memory of this process, at most, beyond what it was."""

    def __enter__(self) -> "_Peak":
        self.bytes, self._first, self._ends = 0, _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.005):
            self.bytes = max(self.bytes, _resident() - self._first)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Measure both and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    width = 2048
    layers = max(1, arguments.mib * 2**20 // (12 * width * width))
    lines = [
        "# Checkpoints against plain Orbax",
        "",
        f"`python tests/benchmarks/checkpoint.py --mib {arguments.mib} "
        f"--rounds {arguments.rounds}`, "
        f"jax {jax.__version__}, 8 CPU devices, stage 3: medians, and the ratio of bytes a second.",
        "",
        "| state | what | ours | Orbax | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for name, sizes in (("large leaves", (layers, width)), ("1800 small leaves", (300, 64))):
        state = make_state(*sizes)
        held = sum(x.nbytes for x in jax.tree.leaves(state))
        rows: dict[str, list[dict[str, float]]] = {"ours": [], "orbax": []}
        for at in range(arguments.rounds + 1):
            for run in (ours, orbax):
                folder = Path(tempfile.mkdtemp(dir=arguments.folder))
                found = run(folder, state)
                shutil.rmtree(folder)
                if at:  # the first compiles and warms up
                    rows[run.__name__].append(found)
        medians = {
            who: {key: statistics.median(r[key] for r in found) for key in found[0]}
            for who, found in rows.items()
        }
        us, them = medians["ours"], medians["orbax"]
        state_text = f"{name}, {held / 2**20:.0f} MiB"
        for key in ("save", "blocked", "restore"):
            ratio = them[key] / us[key]
            lines.append(
                f"| {state_text} | {key} | {us[key]:.2f} s | {them[key]:.2f} s | {ratio:.2f} |"
            )
        peaks = us["peak"] / held, them["peak"] / held
        lines.append(f"| {state_text} | peak of restore | {peaks[0]:.2f} x | {peaks[1]:.2f} x | |")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
