"""What the explicit step puts on the wire: gradients reduce-scattered, and in fp32."""

import math
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.explicit import make_step, opened

import zero_jax
from zero_jax import Precision

N = 8
BIG = 1024


def _collectives(text: str, kind: str) -> list[list[tuple[str, tuple[int, ...]]]]:
    """(dtype, shape) of every result of each collective of a kind in a compiled step."""
    results = re.findall(rf"= (\(.*?\)|\S+) {kind}(?:-start)?\(", text)
    shapes = (re.findall(r"([a-z]+[0-9]*)\[([0-9,]*)\]", result) for result in results)
    return [[(d, tuple(map(int, filter(None, s.split(","))))) for d, s in one] for one in shapes]


@pytest.mark.parametrize("stage", [2, 3])
def test_every_big_gradient_is_reduce_scattered(stage):
    """And no all-reduce has as many as 1024 elements, all its operands together."""
    program = opened("c03", stage)
    batch = zero_jax.shard_batch(program.built["batch"](0), program.layouts[""])
    text = program.made[0].lower(program.state, batch).compile().as_text()
    big = [x.size for x in program.built["params"].values() if x.size >= BIG]
    assert len(big) == 3
    scattered = [x for one in _collectives(text, "reduce-scatter") for x in one]
    sizes = [math.prod(shape) for _, shape in scattered]
    assert sorted(s for s in sizes if s >= BIG / N) == sorted(size // N for size in big)
    assert {dtype for dtype, _ in scattered} == {"f32"}
    reduced = _collectives(text, "all-reduce")
    assert reduced and all(sum(math.prod(s) for _, s in one) < BIG for one in reduced)


def _step_on_uneven_gradients(stage: int, precision: Precision):
    """Gradients of 256 on device 0 and 0.5 on the other seven; SGD at rate 1 from zero."""
    tx = zero_jax.partition_optimizer(optax.sgd(1.0, momentum=0.0))
    params = {"w": jnp.zeros(64)}
    state = {"params": params, "opt_state": tx.init(params)}
    state = zero_jax.shard_train_state(
        state, stage, tx=tx, executor="explicit", precision=precision
    )

    def loss_fn(params, batch):
        assert params["w"].dtype == jnp.bfloat16
        return jnp.mean(jnp.sum(batch["x"].astype(jnp.bfloat16) * params["w"], axis=-1))

    step = make_step(loss_fn, tx, regather="keep", donate=False)
    x = np.full((N, 64), 0.5, np.float32)
    x[0] = 256
    batch = zero_jax.shard_batch({"x": x}, tx.layout)
    lowered = step.lower(state, batch)
    state, _ = step(state, batch)
    return state, lowered


def _scattered_dtypes(lowered) -> set[str]:
    """As the program says it; XLA on CPU widens bf16 sums itself."""
    regions = re.findall(r'"stablehlo.reduce_scatter".*?\^bb0\(%\w+: tensor<(\w+)>', lowered, re.S)
    assert regions
    return set(regions)


MEAN = (256 + 7 * 0.5) / N


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bf16_are_summed_in_fp32(stage):
    """32.4375 exactly; sums in bf16, where 32 is followed by 32.25, cannot give it."""
    state, lowered = _step_on_uneven_gradients(stage, Precision(compute=jnp.bfloat16))
    assert state["params"]["w"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(state["params"]["w"]), -MEAN)
    assert _scattered_dtypes(lowered.as_text()) == {"f32"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_so_they_are_under_a_bf16_policy(stage):
    """The master copy has the sum; the parameter is its nearest bf16."""
    state, lowered = _step_on_uneven_gradients(stage, Precision.bf16())
    np.testing.assert_array_equal(np.asarray(state["opt_state"].master["w"]), -MEAN)
    assert state["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(state["params"]["w"], np.float32), -32.5)
    assert _scattered_dtypes(lowered.as_text()) == {"f32"}
    compiled = _collectives(lowered.compile().as_text(), "reduce-scatter")
    assert {dtype for one in compiled for dtype, _ in one} == {"f32"}


def test_the_reduction_dtype_is_a_choice():
    precision = Precision(compute=jnp.bfloat16, reduce=jnp.bfloat16)
    state, lowered = _step_on_uneven_gradients(2, precision)
    assert _scattered_dtypes(lowered.as_text()) == {"bf16"}
    assert set(np.unique(state["params"]["w"])) <= {-32.0, -32.25, -32.5}
