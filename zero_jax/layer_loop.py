"""How a layer loop goes through its layers: gather one while another one computes.

Forward, layer i+1 is gathered while layer i computes, and of each layer only its input is kept.
Backward, layer i is computed again from its input while layer i-1 is gathered and the gradient of
layer i+1 is reduced (ZeRO, arXiv 1910.02054, section 7.2.2; the order of events is that of PyTorch
FSDP, arXiv 2304.11277, section 3.3). With `every` > 1 only the inputs of groups of layers are kept,
and a group's other inputs are computed again before its backward pass (Chen et al., arXiv
1604.06174, section 3).

Why a trip has two layers: a `while` keeps its carry in one buffer. With one layer to a trip the
next one lies elsewhere when it arrives, and is copied into the carry. With two, the layer of the
carry is done with in the middle of the trip, where a barrier says so, and the layer after the next
is gathered straight into its place; so it is with gradients that wait for their reduction. A loop
that sends nothing has one layer to a trip and no barrier.

Stacks are read and written a layer at a time where they lie. The first gather and the last
reduction stand outside of the loop, so that none is done twice.

The passes are in `layer_forward` and `layer_backward`.

Not here: the derivative rule, rng and outputs as the caller sees them (`layers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .at_use import Wire
from .layer_store import Kept, unsplit
from .memories import barrier
from .remat import Remat

Index = Any  # int32, traced or not
Arrays = list[Any]
Step = Callable[[Index, Arrays, Any], Any]
LOW_PRECISION = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class Local:
    """The wire of an array that is no parameter of a ZeRO step: it lies whole, and so it stays."""

    def gather(self, value: jax.Array) -> jax.Array:
        """The array itself."""
        return value

    def reduce_gradient(self, g: jax.Array) -> jax.Array:
        """The gradient itself."""
        return g


@dataclass(frozen=True)
class Program:
    """What is static of a loop.

    Attributes:
      layer: (whole leaves, x, extras, key) -> (x, outs), of one layer, on flat lists.
      wires: of one layer, by leaf; `Kept` for what the forward pass has kept (`with_store`).
      trained: by leaf: a gradient is asked for.
      extras_wanted: by extra input: a cotangent is asked for.
      count: number of layers.
      every: layers between two inputs that the forward pass keeps.
      policy: which values inside of a layer are kept for its backward pass; None: none.
      remat: where what is kept lies.
      outs: shapes of one layer's outs.
      kept: shapes of what the policy keeps of one layer.
      inputs_kept: by leaf of x: how the inputs of layers are kept; () if nothing is.
    """

    layer: Callable[..., tuple[Arrays, Arrays]]
    wires: tuple[Wire | Local | Kept, ...]
    trained: tuple[bool, ...]
    extras_wanted: tuple[bool, ...]
    count: int
    every: int
    policy: Callable[..., Any] | None
    remat: Remat
    outs: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    inputs_kept: tuple[Kept, ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether anything is gathered or reduced between devices."""
        return not all(is_local(w) and sends_nothing(w) for w in self.wires)

    @property
    def inner_kept(self) -> tuple[Kept, ...]:
        """How what the policy keeps is kept: where the inputs are, and whole."""
        return tuple(unsplit(self.remat, like) for like in self.kept)

    @property
    def groups(self) -> int:
        """Number of groups of `every` layers; the first may be smaller."""
        return -(-self.count // self.every)

    @property
    def first_group(self) -> int:
        """Layers in the first group."""
        return self.count - (self.groups - 1) * self.every


@dataclass(frozen=True)
class Inputs:
    """The arrays of a loop: stacked leaves at rest, inputs of every layer, a key or None."""

    values: Arrays
    extras: Arrays
    key: Any


@dataclass(frozen=True)
class Order:
    """Layers to go through, and the layer that is gathered during the last of them, or None."""

    first: Index
    count: int
    stride: int
    then: Index | None = None

    def at(self, position: Index) -> Index:
        """The layer at a position; the position after the last is that of `then`."""
        index = self.first + self.stride * position
        if self.then is None:
            return index
        return jnp.where(position < self.count, index, self.then)


def is_local(wire: Wire | Local | Kept) -> bool:
    """Whether a leaf is there whole, neither gathered nor fetched."""
    if isinstance(wire, Kept):
        return not wire.moves
    return isinstance(wire, Local) or (wire.rest.dim is None and not wire.on_host)


def sends_nothing(wire: Wire | Local | Kept) -> bool:
    """Whether the reduction of a gradient, where it arises, needs no other device."""
    if not isinstance(wire, Wire) or not wire.scatters_at_use:
        return True
    return wire.grad.dim is None and not wire.summed_at_use


def fetch(program: Program, inputs: Inputs, i: Index) -> Arrays:
    """Gather layer `i`; None for a leaf that lies whole, which is read where it is used."""
    pairs = zip(program.wires, inputs.values, strict=True)
    return [None if is_local(w) else w.gather(at(v, i)) for w, v in pairs]


def walk(
    program: Program, inputs: Inputs, order: Order, step: Step, whole: Arrays, state: Any
) -> tuple[Arrays, Any]:
    """Run `step(i, whole, state)` through the layers, gathering the next one meanwhile.

    Args:
      program, inputs: the loop.
      order: which layers.
      step: what is done with a layer; returns the new state.
      whole: the first layer, gathered.
      state: any tree of arrays.

    Returns:
      The layer `order.then`, gathered ([] without it), and the last state.
    """

    communicates = program.communicates

    def half(position: Index, whole: Arrays, state: Any) -> Any:
        following = fetch(program, inputs, order.at(position + 1))
        state = step(order.at(position), whole, state)
        # The next gather asks for its index, which is not there before this layer is done with.
        after = (position + 1, following, state)
        return barrier(after) if communicates else after

    def trip(carry: Any, _: None) -> Any:
        return half(*half(*carry)) if communicates else half(*carry), None

    carry = (jnp.int32(0), whole, state)
    per_trip, fetching = 1, order.count
    if communicates:
        carry = barrier(carry)
        per_trip, fetching = 2, order.count - (order.then is None)
    if fetching >= per_trip:
        carry, _ = lax.scan(trip, carry, length=fetching // per_trip)
    if fetching % per_trip:
        carry = half(*carry)
    position, whole, state = carry
    if fetching == order.count:
        return whole, state
    state = step(order.at(position), whole, state)
    return [], barrier(state)


def with_store(
    program: Program, inputs: Inputs, kept: Sequence[Kept], store: Arrays
) -> tuple[Program, Inputs]:
    """The loop for `walk`, which gathers what was kept of a layer together with its leaves."""
    wires, values = (*program.wires, *kept), [*inputs.values, *store]
    return replace(program, wires=wires), replace(inputs, values=values)


def complete(program: Program, inputs: Inputs, i: Index, whole: Arrays) -> Arrays:
    """All leaves of layer `i`, those that lie whole included."""
    triples = zip(program.wires, inputs.values, whole, strict=True)
    return [w.gather(at(v, i)) if g is None else g for w, v, g in triples]


def layer_key(inputs: Inputs, i: Index) -> Any:
    """The key of layer `i`."""
    return None if inputs.key is None else jax.random.fold_in(inputs.key, i)


def pullback(program: Program, inputs: Inputs, i: Index, whole: Arrays, x: Arrays) -> Any:
    """One layer, linearized.

    Returns:
      ((x, outs), pull, kept): its results; the pullback from their inexact ones to cotangents of
      trained leaves, inexact x and wanted extras; the values that the policy keeps for `pull`.
    """
    whole, key = complete(program, inputs, i, whole), layer_key(inputs, i)
    asked = (
        list(program.trained),
        [inexact(leaf) for leaf in x],
        list(program.extras_wanted),
    )
    given = (whole, x, inputs.extras)

    def layer(*moving: Arrays) -> Any:
        full = [merge(a, m, g) for a, m, g in zip(asked, moving, given, strict=True)]
        results = program.layer(*full, key)
        return [[leaf for leaf in side if inexact(leaf)] for side in results], results

    if program.policy is not None:
        layer = jax.checkpoint(layer, policy=program.policy, prevent_cse=False)
    moving = (select(a, g) for a, g in zip(asked, given, strict=True))
    _, pull, results = jax.vjp(layer, *moving, has_aux=True)
    known = {id(leaf) for leaf in jax.tree.leaves((given, key))}
    kept = [leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in known]
    return results, pull, kept


def with_kept(pull: Any, own: Arrays, kept: Arrays) -> Any:
    """The same pullback on values kept earlier, so that its own need not be computed."""
    earlier = {id(a): b for a, b in zip(own, kept, strict=True)}
    leaves, tree = jax.tree.flatten(pull)
    return jax.tree.unflatten(tree, [earlier.get(id(leaf), leaf) for leaf in leaves])


def at(stack: jax.Array, i: Index) -> jax.Array:
    """Layer `i` of a stack."""
    return lax.dynamic_index_in_dim(stack, i, keepdims=False)


def put(stacks: Arrays, pieces: Sequence[Any], i: Index) -> Arrays:
    """Write a layer of each stack."""
    pairs = zip(stacks, pieces, strict=True)
    return [lax.dynamic_update_index_in_dim(s, p, i, 0) for s, p in pairs]


def stacks(likes: Sequence[Any], count: int) -> Arrays:
    """Zeros for `count` of each."""
    return [jnp.zeros((count, *like.shape), like.dtype) for like in likes]


def inexact(leaf: Any) -> bool:
    """Whether a leaf has a derivative."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def select(wanted: Sequence[bool], leaves: Sequence[Any]) -> Arrays:
    """The wanted leaves."""
    return [leaf for w, leaf in zip(wanted, leaves, strict=True) if w]


def merge(wanted: Sequence[bool], chosen: Sequence[Any], leaves: Sequence[Any]) -> Arrays:
    """`leaves`, the wanted ones replaced by `chosen`."""
    new = iter(chosen)
    return [next(new) if w else leaf for w, leaf in zip(wanted, leaves, strict=True)]


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which cotangents of many layers are added."""
    return jnp.float32 if dtype in LOW_PRECISION else dtype
