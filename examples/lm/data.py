"""Byte-level text: files split into training and validation, cut in windows, batched by grain.

The text that is on every machine is the source of Python's own standard library, so that is the
default. The split is by *file*, never by position in a file: no validation window continues a
training window. Which side a file is on depends on its path alone, so it stays there when files
come or go, and the same command sees the same split everywhere.

A batch is asked for by its step (`corpus.train[step]`), a pure function of the step and the seed;
the step number is therefore all that a resumed run needs.
"""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import grain
import numpy as np

from . import schema

# Third-party code is not the standard library, and test folders repeat what they test.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Batch = dict[str, Any]  # of numpy arrays, or of jax arrays once it lies on devices


class Batches(Protocol):
    """A `grain.MapDataset`, as its reader sees it: batches by index, computed when asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class Corpus:
    """Batches of bytes, `{"inputs", "targets"}`, each `(batch_size, sequence_length)` int32.

    Attributes:
      train: shuffled anew each epoch, without end.
      validation: one epoch in a shuffled order that never changes, so that the first few batches
        come from many files; an incomplete last batch is dropped.
      train_bytes, validation_bytes: sizes of the two texts.
    """

    train: Batches
    validation: Batches
    train_bytes: int
    validation_bytes: int

    @property
    def validation_prompt(self) -> bytes:
        """A window of validation text, to be continued by a trained model."""
        return self.validation[0]["inputs"][0].astype(np.uint8).tobytes()


class Windows:
    """Windows of a text that overlap by one byte: the last target of one is the next one's first.

    A grain data source: each item is `{"inputs", "targets"}`, each `(length,)` int32, where targets
    are the inputs one byte later.
    """

    def __init__(self, text: bytes, length: int):
        self.text = np.frombuffer(text, np.uint8)
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.length)

    def __getitem__(self, index: int) -> Batch:
        start = index * self.length
        window = self.text[start : start + self.length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def load_corpus(data: schema.Data, sequence_length: int) -> Corpus:
    """Read, split and batch the files of `data`.

    Args:
      data: the `[data]` section.
      sequence_length: bytes in a window.

    Raises:
      ValueError: a side of the split is too small for one batch.
    """
    folder = Path(data.folder or sysconfig.get_path("stdlib"))
    texts = split_by_file(folder, find_files(folder, data.pattern), data.val_fraction)
    windows = [Windows(text, sequence_length) for text in texts]
    for side, text, window in zip(("training", "validation"), texts, windows, strict=True):
        if len(window) < data.batch_size:
            raise ValueError(
                f"[data] the {side} side of {folder} has {len(text)} bytes, {len(window)} windows "
                f"of {sequence_length}; a batch needs {data.batch_size}. Give it more files, or "
                "lower batch_size or sequence_length."
            )
    size = data.batch_size
    train, validation = (grain.MapDataset.source(window) for window in windows)
    return Corpus(
        train=cast(Batches, train.shuffle(seed=data.seed).repeat().batch(size)),
        validation=cast(Batches, validation.shuffle(seed=0).batch(size, drop_remainder=True)),
        train_bytes=len(texts[0]),
        validation_bytes=len(texts[1]),
    )


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Files under `folder` whose name matches `pattern`, sorted, less the skipped folders."""
    return sorted(
        path
        for path in folder.rglob(pattern)
        if path.is_file() and SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts)
    )


def split_by_file(folder: Path, files: list[Path], val_fraction: float) -> tuple[bytes, bytes]:
    """Join the files of each side, a zero byte between them; (training, validation).

    A file is on the validation side if the checksum of its path within `folder`, as a fraction of
    2^32, is below `val_fraction`.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        name = path.relative_to(folder).as_posix().encode()
        held_out = zlib.crc32(name) < val_fraction * 2**32
        sides[held_out].append(path.read_bytes())
    return b"\0".join(sides[0]), b"\0".join(sides[1])
