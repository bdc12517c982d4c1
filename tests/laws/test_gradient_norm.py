"""Law: the gradient norm is that of one device, on every stage, mesh and number of microbatches.

A piece that several devices hold counts once, padding never. The gradient of the first batch is
compared, so that nothing but the order of fp32 sums can differ: 1e-6. One step then moves all
parameters to where one device's step moves them.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from laws import step_subjects as subjects
from laws.step_subjects import mesh_of

import zero_jax

MESHES = {
    "data 8": mesh_of(data=8),
    "replica 2 x data 4": mesh_of(replica=2, data=4),
    "data 4 x replica 2": mesh_of(data=4, replica=2),
    "1": mesh_of(data=1),
    "3": mesh_of(data=3),
    "5": mesh_of(data=5),
    "6": mesh_of(data=6),
    "7": mesh_of(data=7),
}


def tx():
    return optax.sgd(5e-2, momentum=0.9)


@functools.cache
def reference(rows):
    """Norm, and parameters before and after one step, on one device."""
    program = subjects.PROGRAMS["plain"]
    params = program.build(tx())[0]["params"]
    grads = jax.grad(program.loss_fn)(params, subjects.batch(0, rows))
    after = jax.tree.map(lambda p, g: p - 5e-2 * g, params, grads)
    return float(optax.tree.norm(grads)), subjects.leaves(params), subjects.leaves(after)


@pytest.mark.filterwarnings("ignore:stage .. the axis 'data' has one device")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MESHES)
def test_on_every_stage_and_mesh(name, stage):
    norm_is_that_of_one_device(MESHES[name], stage, 2 - stage % 2, "explicit")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["data 8", "replica 2 x data 4"])
def test_with_the_other_number_of_microbatches(name, stage):
    norm_is_that_of_one_device(MESHES[name], stage, 1 + stage % 2, "explicit")


@pytest.mark.parametrize("n", [4, 6, 8])
def test_on_refined_axes(n):
    """The layout of a user's own step cuts what N does not divide by a factor of N."""
    layout = norm_is_that_of_one_device(mesh_of(data=n), 3, 2, "annotated")
    forms = {p.partition.form for p in jax.tree.leaves(layout.params)}
    assert "factor" in forms and len(layout.mesh.shape) > 1


def norm_is_that_of_one_device(mesh, stage, microbatches, executor):
    rows = mesh.size * 6
    state, its_tx = subjects.lay_out("plain", tx(), stage, mesh=mesh, executor=executor)
    program = subjects.PROGRAMS["plain"]
    step = zero_jax.make_train_step(
        program.loss_fn,
        tx=its_tx,
        microbatches=microbatches,
        compiler_options=subjects.FAST,
        **program.options,
    )
    state, metrics = step(state, zero_jax.shard_batch(subjects.batch(0, rows), its_tx))
    norm, before, expected = reference(rows)
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-6)
    after = subjects.leaves(subjects.whole(state, its_tx)["params"])
    assert subjects.change(before, after, expected) <= 2e-6
    return zero_jax.layout_of(its_tx)


class Small(nn.Module):
    """Kernels held by tensor parallelism; dims below N, and shapes (1,), (0,) and ()."""

    @nn.compact
    def __call__(self, x):
        over = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        back = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
        h = jnp.tanh(nn.Dense(24, kernel_init=over, name="up")(x))
        h = nn.Dense(3, kernel_init=back, name="down")(h)
        one, none = (
            self.param(n, nn.initializers.ones, s) for n, s in (("one", (1,)), ("no", (0,)))
        )
        return h * one * self.param("scalar", nn.initializers.ones, ()) + none.sum()


X = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)


def small_loss(params, batch):
    return jnp.mean((Small().apply({"params": params}, batch["x"]) - batch["x"][:, :3]) ** 2)


def create():
    params = Small().init(jax.random.key(0), X[:1])["params"]
    return TrainState.create(apply_fn=None, params=params, tx=tx())


@functools.cache
def small_reference():
    params = nn.meta.unbox(create().params)
    grads = jax.grad(small_loss)(params, {"x": X})
    after = jax.tree.map(lambda p, g: p - 5e-2 * g, params, grads)
    return float(optax.tree.norm(grads)), subjects.leaves(params), subjects.leaves(after)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "axes",
    [{"data": 4, "model": 2}, {"replica": 2, "data": 2, "model": 2}, {"model": 2, "data": 4}],
    ids=lambda axes: " x ".join(f"{k} {v}" for k, v in axes.items()),
)
def test_with_tensor_parallelism(axes, stage):
    state = zero_jax.shard_train_state(create(), stage, mesh=mesh_of(**axes), executor="explicit")
    step = zero_jax.make_train_step(
        small_loss, microbatches=1 + stage % 2, compiler_options=subjects.FAST
    )
    kernel = state.params["up"]["kernel"].value
    before_spec = kernel.sharding.spec
    assert before_spec[1] == "model"
    state, metrics = step(state, zero_jax.shard_batch({"x": X}, state))
    assert state.params["up"]["kernel"].value.sharding.spec == before_spec
    norm, before, expected = small_reference()
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-6)
    after = subjects.leaves(nn.meta.unbox(subjects.whole(state).params))
    assert subjects.change(before, after, expected) <= 2e-6
