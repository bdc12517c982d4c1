"""Law: the two executors train alike, and so do the stages.

The reference is the program on one device with no library. Optimizers that are not elementwise
(factored moments, trust ratios) are those that an update on pieces would get wrong. The order in
which fp32 sums are taken differs, so losses agree to 5e-6 and what training changed to 2e-5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import step_subjects as subjects

import zero_jax

STEPS = 3
EPS = 1e-3  # Adam's default turns rounding noise of a vanishing gradient into a whole step
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=EPS),
    "sgd": lambda: optax.sgd(5e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2, eps=EPS),
}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@functools.cache
def reference(name, optimizer):
    return subjects.train_plainly(name, OPTIMIZERS[optimizer](), STEPS)


def agree(name, optimizer, losses, norms, after):
    """Losses, norms and parameters of a run are those of one device."""
    plain_losses, plain_norms, before, expected = reference(name, optimizer)
    np.testing.assert_allclose(losses, plain_losses, rtol=5e-6)
    np.testing.assert_allclose(norms, plain_norms, rtol=5e-6)
    np.testing.assert_allclose(norms[0], plain_norms[0], rtol=1e-6)  # before any parameter moved
    assert subjects.change(before, after, expected) <= 2e-5


@STAGES
@pytest.mark.parametrize("name", subjects.PROGRAMS)
def test_the_explicit_step_trains_as_one_device(name, stage):
    options = {"microbatches": 1 + 2 * (stage % 2)}  # 3 at the odd stages
    run = subjects.train_explicitly(name, OPTIMIZERS["adamw"](), stage, STEPS, step=options)
    agree(name, "adamw", *run[:3])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "lamb"])
def test_with_other_optimizers(optimizer, stage):
    run = subjects.train_explicitly("plain", OPTIMIZERS[optimizer](), stage, STEPS)
    agree("plain", optimizer, *run[:3])


@pytest.mark.parametrize(
    ("name", "stage"), [("linen", 3), ("nnx", 1), ("plain", 0), ("plain", 2), ("plain", 3)]
)
def test_the_annotated_step_trains_alike(name, stage):
    run = train_annotated(name, OPTIMIZERS["adamw"](), stage)
    agree(name, "adamw", *run)


def train_annotated(name, tx, stage, **options):
    """The user's own jitted step on the same program: losses, norms, parameters after."""
    program = subjects.PROGRAMS[name]
    state, tx = subjects.lay_out(name, tx, stage, executor="annotated", **options)
    user_step, static = _user_step(name, program, tx), {"nnx": 2}.get(name)
    step = jax.jit(user_step, static_argnums=static, compiler_options=subjects.FAST)
    layout = zero_jax.layout_of(state if tx is None else tx)
    graph, state = nnx.split(state) if name == "nnx" else (None, state)
    losses, norms = [], []
    for i in range(STEPS):
        batch = zero_jax.shard_batch(subjects.batch(i), layout)
        state, loss, norm = step(state, batch, graph) if name == "nnx" else step(state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    state = nnx.merge(graph, state) if name == "nnx" else state
    return losses, norms, subjects.leaves(program.params(subjects.whole(state, tx)))


def _user_step(name, program, tx):
    def linen(state, batch):
        loss, grads = jax.value_and_grad(program.loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss, optax.tree.norm(grads)

    def plain(state, batch):
        loss, grads = jax.value_and_grad(program.loss_fn)(state["params"], batch)
        updates, moments = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": moments}, loss, optax.tree.norm(grads)

    def on_nnx(variables, batch, graph):
        model, optimizer = nnx.merge(graph, variables)
        loss, grads = nnx.value_and_grad(program.loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], loss, optax.tree.norm(grads)

    return {"linen": linen, "plain": plain, "nnx": on_nnx}[name]


BF16 = zero_jax.Precision.bf16()


@functools.cache
def in_bf16(stage, microbatches=1):
    step = {"microbatches": microbatches}
    run = subjects.train_explicitly(
        "plain", optax.adamw(1e-3, eps=EPS), stage, STEPS, precision=BF16, step=step
    )
    return run[:3]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_agree_in_bf16(stage):
    """Forward and backward passes are the same bf16 arithmetic at every stage; sums are fp32.

    Gradients differ by the order of fp32 sums, 1e-6 of them. A step of Adam moves a master copy by
    at most about 1e-3, so copies differ by 1e-8 or so, and where that straddles a rounding border
    one bf16 parameter differs by its last bit, 2^-8 of it. So parameters agree bit for bit except
    few, and those to 2^-7.
    """
    losses, norms, after = in_bf16(stage)
    expected_losses, expected_norms, expected = in_bf16(0)
    np.testing.assert_allclose(losses[0], expected_losses[0], rtol=1e-6)
    np.testing.assert_allclose(norms[0], expected_norms[0], rtol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=2**-8 / 8)
    for a, b in zip(after, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-7)
    different = sum(int((a != b).sum()) for a, b in zip(after, expected, strict=True))
    assert different <= 0.01 * sum(a.size for a in after)


def test_bf16_stays_near_fp32():
    """bf16 has 8 bits: each of about 4 roundings on the way to a loss changes it by up to 2^-8."""
    losses, _, _ = in_bf16(3)
    state = subjects.train_explicitly("plain", optax.adamw(1e-3, eps=EPS), 0, STEPS)
    np.testing.assert_allclose(losses, state[0], rtol=4 * 2**-8)
    assert max(abs(np.array(losses) / state[0] - 1)) > 1e-6  # it did compute in bf16
