"""Configuration files: TOML read strictly into frozen dataclasses, and written back.

The dataclasses are the schema: a section is a dataclass, a key is a field, and the field's type is
what the file must hold. Nothing is guessed. A key that is not a field, or a value of another type,
raises a `ValueError` that names the key, what it has, what was expected and, for a misspelt key,
the nearest one. The law that the tests hold: `load(cls, write(to_toml(config))) == config`.

TOML has no null, so a key that may be None is None by being left out.

Not here: any schema. A training program has its own, as `examples/lm/schema.py` is that of the
language-model run.
"""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Mapping, Sequence
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
