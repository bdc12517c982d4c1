"""The optax wrapper: one update of ZeRO, in the global view.

ZeRO (arXiv 1910.02054, sections 5 and 7): gradients are reduced to the device that owns their
partition, each device updates its own part of the optimizer state, the updated parameters are
gathered. Here each of those three is a statement about where an array lies, made on whole arrays
under jit. Optax itself runs unchanged, on logical shapes, so any transformation is exact: norms,
factored moments, masks by rank, orthogonalisation. XLA adds the small reductions they need.

Not here: gradient accumulation, clipping, loss scaling (optax has them), the reduction dtype (the
user's step decides it; see `precision`).
"""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .collectives import constrain, pad, pin_sum, unpad
from .extended_state import LossScaled, init_extended
from .layout import Layout
from .master_weights import MasterWeights, update_with_master
from .offload.grouping import Input, Output
from .offload.on_host import update_on_host
from .offload.streams import stream
from .offload_policy import HostMemory
from .placement import Placement
from .precision import Precision
from .shortfall import warn

Tree = Any


class PartitionedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation whose update computes the stage of the state it was laid out for.

    Made by `partition_optimizer`; `shard_train_state` makes one for a state with a `tx` of its own.
    """

    __slots__ = ()

    @property
    def layout(self) -> Layout | None:
        """The layout of the state, None before `shard_train_state`."""
        return _binding(self).layout

    @property
    def inner(self) -> optax.GradientTransformation:
        """The user's own transformation."""
        return _binding(self).given

    @property
    def precision(self) -> Precision:
        """Dtypes and loss scale of the state it is laid out for."""
        return _binding(self).precision

    def update_inner(
        self, grads: Tree, state: Any, params: Tree, extra: dict[str, Any]
    ) -> tuple[Tree, Any]:
        """The user's own update, extra arguments dropped where it takes none."""
        return _binding(self).inner.update(grads, state, params, **extra)

    def __getattr__(self, name: str) -> Any:
        """What else the user's optimizer has: `MultiSteps.has_updated`, say."""
        return getattr(_binding(self).given, name)

    def bind(self, layout: Layout, precision: Precision) -> None:
        """Give this optimizer its layout, once.

        Raises:
          ValueError: it already has another one. A step that was traced with one layout must not
            meet a second, silently.
        """
        binding = _binding(self)
        same = binding.layout is None or binding.layout.same_as(layout)
        if binding.layout is not None and not (same and binding.precision == precision):
            raise ValueError(
                f"tx: this optimizer is already wrapped and laid out for stage "
                f"{int(binding.layout.stage)} over {dict(binding.layout.mesh.shape)}; wrap the "
                "optax transformation anew (zero_jax.partition_optimizer) for another layout or "
                "precision."
            )
        binding.layout, binding.precision = layout, precision


def partition_optimizer(tx: optax.GradientTransformation) -> PartitionedOptimizer:
    """Wrap a transformation for a step that closes over it.

    Needed when the state is a dict or struct without a `tx` of its own: wrap, write the step with
    the wrapped `tx`, and pass it to `shard_train_state(..., tx=tx)`, which gives it its layout.
    Until then `init` is the plain one and `update` raises.

    Args:
      tx: an optax transformation whose gradients have the parameters' structure (`lookahead`'s have
        not); wrap the outermost one (outside `MultiSteps`, `chain`, ...).

    Raises:
      TypeError: `tx` has no `init` and `update`.
      ValueError: `tx` is already wrapped.

    >>> tx = partition_optimizer(optax.adamw(1e-3))
    >>> tx.layout is None
    True
    """
    if isinstance(tx, PartitionedOptimizer):
        raise ValueError("tx: this optimizer is already wrapped; wrap the plain transformation.")
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"tx={tx!r} is a {type(tx).__name__}; expected an optax transformation.")
    binding = _Binding(tx, _with_extra_args(tx))
    return PartitionedOptimizer(binding.init, binding.update)


def _with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation with an update that takes extra arguments, passed on if it has use."""
    parameters = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # `MultiSteps`, which says so only here
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


def _binding(tx: PartitionedOptimizer) -> "_Binding":
    return tx.update.__self__  # type: ignore[attr-defined]


@dataclass(eq=False)
class _Binding:
    """The two functions of a `PartitionedOptimizer`, and what they know."""

    given: Any  # the user's object, which may have more than the two functions
    inner: optax.GradientTransformationExtraArgs
    layout: Layout | None = None
    precision: Precision = Precision()

    def init(self, params: Tree) -> Any:
        """Optimizer state: plain before the layout is known, at rest in its layout after."""
        if self.layout is None:
            return self.inner.init(params)
        layout, precision = self.layout, self.precision

        def born(params: Tree) -> Any:
            delayed = isinstance(layout.offload, HostMemory) and layout.offload.delayed
            state = init_extended(self.inner, params, precision, delayed)
            return _map(pad, layout.opt_state, state, "opt_state")

        return jax.jit(born)(params)

    def update(
        self, updates: Tree, state: Any, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Any]:
        """One update; arguments and results as in optax, every array where the layout says."""
        layout = self.layout
        if layout is None:
            raise ValueError(
                "tx: this optimizer is wrapped, but no state was laid out for it; call "
                "zero_jax.shard_train_state(state, stage, tx=tx) before the first step."
            )
        if isinstance(state, LossScaled):
            raise ValueError(
                "tx: this optimizer's state has a loss scale, which the step itself has to carry "
                "out; use zero_jax.make_train_step, or a Precision without loss_scale."
            )
        grads = _map(_lies_at_rest, layout.grads, updates, "grads")  # reduced
        _check_dtypes(layout, self.precision, updates)
        grads = _map(_lies_in_flight, layout.updates, grads, "grads")  # partitioned
        if isinstance(state, MasterWeights) and params is None:
            raise ValueError("params: with master weights call tx.update(grads, state, params)")
        if layout.offload is not None:
            assert isinstance(layout.offload, HostMemory)  # files: the explicit step alone
            updates, state = self._streamed(layout.offload, grads, state, params, extra)
        else:
            state = _map(unpad, layout.opt_state, state, "opt_state")
            updates, state = self._move(grads, state, params, extra)
            state = _map(pad, layout.opt_state, state, "opt_state")
        return _map(_pin, layout.params, updates, "updates"), state

    def _move(
        self, grads: Tree, state: Any, params: Tree | None, extra: dict[str, Any]
    ) -> tuple[Tree, Any]:
        """The user's update on logical arrays in flight; updates lie as parameters at rest."""
        layout = self.layout
        assert layout is not None
        old = None if params is None else _map(_lies_in_flight, layout.updates, params, "params")
        if isinstance(state, MasterWeights):
            assert old is not None and params is not None
            return update_with_master(self.inner, layout, grads, state, old, params, extra)
        updates, state = self.inner.update(grads, state, old, **extra)
        updates = _map(_lies_in_flight, layout.updates, updates, "updates")
        return _map(_lies_at_rest, layout.params, updates, "updates"), state  # gathered

    def _streamed(
        self, policy: HostMemory, grads: Tree, state: Any, params: Tree | None, extra: Any
    ) -> tuple[Tree, Any]:
        """The same for a state on the host, which comes and goes leaf by leaf."""
        layout = self.layout
        assert layout is not None
        _check_tree(layout.opt_state, state, "opt_state", at_rest=True)
        if params is not None:
            _check_tree(layout.updates, params, "params")
        trees = (grads, state) if params is None else (grads, state, params)
        arrays, structure = jax.tree.flatten(trees)
        wheres = (layout.updates, layout.opt_state, layout.params)[: len(trees)]
        places = jax.tree.leaves(wheres)
        n, results = len(jax.tree.leaves(grads)), jax.tree.structure((grads, state))

        def compute(*flat: Any) -> list[Any]:
            grads, state, *rest = structure.unflatten(flat)
            updates, after = self._move(grads, state, rest[0] if rest else None, extra)
            return [*jax.tree.leaves(updates), *map(jnp.asarray, jax.tree.leaves(after))]

        held = len(jax.tree.leaves(state))
        in_flight = [not n <= at < n + held for at in range(len(arrays))]
        inputs = [Input(*each) for each in zip(arrays, places, in_flight, strict=True)]
        outputs = [Output(p, None) for p in jax.tree.leaves(layout.params)]
        outputs += [Output(places[at], at) for at in range(n, n + held)]
        pass_over = update_on_host if policy.update_on == "host" else stream
        return results.unflatten(pass_over(compute, inputs, outputs, policy.chunk_bytes))


def _check_dtypes(layout: Layout, precision: Precision, grads: Tree) -> None:
    """Say so when the step's own dtypes are not those that `precision` promises."""
    pairs = [
        (placement.leaf, g)
        for placement, g in zip(jax.tree.leaves(layout.params), jax.tree.leaves(grads), strict=True)
        if jnp.issubdtype(placement.leaf.dtype, jnp.floating)
    ]
    reduced = [(leaf, g) for leaf, g in pairs if precision.reduce not in (None, g.dtype)]
    gathered = [leaf for leaf, _ in pairs if precision.compute not in (None, leaf.dtype)]
    if reduced:
        leaf, g = reduced[0]
        warn(
            f"Precision(reduce={precision.reduce}): {len(reduced)} gradients arrive in another "
            f"dtype and were reduced in it, the first {leaf.path!r} in {g.dtype}; differentiate "
            "with respect to parameters cast to the reduce dtype."
        )
    if gathered:
        warn(
            f"Precision(compute={precision.compute}): {len(gathered)} parameters lie in another "
            f"dtype and are gathered in it, the first {gathered[0].path!r} in {gathered[0].dtype}; "
            "set params= to the compute dtype."
        )


def _lies_at_rest(x: Any, placement: Placement) -> Any:
    return _constrain_number(x, placement.rest)


def _lies_in_flight(x: Any, placement: Placement) -> Any:
    return _constrain_number(x, placement.flight)


def _pin(x: Any, placement: Placement) -> Any:
    return pin_sum(x, placement.rest)


def _constrain_number(x: Any, sharding: Any) -> Any:
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    return constrain(jnp.asarray(x), sharding)


def _map(move: Any, placements: Tree, tree: Tree, name: str) -> Tree:
    """Apply `move(leaf, placement)` leaf by leaf; containers are those of `tree`."""
    structure, where = jax.tree.structure(tree), jax.tree.leaves(placements)
    leaves = _check_tree(placements, tree, name, at_rest=move is unpad)
    return structure.unflatten(move(x, p) for x, p in zip(leaves, where, strict=True))


def _check_tree(placements: Tree, tree: Tree, name: str, at_rest: bool = False) -> list[Any]:
    """The leaves of a tree, if they have the layout's shapes, logical or at rest."""
    where, leaves = jax.tree.leaves(placements), jax.tree.leaves(tree)
    if len(where) != len(leaves):
        raise ValueError(
            f"{name}: {len(leaves)} leaves where the layout has {len(where)}; this is not the "
            "tree that the optimizer was laid out for (gradients need the parameters' structure)."
        )
    for placement, leaf in zip(where, leaves, strict=True):
        expected = placement.partition.rest_shape if at_rest else placement.leaf.shape
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"{name}/{placement.leaf.path}: has shape {jnp.shape(leaf)}, expected "
                f"{expected}; this is not the tree that the optimizer was laid out for."
            )
    return leaves
