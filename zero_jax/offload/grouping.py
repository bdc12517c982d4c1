"""Which leaves of an update pass through the device together, and in what pieces.

Outputs that need the same arrays from the host's memory, or from files, are one stream: a
parameter, its moments and its master copy. A stream whose part of the update is elementwise passes
in boxes, any other whole.
Scalars that depend on nothing that is away (step counts, a global norm of gradients on the device)
belong to no stream.

Not here: the pass itself (`streams`, `boxes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import NamedSharding

from ..collectives import unpad
from ..placement import Placement
from ..reporting.tables import bytes_text
from .boxes import box_of
from .dataflow import Graph, Name, Part

ChooseBox = Callable[[tuple[int, ...], Sequence[bool], int, int], tuple[int, ...] | None]


@dataclass(frozen=True)
class Input:
    """An array of the update.

    Attributes:
      value: the array, at rest; or in flight, logical.
      place: where it lies.
      in_flight: which of the two.
    """

    value: jax.Array
    place: Placement
    in_flight: bool = False

    @property
    def on_host(self) -> bool:
        """Whether it lies in the host's memory."""
        return self.place.on_host and not self.in_flight

    @property
    def is_away(self) -> bool:
        """Whether it has to be fetched, from the host's memory or from files."""
        return self.place.is_away and not self.in_flight

    @property
    def lies(self) -> NamedSharding:
        """How it is cut over devices, on the device."""
        return self.place.flight if self.in_flight else self.place.landing

    def logical(self) -> jax.Array:
        """The array in flight."""
        return self.value if self.in_flight else unpad(self.value, self.place)


@dataclass(frozen=True)
class Output:
    """A result of the update.

    Attributes:
      place: where it is going to lie.
      replaces: position of the input whose new value it is, and in whose memory it is written;
        None: of none.
    """

    place: Placement
    replaces: int | None


@dataclass(frozen=True)
class Update:
    """A traced update, and where its arrays lie.

    Attributes:
      graph: from `inputs` to `outputs`.
      inputs, outputs: one for each of the graph's.
    """

    graph: Graph
    inputs: Sequence[Input]
    outputs: Sequence[Output]


@dataclass(frozen=True)
class Stream:
    """What passes together: one parameter, and what the optimizer keeps of it.

    Attributes:
      part: what computes it.
      fetches: positions of inputs that are away.
      writes: positions of outputs.
      box: shape of a chunk; None: whole.
      fetched_bytes: of one device.
    """

    part: Part
    fetches: tuple[int, ...]
    writes: tuple[int, ...]
    box: tuple[int, ...] | None
    fetched_bytes: int


def find_streams(update: Update, most_bytes: int, choose: ChooseBox = box_of) -> list[Stream]:
    """Take an update apart.

    Args:
      update: traced.
      most_bytes: of the arrays of one stream on one device, above which it passes in boxes.
      choose: how a leaf is cut into them.

    Raises:
      ValueError: it needs what is away of several parameters at once.
    """
    graph, outputs = update.graph, update.outputs
    position = {name: at for at, name in enumerate(graph.inputs)}
    fetched = {name for name, i in zip(graph.inputs, update.inputs, strict=True) if i.is_away}
    scalars = scalars_of(update)
    groups: list[tuple[set[Name], list[int]]] = []
    for at, name in enumerate(graph.outputs):
        part = graph.part([name], scalars)
        needs = set(part.inputs & fetched)
        replaced = outputs[at].replaces
        if outputs[at].place.is_away and replaced is not None:
            needs.add(graph.inputs[replaced])
        if needs:
            joined = [g for g in groups if g[0] & needs]
            groups = [g for g in groups if g not in joined]
            outs = sorted([at, *(o for g in joined for o in g[1])])
            groups.append((needs.union(*(g[0] for g in joined)), outs))
    streams = []
    for needs, writes in sorted(groups, key=lambda g: g[1]):
        part = graph.part([graph.outputs[at] for at in writes], scalars)
        fetches = sorted(position[name] for name in needs)
        size = sum(update.inputs[at].place.bytes_per_device for at in fetches)
        whole = Stream(part, tuple(fetches), tuple(writes), None, size)
        _check_apart(update, whole)
        streams.append(replace(whole, box=_box(update, whole, most_bytes, choose)))
    return streams


def scalars_of(update: Update) -> frozenset[Name]:
    """Numbers that the update computes from what is on the device."""
    graph = update.graph
    away = {name for name, i in zip(graph.inputs, update.inputs, strict=True) if i.is_away}
    touched = graph.touched_by(away)
    return frozenset(
        name
        for equation in graph.equations
        for name in equation.writes
        if graph.shapes[name] == () and name not in touched
    )


def _box(update: Update, s: Stream, most_bytes: int, choose: ChooseBox) -> tuple[int, ...] | None:
    """The chunk in which a stream may pass; None: whole."""
    places = [update.inputs[at].place for at in s.fetches]
    shape, rest_shape = places[0].leaf.shape, places[0].partition.rest_shape
    places += [update.outputs[at].place for at in s.writes]
    alike = all(p.leaf.shape == shape and len(p.partition.rest_shape) == len(shape) for p in places)
    if not alike or not s.part.is_elementwise(shape):
        return None
    specs = [(*p.rest.spec, *[None] * len(shape)) for p in places]
    stays = [
        any(s[d] is not None for s in specs)
        or any(p.partition.rest_shape[d] != shape[d] for p in places)
        for d in range(len(shape))
    ]
    return choose(rest_shape, stays, s.fetched_bytes, most_bytes)


def _check_apart(update: Update, s: Stream) -> None:
    """Refuse an update that needs what is away of several parameters at once."""
    places = [update.outputs[at].place for at in s.writes]
    params = [place.leaf.path for place in places if place.tree == "params"]
    if len(params) > 1:
        raise ValueError(
            f"offload: the optimizer needs the state of {len(params)} parameters at once, from "
            f"params/{params[0]} to params/{params[-1]} ({bytes_text(s.fetched_bytes)} a device), "
            "so that it cannot pass through the device leaf by leaf. Keep its state on the device "
            "(no offload=), or use an optimizer without a norm over all of its state; for a norm "
            "of the gradients there is make_train_step(clip_norm=)."
        )


def why_whole(update: Update, s: Stream) -> tuple[str, str]:
    """The name of a leaf that passes whole, and why it does."""
    place = update.inputs[s.fetches[0]].place
    shape, part = place.leaf.shape, s.part
    reasons = sorted({e.primitive for e, w in part.equations if not part.fits(e, w, shape)})
    why = f"its update is not elementwise ({', '.join(reasons)})" if reasons else "no dim is free"
    return f"{place.tree}/{place.leaf.path}", why
