"""Activations: the papers' figures, and the parameter count against the example's model."""

import jax
import jax.numpy as jnp
import pytest
from lm import model, schema

from zero_jax.planning import activations
from zero_jax.planning.activations import TransformerShape

GB = 10**9
GPT2_SMALL = TransformerShape(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024)
GPT2_XL = TransformerShape(layers=48, hidden=1600, heads=25, vocab=50257, sequence=1024)


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("sizes", [(12, 768, 12, 50257, 1024), (3, 64, 4, 300, 17)])
def test_parameters_are_those_of_the_model(sizes, tied_head):
    shape = TransformerShape(*sizes, tied_head=tied_head)
    layers, hidden, heads, vocab, sequence = sizes
    gpt = model.GPT(
        schema.Model(
            vocab_size=vocab, layers=layers, hidden=hidden, heads=heads,
            sequence_length=sequence, tied_head=tied_head,
        )
    )  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    made = jax.eval_shape(gpt.init, key, jax.ShapeDtypeStruct((1, 8), jnp.int32))
    assert shape.parameters == sum(leaf.size for leaf in jax.tree.leaves(made))


def test_well_known_sizes():
    assert GPT2_SMALL.parameters == 124_439_808
    assert GPT2_XL.parameters == 1_557_611_200


def test_gpt2_in_section_3_2_of_zero():
    """1.5B, batch 32: about 60 GB, about 8 GB with checkpointing; whole GB are met when rounded."""
    elements = activations.activation_elements(GPT2_XL, 32)
    assert elements == 12 * 1600 * 32 * 1024 * 48
    assert round(2 * elements / GB) == 60
    checkpoints = 2 * 32 * 1024 * 1600 * 48  # 5.0 GB: the input of each block
    block = 32 * 1024 * (16 * 1600 + 2 * 25 * 1024)  # 2.5 GB: one block computed again
    assert activations.checkpointed_bytes(GPT2_XL, 32) == checkpoints + block
    assert round((checkpoints + block) / GB) == 8
    assert round(100 * activations.RECOMPUTATION) == 33


FIGURE_2A = [  # layers, hidden, heads, checkpoints in TiB, working sets of states and block in GiB
    (100, 20480, 160, "0.12", "6.25", "2.50"),
    (128, 25600, 256, "0.20", "9.77", "3.56"),
    (195, 65536, 512, "0.76", "64.00", "8.00"),
    (315, 163840, 1024, "3.08", "400.00", "18.00"),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "kept", "states", "block"), FIGURE_2A)
def test_figure_2a_of_zero_infinity(layers, hidden, heads, kept, states, block):
    """Sequence 1024; checkpoints of batch 32 over a node, a block of batch 4 on one device."""
    shape = TransformerShape(layers, hidden, heads, vocab=50257, sequence=1024)
    assert f"{activations.checkpoint_bytes(shape, 32) / 2**40:.2f}" == kept
    assert f"{activations.state_working_bytes(shape) / 2**30:.2f}" == states
    assert f"{activations.working_bytes(shape, 4) / 2**30:.2f}" == block


def test_interval_and_partitioned_checkpoints():
    one = 2 * 4 * 1024 * 768  # a checkpoint of batch 4
    assert activations.checkpoint_bytes(GPT2_SMALL, 4) == 12 * one
    assert activations.checkpoint_bytes(GPT2_SMALL, 4, interval=5) == 3 * one  # blocks 0, 5, 10
    assert activations.checkpoint_bytes(GPT2_SMALL, 4, partitioned_over=16) == 12 * one // 16
    block = 4 * 1024 * (16 * 768 + 2 * 12 * 1024)
    assert activations.working_bytes(GPT2_SMALL, 4, interval=5) == 5 * block
    assert activations.working_bytes(GPT2_SMALL, 4, interval=99) == 12 * block
    assert (
        activations.checkpointed_bytes(GPT2_SMALL, 4, interval=5, partitioned_over=2)
        == 3 * one // 2 + 5 * block
    )


def test_p_a_is_one_over_the_model_parallel_group():
    """ZeRO, section 6.1, its 100B shape and MP 16; its 33 GB are left out: 3.2 contradicts."""
    shape = TransformerShape(layers=125, hidden=8192, heads=64, vocab=50257, sequence=1024)
    whole = 2 * 32 * 1024 * 8192 * 125
    assert activations.checkpoint_bytes(shape, 32) == whole
    assert activations.checkpoint_bytes(shape, 32, partitioned_over=16) == whole // 16


def test_sublinear_bytes():
    # equal layers, intervals of sqrt(n): 10 kept and 10 computed again
    assert activations.sublinear_bytes([1] * 100) == 2 * 10
    # unequal: segments [5, 1], [1, 1], [7]; kept 1 + 1 + 7; the largest is 7
    assert activations.sublinear_bytes([5, 1, 1, 1, 7], 2) == 1 + 1 + 7 + 7
    assert activations.sublinear_bytes([5, 1, 1], 3) == 1 + 7
    assert activations.sublinear_bytes([3, 4], 1) == 3 + 4 + 4


def test_chen_48_gb_to_7_gb():
    """The measured 7 GB of a 1000-layer ResNet lie between two readings of "every sqrt(n) layers".

    Below: 1000 equal layers of 48 MB, 2 sqrt(1000) of them. Above: 333 residual blocks of three
    layers in four stages of equal depth, whose maps halve from stage to stage (a quarter of the
    area, twice the channels), and a kept map taken to be all of its block. The paper prints
    neither its plan nor the depth of its stages.
    """
    equal = activations.sublinear_bytes([48 * 10**6] * 1000)
    assert equal == (33 + 31) * 48 * 10**6  # 33 segments of 31 layers
    block = 48 * GB // (83 * (8 + 4 + 2 + 1))
    blocks = activations.sublinear_bytes([block * k for k in (8, 4, 2, 1) for _ in range(83)])
    assert 3 * GB < equal < 7 * GB < blocks < 8.2 * GB


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TransformerShape(0, 768, 12, 50257, 1024), "layers=0"),
        (lambda: TransformerShape(12, 768, 7, 50257, 1024), "hidden=768 is not a multiple"),
        (lambda: activations.activation_elements(GPT2_SMALL, 0), "batch=0"),
        (lambda: activations.working_bytes(GPT2_SMALL, -1), "batch=-1"),
        (lambda: activations.checkpoint_bytes(GPT2_SMALL, 1, interval=0), "interval=0"),
        (lambda: activations.checkpoint_bytes(GPT2_SMALL, 1, partitioned_over=0), "over=0"),
        (lambda: activations.sublinear_bytes([]), r"len\(layer_bytes\)=0"),
        (lambda: activations.sublinear_bytes([1], 0), "interval=0"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
