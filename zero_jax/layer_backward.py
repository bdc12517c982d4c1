"""The backward pass of a layer loop: compute a layer again, reduce the gradient of the one before.

See `layer_loop` for the order of events. A group of layers is gone through forward, from the one
input that was kept, up to its last layer; that one is computed and differentiated at once, and the
others follow backward. Groups of one layer, the usual case, have only the middle part, and then
all layers are one walk.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .layer_loop import (
    Arrays,
    Index,
    Inputs,
    Order,
    Program,
    at,
    complete,
    fetch,
    inexact,
    layer_key,
    pullback,
    put,
    select,
    sends_nothing,
    stacks,
    sum_dtype,
    walk,
    with_kept,
    with_store,
)
from .memories import barrier, is_host, zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cotangents:
    """What the backward pass carries.

    Attributes:
      x: of the last layer's input; inexact leaves only.
      pending: whole gradients of the last layer that wait for their reduction, by trained leaf;
        None before the first layer. A leaf whose reduction sends nothing does not wait: it is None.
      carriers: stacked reduced gradients, by trained leaf.
      extras: sums over layers, by wanted extra input.
    """

    x: Arrays
    pending: list[Any] | None
    carriers: Arrays
    extras: Arrays


@dataclass(frozen=True)
class Pass:
    """The backward pass of one loop: its program and arrays, and cotangents of stacked outs."""

    program: Program
    inputs: Inputs
    outs: list[Any]

    def layer(self, i: Index, whole: Arrays, x: Arrays, kept: Arrays | None, ct: Cotangents):
        """Go back through layer `i`, and reduce what is pending of layer `i` + 1."""
        ct = self.reduced(ct, i + 1)
        program = self.program if kept is not None else replace(self.program, policy=None)
        (_, out), pull, own = pullback(program, self.inputs, i, whole, x)
        if kept is not None:
            pull = with_kept(pull, own, kept)
        likes = [leaf for leaf in out if inexact(leaf)]
        ct_out = [
            jnp.zeros(like.shape, like.dtype) if stack is None else at(stack, i)
            for stack, like in zip(self.outs, likes, strict=True)
        ]
        grads, ct_x, ct_extras = pull([ct.x, ct_out])
        extras = [a + b.astype(a.dtype) for a, b in zip(ct.extras, ct_extras, strict=True)]
        wires = select(self.program.trained, self.program.wires)
        now = [g if sends_nothing(w) else None for w, g in zip(wires, grads, strict=True)]
        later = [None if sends_nothing(w) else g for w, g in zip(wires, grads, strict=True)]
        return replace(self.reduced(Cotangents(ct_x, now, ct.carriers, extras), i), pending=later)

    def reduced(self, ct: Cotangents, i: Index) -> Cotangents:
        """Reduce the pending gradients, which are those of layer `i`."""
        if ct.pending is None:
            return ct
        wires = select(self.program.trained, self.program.wires)
        pairs = zip(wires, ct.pending, strict=True)
        pieces = [None if g is None else w.reduce_gradient(g) for w, g in pairs]
        return replace(ct, pending=None, carriers=_put_some(ct.carriers, pieces, i))

    def group(self, start: Index, size: int, x: Arrays, then: Index | None, whole, ct):
        """Go back through the layers `start` to `start + size - 1`, from the input of the first.

        Returns:
          The layer `then`, gathered, and the cotangents.
        """
        program, last = self.program, start + size - 1
        x, inputs, inner, whole = self.again(start, size, x, whole)

        def turn(i: Index, whole: Arrays, ct: Cotangents) -> Cotangents:
            return self.layer(i, whole, x, None, ct)

        def back(i: Index, whole: Arrays, ct: Cotangents) -> Cotangents:
            own = [at(s, i - start) for s in inner] if inner else None
            return self.layer(i, whole, [at(s, i - start) for s in inputs], own, ct)

        following = then if size == 1 else last - 1
        whole, ct = walk(program, self.inputs, Order(last, 1, -1, following), turn, whole, ct)
        if size == 1:
            return whole, ct
        order = Order(last - 1, size - 1, -1, then)
        return walk(program, self.inputs, order, back, whole, ct)

    def again(self, start: Index, size: int, x: Arrays, whole: Arrays) -> Any:
        """Compute a group forward, up to the input of its last layer; keep the others' inputs."""
        program, n = self.program, size - 1
        if n == 0:
            return x, [], [], whole

        def step(i: Index, whole: Arrays, state: Any) -> Any:
            x, inputs, inner = state
            inputs = put(inputs, x, i - start)
            if inner:
                (x, _), _, own = pullback(program, self.inputs, i, whole, x)
                return x, inputs, put(inner, own, i - start)
            full = complete(program, self.inputs, i, whole)
            x, _ = program.layer(full, x, self.inputs.extras, layer_key(self.inputs, i))
            return x, inputs, inner

        state = (x, stacks(x, n), stacks(program.kept, n))
        order = Order(start, n, 1, start + n)
        whole, (x, inputs, inner) = walk(program, self.inputs, order, step, whole, state)
        return x, inputs, inner, whole


def backward(
    program: Program, inputs: Inputs, kept: Any, carriers: Arrays, ct_x: Arrays, ct_outs: list[Any]
) -> Cotangents:
    """Go back through all layers.

    Args:
      program, inputs: the loop.
      kept: what `forward` kept.
      carriers: stacked carriers of trained leaves; only their shapes and dtypes are read.
      ct_x: cotangents of the inexact leaves of the last x.
      ct_outs: of the inexact stacked outs; None is zero.
    """
    run = Pass(program, inputs, ct_outs)
    wanted = select(program.extras_wanted, inputs.extras)
    sums = [jnp.zeros(e.shape, sum_dtype(e.dtype)) for e in wanted]
    stacked = [zeros(c.shape, c.dtype, on_host=is_host(c)) for c in carriers]
    nothing = None if program.communicates else [None] * len(carriers)
    ct = Cotangents(ct_x, nothing, stacked, sums)
    ct = _every_layer(run, kept, ct) if program.every == 1 else _groups(run, kept, ct)
    ct = run.reduced(ct, 0)
    extras = [s.astype(e.dtype) for s, e in zip(ct.extras, wanted, strict=True)]
    return replace(ct, extras=extras)


def _every_layer(run: Pass, kept: Any, ct: Cotangents) -> Cotangents:
    _, store, inner = kept
    program, last = run.program, run.program.count - 1
    how = (*program.inputs_kept, *program.inner_kept)
    ahead = with_store(program, run.inputs, how, [*store, *inner])

    def step(i: Index, got: Arrays, ct: Cotangents) -> Cotangents:
        whole, own = _read([*store, *inner], i, got)
        return run.layer(i, whole, own[: len(store)], own[len(store) :] or None, ct)

    i, ct = _after(last, ct)
    got = fetch(*ahead, i)
    if ct.pending is not None or last == 0:
        return walk(*ahead, Order(i, last + 1, -1), step, got, ct)[1]
    # The first layer has nothing pending, so it stands by itself.
    head, rest = Order(i, 1, -1, i - 1), Order(i - 1, last, -1)
    got, ct = walk(*ahead, head, step, got, ct)
    return walk(*ahead, rest, step, got, ct)[1]


def _groups(run: Pass, kept: Any, ct: Cotangents) -> Cotangents:
    program, (x, store, _) = run.program, kept
    k, short, last = program.every, program.first_group, program.groups - 1

    def start(g: Index) -> Index:
        return jnp.maximum(short + (g - 1) * k, 0)

    # The inputs of groups lie where the forward pass put them: that of group g in slot g - 1.
    ahead = with_store(replace(program, wires=()), Inputs([], [], None), program.inputs_kept, store)

    def group(carry: Any, slot: Index) -> Any:
        got, whole, ct = carry
        # The last one fetches its own again, which nobody reads: cheaper than code of its own.
        following = fetch(*ahead, jnp.maximum(slot - 1, 0))
        _, own = _read(store, slot, got)
        return (following, *run.group(start(slot + 1), k, own, start(slot), whole, ct)), None

    g, ct = _after(last, ct)
    carry = fetch(*ahead, jnp.maximum(g - 1, 0)), fetch(program, run.inputs, start(g)), ct
    if last > 0 and ct.pending is None:  # the first group differs: nothing is pending
        carry, _ = group(carry, g - 1)
        last -= 1
    carry, _ = lax.scan(group, carry, jnp.arange(last - 1, -1, -1, dtype=jnp.int32))
    return run.group(0, short, x, None, *carry[1:])[1]


def _read(store: Arrays, i: Index, got: Arrays) -> tuple[Arrays, Arrays]:
    """What was gathered with layer `i`: its parameters, and what was kept of it."""
    leaves = len(got) - len(store)
    pairs = zip(store, got[leaves:], strict=True)
    return got[:leaves], [at(s, i) if g is None else g for s, g in pairs]


def _after(index: int, ct: Cotangents) -> tuple[Index, Cotangents]:
    """An index that is there when the cotangents are.

    What is read with it is not taken for what the forward pass has read already, and kept.
    """
    return barrier((jnp.int32(index), ct))


def _put_some(stacks: Arrays, pieces: list[Any], i: Index) -> Arrays:
    """Write a layer of the stacks that have a piece."""
    pairs = zip(stacks, pieces, strict=True)
    return [
        s if p is None else lax.dynamic_update_index_in_dim(s, p.astype(s.dtype), i, 0)
        for s, p in pairs
    ]
