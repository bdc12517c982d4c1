"""The programs laid out for the library's own step, each with that step.

Every optimizer here notes the gradient that it is given, so that one compile shows the training and
the first gradient. Parameters and notes are read in logical shapes: at stage 3 a leaf that no dim
divides is padded at rest.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import table
from cases.driving import Tree, closes_over_tx
from cases.explicit_means import MEANS
from flax import nnx

import zero_jax
from zero_jax import Layout

NOT_OPTIMIZED = {"xla_backend_optimization_level": 0}
"""As `driving.train` compiles: less of it, the same collectives."""


class Noted(NamedTuple):
    """Optimizer state of `noting`: the last gradient, and the state of the optimizer itself."""

    grads: Tree
    inner: Any


def noting(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same optimizer, which also keeps the gradient it was given last."""
    inner = optax.with_extra_args_support(tx)

    def init(params):
        return Noted(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(updates, state, params=None, **extra):
        moved, after = inner.update(updates, state.inner, params, **extra)
        return moved, Noted(updates, after)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclass
class Opened:
    """A program laid out for the explicit step.

    Attributes:
      built: what its `build` returned.
      state: the state to start from.
      step: (state, batch) -> (state, loss, metrics).
      made: what `make_train_step` made; a GAN has two.
      parts: state -> {name: (params, opt_state)} as they lie, by optimizer.
      layouts: one for each optimizer.
      beside: for each optimizer that is beside its state, that optimizer.
      half: of a GAN, one of the two steps by name.
    """

    built: dict[str, Any]
    state: Any
    step: Callable[[Any, Any], tuple[Any, Any, Any]]
    made: list[Any]
    parts: Callable[[Any], dict[str, tuple[Tree, Tree]]]
    layouts: dict[str, Layout]
    beside: dict[str, Any]
    half: Any = None

    def params(self, state: Any) -> Tree:
        """Parameters in logical shapes and in host memory."""
        found = {n: without_padding(p, self.layouts[n].params) for n, (p, _) in self._of(state)}
        return found.get("", found)

    def grads(self, state: Any) -> list[Tree]:
        """The gradients of the last step, one tree for each optimizer, as `params`."""
        return [
            without_padding(o.grads, self.layouts[n].opt_state.grads)
            for n, (_, o) in self._of(state)
        ]

    def held(self, state: Any) -> tuple[list[Tree], list[Tree]]:
        """Parameters and optimizer states as they lie, without notes."""
        return [p for _, (p, _) in self._of(state)], [o.inner for _, (_, o) in self._of(state)]

    def unshard(self, state: Any) -> list[tuple[Tree, Tree]]:
        """(params, opt_state) for each optimizer, after `zero_jax.unshard_train_state`."""
        if "" in self.layouts:
            whole = zero_jax.unshard_train_state(state, tx=self.beside.get(""))
            return [*self.parts(whole).values()]
        pairs = [*itertools.permutations(self.layouts)]  # of a GAN: each with what it is lent
        full = {n: {**state[n], lent: state[lent]["params"]} for n, lent in pairs}
        return [*self.parts(zero_jax.unshard_train_state(full, tx=self.beside)).values()]

    def _of(self, state: Any) -> Any:
        return self.parts(state).items()


def without_padding(tree: Tree, placements: Tree) -> Tree:
    """Leaves in logical shapes and in host memory."""

    def leaf(x, placement):
        whole, shape = np.array(x), placement.leaf.shape
        if whole.ndim != len(shape):
            return whole[: math.prod(shape)].reshape(shape)
        return whole[tuple(slice(0, s) for s in shape)]

    leaves = map(leaf, jax.tree.leaves(tree), jax.tree.leaves(placements))
    return jax.tree.structure(tree).unflatten(leaves)


def make_step(loss_fn: Any, tx: Any = None, **options: Any) -> Any:
    """The library's step, compiled as the tests compile."""
    options = {"compiler_options": NOT_OPTIMIZED} | options
    return zero_jax.make_train_step(loss_fn, tx=tx, **options)


def opened(
    name: str,
    stage: int,
    build: dict[str, Any] | None = None,
    offload: zero_jax.HostMemory | None = None,
    **changed: Any,
) -> Opened:
    """A program laid out for its stage and the explicit step, with that step.

    Args:
      name: of the program.
      stage: 1, 2 or 3.
      build: keyword arguments of its `build` in place of the case's.
      offload: what lies on the host.
      changed: options of `make_train_step` beside or in place of its own.
    """
    if name == "c10":
        return _two_states(stage)
    case, means = table.CASES[name], MEANS[name]
    beside = case.open is closes_over_tx  # the optimizer is beside the state

    def wrap_tx(tx):
        return zero_jax.partition_optimizer(noting(tx)) if beside else noting(tx)

    built = case.program.build(**(case.options if build is None else build), wrap_tx=wrap_tx)
    pair = (built["model"], built["optimizer"]) if "optimizer" in built else None
    tx = built["tx"] if beside else None
    state = zero_jax.shard_train_state(
        pair or built["state"], stage, executor="explicit", offload=offload, tx=tx
    )
    layout = zero_jax.layout_of(tx or state)
    step = make_step(means.loss(built, layout.batch_axes), tx, **{**means.options, **changed})

    def call(state, batch):
        state, metrics = step(state, batch)
        return state, metrics.loss, metrics

    def parts(state):
        if pair is not None:
            model, optimizer = state
            params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            return {"": (params, nnx.as_pure(optimizer.opt_state))}
        if isinstance(state, dict):
            return {"": (state["params"], state["opt_state"])}
        return {"": (state.params, state.opt_state)}

    return Opened(built, state, call, [step], parts, {"": layout}, {"": tx})


def _two_states(stage: int) -> Opened:
    """C10: two states and two steps in one jit; each reads the other's parameters as a field.

    The field is lent for the call: it goes in with the parameters of the other state, in whose
    layout a frozen field lies, and they are taken back from what comes out.
    """
    built = table.CASES["c10"].build(wrap_tx=lambda tx: zero_jax.partition_optimizer(noting(tx)))
    tx, plain, losses = built["tx"], built["state"], built["loss_fn"]
    other = {"disc": "gen", "gen": "disc"}

    def disc_loss(params, batch, *, gen):
        return losses["disc"](params, gen, batch)

    def gen_loss(params, batch, *, disc):
        return losses["gen"](params, disc, batch)

    states, steps = {}, {}
    for name, loss_fn in {"disc": disc_loss, "gen": gen_loss}.items():
        lent = other[name]
        record = {"params": plain["params"][name], "opt_state": plain["opt"][name]}
        record[lent] = plain["params"][lent]
        states[name] = zero_jax.shard_train_state(
            record, stage, executor="explicit", tx=tx[name], rules={f"{lent}/*": "frozen"}
        )
        del states[name][lent]
        steps[name] = make_step(loss_fn, tx[name], collections={lent: "read"})

    def half(states, name, batch):
        lent = other[name]
        after, metrics = steps[name]({**states[name], lent: states[lent]["params"]}, batch)
        taken = {**states[lent], "params": after.pop(lent)}
        return {name: after, lent: taken}, metrics

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=NOT_OPTIMIZED)
    def call(states, batch):
        states, disc = half(states, "disc", batch)
        states, gen = half(states, "gen", batch)
        return states, disc.loss + 10 * gen.loss, (disc, gen)

    def parts(states):
        return {n: (states[n]["params"], states[n]["opt_state"]) for n in sorted(states)}

    layouts = {n: zero_jax.layout_of(t) for n, t in tx.items()}
    return Opened(built, states, call, list(steps.values()), parts, layouts, tx, half)
