"""An argument that is one of a few words, checked in one way wherever it is given."""

from typing import Any, get_args


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise a ValueError if `value` is none of the strings of a `Literal`."""
    if not isinstance(value, str) or value not in get_args(choices):
        raise ValueError(
            f"{name}={value!r}; expected one of {', '.join(map(repr, get_args(choices)))}."
        )
