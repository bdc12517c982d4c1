"""A training program as the planner meets it, and where it finds one.

The planner knows no model. A configuration names the function that builds its program, in a file
that is looked up from the configuration's folder:

    program = "../examples/plan_lm.py:program"

It is called as `program(config, overrides, choice, devices)` and returns a `Program`: the
functions that the training script itself would jit. What is planned is then what is trained.
"""

import importlib.util
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Tree = Any
Offloaded = Literal["none", "optimizer", "params"]
"""What does not lie on the device between steps: "params" is the optimizer state and, of the
parameters, the matrices of stacked layers."""


@dataclass(frozen=True)
class Choice:
    """What the planner may change of a program.

    Attributes:
      stage: of ZeRO, 0 to 3.
      remat: whether layers are computed again in the backward pass.
      microbatches: parts that a batch is computed in.
      offload: what lies in host memory, or in files, as the program's policy says.
    """

    stage: int
    remat: bool
    microbatches: int
    offload: Offloaded = "none"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", "remat" if self.remat else "no remat"]
        parts += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        away = {"none": [], "optimizer": ["optimizer offloaded"]}
        return ", ".join(parts + away.get(self.offload, ["optimizer and parameters offloaded"]))


@dataclass(frozen=True)
class Program:
    """A training program at one choice, on given devices; nothing in it is allocated.

    Attributes:
      name: what reports call it.
      choice: that it was built for.
      create, arguments: `create(*arguments)` makes the training state; arguments may be abstract.
      compiler_options: laid-out state -> options that the step is compiled with.
      options: further arguments of `zero_jax.init_train_state`, the mesh among them, without
        `stage`.
      step: `step(state, batch)`; it is jitted with the state donated.
      batch: tree of `jax.ShapeDtypeStruct`, the global batch.
      rows: rows of the global batch.
    """

    name: str
    choice: Choice
    create: Callable[..., Any]
    arguments: tuple[Any, ...]
    step: Callable[[Any, Tree], Any]
    batch: Tree
    rows: int
    options: Mapping[str, Any] = field(default_factory=dict)
    compiler_options: Callable[[Any], Mapping[str, Any]] = lambda _: {}


def offloaded(program: Program) -> Offloaded:
    """What a program's own policy has off the device."""
    policy = program.options.get("offload")
    if policy is None:
        return "none"
    return "params" if policy.params else "optimizer"


class Builder(Protocol):
    """What a configuration's `program` names; `choice` None means the configuration's own.

    It raises a ValueError for a configuration that cannot be built on the devices. A choice that it
    has no way to make (it never recomputes layers, say) it answers with the program it has, whose
    `choice` says what it is; the planner leaves such candidates out.
    """

    def __call__(
        self,
        config: Path,
        overrides: Sequence[str],
        choice: Choice | None,
        devices: Sequence[Any],
    ) -> Program: ...


def find_builder(config: Path) -> Builder:
    """Import the function that a configuration names.

    Its file's folder is put on `sys.path` for good, as Python does for a script: a program may be
    built in parts.

    Raises:
      OSError: the configuration cannot be read.
      ValueError: it is no TOML, names no program, or the file or the function is not there.
    """
    try:
        document = tomllib.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{config} is not a TOML file: {error}") from error
    named = document.get("program")
    if not isinstance(named, str) or named.count(":") != 1:
        raise ValueError(
            f"{config}: program is {named!r}; expected 'FILE.py:FUNCTION', above all sections; the "
            "file is looked up from the configuration's folder."
        )
    file, function = named.split(":")
    path = (config.parent / file).resolve()
    if not path.is_file():
        raise ValueError(f"{config}: program names {file!r}; there is no file {path.name} there.")
    found = getattr(_import(path), function, None)
    if not callable(found):
        raise ValueError(f"{config}: program names {function!r}; {path.name} has no such function.")
    return found  # pyright: ignore[reportReturnType]


def _import(path: Path) -> Any:
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    ours = sys.modules.setdefault(path.stem, module) is module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        if ours:
            del sys.modules[path.stem]
        raise ValueError(f"{path.name} is no Python: {error}") from error
    return module
