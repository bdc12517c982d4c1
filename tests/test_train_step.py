"""Options of the library's step: each changes something that can be measured, and only that."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from step_net import (
    FIRST,
    LAST,
    MIDDLE,
    ROWS,
    RULES,
    SCALARS,
    WHOLE,
    X,
    bytes_of,
    close,
    create,
    gradient,
    loss_fn,
    make,
    moved,
    on_the_wire,
    one_step,
    placed,
    start,
)

import zero_jax
from zero_jax.reporting.hlo import audit


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_cross_no_wire_as_gradients(stage):
    trained = on_the_wire(*MIDDLE, *LAST)
    found = bytes_of(stage, frozen=lambda path: path.startswith("first"))
    assert found["reduce-scatter"] == trained
    assert bytes_of(stage)["reduce-scatter"] == trained + on_the_wire(*FIRST)
    # below stage 3 what does not change is not gathered either; at stage 3 it is read
    again = on_the_wire(*MIDDLE) if stage == 3 else 0
    first = on_the_wire(*FIRST) if stage == 3 else 0
    assert found["all-gather"] == trained + first + again


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("spelling", ["predicate", "tree", "prefix"])
def test_frozen_parameters_keep_their_bits(spelling, stage):
    """Weight decay would move them."""
    frozen = {
        "predicate": lambda path: path.split("/")[0] == "first",
        "tree": jax.tree_util.tree_map_with_path(lambda k, _: k[0].key == "first", create().params),
        "prefix": {"first": True, "middle": False, "last": False},
    }[spelling]
    tx = optax.adamw(1e-2, weight_decay=0.1)
    state, metrics = one_step(stage, tx, frozen=frozen)
    kernel = state.params["first"]["kernel"]
    assert kernel.sharding.is_fully_replicated == (stage < 3)
    before, after = create().params, zero_jax.unshard_train_state(state).params
    for name in ("first", "last"):
        a, b = (np.asarray(t[name]["kernel"]).tobytes() for t in (before, after))
        assert (a == b) == (name == "first"), name
    rest = {k: v for k, v in gradient().items() if k != "first"}
    np.testing.assert_allclose(float(metrics.grad_norm), float(optax.tree.norm(rest)), rtol=1e-6)


def test_gathering_once_or_for_each_layer():
    once = on_the_wire(*FIRST, *MIDDLE, *LAST)
    assert bytes_of(3, regather="keep")["all-gather"] == once
    assert bytes_of(3, regather="layer")["all-gather"] == once + on_the_wire(*MIDDLE)
    assert bytes_of(3)["reduce-scatter"] == once


def test_below_stage_3_gathering_is_the_updates():
    once = on_the_wire(*FIRST, *MIDDLE, *LAST)
    for stage in (1, 2):
        found = bytes_of(stage)
        assert found == {
            "reduce-scatter": once,
            "all-gather": once,
            "all-reduce": WHOLE + SCALARS,
        }


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping(stage):
    expected = float(optax.tree.norm(gradient()))
    state, metrics = one_step(stage, clip_norm=expected / 4)
    np.testing.assert_allclose(float(metrics.grad_norm), expected, rtol=1e-6)  # before clipping
    close(moved(state), jax.tree.map(lambda g: g / 4, gradient()))
    if stage == 3:
        state, _ = one_step(3, clip_norm=2 * expected)
        close(moved(state), gradient())


def test_transforming_gradients():
    """On whole logical trees, before clipping, and the norm is that of the loss's gradients."""
    shapes = []

    def double_the_last(grads):
        shapes.append(jax.tree.map(jnp.shape, grads))
        return grads | {"last": jax.tree.map(lambda g: 2 * g, grads["last"])}

    state, metrics = one_step(3, transform_grads=double_the_last)
    expected = gradient()
    np.testing.assert_allclose(
        float(metrics.grad_norm), float(optax.tree.norm(expected)), rtol=1e-6
    )
    close(moved(state), expected | {"last": jax.tree.map(lambda g: 2 * g, expected["last"])})
    assert shapes[0] == jax.tree.map(jnp.shape, create().params)


def test_conjugate_gradients_of_complex_parameters():
    target = jnp.asarray(np.arange(8) + 1j)

    def loss(params, batch):
        return jnp.mean(jnp.abs(params["w"] - target) ** 2) + 0 * batch["x"].sum()

    tx = zero_jax.partition_optimizer(optax.sgd(0.5, momentum=0.9))
    params = {"w": jnp.zeros(8, jnp.complex64)}
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(state, 2, tx=tx, executor="explicit")
    step = make(loss, tx=tx, transform_grads=lambda g: jax.tree.map(jnp.conj, g))
    state, metrics = step(state, zero_jax.shard_batch({"x": X}, tx))
    # d/dw of mean |w - t|^2 is conj(2 (w - t) / 8) as jax counts; conjugated it points downhill
    np.testing.assert_allclose(np.asarray(state["params"]["w"]), target / 8, rtol=1e-6)
    norm = np.linalg.norm(2 * np.asarray(target) / 8)
    np.testing.assert_allclose(float(metrics.grad_norm), norm, rtol=1e-6)


@pytest.mark.parametrize("donate", [True, False])
def test_donation(donate):
    state = start(2)
    after, _ = make(donate=donate)(state, placed(state))
    jax.block_until_ready(after)
    assert state.opt_state[0].trace["middle"]["dense"]["kernel"].is_deleted() == donate


def test_what_the_loss_returns_beside_is_joined_by_rule():
    """Over 8 devices and two microbatches: 16 rows of one number each."""

    def loss(params, batch):
        x = batch["x"][:, 0]
        aux = {"mean": x.mean(), "sum": x.sum(), "max": x.max(), "min": x.min()}
        aux |= {"positive": (x > 0).sum(), "rows": {"all": jnp.int32(x.size)}}
        return loss_fn(params, batch), aux

    rules = {"sum": "sum", "max": "max", "min": "min", "rows": "sum"}
    state, metrics = one_step(2, loss=loss, has_aux=True, aux=rules, microbatches=2)
    x = X[:, 0]
    expected = {"mean": x.mean(), "sum": x.sum(), "max": x.max(), "min": x.min()}
    for name, value in expected.items():
        np.testing.assert_allclose(float(metrics.aux[name]), value, rtol=1e-5, err_msg=name)
    assert int(metrics.aux["rows"]["all"]) == ROWS
    # one row a microbatch: a count's mean is a fraction, on no device what that device counted
    np.testing.assert_allclose(float(metrics.aux["positive"]), (x > 0).mean(), rtol=1e-6)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(24)(x))
        return nn.Dense(3)(jnp.tanh(x))


class NormedState(TrainState):
    batch_stats: dict
    base: dict


def normed_loss(params, batch, batch_stats, base):
    variables = {"params": params, "batch_stats": batch_stats}
    out, changed = Normed().apply(variables, batch["x"], mutable="batch_stats")
    return jnp.mean((out - base["shift"]) ** 2), {"batch_stats": changed["batch_stats"]}


def normed_state():
    variables = Normed().init(jax.random.key(0), X[:2])
    return NormedState.create(
        apply_fn=None, tx=optax.adam(1e-2), base={"shift": jnp.full(3, 2.0)}, **variables
    )


@pytest.mark.parametrize("statistics", ["global", "local"])
def test_batch_statistics(statistics):
    """ "global" are those of one device that has the whole batch; "local" are means of 8."""
    state = normed_state()
    rules = {"batch_stats": "mean", "base": "read"}
    if statistics == "global":
        loss, aux = normed_loss(state.params, {"x": X}, state.batch_stats, state.base)
        stats = aux["batch_stats"]
    else:
        parts = [
            normed_loss(state.params, {"x": X[i : i + 2]}, state.batch_stats, state.base)
            for i in range(0, ROWS, 2)
        ]
        loss = np.mean([p[0] for p in parts])
        stats = jax.tree.map(lambda *s: np.mean(s, 0), *[p[1]["batch_stats"] for p in parts])
    base = np.asarray(state.base["shift"])
    state = zero_jax.shard_train_state(state, 2, executor="explicit")
    step = make(normed_loss, has_aux=True, collections=rules, statistics=statistics)
    state, metrics = step(state, placed(state))
    np.testing.assert_allclose(float(metrics.loss), float(loss), rtol=1e-5)
    close(state.batch_stats, stats)
    np.testing.assert_array_equal(np.asarray(state.base["shift"]), base)
    assert metrics.aux == {}


def test_after_the_update():
    """The hook sees new parameters, logical shapes, and what it returns is kept."""

    class Averaged(TrainState):
        average: dict

    def follow(state):
        assert state.params["last"]["kernel"].shape == (24, 3)
        average = jax.tree.map(lambda a, p: 0.5 * (a + p), state.average, state.params)
        return state.replace(average=average)

    plain = create()
    state = Averaged.create(apply_fn=None, params=plain.params, tx=plain.tx, average=plain.params)
    state = zero_jax.shard_train_state(state, 3, rules=RULES, executor="explicit")
    state, _ = make(after_update=follow)(state, placed(state))
    close(zero_jax.unshard_train_state(state).average, jax.tree.map(
        lambda p, g: p - g / 2, plain.params, gradient()
    ))  # fmt: skip


class Adapted(nnx.Module):
    """A base that stays as it is, and an adapter that trains."""

    def __init__(self):
        self.layer = nnx.LoRALinear(8, 24, lora_rank=2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_base_of_an_adapter_crosses_no_wire_below_stage_3(stage):
    """It arrives in the compute dtype at every stage, and nothing of it is averaged."""
    seen = []

    def loss(model, batch):
        seen.append(model.layer.kernel[...].dtype)
        return jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2)

    model = Adapted()
    state = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    half = zero_jax.Precision(compute=jnp.bfloat16)
    state = zero_jax.shard_train_state(state, stage, precision=half, executor="explicit")
    batch = zero_jax.shard_batch({"x": np.ones((16, 8), np.float32)}, state)
    compiled = make(loss).lower(state, batch).compile()
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    found = audit(compiled, zero_jax.layout_of(state).mesh).bytes_by_kind
    adapter = (8 * 2 + 2 * 24) * 4  # fp32 gradients
    assert found["all-reduce"] <= 2 * adapter * (stage == 0) * 7 // 8 + SCALARS


def test_reductions_in_fp16_keep_what_the_scale_has_saved():
    """Gradients of 1e-6 are unscaled in fp32: divided in fp16 by 2^26, all would be 0."""
    scale = zero_jax.DynamicScale(initial=2.0**26)
    half = zero_jax.Precision(reduce=jnp.float16, loss_scale=scale)
    state = start(2, precision=half)
    before = jax.tree.leaves(zero_jax.unshard_train_state(state).opt_state)
    state, metrics = make(lambda p, b: loss_fn(p, b) * 1e-6)(state, placed(state))
    after = jax.tree.leaves(zero_jax.unshard_train_state(state).opt_state)
    moments = [np.asarray(a) for a, b in zip(after, before, strict=True) if np.ndim(b)]
    assert int(metrics.fault) == 0
    norm = np.sqrt(sum(float(np.sum(m**2)) for m in moments))
    np.testing.assert_allclose(norm, float(metrics.grad_norm), rtol=1e-2)


def test_a_hook_that_changes_the_optimizer_state():
    def forget(state):
        return state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))

    state = start(1)
    with pytest.raises(ValueError, match="after_update: it changed opt_state"):
        make(after_update=forget)(state, placed(state))


def test_a_state_with_an_update_of_its_own():
    """Its `apply_gradients` is not called, which is said."""

    class Averaged(TrainState):
        def apply_gradients(self, *, grads, **fields):
            return super().apply_gradients(grads=grads, **fields)

    plain = create()
    state = Averaged.create(apply_fn=None, params=plain.params, tx=plain.tx)
    state = zero_jax.shard_train_state(state, 1, rules=RULES, executor="explicit")
    with pytest.warns(zero_jax.ZeroWarning, match="apply_gradients.*after_update"):
        state, _ = make()(state, placed(state))
    make(after_update=lambda state: state)(state, placed(state))
