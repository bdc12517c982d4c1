"""The check vocabulary of the cases: LOSS, CHANGE, BYTES, one compile, steady placement.

All of it is measured on arrays and executables, never read off a layout.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

Tree = Any


def loss_error(losses: list[float], reference: list[float]) -> float:
    """LOSS: the largest relative error over all steps."""
    pairs = zip(losses, reference, strict=True)
    return max(abs(loss - expected) / abs(expected) for loss, expected in pairs)


def change_error(start: Tree, end: Tree, reference: Tree) -> float:
    """CHANGE: ||end - reference|| / ||reference - start|| over all parameters."""
    return distance(end, reference) / distance(reference, start)


def relative_error(tree: Tree, reference: Tree) -> float:
    """||tree - reference|| / ||reference|| over all leaves."""
    return distance(tree, reference) / distance(reference, jax.tree.map(np.zeros_like, reference))


def distance(a: Tree, b: Tree) -> float:
    """||a - b|| over all leaves, without those whose gradient is exactly zero in theory.

    These are the biases of attention keys and of a convolution before a BatchNorm: Adam turns the
    rounding noise of their gradient into full steps, on one device as on eight.
    """
    squares = 0.0
    for (keys, x), y in zip(
        jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True
    ):
        if not path_of(keys).endswith(("key/bias", "conv/bias")):
            wide = np.complex128 if np.iscomplexobj(x) else np.float64
            squares += np.linalg.norm((np.asarray(x, wide) - np.asarray(y, wide)).ravel()) ** 2
    return math.sqrt(squares)


def bytes_on_fullest_device(tree: Tree) -> int:
    """BYTES: what the device that holds most of `tree` holds, padding included."""
    held: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values(), default=0)


def total_bytes(tree: Tree) -> int:
    """Bytes of the logical tree, on one device."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


MIN_SIZE = 8
"""Leaves with fewer elements stay whole."""


def bytes_of_a_share(tree: Tree, n: int) -> float:
    """The law: what a device may hold of a logical `tree` that is partitioned over `n`.

    1 % over an even share, and what no cut by leaves can avoid: a last element of each leaf that is
    cut, and the leaves that are too small to be.
    """
    leaves = jax.tree.leaves(tree)
    even_share = total_bytes(tree) / n
    a_last_element_each = sum(x.dtype.itemsize for x in leaves if x.size >= MIN_SIZE)
    too_small_to_cut = sum(x.nbytes for x in leaves if x.size < MIN_SIZE)
    return 1.01 * even_share + a_last_element_each + too_small_to_cut


def copy(tree: Tree) -> Tree:
    """Whole leaves in host memory, safe from a donation of the arrays they came from."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def placed(tree: Tree) -> dict[str, tuple[Any, ...]]:
    """Path -> shape, dtype, sharding of every leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_of(keys): (x.shape, x.dtype, x.sharding) for keys, x in leaves}


def on_every_device(array: jax.Array) -> list[np.ndarray]:
    """The shard of each device, device by device."""
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def path_of(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


@contextlib.contextmanager
def counting_compiles() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many times XLA has compiled since."""
    seen = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(seen)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
