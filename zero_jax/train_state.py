"""Any Flax training state, made ZeRO stage 1, 2 or 3 in one call.

The order of events, for a state that exists and for one that is born partitioned:

  open      take the state apart: parameters, optimizer state, everything else, `tx`
  check     deleted arrays, other meshes, optimizer state that is not these parameters'
  layout    decide where every leaf lies
  place     cast, pad and move leaf by leaf; or compile `create` with these output shardings
  close     the same type again, with `tx` wrapped so that the user's own step computes the stage

The step is the user's: `jax.jit` of a function that calls `tx.update` (or `apply_gradients`, or
`optimizer.update`) on the state and returns it. Its batch is placed by `shard_batch`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from .anatomy import (
    Anatomy,
    is_container,
    lay_out,
    map_states,
    open_laid_out,
    open_state,
    optimizer_of,
)
from .collectives import constrain, pad
from .extended_state import extend
from .layout import Layout
from .offload.dataflow import trace
from .offload.disk_state import settle
from .offload_policy import Nvme, Offload
from .optimizer import PartitionedOptimizer
from .options import DEFAULT_MIN_SIZE, Executor, Options, check_options
from .placement import Placement
from .precision import Precision
from .residence import abstract, gather, is_compile_only, place, strengthen
from .rules import Rule

S = TypeVar("S")
Tree = Any


def shard_train_state(
    state: S,
    stage: int,
    *,
    mesh: Mesh | None = None,
    axis: str = "data",
    min_size: int = DEFAULT_MIN_SIZE,
    precision: Precision | None = None,
    rules: Mapping[str, Rule] | None = None,
    executor: Executor = "annotated",
    offload: Offload | None = None,
    tx: Any = None,
) -> S:
    """Lay a training state out for a ZeRO stage (arXiv 1910.02054, section 5).

    Args:
      state: a linen `TrainState` or subclass; an NNX `(model, optimizer)` or `ModelAndOptimizer`;
        a dict, struct or NamedTuple with `params` and `opt_state`; or a tuple, list or dict of
        such states. Leaves may be arrays or `ShapeDtypeStruct`s. The arrays stay alive.
      stage: 0 replicated, 1 optimizer state partitioned, 2 and gradients, 3 and parameters.
      mesh: mesh to partition over; by default the mesh the state lies on, or all devices along
        `axis`. An Explicit mesh is used with Auto axes, except under `jax.set_mesh(mesh)`.
      axis: the mesh axis to partition over.
      min_size: leaves with fewer elements stay whole; 0 cuts everything with 2 elements or more.
      precision: dtypes of parameters and master copies; by default as the state has them.
      rules: pattern of a path -> "whole", "stacked", "frozen" or a `PartitionSpec`; see `rules`.
      executor: who reads the parameters. "annotated": the user's own step, which needs their
        shapes. "explicit": only `make_train_step`, so that at stage 3 a parameter that no dim
        divides is padded at rest as its moments are.
      offload: `HostMemory()` keeps the optimizer state, master copies included, in the host's
        pinned memory; both executors stream it through the device. `Nvme(path)` keeps it in files
        on a local disk, for the explicit executor; its leaves are `DiskArray`s. Scalars stay on the
        device.
      tx: for a state without a `tx` of its own, the optimizer its step uses, wrapped by
        `partition_optimizer`; for a dict of states, a dict of them.

    Returns:
      A state of the same type and tree structure. Optimizer leaves that no dim cuts evenly are
      padded at rest (`unshard_train_state` gives logical shapes back). With a master copy the
      optimizer state is `MasterWeights(master, inner)`.

    Raises:
      TypeError, ValueError: an argument or a leaf is not as described; before any compile.

    Warns:
      ZeroWarning: the stage partitions nothing, or leaves more than half of a tree whole.
    """
    if is_container(state):
        if isinstance(offload, Nvme):
            raise ValueError("offload: one Nvme path holds one state; lay each out by itself.")
        return map_states(
            lambda one, its_tx: shard_train_state(
                one, stage, mesh=mesh, axis=axis, min_size=min_size,
                precision=precision, rules=rules, executor=executor, offload=offload, tx=its_tx,
            ), state, tx,
        )  # fmt: skip
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
        raise TypeError(
            "state: its leaves are traced; call shard_train_state outside of jit, or give the "
            "function that makes the state to init_train_state."
        )
    options = check_options(state, stage, mesh, axis, min_size, precision, rules, executor, offload)
    anatomy = open_state(state, tx)
    if is_compile_only(options.mesh) and not all(map(_is_abstract, jax.tree.leaves(state))):
        raise ValueError(
            "mesh: its devices hold no arrays in this process; pass shapes: jax.eval_shape(create)."
        )
    layout = lay_out(anatomy, options)
    opt_state = extend(anatomy.params, anatomy.opt_state, options.precision, options.delayed)
    parts = (anatomy.params, opt_state, anatomy.other)
    if isinstance(options.offload, Nvme) and not any(map(_is_abstract, jax.tree.leaves(state))):
        leaves, structure = jax.tree.flatten(parts)
        where = jax.tree.leaves(_placements(layout))
        made = settle(
            layout, anatomy.tx, lambda which: [place(leaves[at], where[at]) for at in which]
        )
        return anatomy.close(*structure.unflatten(made))
    return anatomy.close(*jax.tree.map(place, parts, _placements(layout)))


def init_train_state(
    create: Callable[..., S],
    *args: Any,
    stage: int,
    mesh: Mesh | None = None,
    axis: str = "data",
    min_size: int = DEFAULT_MIN_SIZE,
    precision: Precision | None = None,
    rules: Mapping[str, Rule] | None = None,
    executor: Executor = "annotated",
    offload: Offload | None = None,
    tx: Any = None,
) -> S:
    """Build a training state that never exists whole on any device.

    `create` is traced, laid out from its shapes, and compiled with the layout as output shardings.

    Args:
      create: function of `args` that returns a state, as for `shard_train_state`.
      args: its arguments, arrays (a key, no seed; bind what is static with `functools.partial`).
        If one is a `ShapeDtypeStruct`, or the mesh cannot hold arrays here, the state that comes
        back is abstract.
      stage, mesh, axis, min_size, precision, rules, executor, offload, tx: as in
        `shard_train_state`.

    Returns:
      The state, each leaf born in its place.
    """
    options = check_options(None, stage, mesh, axis, min_size, precision, rules, executor, offload)
    birth = _birth(create, args, options, tx)
    described = any(map(_is_abstract, jax.tree.leaves(args)))
    if described or is_compile_only(options.mesh):
        return birth.anatomy.close(*jax.tree.map(abstract, _placements(birth.layout)))
    if isinstance(options.offload, Nvme):
        made = settle(birth.layout, birth.anatomy.tx, birth.in_parts(args))
        return birth.anatomy.close(*birth.structure.unflatten(made))
    return birth.anatomy.close(*birth.structure.unflatten(birth.jitted(*args)))


def lower_init_train_state(
    create: Callable[..., Any],
    *args: Any,
    stage: int,
    mesh: Mesh | None = None,
    axis: str = "data",
    min_size: int = DEFAULT_MIN_SIZE,
    precision: Precision | None = None,
    rules: Mapping[str, Rule] | None = None,
    executor: Executor = "annotated",
    offload: Offload | None = None,
    tx: Any = None,
) -> jax.stages.Lowered:
    """The initialisation that `init_train_state` runs, lowered and not run.

    `.compile().memory_analysis()` says what a device holds meanwhile: its part and one leaf.
    """
    options = check_options(None, stage, mesh, axis, min_size, precision, rules, executor, offload)
    return _birth(create, args, options, tx).jitted.lower(*args)


def layout_of(state: Any) -> Layout:
    """The layout of a state from `shard_train_state` or `init_train_state`.

    Args:
      state: the state, at any step; for a state whose step closes over its `tx`, that `tx`.

    Raises:
      TypeError: it has no wrapped optimizer, or that has no layout yet.
    """
    tx = optimizer_of(state)
    if not isinstance(tx, PartitionedOptimizer) or tx.layout is None:
        raise TypeError(
            f"state: this {type(state).__name__} carries no layout; expected a state that came "
            "from shard_train_state or init_train_state (or one member of a container of states). "
            "For a dict or struct whose step closes over its optimizer, pass that optimizer."
        )
    return tx.layout


def unshard_train_state(state: S, *, tx: Any = None) -> S:
    """The inverse of `shard_train_state`: logical shapes, whole leaves, the plain `tx`.

    Every device of the mesh holds the whole state afterwards. Partitions on other axes stay, and so
    do master weights: such a state trains again after `shard_train_state` with its precision.

    Args:
      state: a state that `shard_train_state` or `init_train_state` made, at any step, or a
        container of such states.
      tx: the wrapped optimizer of a state that has none of its own.
    """
    if is_container(state):
        return map_states(lambda one, its_tx: unshard_train_state(one, tx=its_tx), state, tx)
    layout = layout_of(state if tx is None else tx)
    anatomy = open_laid_out(state, tx)
    trees = (anatomy.params, anatomy.opt_state, anatomy.other)
    return anatomy.close(*jax.tree.map(gather, trees, _placements(layout)))


@dataclasses.dataclass(frozen=True)
class _Birth:
    """An initialisation that has been laid out and not run; `jitted` gives the leaves."""

    anatomy: Anatomy
    layout: Layout
    born: Callable[..., list[jax.Array]]
    structure: Any

    @property
    def jitted(self) -> Any:
        """All leaves at once."""
        return jax.jit(self.born, out_shardings=[p.rest for p in self._where])

    def in_parts(self, args: tuple[Any, ...]) -> Callable[[list[int]], list[jax.Array]]:
        """Positions of leaves -> these leaves, from `args`; the others are not computed."""
        flat, structure = jax.tree.flatten(args)
        graph = trace(lambda *x: self.born(*structure.unflatten(x)), *flat)

        def make(which: list[int]) -> list[jax.Array]:
            part = graph.part([graph.outputs[at] for at in which])
            lie = [self._where[at].rest for at in which]

            def run(*flat: Any) -> list[jax.Array]:
                return [
                    jnp.asarray(x) for x in part.run(dict(zip(graph.inputs, flat, strict=True)))
                ]

            return jax.jit(run, out_shardings=lie)(*flat)

        return make

    @property
    def _where(self) -> list[Placement]:
        return jax.tree.leaves(_placements(self.layout))


def _birth(create: Callable[..., Any], args: tuple[Any, ...], options: Options, tx: Any) -> _Birth:
    """Trace `create` for its anatomy, and jit it so that every leaf is born in place."""
    opened: list[Anatomy] = []

    def parts(*args: Any) -> tuple[Tree, Tree, Tree]:
        state = create(*args)
        if is_container(state):
            raise TypeError("create: it returns several states; initialise each with its own call.")
        opened.append(open_state(state, tx))
        return opened[-1].params, opened[-1].opt_state, opened[-1].other

    params, opt_state, other = jax.eval_shape(parts, *args)
    anatomy = dataclasses.replace(opened[0], params=params, opt_state=opt_state, other=other)
    layout = lay_out(anatomy, options)
    where, structure = jax.tree.flatten(_placements(layout))

    def born(*args: Any) -> list[jax.Array]:
        params, opt_state, other = parts(*args)
        # drawn in parts and gathered in the dtype at rest: no wide copy of a leaf is ever whole
        params = jax.tree.map(lambda x, p: constrain(x, p.flight), params, layout.updates)
        trees = params, extend(params, opt_state, options.precision, options.delayed), other
        return [
            pad(strengthen(jnp.asarray(x), p), p)
            for x, p in zip(jax.tree.leaves(trees), where, strict=True)
        ]

    return _Birth(anatomy, layout, born, structure)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _placements(layout: Layout) -> tuple[Tree, Tree, Tree]:
    return layout.params, layout.opt_state, layout.other
