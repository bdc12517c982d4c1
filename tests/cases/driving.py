"""How a user drives a program: opens it under a stage, jits its own step, trains.

A program comes in one of four kinds, by where its optimizer is. `stage=None` is the program as it
stands, on one device and without the library: the reference of every check.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from cases.measures import copy, counting_compiles, placed
from flax import nnx
from jax.sharding import Mesh

import zero_jax
from zero_jax import Layout

Tree = Any
Build = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Opened:
    """A program ready to train.

    Attributes:
      built: what its `build` returned.
      state: the state to start from.
      step: its own step, not jitted.
      read: state -> (params, opt_state) as they lie.
      layouts: one for each optimizer; none on a single device.
      unshard: state -> (params, opt_state) in logical shapes.
    """

    built: dict[str, Any]
    state: Any
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    read: Callable[[Any], tuple[Tree, Tree]]
    layouts: list[Layout]
    unshard: Callable[[Any], tuple[Tree, Tree]]

    def place(self, batch: Tree) -> Tree:
        """The batch where the step wants it."""
        return zero_jax.shard_batch(batch, self.layouts[0]) if self.layouts else batch

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """What the layouts promise, by tree."""
        trees = ("params", "opt_state")
        return {t: sum(layout.bytes_per_device[t] for layout in self.layouts) for t in trees}


def closes_over_tx(build: Build, stage: int | None, mesh: Mesh | None) -> Opened:
    """A dict or struct whose step closes over `tx`."""

    def read(state):
        if isinstance(state, dict):
            return state["params"], state["opt_state"]
        return state.params, state.opt_state

    if stage is None:
        built = build()
        return Opened(built, built["state"], built["step"], read, [], read)
    built = build(wrap_tx=zero_jax.partition_optimizer)
    tx = built["tx"]
    state = zero_jax.shard_train_state(built["state"], stage, mesh=mesh, tx=tx)
    layouts = [zero_jax.layout_of(tx)]

    def unshard(state):
        return read(zero_jax.unshard_train_state(state, tx=tx))

    return Opened(built, state, built["step"], read, layouts, unshard)


def owns_tx(build: Build, stage: int | None, mesh: Mesh | None) -> Opened:
    """A linen `TrainState`."""

    def read(state):
        return state.params, state.opt_state

    built = build()
    if stage is None:
        return Opened(built, built["state"], built["step"], read, [], read)
    state = zero_jax.shard_train_state(built["state"], stage, mesh=mesh)
    layouts = [zero_jax.layout_of(state)]

    def unshard(state):
        return read(zero_jax.unshard_train_state(state))

    return Opened(built, state, built["step"], read, layouts, unshard)


def model_and_optimizer(
    build: Build, stage: int | None, mesh: Mesh | None, *, step_of: Any = None
) -> Opened:
    """An NNX model and its optimizer, split by the user. `step_of` makes a step of a graph."""
    built = build()
    pair = built["model"], built["optimizer"]
    step_of = built["step_of"] if step_of is None else step_of
    if stage is not None:
        pair = zero_jax.shard_train_state(pair, stage, mesh=mesh)
    layouts = [] if stage is None else [zero_jax.layout_of(pair)]
    graph, state = nnx.split(pair)

    def parts(pair):
        model, optimizer = pair
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)

    def read(state):
        return parts(nnx.merge(graph, state))

    def unshard(state):
        pair = nnx.merge(graph, state)
        return parts(zero_jax.unshard_train_state(pair) if layouts else pair)

    return Opened(built, state, step_of(graph), read, layouts, unshard)


def two_optimizers(build: Build, stage: int | None, mesh: Mesh | None) -> Opened:
    """Two models with an optimizer each, in one step."""

    def read(state):
        return state["params"], state["opt"]

    def record(state, name):
        return {"params": state["params"][name], "opt_state": state["opt"][name]}

    def dissolve(records):
        fields = {"params": "params", "opt": "opt_state"}
        return {f: {k: r[at] for k, r in records.items()} for f, at in fields.items()}

    if stage is None:
        built = build()
        return Opened(built, built["state"], built["step"], read, [], read)
    built = build(wrap_tx=zero_jax.partition_optimizer)
    tx, plain = built["tx"], built["state"]
    laid_out = zero_jax.shard_train_state(
        {name: record(plain, name) for name in tx}, stage, mesh=mesh, tx=tx
    )
    layouts = [zero_jax.layout_of(one) for one in tx.values()]

    def unshard(state):
        whole = {n: zero_jax.unshard_train_state(record(state, n), tx=t) for n, t in tx.items()}
        return read(dissolve(whole))

    return Opened(built, dissolve(laid_out), built["step"], read, layouts, unshard)


@dataclass
class Run:
    """What a training run left behind.

    Attributes:
      opened: the program; its state was donated to the first step.
      step: its jitted step.
      losses: one for each step.
      start: parameters before the first step, in host memory.
      trail: what was watched after each step, by default the parameters, in host memory.
      strayed: "step i: leaf" for every leaf that came out of a step other than it went in.
      compiles: XLA's compiles in each call of the step.
      cache_size: executables in the jitted step's cache after the last call.
      state: the state after the last step.
      kept: number of steps -> the parameters after them, in host memory.
      first: optimizer state after the first step, in logical shapes and in host memory.
    """

    opened: Opened
    step: Any
    losses: list[float]
    start: Tree
    trail: list[Tree]
    strayed: list[str]
    compiles: list[int]
    cache_size: int
    state: Any
    kept: dict[int, Tree] = field(default_factory=dict)
    first: Tree = None

    @property
    def end(self) -> Tree:
        """Parameters after the last step."""
        return self.kept[len(self.losses)]


def train(
    opened: Opened,
    batches: list[Tree],
    *,
    watch: Callable[[Tree], Tree] = lambda params: params,
    keep: tuple[int, ...] = (),
    step: Any = None,
) -> Run:
    """Call the program's own step, jitted and donating its state, once for each batch.

    Every loss is waited for: on jax 0.10.2, 8 virtual devices on few cores deadlock otherwise.

    Args:
      opened: the program.
      batches: one for each step.
      watch: parameters -> what `Run.trail` keeps of them.
      keep: numbers of steps after which `Run.kept` has all parameters.
      step: a jitted step to call in place of the program's own.
    """
    donated = 0 if opened.layouts else ()  # on one device C02 holds one array in two places
    jitted = step or jax.jit(opened.step, donate_argnums=donated)
    start = copy(opened.read(opened.state)[0])
    before = placed(opened.state) if opened.layouts else {}
    run = Run(opened, jitted, [], start, [], [], [], 0, opened.state)
    for i, batch in enumerate(batches):
        batch = opened.place(batch)
        with counting_compiles() as compiles:
            run.state, loss = jitted(run.state, batch)
            run.losses.append(float(loss))
        run.compiles.append(compiles())
        params = opened.read(run.state)[0]
        run.trail.append(copy(watch(params)))
        if i + 1 in (*keep, len(batches)):
            run.kept[i + 1] = copy(params)
        if i == 0:
            run.first = copy(opened.unshard(run.state)[1])
        after = placed(run.state)
        run.strayed += [f"step {i}: {path}" for path in before if after[path] != before[path]]
    run.cache_size = jitted._cache_size()
    return run
