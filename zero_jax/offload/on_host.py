"""An update computed by the host's processor, where the optimizer state lies.

ZeRO-Offload (arXiv 2101.06840, section 4): gradients go to the host, the optimizer runs there, and
new parameters come back in their dtype at rest. Moments and master copies never leave. Of a bf16
parameter with a master copy 2 or 4 bytes go, its gradient, and 2 come back; Adam's state that
passes through the device is 24. A parameter without a master copy goes there, too. Each process
computes the parts of its own devices.

Elementwise updates only, any other is refused by name: so a leaf is computed in the form that it
has at rest, in boxes (`boxes`), each written where it was read. On the device are a box of the
gradient and one of the new parameter.

XLA for GPUs lets the host write nothing where it has read. There leaves are computed whole, all in
one go, and the host holds the optimizer state twice until the update is done.

Not here: the update itself (`update`, `optimizer`), what lies where (`placement`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from ..collectives import constrain, pad, unpad
from ..memories import DEVICE, HOST, as_host, compute_on_host, to_host
from ..placement import Placement
from ..reporting.tables import bytes_text
from ..shortfall import warn
from .boxes import Boxes, box_of, read_box, write_box
from .dataflow import Name
from .grouping import Input, Output, Stream, Update, find_streams
from .streams import compute_resident, open_columns, open_update

Arrays = list[Any]


def update_on_host(
    function: Callable[..., list[Any]],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    chunk_bytes: int,
) -> list[jax.Array]:
    """Compute `function` on the host as far as it needs arrays that lie there; traced.

    Args:
      function, inputs, outputs: as for `stream`.
      chunk_bytes: of the host's arrays, how much is computed at once, for one device.

    Returns:
      The results at rest.

    Raises:
      ValueError: where the function needs the host's arrays it is not elementwise.

    Warns:
      ZeroWarning: on GPUs, how much the host holds twice.
    """
    in_place = inputs[0].place.mesh.devices.flat[0].platform not in ("gpu", "cuda", "rocm")
    update = open_update(function, inputs, outputs)
    streams = find_streams(update, chunk_bytes, box_of if in_place else lambda *_: None)
    for s in streams:
        _check_elementwise(update, s)
    if not in_place:
        _warn_twice(streams, chunk_bytes)
    known, results = compute_resident(update, streams)
    for s in streams:
        numbers = {n: known[n] for n in sorted(s.part.inputs) if update.graph.shapes[n] == ()}
        compute = _compute_whole if s.box is None else _compute_boxes
        results |= zip(s.writes, compute(update, s, numbers), strict=True)
    return [results[at] for at in range(len(outputs))]


def _compute_boxes(update: Update, s: Stream, numbers: dict[Name, jax.Array]) -> Arrays:
    """The new values of one stream at rest, box by box, in place."""
    assert s.box is not None
    columns, targets, names = open_columns(update, s, {})
    boxes, cut, box = Boxes(columns[0].value.shape, s.box), columns[0].lies, s.box
    stays = [c.on_host and c.lies == cut and boxes.own(c.value.shape) == box for c in columns]
    there = [at for at, stay in enumerate(stays) if stay]
    reads = [at for at, c in enumerate(columns) if c.is_read]
    goes = [at for at in reads if not stays[at]]

    def compute(held: Arrays, sent: Arrays, said: Arrays, i: Any) -> Arrays:
        whole = dict(zip(there, held, strict=True))
        pieces = {at: lax.dynamic_slice(x, boxes.corner(i), box) for at, x in whole.items()}
        pieces |= zip(goes, sent, strict=True)
        given = dict(zip(names, (pieces[at] for at in reads), strict=True))
        new = s.part.run(given | dict(zip(numbers, said, strict=True)), box, placed=False)
        for n, at in enumerate(targets):
            if stays[at]:
                piece = new[n].astype(whole[at].dtype)
                new[n] = lax.dynamic_update_slice(whole[at], piece, boxes.corner(i))
        return [constrain(x, cut) for x in new]

    def trip(i: Any, state: Arrays) -> Arrays:
        sent = [read_box(state[at], boxes, i, cut, on_host=columns[at].on_host) for at in goes]
        said = [*numbers.values()]
        memories = [HOST if stays[at] else DEVICE for at in targets]
        run = compute_on_host(compute, memories)
        results = run([state[at] for at in there], *jax.tree.map(to_host, (sent, said, i)))
        state = [*state]
        for at, new in zip(targets, results, strict=True):
            column = columns[at]
            if not stays[at]:
                new = constrain(new, cut)
                new = write_box(state[at], new, boxes, i, column.lies, on_host=column.on_host)
            state[at] = new
        return state

    state = [as_host(c.value) if c.on_host else c.value for c in columns]
    state = lax.fori_loop(0, boxes.count, trip, state)
    return [state[at] for at in targets]


def _compute_whole(update: Update, s: Stream, numbers: dict[Name, jax.Array]) -> Arrays:
    """The new values of one stream at rest, at once."""
    graph, inputs, outputs = update.graph, update.inputs, update.outputs
    away = [outputs[w].place for w in s.writes if outputs[w].place.on_host]
    home = away[0] if away else inputs[s.fetches[0]].place
    form = replace(home, memory="device")  # into which every array is brought
    stays = {at for at in s.fetches if _lie_alike(inputs[at].place, home)}
    reads = [at for at, n in enumerate(graph.inputs) if n in s.part.inputs and n not in numbers]
    held = [as_host(inputs[at].value) for at in reads if at in stays]
    sent = [pad(inputs[at].logical(), form) for at in reads if at not in stays]
    names = [graph.inputs[at] for at in sorted(reads, key=lambda at: at not in stays)]

    def compute(*there: Arrays) -> Arrays:
        given = dict(zip([*names, *numbers], sum(there, []), strict=True))
        new = s.part.run(given, home.partition.rest_shape, placed=False)
        return [constrain(x, form.landing) for x in new]

    kept = [outputs[w].replaces in stays for w in s.writes]
    run = compute_on_host(compute, [HOST if stay else DEVICE for stay in kept])
    results = run(held, *jax.tree.map(to_host, (sent, [*numbers.values()])))
    rest = (outputs[w].place for w in s.writes)
    return [
        new if stay else pad(unpad(constrain(new, form.landing), form), place)
        for new, stay, place in zip(results, kept, rest, strict=True)
    ]


def _lie_alike(a: Placement, b: Placement) -> bool:
    return (a.partition.rest_shape, a.landing) == (b.partition.rest_shape, b.landing)


def _check_elementwise(update: Update, s: Stream) -> None:
    """Refuse an update that is more than elementwise, by the leaf or the primitive."""
    places = [update.outputs[w].place for w in s.writes]
    places += [update.inputs[at].place for at in s.fetches]
    param = next((p for p in places if p.tree == "params"), places[0])
    shape = param.leaf.shape
    odd = next((p for p in places if p.leaf.shape != shape), None)
    if odd is not None:
        why = f"{odd.tree}/{odd.leaf.path} has shape {odd.leaf.shape} where it has {shape}"
    elif not s.part.is_elementwise(shape):
        more = {e.primitive for e, w in s.part.equations if not s.part.fits(e, w, shape)}
        why = f"its update has {', '.join(sorted(more)) or 'a result of another shape'}"
    else:
        return
    raise ValueError(
        'offload: HostMemory(update_on="host") computes optimizers that work element by element, '
        f"and that of {param.tree}/{param.leaf.path} is more than that: {why}. Leave update_on "
        "out; on the device any optimizer can run."
    )


def _warn_twice(streams: Sequence[Stream], chunk_bytes: int) -> None:
    """Say what the host holds twice where nothing is written in place."""
    twice_bytes = sum(s.fetched_bytes for s in streams)
    if twice_bytes > chunk_bytes:
        warn(
            'offload: XLA for GPUs writes nothing in place that the host computes (update_on="host"'
            f"): during an update its memory holds {bytes_text(twice_bytes)} a device more."
        )
