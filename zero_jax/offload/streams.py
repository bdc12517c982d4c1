"""An update whose state lies on the host, in one pass over it: fetch, compute, write back.

ZeRO-Offload (arXiv 2101.06840, section 4) and ZeRO-Infinity (arXiv 2104.07857, section 5.2.2): the
optimizer state is larger than the device, so it goes through it chunk by chunk, and the next chunk
is fetched while one is computed. Any optax transformation: its update is traced and taken apart
(`dataflow`), and leaves that have nothing to do with each other pass one after the other.

  elementwise   a leaf is cut into boxes along dims that no device axis cuts (`boxes`)
  otherwise     the leaf passes whole, logical, as if it lay on the device; a large one is named
  small leaves  pass together, up to a chunk

Scalars that the optimizer computes from what is on the device (step counts, a global norm of
gradients) are computed once, before the pass. An update that reads what the host has of several
parameters at once (a norm over all moments) cannot be streamed, and is refused by name.

Not here: what lies where (`placement`), the update itself (`update`, `optimizer`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import constrain, pad, unpad
from ..reporting.tables import bytes_text
from ..shortfall import warn
from .boxes import Column, pass_in_boxes
from .dataflow import Constant, Name, trace
from .grouping import Input, Output, Stream, Update, find_streams, why_whole


def stream(
    function: Callable[..., list[Any]],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    chunk_bytes: int,
) -> list[jax.Array]:
    """Compute `function` on arrays some of which lie on the host; traced, in the global view.

    Args:
      function: of logical arrays in flight, one for each input; returns a list, one for each
        output.
      inputs: its arguments.
      outputs: of its results.
      chunk_bytes: how much of the host's arrays may pass at once, on one device.

    Returns:
      The results at rest.

    Raises:
      ValueError: the function needs the host's arrays of several parameters at once.

    Warns:
      ZeroWarning: a leaf of more than a chunk has to pass whole.
    """
    update = open_update(function, inputs, outputs)
    # Two boxes, results and what compilers need beside are 2.3 chunks on H100, 2.8 on v6e; with
    # boxes of a whole chunk they were 3.0 and 3.7.
    streams = find_streams(update, 3 * chunk_bytes // 4)
    for s in streams:
        if s.box is None and s.fetched_bytes > chunk_bytes:
            name, why = why_whole(update, s)
            warn(
                f"offload: {name} passes through the device whole, {bytes_text(s.fetched_bytes)} "
                f"where a chunk is {bytes_text(chunk_bytes)}: {why}."
            )
    known, results = compute_resident(update, streams)
    written: list[list[jax.Array]] = [[], []]
    for pack in _packs(streams, chunk_bytes):
        # fetched while the pack before is written, and not while the one before that is
        fetches = [at for s in pack for at in s.fetches]
        values, _ = lax.optimization_barrier(([inputs[at].value for at in fetches], written[-2]))
        values = dict(zip(fetches, values, strict=True))
        for s in pack:
            results |= zip(s.writes, _pass(update, s, values, known), strict=True)
        written.append([results[at] for s in pack for at in s.writes])
    return [results[at] for at in range(len(outputs))]


def open_update(
    function: Callable[..., list[Any]], inputs: Sequence[Input], outputs: Sequence[Output]
) -> Update:
    """Trace an update; arguments as those of `stream`."""
    logical = [jax.ShapeDtypeStruct(i.place.leaf.shape, i.value.dtype) for i in inputs]
    return Update(trace(function, *logical), inputs, outputs)


def compute_resident(
    update: Update, streams: Sequence[Stream]
) -> tuple[dict[Name, Any], dict[int, jax.Array]]:
    """What needs nothing of the host's: values that the streams read, and results by position."""
    graph, inputs, outputs = update.graph, update.inputs, update.outputs
    known: dict[Name, Any] = {
        name: i.logical() for name, i in zip(graph.inputs, inputs, strict=True) if not i.on_host
    }
    scalars = sorted({n for s in streams for n in s.part.inputs} - set(graph.inputs))
    known |= dict(zip(scalars, graph.part(scalars).run(known), strict=True))
    resident = [at for at in range(len(outputs)) if not any(at in s.writes for s in streams)]
    computed = graph.part([graph.outputs[at] for at in resident]).run(known)
    return known, {
        at: pad(jnp.asarray(x), outputs[at].place) for at, x in zip(resident, computed, strict=True)
    }


def _pass(
    update: Update, s: Stream, values: dict[int, jax.Array], known: dict[Name, Any]
) -> list[jax.Array]:
    """The new values of one stream, at rest."""
    graph, inputs, outputs = update.graph, update.inputs, update.outputs
    places = [outputs[at].place for at in s.writes]
    if s.box is None:
        fetched = {graph.inputs[at]: unpad(values[at], inputs[at].place) for at in s.fetches}
        results = s.part.run(known | fetched)
        return [pad(jnp.asarray(x), place) for x, place in zip(results, places, strict=True)]
    columns, targets, names = open_columns(update, s, values)

    def compute(boxes: list[Any]) -> list[Any]:
        return s.part.run(known | dict(zip(names, boxes, strict=True)), s.box)

    return pass_in_boxes(compute, columns, targets, s.box, columns[0].value.shape)


def open_columns(
    update: Update, s: Stream, values: dict[int, jax.Array]
) -> tuple[list[Column], list[int], list[Name]]:
    """The arrays of a stream that passes in boxes, the fetched ones first.

    Args:
      update, s: traced, and which of its streams.
      values: by position, inputs that are other arrays by now.

    Returns:
      The arrays; for each result which of them it is written into; names of those that are read.
    """
    graph, inputs, outputs = update.graph, update.inputs, update.outputs
    replaced = {at for at in (outputs[w].replaces for w in s.writes) if at is not None}
    shape = inputs[s.fetches[0]].place.leaf.shape
    reads = {
        at
        for at, name in enumerate(graph.inputs)
        if name in s.part.inputs and graph.shapes[name] == shape
    }
    members = [*s.fetches, *sorted((reads | replaced) - {*s.fetches})]
    columns = [
        Column(values[at] if at in values else i.value, i.lies, i.on_host, at in reads)
        for at, i in ((at, inputs[at]) for at in members)
    ]
    targets = []
    for at in s.writes:
        place, old, name = outputs[at].place, outputs[at].replaces, graph.outputs[at]
        if old is not None:
            targets.append(members.index(old))
            continue
        assert not isinstance(name, Constant)
        dtype = graph.dtypes[name]
        empty = constrain(jnp.zeros(place.partition.rest_shape, dtype), place.landing)
        targets.append(len(columns))
        columns.append(Column(empty, place.landing, False, False))
    return columns, targets, [graph.inputs[at] for at in members if at in reads]


def _packs(streams: list[Stream], chunk_bytes: int) -> list[list[Stream]]:
    """Streams in order, small ones together."""
    packs: list[list[Stream]] = []
    room = 0
    for s in streams:
        if s.box is None and packs and s.fetched_bytes <= room:
            packs[-1].append(s)
            room -= s.fetched_bytes
        else:
            packs.append([s])
            room = 0 if s.box is not None else chunk_bytes - s.fetched_bytes
    return packs
