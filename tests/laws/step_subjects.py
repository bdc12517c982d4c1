"""Three small programs for the laws of the library's own step: linen, NNX and plain functions.

Over 8 devices each has dims that divide (24, 40), that only a factor divides (50), that nothing
does (53, 9, 5), and a scalar. The first two have recomputed layers in a loop. All of them say the
same things of themselves:

  build(tx)        a state, on one device, and the `tx` a step needs for it (None if it has its own)
  loss_fn          as `make_train_step` takes it: mean squared error
  params(state)    tree of parameters, logical shapes
  plain_loss       (state, params, batch) -> loss, the same on one device with no library
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import zero_jax

LAYERS, WIDTH, HIDDEN, ROWS = 3, 24, 50, 48
FAST = {"xla_backend_optimization_level": 0}
"""Compiler option: halves the time of a compile for the CPU, and leaves collectives as they are."""
EXACT = FAST | {"xla_cpu_max_isa": "AVX"}
"""Options under which an array gets the same bits whatever loop it is computed in: no instruction
multiplies and adds with one rounding, and fused loops have one emitter."""
AS_USERS_DO = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""Options that undo what `conftest` saves."""
if version("jaxlib").startswith("0.10."):  # later ones have no other emitter
    EXACT |= {"xla_cpu_use_fusion_emitters": True}
    AS_USERS_DO |= {"xla_cpu_use_fusion_emitters": True}


def batch(i: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Batch number `i`: ids (rows,), features (rows, 9) float32, targets (rows, 5) float32."""
    r = np.random.default_rng(i)
    ids = r.integers(0, 53, rows).astype(np.int32)
    x = r.normal(size=(rows, 9)).astype(np.float32)
    return {"ids": ids, "x": x, "y": np.sin(x[:, :5] + ids[:, None]).astype(np.float32)}


def mean_squared_error(y, batch):
    """Mean over the batch, in fp32."""
    return jnp.mean((y.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2)


class Block(nn.Module):
    """A residual layer."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(HIDDEN, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(y)), None


class LinenNet(nn.Module):
    """Embedding, scanned and recomputed layers, a head and a scalar temperature."""

    @nn.compact
    def __call__(self, ids, x):
        h = nn.Embed(53, WIDTH)(ids) + nn.Dense(WIDTH)(x.astype(jnp.float32))
        block = nn.remat(Block, prevent_cse=False)
        scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=LAYERS)
        h, _ = scanned(name="blocks")(h, None)
        return nn.Dense(5, name="head")(h) * self.param("temperature", nn.initializers.ones, ())


def _build_linen(tx):
    net = LinenNet()
    params = net.init(jax.random.key(0), jnp.zeros((1,), jnp.int32), jnp.zeros((1, 9)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx), None


def _linen_loss(params, batch):
    return mean_squared_error(LinenNet().apply({"params": params}, batch["ids"], batch["x"]), batch)


class NnxBlock(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class NnxNet(nnx.Module):
    """Embedding, layers under `nnx.scan` and `nnx.remat`, two heads under `nnx.vmap`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def blocks(rngs):
            return NnxBlock(rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def heads(rngs):
            return nnx.Linear(WIDTH, 5, rngs=rngs)

        self.embed = nnx.Embed(53, WIDTH, rngs=rngs)
        self.inward = nnx.Linear(9, WIDTH, rngs=rngs)
        self.blocks, self.heads = blocks(rngs), heads(rngs)
        self.temperature = nnx.Param(jnp.ones(()))

    def __call__(self, ids, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def layer(block, h):
            return block(h)

        @nnx.vmap(in_axes=(0, None))
        def head(linear, h):
            return linear(h)

        h = layer(self.blocks, self.embed(ids) + self.inward(x.astype(jnp.float32)))
        return head(self.heads, h).mean(0) * self.temperature[...]


def _build_nnx(tx):
    model = NnxNet(nnx.Rngs(0))
    return (model, nnx.Optimizer(model, tx, wrt=nnx.Param)), None


def _nnx_loss(model, batch):
    return mean_squared_error(model(batch["ids"], batch["x"]), batch)


def _nnx_plain_loss(state, params, batch):
    graph, _ = nnx.split(state[0])
    return _nnx_loss(nnx.merge(graph, params), batch)


def _build_plain(tx):
    r = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(r.normal(size=shape).astype(np.float32) / np.sqrt(shape[0]))

    params = {"embed": normal(53, WIDTH), "inward": normal(9, WIDTH), "bias": jnp.zeros(WIDTH)}
    params |= {"up": normal(WIDTH, HIDDEN), "head": normal(HIDDEN, 5), "temperature": jnp.ones(())}
    tx = zero_jax.partition_optimizer(tx)
    return {"params": params, "opt_state": tx.init(params)}, tx


def _plain_loss(p, batch):
    h = p["embed"][batch["ids"]] + batch["x"].astype(p["inward"].dtype) @ p["inward"] + p["bias"]
    return mean_squared_error(jnp.tanh(h @ p["up"]) @ p["head"] * p["temperature"], batch)


@dataclass(frozen=True)
class Program:
    """See the module docstring; `rules` are those of its layout, `options` those of its step."""

    build: Callable[[Any], tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    params: Callable[[Any], Any]
    plain_loss: Callable[..., Any]
    rules: dict[str, Any]
    options: dict[str, Any]


STACKED = {"blocks/*": "stacked"}
PROGRAMS = {
    "linen": Program(
        _build_linen,
        _linen_loss,
        lambda state: state.params,
        lambda _, params, batch: _linen_loss(params, batch),
        STACKED,
        {},
    ),
    "nnx": Program(
        _build_nnx,
        _nnx_loss,
        lambda state: nnx.as_pure(nnx.state(state[0], nnx.Param)),
        _nnx_plain_loss,
        STACKED | {"heads/*": "stacked"},
        {},
    ),
    "plain": Program(
        _build_plain,
        _plain_loss,
        lambda state: state["params"],
        lambda _, params, batch: _plain_loss(params, batch),
        {},
        {"regather": "keep"},  # parameters are arrays of the loss: nothing to gather layer by layer
    ),
}


def mesh_of(**axes: int) -> Mesh:
    """A mesh over the first devices."""
    count = int(np.prod([*axes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape([*axes.values()]), tuple(axes))


def train_plainly(name: str, tx: optax.GradientTransformation, steps: int):
    """Train on one device: losses, gradient norms, parameters before and after, as flat lists."""
    program = PROGRAMS[name]
    state, _ = program.build(tx)
    params = start = program.params(state)
    if name == "nnx":
        params = start = nnx.state(state[0], nnx.Param)
    moments, losses, norms = tx.init(params), [], []

    @functools.partial(jax.jit, compiler_options=FAST)
    def step(params, moments, batch):
        loss, grads = jax.value_and_grad(lambda p: program.plain_loss(state, p, batch))(params)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss, optax.tree.norm(grads)

    for i in range(steps):
        params, moments, loss, norm = step(params, moments, batch(i))
        losses.append(float(loss))
        norms.append(float(norm))
    return losses, norms, leaves(start), leaves(params)


def lay_out(name: str, tx: optax.GradientTransformation, stage: int, **options):
    """The program's state at a stage, for the explicit step unless told otherwise, and its tx."""
    program = PROGRAMS[name]
    state, tx = program.build(tx)
    options = {"executor": "explicit", "rules": program.rules, "tx": tx} | options
    return zero_jax.shard_train_state(state, stage, **options), tx


def train_explicitly(
    name: str, tx: optax.GradientTransformation, stage: int, steps: int, **options
):
    """The same with the library's step: losses, norms, parameters after, the state."""
    step_options = PROGRAMS[name].options | options.pop("step", {})
    state, tx = lay_out(name, tx, stage, **options)
    step = zero_jax.make_train_step(
        PROGRAMS[name].loss_fn, tx=tx, compiler_options=FAST, **step_options
    )
    losses, norms = [], []
    for i in range(steps):
        placed = zero_jax.shard_batch(batch(i), state if tx is None else tx)
        state, metrics = step(state, placed)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return losses, norms, leaves(PROGRAMS[name].params(whole(state, tx))), state


def whole(state, tx=None):
    """The state with logical shapes."""
    return zero_jax.unshard_train_state(state, tx=tx)


def leaves(tree) -> list[np.ndarray]:
    """Leaves as numpy arrays, in order."""
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def change(before, after, reference) -> float:
    """||after - reference|| / ||reference - before|| over all parameters."""
    a, b, c = (np.concatenate([np.ravel(x).astype(np.float64) for x in t]) for t in
               (before, after, reference))  # fmt: skip
    return float(np.linalg.norm(b - c) / np.linalg.norm(c - a))
