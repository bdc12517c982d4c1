"""A training run: its folder, its progress on the terminal, its last words.

A run folder holds

  config.toml            the configuration that was in effect, defaults and overrides included
  layout.txt             where every leaf of the training state lies, and why
  metrics.csv            a line for each step; the validation loss where one was taken
  events.out.tfevents.*  the same for TensorBoard
  loss.png               training and validation loss
  checkpoints/           the training state every so many steps
  bytes_by_stage.png     what a device holds of this very model at stages 0 to 3
"""

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorboardX
from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import zero_jax
from zero_jax import config
from zero_jax.checkpoint import Checkpointer
from zero_jax.reporting import plots
from zero_jax.reporting.tables import bytes_text

from .schema import LanguageModelRun

COLUMNS: tuple[str, ...] = ("step", "loss", "val_loss", "tokens_per_second", "seconds")
UNIT = "nats per byte"


class Run:
    """A run folder and a progress bar; a context manager.

    Attributes:
      folder: where everything is written.
    """

    def __init__(self, name: str, cfg: LanguageModelRun):
        """Create the folder; write the configuration.

        Args:
          name: of the run; without `run.folder` the folder is `runs/NAME-NUMBER`.
          cfg: the effective configuration.
        """
        self.folder = _create_folder(name, cfg.run.folder)
        self._config = config.to_toml(cfg)
        (self.folder / "config.toml").write_text(self._config, encoding="utf-8")
        self._steps = cfg.run.steps
        self._tokens = cfg.data.batch_size * cfg.model.sequence_length
        self._console = Console()

    def begin(self, layout: zero_jax.Layout, start: int) -> "Run":
        """Write the layout; keep what the run has recorded of its first `start` steps.

        Args:
          layout: of the training state.
          start: steps that it has seen.
        """
        (self.folder / "layout.txt").write_text(f"{layout}\n", encoding="utf-8")
        held = layout.bytes_per_device
        self._memory = bytes_text(sum(held.values()) - held["grads"])
        self._start, self._rows = start, _recorded(self.folder / "metrics.csv", start)
        if start:
            self.say(f"going on after {start} steps")
        return self

    def __enter__(self) -> "Run":
        self._file = (self.folder / "metrics.csv").open("w", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, COLUMNS)
        self._csv.writeheader()
        self._csv.writerows(self._rows)
        self._board = tensorboardX.SummaryWriter(str(self.folder))
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.start()
        self._task = self._bar.add_task("compiling", total=self._steps, completed=self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._board.close()
        self._file.close()

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if that is shown."""
        self._console.print(Text(text))

    def log(self, step: int, loss: float, seconds: float, val_loss: float | None = None) -> None:
        """Record a training step.

        Args:
          step: counted from 1.
          loss: training loss, nats a byte.
          seconds: what the step took, without validation.
          val_loss: validation loss after this step, if one was taken.
        """
        row = {"step": step, "loss": loss, "seconds": seconds}
        row["tokens_per_second"] = self._tokens / seconds
        if val_loss is not None:
            row["val_loss"] = val_loss
            self.say(f"step {step}: validation loss {val_loss:.3f} {UNIT}")
        self._rows.append(row)
        self._csv.writerow(row)
        self._file.flush()
        for name in row.keys() - {"step"}:
            self._board.add_scalar(name, row[name], step)
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        text = f"loss {loss:.3f}, {speed}, state {self._memory} a device"
        self._bar.update(self._task, completed=step, description=text)

    def checkpoint(self, checkpointer: Checkpointer, step: int, state: Any) -> None:
        """Save the state if it is time to, or the run was told to end, which it does then."""
        extras = {"config": self._config}
        checkpointer.save(step, state, extras, force=step == self._steps)
        checkpointer.exit_if_preempted(step, state, extras)

    def say_moved(self, moved: zero_jax.UpdateTraffic | None) -> None:
        """Say what an update moves between devices, host memory and files, and how fast."""
        if moved is None:
            return
        for where, read, written in (
            ("host memory", moved.from_host_bytes, moved.to_host_bytes),
            ("disk", moved.from_disk_bytes, moved.to_disk_bytes),
        ):
            if read or written:
                self.say(f"update: {bytes_text(read)} from {where}, {bytes_text(written)} to it")
        self.say(f"update: {moved.seconds:.3f} s, {moved.gigabytes_per_second:.2f} GB/s")

    def finish(
        self, prompt: bytes, continuation: bytes, layouts: Mapping[int, zero_jax.Layout]
    ) -> None:
        """Draw the plots and say what came out; after the last step, which took a validation.

        Args:
          prompt, continuation: the text that was sampled.
          layouts: stage -> layout that this run's state would have there.
        """
        curves = {
            name: [(int(row["step"]), row[key]) for row in self._rows if key in row]
            for name, key in (("training", "loss"), ("validation", "val_loss"))
        }
        plots.plot_losses(curves, UNIT).savefig(self.folder / "loss.png")
        by_stage = {stage: layout.bytes_per_device for stage, layout in layouts.items()}
        devices = next(iter(layouts.values())).size
        plots.plot_bytes_by_stage(by_stage, devices).savefig(self.folder / "bytes_by_stage.png")
        if continuation:
            text = Text(_readable(prompt), style="dim") + Text(_readable(continuation))
            self._console.print(Panel(text, title="sampled continuation", title_align="left"))
        seconds = sum(row["seconds"] for row in self._rows)
        later = self._rows[self._start + 1 :] or self._rows  # the first step compiles
        speed = self._tokens * len(later) / sum(row["seconds"] for row in later)
        self.say(
            f"validation loss {self._rows[-1]['val_loss']:.3f} {UNIT} after {self._steps} steps; "
            f"{seconds:.0f} s of training, {speed:,.0f} tokens/s; results in {self.folder}"
        )


def _create_folder(name: str, folder: str | None) -> Path:
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        return path
    numbers = itertools.count(1)
    while True:
        path = Path("runs", f"{name}-{next(numbers):03d}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # an earlier run's, or that of one which runs beside this
            continue
        return path


def _recorded(file: Path, start: int) -> list[dict[str, float]]:
    """Rows of the first steps of a run that goes on."""
    if not start:
        return []
    with file.open(newline="", encoding="utf-8") as rows:
        read = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(rows)]
    return [row | {"step": int(row["step"])} for row in read if row["step"] <= start]


def _readable(text: bytes) -> str:
    """UTF-8 where it is that; control characters, which a terminal would obey, as a dot."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in decoded)
