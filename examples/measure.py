"""What the examples measure: how far two runs are apart, and bytes where they lie.

Each function prints a line or two and returns the number.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def compare_losses(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference at any step, relative to the first loss."""
    difference = float(np.abs(np.subtract(losses, expected)).max() / abs(expected[0]))
    print(f"  loss in {len(losses)} steps           {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"  differs from one device    {difference:.1e} of the first loss, at most")
    return difference


def compare_arrays(name: str, tree: Any, expected: Any) -> float:
    """The largest difference between two trees of arrays, wherever their parts lie."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    difference = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"  {name + ' differ by':<26} {difference:.1e} at most")
    return difference


def share_on_device(name: str, tree: Any, whole: Any) -> float:
    """Bytes of `tree` on a device, relative to those of `whole`, which lies on one device."""
    held, total = bytes_on_device(tree), bytes_on_device(whole)
    print(f"  {name + ' a device':<26} {held:,} of {total:,} bytes")
    return held / total


def bytes_on_device(tree: Any) -> int:
    """Bytes of all arrays of `tree` on the device that holds the most of them."""
    held = Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())
