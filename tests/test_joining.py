"""What a step changes of its state beside parameters, and how devices' values of it become one.

Rules are worked out with numpy; letters come before anything is compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from step_net import ROWS, X, create, loss_fn, make, one_step, placed

import zero_jax
from zero_jax.reporting.hlo import audit


class Counting(TrainState):
    seen: Any


def counting(value):
    plain = create()
    return Counting.create(apply_fn=None, params=plain.params, tx=plain.tx, seen=value)


def step_of(change, value, rule, microbatches=2):
    """The field after two steps whose loss does `change` to it."""
    state = zero_jax.shard_train_state(counting(value), 2, executor="explicit")

    def loss(params, batch, seen):
        return loss_fn(params, batch), {"seen": change(seen, batch["x"][:, 0])}

    step = make(loss, has_aux=True, collections={"seen": rule}, microbatches=microbatches)
    for _ in range(2):
        state, metrics = step(state, placed(state))
        jax.block_until_ready(metrics)
    assert state.seen.dtype == value.dtype
    return np.asarray(state.seen)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.bfloat16])
def test_a_sum_is_the_old_value_and_what_was_added(dtype, microbatches):
    """5, and 16 rows in each of two steps; not 8 times 5."""

    def count(seen, x):
        return seen + x.size

    after = step_of(count, jnp.asarray(5, dtype), "sum", microbatches)
    assert float(after) == 5 + 2 * ROWS


@pytest.mark.parametrize("microbatches", [1, 2])
def test_largest_smallest_and_flags(microbatches):
    def largest(seen, x):
        return jnp.maximum(seen, x.max())

    after = step_of(largest, jnp.float32(-9), "max", microbatches)
    np.testing.assert_array_equal(after, X[:, 0].max())
    after = step_of(lambda seen, x: -largest(-seen, -x), jnp.float32(9), "min", microbatches)
    np.testing.assert_array_equal(after, X[:, 0].min())
    top = X[:, 0].max()  # one row of one device has it
    for rule, expected in (("max", True), ("min", False)):
        after = step_of(lambda _, x: (x == top).any(), jnp.asarray(False), rule, microbatches)
        assert bool(after) == expected


def test_a_mean_leaves_a_count_of_steps_alone():
    after = step_of(lambda seen, x: seen + 1, jnp.int32(5), "mean", 1)
    assert int(after) == 7


def test_small_integers_do_not_wrap():
    """Over 8 devices and two microbatches: 16 x 100 is no uint8, and True + True is 2."""

    def loss(params, batch):
        hundred = jnp.uint8(100)
        flags = {"yes": jnp.asarray(True), "any": batch["x"][0, 0] > 0}
        return loss_fn(params, batch), {"hundred": hundred, "mean": hundred} | flags

    rules = {"hundred": "sum", "yes": "sum", "any": "max"}
    _, metrics = one_step(1, loss=loss, has_aux=True, aux=rules, microbatches=2)
    assert int(metrics.aux["hundred"]) == 100 * ROWS
    assert int(metrics.aux["yes"]) == ROWS
    assert float(metrics.aux["mean"]) == 100.0
    assert metrics.aux["any"].dtype == jnp.bool_ and bool(metrics.aux["any"])


def refuses(words, change, value, rule):
    with pytest.raises(ValueError, match=words):
        step_of(change, value, rule)


def test_integers_that_devices_would_differ_in():
    """They depend on the batch, or on a number that did in the microbatch before, or on where."""
    words = "seen is int32 and depends on the batch or the key, so that devices differ in it"

    def positive(seen, x):
        return seen + (x > 0).sum()

    def where(seen, x):
        return seen + jax.lax.axis_index("data")

    refuses(words, positive, jnp.int32(0), "mean")
    refuses(words, where, jnp.int32(0), "mean")

    def high(seen, x):
        return {"peak": x.max(), "high": (seen["peak"] > 0).astype(jnp.int32)}

    seen = {"peak": jnp.float32(0), "high": jnp.int32(0)}
    refuses(words.replace("seen", "seen/high"), high, seen, "mean")
    assert int(step_of(positive, jnp.int32(0), "sum")) == 2 * (X[:, 0] > 0).sum()


def test_a_loss_that_prints_its_rows_is_not_checked():
    """Or everything would seem to depend on them."""
    printed = []

    def count(seen, x):
        jax.debug.callback(printed.append, x)
        return seen + 1

    assert int(step_of(count, jnp.int32(0), "mean")) == 4
    jax.effects_barrier()
    assert len(printed) == 2 * ROWS


def test_rules_that_values_have_not():
    refuses('seen is bool, which has no sum; "max" is', lambda s, x: s, jnp.asarray(True), "sum")
    refuses("seen holds keys, which have no max", lambda s, x: s, jax.random.key(0), "max")


class Count(nnx.Variable):
    pass


class RowCount(Count):
    pass


class Peak(nnx.Variable):
    pass


class Watching(nnx.Module):
    """Counts its calls and rows, and keeps what it saw of them."""

    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(5, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.calls, self.rows = Count(jnp.int32(3)), RowCount(jnp.int32(4))
        self.peak, self.positive = Peak(jnp.float32(-9)), Count(jnp.int32(0))
        self.counts_positive = False

    def __call__(self, x):
        self.calls[...] += 1
        self.rows[...] += x.shape[0]
        self.peak[...] = jnp.maximum(self.peak[...], x[:, 0].max())
        if self.counts_positive:
            self.positive[...] += (x[:, 0] > 0).sum()
        return self.norm(self.dropout(self.linear(x)))


def watching(collections, stage=2, counts_positive=False, microbatches=2):
    """The model after a step."""
    model = Watching(nnx.Rngs(0))
    model.counts_positive = counts_positive
    state = model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    state = zero_jax.shard_train_state(state, stage, executor="explicit")
    step = make(
        lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        collections=collections,
        microbatches=microbatches,
    )
    state, metrics = step(state, placed(state))
    jax.block_until_ready(metrics)
    return state[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_nnx_variables_by_type_and_by_name(stage):
    """The nearest class counts; what is not named has the mean, or is alike anyway."""
    rules = {Count: "mean", "RowCount": "sum", Peak: "max", nnx.BatchStat: "read"}
    model = watching(rules, stage)
    assert int(model.calls[...]) == 3 + 2  # in each microbatch
    assert int(model.rows[...]) == 4 + ROWS
    np.testing.assert_array_equal(model.peak[...], X[:, 0].max())
    np.testing.assert_array_equal(model.norm.mean[...], 0)  # as it was
    plain = watching({})
    assert int(plain.rows[...]) == 4 + ROWS // 8  # as on every device
    peaks = X[:, 0].reshape(8, 2).max(1)
    np.testing.assert_allclose(plain.peak[...], peaks.mean(), rtol=1e-6)
    assert np.abs(np.asarray(plain.norm.mean[...])).max() > 0
    assert int(plain.dropout.rngs.count[...]) == 2


def test_nnx_integers_that_devices_would_differ_in():
    words = r"positive \(a Count\) is int32 and depends on the batch or the key"
    with pytest.raises(ValueError, match=words):
        watching({}, counts_positive=True)
    model = watching({"Count": "sum"}, counts_positive=True)
    assert int(model.positive[...]) == (X[:, 0] > 0).sum()


@pytest.mark.parametrize(
    ("collections", "error", "words"),
    [
        ({"Counts": "sum"}, ValueError, "the model has no Counts beside .* BatchStat, Count, Peak"),
        ({nnx.Param: "sum"}, ValueError, "the model has no Param beside what the optimizer trains"),
        ({int: "sum"}, TypeError, "<class 'int'> is no type of nnx.Variable, nor the name of one"),
        ({nnx.RngState: "sum"}, ValueError, r"dropout/rngs/key \(a RngKey\) holds keys, which"),
    ],
)
def test_nnx_collections_that_are_not_there(collections, error, words):
    with pytest.raises(error, match=words):
        watching(collections)


def test_a_type_for_a_state_that_has_fields():
    state = zero_jax.shard_train_state(counting(jnp.int32(0)), 1, executor="explicit")
    with pytest.raises(TypeError, match="collections: .*Count.* is a .*; expected the name of a"):
        make(collections={Count: "sum"})(state, placed(state))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_the_loss_does_not_change_crosses_no_wire(microbatches):
    """A table of 1000 floats that is read only; averaged, it would be 7000 bytes."""
    model = nnx.Linear(5, 8, rngs=nnx.Rngs(0))
    model.table = nnx.Variable(jnp.ones(1000))
    state = model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    state = zero_jax.shard_train_state(state, 2, executor="explicit")
    step = make(
        lambda model, batch: jnp.mean((model(batch["x"]) - model.table[...].mean()) ** 2),
        microbatches=microbatches,
    )
    found = audit(step.lower(state, placed(state)).compile(), zero_jax.layout_of(state).mesh)
    assert found.bytes_by_kind["all-reduce"] < 200
