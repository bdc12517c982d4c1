"""Arrays of a checkpoint as an item of Orbax's: written beside others, complete with them.

Orbax calls `async_save` before training goes on, `finalize` when every process has written, and
shows the folder under its name only then. What is written was copied to host memory before.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from .arrays import Arrays, Filed, join, write_index
from .leaves import Part


class LogicalArrays(ocp.AsyncCheckpointHandler):
    """Handler of `SaveArrays` and `ReadArrays`."""

    async def async_save(self, directory: epath.Path, args: "SaveArrays") -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to write; the future ends when this process is done."""
        writing = self._write(directory, args)
        return [CommitFutureAwaitingContractedSignals(writing, name="zero_jax arrays")]

    def save(self, directory: epath.Path, args: "SaveArrays") -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write."""
        asyncio.run(self._write(directory, args))

    def restore(self, directory: epath.Path, args: "ReadArrays") -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read, as the caller does."""
        return args.read(directory)

    def finalize(self, directory: epath.Path) -> None:
        """Join what the processes have written."""
        join(directory, jax.process_count())

    async def _write(self, directory: epath.Path, args: "SaveArrays") -> None:
        if jax.process_index() == 0:
            write_index(directory, args.index)
        arrays = Arrays(directory, jax.process_index())
        writes = (arrays.write(p.name, p.filed, p.chunk, p.where, p.values) for p in args.parts)
        await asyncio.gather(*writes)
        await arrays.commit()


@ocp.args.register_with_handler(LogicalArrays, for_save=True)
@dataclass
class SaveArrays(ocp.args.CheckpointArgs):
    """What is to be written: all leaves by name, and this process's parts of them."""

    index: dict[str, Filed]
    parts: list[Part]


@ocp.args.register_with_handler(LogicalArrays, for_restore=True)
@dataclass
class ReadArrays(ocp.args.CheckpointArgs):
    """What reads them: folder -> anything."""

    read: Callable[[epath.Path], Any]
