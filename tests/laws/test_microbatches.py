"""Law: how a batch is cut into microbatches and over devices changes nothing.

The loss of a step is the sum of all totals over the sum of all weights, and its gradient is that
quotient's. A mean of means is not: tokens of sums 2 and 90 with counts 1 and 9 have the mean
92 / 10 = 9.2, and (2 + 10) / 2 = 6.0 as a mean of means.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import step_subjects as subjects
from laws.step_subjects import FAST, mesh_of

import zero_jax
from zero_jax.reporting.hlo import audit

LENGTH = 9  # most tokens that a row has


def create():
    return {"w": jnp.ones(16), "b": jnp.zeros(())}


def tokens(params, batch):
    """Sum of a token's loss over those that count, and their number; w is read by 16 columns."""
    values = batch["x"] * params["w"].mean() + params["b"]
    return jnp.sum(values * batch["mask"]), jnp.sum(batch["mask"])


def rows(counts, totals):
    """One row for each count: so many tokens that share the total, the rest masked and inf-free."""
    mask = (np.arange(LENGTH)[None] < np.array(counts)[:, None]).astype(np.float32)
    x = mask * (np.array(totals) / np.maximum(counts, 1))[:, None]
    return {"x": x.astype(np.float32) + 7 * (1 - mask), "mask": mask}


def run(batch, n, microbatches, stage=2, loss=tokens, precision=None, **options):
    """One step of sgd 1.0 on n devices: metrics and the change of the parameters."""
    tx = zero_jax.partition_optimizer(optax.sgd(1.0, momentum=0.9))
    params = create()
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(
        state, stage, mesh=mesh_of(data=n), executor="explicit", tx=tx, precision=precision
    )
    options = {"microbatches": microbatches, "regather": "keep"} | options
    step = zero_jax.make_train_step(loss, tx=tx, compiler_options=FAST, **options)
    state, metrics = step(state, zero_jax.shard_batch(batch, tx))
    after = zero_jax.unshard_train_state(state, tx=tx)["params"]
    return metrics, jax.tree.map(lambda old, new: np.asarray(old - new), params, after)


def is_token_mean(batch, metrics, gradient):
    """Loss and gradient are those of all tokens, worked out with numpy."""
    count = batch["mask"].sum()
    mean = (batch["x"] * batch["mask"]).sum() / count
    np.testing.assert_allclose(float(metrics.loss), mean, rtol=1e-6)
    np.testing.assert_allclose(float(metrics.weight), count)
    np.testing.assert_allclose(gradient["w"], np.full(16, mean / 16), rtol=1e-6)  # d/dw_i
    np.testing.assert_allclose(gradient["b"], 1.0, rtol=1e-6)  # every token's is 1
    norm = np.sqrt(16 * (mean / 16) ** 2 + 1)
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_token_counts_as_any_other(stage):
    batch = rows([1, 9, 1, 9], [2, 90, 2, 90])  # each of 2 devices has both microbatches
    metrics, gradient = run(batch, 2, 2, stage)
    np.testing.assert_allclose(float(metrics.loss), 9.2, rtol=1e-6)  # not 6.0
    is_token_mean(batch, metrics, gradient)


def test_the_same_counts_over_devices():
    batch = rows([1, 9], [2, 90])
    metrics, gradient = run(batch, 2, 1)
    np.testing.assert_allclose(float(metrics.loss), 9.2, rtol=1e-6)
    is_token_mean(batch, metrics, gradient)


@pytest.mark.parametrize("reduce", ["each", "once"])
@pytest.mark.parametrize(("n", "microbatches"), [(4, 1), (2, 2), (8, 1)])
def test_unequal_counts_over_devices_and_microbatches(n, microbatches, reduce):
    """Counts 1, 9, 0 and 4; over 8 devices four have none at all."""
    counts, totals = [1, 9, 0, 4] + [0] * (n - 4), [2, 90, 0, 10] + [0] * (n - 4)
    batch = rows(counts, totals)
    metrics, gradient = run(batch, n, microbatches, reduce=reduce)
    np.testing.assert_allclose(float(metrics.loss), 102 / 14, rtol=1e-6)
    is_token_mean(batch, metrics, gradient)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_microbatch_without_tokens(stage):
    """On every device the second of three is masked; its own mean would be 0/0."""
    batch = rows([3, 0, 2, 5, 0, 1], [6, 0, 8, 5, 0, 9])
    metrics, gradient = run(batch, 2, 3, stage)
    assert int(metrics.fault) == 0
    is_token_mean(batch, metrics, gradient)


def test_weights_may_cancel_in_a_part():
    """A microbatch may weigh less than nothing; the batch may not."""
    batch = rows([4, 1, 4, 1], [8, 3, 8, 3])
    batch["mask"][1::2] *= -1
    metrics, gradient = run(batch, 2, 2)
    is_token_mean(batch, metrics, gradient)  # weight 2 (4 - 1), total 2 (8 - 3)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("reduce", [jnp.float16, jnp.bfloat16])
def test_sums_are_wider_than_the_wire(stage, reduce):
    """Every part weighs 131072 and has a gradient of 1: their product is no fp16 number.

    In bf16 256 + 1 is 256: of 512 ones the mean would be a half.
    """

    def loss(params, batch):
        return batch["x"][0] * jnp.sum(params["w"]) * 2.0**17, jnp.float32(2.0**17)

    half = zero_jax.Precision(reduce=reduce)
    _, gradient = run({"x": np.ones(1024, np.float32)}, 2, 512, stage, loss, precision=half)
    np.testing.assert_array_equal(gradient["w"], 1.0)


@functools.cache
def trained(stage, microbatches, reduce="each"):
    tx = optax.adamw(1e-2, eps=1e-3)
    options = {"microbatches": microbatches, "reduce": reduce}
    return subjects.train_explicitly("plain", tx, stage, 2, step=options)[:3]


@pytest.mark.parametrize(
    ("stage", "microbatches", "reduce"),
    [
        (0, 6, "each"),
        (1, 6, "each"),
        (2, 6, "each"),
        (2, 6, "once"),
        (3, 2, "once"),
        (3, 3, "each"),
    ],
)
def test_microbatches_train_alike(stage, microbatches, reduce):
    losses, norms, after = trained(stage, microbatches, reduce)
    expected_losses, expected_norms, expected = trained(0, 1)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6)
    np.testing.assert_allclose(norms, expected_norms, rtol=2e-6)
    before = trained_from()
    assert subjects.change(before, after, expected) <= 5e-6


@functools.cache
def trained_from():
    return subjects.leaves(subjects.PROGRAMS["plain"].build(optax.sgd(1.0))[0]["params"])


@functools.cache
def compiled(stage, microbatches, reduce="each", width=4096):
    """A step that is nearly all one matrix of 16 x width: its audit and the matrix's bytes.

    Two rows a device and microbatch, so that activations do not outweigh it.
    """
    params = {"w": jax.ShapeDtypeStruct((16, width), jnp.float32)}
    tx = zero_jax.partition_optimizer(optax.sgd(0.1, momentum=0.9))
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    state = zero_jax.shard_train_state(state, stage, executor="explicit", tx=tx)
    step = zero_jax.make_train_step(
        lambda p, b: jnp.mean((b["x"] @ p["w"]) ** 2),
        tx=tx,
        regather="keep",
        microbatches=microbatches,
        reduce=reduce,
    )
    batch = {"x": jax.ShapeDtypeStruct((16 * microbatches, 16), jnp.float32)}
    lowered = step.lower(state, zero_jax.shard_batch(batch, tx))
    return audit(lowered.compile(), zero_jax.layout_of(tx).mesh), 4 * 16 * width


@pytest.mark.parametrize(
    ("stage", "reduce", "kind", "times"),
    [
        (0, "each", "all-reduce", 1),
        (1, "each", "reduce-scatter", 1),
        (2, "each", "reduce-scatter", 4),
        (3, "each", "reduce-scatter", 4),
        (2, "once", "reduce-scatter", 1),
        (3, "once", "reduce-scatter", 1),
    ],
)
def test_how_often_gradients_cross_the_wire(stage, reduce, kind, times):
    """With four microbatches; one reduction moves 7/8 of the bytes, an all-reduce twice that."""
    found, full = compiled(stage, 4, reduce)
    once = full * 7 // 8 * (2 if kind == "all-reduce" else 1)
    scalars = 100
    moved = found.bytes_by_kind
    assert times * once <= moved[kind] <= times * once + scalars
    reduced = moved.get("all-reduce", 0) + moved.get("reduce-scatter", 0)
    assert reduced <= times * once + scalars  # and nothing is reduced in another way beside


def test_what_the_accumulator_holds():
    """Temporaries: parameter (gathered), a microbatch's gradient, and what is summed up.

    The accumulator is whole where gradients are reduced once, else 1/8: 7/8 of a matrix less. A
    loop's carry may be copied once, and activations are 2 x width, 1/8 of the matrix.
    """
    (each, full), (once, _) = compiled(2, 4, "each"), compiled(2, 4, "once")
    saved = once.memory.temp_bytes - each.memory.temp_bytes
    assert 0.75 * full <= saved <= 2.0 * full
    (stage_1, _) = compiled(1, 4)
    assert stage_1.memory.temp_bytes - each.memory.temp_bytes >= 0.75 * full
