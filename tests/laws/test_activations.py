"""Law: what leaves the device, or is split over it, is gone from its memory; nothing else changes.

Of the inputs that a layer loop keeps (ZeRO-R, arXiv 1910.02054, section 6.1), on real compilers.
Two inputs are on the device at a time: that of the layer that computes and the one that is fetched.
"""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from cases.programs import c01_tied_gpt_vocab50257 as c01
from jax.sharding import SingleDeviceSharding
from laws.parallel_blocks import Block, Net, PlainNet, Size, make_step

from zero_jax import Remat, regather
from zero_jax.planning.topology import compile_only_devices
from zero_jax.reporting.hlo import audit

MODEL = 2  # devices along the axis of tensor parallelism
# Small arrays of a TPU lie in memory of its own, which temporaries do not count.
SIZES = {
    "h100:8": Size(12, 512, 2, 512, jnp.bfloat16),
    "v5p:2x2x2": Size(24, 1024, 4, 2048, jnp.bfloat16),
}
pytestmark = pytest.mark.aot
machines = pytest.mark.parametrize(
    "machine", ["h100:8", pytest.param("v5p:2x2x2", marks=pytest.mark.slow)]
)


@cache
def compiled(machine, remat):
    return compile_net(machine, Net(SIZES[machine], remat))


def compile_net(machine, net):
    state, batch, step, _ = make_step(net, compile_only_devices(machine), MODEL)
    executable = step.lower(state, batch).compile()
    memory = executable.memory_analysis()
    mesh = jax.tree.leaves(batch)[0].sharding.mesh
    return memory.temp_size_in_bytes, memory.host_temp_size_in_bytes, audit(executable, mesh)


@machines
def test_inputs_on_the_host_are_not_on_the_device(machine):
    size = SIZES[machine]
    saved = size.layers * size.input_bytes
    resident, none, _ = compiled(machine, Remat())
    left, host, _ = compiled(machine, Remat(kept_on="host"))
    assert none == 0
    assert host == saved  # and no second copy of them
    assert resident - left >= saved - 2.1 * size.input_bytes


@machines
def test_split_inputs_take_their_share(machine):
    size = SIZES[machine]
    saved = size.layers * size.input_bytes
    whole, _, before = compiled(machine, Remat())
    split, _, after = compiled(machine, Remat(split_over="model"))
    assert whole - split >= saved - saved // MODEL - 2.1 * size.input_bytes
    _, host, _ = compiled(machine, Remat(kept_on="host", split_over="model"))
    assert host == saved // MODEL

    # Each input is gathered once more, (M - 1)/M of it; all else crosses the wire as before.
    more = after.bytes_by_kind["all-gather"] - before.bytes_by_kind["all-gather"]
    assert more == saved * (MODEL - 1) // MODEL
    others = [
        {kind: sent for kind, sent in report.bytes_by_kind.items() if kind != "all-gather"}
        for report in (before, after)
    ]
    assert others[0] == others[1]


def test_parameters_gathered_again_are_not_kept():
    size = Size(8, 1024, 8, 256, jnp.bfloat16)
    kept, _, once = compile_net("h100:8", PlainNet(size))
    left, _, twice = compile_net("h100:8", PlainNet(size, regather(Block)))

    # The first kernel is not needed again: nobody asks for the gradient of the input.
    kernel = size.width * 4 * size.width // MODEL * 2
    sent = once.bytes_by_kind["all-gather"]
    parts = 8 // MODEL
    assert sent == 2 * size.layers * kernel * (parts - 1) // parts
    assert twice.bytes_by_kind["all-gather"] == 2 * sent - kernel * (parts - 1) // parts
    # All kernels were there at the turn; now two layers are, and one more that is on its way. What
    # lies between products is not kept either.
    assert kept - left >= (2 * size.layers - 6) * kernel


def c01_temp_bytes(block, monkeypatch):
    """Temporaries of C01's gradient: 8 layers, 64 x 256 tokens, on one H100.

    With 512 words: of 50,257, the logits alone are three times what all layers keep.
    """
    for name, value in {"T": 256, "L": 8, "V": 512, "Block": block}.items():
        monkeypatch.setattr(c01, name, value)
    net = c01.TiedLM()
    lie = SingleDeviceSharding(compile_only_devices("h100:1")[0])

    def abstract(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie)

    def create(key):
        return net.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    def loss(params, ids):
        logits = net.apply({"params": params}, ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    params = jax.tree.map(abstract, jax.eval_shape(create, jax.random.key(0)))
    ids = abstract(jax.ShapeDtypeStruct((64, 257), jnp.int32))
    # The products are 36 wide, which Triton's tiles are not.
    options = {"xla_gpu_enable_triton_gemm": False}
    lowered = jax.jit(jax.grad(loss)).lower(params, ids)
    return lowered.compile(compiler_options=options).memory_analysis().temp_size_in_bytes


def test_remat_saves_memory(monkeypatch):
    block = c01.Block
    plain = c01_temp_bytes(block, monkeypatch)
    assert c01_temp_bytes(nn.remat(block, policy=Remat().policy), monkeypatch) <= 0.7 * plain
    # Here nothing is gathered: products are kept, and what lies between is not.
    assert c01_temp_bytes(regather(block, "weight_dots"), monkeypatch) <= 0.7 * plain


def test_remat_changes_no_loss(monkeypatch):
    def losses(block):
        monkeypatch.setattr(c01, "Block", block)
        built = c01.build()
        state, step, found = built["state"], jax.jit(built["step"]), []
        for i in range(3):
            state, loss = step(state, built["batch"](i))
            found.append(float(loss))
        return found

    block = c01.Block
    want = losses(block)
    assert losses(nn.remat(block, policy=Remat("dots").policy)) == pytest.approx(want, rel=1e-6)
