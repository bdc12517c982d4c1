"""The library's own train step: collectives written out, exactly the paper's bytes.

    state = zero_jax.shard_train_state(state, stage=3, executor="explicit")
    step = zero_jax.make_train_step(loss_fn)
    state, metrics = step(state, batch)

ZeRO (arXiv 1910.02054, section 7): per step and device 2 elements a parameter cross the wire below
stage 3 and 3 at stage 3, gathered in the compute dtype and reduced in the reduction dtype of the
state's `Precision`. The stage is read off the state. `explicit_step` has the order of events.

Here: the jitted function, its donation and compiler options, faults raised on the host, and NNX
objects, which are updated in place.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from . import flax_nnx
from .anatomy import optimizer_of
from .collectives import Combine
from .compiler_options import compiler_options
from .disk_step import DiskStep
from .explicit_step import Metrics, explicit_step
from .faults import Watch
from .offload.described import describe_memories
from .offload_policy import Nvme
from .step_options import (
    Collection,
    NonFinite,
    Reduce,
    Regather,
    Statistics,
    StepOptions,
    takes_rng,
)
from .train_state import layout_of
from .update_report import UpdateTraffic
from .wires import layer_bytes

Tree = Any


def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    tx: Any = None,
    has_aux: bool = False,
    microbatches: int = 1,
    reduce: Reduce = "each",
    regather: Regather = "layer",
    clip_norm: float | None = None,
    transform_grads: Callable[[Tree], Tree] | None = None,
    nonfinite: NonFinite = "raise",
    frozen: Callable[[str], bool] | Tree | None = None,
    collections: Mapping[Any, Collection] | None = None,
    aux: Mapping[str, Combine] | None = None,
    statistics: Statistics = "global",
    after_update: Callable[[Any], Any] | None = None,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """Make a train step with explicit collectives.

    Args:
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, rng)` of one device's rows; for
        an NNX state the model in place of `params`. Returns the mean loss over its rows, or
        `(total, weight)` where rows do not count alike: the step's loss is then the sum of all
        totals over the sum of all weights. Parameters arrive in the compute dtype. A mean over the
        whole batch inside of it is `mean_over_batch`.
      tx: the wrapped optimizer of a state that has none of its own.
      has_aux: the loss returns `(loss, aux)`, aux a tree of arrays.
      microbatches: parts that a device's rows are computed in, one after the other.
      reduce: with microbatches, "each" reduce-scatters gradients in every one at stages 2 and 3 and
        keeps 1/N of them; "once" sums whole gradients on each device and reduces at the end.
      regather: at stage 3, "layer" gathers a parameter where it is read, and again where a layer is
        recomputed (`nn.remat`, `scan_layers`); "keep" gathers all once a step and keeps them.
      clip_norm: global norm that gradients are clipped to.
      transform_grads: gradients -> gradients, on whole logical trees, before clipping.
      nonfinite: gradients that are not finite never reach the optimizer: the step leaves the state
        as it is. "raise" raises a FloatingPointError in the first call that finds it computed (or
        in `check`), "skip" goes on.
        "pass" hands them to the optimizer (`optax.apply_if_finite`, say). Under a `DynamicScale` a
        step that overflows is skipped whatever stands here, and raises only once that is hopeless.
      frozen: path -> whether a parameter is frozen, or a tree of bools. No gradient is computed,
        reduced or stored for it, and it never changes.
      collections: field of the state -> rule. The loss gets the field as a keyword argument;
        "read" is all that happens to such a one (a frozen model, say), else the loss returns it
        changed in its aux and devices' values are joined: "mean", "max", "min", or "sum", which is
        the old value and what all devices and microbatches have added to it. Integers have no
        mean: under "mean" they may only change as they do on every device (a count of steps), and
        one that depends on the batch raises. For NNX a rule belongs to a type of Variable or its
        name, `{nnx.BatchStat: "mean", "Count": "sum"}`; the nearest class counts, and all others
        have "mean".
      aux: entry of the loss's aux -> how values of devices and microbatches are joined; the mean by
        default. Means and sums come in 32 bits at least.
      statistics: BatchNorm takes its statistics over the whole batch ("global", as on one device)
        or over one device's rows ("local").
      after_update: state -> state after the optimizer (moving averages, say), on logical shapes of
        all but the optimizer's state, which stays as it is. A TrainState's own `apply_gradients` is
        not called.
      donate: the state that is passed in gives its memory to the one that comes out.
      compiler_options: for the compiler; by default those of `step_compiler_options`.

    Returns:
      `step(state, batch, rng=None) -> (state, Metrics)`. The state comes from `shard_train_state`
      or `init_train_state`, best with `executor="explicit"`; the batch from `shard_batch`; `rng` is
      one key, which every device and microbatch folds into its own.

    Raises:
      TypeError, ValueError: an argument is not as described.

    Source: ZeRO, arXiv 1910.02054, section 7.
    """
    options = StepOptions(
        has_aux=has_aux,
        microbatches=microbatches,
        reduce=reduce,
        regather=regather,
        clip_norm=clip_norm,
        transform_grads=transform_grads,
        nonfinite=nonfinite,
        frozen=frozen,
        collections=collections or {},
        aux=aux or {},
        statistics=statistics,
        after_update=after_update,
        takes_rng=takes_rng(loss_fn, collections or {}),
    )
    return TrainStep(loss_fn, tx, options, donate, compiler_options)


class TrainStep:
    """A jitted train step; made by `make_train_step`."""

    def __init__(
        self, loss_fn: Any, tx: Any, options: StepOptions, donate: bool, compiler_options: Any
    ):
        self._options, self._donate, self._compiler_options = options, donate, compiler_options
        self._step = partial(explicit_step, loss_fn=loss_fn, tx=tx, options=options)
        self._loss_fn, self._tx, self._jitted = loss_fn, tx, None
        self._disk_steps: list[DiskStep] = []
        self._last: DiskStep | None = None
        self._watch = Watch(options.nonfinite)

    def __call__(self, state: Any, batch: Tree, rng: Any = None) -> tuple[Any, Metrics]:
        """Run one step; the state passed in is donated, an NNX one updated in place.

        Raises:
          FloatingPointError, ValueError: an earlier step had a fault; nothing is lost.
        """
        self._watch.check()
        self._last = on_disk = self._on_disk(state)
        if on_disk is not None:
            after, metrics = on_disk(state, batch, self._key(rng))
            if flax_nnx.is_nnx(state):
                nnx.update(state, nnx.split(after)[1])
            else:
                state = after
        elif flax_nnx.is_nnx(state):
            graph, variables = nnx.split(state)
            run = self._function(state) if _is_traced(variables, batch) else self._jit(state)
            variables, metrics = run(variables, batch, self._key(rng), graph)
            nnx.update(state, variables)
        else:
            run = self._function(state) if _is_traced(state, batch) else self._jit(state)
            state, metrics = run(state, batch, self._key(rng))
        self._watch.add(metrics)
        return state, metrics

    def check(self) -> None:
        """Wait for all steps so far, and raise if one had a fault; for the end of a loop.

        Raises:
          FloatingPointError, ValueError: as the next step would.
        """
        self._watch.check(wait=True)

    @property
    def traffic(self) -> UpdateTraffic | None:
        """What the update of the last step has moved; None but for a state in files."""
        return None if self._last is None else self._last.traffic

    def lower(self, state: Any, batch: Tree, rng: Any = None) -> jax.stages.Lowered:
        """Lower the step, also for states and batches of `ShapeDtypeStruct`s."""
        on_disk = self._on_disk(state)
        if on_disk is not None:
            return on_disk.lower(state, batch, self._key(rng))
        jitted = self._make_jitted(state)
        if flax_nnx.is_nnx(state):
            graph, variables = nnx.split(state)
            lowered = jitted.lower(variables, batch, self._key(rng), graph)
        else:
            lowered = jitted.lower(state, batch, self._key(rng))
        return describe_memories(lowered, state, self._tx)

    def _key(self, rng: Any) -> Any:
        if rng is not None and self._options.takes_rng == "no":
            raise TypeError(
                "rng: loss_fn takes no key; give it a third argument, or leave the key out."
            )
        if rng is None and self._options.takes_rng == "yes":
            raise TypeError(
                "rng: loss_fn takes a key and none was given; call step(state, batch, rng) with a "
                "key that is new in every step, such as jax.random.fold_in(key, step)."
            )
        return rng

    def _on_disk(self, state: Any) -> DiskStep | None:
        """The step on a state in files, made once for each; None for any other state."""
        laid_out = state if self._tx is None else self._tx
        layout = layout_of(laid_out)
        if not isinstance(layout.offload, Nvme):
            return None
        if not self._donate:
            raise ValueError("donate=False: the optimizer state lies in files, which steps use up.")
        found = next((step for step in self._disk_steps if step.layout is layout), None)
        if found is None:
            compiler = self._compiler(laid_out)
            found = DiskStep(state, self._loss_fn, self._tx, self._options, compiler)
            self._disk_steps.append(found)
        return found

    def _jit(self, state: Any) -> Any:
        """The step, jitted once."""
        if self._jitted is None:
            self._jitted = self._make_jitted(state)
        return self._jitted

    def _make_jitted(self, state: Any) -> Any:
        options = self._compiler(state if self._tx is None else self._tx)
        return jax.jit(
            self._function(state),
            donate_argnums=0 if self._donate else (),
            static_argnums=3 if flax_nnx.is_nnx(state) else None,
            compiler_options=options or None,
        )

    def _compiler(self, laid_out: Any) -> dict[str, Any]:
        given = self._compiler_options
        return step_compiler_options(laid_out) if given is None else dict(given)

    def _function(self, state: Any) -> Any:
        """The step on what `state` is for jax: itself, or the variables of an NNX one."""
        if not flax_nnx.is_nnx(state):
            return self._step

        def on_variables(variables: Any, batch: Tree, rng: Any, graph: Any) -> Any:
            state, metrics = self._step(nnx.merge(graph, variables), batch, rng)
            return nnx.split(state)[1], metrics

        return on_variables


def step_compiler_options(state: Any) -> dict[str, Any]:
    """What the compiler is told about a step on a state, for the devices it lies on.

    `make_train_step` does so by itself; a `jax.jit` of yours around the step has to be given these.

    Args:
      state: a laid-out state, or its wrapped `tx`.
    """
    layout, optimizer = layout_of(state), optimizer_of(state)
    in_a_layer = layer_bytes(layout, optimizer.precision)
    uses_host = any(p.on_host for p in layout.placements())
    return compiler_options(layout.mesh.devices.flat[0], in_a_layer, uses_host)


def _is_traced(state: Any, batch: Tree) -> bool:
    """Whether the step is part of a jit of the user's, which has its own compiler options."""
    return any(isinstance(_first_leaf(tree), Tracer) for tree in (state, batch))


def _first_leaf(tree: Any) -> Any:
    """The first leaf, None without one; the rest, which may be long, is not looked at."""
    level = jax.tree_util.default_registry.flatten_one_level(tree)
    if level is None:
        return tree
    found = (_first_leaf(child) for child in level[0] if child is not None)
    return next((leaf for leaf in found if leaf is not None), None)
