"""What the language-model examples take on the command line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from zero_jax.config import load

from .schema import LanguageModelRun


@dataclass(frozen=True)
class Arguments:
    """Train a byte-level GPT with ZeRO, on the sources of Python's own standard library."""

    config: tyro.conf.Positional[Path]
    """TOML file, such as configs/lm_tiny.toml."""
    stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage; short for --set zero.stage=N."""
    steps: int | None = None
    """Optimizer steps; short for --set run.steps=N."""
    resume: Path | None = None
    """Folder of a run to go on with, from its last checkpoint."""
    set: tyro.conf.UseAppendAction[list[str]] = field(default_factory=list)
    """Override a key of the file, as section.key=value. May be given many times."""

    def load(self) -> LanguageModelRun:
        """Read the file and apply the overrides; `--stage`, `--steps` and `--resume` win.

        Raises:
          SystemExit: with a message: the file or an override is not valid, or the folder of the
            run holds another one, or is to be resumed and has no checkpoint.
        """
        short = {"zero.stage": self.stage, "run.steps": self.steps, "run.folder": self.resume}
        overrides = [f"{key}={value}" for key, value in short.items() if value is not None]
        try:
            cfg = load(LanguageModelRun, self.config, [*self.set, *overrides])
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None
        if self.resume is not None:
            if not any(self.resume.glob("checkpoints/[0-9]*")):
                raise SystemExit(f"--resume {self.resume}: there is no checkpoint in it.")
        elif cfg.run.folder is not None and Path(cfg.run.folder, "metrics.csv").exists():
            raise SystemExit(
                f"run.folder {cfg.run.folder!r} holds a run already; choose another, or go on with "
                f"it: --resume {cfg.run.folder}."
            )
        return cfg
