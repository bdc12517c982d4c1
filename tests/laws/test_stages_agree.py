"""Law: stages 0 to 3 train alike, whatever the optimizer.

The reference is the same program on one device with the plain transformation. Optimizers whose
arithmetic is not elementwise (global norms, factored moments, trust ratios, orthogonalisation) are
the ones that a per-shard update gets wrong: by 1e-2 and more on the change of the parameters.
"""

import contextlib
import functools

import jax
import numpy as np
import optax
import pytest
from laws import subject

import zero_jax

STEPS = 6
EPS = 1e-3
"""Adam's epsilon. Its default turns the rounding noise of a vanishing gradient into a full step, on
one device as on eight; this one keeps the comparison as sharp as fp32 sums allow."""


def kernels(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def groups(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "vector", params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, eps=EPS),
    "sgd_momentum": lambda: optax.sgd(5e-2, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-2, eps=EPS),
    "muon": lambda: optax.contrib.muon(1e-2, eps=EPS),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, eps=EPS),
    "prodigy": lambda: optax.contrib.prodigy(1.0, eps=EPS),
    "masked": lambda: optax.chain(
        optax.masked(optax.scale_by_adam(eps=EPS), kernels), optax.scale(-1e-2)
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adamw(1e-2, eps=EPS), "vector": optax.sgd(1e-2, momentum=0.9)}, groups
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=EPS), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 8), eps=EPS
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2, eps=EPS), 3),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(1e-2, eps=EPS, mask=kernels)
    ),
}


@functools.cache
def reference(name):
    start = subject.create(OPTIMIZERS[name]())
    end, losses = subject.train(start, STEPS)
    return start.params, end.params, losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_agree(name, stage):
    before, expected, losses = reference(name)
    state = zero_jax.shard_train_state(subject.create(OPTIMIZERS[name]()), stage)
    end, sharded = subject.train_sharded(state, STEPS)
    np.testing.assert_allclose(sharded, losses, rtol=5e-6)
    assert subject.change(before, end.params, expected) <= 2e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradient_norm_is_that_of_the_gathered_gradients(stage):
    """A norm taken inside the optimizer's update counts every leaf once, padding never."""
    seen = []

    def spy(updates, state, params=None):
        jax.debug.callback(lambda norm: seen.append(float(norm)), optax.tree.norm(updates))
        return updates, state

    tx = optax.chain(
        optax.GradientTransformation(lambda _: optax.EmptyState(), spy), optax.sgd(1.0)
    )
    plain = subject.create(tx)
    grads = jax.grad(subject.loss_fn)(plain.params, subject.batch(0), plain.apply_fn)
    stateless = pytest.warns(zero_jax.ZeroWarning, match="no optimizer state")
    with stateless if stage == 1 else contextlib.nullcontext():
        state = zero_jax.shard_train_state(plain, stage)
    subject.train_sharded(state, 1)
    jax.effects_barrier()
    np.testing.assert_allclose(seen, float(optax.tree.norm(grads)), rtol=1e-6)
