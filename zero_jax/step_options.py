"""What `make_train_step` takes, checked before anything is traced."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .choices import check_choice
from .collectives import Combine

Reduce = Literal["each", "once"]
Regather = Literal["layer", "keep"]
NonFinite = Literal["raise", "skip", "pass"]
Statistics = Literal["global", "local"]
TakesRng = Literal["yes", "if given", "no"]
Collection = Literal["mean", "sum", "max", "min", "read"]


@dataclass(frozen=True)
class StepOptions:
    """See `make_train_step` for each."""

    has_aux: bool = False
    microbatches: int = 1
    reduce: Reduce = "each"
    regather: Regather = "layer"
    clip_norm: float | None = None
    transform_grads: Callable[[Any], Any] | None = None
    nonfinite: NonFinite = "raise"
    frozen: Any = None
    collections: Mapping[Any, Collection] = field(default_factory=dict)
    aux: Mapping[str, Combine] = field(default_factory=dict)
    statistics: Statistics = "global"
    after_update: Callable[[Any], Any] | None = None
    takes_rng: TakesRng = "no"

    def __post_init__(self) -> None:
        _whole("microbatches", self.microbatches)
        check_choice("reduce", self.reduce, Reduce)
        check_choice("regather", self.regather, Regather)
        check_choice("nonfinite", self.nonfinite, NonFinite)
        check_choice("statistics", self.statistics, Statistics)
        for name in ("transform_grads", "after_update"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"{name}={getattr(self, name)!r}; expected a function, or None.")
        for name in ("collections", "aux"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(f"{name}={getattr(self, name)!r}; expected a dict: name -> rule.")
        for name, rule in self.collections.items():
            check_choice(f"collections[{name!r}]", rule, Collection)
        for name, rule in self.aux.items():
            check_choice(f"aux[{name!r}]", rule, Combine)
        if self.aux and not self.has_aux:
            raise ValueError("aux: it names values that the loss returns; pass has_aux=True.")
        clip = self.clip_norm
        if clip is not None and not (isinstance(clip, (int, float)) and 0 < clip < math.inf):
            raise ValueError(f"clip_norm={clip!r}; expected a positive number, or None.")


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number.")
    if value < 1:
        raise ValueError(f"{name}={value}; expected 1 or more.")


def takes_rng(loss_fn: Callable[..., Any], collections: Mapping[str, Any]) -> TakesRng:
    """Whether a loss has a third positional argument, and whether it needs it."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r}; expected a function of (params, batch) or more.")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [
        p
        for p in inspect.signature(loss_fn).parameters.values()
        if p.kind in kinds and p.name not in collections
    ]
    if len(positional) > 3:  # more are the user's own, if they have values
        positional = positional[:3] + [p for p in positional[3:] if p.default is p.empty]
    if not 2 <= len(positional) <= 3:
        raise TypeError(
            f"loss_fn: it takes {len(positional)} positional arguments, "
            f"({', '.join(p.name for p in positional)}); expected (params, batch) or "
            "(params, batch, rng), and one keyword for each collection."
        )
    if len(positional) == 2:
        return "no"
    return "yes" if positional[2].default is inspect.Parameter.empty else "if given"
