"""Checkpoints of a training state on Orbax: saved while training goes on, restored onto any layout.

    checkpointer = Checkpointer("run/checkpoints", every=1000)
    state, start, _ = checkpointer.restore_or_init(create, key, stage=2)
    for i in range(start, steps):
        state, metrics = step(state, batch)
        checkpointer.save(i + 1, state)
        checkpointer.exit_if_preempted(i + 1, state)
    checkpointer.close()

When to save, what to keep, that a checkpoint is complete or not there and that all processes agree
on it are Orbax's `CheckpointManager`; the arrays are those of `arrays`. One checkpoint has

  STEP/state   every leaf, as a logical array
  STEP/run     JSON: the caller's `extras`, library versions, the layout it was saved from
  STEP/data    with `data=`: where each process's data iterator is, in grain's own format

Whatever cannot be read, a byte having flipped or a file being gone, is passed over for the
checkpoint before, and a ZeroWarning says so.
"""

import json
import sys
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ..offload.disk_claim import agreed
from ..shortfall import warn
from ..train_state import init_train_state
from .arrays import Arrays, DamagedError, Filed, folder_of, read_index
from .claim import PREEMPTED, Claim, Preemption
from .handler import ReadArrays, SaveArrays
from .leaves import parts_of
from .reading import Restored, read_json, read_state
from .subject import subjects_of

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "zero_jax")


class Checkpointer:
    """Checkpoints in a folder; used by one run at a time."""

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 3,
        every: int = 1,
        background: bool = True,
        read_only: bool = False,
    ):
        """Open a folder, which is made if it is not there.

        Args:
          folder: on a disk that all processes see, or a bucket ("gs://...").
          keep: how many of the last checkpoints stay; None: all.
          every: steps between checkpoints; `save` does nothing at others.
          background: write while training goes on.
          read_only: only restore; another run may be using the folder.

        Raises:
          ValueError: an argument is not as described.
          OSError: another run has the folder.
        """
        for name, value in (("keep", 1 if keep is None else keep), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; expected a number of at least 1.")
        self.folder = folder_of(folder)
        self._read_only, self._every = read_only, every
        self._saved: set[int] = set()
        self._claim = None if read_only else Claim(self.folder)
        self._preemption: Preemption | None = None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=background,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def save(
        self,
        step: int,
        state: Any,
        extras: dict[str, Any] | None = None,
        *,
        tx: Any = None,
        data: Any = None,
        force: bool = False,
    ) -> bool:
        """Save the state after `step` steps, if it is time to; all processes call this.

        When it returns, the state may be donated: what is written is in host memory. A state in
        files (`Nvme`) is read from them meanwhile.

        Args:
          step: number of the checkpoint.
          state: laid out.
          extras: what JSON can hold, to be given back: a configuration, say.
          tx: the wrapped optimizer of a state that has none of its own.
          data: grain's iterator, whose place is saved for each process.
          force: save although it is not time to.

        Returns:
          Whether it is saved. What this run has saved is not saved again; a checkpoint that was
          there before is replaced.

        Raises:
          OSError: an earlier checkpoint could not be written; those before it are there.
          TypeError: JSON cannot hold `extras`.
        """
        extras = {} if extras is None else extras
        _check_json(extras)
        if self._read_only:
            raise ValueError(f"checkpoint: {self.folder} was opened with read_only=True.")
        if step in self._saved or not force and step % self._every:
            return False
        self.wait()
        if step in self._manager.all_steps():  # damaged, or of a run that this one has left
            self._manager.delete(step)
        index: dict[str, Filed] = {}
        parts = []
        layouts = []
        for subject in subjects_of(state, tx):
            index |= subject.index
            layouts.append(str(subject.layout))
            for leaf in zip(subject.names, subject.places, subject.leaves, strict=True):
                parts += parts_of(*leaf)
        run = {"step": step, "extras": extras, "layout": "\n\n".join(layouts)}
        run["versions"] = {name: version(name) for name in LIBRARIES}
        items = {"state": SaveArrays(index, parts), "run": ocp.args.JsonSave(run)}
        if data is not None:
            import grain

            items["data"] = grain.checkpoint.CheckpointSave(data)
        items = ocp.args.Composite(**items)
        self._said(lambda: self._manager.save(step, args=items, force=True))
        self._saved.add(step)
        return True

    def restore(
        self,
        like: Any,
        *,
        step: int | None = None,
        tx: Any = None,
        data: Any = None,
        partial: Collection[str] | None = None,
    ) -> Restored:
        """Read a checkpoint onto the layout of `like`; all processes call this.

        Args:
          like: a laid-out state, or an abstract one (`init_train_state` on `ShapeDtypeStruct`s),
            which takes no memory; on any stage, mesh, device count or offload.
          step: of the checkpoint; by default the last that can be read.
          tx: the wrapped optimizer of a state that has none of its own.
          data: grain's iterator, which is put where it was.
          partial: read only leaves whose names begin so, such as {"params"}, in any dtype, and keep
            those of `like` for the rest; master copies go with their parameters.

        Raises:
          FileNotFoundError: there is no checkpoint.
          ValueError: it is of another model or optimizer; the letter lists the leaves.
          OSError: none can be read.

        Warns:
          ZeroWarning: a checkpoint is damaged, and the one before is taken.
        """
        self.wait()
        steps = self._steps()[::-1]
        if not steps or (step is not None and step not in steps):
            which = "a checkpoint" if step is None else f"one of step {step}; it has {steps[::-1]}"
            raise FileNotFoundError(f"checkpoint: {self.folder} has not {which}.")
        for one in steps if step is None else [step]:
            try:
                return self._read(one, like, tx, data, partial)
            except DamagedError as error:
                self._saved.discard(one)
                warn(f"checkpoint: that of step {one} in {self.folder} is damaged: {error}")
        raise OSError(f"checkpoint: none in {self.folder} can be read.")

    def restore_or_init(
        self, create: Callable[..., Any], *args: Any, stage: int, data: Any = None, **options: Any
    ) -> Restored:
        """Go on from the last checkpoint, or begin if there is none.

        Args:
          create, args, stage, options: as for `init_train_state`.
          data: as for `restore`.
        """
        self.wait()
        if self.latest() is None:
            return Restored(init_train_state(create, *args, stage=stage, **options), 0, {})
        # abstract, as one of the arguments is: nothing is computed
        nothing = jax.ShapeDtypeStruct((), bool)
        like = init_train_state(
            lambda _, *args: create(*args), nothing, *args, stage=stage, **options
        )
        return self.restore(like, tx=options.get("tx"), data=data)

    def latest(self) -> int | None:
        """The step of the last complete checkpoint, None without one."""
        return max(self._steps(), default=None)

    def preempted(self, step: int) -> bool:
        """Whether this run was told to end (SIGTERM, to any of its processes); all call this.

        From the first call on the signal does not end the process by itself.
        """
        if jax.process_count() > 1:
            return self._manager.reached_preemption(step)
        self._preemption = self._preemption or Preemption()
        return self._preemption.reached

    def exit_if_preempted(self, step: int, state: Any, *args: Any, **options: Any) -> None:
        """If the run was told to end, save, and exit with status 75; arguments as for `save`."""
        if self.preempted(step):
            self.save(step, state, *args, force=True, **options)
            self.close()
            sys.exit(PREEMPTED)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
          OSError: something could not be; earlier checkpoints are there.
        """
        self._said(self._manager.wait_until_finished)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait, and give the folder free; a `with` block does so at its end."""
        try:
            self.wait()
        finally:
            self._manager.close()
            for held in (self._claim, self._preemption):
                if held is not None:
                    held.release()

    def _read(
        self, step: int, like: Any, tx: Any, data: Any, partial: Collection[str] | None
    ) -> Restored:
        """The checkpoint of one step; a DamagedError in one process is one in all."""

        def item(read: Callable[[epath.Path], Any]) -> Any:
            args = ocp.args.Composite(state=ReadArrays(read))
            return self._manager.restore(step, args=args)["state"]

        def read() -> tuple[Any, dict[str, Any]]:
            run = read_json(self.folder / str(step) / "run" / "metadata")
            return read_state(item(read_index), lambda: item(Arrays), like, tx, partial), run

        state, run = agreed(read, DamagedError)
        if data is not None:
            import grain

            args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(data))
            self._manager.restore(step, args=args)
        return Restored(state, step, run["extras"])

    def _steps(self) -> list[int]:
        """Of complete checkpoints, the last one last."""
        if self._read_only:
            self._manager.reload()  # another run may have written
        steps = sorted(self._manager.all_steps())
        return steps[:-1] if self._manager.is_saving_in_progress() else steps

    def _said(self, function: Callable[[], Any]) -> Any:
        """What `function` returns; a failure to write says what is there."""
        try:
            return function()
        except (OSError, ValueError, RuntimeError) as error:
            self._manager.reload()
            self._saved.intersection_update(self._manager.all_steps())
            last = self.latest()
            there = "no checkpoint is there" if last is None else f"that of step {last} is complete"
            raise OSError(
                f"checkpoint: one in {self.folder} could not be written: {error}; {there}, and the "
                "state that is being trained is as it was. Make room, and save again."
            ) from error


def _check_json(extras: dict[str, Any]) -> None:
    try:
        json.dumps(extras)
    except TypeError as error:
        raise TypeError(f"extras: {error}; expected what JSON can hold.") from error
