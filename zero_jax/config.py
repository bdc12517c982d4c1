"""Configuration files: TOML read strictly into frozen dataclasses, and written back.

The dataclasses are the schema: a section is a dataclass, a key is a field, and the field's type is
what the file must hold. Nothing is guessed. A key that is not a field, or a value of another type,
raises a `ValueError` that names the key, what it has, what was expected and, for a misspelt key,
the nearest one. The law that the tests hold: `load(cls, write(to_toml(config))) == config`.

TOML has no null, so a key that may be None is None by being left out.

The second half of the file is the schema of a language-model run, which `examples/train_lm.py`
reads; `load` and `to_toml` know nothing of it.
"""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

T = TypeVar("T")


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a TOML file into the dataclass `cls`, then apply overrides.

    Args:
      cls: a frozen dataclass; fields that are dataclasses are sections. A field is a bool, int,
        float (an integer is accepted), str or `Literal`, or one of these or None.
      path: the file.
      overrides: texts `section.key=value`, later ones winning. The value is written as in TOML;
        one that is not TOML is taken as a string, so `optimizer.name=lion` needs no quotes.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not TOML, or a key or value is not what `cls` says.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return from_dict(cls, document, overrides, source=str(path))


def from_dict(
    cls: type[T], document: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config"
) -> T:
    """Build `cls` from a parsed document, as `load` does; messages call the document `source`."""
    values = _read_table(cls, document, source)
    for override in overrides:
        where = f"override {override!r}"
        _merge(values, _read_table(cls, _parse_override(override), where))
    return _construct(cls, values, f"{source} with overrides" if overrides else source)


def to_toml(config: Any) -> str:
    """Write a dataclass as TOML text that `load` reads back to an equal one."""
    tables = dataclasses.asdict(
        config, dict_factory=lambda items: {k: v for k, v in items if v is not None}
    )
    return tomli_w.dumps(tables)


def _read_table(cls: type, table: Mapping[str, Any], source: str, section: str = "") -> dict:
    """Check every key and type of one table; the values come back converted, not yet built."""
    hints = get_type_hints(cls)
    valid = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in table.items():
        if key not in valid:
            raise ValueError(f"{source}: {_unknown(key, valid, section)}")
        values[key] = _read_value(hints[key], value, source, f"{section}.{key}".lstrip("."))
    return values


def _read_value(hint: Any, value: Any, source: str, key: str) -> Any:
    """Check one value against its field's type. Types: see `load`."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, Mapping):
            return _read_table(hint, value, source, key)
    elif get_origin(hint) in (Union, types.UnionType):
        inner = [arm for arm in get_args(hint) if arm is not types.NoneType]
        if len(inner) != 1:
            raise TypeError(f"{key}: {hint} is not a type that config can check.")
        return _read_value(inner[0], value, source, key)
    elif get_origin(hint) is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(hint)):
            return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint not in (bool, int, float, str):
        raise TypeError(f"{key}: {hint} is not a type that config can check.")
    elif type(value) is hint:
        return value
    raise ValueError(f"{source}: {key} is {_describe(value)}; expected {_expected(hint)}.")


def _parse_override(text: str) -> dict[str, Any]:
    """`section.key=value` as a nested table with one leaf."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"override {text!r}: expected section.key=value.")
    table: Any = _parse_value(value.strip())
    for key in reversed(keys):
        table = {key: table}
    return table


def _parse_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _merge(values: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _construct(cls: type[T], values: Mapping[str, Any], source: str, section: str = "") -> T:
    """Build the dataclass, sections first; a field without a default must have been given."""
    hints = get_type_hints(cls)
    arguments = dict(values)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = f"{section}.{f.name}".lstrip(".")
        if isinstance(arguments.get(f.name), dict):
            arguments[f.name] = _construct(hints[f.name], arguments[f.name], source, key)
        required = f.default is f.default_factory is dataclasses.MISSING
        if required and f.name not in arguments:
            raise ValueError(f"{source}: {key} is missing; expected {_expected(hints[f.name])}.")
    try:
        return cls(**arguments)
    except ValueError as error:  # a section's own check, which knows the field but not the file
        where = f"{source}: [{section}]" if section else source
        raise ValueError(f"{where} {error}") from error


def _unknown(key: str, valid: list[str], section: str) -> str:
    place = f"[{section}] has no key {key!r}" if section else f"there is no section {key!r}"
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{place}; expected one of {', '.join(valid)}.{hint}"


def _describe(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array"}
    if isinstance(value, Mapping):
        return f"a table with the keys {', '.join(value) or '(none)'}"
    return f"the {names.get(type(value), type(value).__name__)} {value!r}"


def _expected(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"a section with the keys {', '.join(f.name for f in dataclasses.fields(hint))}"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[hint]


def _at_least(section: Any, **bounds: int) -> None:
    for name, bound in bounds.items():
        if not getattr(section, name) >= bound:
            raise ValueError(f"{name}={getattr(section, name)}; expected at least {bound}.")


@dataclass(frozen=True)
class Model:
    """A GPT: pre-norm decoder blocks, learned positions.

    Attributes:
      vocab_size: rows of the embedding; tokens are bytes, so at least 256.
      layers, hidden, heads: depth, width, attention heads (`heads` divides `hidden`).
      sequence_length: tokens a row of the batch; also the number of learned positions.
      tied_head, remat: the embedding is the output head; blocks are recomputed backward.
      dtype: dtype of parameters at rest and of the matmuls. With bfloat16 the optimizer state holds
        a float32 master copy (`zero_jax.Precision.bf16`).
    """

    vocab_size: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence_length: int = 128
    tied_head: bool = True
    remat: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _at_least(self, vocab_size=256, layers=1, hidden=1, heads=1, sequence_length=1)
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}.")


@dataclass(frozen=True)
class Data:
    """Files read as bytes.

    Attributes:
      folder: where the text is; left out, the running interpreter's own standard library.
      pattern: which files of `folder`, at any depth.
      batch_size: rows a step, over all devices; a multiple of the number of devices.
      seed, val_fraction: of the order of the rows; share of the files kept for validation.
    """

    folder: str | None = None
    pattern: str = "*.py"
    batch_size: int = 32
    seed: int = 0
    val_fraction: float = 0.05

    def __post_init__(self) -> None:
        _at_least(self, batch_size=1, seed=0)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction}; expected one between 0 and 1.")


@dataclass(frozen=True)
class Optimizer:
    """An optax optimizer under a linear warm-up and a cosine decay.

    Attributes:
      name: which of optax's.
      learning_rate, final_fraction: at the top of the schedule; what the last step has of it.
      warmup_steps: steps of the linear warm-up from 0.
      weight_decay: decoupled, on every parameter. Adafactor's, which follows no schedule, is
        `learning_rate * weight_decay` in every step.
      clip_norm: global norm that gradients are clipped to; left out, they are not.
      b1, b2: decay of the moments (adafactor has its own).
    """

    name: Literal["adamw", "lion", "lamb", "adafactor"] = "adamw"
    learning_rate: float = 3e-3
    final_fraction: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float | None = None
    b1: float = 0.9
    b2: float = 0.95

    def __post_init__(self) -> None:
        _at_least(self, learning_rate=0, final_fraction=0, warmup_steps=0, weight_decay=0)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}; expected a positive number, or no key.")


@dataclass(frozen=True)
class Zero:
    """What `zero_jax.init_train_state` is called with: `stage`, `axis`, `min_size`."""

    stage: Literal[0, 1, 2, 3] = 2
    axis: str = "data"
    min_size: int = 8


@dataclass(frozen=True)
class Run:
    """How long, how often, and where to.

    Attributes:
      steps, seed: optimizer steps; seed of the initial parameters and of the sampled text.
      eval_every: steps between validations; one more follows the last step.
      eval_batches: validation batches each time, the same ones.
      sample_bytes, temperature: bytes to write at the end, 0 for none; of their sampling.
      folder: where results go; left out, a new folder under `runs/`, named after the config.
    """

    steps: int = 500
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 16
    sample_bytes: int = 256
    temperature: float = 0.7
    folder: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, steps=1, seed=0, eval_every=1, eval_batches=1, sample_bytes=0)
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}; expected a positive number.")


@dataclass(frozen=True)
class LanguageModelRun:
    """The whole file: one field for each section."""

    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    zero: Zero = Zero()
    run: Run = Run()
