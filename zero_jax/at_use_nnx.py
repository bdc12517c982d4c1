"""Parameters of an NNX model, gathered where the model reads them.

An NNX module reads a parameter through its Variable (`self.kernel[...]`). Here the Variables of a
model are given a class that gathers on reading: a subclass of their own, so that filters
(`nnx.Param`) go on meaning what they did. It survives `nnx.scan`, `nnx.vmap` and `nnx.remat`, which
take a Variable's content apart and keep its class. See `at_use` for what is gathered, and how.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from flax import nnx
from flax.typing import Missing

from .at_use import Partitioned
from .flax_nnx import parameters_of


def hand_over(model: nnx.Module, wrt: Any, params: Mapping[str, Any]) -> None:
    """Put parameters into a model, in place.

    Args:
      model: an NNX module that was made in this very trace.
      wrt: the filter of its trained parameters.
      params: path -> `Partitioned`, to be gathered on reading, or a whole array.
    """
    for path, variable in parameters_of(model, wrt).items():
        given = params[path]
        if isinstance(given, Partitioned):
            variable.__class__ = _gathered_on_reading(type(variable))
        variable.set_raw_value(given)


@cache
def _gathered_on_reading(kind: type[nnx.Variable[Any]]) -> type[nnx.Variable[Any]]:
    """The subclass of a Variable's class whose content is gathered when it is read."""

    def get_value(self: Any, **index: Any) -> Any:
        given = self.get_raw_value()
        if not isinstance(given, Partitioned):
            return kind.get_value(self, **index)
        whole, chosen = given.unbox(), index.get("index", ...)
        return whole if chosen is ... or isinstance(chosen, Missing) else whole[chosen]

    return type(kind.__name__, (kind,), {"__slots__": (), "get_value": get_value})
