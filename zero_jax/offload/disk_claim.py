"""Whose directory it is: claimed by one process, refused where it cannot be used.

Every letter comes before anything is written, and to every process, or those without one would wait
for those that have it.
"""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..offload_policy import Nvme
from .disk import COPIES, Disk

T = TypeVar("T")


def agreed(check: Callable[[], T], elsewhere: Callable[[str], Exception] = OSError) -> T:
    """What `check` returns, if it does so in every process; all call this.

    Args:
      check: may raise.
      elsewhere: makes the error of a process in which it did not, where it did in another.

    Raises:
      Exception: what `check` raised here, or `elsewhere` says.
    """
    error = result = None
    try:
        result = check()
    except Exception as raised:
        error = raised
    failed = [error is not None]
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(failed[0])).tolist()
    if error is not None:
        raise error
    if any(failed):
        raise elsewhere(f"process {failed.index(True)} refused; its own letter says why.")
    return result  # pyright: ignore[reportReturnType]


def lock(file: Path, taken: Callable[[str], str]) -> int:
    """Lock a file for this process, and write into it which that is.

    Args:
      file: made if it is not there.
      taken: the process that has it -> what to say.

    Returns:
      A file descriptor; closed, it gives the lock free.

    Raises:
      OSError: another process has it, or the file cannot be written.
    """
    opened = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(opened, 20).decode()
        os.close(opened)
        raise BlockingIOError(taken(owner)) from None
    os.truncate(opened, 0)
    os.write(opened, str(os.getpid()).encode())
    return opened


def open_disk(policy: Nvme) -> tuple[Disk, dict[str, dict[str, Any]]]:
    """Open this process's directory, and what complete copies there are.

    Returns:
      The directory, and copy -> what its mark says.

    Raises:
      OSError: `path` is no directory that can be written, or another process has it.
      ValueError: there is a training state in it, and the policy refuses that.
    """
    root = Path(policy.path)
    if not root.is_dir():
        what = "is a file" if root.exists() else "is not there"
        raise NotADirectoryError(
            f"offload: Nvme(path={str(root)!r}): it {what}; expected a directory on a local disk. "
            "Make it first: one that is made here could be on another disk than you mean."
        )
    path = root / f"process_{jax.process_index()}"
    try:
        for copy in COPIES:
            (path / copy).mkdir(parents=True, exist_ok=True)
        held = lock(
            path / "lock",
            lambda owner: (
                f"offload: {path} is in use by process {owner}; two cannot share it. End that one "
                "(or drop its state), or give this one another path."
            ),
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(
            f"offload: Nvme(path={str(root)!r}): this process cannot write there: {error}."
        ) from error
    found = {copy: mark for copy in COPIES if (mark := _mark(path / copy)) is not None}
    if found and policy.existing == "refuse":
        os.close(held)
        last = max(mark["version"] for mark in found.values())
        raise ValueError(
            f"offload: {path} has a training state, complete after {last} steps. Pass "
            "Nvme(existing='resume') to go on with it, or 'replace' to write over it."
        )
    if policy.existing != "resume":
        found = {}
    return Disk(policy, path, held), found


def _mark(copy: Path) -> dict[str, Any] | None:
    """What the mark of a copy says, None where it is not complete."""
    file = copy / "complete"
    return json.loads(file.read_text()) if file.is_file() else None
