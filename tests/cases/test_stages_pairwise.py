"""Stages 0 to 3 against each other, and the arithmetic of the reduction against paper."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import table
from cases.driving import closes_over_tx, train
from cases.measures import loss_error
from jax.sharding import Mesh

import zero_jax

STAGES = (0, 1, 2, 3)


@table.programs("c01", "c12", "c18")
def test_losses_agree_over_twenty_steps(name):
    losses = [table.run(name, stage).losses for stage in STAGES]
    assert all(len(one) == 20 for one in losses)
    for a, b in itertools.combinations(losses, 2):
        assert loss_error(a, b) <= 2e-6


@table.programs("c01", "c12", "c18")
def test_gradient_norms_agree_and_are_that_of_one_device(name):
    """Taken inside the optimizer: every leaf counts once, padding never."""
    (grads,), _ = table.first_gradient(name, None)
    expected = float(optax.tree.norm(grads))
    norms = [table.first_gradient(name, stage)[1][0] for stage in STAGES]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    for a, b in itertools.combinations(norms, 2):
        assert abs(a - b) <= 1e-6 * a


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_is_the_mean_over_the_batch_and_not_the_sum(stage, devices):
    """loss = mean(w x) over x = 0 .. 15, one step of sgd(1.0): w falls by mean(x) = 7.5."""

    def build(wrap_tx=lambda tx: tx):
        tx = wrap_tx(optax.sgd(1.0))

        def step(s, batch):
            loss, g = jax.value_and_grad(lambda p: jnp.mean(p["w"] * batch["x"]))(s["params"])
            up, o = tx.update(g, s["opt_state"], s["params"])
            return {"params": optax.apply_updates(s["params"], up), "opt_state": o}, loss

        params = {"w": jnp.asarray(0.25)}
        return {"state": {"params": params, "opt_state": tx.init(params)}, "step": step, "tx": tx}

    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    due = contextlib.nullcontext()
    if stage == 1 or (stage > 1 and devices == 1):  # sgd has no state; one device, no partition
        words = "no optimizer state to partition|one device and partitions nothing"
        due = pytest.warns(zero_jax.ZeroWarning, match=words)
    with due:
        opened = closes_over_tx(build, stage, mesh)
    run = train(opened, [{"x": np.arange(16, dtype=np.float32)}])
    assert abs((run.end["w"] - run.start["w"]) - -7.5) <= 1e-6
