"""Optimizer state on disk: bytes a second of the update, against a raw sequential copy.

    python tests/benchmarks/nvme.py [--folder DIR] [--gib 1.5] [--rounds 7]     # writes nvme.md

One CPU device stands for the accelerator. A round is one training step, whose update reads Adam's
fp32 moments and master copies and writes them, and one copy of as many bytes on the same disk: a
file read from front to end in pieces of 16 MiB, each written to another file, which is flushed to
the disk at its end. Rounds are interleaved; the ratio is that of their medians. Files of both are
dropped from the page cache before they are read, where the system lets us.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zero_jax

PIECE = 16 * 2**20
TABLE = Path(__file__).with_suffix(".md")


def loss(params, batch):
    """A loss that costs next to nothing."""
    return sum(jnp.mean((p[:8] * batch).astype(jnp.float32) ** 2) for p in params.values())


def make_state(folder: Path, state_bytes: int) -> TrainState:
    """Eight matrices in bf16, 12 bytes a parameter on disk."""
    width = 2048
    rows = state_bytes // 12 // 8 // width
    params = {f"w{i}": jnp.full((rows, width), 0.5) for i in range(8)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    return zero_jax.shard_train_state(
        state,
        2,
        executor="explicit",
        precision=zero_jax.Precision.bf16(),
        offload=zero_jax.Nvme(folder),
    )


def raw_copy(source: Path, target: Path) -> float:
    """Seconds of a sequential copy."""
    forget(source)
    start = time.perf_counter()
    with open(source, "rb", buffering=0) as reads, open(target, "wb", buffering=0) as writes:
        while piece := reads.read(PIECE):
            writes.write(piece)
        os.fsync(writes.fileno())
    return time.perf_counter() - start


def forget(path: Path) -> None:
    """Drop a file, or all files of a folder, from the page cache."""
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        where = Path(folder)
        state = make_state(where, int(given.gib * 2**30))
        step = zero_jax.make_train_step(loss)
        batch = zero_jax.shard_batch(jnp.ones((8, 2048)), state)
        state, _ = step(state, batch)
        size = step.traffic.from_disk_bytes
        with open(where / "source", "wb") as file:
            for _ in range(size // PIECE):
                file.write(os.urandom(PIECE))
        ours, raw = [], []
        for _ in range(given.rounds):
            raw.append(raw_copy(where / "source", where / "target") / (size // PIECE * PIECE))
            forget(where / "process_0")
            state, _ = step(state, batch)
            moved = step.traffic.from_disk_bytes + step.traffic.to_disk_bytes
            ours.append(step.traffic.seconds / moved)
        rates = {"raw copy": [2 / s / 1e9 for s in raw], "update": [1 / s / 1e9 for s in ours]}
    TABLE.write_text(table(size, rates), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


def table(size: int, rates: dict[str, list[float]]) -> str:
    """The rates as a table."""
    middle = {name: statistics.median(each) for name, each in rates.items()}
    rows = [
        f"| {name} | {middle[name]:.2f} | {min(each):.2f} | {max(each):.2f} |"
        for name, each in rates.items()
    ]
    ratio = middle["update"] / middle["raw copy"]
    lines = (
        "# Optimizer state on disk",
        "",
        f"`python tests/benchmarks/nvme.py`, jax {jax.__version__}: {size / 1e9:.2f} GB of state,",
        f"bytes read and written a second. The update goes at {ratio:.2f} of the raw copy.",
        "",
        "| | median GB/s | least | most |",
        "|---|---:|---:|---:|",
        *rows,
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
