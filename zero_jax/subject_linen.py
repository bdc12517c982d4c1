"""Linen and plain states as a `Subject`.

They give their parameters to the loss as they are. Fields of the state that the loss reads
(`collections`) go with them by name, and come back in its aux.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from . import flax_linen
from .anatomy import Anatomy, open_in_step
from .joining import check_rules
from .residence import path_of
from .shortfall import warn
from .step_options import StepOptions
from .subject import Device, Subject, split_aux
from .train_state import layout_of

Tree = Any


def open_linen(state: Any, tx: Any, loss_fn: Callable[..., Any], options: StepOptions) -> Subject:
    """Open a linen or plain state inside the step.

    Raises:
      TypeError: the state carries no layout.
      ValueError: a collection is no field of it, or its rule is not for such values.

    Warns:
      ZeroWarning: something that the state brings along is not used.
    """
    layout = layout_of(state if tx is None else tx)
    anatomy = open_in_step(state, tx)
    _check_fields(state, options)
    _warn_of_own_update(state, options)
    _warn_of_own_scale(anatomy, options)
    params, structure = jax.tree.flatten(anatomy.params, is_leaf=flax_linen.is_box)
    fields = {name: flax_linen.get(state, name) for name in options.collections}
    read = {n: f for n, f in fields.items() if options.collections[n] == "read"}
    carried = {n: f for n, f in fields.items() if n not in read}
    rules = {n: jax.tree.map(lambda _, n=n: options.collections[n], f) for n, f in carried.items()}
    names = [path_of(k) for k, _ in jax.tree_util.tree_leaves_with_path(carried)]
    check_rules(carried, rules, names)
    read_leaves, read_structure = jax.tree.flatten(read, is_leaf=flax_linen.is_box)
    read_where = {n: flax_linen.get(layout.other, n) for n in read}

    def call(leaves: list[Any], carried: Tree, batch: Tree, key: Any, device: Device) -> Any:
        tree = structure.unflatten(leaves[: len(params)])
        named = read_structure.unflatten(leaves[len(params) :])
        rng = () if key is None else (device.fold(key),)
        with _synchronised(device.axes, options):
            out = loss_fn(tree, batch, *rng, **named, **carried)
        out, aux = split_aux(out, options)
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
        rules,
        names,
        call,
        put_back,
    )


def _check_fields(state: Any, options: StepOptions) -> None:
    for name in options.collections:
        if not isinstance(name, str):
            raise TypeError(
                f"collections: {name!r} is a {type(name).__name__}; expected the name of a field "
                "of the state. Types of variables are for NNX models."
            )
        if flax_linen.get(state, name) is None:
            raise ValueError(f"collections: the state has no field {name!r}.")


def _warn_of_own_scale(anatomy: Anatomy, options: StepOptions) -> None:
    """Say that flax's loss scale does nothing here."""
    if anatomy.tx.precision.loss_scale is not None:
        return
    fields = jax.tree_util.tree_leaves_with_path(anatomy.other, is_leaf=_is_scale)
    for name in (path_of(keys) for keys, field in fields if _is_scale(field)):
        if name.split("/")[0] not in options.collections:
            warn(
                f"state: {name} is a flax DynamicScale, which this step does not use: the loss is "
                "not scaled. Lay the state out with precision=Precision(..., "
                "loss_scale=zero_jax.DynamicScale()), and leave the field out."
            )


def _is_scale(node: Any) -> bool:
    return isinstance(node, DynamicScale)


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
