"""Law: a step that went wrong leaves the state as it was, bit for bit, on every device alike.

Gradients that are not finite on one device of eight are so in the sum, and every device skips. The
loss scale follows DeepSpeed's table (dynamic, hysteresis 2) through the whole step.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from laws.step_subjects import FAST

import zero_jax

ROWS = 16


class State(TrainState):
    """With running statistics and an average of the parameters."""

    batch_stats: dict
    average: dict


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(24)(x))
        return nn.Dense(3)(jnp.tanh(x))


def create(tx):
    variables = Net().init(jax.random.key(0), jnp.ones((2, 5)))
    return State.create(
        apply_fn=None,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        average=variables["params"],
    )


def loss_fn(params, batch, batch_stats):
    variables = {"params": params, "batch_stats": batch_stats}
    out, changed = Net().apply(variables, batch["x"], mutable="batch_stats")
    # the statistics do not see `hot`, so that they alone would not stop a step
    loss = jnp.mean((out.astype(jnp.float32) - 1) ** 2 * batch["hot"][:, None])
    return loss, {"batch_stats": changed["batch_stats"]}


def follow(state):
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, state.params)
    return state.replace(average=average)


def batch(state, hot=1.0):
    """Row 5, which is on device 2, weighs `hot`."""
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
    weights = np.ones(ROWS, np.float32)
    weights[5] = hot
    return zero_jax.shard_batch({"x": x, "hot": weights}, state)


def make(nonfinite="skip", **options):
    return zero_jax.make_train_step(
        loss_fn,
        has_aux=True,
        collections={"batch_stats": "mean"},
        after_update=follow,
        nonfinite=nonfinite,
        compiler_options=FAST,
        **options,
    )


def bits(state):
    """Every leaf's bytes."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("hot", [np.inf, np.nan])
@pytest.mark.parametrize(
    ("stage", "microbatches", "precision"),
    [(1, 1, None), (2, 2, zero_jax.Precision.bf16()), (3, 1, None)],
)
def test_one_device_of_eight_and_all_skip(stage, microbatches, precision, hot):
    state = zero_jax.shard_train_state(
        create(optax.adamw(1e-2)), stage, executor="explicit", precision=precision
    )
    step = make(microbatches=microbatches)
    state, metrics = step(state, batch(state))
    assert (int(metrics.skipped), int(metrics.fault)) == (0, 0)
    before = bits(state)
    state, metrics = step(state, batch(state, hot))
    assert (int(metrics.skipped), int(metrics.fault)) == (1, 1)
    assert bits(state) == before and int(state.step) == 1
    for leaf in jax.tree.leaves(state):  # copies on different devices are alike, too
        shards = {}
        for shard in leaf.addressable_shards:
            same = shards.setdefault(str(shard.index), np.asarray(shard.data).tobytes())
            assert same == np.asarray(shard.data).tobytes()
    state, metrics = step(state, batch(state))
    assert int(metrics.skipped) == 0 and int(state.step) == 2
    assert bits(state) != before and np.isfinite(float(metrics.grad_norm))


def test_the_same_for_nnx():
    model = nnx.Sequential(
        nnx.Linear(5, 24, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(24, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
        nnx.Linear(24, 3, rngs=nnx.Rngs(0)),
    )
    state = model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    state = zero_jax.shard_train_state(state, 2, executor="explicit")

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - 1) ** 2 * batch["hot"][:, None])

    step = zero_jax.make_train_step(loss, nonfinite="skip", compiler_options=FAST)
    state, _ = step(state, batch(state))
    before = _variables(state)
    state, metrics = step(state, batch(state, np.inf))
    assert int(metrics.skipped) == 1
    assert _variables(state) == before
    state, metrics = step(state, batch(state))
    assert int(metrics.skipped) == 0 and _variables(state) != before


def _variables(state):
    def to_bytes(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [to_bytes(x) for x in jax.tree.leaves(nnx.as_pure(nnx.split(state)[1]))]


def test_raise_comes_before_the_next_step_and_loses_nothing():
    state = zero_jax.shard_train_state(create(optax.adamw(1e-2)), 3, executor="explicit")
    step = make("raise")
    state, _ = step(state, batch(state))
    before = bits(state)
    state, metrics = step(state, batch(state, np.inf))
    jax.block_until_ready(metrics)
    assert bits(state) == before
    words = "gradients of step 2 are not finite .global norm (inf|nan).; the state was left as it"
    with pytest.raises(FloatingPointError, match=words):
        step(state, batch(state))
    assert bits(state) == before  # it was not donated: training can go on
    state, metrics = step(state, batch(state))
    assert int(metrics.skipped) == 0 and int(state.step) == 2


def test_pass_hands_them_to_the_optimizer():
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    state = zero_jax.shard_train_state(create(tx), 2, executor="explicit", min_size=0)
    step = make("pass")
    before = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    state, metrics = step(state, batch(state, np.nan))
    assert (int(metrics.skipped), int(metrics.fault)) == (0, 1)
    assert int(state.opt_state.notfinite_count) == 1  # the transformation saw them
    for old, new in zip(before, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(state.step) == 1  # a step was taken, as optax means it


def test_pass_without_protection_ruins_the_parameters():
    state = zero_jax.shard_train_state(create(optax.adam(1e-2)), 2, executor="explicit")
    step = make("pass")
    state, _ = step(state, batch(state, np.nan))
    assert np.isnan(np.asarray(state.params["Dense_0"]["kernel"])).any()


def weighted(w, count):
    """A loss whose gradient is 1 and whose weight the batch says."""
    return w["w"].sum() * jnp.sum(count["weight"]), jnp.sum(count["weight"])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0.0] * 4, "weights of the batch of step 1 sum to 0, so its mean loss is not defined"),
        ([1.0, np.nan, 1.0, 1.0], "sum to nan; expected a positive number"),
        ([1.0, np.inf, 1.0, 1.0], "sum to inf; expected a positive number"),
        ([1.0, -3.0, 1.0, 0.0], "sum to -1.0; expected a positive number"),
    ],
)
def test_weights_that_are_none(weights, words, microbatches):
    tx = zero_jax.partition_optimizer(optax.sgd(0.1, momentum=0.9))
    params = {"w": jnp.ones(16)}
    state = {"params": params, "opt_state": tx.init(params)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    state = zero_jax.shard_train_state(state, 2, mesh=mesh, tx=tx, executor="explicit")
    step = zero_jax.make_train_step(
        weighted, tx=tx, nonfinite="skip", microbatches=microbatches, compiler_options=FAST
    )
    given = zero_jax.shard_batch({"weight": np.array(weights, np.float32)}, tx)
    before = bits(state)
    state, metrics = step(state, given)
    jax.block_until_ready(metrics)
    assert int(metrics.skipped) == 1 and bits(state) == before
    with pytest.raises(ValueError, match=words):
        step(state, given)


POLICY = zero_jax.DynamicScale(initial=2.0**8, growth_interval=3, patience=2)
FP16 = zero_jax.Precision(compute=jnp.float16, loss_scale=POLICY)
TABLE = [
    # hot                scale in the step, skipped | state after: scale, hysteresis left, clean
    (1.0, 2**8, 0, 2**8, 2, 1),
    (1.0, 2**8, 0, 2**8, 2, 2),
    (1.0, 2**8, 0, 2**9, 2, 0),  # the third clean step in a row
    (np.inf, 2**9, 1, 2**9, 1, 0),  # the first overflow is forgiven
    (np.inf, 2**9, 1, 2**8, 1, 0),  # the second is not
    (np.nan, 2**8, 1, 2**7, 1, 0),
    (1.0, 2**7, 0, 2**7, 1, 1),  # one clean step does not fill the hysteresis
    (np.inf, 2**7, 1, 2**6, 1, 0),
    (1.0, 2**6, 0, 2**6, 1, 1),
    (1.0, 2**6, 0, 2**6, 1, 2),
    (1.0, 2**6, 0, 2**7, 2, 0),  # an interval of clean ones does
    (np.inf, 2**7, 1, 2**7, 1, 0),
]


def test_the_loss_scale_step_by_step():
    state = zero_jax.shard_train_state(
        create(optax.adamw(1e-2)), 2, executor="explicit", precision=FP16
    )
    step, taken, skipped = make("raise"), 0, 0
    for hot, scale, skips, after, hysteresis, clean in TABLE:
        before = bits((state.params, state.opt_state.inner, state.batch_stats, state.average))
        state, metrics = step(state, batch(state, hot))
        taken, skipped = taken + 1 - skips, skipped + skips
        assert (float(metrics.loss_scale), int(metrics.skipped)) == (scale, skips)
        assert int(metrics.fault) == (5 if skips else 0)  # no error, though the step may "raise"
        now = state.opt_state.scale
        assert float(now.scale) == after
        assert (int(now.hysteresis_left), int(now.clean_steps)) == (hysteresis, clean)
        assert int(now.skipped) == skipped and int(state.step) == taken
        assert int(state.opt_state.inner[0].count) == taken  # and so the schedule
        same = before == bits(
            (state.params, state.opt_state.inner, state.batch_stats, state.average)
        )
        assert same == bool(skips)


def test_scaling_changes_exponents_only():
    """Powers of two: fp16 gradients that neither overflow nor underflow come back bit for bit."""
    seen = []
    for scale in (2.0**4, 2.0**8):
        precision = zero_jax.Precision(compute=jnp.float16, loss_scale=zero_jax.StaticScale(scale))
        state = zero_jax.shard_train_state(
            create(optax.sgd(0.1, momentum=0.9)), 2, executor="explicit", precision=precision
        )
        state, metrics = make()(state, batch(state))
        assert float(metrics.loss_scale) == scale
        seen.append((float(metrics.loss), float(metrics.grad_norm), bits(state.params)))
    np.testing.assert_allclose(seen[0][1], seen[1][1], rtol=1e-3)  # fp16's subnormals round
    assert seen[0][0] == seen[1][0]


def test_a_loss_of_16_bits_overflows_and_is_scaled_down():
    """No inf in the data: 2^20 times the loss leaves fp16, and the scale finds its way down."""
    policy = zero_jax.DynamicScale(initial=2.0**24, hysteresis=1, growth_interval=1000)
    precision = zero_jax.Precision(compute=jnp.float16, loss_scale=policy)
    state = zero_jax.shard_train_state(
        create(optax.adamw(1e-2)), 3, executor="explicit", precision=precision
    )
    step, skipped = make(), []
    for _ in range(16):
        state, metrics = step(state, batch(state))
        skipped.append(int(metrics.skipped))
    assert skipped[0] == 1 and skipped[-1] == 0
    assert skipped == sorted(skipped, reverse=True)  # first down, then clean steps
    assert float(metrics.loss_scale) == 2.0 ** (24 - sum(skipped))


def test_hopeless():
    policy = zero_jax.DynamicScale(initial=2.0, floor=1.0, hysteresis=1, patience=2)
    precision = zero_jax.Precision(compute=jnp.float16, loss_scale=policy)
    state = zero_jax.shard_train_state(
        create(optax.adamw(1e-2)), 2, executor="explicit", precision=precision
    )
    step = make("skip")
    for _ in range(3):  # 2 -> 1, then two at the floor
        state, metrics = step(state, batch(state, np.inf))
        jax.block_until_ready(metrics)
    assert int(metrics.fault) == 4
    before = bits(state)
    words = "the loss scale 1.0 is at its floor and the gradients of step 3 still overflow"
    with pytest.raises(FloatingPointError, match=words):
        step(state, batch(state))
    assert bits(state) == before
