"""Weights in and out of `.safetensors` files, leaf by leaf.

The format (huggingface.co/docs/safetensors): the length of a header in eight bytes, little endian;
the header, JSON, with the dtype, shape and place of each tensor; the tensors. Its own Python
package wants all tensors in memory at once to write a file, hence the few lines here. A name is the
path of a parameter with dots for slashes.

Not here: the layout of any other library's models; names and shapes are this model's.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .arrays import Filed, Where
from .opened import Opened
from .reading import read_state
from .subject import subjects_of

CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Dtypes of the format."""
Plan = list[tuple[str, str, Filed]]


def export(
    opened: Opened, target: Path, dtype: str | None = None, most_bytes: int | None = None
) -> list[Path]:
    """Write the parameters of a checkpoint, master copies where there are any.

    Args:
      opened: the checkpoint.
      target: file to write; with `most_bytes` several beside it, and an index of them,
        `NAME.safetensors.index.json`, as Hugging Face's libraries read it.
      dtype: of all real parameters, such as "bfloat16"; by default as they are.
      most_bytes: of one file.

    Returns:
      The files. Each is written under another name and renamed when it is whole.

    Raises:
      ValueError: there is nothing to export, or the format has no such dtype.
    """
    plan: Plan = []
    for path, name in sorted(opened.weights()):
        filed = opened.index[name]
        if dtype is not None and jnp.issubdtype(filed.dtype, jnp.floating):
            filed = replace(filed, dtype=np.dtype(jnp.dtype(dtype)))
        plan.append((path.replace("/", "."), name, filed))
    if not plan:
        raise ValueError(f"{opened.folder}: step {opened.step} has no parameters.")
    if most_bytes is None:
        _write(opened, plan, target)
        return [target]
    files = _files(plan, most_bytes)
    named = {}
    for at, part in enumerate(files, 1):
        path = target.with_name(f"{target.stem}-{at:05d}-of-{len(files):05d}.safetensors")
        _write(opened, part, path)
        named[path] = part
    index = {
        "metadata": {"total_size": sum(filed.bytes for *_, filed in plan)},
        "weight_map": {n: path.name for path, part in named.items() for n, *_ in part},
    }
    listing = target.with_name(f"{target.stem}.safetensors.index.json")
    listing.write_text(json.dumps(index, indent=1))
    return [*named, listing]


def import_safetensors(
    source: str | Path,
    like: Any,
    *,
    tx: Any = None,
    rename: Callable[[str], str] = lambda path: path.replace("/", "."),
) -> Any:
    """Read weights into a laid-out state: its parameters, and their master copies.

    Each process reads what its devices need; values are cast to the dtype at rest.

    Args:
      source: a `.safetensors` file, or the index of several.
      like: a laid-out state, which gives all that is no parameter.
      tx: the wrapped optimizer of a state that has none of its own.
      rename: path of a parameter -> its name in the file.

    Raises:
      ValueError: a parameter is not there or of another shape, or the file has others; the letter
        lists them.
    """
    files = _Files(Path(source))
    index, known = {}, set()
    for subject in subjects_of(like, tx):
        for name in subject.names:
            tree, _, path = name.removeprefix(subject.prefix).partition("/")
            theirs = rename(f"{subject.prefix}{path}")
            if tree == "params" and theirs in files.index:
                index[name] = files.index[theirs]
                known.add(theirs)
                files.names[name] = theirs
    unknown = sorted(files.index.keys() - known)
    if unknown:
        raise ValueError(
            f"{source}: it has {', '.join(unknown[:5])}, {len(unknown)} that are no parameters of "
            "this state; pass rename= if they have other names there."
        )
    return read_state(index, lambda: files, like, tx, {"params"})


class _Files:
    """Tensors of files, read as `Arrays` are."""

    def __init__(self, source: Path):
        self.index: dict[str, Filed] = {}
        self.names: dict[str, str] = {}
        self._views: dict[str, np.ndarray] = {}
        files = [source]
        if source.suffix == ".json":
            listed = json.loads(source.read_text())["weight_map"]
            files = [source.with_name(name) for name in sorted(set(listed.values()))]
        for file in files:
            self._read_header(file)

    def open(self, names: Iterable[str]) -> None:
        """Nothing to do: files are mapped."""

    def read(self, name: str, where: Where) -> Future[np.ndarray]:
        """A box of a tensor."""
        done: Future[np.ndarray] = Future()
        done.set_result(np.array(self._views[self.names[name]][where]))
        return done

    def _read_header(self, file: Path) -> None:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= file.stat().st_size - 8:
                raise ValueError(f"{file}: this is no safetensors file.")
            header = json.loads(opened.read(length))
        data = np.memmap(file, np.uint8, "r", offset=8 + length)
        header.pop("__metadata__", None)
        for name, said in header.items():
            start, stop = said["data_offsets"]
            dtype = np.dtype(jnp.dtype(CODES[said["dtype"]]))
            self.index[name] = Filed(tuple(said["shape"]), dtype)
            if stop > data.size or stop - start != self.index[name].bytes:
                raise ValueError(f"{file}: {name} is not whole; the file was cut off.")
            self._views[name] = data[start:stop].view(dtype).reshape(said["shape"])


def _files(plan: Plan, most_bytes: int) -> list[Plan]:
    """Tensors in files of that size, but for one that is larger by itself."""
    files: list[Plan] = []
    room = -1
    for one in plan:
        if not files or one[2].bytes > room:
            files, room = [*files, []], most_bytes
        files[-1].append(one)
        room -= one[2].bytes
    return files


def _write(opened: Opened, plan: Plan, target: Path) -> None:
    codes = {np.dtype(jnp.dtype(name)): code for code, name in CODES.items()}
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "flax"}}
    at = 0
    for name, _, filed in plan:
        if filed.dtype not in codes:
            raise ValueError(f"{name} is {filed.dtype.name}, which safetensors has not.")
        offsets = [at, at := at + filed.bytes]
        header[name] = {"dtype": codes[filed.dtype], "shape": filed.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = target.with_name(f".{target.name}.part")
    with written.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, source, filed in plan:
            values = opened.read(source).astype(filed.dtype, copy=False)
            assert values.nbytes == math.prod(filed.shape) * filed.dtype.itemsize
            file.write(values.reshape(-1).view(np.uint8).data)
            del values
        file.flush()
        os.fsync(file.fileno())
    written.rename(target)
