"""A training state out of the arrays of one checkpoint: checked first, then read leaf by leaf.

Names, shapes and dtypes are compared before any array is read and before any collective.
"""

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

from etils import epath

from ..placement import Placement
from .arrays import DamagedError, Filed, Where
from .compare import check_same, sources
from .leaves import read_leaves
from .subject import Subject, for_each, subjects_of


class Restored(NamedTuple):
    """What a checkpoint gives back.

    Attributes:
      state: of the type and layout that was asked for.
      step: that it was saved at; 0 for a state that begins.
      extras: of the caller.
    """

    state: Any
    step: int
    extras: dict[str, Any]


def read_json(file: epath.Path) -> dict[str, Any]:
    """A file of JSON.

    Raises:
      DamagedError: it is not there, or none.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file}: {error}") from error


class Source(Protocol):
    """What arrays are read from: `Arrays`, or files of another format."""

    def open(self, names: Iterable[str]) -> None:
        """Arrays that are going to be read."""

    def read(self, name: str, where: Where) -> Any:
        """Start to read a box; its `result()` has the values."""


def read_state(
    index: dict[str, Filed],
    source: Callable[[], Source],
    like: Any,
    tx: Any,
    partial: Collection[str] | None,
) -> Any:
    """The state, laid out as `like` is.

    Args:
      index: name of a leaf -> how it looks in the files.
      source: opens them.
      like, tx, partial: as for `Checkpointer.restore`.

    Raises:
      ValueError: the files are of another model or optimizer.
      DamagedError: they are not those that were written.
    """
    for subject in subjects_of(like, tx):
        check_same(index, subject, partial)
    return for_each(like, tx, lambda subject: _made(index, source, subject, partial))


def _made(
    index: dict[str, Filed],
    source: Callable[[], Source],
    subject: Subject,
    partial: Collection[str] | None,
) -> Any:
    kept = dict(zip(subject.names, subject.leaves, strict=True))
    found = sources(index, subject, partial)

    def make(names: list[str], places: list[Placement]) -> list[Any]:
        pairs = [(n, p) for n, p in zip(names, places, strict=True) if n in found]
        wanted = [(found[name], index[found[name]], place) for name, place in pairs]
        reading = read_leaves(source(), wanted)
        return [next(reading) if name in found else kept[name] for name in names]

    return subject.made(make)
