"""NNX states as a `Subject`.

A model is put together again around the parameters, and what it changed of its other variables is
read back.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from . import flax_nnx
from .anatomy import open_in_step
from .at_use_nnx import hand_over
from .joining import check_rules
from .residence import path_of
from .step_options import Collection, StepOptions
from .subject import Device, Subject, split_aux
from .train_state import layout_of

Tree = Any


def open_nnx(state: Any, tx: Any, loss_fn: Callable[..., Any], options: StepOptions) -> Subject:
    """Open an NNX state inside the step.

    Raises:
      TypeError: the state carries no layout.
      ValueError: the model has no variables of a collection, or its rule is not for them.
    """
    layout = layout_of(state if tx is None else tx)
    anatomy = open_in_step(state, tx)
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
    variables_of = flax_nnx.parameters_of(model, nnx.Not(wrt))
    kinds = [type(variables_of[name]) for name in names]
    _check_kinds(kinds, wrt, options.collections)
    rules = [_rule(kinds[at], options.collections) for at in kept]
    carried = [other[at] for at in kept]
    called = [f"{names[at]} (a {kinds[at].__name__})" for at in kept]
    check_rules(carried, rules, called)

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
        out, aux = split_aux(loss_fn(model, batch, *rng), options)
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
        carried,
        rules,
        called,
        call,
        put_back,
    )


def _rule(kind: type, collections: Mapping[Any, Collection]) -> str:
    """The rule of a Variable's type: that of the nearest of its classes that is named."""
    named = (collections.get(c, collections.get(c.__name__)) for c in kind.__mro__)
    return next((rule for rule in named if rule is not None), "mean")


def _check_kinds(kinds: list[type], wrt: Any, collections: Mapping[Any, Collection]) -> None:
    """Whether every collection is a type that the model has variables of.

    Raises:
      TypeError: it is neither a Variable type nor a name.
      ValueError: the model has none such beside those that the optimizer trains.
    """
    known = {c for kind in kinds for c in kind.__mro__ if issubclass(c, nnx.Variable)}
    for key in collections:
        if not (isinstance(key, str) or isinstance(key, type) and issubclass(key, nnx.Variable)):
            raise TypeError(
                f"collections: {key!r} is no type of nnx.Variable, nor the name of one."
            )
        if key not in known and key not in {c.__name__ for c in known}:
            has = ", ".join(sorted({kind.__name__ for kind in kinds})) or "none"
            raise ValueError(
                f"collections: the model has no {key if isinstance(key, str) else key.__name__} "
                f"beside what the optimizer trains ({wrt}); its other variables are: {has}."
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


def _synchronise(model: nnx.Module, axes: tuple[str, ...], options: StepOptions) -> None:
    """The same for an NNX model that was made in this trace."""
    if options.statistics == "local":
        return
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]
