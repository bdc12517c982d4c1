"""A checkpoint by itself, without a state or its devices: what it has, read leaf by leaf.

Any machine can open it, whatever saved it: arrays are logical and come as numpy's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from .arrays import Arrays, DamagedError, Filed, folder_of, read_index
from .leaves import parted
from .reading import read_json


@dataclass(frozen=True)
class Opened:
    """One checkpoint of a folder.

    Attributes:
      folder: of all checkpoints.
      step: of this one.
      steps: of all that are there.
      index: name of a leaf -> its shape and dtype.
      run: what was saved beside: `extras`, `versions`, `layout`.
    """

    folder: epath.Path
    step: int
    steps: list[int]
    index: dict[str, Filed]
    run: dict[str, Any]
    _arrays: Arrays = field(repr=False, compare=False)

    def read(self, name: str) -> np.ndarray:
        """A leaf, whole; the bits of a key.

        Raises:
          DamagedError: its files are not those that were written.
        """
        filed = self.index[name]
        if 0 in filed.shape:
            return np.zeros(filed.shape, filed.dtype)
        where = tuple(slice(0, n) for n in filed.shape)
        try:
            values = np.asarray(self._arrays.read(name, where).result())
        except (OSError, ValueError, RuntimeError) as error:
            raise DamagedError(f"{self.folder}, step {self.step}: {error}") from error
        return values.reshape(-1).view(filed.dtype).reshape(filed.shape)

    def weights(self) -> Iterator[tuple[str, str]]:
        """Path of a parameter, and the name of the leaf that has it best: its master copy."""
        for name in self.index:
            key, tree, path = parted(name)
            if tree == "params":
                master = f"{key}master/{path}"
                yield key + path, master if master in self.index else name


def open_checkpoint(folder: str | Path, step: int | None = None) -> Opened:
    """Open a checkpoint.

    Args:
      folder: of a `Checkpointer`.
      step: which; by default the last.

    Raises:
      FileNotFoundError: it is not there.
      DamagedError: it cannot be read.
    """
    path = folder_of(folder)
    # Orbax gives a checkpoint its number when it is complete.
    steps = sorted(int(d.name) for d in path.iterdir() if d.name.isdigit()) if path.exists() else []
    if not steps or (step is not None and step not in steps):
        there = f"there are {steps}" if steps else "a folder of checkpoints has one named 100, say"
        which = "" if step is None else f" of step {step}"
        raise FileNotFoundError(f"{folder}: there is no checkpoint{which} in it; {there}.")
    step = steps[-1] if step is None else step
    one = path / str(step)
    index, run = read_index(one / "state"), read_json(one / "run" / "metadata")
    return Opened(path, step, steps, index, run, Arrays(one / "state"))
