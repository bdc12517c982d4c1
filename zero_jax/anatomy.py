"""The anatomy of a training state: its parameters, its optimizer state, all else, and its `tx`.

Linen and plain records (`flax_linen`) and NNX objects (`flax_nnx`) come apart into the same four
parts and are put together again from placed ones. A tuple, list or dict of states (a GAN's two) is
opened one by one.

Checked here, with the path of the leaf: that the optimizer state is the one `tx` makes for these
parameters, and that `tx` is not wrapped already.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh

from . import flax_linen, flax_nnx
from .extended_state import extend, init_extended
from .layout import Layout, build_layout
from .optimizer import PartitionedOptimizer, partition_optimizer
from .options import Options
from .placement import Leaf
from .residence import path_of, read_leaves
from .shortfall import warn_if_short

Tree = Any


@dataclass(frozen=True)
class Anatomy:
    """A training state, taken apart.

    Attributes:
      params, opt_state, other: trees of arrays.
      tx: the wrapped optimizer, made from the state's own or given.
      specs: mesh -> path -> prior spec from boxes and annotations.
      close: placed params, opt_state and other -> a state of the same type, with the wrapped `tx`.
      frozen: paths of leaves of `other` that are parameters the optimizer does not train.
    """

    params: Tree
    opt_state: Tree
    other: Tree
    tx: PartitionedOptimizer
    specs: Callable[[Mesh], dict[str, tuple[object, ...]]]
    close: Callable[[Tree, Tree, Tree], Any]
    frozen: frozenset[str] = frozenset()


def lay_out(anatomy: Anatomy, options: Options) -> Layout:
    """Check every leaf, decide the layout, and give it to the optimizer.

    Raises:
      ValueError, TypeError: a deleted array, a partition over another mesh, an optimizer state that
        `tx` does not make for these parameters, a `tx` that is wrapped already or missing.

    Warns:
      ZeroWarning: the stage falls short; see `shortfall`.
    """
    specs, precision = anatomy.specs(options.mesh), options.precision
    opt_state = extend(anatomy.params, anatomy.opt_state, precision, options.delayed)

    def read(name: str, tree: Tree) -> Tree:
        return read_leaves(name, tree, options.mesh, options.axis, specs)

    params, state, other = (
        read("params", anatomy.params),
        read("opt_state", opt_state),
        read("other", anatomy.other),
    )
    tx = anatomy.tx
    expected = jax.eval_shape(
        lambda p: init_extended(tx.inner, p, precision, options.delayed),
        jax.tree.map(_abstract, params),
    )
    _check_same_tree(state, expected)
    if precision.master is not None:  # moments are those of the master copies
        state = jax.tree.map(lambda leaf, e: replace(leaf, dtype=e.dtype), state, expected)
    layout = build_layout(
        jax.tree.map(lambda p: replace(p, dtype=precision.stored(p.dtype)), params),
        state,
        other,
        stage=options.stage,
        mesh=options.mesh,
        axis=options.axis,
        min_size=options.min_size,
        rules=options.rules,
        frozen=anatomy.frozen,
        pads_parameters=options.executor == "explicit",
        offload=options.offload,
    )
    tx.bind(layout, precision)
    warn_if_short(layout)
    return layout


def open_state(state: Any, tx: Any = None) -> Anatomy:
    """Take apart a training state that has not been laid out.

    Args:
      state: any state that `shard_train_state` takes, but a container of states.
      tx: the optimizer of a state that has none of its own.

    Raises:
      TypeError: `state` is no training state, has no optimizer, or has one and `tx` is another.
      ValueError: its optimizer is already wrapped and laid out.
    """
    kind = type(state).__name__
    return _open(state, tx, lambda own: _wrap(own, kind) if own is not None else _given(tx, kind))


def open_laid_out(state: Any, tx: Any = None) -> Anatomy:
    """Take apart a state that has been laid out; closed again, it has its plain optimizer."""
    return _open(state, tx, lambda own: None if own is None else own.inner)


def open_in_step(state: Any, tx: Any = None) -> Anatomy:
    """Take apart a state that has been laid out; closed again, it has its wrapped optimizer."""
    return _open(state, tx, lambda own: tx if own is None else own)


def _open(state: Any, tx: Any, optimizer: Callable[[Any], Any]) -> Anatomy:
    if not (flax_nnx.is_nnx(state) or flax_linen.is_record(state)):
        raise TypeError(
            f"state: a {type(state).__name__} is not a training state; expected a TrainState, an "
            "NNX (model, optimizer) or ModelAndOptimizer, a dict or struct with params and "
            "opt_state, or a tuple, list or dict of these."
        )
    own = optimizer_of(state)
    if own is not None and tx is not None:
        raise TypeError(f"tx: the {type(state).__name__} has its own optimizer; leave tx=None.")
    chosen = optimizer(own)
    if flax_nnx.is_nnx(state):
        template = flax_nnx.template(state)
        return Anatomy(
            *flax_nnx.open_state(state),
            chosen,
            lambda mesh: flax_nnx.variable_specs(state, mesh),
            lambda p, o, rest: flax_nnx.close_state(template, p, o, rest, chosen),
            flax_nnx.frozen_paths(state),
        )
    emptied = {"params": None, "opt_state": None} | ({} if own is None else {"tx": None})
    filled = {} if own is None else {"tx": chosen}
    params = flax_linen.get(state, "params")
    return Anatomy(
        params,
        flax_linen.get(state, "opt_state"),
        flax_linen.replace(state, **emptied),
        chosen,
        lambda mesh: flax_linen.box_specs(params, mesh),
        lambda p, o, rest: flax_linen.replace(rest, params=p, opt_state=o, **filled),
    )


def optimizer_of(state: Any) -> Any:
    """The optimizer that a state holds, None where it holds none."""
    if isinstance(state, PartitionedOptimizer):
        return state
    if flax_nnx.is_nnx(state):
        return flax_nnx.optimizer_of(state).tx
    return flax_linen.get(state, "tx") if flax_linen.is_record(state) else None


def is_container(state: Any) -> bool:
    """Whether `state` is a tuple, list or dict of training states."""
    if flax_nnx.is_nnx(state) or flax_linen.is_record(state):
        return False
    members = list(state.values()) if isinstance(state, Mapping) else state
    return (
        isinstance(members, (tuple, list))
        and len(members) > 0
        and all(flax_nnx.is_nnx(m) or flax_linen.is_record(m) for m in members)
    )


def map_states(function: Callable[[Any, Any], Any], states: Any, tx: Any) -> Any:
    """Apply `function(state, tx)` to each state of a container; the container's type is kept.

    Raises:
      TypeError: `tx` is not a container of the same kind, an optimizer or None for each state.
    """
    rebuild = cast(Callable[..., Any], type(states))
    if isinstance(states, Mapping):
        if tx is not None and not (isinstance(tx, Mapping) and tx.keys() <= states.keys()):
            raise TypeError(f"tx: expected a dict with some of the states' keys, {list(states)}.")
        given = tx or {}
        return rebuild({k: function(s, given.get(k)) for k, s in states.items()})
    one = isinstance(tx, optax.GradientTransformation) or not isinstance(tx, (tuple, list))
    if tx is not None and (one or len(tx) != len(states)):
        raise TypeError(f"tx: expected one optimizer for each of the {len(states)} states.")
    given = [None] * len(states) if tx is None else tx
    done = [function(s, t) for s, t in zip(states, given, strict=True)]
    return rebuild(*done) if hasattr(states, "_fields") else rebuild(done)


def _wrap(own: Any, kind: str) -> PartitionedOptimizer:
    """A fresh wrapper of the optimizer that the state holds."""
    if not isinstance(own, PartitionedOptimizer):
        return partition_optimizer(own)
    if own.layout is not None:
        raise ValueError(
            f"state: the tx of this {kind} is already wrapped and laid out for stage "
            f"{int(own.layout.stage)} over {dict(own.layout.mesh.shape)}; to lay it out anew, pass "
            "zero_jax.unshard_train_state(state)."
        )
    return partition_optimizer(own.inner)


def _given(tx: Any, kind: str) -> PartitionedOptimizer:
    """The wrapped optimizer that the step closes over."""
    if isinstance(tx, PartitionedOptimizer):
        return tx
    has = "no tx was given" if tx is None else f"the tx given is a plain {type(tx).__name__}"
    raise TypeError(
        f"tx: the {kind} has no optimizer of its own and {has}; its step would go on calling an "
        "optimizer that knows nothing of the stage. Make it with tx = "
        "zero_jax.partition_optimizer(tx), use that in the step, and pass it as tx=."
    )


def _check_same_tree(found: Tree, expected: Tree) -> None:
    has, wants = _shapes(found), _shapes(expected)
    for path in [*wants, *(p for p in has if p not in wants)]:
        if has.get(path) != wants.get(path):
            raise ValueError(
                f"state: opt_state/{path} has {has.get(path, 'no leaf')}, but tx.init(params) "
                f"gives {wants.get(path, 'no leaf')}; opt_state and params are of different "
                "trees, or opt_state was made by another optimizer."
            )
    if jax.tree.structure(found) != jax.tree.structure(expected):
        raise ValueError(
            f"state: opt_state is the tree {jax.tree.structure(found)}, but tx.init(params) gives "
            f"{jax.tree.structure(expected)}: same leaves, other containers."
        )


def _shapes(tree: Tree) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_of(keys): f"shape {leaf.shape}" for keys, leaf in leaves}


def _abstract(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
