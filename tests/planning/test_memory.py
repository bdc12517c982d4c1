"""Model states: the tables of the ZeRO paper, and the closed form against the layout's count."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import zero_jax
from zero_jax.planning import memory
from zero_jax.planning.memory import ADAM_16, ADAM_18, ADAM_20, largest_model, model_states

BILLION = 10**9
TABLE_1 = {  # N -> 7.5B, 128B, 1T, each at stages 1, 2, 3: GB, digits as printed
    1: "120 120 120  2048 2048 2048  16000 16000 16000",
    4: "52.5 41.3 30  896 704 512  7000 5500 4000",
    16: "35.6 21.6 7.5  608 368 128  4750 2875 1000",
    64: "31.4 16.6 1.88  536 284 32  4187 2218 250",
    256: "30.4 15.4 0.47  518 263 8  4046 2054 62.5",
    1024: "30.1 15.1 0.12  513 257 2  4011 2013 15.6",
}


def as_the_paper_prints(count_bytes):
    """GB by the one rule that all 54 entries follow.

    From 100 GB on, whole GB, cut off: 4187.5 is 4187, 257.75 is 257. Below, three significant
    digits and at most two decimals, rounded, half up: 41.25 is 41.3, 1.875 is 1.88.
    """
    gb = Fraction(count_bytes, BILLION)
    if gb >= 100:
        return str(int(gb))
    decimals = 1 if gb >= 10 else 2
    scaled = math.floor(gb * 10**decimals + Fraction(1, 2))
    return f"{scaled / 10**decimals:.{decimals}f}".rstrip("0").rstrip(".")


@pytest.mark.parametrize("devices", TABLE_1)
def test_table_1_to_the_printed_digit(devices):
    printed = TABLE_1[devices].split()
    ours = [
        as_the_paper_prints(model_states(parameters, stage, devices).total_bytes)
        for parameters in (7_500_000_000, 128 * BILLION, 1000 * BILLION)
        for stage in (1, 2, 3)
    ]
    assert ours == printed


def test_largest_models_of_table_2():
    """32 GB, 64-way data parallel. The paper multiplies the rounded first row by MP.

    So 30.57B of stage 1 at MP 4 is printed as 4 x 7.6 = 30.4, and 2.048T of stage 3 as 2T.
    """
    first = {0: Fraction("2"), 1: Fraction("7.6"), 2: Fraction("14.4"), 3: Fraction(128)}
    for stage, billions in first.items():
        one = largest_model(32 * BILLION, stage, 64)
        assert round(Fraction(one, BILLION), 1) == billions
        for mp in (1, 2, 4, 8, 16):
            ours = largest_model(32 * BILLION, stage, 64, model_parallel=mp)
            half_a_digit = Fraction(1, 20)
            assert abs(Fraction(ours, BILLION) - mp * billions) <= mp * half_a_digit
    rows = {stage: [float(mp * b) for mp in (1, 2, 4, 8, 16)] for stage, b in first.items()}
    assert rows[0] == [2, 4, 8, 16, 32]
    assert rows[1] == [7.6, 15.2, 30.4, 60.8, 121.6]
    assert rows[2] == [14.4, 28.8, 57.6, 115.2, 230.4]
    assert [float(f"{billions / 1000:.1g}") for billions in rows[3][2:]] == [0.5, 1, 2]
    assert rows[3][:2] == [128, 256]


def test_zero_infinity_counts_20_bytes_and_binary_units():
    """Its figure 2a: 240 x layers x hidden^2 bytes (20 of 12 layers hidden^2 each), in TiB."""
    for layers, hidden, tib in [(80, 10240, "1.83"), (128, 25600, "18.31"), (195, 65536, "182.81")]:
        parameters = 12 * layers * hidden**2
        total = model_states(parameters, 0, 1, convention=ADAM_20).total_bytes
        assert f"{total / 2**40:.2f}" == tib


def test_conventions_say_what_they_count():
    assert [str(c).split(" bytes")[0] for c in memory.CONVENTIONS] == [
        "16: 2 + 2 + 12",
        "18: 2 + 4 + 12",
        "20: 2 + 2 + 16",
    ]
    for convention in memory.CONVENTIONS:
        total = convention.params + convention.grads + convention.optimizer
        assert total == int(convention.name)
        assert convention.source in str(convention)
    # stage 2, N = 4: 2 + 4/4 + 12/4 and 2 + 2/4 + 16/4 bytes each of 1000
    assert model_states(1000, 2, 4, convention=ADAM_18).total_bytes == 2000 + 1000 + 3000
    assert model_states(1000, 2, 4, convention=ADAM_20).total_bytes == 2000 + 500 + 4000


def test_frozen_parameters_cost_two_bytes_and_are_partitioned_at_stage_3():
    # 1000 parameters, 900 frozen, N = 4: 100 trained have a gradient and an optimizer state
    held = [model_states(1000, stage, 4, frozen=0.9) for stage in range(4)]
    assert [s.params_bytes for s in held] == [2000, 2000, 2000, 500]
    assert [s.grads_bytes for s in held] == [200, 200, 50, 50]
    assert [s.optimizer_bytes for s in held] == [1200, 300, 300, 300]


def test_the_accumulator_is_whole_until_gradients_are_partitioned():
    held = [model_states(1000, stage, 4, microbatches=2).accumulator_bytes for stage in range(4)]
    assert held == [4000, 4000, 1000, 1000]  # fp32
    narrow = model_states(1000, 2, 4, microbatches=2, accumulate_dtype=jnp.bfloat16)
    assert narrow.accumulator_bytes == 500
    assert model_states(1000, 1, 4).accumulator_bytes == 0


def test_offload_moves_bytes_and_loses_none():
    """ZeRO-Offload (2101.06840): 2 bytes a parameter on the device, 14 on the host."""
    here = model_states(1000, 2, 1, microbatches=4)
    there = model_states(1000, 2, 1, microbatches=4, offload={"grads", "opt_state"})
    assert there.device_bytes == 2000
    assert there.host_bytes == 14 * 1000 + 4000  # the accumulator lies with the gradients
    assert there.total_bytes == here.total_bytes == here.device_bytes
    # with 2 bytes a parameter a 32 GB device holds 16B, more than the 13B of its headline
    assert largest_model(32 * BILLION, 2, 1, offload=["grads", "opt_state"]) == 16 * BILLION


sizes, devices = st.integers(1, 10**13), st.integers(1, 2000)
shares = st.integers(0, 100).map(lambda percent: percent / 100)
conventions = st.sampled_from(memory.CONVENTIONS)


@hypothesis.given(sizes, devices, conventions, shares, st.integers(1, 16), st.integers(1, 3))
def test_a_stage_never_holds_more_than_the_one_before(psi, n, convention, frozen, mp, m):
    totals = [
        model_states(
            psi, stage, n,
            convention=convention, frozen=frozen, model_parallel=mp, microbatches=m,
        ).total_bytes
        for stage in range(4)
    ]  # fmt: skip
    assert totals == sorted(totals, reverse=True)
    if n == 1:
        assert len(set(totals)) == 1


@hypothesis.given(st.integers(1, 10**13), st.integers(0, 3), devices, conventions)
def test_the_largest_model_fits_and_the_next_does_not(held, stage, n, convention):
    largest = largest_model(held, stage, n, convention=convention, model_parallel=3)

    def total(psi):
        return model_states(psi, stage, n, convention=convention, model_parallel=3).total_bytes

    assert total(largest + 1) > held
    assert largest == 0 or total(largest) <= held


SHAPES = {
    "embed": jax.ShapeDtypeStruct((256, 128), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((128, 384), jnp.float32),
    "bias": jax.ShapeDtypeStruct((384,), jnp.float32),
}
PSI = 256 * 128 + 128 * 384 + 384
COUNT = 4  # bytes of a step counter


def lay_out(stage, tx=None, mesh=None, precision=None, offload=None):
    plain = optax.adamw(1e-3) if tx is None else tx
    wrapped = zero_jax.partition_optimizer(plain)
    state = {"params": SHAPES, "opt_state": jax.eval_shape(plain.init, SHAPES)}
    precision = zero_jax.Precision.bf16() if precision is None else precision
    zero_jax.shard_train_state(
        state, stage, tx=wrapped, mesh=mesh, precision=precision, offload=offload
    )
    assert wrapped.layout is not None
    return wrapped.layout


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_the_layout_counts_what_the_closed_form_does(stage, replicas):
    """All dims divide by 8 here, so that nothing is padded and only the counter stays whole."""
    n = 8 // replicas
    mesh = Mesh(np.array(jax.devices()).reshape(replicas, n), ("replica", "data"))
    exact = memory.from_layout(lay_out(stage, mesh=mesh), microbatches=2, offload={"opt_state"})
    closed = model_states(PSI, stage, n, microbatches=2, offload={"opt_state"})
    assert exact.params_bytes == closed.params_bytes
    assert exact.grads_bytes == closed.grads_bytes
    assert exact.accumulator_bytes == closed.accumulator_bytes
    assert exact.optimizer_bytes == closed.optimizer_bytes + COUNT
    assert exact.host_bytes == closed.host_bytes + COUNT
    assert exact.device_bytes == closed.device_bytes


@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_layout_has_on_the_host_is_counted_there(stage):
    """All of the optimizer state but its counter; the same bytes as on the device, elsewhere."""
    here = memory.from_layout(lay_out(stage))
    away = memory.from_layout(lay_out(stage, offload=zero_jax.HostMemory()))
    assert away.host_bytes == here.optimizer_bytes - COUNT and away.optimizer_bytes == COUNT
    assert away.total_bytes == here.total_bytes
    assert away.device_bytes == here.total_bytes - away.host_bytes


OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), 8 * PSI + COUNT),
    "sgd": (optax.sgd(1e-3), 0),
    "momentum": (optax.sgd(1e-3, momentum=0.9), 4 * PSI),
    "lion": (optax.lion(1e-3), 4 * PSI + COUNT),
    "bf16 momentum": (optax.sgd(1e-3, momentum=0.9, accumulator_dtype=jnp.bfloat16), 2 * PSI),
    # rows and columns of both matrices (and a placeholder of one), one whole moment of the bias
    # (and two placeholders), its counter
    "adafactor": (
        optax.adafactor(1e-3, min_dim_size_to_factor=128),
        4 * (256 + 128 + 1 + 128 + 384 + 1 + 384 + 2) + COUNT,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("master", [0, 4])
def test_any_optimizer_is_counted_from_shapes(name, master):
    tx, state_bytes = OPTIMIZERS[name]
    precision = zero_jax.Precision.bf16() if master else zero_jax.Precision()
    per_parameter = memory.optimizer_bytes_per_parameter(tx, SHAPES, precision)
    total = master * PSI + state_bytes
    assert per_parameter == Fraction(total, PSI)
    convention = memory.convention_of(tx, SHAPES, precision)
    assert (convention.params, convention.grads) == ((2, 2) if master else (4, 4))
    held = model_states(PSI, 0, 8, convention=convention)
    layout = lay_out(0, tx, precision=precision)
    assert held.optimizer_bytes == total == layout.bytes_per_device["opt_state"]
    assert held.params_bytes == layout.bytes_per_device["params"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"stage": 4}, ValueError, "stage=4"),
        ({"parameters": 0}, ValueError, "parameters=0; expected at least 1"),
        ({"parameters": 7.5e9}, TypeError, "parameters=7500000000.0 is a float"),
        ({"devices": 0}, ValueError, "devices=0"),
        ({"devices": True}, TypeError, "devices=True is a bool"),
        ({"model_parallel": -1}, ValueError, "model_parallel=-1"),
        ({"frozen": 1.5}, ValueError, "frozen=1.5; expected a share"),
        ({"frozen": float("nan")}, ValueError, "frozen=nan"),
        ({"frozen": "half"}, TypeError, "frozen='half' is a str"),
        ({"microbatches": 0}, ValueError, "microbatches=0"),
        ({"offload": "params"}, ValueError, "offload='params'; expected a set"),
        ({"offload": {"optimizer"}}, ValueError, "opt_state"),
    ],
)
def test_bad_input(change, error, words):
    arguments = {"parameters": 1000, "stage": 2, "devices": 4} | change
    with pytest.raises(error, match=words):
        model_states(**arguments)


def test_bad_input_of_the_others():
    with pytest.raises(ValueError, match="memory_bytes=0"):
        largest_model(0, 1, 8)
    with pytest.raises(ValueError, match="leaves nothing on the device"):
        largest_model(BILLION, 1, 8, offload={"params", "grads", "opt_state"})
    with pytest.raises(ValueError, match="params: a tree without an element"):
        memory.convention_of(optax.adam(1e-3), {})
    assert largest_model(1, 0, 8, convention=ADAM_16) == 0
