"""Law: narrow parameters are their master copies, rounded, after every step.

ZeRO (arXiv 1910.02054, section 3.1): 2 bytes a parameter at rest, 12 in the optimizer state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import subject

import zero_jax
from zero_jax import Precision
from zero_jax.precision import round_to

BF16 = Precision.bf16()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_their_masters_rounded(stage):
    plain = subject.create(optax.adamw(3e-2))
    state = zero_jax.shard_train_state(plain, stage, precision=BF16)
    first = zero_jax.unshard_train_state(state)
    jax.tree.map(np.testing.assert_array_equal, first.opt_state.master, plain.params)
    jitted = subject.jit_step()
    moved = 0
    for i in range(20):
        state, loss = jitted(state, zero_jax.shard_batch(subject.batch(i), state))
        float(loss)
        whole = zero_jax.unshard_train_state(state)
        rounded = jax.tree.map(lambda m: m.astype(jnp.bfloat16), whole.opt_state.master)
        jax.tree.map(np.testing.assert_array_equal, whole.params, rounded)
        moved += sum(
            int((m.astype(jnp.bfloat16).astype(jnp.float32) != m).sum())
            for m in jax.tree.leaves(whole.opt_state.master)
        )
    assert moved > 0  # the masters hold what bf16 cannot
    assert jitted._cache_size() == 1


def test_parameters_that_cancel():
    """p + (n - p) in fp32 is not always n; the master follows what was reached.

    A master just under 1 rests as p = 1. Moved to n = -2^-24, the update n - p = -(1 + 2^-24) has
    one bit too many for fp32, so p arrives at 0. Only then does the master move, by that bit.
    """
    master = np.full(16, 1 - 2.0**-10, np.float32)
    target = np.full(16, -(2.0**-24), np.float32)
    target[1:4] = [0.5, -3.0, 2.0**-13]  # ordinary moves arrive
    delta = jnp.asarray(target - master)
    tx = optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda g, s, params=None: ({"p": delta}, s)
    )
    params = {"p": jnp.asarray(master)}
    wrapped = zero_jax.partition_optimizer(tx)
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(state, 3, tx=wrapped, precision=BF16)

    @jax.jit
    def step(state, grads):
        updates, opt_state = wrapped.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    state = step(state, {"p": jnp.zeros(16, jnp.bfloat16)})
    params, moved = np.asarray(state["params"]["p"]), np.asarray(state["opt_state"].master["p"])
    np.testing.assert_array_equal(params, moved.astype(params.dtype))
    np.testing.assert_array_equal(moved[1:4], target[1:4])
    assert moved[0] == params[0] == 0


def test_training_with_masters_follows_fp32():
    """The masters, not the bf16 parameters, carry the training: steps below bf16's grain add up."""
    plain = subject.create(optax.sgd(1e-4, momentum=0.9))
    end, _ = subject.train(plain, 30)
    state = zero_jax.shard_train_state(plain, 2, precision=BF16)
    state, _ = subject.train_sharded(state, 30)
    master = zero_jax.unshard_train_state(state).opt_state.master
    assert subject.change(plain.params, master, end.params) < 0.05
    lost = jax.tree.map(lambda p: p.astype(jnp.bfloat16), plain.params)
    lost, _ = subject.train(plain.replace(params=lost, opt_state=plain.tx.init(lost)), 30)
    rounded = jax.tree.map(lambda p: p.astype(jnp.float32), lost.params)
    assert subject.change(plain.params, rounded, end.params) > 0.5


def test_bytes_and_dtypes():
    state = zero_jax.shard_train_state(subject.create(optax.adam(1e-3)), 0, precision=BF16)
    layout = zero_jax.layout_of(state)
    psi = sum(x.size for x in jax.tree.leaves(state.params))
    assert layout.bytes_per_device["params"] == 2 * psi
    assert layout.bytes_per_device["grads"] == 2 * psi
    assert layout.bytes_per_device["opt_state"] == (4 + 4 + 4) * psi + 4
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}


def test_fp32_parameters_get_no_second_master():
    plain = subject.create(optax.adam(1e-3))
    state = zero_jax.shard_train_state(plain, 1, precision=Precision(master="float32"))
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(plain.opt_state)
    assert zero_jax.layout_of(state).total_bytes["opt_state"] == sum(
        x.nbytes for x in jax.tree.leaves(plain.opt_state)
    )


def test_mixed_dtypes_keep_masters_where_they_are_needed():
    plain = subject.create(optax.adam(1e-3))
    params = plain.params
    params["Dense_0"] = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params["Dense_0"])
    plain = plain.replace(params=params, opt_state=plain.tx.init(params))
    state = zero_jax.shard_train_state(plain, 1, precision=Precision(master=jnp.float32))
    master = state.opt_state.master
    assert master["Dense_0"]["kernel"].dtype == jnp.float32
    assert isinstance(master["Dense_1"]["kernel"], optax.MaskedNode)


def test_what_the_step_does_not_do_is_said():
    plain = subject.create(optax.adam(1e-3))
    promised = Precision(params="bfloat16", master="float32", reduce="float32")
    state = zero_jax.shard_train_state(plain, 1, precision=promised)
    with pytest.warns(zero_jax.ZeroWarning, match=r"reduce=float32.*12 gradients.*bfloat16"):
        jax.jit(subject.step).lower(state, zero_jax.shard_batch(subject.batch(0), state))
    state = zero_jax.shard_train_state(plain, 1, precision=Precision(compute="bfloat16"))
    with pytest.warns(zero_jax.ZeroWarning, match=r"compute=bfloat16.*gathered in it"):
        jax.jit(subject.step).lower(state, zero_jax.shard_batch(subject.batch(0), state))


def test_our_own_arithmetic_promotes_nothing():
    """Under strict promotion the update of a strict transformation traces at every stage."""
    with jax.numpy_dtype_promotion("strict"):
        for stage in range(4):
            state = zero_jax.shard_train_state(subject.create(optax.lion(1e-3)), stage)
            jax.jit(subject.step).lower(state, zero_jax.shard_batch(subject.batch(0), state))


def test_round_to_is_a_cast_and_back():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000) ** 9, jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        inside = jnp.abs(x) < 1e4  # a cast to float16 overflows to inf in the same way
        expected = x.astype(dtype).astype(jnp.float32)
        normal = inside & (jnp.abs(x) > 1e-3)  # reduce_precision flushes subnormals
        np.testing.assert_array_equal(round_to(x, dtype)[normal], expected[normal])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"params": "int32"}, "params=int32"),
        ({"params": "complex64"}, "params=complex64"),
        ({"params": "float32", "master": "float32"}, "not wider"),
        ({"params": "bfloat16", "master": "bfloat16"}, "not wider"),
    ],
)
def test_bad_precision(fields, words):
    with pytest.raises(ValueError, match=words):
        Precision(**fields)


def test_masters_go_to_another_stage():
    """Unsharded and laid out again, a state with master weights trains on."""
    state = zero_jax.shard_train_state(subject.create(optax.adamw(1e-2)), 2, precision=BF16)
    state, _ = subject.train_sharded(state, 2)
    moved = zero_jax.shard_train_state(zero_jax.unshard_train_state(state), 3, precision=BF16)
    np.testing.assert_allclose(
        subject.train_sharded(moved, 2)[1], subject.train_sharded(state, 2)[1], rtol=1e-6
    )
