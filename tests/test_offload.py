"""An update taken apart, the boxes a leaf passes in, and what is refused or said aloud."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws.offload_net import create, data, laid_out, loss
from laws.step_subjects import FAST, mesh_of

import zero_jax
from zero_jax import HostMemory
from zero_jax.offload.boxes import box_of
from zero_jax.offload.dataflow import trace

PARAMS = {"a": jnp.ones((6, 8, 16)), "b": jnp.ones((300, 140)), "c": jnp.ones(5)}


def traced(tx):
    """The graph of an update on flat arguments: gradients, parameters, state; and its arguments."""
    state, tree = jax.tree.flatten(tx.init(PARAMS))
    params, structure = jax.tree.flatten(PARAMS)

    def update(*flat):
        grads, params = structure.unflatten(flat[:3]), structure.unflatten(flat[3:6])
        updates, after = tx.update(grads, tree.unflatten(flat[6:]), params)
        return [*jax.tree.leaves(updates), *jax.tree.leaves(after)]

    grads = [jnp.asarray(np.random.default_rng(0).normal(size=p.shape), p.dtype) for p in params]
    flat = [*grads, *params, *state]
    return trace(update, *flat), flat, update


@pytest.mark.parametrize(
    ("tx", "elementwise"),
    [
        (optax.adamw(1e-3), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), False),
        (optax.MultiSteps(optax.adam(1e-3), 2), True),
        (optax.lamb(1e-3), False),
        (optax.adafactor(1e-3), False),
    ],
)
def test_a_leaf_is_computed_alone(tx, elementwise):
    """Each update from its own leaves and scalars, the same bits; a whole norm is no leaf's own."""
    graph, flat, update = traced(tx)
    expected = jax.jit(update)(*flat)
    values = dict(zip(graph.inputs, flat, strict=True))
    for at, want in enumerate(expected):
        part = graph.part([graph.outputs[at]])
        (found,) = jax.jit(lambda given, part=part: part.run(given))(
            {name: values[name] for name in part.inputs}
        )
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-9)
    part = graph.part([graph.outputs[0]])
    assert part.is_elementwise(PARAMS["a"].shape) == elementwise
    reads_others = graph.inputs[1] in part.inputs
    assert reads_others == ("clip" in str(tx) or not elementwise and _has_norm(tx))


def _has_norm(tx):
    graph, _, _ = traced(tx)
    return graph.inputs[1] in graph.part([graph.outputs[0]]).inputs


def test_a_conditional_is_taken_apart():
    graph, flat, _ = traced(optax.MultiSteps(optax.adam(1e-3), 2))
    part = graph.part([graph.outputs[0]])
    sizes = {graph.shapes[name] for name in part.inputs}
    assert sizes == {(6, 8, 16), ()}
    assert len(part.inputs) < len(flat) / 2


def test_boxes_divide_a_leaf_in_whole_tiles():
    assert box_of((48, 1024, 4096), (False, False, False), 48 * 2**25, 2**24) == (48, 16, 4096)
    assert box_of((7, 20, 30), (False, True, True), 7 * 2400, 2400) == (1, 20, 30)
    assert box_of((21, 300), (False, False), 6300 * 4, 100) is None  # neither dim has whole tiles
    assert box_of((64, 64), (True, True), 2**14, 2**10) is None
    assert box_of((64, 64), (False, False), 2**14, 2**14) is None


def test_an_optimizer_that_needs_all_of_its_state_is_refused_by_name():
    tx = optax.contrib.prodigy()
    state = laid_out(tx, 1, HostMemory())
    step = zero_jax.make_train_step(loss)
    with pytest.raises(ValueError, match="offload: the optimizer needs the state of 5 parameters"):
        step.lower(state, zero_jax.shard_batch(data(0), state))


@pytest.mark.parametrize(
    ("tx", "letter"),
    [
        (
            optax.adafactor(1e-3, 8, clipping_threshold=None, multiply_by_parameter_scale=False),
            r"params/blocks/down is more .*: opt_state/0/v_row/blocks/down has shape \(5, 16\)",
        ),
        (optax.lamb(1e-3), "params/blocks/bias is more .*: its update has .*reduce_sum"),
    ],
)
def test_the_host_refuses_what_is_more_than_elementwise_by_name(tx, letter):
    state = laid_out(tx, 1, HostMemory(update_on="host"))
    with pytest.raises(ValueError, match=letter):
        zero_jax.make_train_step(loss).lower(state, zero_jax.shard_batch(data(0), state))


@pytest.mark.parametrize("update_on", ["device", "host"])
def test_a_state_of_other_shapes_is_refused_by_name(update_on):
    """The moments of a model whose head has fewer columns."""
    state = laid_out(optax.adam(1e-3), 1, HostMemory(update_on=update_on), executor="annotated")
    params = state.params | {"head": state.params["head"][:, :4]}
    moments = state.opt_state[0]._replace(mu=state.opt_state[0].mu | {"head": params["head"]})
    with pytest.raises(ValueError, match=r"opt_state/0/mu/head: has shape .*4\), expected .*5\)"):
        state.tx.update(state.params, (moments, *state.opt_state[1:]), state.params)


def test_a_large_leaf_that_passes_whole_is_named():
    state = laid_out(optax.lamb(1e-3), 1, HostMemory(chunk_bytes=1000))
    step = zero_jax.make_train_step(loss, compiler_options=FAST)
    with pytest.warns(zero_jax.ZeroWarning, match=r"passes through the device whole, .*reduce_sum"):
        step.lower(state, zero_jax.shard_batch(data(0), state))


@pytest.mark.parametrize(
    ("change", "letter"),
    [
        ({"offload": "host"}, "offload='host' is a str; expected a zero_jax.HostMemory"),
        ({"offload": HostMemory(params=True), "executor": "annotated"}, 'pass executor="explicit"'),
    ],
)
def test_bad_policies(change, letter):
    options = {"mesh": mesh_of(data=2), "executor": "explicit"} | change
    with pytest.raises((TypeError, ValueError), match=letter):
        zero_jax.shard_train_state(create(optax.adam(1e-3)), 1, **options)


@pytest.mark.parametrize(
    ("field", "letter"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes=0; expected a number of bytes"),
        ({"params": 1}, "params=1; expected True or False"),
        ({"gradients": "disk"}, "gradients='disk'; expected one of 'auto', 'host', 'device'"),
        ({"update_on": "gpu"}, "update_on='gpu'; expected one of 'device', 'host'"),
    ],
)
def test_bad_fields(field, letter):
    with pytest.raises((TypeError, ValueError), match=letter):
        dataclasses.replace(HostMemory(), **field)


def test_gradients_that_cannot_leave_are_not_silently_kept():
    state = laid_out(optax.adam(1e-3), 2, HostMemory(gradients="host"))
    batch = zero_jax.shard_batch(data(0), state)
    with pytest.raises(ValueError, match="it sums them over microbatches"):
        zero_jax.make_train_step(loss, microbatches=2).lower(state, batch)
    with pytest.raises(ValueError, match="transform_grads wants them on the device"):
        zero_jax.make_train_step(loss, transform_grads=lambda g: g).lower(state, batch)


def test_a_hook_that_reads_parameters_on_the_host_is_refused():
    state = laid_out(optax.adam(1e-3), 2, HostMemory(params=True))
    step = zero_jax.make_train_step(loss, after_update=lambda state: state)
    with pytest.raises(ValueError, match="after_update: .* params/blocks/down and 1 more lie on"):
        step.lower(state, zero_jax.shard_batch(data(0), state))


def test_update_is_measured_and_leaves_every_bit():
    """A device fetches and sends what lies on the host once; the state is as it was."""
    precision = zero_jax.Precision(loss_scale=zero_jax.DynamicScale())
    offload = HostMemory(params=True, chunk_bytes=4000)
    state = laid_out(optax.adamw(1e-2), 2, offload, precision=precision)
    before = [np.asarray(x) for x in jax.tree.leaves(state)]
    away = sum(zero_jax.layout_of(state).host_bytes_per_device.values())
    state, moved = zero_jax.measure_update(state, rounds=1)
    assert moved.from_host_bytes == moved.to_host_bytes == 2 * away
    assert moved.gigabytes_per_second * moved.seconds == pytest.approx(4 * away / 1e9)
    for was, now in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(was, np.asarray(now))


def test_only_a_state_in_host_memory_is_measured():
    with pytest.raises(ValueError, match="offload=None; expected a HostMemory"):
        zero_jax.measure_update(laid_out(optax.adamw(1e-2), 2, None))


def test_parameters_on_the_host_are_read_for_evaluation():
    """`gather_at_use` and `gather_params` fetch them, partitioned or not."""
    for stage in (1, 3):
        state = laid_out(optax.adamw(1e-2), stage, HostMemory(params=True))
        plain = loss(create(optax.adamw(1e-2)).params, data(0))

        where = {x.sharding.memory_kind for x in jax.tree.leaves(state.params["blocks"])}
        assert "pinned_host" in where
        batch = zero_jax.shard_batch(data(0), state)
        value = jax.jit(lambda p, b, tx=state.tx: loss(zero_jax.gather_params(p, tx), b))(
            state.params, batch
        )
        np.testing.assert_allclose(value, plain, rtol=1e-6)
