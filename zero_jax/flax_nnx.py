"""NNX states: a model and its `nnx.Optimizer`, or an `nnx.ModelAndOptimizer`.

NNX objects are mutable and hold their arrays in Variables. The functions here take them apart into
plain trees of arrays, and build new objects of the same types around new arrays; the user's own
objects are never written to. Identity survives: a Variable shared by two modules is one leaf,
before and after. Optimizer state, its counters included, comes apart as optax made it.

Prior partitions come from Variable metadata (`nnx.with_partitioning`) and from the arrays.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from .flax_linen import on_mesh
from .offload.disk_array import DiskArray
from .residence import path_of

Tree = Any


def is_nnx(state: Any) -> bool:
    """Whether `state` is an `nnx.ModelAndOptimizer` or a pair of a module and an optimizer."""
    if isinstance(state, nnx.ModelAndOptimizer):
        return True
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        return False
    return isinstance(state[0], nnx.Module) and isinstance(state[1], nnx.Optimizer)


def optimizer_of(state: Any) -> nnx.Optimizer:
    """The optimizer of an NNX state."""
    return state if isinstance(state, nnx.ModelAndOptimizer) else state[1]


def model_of(state: Any) -> nnx.Module:
    """The model of an NNX state."""
    return state.model if isinstance(state, nnx.ModelAndOptimizer) else state[0]


def open_state(state: Any) -> tuple[Tree, Tree, Tree]:
    """Take an NNX state apart: parameters, optimizer state, and all other variables, as arrays."""
    model, optimizer = model_of(state), optimizer_of(state)
    params = nnx.as_pure(nnx.state(model, optimizer.wrt))
    opt_state = nnx.as_pure(optimizer.opt_state)
    other = nnx.as_pure(nnx.state(model, nnx.Not(optimizer.wrt)))
    return params, opt_state, {"model": other, "step": optimizer.step.get_value()}


def template(state: Any) -> tuple[Any, Any]:
    """What is needed to build such a state again: its graph, and its variables without arrays."""
    graphdef, variables = nnx.split(state)

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.describe() if isinstance(leaf, DiskArray) else jax.eval_shape(lambda: leaf)

    return graphdef, jax.tree.map(describe, nnx.as_pure(variables))


def close_state(
    template: tuple[Any, Any], params: Tree, opt_state: Tree, other: Tree, tx: Any
) -> Any:
    """A new state of the template's types, holding the given arrays and optimizer."""
    fresh = nnx.merge(*template)
    model, optimizer = model_of(fresh), optimizer_of(fresh)
    nnx.update(model, params)
    nnx.update(model, other["model"])
    optimizer.step.set_value(other["step"])
    optimizer.tx = tx
    if jax.tree.structure(opt_state) == jax.tree.structure(nnx.as_pure(optimizer.opt_state)):
        variables = jax.tree.leaves(optimizer.opt_state, is_leaf=_is_variable)
        variables = [v for v in variables if jax.tree.leaves(v.get_value())]  # no masked nodes
        for variable, value in zip(variables, jax.tree.leaves(opt_state), strict=True):
            variable.set_value(value)
    else:  # master weights were added, or taken away
        optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, opt_state))
    return fresh


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def frozen_paths(state: Any) -> frozenset[str]:
    """Paths, among the other variables, of parameters that the optimizer does not train."""
    wrt = optimizer_of(state).wrt
    frozen = nnx.as_pure(nnx.state(model_of(state), nnx.All(nnx.Param, nnx.Not(wrt))))
    paths = jax.tree_util.tree_flatten_with_path({"model": frozen})[0]
    return frozenset(path_of(keys) for keys, _ in paths)


def variable_specs(state: Any, mesh: Mesh) -> dict[str, tuple[object, ...]]:
    """Path -> prior spec of every annotated parameter, axes the mesh lacks left out."""
    variables = nnx.state(model_of(state), optimizer_of(state).wrt)
    found = jax.tree_util.tree_flatten_with_path(variables, is_leaf=_is_variable)[0]
    specs = {}
    for keys, variable in found:
        names = variable.get_metadata().get("out_sharding")
        if names is not None:
            specs[path_of(keys)] = on_mesh(tuple(names), mesh)
    return specs


def parameters_of(model: nnx.Module, wrt: Any) -> dict[str, nnx.Variable[Any]]:
    """Path -> Variable of every parameter that `wrt` filters, the model's own objects.

    Paths are those of `open_state`'s parameters; a Variable that is shared has one.
    """
    found = jax.tree_util.tree_flatten_with_path(nnx.state(model, wrt), is_leaf=_is_variable)[0]
    return {path_of(keys): variable for keys, variable in found}
