"""What the explicit step differentiates: an opened state, and the user's loss on its leaves.

Linen and plain states give their parameters to the loss as they are; fields of the state that the
loss reads (`collections`) go with them by name, and come back in its aux. An NNX model is put
together again around the parameters, and what it changed of its other variables is read back.

Either way the loss becomes one function of flat lists, which `gradients` calls without knowing
which it is:

  parameters   one entry each: a `Partitioned` where it is gathered at use, or the whole array
  carried      what goes in and comes out changed: running statistics, counters
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta
from flax.training.train_state import TrainState

from . import flax_linen, flax_nnx
from .anatomy import Anatomy, open_in_step
from .at_use_nnx import hand_over
from .layout import Layout
from .optimizer import PartitionedOptimizer
from .placement import Placement
from .residence import path_of
from .shortfall import warn
from .step_options import StepOptions
from .train_state import layout_of

Tree = Any


@dataclass(frozen=True)
class Device:
    """What a loss has to know of the device it runs on, inside `shard_map`.

    Attributes:
      fold: key -> the key of this device and microbatch.
      axes: mesh axes that the batch is split over.
    """

    fold: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A state taken apart for one step.

    Attributes:
      anatomy: its parts; closed, it has its wrapped optimizer.
      tx, layout: the wrapped optimizer and its layout.
      values: parameters at rest, trained ones first, then those that are only read.
      placements: where each lies.
      trained: how many of `values` are the optimizer's.
      carried: tree that the loss may change.
      call: (parameters, carried, batch, key, device) -> (out, carried, aux); see `Device`.
      put_back: changed `carried` -> `anatomy.other` with it.
    """

    anatomy: Anatomy
    tx: PartitionedOptimizer
    layout: Layout
    values: list[jax.Array]
    placements: list[Placement]
    trained: int
    carried: Tree
    call: Callable[..., tuple[Any, Tree, Any]]
    put_back: Callable[[Tree], Tree]


def open_subject(state: Any, tx: Any, loss_fn: Callable[..., Any], options: StepOptions) -> Subject:
    """Open a state inside the step.

    Raises:
      TypeError: the state carries no layout.
      ValueError: a collection is no field of it.
    """
    layout = layout_of(state if tx is None else tx)
    anatomy = open_in_step(state, tx)
    opened = _open_nnx if flax_nnx.is_nnx(state) else _open_linen
    return opened(state, anatomy, layout, loss_fn, options)


def _open_linen(
    state: Any, anatomy: Anatomy, layout: Layout, loss_fn: Any, options: StepOptions
) -> Subject:
    _warn_of_own_update(state, options)
    params, structure = jax.tree.flatten(anatomy.params, is_leaf=flax_linen.is_box)
    for name in options.collections:
        if flax_linen.get(state, name) is None:
            raise ValueError(f"collections: the state has no field {name!r}.")
    fields = {name: flax_linen.get(state, name) for name in options.collections}
    read = {n: f for n, f in fields.items() if options.collections[n] == "read"}
    carried = {n: f for n, f in fields.items() if n not in read}
    read_leaves, read_structure = jax.tree.flatten(read, is_leaf=flax_linen.is_box)
    read_where = {n: flax_linen.get(layout.other, n) for n in read}

    def call(leaves: list[Any], carried: Tree, batch: Tree, key: Any, device: Device) -> Any:
        tree = structure.unflatten(leaves[: len(params)])
        named = read_structure.unflatten(leaves[len(params) :])
        rng = () if key is None else (device.fold(key),)
        with _synchronised(device.axes, options):
            out = loss_fn(tree, batch, *rng, **named, **carried)
        out, aux = _split_aux(out, options)
        changed, aux = _take(aux, carried)
        return out, changed, aux

    def put_back(changed: Tree) -> Tree:
        return flax_linen.replace(anatomy.other, **changed) if changed else anatomy.other

    return Subject(
        anatomy,
        anatomy.tx,
        layout,
        [meta.unbox(p) for p in (*params, *read_leaves)],
        [*jax.tree.leaves(layout.params), *jax.tree.leaves(read_where)],
        len(params),
        carried,
        call,
        put_back,
    )


def _open_nnx(
    state: Any, anatomy: Anatomy, layout: Layout, loss_fn: Any, options: StepOptions
) -> Subject:
    if options.collections:
        raise ValueError(
            f"collections: {next(iter(options.collections))!r} is given, but an NNX model keeps "
            "its variables itself; what it changes of them is averaged over devices."
        )
    model, wrt = flax_nnx.model_of(state), flax_nnx.optimizer_of(state).wrt
    graph, variables = flax_nnx.template(model)
    paths = [path_of(k) for k, _ in jax.tree_util.tree_leaves_with_path(anatomy.params)]
    other, other_structure = jax.tree.flatten(anatomy.other["model"])
    where = jax.tree.leaves(layout.other["model"])
    names = [path_of(k) for k, _ in jax.tree_util.tree_leaves_with_path(anatomy.other["model"])]
    # Parameters that are not trained are read at every stage as at stage 3, which cuts them.
    still = [
        f"model/{name}" in anatomy.frozen or p.partition.parts > 1
        for name, p in zip(names, where, strict=True)
    ]
    read = [at for at, stays in enumerate(still) if stays]
    kept = [at for at, stays in enumerate(still) if not stays]
    params = jax.tree.leaves(anatomy.params)

    def call(leaves: list[Any], carried: list[Any], batch: Tree, key: Any, device: Device) -> Any:
        model = nnx.merge(graph, variables)
        given = dict(zip(paths, leaves[: len(params)], strict=True))
        hand_over(model, wrt, given)
        rest = dict(zip([names[at] for at in read], leaves[len(params) :], strict=True))
        rest |= dict(zip([names[at] for at in kept], carried, strict=True))
        hand_over(model, nnx.Not(wrt), rest)
        keys = _fold_keys(model, device.fold)
        _synchronise(model, device.axes, options)
        rng = () if key is None else (device.fold(key),)
        out, aux = _split_aux(loss_fn(model, batch, *rng), options)
        after = flax_nnx.parameters_of(model, nnx.Not(wrt))
        for variable, old in keys:
            variable.set_raw_value(old)
        return out, [after[names[at]].get_raw_value() for at in kept], aux

    def put_back(changed: list[Any]) -> Tree:
        everything = list(other)
        for at, value in zip(kept, changed, strict=True):
            everything[at] = value
        return {**anatomy.other, "model": other_structure.unflatten(everything)}

    return Subject(
        anatomy,
        anatomy.tx,
        layout,
        [*params, *(other[at] for at in read)],
        [*jax.tree.leaves(layout.params), *(where[at] for at in read)],
        len(params),
        [other[at] for at in kept],
        call,
        put_back,
    )


def _fold_keys(model: nnx.Module, fold: Any) -> list[tuple[Any, Any]]:
    """Give every random stream of the model keys of this device; returns the old ones."""
    keys = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.RngKey)]
    old = [(v, v.get_raw_value()) for v in keys]
    for variable, key in old:
        folds = fold
        for _ in range(key.ndim):  # a stack of layers has a stream in each
            folds = jax.vmap(folds)
        variable.set_raw_value(folds(key))
    return old


def _warn_of_own_update(state: Any, options: StepOptions) -> None:
    """Say that a subclass's own `apply_gradients` is not called."""
    own = getattr(type(state), "apply_gradients", None)
    if not isinstance(state, TrainState) or own is TrainState.apply_gradients:
        return
    if options.after_update is None:
        warn(
            f"state: {type(state).__name__} has an apply_gradients of its own, which this step "
            "does not call; pass what it does beside the update as after_update=."
        )


def _split_aux(out: Any, options: StepOptions) -> tuple[Any, Any]:
    if not options.has_aux:
        return out, {}
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise TypeError(
            f"loss_fn: it returned a {type(out).__name__}; with has_aux=True it has to return "
            "(loss, aux), or ((total, weight), aux)."
        )
    return out[0], out[1]


def _take(aux: Any, carried: Tree) -> tuple[Tree, Any]:
    """Take the changed collections out of the aux."""
    if not carried:
        return carried, aux
    missing = [n for n in carried if not isinstance(aux, dict) or n not in aux]
    if missing:
        raise ValueError(
            f"loss_fn: its aux has no {missing[0]!r}, which is a collection that the loss changes; "
            f'return it in the aux dict, or declare collections={{{missing[0]!r}: "read"}}.'
        )
    rest = {name: value for name, value in aux.items() if name not in carried}
    return {name: aux[name] for name in carried}, rest


def _synchronised(axes: tuple[str, ...], options: StepOptions) -> Any:
    """A context in which linen's BatchNorm takes its statistics over the whole batch.

    As it does in the global view and on one device. A BatchNorm that names axes keeps them.
    """

    def over_all_devices(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if not isinstance(module, nn.BatchNorm) or module.axis_name is not None:
            return call(*args, **kwargs)
        object.__setattr__(module, "axis_name", axes)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", None)

    if options.statistics == "local":
        return contextlib.nullcontext()
    return nn.intercept_methods(over_all_devices)


def _synchronise(model: nnx.Module, axes: tuple[str, ...], options: StepOptions) -> None:
    """The same for an NNX model that was made in this trace."""
    if options.statistics == "local":
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]
