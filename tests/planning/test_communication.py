"""Bytes on the wire: the paper's 2 and 3 elements a parameter, and the count of a layout."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.planning import communication
from zero_jax.planning.communication import WireBytes, step_traffic
from zero_jax.planning.topology import compile_only_devices
from zero_jax.reporting.hlo import audit

BF16 = {"params_dtype": jnp.bfloat16, "reduce_dtype": jnp.bfloat16}
DATA, REPLICA = ("data",), ("replica",)


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_volumes_of_section_7(stage, volumes, n):
    """2 (stages 0 to 2) and 3 elements a parameter, (N-1)/N of each in a ring, 2 bytes wide."""
    psi = 64 * 1000
    exact = volumes * psi * 2 * Fraction(n - 1, n)
    assert step_traffic(psi, stage, n, **BF16).total_bytes == exact


def test_kinds_and_widths():
    """8 parameters on 4 devices; gathers in bf16 (2 bytes), reductions in fp32 (4 bytes)."""
    shard = 2
    gather, reduce = 3 * shard * 2, 3 * shard * 4
    assert step_traffic(8, 0, 4).by_axes == {DATA: WireBytes(all_reduce_bytes=2 * reduce)}
    for stage, gathers in [(1, 1), (2, 1), (3, 2)]:
        assert step_traffic(8, stage, 4).by_axes == {DATA: WireBytes(gathers * gather, reduce)}


def test_microbatches():
    """What is partitioned is moved in every microbatch, what is whole once a step."""
    gather, reduce = 3 * 2 * 2, 3 * 2 * 4
    five = [step_traffic(8, stage, 4, microbatches=5).total for stage in range(4)]
    assert five == [
        WireBytes(0, 0, 2 * reduce),
        WireBytes(gather, reduce),
        WireBytes(gather, 5 * reduce),
        WireBytes(5 * 2 * gather, 5 * reduce),
    ]
    used, kept = (
        step_traffic(8, 3, 4, microbatches=5, regather=regather).total
        for regather in ("use", "keep")
    )
    assert used == WireBytes(5 * gather, 5 * reduce)
    assert kept == WireBytes(gather, 5 * reduce)


def test_frozen_parameters_are_gathered_at_stage_3_and_never_reduced():
    """80 parameters, 40 of them frozen, on 4 devices: shards of 20 and 10."""
    all_of_it, trained = 3 * 20 * 2, 3 * 10 * 2
    stages = [step_traffic(80, stage, 4, frozen=0.5).total for stage in range(4)]
    assert [s.all_gather_bytes for s in stages] == [0, trained, trained, 2 * all_of_it]
    assert [s.reduce_scatter_bytes for s in stages] == [0, *[3 * 10 * 4] * 3]
    assert stages[0].all_reduce_bytes == 2 * 3 * 10 * 4


def test_replicas_exchange_their_shards_once():
    """32 parameters over 4 devices and 2 replicas of them; the model axis halves 64."""
    traffic = step_traffic(64, 2, 4, replicas=2, model_parallel=2, microbatches=3)
    shard = 8
    assert traffic.by_axes == {
        DATA: WireBytes(3 * shard * 2, 3 * 3 * shard * 4),
        REPLICA: WireBytes(all_reduce_bytes=2 * 1 * (shard // 2) * 4),
    }
    # whole gradients: one ring over all 8
    whole = step_traffic(32, 0, 4, replicas=2)
    assert whole.by_axes == {("data", "replica"): WireBytes(all_reduce_bytes=2 * 7 * 4 * 4)}
    assert step_traffic(32, 2, 1, replicas=2).by_axes.keys() == {REPLICA}


@hypothesis.given(
    st.integers(1, 10**12), st.integers(0, 3), st.integers(1, 1024), st.integers(1, 8)
)
def test_totals_and_bounds(psi, stage, n, m):
    """Rounding up to a multiple of N adds at most N elements to each of the 3m collectives."""
    traffic = step_traffic(psi, stage, n, microbatches=m, **BF16)
    assert traffic.total_bytes == sum(w.total_bytes for w in traffic.by_axes.values())
    volumes = [2, 2, 1 + m, 3 * m][stage]
    exact = 2 * volumes * psi * Fraction(n - 1, n)
    assert exact <= traffic.total_bytes <= exact + 2 * volumes * n


def lay_out(stage, shapes, mesh=None, rules=None):
    return describe(stage, shapes, zero_jax.partition_optimizer(optax.adamw(1e-3)), mesh, rules)[0]


def describe(stage, shapes, tx, mesh=None, rules=None):
    """The layout and the abstract state: bf16 parameters, fp32 master copy and moments."""
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    precision = zero_jax.Precision.bf16()
    state = zero_jax.shard_train_state(
        state, stage, mesh=mesh, rules=rules, precision=precision, min_size=2, tx=tx
    )
    return tx.layout, state


DIVIDE = {"embed": (256, 128), "kernel": (128, 384), "bias": (384,)}
PSI = 256 * 128 + 128 * 384 + 384


@pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")  # a data axis of one device
@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("regather", ["layer", "use", "keep"])
def test_the_layout_counts_what_the_closed_form_does(stage, replicas, regather):
    """All dims divide by 8 here, so that nothing is padded or whole."""
    mesh = Mesh(np.array(jax.devices()).reshape(replicas, -1), ("replica", "data"))
    layout = lay_out(stage, DIVIDE, mesh=mesh)
    exact = communication.from_layout(
        layout, reduce_dtype=jnp.float32, microbatches=3, regather=regather
    )
    closed = step_traffic(
        PSI, stage, 8 // replicas, replicas=replicas, microbatches=3, regather=regather
    )
    assert exact == closed


@pytest.mark.parametrize("stage", range(4))
def test_a_model_axis_divides_everything(stage):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rules = {"embed": P("model"), "kernel": P(None, "model"), "bias": P("model")}
    if stage:
        rules = {
            "embed": P("model", "data"),
            "kernel": P("data", "model"),
            "bias": P(("data", "model")),
        }
    layout = lay_out(stage, DIVIDE, mesh=mesh, rules=rules)
    exact = communication.from_layout(layout, reduce_dtype=jnp.float32)
    assert exact == step_traffic(PSI, stage, 4, model_parallel=2)


@pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")  # leaves that stay whole
def test_leaves_that_do_not_divide():
    """Each leaf alone, over 8 devices, bf16 parameters (2) and gradients (2), fp32 moments (4).

    Adam has three flat or padded leaves a parameter: master copy and two moments.
    """

    def sent(stage, shape):
        layout = lay_out(stage, {"leaf": shape})
        return communication.from_layout(layout).total

    # 5003 is padded to 5008, 626 rows of 3 a device; at rest at stage 3 nothing divides it
    part = 7 * 626 * 3 * 2
    assert sent(1, (5003, 3)) == sent(2, (5003, 3)) == WireBytes(part, part)
    assert sent(3, (5003, 3)) == WireBytes(part, part)
    # 37 x 37 = 1369 is flattened to 1376: whole in flight, so all-reduced without padding
    # (2 x 7/8 of 1369 x 2 bytes, rounded up), its moments gathered for the update
    whole, moments = 4792, 3 * 7 * 172 * 4
    assert sent(0, (37, 37)) == WireBytes(0, 0, whole)
    for stage in (1, 2, 3):
        assert sent(stage, (37, 37)) == WireBytes(moments, 0, whole)
    # 5003 x 4 at stage 3 rests over 4 of 8: gathered twice over 4, and from the update's cut over 8
    factor, update = 2 * 3 * 5003 * 2, 7 * 626 * 4 * 2
    assert sent(3, (5003, 4)) == WireBytes(factor + update, update)
    # 2 x 7/8 of a scalar's 2 bytes, rounded up
    assert sent(3, ()) == WireBytes(0, 0, 4)


@pytest.mark.filterwarnings("ignore::zero_jax.ZeroWarning")  # leaves that stay whole
def test_what_the_explicit_step_alone_does():
    """Parameters padded at rest, two dtypes on the wire, sums reduced once, leaf by leaf."""

    def sent(shape, precision, **options):
        tx = zero_jax.partition_optimizer(optax.adamw(1e-3))
        params = {"leaf": jax.ShapeDtypeStruct(shape, jnp.float32)}
        state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
        zero_jax.shard_train_state(state, 3, precision=precision, tx=tx, executor="explicit")
        return communication.from_layout(tx.layout, **options).total

    half, single = zero_jax.Precision.bf16(), None
    part = 7 * 626 * 3  # elements sent of 5003 rows, padded to 5008
    cast = {"gather_dtype": jnp.bfloat16, "reduce_dtype": jnp.float32, "microbatches": 5}
    for precision in (half, single):
        each = WireBytes(2 * 5 * part * 2, 5 * part * 4)
        assert sent((5003, 3), precision, **cast) == each
        once = WireBytes(5 * part * 2, part * 4)
        by_path = {"leaf": "use"}.__getitem__
        assert sent((5003, 3), precision, **cast, reduce="once", regather=by_path) == once
    # 1369 elements, flattened at rest, are gathered for the update, from the master copy if any
    flat, whole = 7 * 172, 7 * 1369  # 2 x 7/8 x 4 bytes
    options = {"reduce_dtype": jnp.float32, "regather": "keep"}
    moments = 2 * flat * 4
    assert sent((37, 37), half, **options) == WireBytes(flat * (2 + 4) + moments, 0, whole)
    assert sent((37, 37), single, **options) == WireBytes(flat * (4 + 4) + moments, 0, whole)


def test_frozen_parameters_of_a_layout_are_gathered_and_averages_are_not():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
            self.last = nnx.Linear(32, 8, use_bias=False, rngs=rngs)

    trained = nnx.All(nnx.Param, nnx.PathContains("last"))
    net = Net(nnx.Rngs(0))
    state = (net, nnx.Optimizer(net, optax.sgd(1e-3), wrt=trained))
    layout = zero_jax.layout_of(zero_jax.shard_train_state(state, 3))
    ring = 7 * 4  # seven parts, fp32
    frozen, last = ring * 16 * 32 // 8, ring * 32 * 8 // 8
    assert communication.from_layout(layout).total == WireBytes(2 * (frozen + last), last)

    wrapped = zero_jax.partition_optimizer(optax.sgd(1e-3))
    params = {"w": jnp.zeros((16, 32))}
    averaged = {"params": params, "ema": params, "opt_state": wrapped.init(params)}
    zero_jax.shard_train_state(averaged, 3, tx=wrapped)
    assert wrapped.layout is not None
    assert communication.from_layout(wrapped.layout).total == WireBytes(2 * frozen, frozen)


def test_complex_and_integer_leaves_keep_their_width():
    plain = optax.sgd(1e-3)
    wrapped = zero_jax.partition_optimizer(plain)
    params = {
        "c": jax.ShapeDtypeStruct((16,), jnp.complex64),
        "i": jax.ShapeDtypeStruct((16,), jnp.int32),
    }
    state = {"params": params, "opt_state": jax.eval_shape(plain.init, params)}
    zero_jax.shard_train_state(state, 3, tx=wrapped)
    assert wrapped.layout is not None
    traffic = communication.from_layout(wrapped.layout, reduce_dtype=jnp.bfloat16).total
    shard = 2
    assert traffic == WireBytes(2 * 7 * shard * (8 + 4), 7 * shard * 8)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("replicas", "stage"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)]
)
def test_the_gpu_compiler_sends_what_the_layout_counts(replicas, stage):
    """A user's own step for 8 H100. It uses once what stage 3 gathers, and reduces in bf16.

    At stage 1 with replicas XLA all-reduces over both axes instead, which is more: not shown.
    """

    def step(params, opt_state, x):
        def loss(params):
            y = jnp.tanh(x @ params["in"]) @ params["out"] + params["bias"]
            return jnp.mean(y.astype(jnp.float32) ** 2)

        updates, opt_state = wrapped.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    devices = np.array(compile_only_devices("h100:1x8")).reshape(replicas, -1)
    mesh = Mesh(devices, ("replica", "data"))
    wrapped = zero_jax.partition_optimizer(optax.adamw(1e-3))
    shapes = {"in": (512, 1024), "out": (1024, 512), "bias": (512,)}
    layout, state = describe(stage, shapes, wrapped, mesh)
    batch = NamedSharding(mesh, P(("replica", "data")))
    x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16, sharding=batch)
    compiled = jax.jit(step).lower(state["params"], state["opt_state"], x).compile()
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    for c in audit(compiled, mesh).collectives:
        sent[c.kind] += c.bytes_on_wire * c.trips
    assert WireBytes(*sent.values()) == communication.from_layout(layout, regather="use").total


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"stage": -1}, ValueError, "stage=-1"),
        ({"stage": "2"}, TypeError, "stage='2'"),
        ({"parameters": 0}, ValueError, "parameters=0"),
        ({"devices": 0}, ValueError, "devices=0"),
        ({"replicas": 0}, ValueError, "replicas=0"),
        ({"model_parallel": 0.5}, TypeError, "model_parallel=0.5"),
        ({"microbatches": 0}, ValueError, "microbatches=0"),
        ({"frozen": -0.1}, ValueError, "frozen=-0.1"),
        ({"regather": "never"}, ValueError, "regather='never'; expected one of layer, use, keep"),
    ],
)
def test_bad_input(change, error, words):
    arguments = {"parameters": 1000, "stage": 2, "devices": 4} | change
    with pytest.raises(error, match=words):
        step_traffic(**arguments)
