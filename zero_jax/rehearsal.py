"""A loss rehearsed: traced before it is run, to see how it takes parameters that gather themselves.

ZeRO's stage 3 gathers a parameter where a layer reads it (arXiv 1910.02054, section 7.2.2). A loss
may do more with its parameters than hand them to modules, and a device has only pieces: so the loss
is traced with `Partitioned` parameters, and `readings` says which of them it takes otherwise. Those
will be plain arrays. Then it is traced as it will be run, on pieces and on whole leaves. If it does
not do the same on both it looks at what is no business of a module (how many elements there are,
which of them have two dims), and all parameters will be plain arrays.

Nothing is computed here.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .at_use import Partitioned, Wire
from .readings import Reading, find_readings, same_events
from .shortfall import warn, warn_of_readings
from .step_options import StepOptions
from .subject import Device, Subject
from .wires import Axes

Tree = Any
_OUTSIDE = "the loss computes with it outside of any module"
_LOOKED_AT = "the loss looks at shapes of parameters, or at their number, outside of any module"


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

    A loss that cannot be traced with parameters that gather themselves reads them whole: what is
    wrong with it, if anything, it says when it is traced with plain arrays.

    Args:
      subject: the opened state.
      wires, trains: one for each of `subject.values`.
      batch, key: of the step, whole.
      axes: of the step.
      options: of the step.

    Raises:
      ValueError: it reads no parameter that trains, or none trains.

    Warns:
      ZeroWarning: parameters of stage 3 are gathered at its start, or it seems to read others.
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
            return subject.call(leaves, carried, batch, key, Device(lambda k: k, axes.batch))

        mapped = axes.on_devices(on_device, PartitionSpec(), PartitionSpec())
        return jax.make_jaxpr(mapped)(leaves, *given)

    wires = [w.gathered() if options.regather == "keep" else w for w in wires]
    everything: list[Reading] = ["read whole"] * len(wires)
    why = _OUTSIDE
    try:
        boxed = [_boxed(w, trains=False) for w in wires]
        closed = trace(boxed)
    except Exception as error:  # whatever the user's code raises on meeting such a parameter
        readings, why = everything, _in_a_line(error)
    else:
        readings = _find(closed, boxed, given)
        _check_read(subject, readings, trains, closed.consts)
        if "at use" in readings:
            looks = _looks(trace, wires, readings, trains)
            readings, why = (readings, why) if looks is None else (everything, looks)
    if options.regather == "layer":
        warn_of_readings(subject.placements, readings, why)
    return readings


def _find(closed: Any, boxed: list[Any], given: Any) -> list[Reading]:
    mapped = next(e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    inside, count = mapped.params["jaxpr"], len(jax.tree.leaves((boxed, given)))
    values = inside.invars[len(inside.invars) - count :]  # what it closes over comes first
    found = find_readings(inside, dict(zip(values, range(len(boxed)), strict=False)))
    return [found[at] for at in range(len(boxed))]


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
