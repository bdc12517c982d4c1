"""A step on a state whose optimizer leaves lie in files: three programs and a loop of the host.

ZeRO-Infinity (arXiv 2104.07857, section 5.2.2). The order of events is that of `explicit_step`,
where one program does all of it; here it is taken apart, since a program cannot wait for a disk:

  gradients   from the batch to what the optimizer is given, jitted
  update      piece by piece, between files and devices (`offload.disk_update`)
  conclude    the loss scale, the user's hook, the metrics, jitted
  commit      what else a step changes is written, and the copy on disk is complete

A step that fails before `update` leaves the state as it was. One that fails later, because a disk
is full, has given parameters away; the directory has the state before it.

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
from .master_weights import MasterWeights, master_leaves
from .memories import is_host
from .offload.dataflow import trace
from .offload.disk import Disk
from .offload.disk_array import DiskArray, write
from .offload.disk_passes import find_passes
from .offload.disk_state import own_boxes, write_other
from .offload.disk_update import DiskUpdate
from .offload.grouping import Update
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
      traffic: of the last step, None before the first.
    """

    def __init__(self, state: Any, loss_fn: Any, tx: Any, options: StepOptions, compiler: Any):
        self._loss_fn, self._tx, self._options = loss_fn, tx, options
        self._layout: Layout = layout_of(state if tx is None else tx)
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

    def __call__(self, state: Any, batch: Tree, key: Any) -> tuple[Any, Metrics]:
        """One step.

        Raises:
          OSError: the disk failed; the letter says what is there.
          RuntimeError: the state is not the one that the directory has.
        """
        before = open_in_step(state, self._tx)
        disk = _disk_of(before)
        found = self._gradients(*_given(before), batch, key)
        jax.block_until_ready(found.fault)  # what follows is the optimizer's time
        start, read, written = time.perf_counter(), disk.read_bytes, disk.written_bytes
        disk.begin()
        params, opt_state, beside = self._updated(disk, before, found.pending)
        found = found._replace(pending=found.pending._replace(gradients=()))
        after = Anatomy(params, opt_state, before.other, before.tx, before.specs, before.close)
        hooked, new_scale, changed, metrics = self._conclude(*_given(after), found)

        leaves, structure = jax.tree.flatten(params)
        for at, x in zip(self._hooked, hooked, strict=True):
            leaves[at] = x
        others, other_structure = jax.tree.flatten(before.other)
        for at, x in zip(self._changed, changed, strict=True):
            others[at] = x
        if new_scale is not None:
            opt_state = LossScaled(new_scale, split_scale(opt_state)[1])
        layout = self._layout
        disk.flush()
        assert self._update is not None
        pieces = {w: p.boxes for p in self._update.passes for w in p.filed}
        for at in self._hooked:
            if at in pieces:  # once more, in the pieces that the update has written
                place = jax.tree.leaves(layout.params)[at]
                write(disk, place, own_boxes(place, pieces[at]), leaves[at])
        for tree, now, which in (
            (layout.params, leaves, {*self._hooked, *beside} - {*pieces}),
            (layout.opt_state, jax.tree.leaves(opt_state), None),
            (layout.other, others, self._changed),
        ):
            for at, place in enumerate(jax.tree.leaves(tree)):
                if not isinstance(now[at], DiskArray) and (which is None or at in which):
                    write_other(disk, place, now[at])
        disk.commit(disk.version + 1)
        seconds = time.perf_counter() - start
        moved = disk.read_bytes - read, disk.written_bytes - written
        self.traffic = UpdateTraffic(moved[0], moved[1], *moved, seconds)
        params, other = structure.unflatten(leaves), other_structure.unflatten(others)
        return before.close(params, opt_state, other), metrics

    def lower(self, state: Any, batch: Tree, key: Any) -> jax.stages.Lowered:
        """Lower the program of the gradients, the largest."""
        return self._gradients.lower(*_given(open_in_step(state, self._tx)), batch, key)

    def _updated(self, disk: Disk, before: Anatomy, given: Pending) -> tuple[Tree, Any, list[int]]:
        """The optimizer's update: parameters, its state, and which parameters it has in memory."""
        scale, opt_state = split_scale(before.opt_state)
        leaves, structure = jax.tree.flatten(before.params)
        held, held_structure = jax.tree.flatten(opt_state)
        n, masters = len(leaves), [None] * len(leaves)
        if isinstance(opt_state, MasterWeights):
            masters = master_leaves(opt_state)
        frozen = frozen_parameters(self._layout, self._options)
        filed = [at for at in range(n) if masters[at] is None and not frozen[at]]
        if self._update is None:
            function, inputs, outputs = traced_update(
                self._optimizer, given, opt_state, before.params, frozen
            )
            logical = [jax.ShapeDtypeStruct(i.place.leaf.shape, i.value.dtype) for i in inputs]
            inputs = [replace(i, value=None) for i in inputs]
            update = Update(trace(function, *logical), inputs, outputs)
            boxes = {2 * n + at: x.boxes for at, x in enumerate(held) if isinstance(x, DiskArray)}
            passes = find_passes(update, filed, disk.limit_bytes, boxes)
            self._update = DiskUpdate(update, passes, self._compiler)
        values = [*given.gradients, *leaves]
        values += [None if isinstance(x, DiskArray) else x for x in held]
        values += jax.tree.leaves(given._replace(gradients=()))
        given.gradients.clear()  # each goes when it has been used
        results = self._update.run(disk, values)
        held = [
            replace(old, version=disk.version + 1) if isinstance(old, DiskArray) else new
            for old, new in zip(held, results[n:], strict=True)
        ]
        after = held_structure.unflatten(held)
        after = after if scale is None else LossScaled(scale, after)
        passed = {w for p in self._update.passes for w in p.filed}
        beside = [at for at in filed if at not in passed]
        return structure.unflatten(results[:n]), after, beside

    def _find_gradients(
        self, params: Tree, resident: list[Any], other: Tree, batch: Tree, key: Any
    ) -> Found:
        """From the batch to what the optimizer is given, traced; gradients at rest."""
        subject = self._opened(params, resident, other)
        found = differentiate(subject, batch, key, self._options)
        parts = jax.tree.leaves(self._layout.updates)
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
        rests = [p.rest for p in jax.tree.leaves(self._layout.other)]
        changed = [constrain(changed[at], rests[at]) for at in self._changed]
        return [new[at] for at in self._hooked], split_scale(opt_state)[0], changed, metrics

    def _opened(self, params: Tree, resident: list[Any], other: Tree) -> Subject:
        """The subject of a state whose leaves in files are only described."""
        come = iter(resident)
        opt_state = jax.tree.map(
            lambda p: abstract(p) if p.is_away else next(come), self._layout.opt_state
        )
        state = self._close(params, opt_state, other)
        return open_subject(state, self._tx, self._loss_fn, self._options)


def _given(state: Anatomy) -> tuple[Tree, list[Any], Tree]:
    """What a program is given of a state: what is not in files."""
    leaves = jax.tree.leaves(state.opt_state)
    away = (DiskArray, jax.ShapeDtypeStruct)
    return state.params, [x for x in leaves if not isinstance(x, away)], state.other


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
