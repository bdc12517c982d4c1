"""One process's directory of a training state: two copies, of which one is always complete.

ZeRO-Infinity (arXiv 2104.07857, section 5.2.2) keeps the optimizer state in files, which a step
reads, updates and writes piece by piece. Here it reads one copy and writes the other, so that a
process that is killed, or a disk that fills, leaves the last complete step.

  PATH/process_0/lock         held while a process uses the directory
  PATH/process_0/a/...        one copy: Zarr arrays, one for each device's part of a leaf, one chunk
                              for each piece, not compressed
  PATH/process_0/a/complete   JSON, written last: which step, and of what leaves
  PATH/process_0/b/...        the other copy

Reading and writing are tensorstore's, asynchronous; it writes a file under another name, flushes it
to the disk and renames it. Host memory for pieces on their way is bounded.

Not here: whose directory it is (`disk_claim`), what a piece is (`disk_array`), who computes with it
(`disk_update`).
"""

import json
import math
import os
import shutil
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
import tensorstore
from jax.experimental import multihost_utils

from ..offload_policy import Nvme
from ..reporting.tables import bytes_text
from ..typed_keys import stored_dtype

COPIES = ("a", "b")
Where = tuple[slice, ...]


@dataclass(frozen=True)
class Filed:
    """One device's part of a leaf, as an array in files.

    Attributes:
      name: of the leaf, and where in it the part starts.
      shape, chunk: of the part, and of a piece of it.
      dtype: of the leaf.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @property
    def stored(self) -> np.dtype:
        """The dtype in files."""
        return stored_dtype(self.dtype)

    def bytes_of(self, where: Where) -> int:
        """Of a piece."""
        return self.dtype.itemsize * math.prod(s.stop - s.start for s in where)


class Disk:
    """An open directory; made by `disk_claim.open_disk`.

    Attributes:
      path: of this process's own directory.
      version: steps that the complete copy has seen.
      resumes: whether that copy was there when the directory was opened.
      contents: what the copy that is being written has: name of a leaf -> what it looks like.
      known: names of all leaves that a complete copy ever had; each later one must have them, too,
        or they would be lost with the last copy but one.
      limit_bytes: host memory that pieces on their way may take.
      read_bytes, written_bytes: so far.
      held_bytes, peak_bytes: host memory of pieces on their way, now and at most.
    """

    def __init__(self, policy: Nvme, path: Path, lock: int):
        self.path, self.version, self.resumes = path, 0, False
        self.contents: dict[str, Any] = {}
        self.known: set[str] = set()
        self.read_bytes = self.written_bytes = self.held_bytes = self.peak_bytes = 0
        self.limit_bytes, self._copy, self._failed = policy.buffer_bytes, "b", ""
        self._unlock = weakref.finalize(self, os.close, lock)
        self._writing: deque[tuple[Any, int]] = deque()
        self._context = tensorstore.Context(
            {"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}}
        )
        self._arrays: dict[tuple[str, Filed], Any] = {}

    @property
    def _other(self) -> str:
        return COPIES[1 - COPIES.index(self._copy)]

    def clear(self) -> None:
        """Remove what the directory has."""
        self._arrays = {}
        for copy in COPIES:
            shutil.rmtree(self.path / copy, ignore_errors=True)
            (self.path / copy).mkdir()

    def begin(self) -> None:
        """Start to write the copy that is not complete.

        Raises:
          OSError: an earlier step failed.
        """
        if self._failed:
            raise OSError(self._failed)
        self.contents = {}
        self._try(self._unmark, "begin a copy")

    def read(self, filed: Filed, where: Where) -> Any:
        """Start to read a piece of the complete copy; give what comes back to `arrived`."""
        size = filed.bytes_of(where)
        self._make_room(size)
        array = self._try_reading(lambda: self._open(self._copy, filed), filed)
        return filed, size, array[where].read()

    def arrived(self, reading: Any) -> np.ndarray:
        """Wait for a piece.

        Raises:
          OSError: its file is not there, or of another size.
        """
        filed, size, future = reading
        value = self._try_reading(future.result, filed)
        self.held_bytes -= size
        self.read_bytes += size
        return value.view(filed.dtype)

    def write(self, filed: Filed, where: Where, piece: np.ndarray) -> None:
        """Start to write a piece, once there is room for it in host memory.

        Args:
          filed: the array.
          where: the piece's place in it.
          piece: its memory is read until it is written, and must not change.

        Raises:
          OSError: an earlier one could not be written.
        """
        self._make_room(piece.nbytes)
        array = self._try(lambda: self._open(self._other, filed), f"make {filed.name}")
        piece = piece.view(filed.stored)
        future = array[where].write(piece, can_reference_source_data_indefinitely=True)
        self._writing.append((future, piece.nbytes))

    def flush(self) -> None:
        """Wait for all pieces so far; what is written again must not pass them."""
        while self._writing:
            self._written()

    def commit(self, version: int) -> None:
        """Wait for all pieces; from here on the copy that was written is the complete one."""
        self.flush()
        mark = json.dumps({"version": version, "leaves": self.contents})
        store = tensorstore.KvStore.open(
            {"driver": "file", "path": f"{self.path / self._other}/"}, context=self._context
        ).result()
        self._try(lambda: store.write("complete", mark.encode()).result(), "write complete")
        self._copy, self.version = self._other, version
        self.known |= set(self.contents)

    def close(self) -> None:
        """Let another process, or another state of this one, have the directory."""
        self._failed = f"offload: {self.path} was closed."
        self._unlock()

    def check_room(self, copy_bytes: int) -> None:
        """Whether two copies fit.

        Args:
          copy_bytes: of one, in this process's files.

        Raises:
          OSError: the disk has not enough room.
        """
        own = sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())
        free, needed = shutil.disk_usage(self.path).free + own, 2 * copy_bytes
        if needed > free:
            raise OSError(
                f"offload: {self.path} is to hold two copies of {bytes_text(copy_bytes)}, "
                f"{bytes_text(needed)}, and its disk has {bytes_text(free)} free: "
                f"{bytes_text(needed - free)} too little. Free it, or use more processes or "
                "another disk."
            )

    def use_complete(self, found: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """Go on from the last step that every process has complete.

        Returns:
          What it has of leaves; None if no process has any step.

        Raises:
          ValueError: some have, and none in common.
        """
        versions = [found[c]["version"] if c in found else -1 for c in COPIES]
        everyone = [versions]
        if jax.process_count() > 1:
            everyone = multihost_utils.process_allgather(np.array(versions)).tolist()
        if max(map(max, everyone)) < 0:
            return None
        common = set.intersection(*(set(of) - {-1} for of in everyone))
        if not common:
            raise ValueError(
                f"offload: the processes' directories beside {self.path} have no step in common "
                f"({everyone}); restore a checkpoint, with existing='replace'."
            )
        self.version = max(common)
        self._copy, self.resumes = COPIES[versions.index(self.version)], True
        self.known = set(found[self._copy]["leaves"])
        return found[self._copy]["leaves"]

    def _open(self, copy: str, filed: Filed) -> Any:
        """The array of a copy: of the complete one as it is, of the other made anew."""
        if (copy, filed) not in self._arrays:
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{self.path / copy}/{quote(filed.name)}/"},
                "metadata": {
                    "shape": filed.shape,
                    "data_type": filed.stored.name,
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [max(1, n) for n in filed.chunk]},
                    },
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                },
                "store_data_equal_to_fill_value": True,  # a chunk of zeros is a chunk
                "fill_missing_data_reads": False,  # and one that is not there an error
            }
            anew = {"create": True, "delete_existing": True} if copy == self._other else {}
            opened = tensorstore.open(spec | anew, context=self._context).result()
            self._arrays[copy, filed] = opened
        return self._arrays[copy, filed]

    def _unmark(self) -> None:
        copy = self.path / self._other
        (copy / "complete").unlink(missing_ok=True)
        folder = os.open(copy, os.O_RDONLY)
        try:
            os.fsync(folder)  # or, after a power cut, the mark could be there again
        finally:
            os.close(folder)

    def _make_room(self, size: int) -> None:
        while self._writing and self.held_bytes + size > self.limit_bytes:
            self._written()
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _written(self) -> None:
        future, size = self._writing.popleft()
        self._try(future.result, "write")
        self.held_bytes -= size
        self.written_bytes += size

    def _try_reading(self, function: Any, filed: Filed) -> Any:
        try:
            return function()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(
                f"read {filed.name}: {error}",
                f"The state after {self.version} steps, the last complete one, is damaged. Restore "
                "a checkpoint, with existing='replace'.",
            )

    def _try(self, function: Any, what: str) -> Any:
        try:
            return function()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(
                f"{what}: {error} ({self._free()})",
                f"Nothing is lost: the state after {self.version} steps is complete there. Mend "
                "the disk and lay the state out again with existing='resume'.",
            )

    def _free(self) -> str:
        try:
            return f"{bytes_text(shutil.disk_usage(self.path).free)} are free"
        except OSError as error:
            return str(error)

    def _fail(self, what: str, then: str) -> None:
        for future, _ in self._writing:
            future.exception()  # its memory is read until then
        self._writing.clear()
        self._failed = f"offload: {self.path} failed to {what}. {then}"
        raise OSError(self._failed)
