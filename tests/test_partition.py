"""One leaf's partition: the rule, told as properties and as examples."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
from jax.sharding import PartitionSpec as P

from zero_jax.partition import MAX_PADDING, partition_leaf

shapes = st.lists(st.integers(0, 400), max_size=4).map(tuple)
sizes = st.integers(1, 16)


@hypothesis.given(shapes, sizes, st.booleans(), st.booleans())
def test_every_partition_divides_and_loses_nothing(shape, n, may_pad, stacked):
    p = partition_leaf(shape, "data", n, may_pad=may_pad, stacked=stacked)
    assert len(p.spec) <= len(p.rest_shape)
    assert math.prod(p.rest_shape) >= math.prod(shape)
    assert n % p.parts == 0
    if p.form in ("divided", "padded", "factor"):
        assert p.spec[p.dim] == "data"
        assert p.rest_shape[p.dim] % p.parts == 0
        assert not (stacked and p.dim == 0)
    if p.form == "flat":
        assert p.rest_shape == (math.ceil(math.prod(shape) / n) * n,)
        assert p.spec == P("data")
    if not may_pad:
        assert p.rest_shape == shape
        assert p.form in ("whole", "divided", "factor")


@hypothesis.given(shapes, st.integers(2, 16))
def test_padding_is_one_percent_or_one_element_a_device(shape, n):
    p = partition_leaf(shape, "data", n)
    size = math.prod(shape)
    if size > 1:
        assert p.parts == n
        assert math.prod(p.rest_shape) <= max(size * (1 + MAX_PADDING), size + n - 1)


@hypothesis.given(shapes.filter(lambda s: math.prod(s) > 1), st.integers(2, 16))
def test_the_first_dim_that_divides_is_cut(shape, n):
    p = partition_leaf(shape, "data", n)
    dividing = [d for d, size in enumerate(shape) if size % n == 0]
    assert (p.form == "divided") == bool(dividing)
    if dividing:
        assert p.dim == min(dividing)


@pytest.mark.parametrize(
    ("shape", "options", "form", "spec", "rest"),
    [
        ((64, 32), {}, "divided", P("data"), (64, 32)),
        ((32, 32), {}, "divided", P("data"), (32, 32)),
        ((3, 3, 8, 64), {}, "divided", P(None, None, "data"), (3, 3, 8, 64)),
        ((50257, 36), {}, "padded", P("data"), (50264, 36)),
        ((50257, 36), {"may_pad": False}, "factor", P(None, "data"), (50257, 36)),
        ((37, 37), {}, "flat", P("data"), (1376,)),
        ((37, 37), {"may_pad": False}, "whole", P(), (37, 37)),
        ((5, 30, 45), {}, "flat", P("data"), (6752,)),
        ((48, 6), {"held": ("model", None)}, "padded", P("model", "data"), (48, 8)),
        ((64, 64), {"held": (None, "model")}, "divided", P("data", "model"), (64, 64)),
        ((64,), {"held": ("model",)}, "whole", P("model"), (64,)),
        ((96, 8, 8), {"stacked": True}, "divided", P(None, "data"), (96, 8, 8)),
        ((96, 7), {"stacked": True}, "padded", P(None, "data"), (96, 8)),
        ((7,), {"min_size": 8}, "whole", P(), (7,)),
        ((0, 7), {}, "whole", P(), (0, 7)),
        ((1,), {}, "whole", P(), (1,)),
        ((), {}, "whole", P(), ()),
    ],
)
def test_examples(shape, options, form, spec, rest):
    p = partition_leaf(shape, "data", 8, **options)
    assert (p.form, p.spec, p.rest_shape) == (form, spec, rest)
    assert p.reason


def test_one_device_cuts_nothing():
    assert partition_leaf((64, 64), "data", 1).form == "whole"
