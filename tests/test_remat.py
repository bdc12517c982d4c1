"""Policies of what is kept: where it is kept changes no bit of a layer loop's gradients."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from laws.parallel_blocks import Net, Size, make_step
from laws.step_subjects import AS_USERS_DO

import zero_jax
from zero_jax import Remat, scan_layers
from zero_jax.layer_store import kept_as
from zero_jax.remat import regather, regather_policy

LAYERS, ROWS, WIDTH = 7, 4, 16
MEGATRON = Size(layers=5, width=16, rows=2, tokens=8)


def block(w, x, scale, key):
    """Two products, dropout and an integer beside; x is a tree with a scalar in it."""
    y, count = x
    hidden = jnp.tanh(y @ w["up"]) * jax.random.bernoulli(key, 0.8, (ROWS, 2 * WIDTH))
    return (y + (hidden @ w["down"]) * scale, count + 1), (hidden**2).mean()


def loss(w, x, scale, **how):
    key = jax.random.key(0)
    (y, count), outs = scan_layers(block, w, (x, jnp.float32(0)), scale, rng=key, **how)
    return (y**2).mean() * count + (outs * jnp.arange(LAYERS)).sum()


def arguments():
    keys = jax.random.split(jax.random.key(1), 3)
    w = {"up": (LAYERS, WIDTH, 2 * WIDTH), "down": (LAYERS, 2 * WIDTH, WIDTH)}
    w = {n: jax.random.normal(k, s) / 4 for k, (n, s) in zip(keys, w.items(), strict=False)}
    return w, jax.random.normal(keys[2], (ROWS, WIDTH)), jnp.float32(0.7)


def gradients(mesh=None, **how):
    def run(*given):
        return jax.value_and_grad(partial(loss, **how), (0, 1, 2))(*given)

    if mesh is None:
        return jax.jit(run, compiler_options=AS_USERS_DO)(*arguments())
    with jax.set_mesh(mesh):
        return jax.jit(run, compiler_options=AS_USERS_DO)(*arguments())


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("every", [1, 2, "sqrt"])
@pytest.mark.parametrize("saved", ["nothing", "dots", "weight_dots", "all"])
def test_where_it_is_kept_changes_no_bit(saved, every):
    on_device = gradients(remat=Remat(saved, every))
    same(gradients(remat=Remat(saved, every, kept_on="host")), on_device)


@pytest.mark.parametrize("remat", [Remat(split_over="model"), Remat("dots", 3, "host", "model")])
def test_split_inputs_change_no_bit(remat):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    whole = Remat(remat.saved, remat.every)
    same(gradients(mesh, remat=remat), gradients(mesh, remat=whole))


def test_the_short_arguments_say_the_same():
    dots = jax.checkpoint_policies.dots_saveable
    short = gradients(remat_policy=dots, checkpoint_every=2)
    same(gradients(remat=Remat("dots", 2)), short)


def test_the_kept_inputs_lie_on_the_host_and_scalars_do_not():
    w, x, scale = arguments()
    _, pull = jax.vjp(partial(loss, remat=Remat(kept_on="host")), w, x, scale)
    stacks = [leaf for leaf in jax.tree.leaves(pull) if jnp.shape(leaf)[:1] == (LAYERS,)]
    lie = {leaf.shape: leaf.sharding.memory_kind for leaf in stacks}
    assert lie[LAYERS, ROWS, WIDTH] == "pinned_host"
    assert lie[(LAYERS,)] == "device"


def test_microbatches_keep_theirs_apart():
    def total(w, x, scale, remat):
        def microbatch(sum_, x):
            return sum_ + loss(w, x, scale, remat=remat), None

        return jax.lax.scan(microbatch, jnp.float32(0), jnp.stack([x, 2 * x]))[0]

    grad = jax.jit(jax.grad(total, (0, 2)), static_argnums=3)
    same(grad(*arguments(), Remat(kept_on="host")), grad(*arguments(), Remat()))


def train(remat, steps=2):
    """Losses of the library's step on a mesh of data x model, stage 3, tensor parallelism."""
    abstract, _, step, create = make_step(Net(MEGATRON, remat), jax.devices(), options=AS_USERS_DO)
    layout = zero_jax.layout_of(abstract)
    state = zero_jax.shard_train_state(
        create(jax.random.key(2)),
        3,
        mesh=layout.mesh,
        executor="explicit",
        rules={"blocks/*": "stacked"},
    )
    x = np.random.default_rng(0).normal(size=(8, MEGATRON.tokens, MEGATRON.width))
    batch = zero_jax.shard_batch(x.astype(np.float32), state)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses += [float(metrics.loss), float(metrics.grad_norm)]
    return losses


def test_the_explicit_step_trains_alike():
    want = train(None)
    for remat in (Remat(kept_on="host"), Remat(kept_on="host", split_over="model", every=2)):
        assert train(remat) == want


def test_which_dim_is_split():
    def dims(*shapes):
        x = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
        with jax.set_mesh(mesh):
            return [(k.axis, k.dim) for k in kept_as(Remat(split_over="model"), x)]

    # tokens; else the width; else the batch; what nothing divides stays whole
    assert dims((4, 8, 16), (4, 6, 16), (4, 6, 10)) == [("model", 1), ("model", 2), ("model", 0)]
    assert dims((8,), (6,), ()) == [("model", 0), (None, 0), (None, 0)]


BAD = {
    "saved": (lambda: Remat("dot"), "saved='dot'; one of 'nothing', 'dots'"),  # pyright: ignore
    "every": (lambda: Remat(every=0), "every=0; a number of layers"),
    "kept_on": (lambda: Remat(kept_on="disk"), "kept_on='disk'; 'device' or"),  # pyright: ignore
    "split_over": (lambda: Remat(split_over=("a", "b")), "the name of one mesh axis"),  # pyright: ignore
    "twice": (lambda: gradients(remat=Remat(), checkpoint_every=2), "checkpoint_every is given"),
    "no mesh": (lambda: gradients(remat=Remat(split_over="model")), "no mesh is set here"),
    "a module": (lambda: regather(nn.Dense(3)), "a linen module class was expected"),
}


@pytest.mark.parametrize("call, letter", BAD.values(), ids=BAD)
def test_bad_input_is_told(call, letter):
    with pytest.raises(ValueError, match=letter):
        call()


def test_an_axis_that_cannot_be_split_over_is_told():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with pytest.raises(ValueError, match=r"the mesh here has \('data', 'model'\)"):
        gradients(mesh, remat=Remat(split_over="tensor"))
    three = Mesh(np.array(jax.devices()[:3]), ("model",))
    with pytest.raises(ValueError, match="none with a dim that 3 devices divide"):
        gradients(three, remat=Remat(split_over="model"))
    with pytest.raises(ValueError, match="the axis is manual here"):
        train(Remat(split_over="data"))


class Plain(nn.Module):
    """A residual layer that nobody recomputes."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(32, use_bias=False, dtype=jnp.bfloat16)(x)
        return x + nn.Dense(16, use_bias=False)(jnp.tanh(y)).astype(x.dtype)


class PlainNet(nn.Module):
    """Three of them."""

    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = self.block(name=f"block_{i}")(x)
        return x


class PlainNNX(nnx.Module):
    """The same for NNX."""

    def __init__(self, call):
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(1))
        self.call = call

    def __call__(self, x):
        return self.call(self, x)

    def forward(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def linen_step(block, wrap=lambda fn: fn):
    net = PlainNet(block)
    params = net.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    apply = wrap(lambda params, x: net.apply({"params": params}, x))
    return state, zero_jax.make_train_step(lambda params, x: (apply(params, x) ** 2).mean())


def nnx_step(call):
    model = PlainNNX(call)
    state = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return state, zero_jax.make_train_step(lambda model, x: (model(x) ** 2).mean())


def gathers_and_loss(made):
    state, step = made
    state = zero_jax.shard_train_state(state, 3, executor="explicit", min_size=0)
    batch = zero_jax.shard_batch(X, state)
    gathers = step.lower(state, batch).as_text().count("call @gather_at_use")
    state, metrics = step(state, batch)
    return gathers, float(metrics.loss), float(metrics.grad_norm)


REGATHERED = {
    "a linen class": (6, lambda: linen_step(Plain), lambda: linen_step(regather(Plain))),
    "all but gathers": (6, lambda: linen_step(Plain), lambda: linen_step(regather(Plain, "all"))),
    "a function": (6, lambda: linen_step(Plain), lambda: linen_step(Plain, regather)),
    "NNX": (
        2,
        lambda: nnx_step(PlainNNX.forward),
        lambda: nnx_step(nnx.remat(PlainNNX.forward, policy=regather_policy())),
    ),
}


@pytest.mark.parametrize("leaves, plain, regathered", REGATHERED.values(), ids=REGATHERED)
def test_parameters_are_gathered_twice_and_not_kept(leaves, plain, regathered):
    once, *want = gathers_and_loss(plain())
    twice, *got = gathers_and_loss(regathered())
    # Nobody asks for the gradient of the input, so the first kernel is not needed again.
    assert (once, twice) == (leaves, 2 * leaves - 1)
    np.testing.assert_allclose(got, want, rtol=1e-3)  # half of it computes in bf16
