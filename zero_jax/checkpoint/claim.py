"""A run's hold on its folder, and the signal that ends it.

Not here: that all processes of a run hear of a signal; in a run of several, JAX's own preemption
service sees to that.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import jax
from etils import epath

from ..offload.disk_claim import lock

PREEMPTED = 75
"""Exit status of a run that was told to end and has saved: start it again (EX_TEMPFAIL)."""


class Claim:
    """A lock on a folder of this machine, held by a run's first process; a bucket has none."""

    def __init__(self, folder: epath.Path):
        """Take it.

        Raises:
          OSError: the folder cannot be used, or another run has it.
        """
        self._lock: int | None = None
        if "://" in str(folder) or jax.process_index() != 0:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(
                Path(folder, ".in_use_by"),
                lambda owner: (
                    f"checkpoint: {folder} is in use by the run of process {owner}. End that one, "
                    "give this one a folder of its own, or pass read_only=True."
                ),
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise OSError(f"checkpoint: {folder} cannot be written: {error}.") from error

    def release(self) -> None:
        """Let another run have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Preemption:
    """Whether SIGTERM came; until `release` it does not end the process."""

    def __init__(self) -> None:
        self.reached = False
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._hear)

    def release(self) -> None:
        """Let the signal do what it did before."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._listens = False

    def _hear(self, *_: Any) -> None:
        self.reached = True
