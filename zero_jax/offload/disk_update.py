"""An update whose optimizer state lies in files: read the next piece, compute this, write the last.

ZeRO-Infinity (arXiv 2104.07857, section 5.2.2): reading, computing and writing overlap, and the
update goes at the speed of the disk. The streams are those of `grouping`: a parameter, its moments
and its master copy pass together, in pieces where the update is elementwise. Here the pass is a
loop of the host, and a piece is computed by a jitted function that is compiled once for all streams
that look alike. The parameter is replaced in its own memory, piece by piece.

Four pieces of a stream are in host memory at most: two that come, two that go.

Not here: the directory (`disk`), the update itself (`update`), the rest of a step (`disk_step`).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..collectives import pad
from ..memories import to_host
from .boxes import fitted, read_box, write_box
from .dataflow import Name
from .disk import Disk
from .disk_array import arrive, start_reading, write_piece
from .disk_passes import Pass
from .grouping import Update


class DiskUpdate:
    """An update, compiled piece by piece; run it with `run`.

    Attributes:
      passes: the streams, in order.
      stays: outputs in memory that are their inputs, unless a stream has them.
      pieces: position of an output that is written to files -> its pieces.
    """

    def __init__(
        self, update: Update, passes: list[Pass], stays: list[int], compiler_options: Any = None
    ):
        self.update, self.passes = update, passes
        self.pieces = {
            w: p.boxes.of(update.outputs[w].place.partition.rest_shape)
            for p in passes
            for w in p.filed
        }
        self._places = [[update.inputs[f].place for f in p.files] for p in passes]
        self._jit = partial(jax.jit, compiler_options=compiler_options)
        self._functions: dict[str, Any] = {}
        self._of_pass: dict[tuple[int, int], Any] = {}
        written = {w for p in passes for w in p.stream.writes}
        self._stays = [at for at in stays if at not in written]
        computed = set(range(len(update.outputs))) - written - set(self._stays)
        self._resident = sorted(computed)
        self._numbers = sorted({n for p in passes for n in p.numbers})
        graph = update.graph
        wanted = [*self._numbers, *(graph.outputs[at] for at in self._resident)]
        self._part = graph.part(wanted)
        self._first_reads = [n for n, name in enumerate(graph.inputs) if name in self._part.inputs]
        self._last_reader = {r: at for at, p in enumerate(passes) for r in p.reads}
        self._first = self._jit(self._compute_first)

    def run(self, disk: Disk, values: list[Any]) -> list[Any]:
        """The new arrays in memory, one for each output; None for one in files.

        Args:
          disk: the directory, begun.
          values: arrays of the inputs that are in memory, at rest or in flight as the inputs say;
            None for those in files. The list is emptied: gradients go as soon as they are used, and
            parameters are donated.
        """
        results: list[Any] = [None] * len(self.update.outputs)
        for w in self._stays:
            results[w] = values[self._replaced(w)]
        numbers, resident = self._first([values[at] for at in self._first_reads])
        known = dict(zip(self._numbers, numbers, strict=True))
        for at, x in zip(self._resident, resident, strict=True):
            results[at] = x
        coming: deque[Any] = deque()
        going: deque[Any] = deque()
        turns = self._turns()

        def fetch() -> None:
            turn = next(turns, None)
            if turn is not None:
                at, i = turn
                boxes = self.passes[at].boxes
                reading = [start_reading(disk, x, boxes, i) for x in self._places[at]]
                coming.append((at, i, reading))

        fetch()
        while coming:
            fetch()  # the next is read while this one is computed
            at, i, readings = coming.popleft()
            p = self.passes[at]
            pairs = zip(self._places[at], readings, strict=True)
            pieces = [arrive(disk, place, p.boxes, i, reading) for place, reading in pairs]
            function = self._function(at, i, values, known)
            old = [values[r] for r in p.replaces]
            for r in p.replaces:
                values[r] = None
            new, out, _ = function(
                jnp.int32(i),
                [known[n] for n in p.numbers],
                pieces,
                [values[r] for r in p.reads],
                old,
            )
            del old, pieces
            for r, x in zip(p.replaces, new, strict=True):
                values[r] = x
            if i == p.boxes.count - 1:
                for r in p.reads:
                    if self._last_reader[r] == at:
                        values[r] = None
            going.append((p, i, out))
            if len(going) > 1:
                self._send(disk, *going.popleft())
        while going:
            self._send(disk, *going.popleft())
        for p in self.passes:
            for w in p.stream.writes:
                results[w] = values[self._replaced(w)]
        return results

    def _replaced(self, output: int) -> int:
        """The input whose place an output takes."""
        replaces = self.update.outputs[output].replaces
        assert replaces is not None
        return replaces

    def _turns(self) -> Iterator[tuple[int, int]]:
        return ((at, i) for at, p in enumerate(self.passes) for i in range(p.boxes.count))

    def _send(self, disk: Disk, p: Pass, i: int, pieces: list[jax.Array]) -> None:
        for piece in pieces:
            piece.copy_to_host_async()
        for w, piece in zip(p.filed, pieces, strict=True):
            write_piece(disk, self.update.outputs[w].place, p.boxes, i, piece)

    def _compute_first(self, given: list[jax.Array]) -> tuple[list[Any], list[Any]]:
        """Scalars that streams need, and outputs that no stream computes."""
        graph, inputs, outputs = self.update.graph, self.update.inputs, self.update.outputs
        known = {
            graph.inputs[at]: replace(inputs[at], value=x).logical()
            for at, x in zip(self._first_reads, given, strict=True)
        }
        computed = self._part.run(known)
        n = len(self._numbers)
        resident = zip(self._resident, computed[n:], strict=True)
        return computed[:n], [pad(jnp.asarray(x), outputs[at].place) for at, x in resident]

    def _function(self, at: int, i: int, values: list[Any], known: dict[Name, Any]) -> Any:
        """The jitted function of a piece, shared by all that look alike."""
        p = self.passes[at]
        like = p.boxes.like(i)
        if (at, like) in self._of_pass:
            return self._of_pass[at, like]
        inputs, outputs = self.update.inputs, self.update.outputs
        pieces = [
            jax.ShapeDtypeStruct(
                p.boxes.own(x.partition.rest_shape, i), x.leaf.dtype, sharding=x.landing
            )
            for x in self._places[at]
        ]
        numbers = [known[n] for n in p.numbers]
        memory = [[values[r] for r in rs] for rs in (p.reads, p.replaces)]
        given = jax.tree.map(_described, (jnp.int32(0), numbers, pieces, *memory))
        function = partial(_on_piece, self.update, p, like)
        lie = (
            [inputs[r].place.rest for r in p.replaces],
            [outputs[w].place.landing for w in p.filed],
            None,
        )
        closed = jax.make_jaxpr(function)(*given)
        shared = not closed.consts
        look = f"{closed}{[x.sharding for x in jax.tree.leaves(given)]}{lie}{'' if shared else at}"
        if look not in self._functions:
            self._functions[look] = self._jit(function, donate_argnums=4, out_shardings=lie)
        self._of_pass[at, like] = self._functions[look]
        return self._of_pass[at, like]


def _on_piece(
    update: Update,
    p: Pass,
    like: int,
    i: jax.Array,
    numbers: list[jax.Array],
    pieces: list[jax.Array],
    reads: list[jax.Array],
    replaced: list[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array], dict[Name, jax.Array]]:
    """Compute piece `i`, of the size of piece `like`: new arrays in memory, pieces for files.

    Numbers that serve several streams are returned, too: XLA multiplies by the reciprocal of one
    that is used once, where a step on the device, which has all streams in it, divides.
    """
    graph, inputs, outputs, boxes = update.graph, update.inputs, update.outputs, p.boxes
    whole = p.stream.box is None
    box = boxes.own(boxes.shape, like)
    known: dict[Name, Any] = dict(zip(p.numbers, numbers, strict=True))
    known |= (used := lax.optimization_barrier({n: known[n] for n in p.shared}))
    arrays = dict(zip((*p.reads, *p.replaces), [*reads, *replaced], strict=True))

    for at, x in (*zip(p.files, pieces, strict=True), *arrays.items()):
        if whole:
            known[graph.inputs[at]] = replace(inputs[at], value=x).logical()
            continue
        cut = inputs[p.files[0]].lies
        known[graph.inputs[at]] = (
            read_box(x, boxes, i, cut, on_host=inputs[at].on_host, like=like)
            if at in arrays
            else fitted(x, box, cut)
        )
    results = p.stream.part.run(known, None if whole else box)
    filed = {}
    for w, new in zip(p.stream.writes, results, strict=True):
        place, at = outputs[w].place, outputs[w].replaces
        assert at is not None
        new = jnp.asarray(new).astype(place.leaf.dtype)
        if whole:
            filed[w] = pad(new, replace(place, memory="device"))
            if at in arrays:
                arrays[at] = to_host(filed[w]) if place.on_host else filed[w]
            continue
        filed[w] = fitted(new, boxes.own(place.partition.rest_shape, like), place.landing)
        if at in arrays:
            arrays[at] = write_box(
                arrays[at], filed[w], boxes, i, place.landing, on_host=place.on_host, like=like
            )
    return [arrays[at] for at in p.replaces], [filed[w] for w in p.filed], used


def _described(x: Any) -> jax.ShapeDtypeStruct:
    """An array; a gradient of integers, which has no bytes, lies nowhere."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
