"""What is no array and answers to what arrays answer to, by making one.

For a parameter on its way through a model (`at_use`): a loss may read it through a module, or say
`x @ params["embedding"].T`, and both are one reading. Each answer makes the array anew.

`jnp` functions take such an object for the array it makes, and so do operators on arrays; functions
of `jax.lax` do not. What an array says of the devices it lies on is not asked for here.
"""

from collections.abc import Callable
from typing import Any

import jax

Array = Any

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("lshift", "rshift", "divmod"),
)
_SPECIAL = (
    *(f"__{name}__" for name in _OPERATORS),
    *(f"__r{name}__" for name in _OPERATORS),
    *("__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__"),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__getitem__", "__iter__", "__len__"),
    *("__bool__", "__float__", "__int__", "__complex__", "__index__", "__array__"),
)
_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "conjugate", "copy"),
    *("cumprod", "cumsum", "diagonal", "dot", "flatten", "max", "mean", "min", "nonzero", "prod"),
    *("ravel", "repeat", "reshape", "round", "sort", "squeeze", "std", "sum", "swapaxes", "take"),
    *("trace", "transpose", "var", "view"),
)
_PROPERTIES = ("T", "mT", "at", "real", "imag")


class ArrayLike:
    """An object that is read as the array it makes.

    Attributes of an array that cost nothing (`shape`, `ndim`, `dtype`) are the subclass's own.
    """

    __array_priority__ = 100  # numpy's arrays leave operators to it
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def unbox(self) -> Array:
        """Make the array."""
        raise NotImplementedError

    def __jax_array__(self) -> jax.Array:
        return self.unbox()


def _method(name: str) -> Callable[..., Any]:
    def method(self: ArrayLike, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.unbox(), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _property(name: str) -> property:
    return property(lambda self: getattr(self.unbox(), name))


for _name in (*_SPECIAL, *_METHODS):
    setattr(ArrayLike, _name, _method(_name))
for _name in _PROPERTIES:
    setattr(ArrayLike, _name, _property(_name))
