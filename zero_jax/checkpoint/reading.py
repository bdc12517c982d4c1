"""A training state out of the arrays of one checkpoint: checked first, then read leaf by leaf.

Names, shapes and dtypes are compared before any array is read and before any collective.
"""

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from ..placement import Placement
from .arrays import Arrays, DamagedError, Filed, read_index
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


Item = Callable[[Callable[[epath.Path], Any]], Any]
T = TypeVar("T")


def whole_everywhere(read: Callable[[], T]) -> T:
    """What `read` returns, if no process finds damage; all processes call this.

    Raises:
      DamagedError: one does.
    """
    result, error = None, None
    try:
        result = read()
    except DamagedError as raised:
        error = raised
    failed = [error is not None]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(failed[0])).tolist()
    if any(failed):
        raise error or DamagedError(f"process {failed.index(True)} cannot read it")
    return result  # pyright: ignore[reportReturnType]


def read_json(file: epath.Path) -> dict[str, Any]:
    """A file of JSON.

    Raises:
      DamagedError: it is not there, or none.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file}: {error}") from error


def read_state(item: Item, like: Any, tx: Any, partial: Collection[str] | None) -> Any:
    """The state, laid out as `like` is.

    Args:
      item: gives a function the folder of the arrays, and returns its result.
      like, tx, partial: as for `Checkpointer.restore`.

    Raises:
      ValueError: the checkpoint is of another model or optimizer.
      DamagedError: its files are not those that were written.
    """
    there: dict[str, Filed] = item(read_index)
    for subject in subjects_of(like, tx):
        check_same(there, subject, partial)
    return for_each(like, tx, lambda subject: _made(item, there, subject, partial))


def _made(
    item: Item, there: dict[str, Filed], subject: Subject, partial: Collection[str] | None
) -> Any:
    kept = dict(zip(subject.names, subject.leaves, strict=True))
    found = sources(there, subject, partial)

    def make(names: list[str], places: list[Placement]) -> list[Any]:
        pairs = [(n, p) for n, p in zip(names, places, strict=True) if n in found]
        wanted = [(found[name], there[found[name]], place) for name, place in pairs]
        reading = item(lambda folder: read_leaves(Arrays(folder), wanted))
        return [next(reading) if name in found else kept[name] for name in names]

    return subject.made(make)
