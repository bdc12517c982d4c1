"""Logical arrays in files: each device's part goes where it belongs in the whole, padding left out.

One format for every stage, mesh and device count: an array of the checkpoint has the shape that the
model knows, whatever a leaf looks like at rest (padded, flattened, cut over some axes, in host
memory, in files of its own). What is written by one layout is read by another as boxes of the same
array; each process reads what its devices need.

A checkpoint's arrays are Zarr (version 3) in one OCDBT database, both of tensorstore, so that
thousands of small leaves are not thousands of files:

  FOLDER/process_0/...   what process 0 has written; others beside it
  FOLDER/manifest.ocdbt  all of them joined, once everyone is done
  FOLDER/leaves.json     name -> shape, dtype

Each chunk carries a CRC-32C, and each node of the database one of its own: a byte that flips on the
disk is an error where it is read, and never a value.

Not here: which leaves there are (`leaves`), when they are written and which checkpoint is complete
(`manager`, which is Orbax's).
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from etils import epath

from ..typed_keys import stored_dtype

Where = tuple[slice, ...]
Begin = Callable[[], Any]
CHUNK_BYTES = 32 * 2**20
"""Of a chunk at most: a part of an array is read in whole chunks."""
ON_THE_WAY = 2**28
"""Host memory, in bytes, that arrays may take on their way from files to devices."""
INDEX_BYTES = 2**26
"""Host memory, in bytes, for nodes of the database."""


class DamagedError(OSError):
    """A checkpoint's files are not those that were written."""


@dataclass(frozen=True)
class Filed:
    """An array of a checkpoint.

    Attributes:
      shape: logical.
      dtype: of the values.
      key: implementation of a typed PRNG key, whose bits these are; empty for any other array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    key: str = ""

    @property
    def stored(self) -> np.dtype:
        """The dtype in files."""
        return stored_dtype(self.dtype)

    @property
    def bytes(self) -> int:
        """Of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def folder_of(path: str | Path) -> epath.Path:
    """A folder on this machine, from the root as tensorstore and Orbax want it; or in a bucket."""
    return epath.Path(path if "://" in str(path) else Path(path).absolute())


def write_index(folder: epath.Path, index: dict[str, Filed]) -> None:
    """Write `leaves.json`."""
    said = {
        name: {"shape": list(f.shape), "dtype": f.dtype.name} | ({"key": f.key} if f.key else {})
        for name, f in index.items()
    }
    (folder / "leaves.json").write_text(json.dumps({"format": 1, "leaves": said}, indent=1))


def read_index(folder: epath.Path) -> dict[str, Filed]:
    """Read `leaves.json`.

    Raises:
      DamagedError: it is not there, or not as it was written.
    """
    try:
        said = json.loads((folder / "leaves.json").read_text())["leaves"]
        return {
            name: Filed(tuple(s["shape"]), jax.numpy.dtype(s["dtype"]), s.get("key", ""))
            for name, s in said.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / 'leaves.json'}: {error}") from error


class Arrays:
    """The arrays of one checkpoint, in a folder."""

    def __init__(self, folder: epath.Path, process: int | None = None):
        """Open them: joined, to read; or with a process, to write what is its own."""
        self._base = _url(folder if process is None else folder / f"process_{process}")
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": INDEX_BYTES}})
        self._transaction = None if process is None else tensorstore.Transaction(atomic=True)
        self._opened: dict[str, Any] = {}

    def write(self, name: str, filed: Filed, chunk: Sequence[int], where: Where, x: Any) -> Any:
        """Start to write a box, of whole chunks but at the array's end; what comes back waits.

        `x` is not copied and must not change.
        """
        array = self._begin_open(name, filed, chunk).result()
        x = x.view(filed.stored) if x.ndim else x.reshape(1).view(filed.stored).reshape(())
        return array[where].write(x, can_reference_source_data_indefinitely=True)

    def commit(self) -> Any:
        """Start to make what was written part of the database, in one piece; wait for it."""
        assert self._transaction is not None
        return self._transaction.commit_async()

    def read(self, name: str, where: Where) -> Any:
        """Start to read a box."""
        return self._begin_open(name).result()[where].read()

    def open(self, names: Iterable[str]) -> None:
        """Begin to open arrays that are going to be read."""
        for name in names:
            self._begin_open(name)

    def _begin_open(self, name: str, filed: Filed | None = None, chunk: Sequence[int] = ()) -> Any:
        if name not in self._opened:
            spec: dict[str, Any] = {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": self._base, "path": f"{name}/"},
                "store_data_equal_to_fill_value": True,  # a chunk of zeros is a chunk
                "fill_missing_data_reads": False,  # and one that is not there an error
            }
            create = filed is not None
            self._opened[name] = tensorstore.open(
                spec | {"metadata": _metadata(filed, chunk)} if create else spec,
                open=True,
                create=create,
                context=self._context,
                transaction=self._transaction,
            )
        return self._opened[name]


def join(folder: epath.Path, processes: int) -> None:
    """Make one database of those that the processes wrote; no array is copied."""
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

    def database(base: epath.Path) -> Any:
        spec = {"driver": "ocdbt", "base": _url(base)}
        return tensorstore.KvStore.open(spec, context=context).result()

    transaction = tensorstore.Transaction(atomic=True)
    joined = database(folder).with_transaction(transaction)
    for process in range(processes):
        part = folder / f"process_{process}"
        if part.exists():
            database(part).experimental_copy_range_to(joined).result()
    transaction.commit_async().result()


def chunk_of(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A chunk of a device's part: as large as may be, of which the part has a whole number."""
    chunk = [max(1, n) for n in shape]
    while math.prod(chunk) * itemsize > CHUNK_BYTES:
        factors = [(next(f for f in range(2, n + 1) if n % f == 0), d)
                   for d, n in enumerate(chunk) if n > 1]  # fmt: skip
        factor, dim = min(factors)  # the first dim that can be cut by least
        chunk[dim] //= factor
    return tuple(chunk)


def clipped(index: Where, shape: Sequence[int]) -> Where:
    """A part at rest as a box of the logical array, without the padding behind it."""
    return tuple(
        slice(s.start or 0, min(n, n if s.stop is None else s.stop))
        for s, n in zip(index, shape, strict=True)
    )


def is_empty(where: Where) -> bool:
    """Whether a box is nothing but padding, or of an array without elements."""
    return any(s.stop <= s.start for s in where)


def in_turns(pieces: Iterable[tuple[int, Begin]]) -> Iterator[np.ndarray]:
    """What is read, in order; so much is begun ahead as host memory may hold.

    Args:
      pieces: bytes of each, and a function that begins it.

    Raises:
      DamagedError: a file is gone, or has other bytes than were written.
    """
    begun: deque[tuple[int, Any]] = deque()
    held = 0
    try:
        for size, begin in pieces:
            while begun and held + size > ON_THE_WAY:
                first, future = begun.popleft()
                yield future.result()
                held -= first
            begun.append((size, begin()))
            held += size
        while begun:
            yield begun.popleft()[1].result()
    except (OSError, ValueError, RuntimeError) as error:  # tensorstore has no class of its own
        raise DamagedError(str(error)) from error


def _metadata(filed: Filed, chunk: Sequence[int]) -> dict[str, Any]:
    return {
        "shape": filed.shape,
        "data_type": filed.stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }


def _url(folder: epath.Path) -> str:
    """A folder as tensorstore says it: on this machine, or in a bucket."""
    path = str(folder)
    return f"{path}/" if "://" in path else f"file://{path}/"
