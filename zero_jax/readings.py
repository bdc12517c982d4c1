"""How a loss reads its parameters, found by tracing it once.

A parameter handed to a model as a `Partitioned` (`at_use`) is gathered by each reading, and each
reading reduces a gradient of its own. That is ZeRO's stage 3 (arXiv 1910.02054, section 7.2.2)
where a layer reads its parameters once; elsewhere it would be wrong or wasteful:

  read whole   the loss computes with the numbers it finds in the parameter, of `jax.tree.leaves`
               say: it would meet a piece
  many times   a module used twice, a table tied to the output: the bytes would count twice
  whole stack  either of the two, of layers that a loop takes one by one
  in a loop    a recurrent network reads the same weights in every trip
  in a branch  of a `cond`: devices may take different ones, and a collective that only some of them
               reach waits for ever

Such parameters are gathered at the start of the loss and are plain arrays in it. The rest is
gathered where it is read. The trace says which is which; nothing is computed.

What leaves no mark on a parameter itself (a loss that counts elements, or takes only those of two
dims) shows when two traces with pieces of different sizes are compared: `same_events`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, TypeVar

from .at_use import READING

Reading = Literal[
    "at use", "read whole", "many times", "whole stack", "in a loop", "in a branch", "not read"
]

Key = TypeVar("Key")
Inside = Literal["in a loop", "in a branch"] | None
Known = tuple[Any, Inside]


@dataclass
class _Uses:
    gathers: int = 0
    inside: Inside = None
    whole: bool = False
    is_stack: bool = False


def find_readings(jaxpr: Any, values: Mapping[Any, Key]) -> dict[Key, Reading]:
    """Classify every parameter of a traced loss.

    Args:
      jaxpr: of the loss, with `Partitioned` parameters.
      values: its input variables that are values of parameters -> a name of each.
    """
    uses: dict[Any, _Uses] = {name: _Uses() for name in values.values()}
    for name, _ in _walk(jaxpr, {var: (name, None) for var, name in values.items()}, uses):
        uses[name].whole = True  # the loss returns it
    return {name: _reading(found) for name, found in uses.items()}


_SLICES = ("dynamic_slice", "squeeze")  # what takes one layer, a piece, from a stack in a loop


def same_events(one: Any, other: Any) -> bool:
    """Whether two traces of a loss do the same, whatever the shapes of what they gather.

    Args:
      one, other: closed jaxprs.
    """
    events = zip_longest(_events(one), _events(other))
    return all(a == b for a, b in events)


def _events(jaxpr: Any) -> Iterator[Any]:
    """What a trace does, in order: gathers, and results and numbers of all else."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    yield from (repr(c) for c in getattr(jaxpr, "consts", ()) if getattr(c, "shape", None) == ())
    for eqn in inner.eqns:
        kind, bodies = eqn.primitive.name, [*bodies_of(eqn)]
        numbers = [repr(v.val) for v in eqn.invars if hasattr(v, "val")]
        if eqn.params.get("name") in READING:
            yield "gather"
        elif bodies:
            if kind != "custom_vjp_call":  # a gather with a gradient is one
                yield kind, numbers
            for body in bodies:
                yield from _events(body)
        elif kind in _SLICES:
            yield kind, numbers
        elif kind != "stop_gradient":  # of a gather without one
            yield kind, numbers, [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def _reading(found: _Uses) -> Reading:
    if found.is_stack and (found.whole or found.gathers > 1) and found.inside is None:
        return "whole stack"
    if found.whole:
        return "read whole"
    if found.inside is not None:
        return found.inside
    return "not read" if not found.gathers else "at use" if found.gathers == 1 else "many times"


def _walk(jaxpr: Any, known: dict[Any, Known], uses: dict[Any, _Uses]) -> list[Known]:
    """Follow values through calls and loops.

    Args:
      jaxpr: open or closed.
      known: variables that are values, or layers of them -> name, and what they are inside of.
      uses: what has been found, added to.

    Returns:
      Those that come out as they went in: `nnx.scan` hands its parameters through.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in inner.eqns:
        read = [known[v] for v in eqn.invars if _is_known(v, known)]
        if not read:
            continue
        bodies = [] if eqn.primitive.name == "while" else [*bodies_of(eqn)]
        if eqn.params.get("name") in READING:
            for name, inside in read:
                uses[name].gathers += 1
                uses[name].is_stack |= eqn.params["name"] == READING[1]
                uses[name].inside = uses[name].inside or inside
        elif bodies:
            for body in bodies:
                inside = _inside(eqn, body, known, uses)
                _walk(body, inside, uses)
                outputs = zip(eqn.outvars, getattr(body, "jaxpr", body).outvars, strict=False)
                known |= {o: inside[v] for o, v in outputs if _is_known(v, inside)}
        else:
            for name, _ in read:
                uses[name].whole = True
    return [known[v] for v in inner.outvars if _is_known(v, known)]


def _inside(
    eqn: Any, body: Any, known: dict[Any, Known], uses: dict[Any, _Uses]
) -> dict[Any, Known]:
    """Known variables as the body of a call or loop names them.

    A body's inputs are the last of the equation's. In a scan, what has lost a dim is one of a stack
    and read once; what has not is read in every trip.
    """
    names = getattr(body, "jaxpr", body).invars
    found: dict[Any, Known] = {}
    for outer, var in zip(eqn.invars[len(eqn.invars) - len(names) :], names, strict=True):
        if _is_known(outer, known):
            path, inside = known[outer]
            if eqn.primitive.name == "cond":
                inside = "in a branch"
            elif eqn.primitive.name == "scan" and outer.aval.shape == var.aval.shape:
                inside = inside or "in a loop"
            elif eqn.primitive.name == "scan":
                uses[path].is_stack = True
            found[var] = path, inside
    return found


def _is_known(var: Any, known: dict[Any, Any]) -> bool:
    return hasattr(var, "aval") and not hasattr(var, "val") and var in known


def bodies_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs: of a call, of a loop, of each branch."""
    if eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call"):
        yield eqn.params["call_jaxpr"]  # the other parameters are rules, not what is computed
        return
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one
