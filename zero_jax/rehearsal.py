"""A loss rehearsed: traced before it is run, to see how it takes parameters that gather themselves.

ZeRO's stage 3 gathers a parameter where a layer reads it (arXiv 1910.02054, section 7.2.2). A loss
may do more with its parameters than hand them to modules or compute with them, and a device has
only pieces: so the loss is traced with `Partitioned` parameters, and `readings` says which of them
it takes otherwise. Those will be plain arrays. Then it is traced as it will be run, on pieces and
on whole leaves. If it does not do the same on both it looks at what is no business of a module (how
many elements there are, which of them have two dims).

Where a loss cannot be traced so, or looks, the parameters that are the cause are searched for by
halves, and will be plain arrays; all of them where the search is long.

Nothing is computed here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from .alike import check_alike
from .at_use import Partitioned, Wire
from .joining import check_same
from .local_gradients import read_loss, this_device
from .placement import Placement
from .readings import Reading, find_readings, same_events
from .shortfall import warn, warn_of_readings
from .stage import Stage
from .step_options import StepOptions
from .subject import Subject
from .wires import Axes

Tree = Any
_OUTSIDE = (
    "the loss reads them in several places, or takes their numbers (of jax.tree.leaves, say) "
    "outside of any module"
)
_LOOKED_AT = "the loss looks at shapes of parameters, or at their number, outside of any module"
_TRIES = 20  # traces that a search may take; with one cause among 100 parameters it takes 14


@dataclass(frozen=True)
class _Heard:
    """What a trace of the loss said: readings, the jaxpr of a device, and its constants."""

    readings: list[Reading]
    jaxpr: Any
    constants: list[Any]


def rehearse(
    subject: Subject,
    wires: list[Wire],
    trains: list[bool],
    batch: Tree,
    key: Any,
    axes: Axes,
    options: StepOptions,
) -> list[Reading]:
    """How the loss reads each value.

    What is wrong with a loss, if anything, it says when it is traced with plain arrays.

    Args:
      subject: the opened state.
      wires, trains: one for each of `subject.values`.
      batch, key: of the step, whole.
      axes: of the step.
      options: of the step.

    Raises:
      ValueError: it reads no parameter that trains, or none trains; or devices would differ in
        what it carries.

    Warns:
      ZeroWarning: parameters are gathered at its start, or it seems to read others.
    """
    parts = axes.size * options.microbatches
    given = (
        jax.tree.map(_like, subject.carried),
        jax.tree.map(lambda x: _like(x, parts), batch),
        jax.tree.map(_like, key),
    )

    def trace(leaves: list[Any]) -> Any:
        """A jaxpr of what one device does; parameters are the first of its inputs."""

        def on_device(leaves: list[Any], carried: Tree, batch: Tree, key: Any) -> Any:
            here = this_device(axes, 0)
            out, changed, aux = subject.call(leaves, carried, batch, key, here)
            check_same(carried, changed)
            return jax.tree.leaves(changed), read_loss(out), aux

        mapped = axes.on_devices(on_device, PartitionSpec(), PartitionSpec())
        return jax.make_jaxpr(mapped)(leaves, *given)

    at_use = [w.gathered() if options.regather == "keep" else w for w in wires]

    def attempt(boxed: Sequence[int]) -> _Heard | str:
        return _attempt(trace, at_use, trains, set(boxed), given)

    heard, why = _listen(attempt, len(wires))
    if isinstance(heard, str):
        return ["read whole"] * len(wires)
    _check_read(subject, heard.readings, trains, heard.constants)
    check_alike(subject, heard.jaxpr, len(jax.tree.leaves(given)))
    if options.regather == "layer":
        stage = subject.layout.stage
        warn_of_readings(stage, _held_long(stage, subject.placements, wires, heard.readings), why)
    return heard.readings


def _held_long(
    stage: Stage, placements: list[Placement], wires: list[Wire], readings: list[Reading]
) -> dict[str, int]:
    """Path -> bytes of what is whole for long because of how the loss reads it.

    At stage 3 a parameter. Below it a stack's gradient, which is summed up whole in the backward
    pass of the loop over its layers; that of a single layer is scattered as soon as it is known.
    """
    found = {}
    for placement, wire, reading in zip(placements, wires, readings, strict=True):
        if stage.partitions_parameters:
            if reading in ("read whole", "whole stack") and placement.partition.parts > 1:
                found[wire.path] = placement.total_bytes
        elif reading == "whole stack" and wire.scatters_at_use and wire.grad.parts > 1:
            found[wire.path] = prod(wire.grad.shape) * jnp.dtype(wire.reduce).itemsize
    return found


def _listen(
    attempt: Callable[[Sequence[int]], _Heard | str], count: int
) -> tuple[_Heard | str, str]:
    """The readings with as many parameters as possible gathering themselves.

    Args:
      attempt: which of the parameters do so -> what the loss says to that, or what is against it.
      count: of parameters.

    Returns:
      The readings, or what is wrong with the loss itself; and why some are read whole.
    """
    heard = attempt(range(count))
    if not isinstance(heard, str):
        return heard, _OUTSIDE
    why, plain = heard, attempt(())
    if isinstance(plain, str):
        return plain, why
    causes = _search(attempt, count)
    heard = attempt([at for at in range(count) if at not in causes])
    return (plain if isinstance(heard, str) else heard), why


def _search(attempt: Callable[[Sequence[int]], _Heard | str], count: int) -> set[int]:
    """The parameters that a loss does not take, each alone; all where that takes long to find."""
    groups, causes = [range(0, count // 2), range(count // 2, count)], set()
    for _ in range(_TRIES):
        if not groups:
            return causes
        group = groups.pop()
        if not group or not isinstance(attempt(group), str):
            continue
        if len(group) == 1:
            causes |= {*group}
        else:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return causes if not groups else {*range(count)}


def _attempt(
    trace: Callable[[list[Any]], Any],
    wires: list[Wire],
    trains: list[bool],
    boxed: set[int],
    given: Any,
) -> _Heard | str:
    """Trace the loss with some parameters gathering themselves; see `_listen`."""
    leaves = [_boxed(w, False) if at in boxed else _plain(w) for at, w in enumerate(wires)]
    try:
        closed = trace(leaves)
    except Exception as error:  # whatever the user's code raises on meeting such a parameter
        return _in_a_line(error)
    mapped = next(e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    inside, count = mapped.params["jaxpr"], len(jax.tree.leaves((leaves, given)))
    # an NNX norm asks `if self.bias` first, which is a reading of no consequence
    inside, _ = partial_eval.dce_jaxpr(inside, [True] * len(inside.outvars), instantiate=True)
    values = inside.invars[len(inside.invars) - count :]  # what it closes over comes first
    found = find_readings(inside, dict(zip(values, range(len(leaves)), strict=False)))
    heard = _Heard([found[at] for at in range(len(leaves))], inside, closed.consts)
    looks = _looks(trace, wires, heard.readings, trains) if "at use" in heard.readings else None
    return heard if looks is None else looks


def _looks(
    trace: Any, wires: list[Wire], readings: list[Reading], trains: list[bool]
) -> str | None:
    """What the loss does that differs between pieces and whole leaves; None where nothing does."""
    alone = [replace(w, rest=w.rest.alone()) for w in wires]
    frozen = [False] * len(wires)

    def mixed(wires: list[Wire], trains: list[bool]) -> list[Any]:
        triples = zip(wires, trains, readings, strict=True)
        return [_boxed(w, t) if reading == "at use" else _plain(w) for w, t, reading in triples]

    try:
        whole = trace(mixed(alone, frozen))
        # once without carriers, since one of those may have the shape that a piece has not
        same = all(same_events(trace(mixed(wires, t)), whole) for t in (frozen, trains))
    except Exception as error:  # as above
        return _in_a_line(error)
    return None if same else _LOOKED_AT


def _boxed(wire: Wire, trains: bool) -> Partitioned:
    """A parameter as the loss meets it on a device, without its numbers."""
    value = jax.ShapeDtypeStruct(wire.rest.piece_shape, wire.compute)
    return Partitioned(value, jax.eval_shape(wire.carrier) if trains else None, wire)


def _plain(wire: Wire) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(wire.rest.shape, wire.compute)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _like(x: Any, parts: int = 1) -> jax.ShapeDtypeStruct:
    """Shape and dtype, of one part of the rows."""
    shape = jnp.shape(x)
    return jax.ShapeDtypeStruct((shape[0] // parts, *shape[1:]) if shape else (), x.dtype)


def _check_read(
    subject: Subject, readings: list[Reading], trains: list[bool], constants: list[Any]
) -> None:
    """Whether the loss reads what it is given, and not the same arrays from around it.

    Raises:
      ValueError: it reads no parameter that trains, or none trains.
    """
    triples = zip(subject.placements, readings, trains, strict=True)
    idle = [p for p, reading, trained in triples if trained and reading == "not read"]
    if not any(trains):
        raise ValueError("frozen: it freezes every parameter; nothing is left to train.")
    if len(idle) == sum(trains):
        raise ValueError(
            f"loss_fn: it reads none of the {len(idle)} parameters that it is given, so nothing "
            "would train; read them from its first argument, not from a model or state around it."
        )
    shapes = {jnp.shape(c) for c in constants if jnp.ndim(c)}
    twins = [p.leaf for p in idle if {p.leaf.shape, p.partition.rest_shape} & shapes]
    if twins:
        warn(
            f"loss_fn: it does not read {twins[0].path!r}, {len(twins)} such in all, and closes "
            f"over an array of its shape {twins[0].shape}. If that is the parameter, it does not "
            "train: read it from the first argument."
        )
