"""The loss scale, step by step: tables of what a step was and what it leaves behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.loss_scale import (
    CEILING,
    DynamicScale,
    StaticScale,
    hopeless,
    hopeless_letter,
    init_scale,
    next_scale,
)

OK, INF = True, False
DTYPES = ("float32", "int32", "int32", "int32", "int32")


def walk(policy, flags, state=None):
    """The states after each of `flags`, as rows of numbers."""

    def step(state, finite):
        state = next_scale(policy, state, finite)
        return state, state

    flags = jnp.asarray(flags)
    last, rows = jax.jit(lambda s: jax.lax.scan(step, s, flags))(state or init_scale(policy))
    return last, np.stack(rows, axis=1)


def follows(policy, table, state=None):
    """Assert the rows (finite?, scale, hysteresis left, clean steps, skipped, at the floor)."""
    last, rows = walk(policy, [row[0] for row in table], state)
    for i, (row, (_, scale, left, clean, skipped, floor)) in enumerate(
        zip(rows, table, strict=True)
    ):
        assert tuple(row) == (scale, clean, left, skipped, floor), f"step {i}"
    return last


def test_the_table():
    start = tuple(float(x) for x in init_scale(DynamicScale()))
    assert start == (65536, 0, 2, 0, 0)
    table = [
        (OK, 65536, 2, 1, 0, 0),
        (OK, 65536, 2, 2, 0, 0),
        (OK, 131072, 2, 0, 0, 0),  # three clean steps in a row: doubled
        (OK, 131072, 2, 1, 0, 0),
        (INF, 131072, 1, 0, 1, 0),  # the first overflow only uses the hysteresis up
        (OK, 131072, 1, 1, 1, 0),  # clean steps, but not three: it stays used up
        (OK, 131072, 1, 2, 1, 0),
        (INF, 65536, 1, 0, 2, 0),  # so this one halves
        (INF, 32768, 1, 0, 3, 0),  # and each further one
        (INF, 16384, 1, 0, 4, 0),
        (OK, 16384, 1, 1, 4, 0),
        (OK, 16384, 1, 2, 4, 0),
        (OK, 32768, 2, 0, 4, 0),  # a clean interval: doubled, and the hysteresis is back
        (INF, 32768, 1, 0, 5, 0),
        (INF, 16384, 1, 0, 6, 0),
    ]
    follows(DynamicScale(growth_interval=3), table)


def test_the_defaults_grow_after_1000_clean_steps_in_a_row():
    flags = [OK] * 999 + [INF] + [OK] * 2000 + [INF, INF]
    _, rows = walk(DynamicScale(), flags)
    scale, clean, left, skipped = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
    assert (scale[:1999] == 2**16).all()  # 999 clean, an overflow, 999 clean: not in a row
    assert clean[998] == 999 and clean[999] == 0 and clean[1998] == 999
    assert (left[:999] == 2).all() and (left[999:1999] == 1).all()
    assert scale[1999] == 2**17 and clean[1999] == 0 and left[1999] == 2
    assert (scale[1999:2999] == 2**17).all()
    assert list(scale[2999:]) == [2**18, 2**18, 2**17]
    assert list(left[2999:]) == [2, 1, 1]
    assert list(skipped[[998, 999, 2999, 3000, 3001]]) == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_hysteresis_forgives_all_but_one_overflow(hysteresis):
    _, rows = walk(DynamicScale(hysteresis=hysteresis), [INF] * 7)
    halvings = [max(0, i - (hysteresis - 1)) for i in range(1, 8)]
    assert list(rows[:, 0]) == [2**16 / 2**k for k in halvings]
    assert list(rows[:, 2]) == [max(1, hysteresis - i) for i in range(1, 8)]


def test_the_floor_is_reached_and_kept_and_counted():
    # 2^16 to 1: one overflow forgiven, sixteen halvings; then at the floor.
    policy = DynamicScale()
    last, rows = walk(policy, [INF] * 17)
    assert tuple(rows[-1]) == (1, 0, 1, 17, 0)  # the step that led to the floor was not at it
    table = [
        (INF, 1, 1, 0, 18, 1),
        (INF, 1, 1, 0, 19, 2),
        (INF, 1, 1, 0, 20, 3),
        (OK, 1, 1, 1, 20, 0),  # in a row: a clean step starts the count anew
        (INF, 1, 1, 0, 21, 1),
        (INF, 1, 1, 0, 22, 2),
        (INF, 1, 1, 0, 23, 3),
    ]
    last = follows(policy, table, last)
    assert not hopeless(policy, last)
    last = follows(policy, [(INF, 1, 1, 0, 24, 4)], last)
    assert hopeless(policy, last)


def test_a_floor_that_halving_would_step_over():
    policy = DynamicScale(initial=10.0, floor=3.0, hysteresis=1, growth_interval=2)
    table = [
        (INF, 5, 1, 0, 1, 0),
        (INF, 3, 1, 0, 2, 0),  # not 2.5
        (INF, 3, 1, 0, 3, 1),
        (OK, 3, 1, 1, 3, 0),
        (OK, 6, 1, 0, 3, 0),  # the way up is open
    ]
    follows(policy, table)


def test_overflows_that_hysteresis_forgives_at_the_floor_count():
    policy = DynamicScale(initial=1.0, patience=1)
    assert hopeless(policy, follows(policy, [(INF, 1, 1, 0, 1, 1)]))


def test_the_ceiling_is_kept_and_hysteresis_still_filled():
    assert CEILING == 2.0**126
    policy = DynamicScale(initial=2.0**125, growth_interval=1)
    table = [
        (OK, 2.0**126, 2, 0, 0, 0),
        (OK, 2.0**126, 2, 0, 0, 0),
        (INF, 2.0**126, 1, 0, 1, 0),
        (OK, 2.0**126, 2, 0, 1, 0),
        (INF, 2.0**126, 1, 0, 2, 0),
        (INF, 2.0**125, 1, 0, 3, 0),
    ]
    follows(policy, table)
    # growth that would leave fp32 at once
    follows(DynamicScale(growth=2.0**100, growth_interval=1), [(OK, 2.0**116, 2, 0, 0, 0)])
    steep = DynamicScale(initial=2.0**60, growth=2.0**100, growth_interval=1)
    last = follows(steep, [(OK, 2.0**126, 2, 0, 0, 0)])
    # a gradient comes back whole: the reciprocal of the ceiling is not flushed to zero
    assert float(jax.jit(lambda s: (1 / s) * s)(last.scale)) == 1.0


def test_a_static_scale_only_counts():
    policy = StaticScale(128.0)
    table = [(OK, 128, 0, 0, 0, 0), (INF, 128, 0, 0, 1, 0), (INF, 128, 0, 0, 2, 0)]
    last = follows(policy, table)
    assert not hopeless(policy, last)


def test_powers_of_two_scale_bit_for_bit_and_others_do_not():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)

    def kept(scale):
        return int(((x * jnp.float32(scale)) * jnp.float32(1 / scale) == x).sum())

    assert kept(2.0**16) == 1000
    assert kept(1e5) < 1000  # accepted, but it rounds
    assert float(init_scale(DynamicScale(initial=1e5)).scale) == 1e5


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("policy", [DynamicScale(growth_interval=2), StaticScale(8.0)], ids=repr)
def test_types_are_steady_and_a_step_compiles_once(policy, x64):
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        traces = []

        def step(state, finite):
            traces.append(finite)
            return next_scale(policy, state, finite)

        step = jax.jit(step, donate_argnums=0)
        state = init_scale(policy)
        for finite in (OK, OK, INF, INF, OK):
            state = step(state, jnp.asarray(finite))
            assert tuple(x.dtype for x in state) == DTYPES
            assert not any(x.weak_type or x.shape for x in state)
        assert len(traces) == 1
        assert hopeless(policy, state).dtype == jnp.bool_
        abstract = jax.eval_shape(lambda: init_scale(policy))
        assert [x.dtype for x in abstract] == [x.dtype for x in state]
        assert not any(x.weak_type for x in jax.tree.leaves(abstract))


def test_with_and_without_jit_agree():
    policy = DynamicScale(growth_interval=2, initial=4.0)
    flags = [INF, INF, INF, OK, OK, OK, OK, INF, OK]
    _, rows = walk(policy, flags)
    state = init_scale(policy)
    for flag, row in zip(flags, rows, strict=True):
        state = next_scale(policy, state, flag)
        assert tuple(float(x) for x in state) == tuple(row)


@pytest.mark.parametrize(
    ("floor", "words"),
    [
        (1.0, ("loss scale 1.0 is", "No smaller scale helps", "lower the learning rate")),
        (256.0, ("loss scale 256.0 is", "Lower DynamicScale.floor")),  # a smaller one may yet help
    ],
)
def test_hopeless_letter(floor, words):
    text = hopeless_letter(floor, 21)
    for word in (*words, "gradients of step 21 still overflow", "the state was left as it was"):
        assert word in text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"initial": float("nan")}, ValueError, r"initial=nan\).*positive, finite"),
        ({"initial": float("inf")}, ValueError, r"initial=inf\).*positive, finite"),
        ({"initial": 1e39}, ValueError, "initial=1e[+]39.*fp32 holds"),  # finite in Python only
        ({"initial": "auto"}, TypeError, "initial='auto'.*is a str"),
        ({"initial": 0.5}, ValueError, "initial=0.5, floor=1.0.*start below"),
        ({"floor": 0.0}, ValueError, r"floor=0.0\).*positive"),
        ({"floor": 1e-40}, ValueError, "floor=1e-40.*reciprocal"),
        ({"floor": True}, TypeError, r"floor=True\) is a bool"),
        ({"growth": 1.0}, ValueError, "growth=1.0.*above 1"),
        ({"growth": float("inf")}, ValueError, "growth=inf.*finite"),
        ({"growth": float("nan")}, ValueError, "growth=nan.*finite"),
        ({"backoff": 1.0}, ValueError, "backoff=1.0.*between 0 and 1"),
        ({"backoff": 0.0}, ValueError, "backoff=0.0.*between 0 and 1"),
        ({"backoff": float("nan")}, ValueError, "backoff=nan.*between"),
        ({"growth_interval": 0}, ValueError, r"growth_interval=0\).*between 1 and"),
        ({"growth_interval": 2**31}, ValueError, "growth_interval=2147483648"),
        ({"growth_interval": 1e3}, TypeError, r"growth_interval=1000.0\) is a float"),
        ({"hysteresis": 0}, ValueError, "hysteresis=0"),
        ({"patience": False}, TypeError, r"patience=False\) is a bool"),
    ],
    ids=str,
)
def test_dynamic_scale_letters(options, error, words):
    with pytest.raises(error, match=words):
        DynamicScale(**options)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0.0, ValueError), (-2.0, ValueError), (float("inf"), ValueError), (None, TypeError)],
)
def test_static_scale_letters(value, error):
    with pytest.raises(error, match=rf"StaticScale\(value={value}\).*expected a"):
        StaticScale(value)


@pytest.mark.parametrize("finite", [jnp.ones(8, bool), jnp.float32(3.0), 1])
def test_finite_is_one_bool(finite):
    with pytest.raises(TypeError, match="finite has shape .*expected one bool"):
        next_scale(DynamicScale(), init_scale(DynamicScale()), finite)
