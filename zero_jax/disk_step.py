"""A step on a state whose optimizer leaves lie in files: three programs and a loop of the host.

ZeRO-Infinity (arXiv 2104.07857, section 5.2.2). The order of events is that of `explicit_step`,
where one program does all of it; here it is taken apart, since a program cannot wait for a disk:

  gradients   from the batch to what the optimizer is given, jitted
  update      piece by piece, between files and devices (`offload.disk_update`)
  conclude    the loss scale, the user's hook, the metrics, jitted
  commit      what else a step changes is written, and the copy on disk is complete

All three are traced before anything is given away, and the first step asks for the room that it
takes on disk: whatever raises there, a hook of the user's say, leaves the state as it was. A step
that fails later, because a disk does, has given parameters away; the directory has the state before
it.

Not here: faults, which `train_step` raises.
"""

import time
from dataclasses import replace
from typing import Any

import jax

from .anatomy import Anatomy, open_in_step
from .collectives import constrain, pad
from .delayed import Pending
from .explicit_step import Found, Metrics, conclude, differentiate, open_subject
from .extended_state import LossScaled, split_scale
from .gradients import frozen_parameters
from .layout import Layout
from .memories import is_host
from .offload.disk import Disk
from .offload.disk_array import DiskArray, name_of, write
from .offload.disk_claim import agreed
from .offload.disk_passes import find_passes
from .offload.disk_state import local_bytes, masters_of, write_other
from .offload.disk_update import DiskUpdate
from .offload.streams import open_update
from .residence import abstract
from .step_options import StepOptions
from .subject import Subject
from .train_state import layout_of
from .update import traced_update
from .update_report import UpdateTraffic

Tree = Any


class DiskStep:
    """The three programs and the loop, for states of one layout.

    Attributes:
      layout: of the states.
      traffic: of the last step, None before the first.
    """

    def __init__(self, state: Any, loss_fn: Any, tx: Any, options: StepOptions, compiler: Any):
        self._loss_fn, self._tx, self._options = loss_fn, tx, options
        self.layout: Layout = layout_of(state if tx is None else tx)
        self._places = jax.tree.leaves(
            (self.layout.params, self.layout.opt_state, self.layout.other)
        )
        anatomy = open_in_step(state, tx)
        self._close, self._optimizer = anatomy.close, anatomy.tx
        self._gradients = jax.jit(self._find_gradients, compiler_options=compiler or None)
        self._conclude = jax.jit(self._find_conclusion, compiler_options=compiler or None)
        self._compiler = compiler or None
        self._update: DiskUpdate | None = None
        self.traffic: UpdateTraffic | None = None
        # Known once a program is traced: which other leaves, and which parameters, it changes.
        self._counted: list[int] = []
        self._changed: list[int] = []
        self._hooked: list[int] = []
        self._filed: list[int] = []  # and parameters that no master copy tells

    def __call__(self, state: Any, batch: Tree, key: Any) -> tuple[Any, Metrics]:
        """One step.

        Raises:
          OSError: the disk failed; the letter says what is there.
          RuntimeError: the state is not the one that the directory has.
        """
        before = open_in_step(state, self._tx)
        disk = _disk_of(before)
        found = self._gradients(*self._given(before), batch, key)
        jax.block_until_ready(found.fault)  # what follows is the optimizer's time
        if self._update is None:
            self._update = self._prepare(disk, before, found)
        start, read, written = time.perf_counter(), disk.read_bytes, disk.written_bytes
        disk.begin()
        params, opt_state = self._updated(disk, before, found.pending)
        found = found._replace(pending=found.pending._replace(gradients=()))
        after = Anatomy(params, opt_state, before.other, before.tx, before.specs, before.close)
        hooked, scale, changed, metrics = self._conclude(*self._given(after), found)
        params = _with(params, self._hooked, hooked)
        other = _with(before.other, self._changed, changed)
        if scale is not None:
            opt_state = LossScaled(scale, split_scale(opt_state)[1])
        self._file(disk, jax.tree.leaves((params, opt_state, other)))
        disk.commit(disk.version + 1)
        seconds = time.perf_counter() - start
        moved = disk.read_bytes - read, disk.written_bytes - written
        self.traffic = UpdateTraffic(*moved, *moved, seconds)
        return before.close(params, opt_state, other), metrics

    def lower(self, state: Any, batch: Tree, key: Any) -> jax.stages.Lowered:
        """Lower the program of the gradients, the largest."""
        return self._gradients.lower(*self._given(open_in_step(state, self._tx)), batch, key)

    def _prepare(self, disk: Disk, before: Anatomy, found: Found) -> DiskUpdate:
        """The update, taken apart; all that is left of a step is traced, nothing touched."""
        update = self._make_update(disk, before, found.pending)
        found = found._replace(pending=found.pending._replace(gradients=()))
        try:
            jax.eval_shape(self._find_conclusion, *self._given(before), found)
        except TypeError as error:
            if "ShapeDtypeStruct" in str(error):
                error.add_note("after_update: the optimizer's state lies in files; leave it alone.")
            raise
        copy_bytes = sum(local_bytes(self._places[at]) for at in self._written(disk))
        agreed(lambda: disk.check_room(copy_bytes))
        return update

    def _updated(self, disk: Disk, before: Anatomy, given: Pending) -> tuple[Tree, Any]:
        """The optimizer's update: parameters, and its own state."""
        scale, opt_state = split_scale(before.opt_state)
        leaves, structure = jax.tree.flatten(before.params)
        held, held_structure = jax.tree.flatten(opt_state)
        assert self._update is not None
        values = [*given.gradients, *leaves]
        values += [None if isinstance(x, DiskArray) else x for x in held]
        values += jax.tree.leaves(given._replace(gradients=()))
        given.gradients.clear()  # each goes when it has been used
        results = self._update.run(disk, values)
        n = len(leaves)
        held = [
            replace(old, version=disk.version + 1) if isinstance(old, DiskArray) else new
            for old, new in zip(held, results[n:], strict=True)
        ]
        after = held_structure.unflatten(held)
        after = after if scale is None else LossScaled(scale, after)
        return structure.unflatten(results[:n]), after

    def _make_update(self, disk: Disk, before: Anatomy, given: Pending) -> DiskUpdate:
        """The update, taken apart."""
        _, opt_state = split_scale(before.opt_state)
        frozen = frozen_parameters(self.layout, self._options)
        masters, n = masters_of(self.layout), len(frozen)
        self._filed = [at for at in range(n) if at not in masters and not frozen[at]]
        function, inputs, outputs = traced_update(
            self._optimizer, given, opt_state, before.params, frozen
        )
        update = open_update(function, inputs, outputs)
        update = replace(update, inputs=[replace(i, value=None) for i in inputs])
        held = enumerate(jax.tree.leaves(opt_state))
        boxes = {2 * n + at: x.boxes for at, x in held if isinstance(x, DiskArray)}
        passes = find_passes(update, self._filed, disk.limit_bytes, boxes)
        stays = [at for at in range(n) if frozen[at]]
        return DiskUpdate(update, passes, stays, self._compiler)

    def _written(self, disk: Disk) -> set[int]:
        """Leaves that a copy has to have: steps change them, or ever did."""
        params, states = (jax.tree.leaves(t) for t in (self.layout.params, self.layout.opt_state))
        n, m = len(params), len(params) + len(states)
        known = {at for at, place in enumerate(self._places) if name_of(place) in disk.known}
        changed = {m + at for at in self._changed}
        return {*self._filed, *self._hooked, *range(n, m), *changed} | known

    def _file(self, disk: Disk, leaves: list[Any]) -> None:
        """Write what the update has not written of the leaves that a copy has to have."""
        assert self._update is not None
        disk.flush()
        pieces = {
            at: boxes
            for at, boxes in self._update.pieces.items()
            if self._places[at].tree == "params"
        }
        for at in sorted(self._written(disk)):
            if at not in pieces and not isinstance(leaves[at], DiskArray):
                write_other(disk, self._places[at], leaves[at])
            elif at in pieces and at in self._hooked:  # once more, where the update wrote it
                write(disk, self._places[at], pieces[at], leaves[at])

    def _find_gradients(
        self, params: Tree, resident: list[Any], other: Tree, batch: Tree, key: Any
    ) -> Found:
        """From the batch to what the optimizer is given, traced; gradients at rest."""
        subject = self._opened(params, resident, other)
        found = differentiate(subject, batch, key, self._options)
        parts = jax.tree.leaves(self.layout.updates)
        pairs = zip(found.pending.gradients, parts, strict=True)
        gradients = [g if is_host(g) else pad(g, part) for g, part in pairs]
        old, new = jax.tree.leaves(subject.anatomy.other), jax.tree.leaves(found.other)
        self._counted = _different(old, new)
        pending = found.pending._replace(gradients=gradients)
        return found._replace(pending=pending, other=[new[at] for at in self._counted])

    def _find_conclusion(
        self, params: Tree, resident: list[Any], other: Tree, found: Found
    ) -> tuple[list[Any], Any, list[Any], Metrics]:
        """From the update to the end, traced: parameters, scale and others that it changes."""
        subject = self._opened(params, resident, other)
        before = subject.anatomy
        old, structure = jax.tree.flatten(before.other)
        counted = dict(zip(self._counted, found.other, strict=True))
        all_other = structure.unflatten(counted.get(at, x) for at, x in enumerate(old))
        _, opt_state = split_scale(before.opt_state)
        after, opt_state, final, metrics = conclude(
            subject, found._replace(other=all_other), before.params, opt_state,
            self._tx, self._options,
        )  # fmt: skip
        new, changed = jax.tree.leaves(after), jax.tree.leaves(final)
        self._hooked = _different(jax.tree.leaves(before.params), new)
        self._changed = _different(old, changed)
        rests = [p.rest for p in jax.tree.leaves(self.layout.other)]
        changed = [constrain(changed[at], rests[at]) for at in self._changed]
        return [new[at] for at in self._hooked], split_scale(opt_state)[0], changed, metrics

    def _given(self, state: Anatomy) -> tuple[Tree, list[Any], Tree]:
        """What a program is given of a state: what is not in files."""
        places = jax.tree.leaves(self.layout.opt_state)
        pairs = zip(jax.tree.leaves(state.opt_state), places, strict=True)
        return state.params, [x for x, place in pairs if not place.is_away], state.other

    def _opened(self, params: Tree, resident: list[Any], other: Tree) -> Subject:
        """The subject of a state whose leaves in files are only described."""
        come = iter(resident)
        opt_state = jax.tree.map(
            lambda p: abstract(p) if p.is_away else next(come), self.layout.opt_state
        )
        state = self._close(params, opt_state, other)
        return open_subject(state, self._tx, self._loss_fn, self._options)


def _with(tree: Tree, which: list[int], new: list[Any]) -> Tree:
    """A tree with some leaves replaced."""
    leaves, structure = jax.tree.flatten(tree)
    for at, x in zip(which, new, strict=True):
        leaves[at] = x
    return structure.unflatten(leaves)


def _different(old: list[Any], new: list[Any]) -> list[int]:
    return [at for at, (o, n) in enumerate(zip(old, new, strict=True)) if o is not n]


def _disk_of(state: Anatomy) -> Disk:
    """The directory of a state.

    Raises:
      RuntimeError: it has gone on from there.
    """
    arrays = [x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray)]
    for array in arrays:
        array.check()
    return arrays[0].disk
