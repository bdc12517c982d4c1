"""Floating-point operations of the matrix products in a compiled module.

A product of (m, k) and (k, n) is 2 m k n operations, forward or backward, whatever the compiler
made of it: `dot` (also inside the fusions that become Triton, CUTLASS or YNN kernels), a GPU
custom-call to cuBLAS, or on TPU a `convolution`, where batch dims appear as a window with dilation
that touches each element of the batch once. Only window positions that hold data are counted.

Not seen: products inside other custom-calls (cuDNN attention, Pallas kernels), Winograd and FFT
convolutions (counted as direct ones), `ragged-dot`, everything that is not a product.
"""

import re
from math import prod

import numpy as np

from .hlo_text import Computation, Instruction


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Operations of the product that one instruction is; 0 of any other, and of what it calls."""
    match instruction.opcode:
        case "dot":
            return _dot(instruction, computation)
        case "convolution":
            return _convolution(instruction, computation)
        case "custom-call" if 'target="__cublas' in instruction.attributes:
            return _gemm(instruction, computation)
    return 0


def _dot(dot: Instruction, computation: Computation) -> int:
    left = computation.by_name[dot.operands[0]].arrays[0]
    contracted = _numbers(dot.attribute("lhs_contracting_dims"))
    return 2 * dot.arrays[0].size * prod(left.dims[d] for d in contracted)


def _gemm(call: Instruction, computation: Computation) -> int:
    """The first array of the result is the product, the first operand its left side."""
    left = computation.by_name[call.operands[0]].arrays[0]
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
    contracted = _numbers(found[1] if found else None)
    return 2 * call.arrays[0].size * prod(left.dims[d] for d in contracted)


def _convolution(conv: Instruction, computation: Computation) -> int:
    """Each output sums over input features and over the window positions that hold data."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", conv.attribute("dim_labels") or "")
    assert labels is not None, conv.attributes
    left_labels, right_labels, out_labels = labels.groups()
    left, right = (computation.by_name[o].arrays[0] for o in conv.operands[:2])
    out = conv.arrays[0]
    window = conv.attribute("window") or "{}"
    # Per spatial dim, pairs of an output position and a window position stand for the positions.
    outputs, summed = out.size, right.dims[right_labels.index("i")]
    for axis in range(sum(label.isdigit() for label in left_labels)):
        size = left.dims[left_labels.index(str(axis))]
        positions = out.dims[out_labels.index(str(axis))]
        outputs //= max(positions, 1)
        summed *= _positions(window, axis, size, positions)
    return 2 * outputs * summed


def _positions(window: str, axis: int, size: int, out: int) -> int:
    """Pairs of an output position and a window element that meet data, along one spatial dim."""

    def field(key: str, default: str) -> str:
        found = re.search(rf"{key}=(\S+?)[ }}]", window)
        return found[1].split("x")[axis] if found else default

    low = int(field("pad", "0_0").split("_")[0])
    dilation = int(field("lhs_dilate", "1"))
    starts = np.arange(out)[:, None] * int(field("stride", "1")) - low
    taps = np.arange(int(field("size", "1")))[None, :] * int(field("rhs_dilate", "1"))
    at = starts + taps
    return int(((at >= 0) & (at < size * dilation) & (at % dilation == 0)).sum())


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]
