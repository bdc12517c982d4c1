"""The library's step as it is run: keys, shapes in place of arrays, one compile, a user's jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from laws.step_subjects import mesh_of
from step_net import COMPILED, RULES, N, X, create, loss_fn, make, one_step, placed, start

import zero_jax


def drawn(params, batch, rng):
    number = jax.random.uniform(rng)
    return loss_fn(params, batch), {"low": number, "high": number}


@pytest.mark.parametrize(("n", "microbatches"), [(8, 1), (2, 1), (1, 2)])
@pytest.mark.filterwarnings("ignore:stage .. the axis 'data' has one device")
def test_keys_differ_on_devices_and_in_microbatches(n, microbatches):
    state = start(1, mesh=mesh_of(data=n))
    step = make(
        drawn,
        has_aux=True,
        aux={"low": "min", "high": "max"},
        microbatches=microbatches,
        donate=False,
    )
    first = step(state, placed(state), jax.random.key(1))[1].aux
    again = step(state, placed(state), jax.random.key(1))[1].aux
    other = step(state, placed(state), jax.random.key(2))[1].aux
    assert float(first["low"]) < float(first["high"])
    assert float(first["low"]) == float(again["low"]) != float(other["low"])


class Dropped(nnx.Module):
    """Three layers in a stack, with dropout that has a stream of its own in each."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return nnx.Sequential(nnx.Linear(5, 5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

        self.layers, self.first = layers(rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(lambda layer, x: layer(x))(self.layers, self.first(x))


def test_dropout_of_a_stack_of_nnx_layers():
    """Every device and step draws its own masks; counters go on as on one device."""
    model = Dropped(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.0, momentum=0.9), wrt=nnx.Param)
    state = zero_jax.shard_train_state(state, 3, executor="explicit", rules={"layers/*": "stacked"})

    def loss(model, batch):
        kept = (model.first(jnp.ones((64,))) > 0).mean()
        return jnp.mean((model(batch["x"]) - 1) ** 2), {"low": kept, "high": kept}

    step = make(loss, has_aux=True, aux={"low": "min", "high": "max"})
    seen = []
    for _ in range(2):
        state, metrics = step(state, placed(state))
        assert float(metrics.aux["low"]) < float(metrics.aux["high"])
        seen.append(float(metrics.loss))
    assert seen[0] != seen[1]
    counts = [np.asarray(c) for c in jax.tree.leaves(nnx.state(state[0], nnx.RngCount))]
    plain = Dropped(nnx.Rngs(0))
    for _ in range(2):
        plain.first(jnp.ones((64,)))
        plain(X)
    expected = [np.asarray(c) for c in jax.tree.leaves(nnx.state(plain, nnx.RngCount))]
    jax.tree.map(np.testing.assert_array_equal, counts, expected)


def create_nnx(key):
    model = nnx.Sequential(nnx.Linear(5, 24, rngs=nnx.Rngs(key)), jnp.tanh)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_abstract_states_lower_to_the_same_step():
    """For NNX and linen: the step that runs, from shapes alone."""
    key = jax.random.key(0)
    for made, loss, rules in (
        (create, loss_fn, RULES),
        (create_nnx, lambda model, batch: jnp.mean(model(batch["x"]) ** 2), {}),
    ):
        texts = []
        for given in (key, jax.ShapeDtypeStruct((), key.dtype)):
            state = zero_jax.init_train_state(
                made, given, stage=3, rules=rules, executor="explicit"
            )
            batch = {"x": X if given is key else jax.ShapeDtypeStruct(X.shape, X.dtype)}
            lowered = make(loss).lower(state, zero_jax.shard_batch(batch, state))
            texts.append(lowered.as_text())
        assert texts[0] == texts[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_twenty_steps_one_compile_and_no_array_left_behind(stage):
    policy = zero_jax.DynamicScale(growth_interval=4)
    state = start(
        stage,
        optax.adamw(optax.linear_schedule(1e-3, 0.0, 20)),
        precision=zero_jax.Precision(compute=jnp.float16, loss_scale=policy),
    )
    step, batch, compiled = make(microbatches=2), placed(state), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if name == COMPILED else None
    )
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    assert len(compiled) == 1
    alive = []
    for _ in range(19):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        alive.append(len(jax.live_arrays()))
    assert len(compiled) == 1
    assert len(set(alive[1:])) == 1
    for leaf in jax.tree.leaves(metrics):
        assert leaf.sharding.is_fully_replicated


def test_inside_a_jit_of_the_user():
    state = start(2)
    step = make(donate=False)
    expected, metrics = step(state, placed(state))

    @jax.jit
    def twice(state, batch):
        state, first = step(state, batch)
        return *step(state, batch), first

    _, second, first = twice(state, placed(state))
    assert float(first.loss) == pytest.approx(float(metrics.loss), rel=1e-6)
    _, expected_second = step(expected, placed(state))
    assert float(second.loss) == pytest.approx(float(expected_second.loss), rel=1e-5)


def test_a_step_of_mean_loss_counts_its_parts():
    _, metrics = one_step(0, microbatches=2)
    assert float(metrics.weight) == N * 2
    assert float(metrics.loss_scale) == 1 and metrics.aux == {}


class Scaled(TrainState):
    """As Flax's own examples have it for fp16."""

    dynamic_scale: DynamicScale | None


def test_the_loss_scale_of_flax_is_not_used():
    """Which is said, with what to do; not of a state that has done so, nor of an empty field."""

    def lower(scale, precision=None):
        plain = create()
        state = Scaled.create(apply_fn=None, params=plain.params, tx=plain.tx, dynamic_scale=scale)
        state = zero_jax.shard_train_state(
            state, 2, executor="explicit", rules=RULES, precision=precision
        )
        make().lower(state, placed(state))

    words = r"dynamic_scale is a flax DynamicScale, which .* loss_scale=zero_jax.DynamicScale\(\)"
    with pytest.warns(zero_jax.ZeroWarning, match=words):
        lower(DynamicScale())
    lower(None)
    lower(DynamicScale(), zero_jax.Precision(loss_scale=zero_jax.DynamicScale()))


def test_calling_a_step_looks_at_one_leaf():
    """Whether it is traced; a state may have thousands, of which each call would take time."""

    class Tail:
        pass

    def refuse(_):
        raise AssertionError("looked at")

    jax.tree_util.register_pytree_node(Tail, refuse, lambda _, children: Tail())
    first_leaf = zero_jax.train_step._first_leaf
    assert first_leaf({"a": {}, "b": (None, [3, Tail()]), "c": Tail()}) == 3
    assert first_leaf({"a": None}) is None
