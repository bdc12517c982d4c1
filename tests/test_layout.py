"""The layout: which leaf belongs to which parameter, rules, report and table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zero_jax

PARAMS = {
    "block": {"kernel": jnp.zeros((24, 16)), "bias": jnp.zeros(16)},
    "head": {"kernel": jnp.zeros((16, 37))},
}


def lay_out(stage, tx=None, params=PARAMS, **options):
    plain = optax.adam(1e-3) if tx is None else tx
    wrapped = zero_jax.partition_optimizer(plain)
    state = {"params": params, "opt_state": plain.init(params)}
    zero_jax.shard_train_state(state, stage, tx=wrapped, **options)
    assert wrapped.layout is not None
    return wrapped.layout


def by_path(layout, tree):
    return {r.path: r for r in layout.report() if r.tree == tree}


def test_what_each_stage_cuts():
    cut = {
        stage: {
            tree: any("data" in r.spec for r in by_path(lay_out(stage), tree).values())
            for tree in ("params", "grads", "opt_state")
        }
        for stage in range(4)
    }
    assert cut == {
        0: {"params": False, "grads": False, "opt_state": False},
        1: {"params": False, "grads": False, "opt_state": True},
        2: {"params": False, "grads": True, "opt_state": True},
        3: {"params": True, "grads": True, "opt_state": True},
    }


def test_moments_lie_as_their_parameter_and_others_by_their_shape():
    layout = lay_out(1, optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9))
    state = by_path(layout, "opt_state")
    factored = {p: r for p, r in state.items() if p.endswith("block/kernel")}
    assert {r.shape: r.spec for r in factored.values()} == {
        (24,): P("data"),  # rows
        (16,): P("data"),  # columns
        (1,): P(),  # placeholder of the unfactored moment
        (24, 16): P("data"),  # momentum
    }


def test_rules():
    rules = {"head/*": "whole", "block/kernel": P(None, "data"), "*/bias": "stacked"}
    layout = lay_out(3, rules=rules)
    params, state = by_path(layout, "params"), by_path(layout, "opt_state")
    assert params["head/kernel"].spec == state["0/mu/head/kernel"].spec == P()
    assert params["block/kernel"].spec == state["0/nu/block/kernel"].spec == P(None, "data")
    assert params["block/bias"].spec == P()  # its only dim counts layers
    assert "rule" in params["head/kernel"].reason


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"blok/*": "whole"}, ValueError, r"rules\['blok/\*'\] matches no parameter.*block/"),
        ({"block/*": "hole"}, TypeError, r"rules\['block/\*'\]='hole'"),
        (["whole"], TypeError, "is a list"),
        ({"head/kernel": P("data", None, None)}, ValueError, "3 entries for 2 dims"),
        ({"head/kernel": P(None, "data")}, ValueError, "dim 1 of size 37 does not divide by 8"),
        ({"head/kernel": P("model")}, ValueError, "no axis 'model'"),
    ],
)
def test_bad_rules(rules, error, words):
    with pytest.raises(error, match=words):
        lay_out(3, rules=rules)


def test_replica_axes_are_not_partitioned_and_carry_the_batch():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "data"))
    layout = lay_out(3, mesh=mesh)
    kernel = by_path(layout, "params")["block/kernel"]
    assert kernel.bytes_per_device == kernel.total_bytes // 4
    assert layout.batch_axes == ("replica", "data") or layout.batch_axes[0] == "replica"
    x = zero_jax.shard_batch(np.zeros((16, 3)), layout)
    assert x.sharding.shard_shape(x.shape) == (2, 3)


def test_the_report_sums_to_the_totals():
    layout = lay_out(2)
    for tree in ("params", "grads", "opt_state", "other"):
        records = by_path(layout, tree).values()
        assert sum(r.bytes_per_device for r in records) == layout.bytes_per_device[tree]
        assert sum(r.total_bytes for r in records) == layout.total_bytes[tree]


def test_the_table():
    lines = str(lay_out(3)).splitlines()
    assert lines[0] == (
        "ZeRO stage 3 over 'data' of mesh (data=8), 8 devices"
        if "data=8" in lines[0]
        else "ZeRO stage 3 over 'data' of mesh (data_0=2, data_1=2, data_2=2), 8 devices"
    )
    kernel = next(line for line in lines if line.startswith("params") and "block/kernel" in line)
    assert kernel.split() == [
        "params", "block/kernel", "(24,", "16)", "float32", "P('data',)", "192", "B",
        "dim", "0:", "24", "over", "8",
    ]  # fmt: skip
    whole = next(line for line in lines if line.startswith("params") and "head/kernel" in line)
    assert "dim 0: 16 over 8" in whole
    assert lines[-1].split()[0] == "other"
