"""Flax partitioning metadata: boxes stay, the tensor axis is kept, the data axis is added."""

import functools
import math

import flax.linen as nn
import jax
import numpy as np
import pytest
from cases import table
from cases.driving import closes_over_tx, train
from cases.measures import loss_error
from jax.sharding import Mesh

DATA, MODEL = 4, 2
KERNELS = {"Dense_1": (None, "model"), "Dense_0": ("model", None)}
"""Megatron's cut of an MLP: the first layer by columns, the second by rows."""


def _build(**options):
    kernel = nn.linear.default_kernel_init
    return table.CASES["c18"].build(
        up_init=nn.with_partitioning(kernel, KERNELS["Dense_1"]),
        down_init=nn.with_partitioning(kernel, KERNELS["Dense_0"]),
        **options,
    )


@functools.cache
def _reference():
    opened = closes_over_tx(_build, None, None)
    return train(opened, [opened.built["batch"](i) for i in range(8)])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_boxes_survive_and_both_axes_cut(stage):
    mesh = Mesh(np.array(jax.devices()).reshape(DATA, MODEL), ("data", "model"))
    opened = closes_over_tx(_build, stage, mesh)
    run = train(opened, [opened.built["batch"](i) for i in range(8)])
    assert loss_error(run.losses, _reference().losses) <= 1e-5
    assert sum(run.compiles[1:]) == 0 and run.strayed == []

    params, opt_state = opened.read(run.state)
    adam = opt_state.inner_state[0]
    for layer, names in KERNELS.items():
        for tree, parts in ((params, DATA if stage == 3 else 1), (adam.mu, DATA), (adam.nu, DATA)):
            box = tree[layer]["kernel"]
            assert isinstance(box, nn.Partitioned) and box.names == names
            spec, shape = box.value.sharding.spec, box.value.sharding.mesh.shape
            assert spec[names.index("model")] == "model"
            data = [a for a in jax.tree.leaves(tuple(spec)) if a != "model"]
            assert math.prod(shape[a] for a in data) == parts
            assert box.value.addressable_shards[0].data.size == 28 * 70 / (MODEL * parts)
