"""A loop over stacked layers that gathers the next layer while one computes: `scan_layers`.

ZeRO stage 3 gathers a layer's parameters before the layer runs and reduce-scatters their gradient
after it (ZeRO, arXiv 1910.02054, sections 5.3 and 7.2.2). In a plain `lax.scan` over layers the
gather of a layer can start only in the layer's own trip, with nothing to hide behind. This loop
starts it one layer earlier, in both passes, and reduces a gradient one layer later (`layer_loop`).
It is the same function at stages 0 to 3, and outside of any ZeRO step, where nothing is gathered.
The compiler has to be told to use what it is given: `compiler_options`.

The backward pass is written by hand (`jax.custom_vjp`): from each layer only its input is kept, and
what lies between is computed again. A `Remat` says how much is kept, and whether it is split over
the devices of tensor parallelism or moved to the host:

  every  saved       kept                                     forward passes
  1      nothing     n inputs                                 2
  1      dots, ...   n inputs, n times what it saves          1 to 2
  k      nothing     n/k + k inputs                           3
  k      all         n/k inputs, k times all inside a layer   2
  k      dots, ...   n/k + k inputs, k times what it saves    2 to 3

The fourth row is the schedule of Chen et al. (arXiv 1604.06174, section 3); the best k is about
sqrt(n). With k > 1 a layer is gathered three times a step instead of two, the last of a group
twice.

Not here: forward-mode and second derivatives, layers of different shapes, layers whose results
depend on effects.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.extend.core
import jax.numpy as jnp

from .at_use import Partitioned, read_stack
from .layer_derivative import differentiable
from .layer_loop import Arrays, Local, Program, at, inexact
from .remat import Policy, Remat

Tree = Any


def scan_layers(
    fn: Callable[..., Any],
    stacked: Tree,
    x: Tree,
    *broadcast: Tree,
    rng: jax.Array | None = None,
    remat: Remat | None = None,
    remat_policy: Policy | None = None,
    checkpoint_every: int | Literal["sqrt"] = 1,
) -> Any:
    """Run `x = fn(layer, x, *broadcast)` for each layer of a stack, gathering the next meanwhile.

    Args:
      fn: one layer: `fn(params, x, *broadcast)`, with a key more if `rng` is given. Returns the
        next x, or a pair of it and the layer's outputs (losses, statistics; any tree).
      stacked: the layers' parameters, each leaf with a leading dim of the number of layers. Inside
        the explicit step the leaves are parameters on their way (`Partitioned`), and `fn` gets
        them gathered, in the compute dtype; any other array is passed as it is.
      x: what goes from layer to layer: any tree of arrays, whose shapes and dtypes `fn` keeps.
      broadcast: more inputs, the same for every layer: arrays or trees of arrays. Their gradients
        are summed over the layers, in fp32 if theirs is a narrower dtype.
      rng: a key; layer i gets `jax.random.fold_in(rng, i)`.
      remat: what is kept for the backward pass, and where; by default each layer's input, on the
        device. See the module docstring.
      remat_policy, checkpoint_every: the short way to say `Remat(remat_policy, checkpoint_every)`.

    Returns:
      The last x; or (x, outputs), each output stacked over the layers.

    Raises:
      ValueError: no layers, stacks of different lengths, a layer that changes x, a number below 1,
        or an axis that x cannot be split over.

    Source: ZeRO, arXiv 1910.02054, section 7.2.2; Chen et al., arXiv 1604.06174, section 3.

    >>> import jax, jax.numpy as jnp
    >>> weights = jnp.ones((12, 4, 4))
    >>> scan_layers(lambda w, x: x + jnp.tanh(x @ w), weights, jnp.ones((2, 4))).shape
    (2, 4)
    """
    remat = _one_remat(remat, remat_policy, checkpoint_every)
    leaves, tree = jax.tree.flatten(stacked, is_leaf=lambda leaf: isinstance(leaf, Partitioned))
    handles = [_handle(leaf) for leaf in leaves]
    count = _count(stacked, handles)
    x_leaves, x_tree = jax.tree.flatten(x)
    x_leaves = [_array(leaf) for leaf in x_leaves]
    given, given_tree = jax.tree.flatten(broadcast)
    given = [_array(leaf) for leaf in given]
    outputs: list[Any] = []

    def one_layer(whole: Arrays, x_leaves: Arrays, given: Arrays, key: Any) -> Any:
        keys = () if key is None else (key,)
        before = x_tree.unflatten(x_leaves)
        result = fn(tree.unflatten(whole), before, *given_tree.unflatten(given), *keys)
        after, out, has_out = _split(result, before)
        out_leaves, out_tree = jax.tree.flatten(jax.tree.map(_array, out))
        outputs[:] = [has_out, out_tree]
        return jax.tree.leaves(after), out_leaves

    traced = _trace(one_layer, [h.one() for h in handles], x_leaves, given, rng)
    program = Program(
        layer=traced.layer,
        wires=tuple(h.wire for h in handles),
        trained=tuple(h.carrier is not None for h in handles),
        extras_wanted=(),
        count=count,
        every=_every(remat, count),
        policy=None if remat.saved == "nothing" else remat.policy,
        remat=remat,
        outs=traced.outs,
    )
    values = [read_stack(h.value) for h in handles]
    carriers = [h.carrier for h in handles if h.carrier is not None]
    extras = [*given, *traced.closed_over]
    x_leaves, outs = differentiable(program)(values, carriers, x_leaves, extras, rng)
    x, (has_outs, out_tree) = x_tree.unflatten(x_leaves), outputs
    return (x, out_tree.unflatten(outs)) if has_outs else x


@dataclass(frozen=True)
class _Handle:
    """A leaf of the stack. A plain array carries its own gradient; its `value` does not."""

    value: Any
    carrier: Any
    wire: Any

    def one(self) -> Any:
        """Shape and dtype of one layer of it, gathered."""
        return jax.eval_shape(lambda value: self.wire.gather(at(value, 0)), self.value)


def _handle(leaf: Any) -> _Handle:
    if isinstance(leaf, Partitioned):
        return _Handle(leaf.value, leaf.carrier, leaf.wire.layer())
    leaf = _array(leaf)
    return _Handle(leaf, leaf if inexact(leaf) else None, Local())


def _array(leaf: Any) -> Any:
    """An array of a dtype that a loop can keep: `1.0` is weakly typed."""
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if array.weak_type else array


@dataclass(frozen=True)
class _Traced:
    """One layer as a function of flat lists; what `fn` closed over comes after the extras."""

    layer: Callable[..., tuple[Arrays, Arrays]]
    outs: tuple[Any, ...]
    closed_over: Arrays


def _trace(one_layer: Callable[..., Any], whole: Arrays, x: Arrays, given: Arrays, rng: Any):
    """Trace `fn` once, so that both passes run the same, and gradients reach what it closed over.

    Returns:
      `_Traced`.
    """
    traced, shapes = jax.make_jaxpr(one_layer, return_shape=True)(whole, x, given, rng)

    def layer(whole: Arrays, x: Arrays, extras: Arrays, key: Any) -> tuple[Arrays, Arrays]:
        closed = jax.extend.core.ClosedJaxpr(traced.jaxpr, extras[len(given) :])
        keys = [] if key is None else [key]
        results = jax.extend.core.jaxpr_as_fun(closed)(*whole, *x, *extras[: len(given)], *keys)
        return list(results[: len(x)]), list(results[len(x) :])

    return _Traced(layer, tuple(shapes[1]), list(traced.consts))


def _split(result: Any, before: Tree) -> tuple[Tree, Any, bool]:
    """Read what `fn` returned: the next x, the outputs, and whether there are any.

    No finite tree is a pair whose first has the tree's own structure, so the two cannot be mixed
    up.
    """
    want = jax.tree.structure(before)
    after, out, alone = result, None, jax.tree.structure(result) == want
    if not alone:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise _changed(f"it returned {jax.tree.structure(result)}", want)
        after, out = result
        if jax.tree.structure(after) != want:
            raise _changed(
                f"the first of the pair it returned is {jax.tree.structure(after)}", want
            )
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        new = jnp.asarray(new)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"scan_layers: fn changed x{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {new.dtype}{list(new.shape)}; every layer must "
                "return what it was given. Cast or project inside fn, or run this layer outside "
                "of the loop."
            )
    return jax.tree.map(jnp.asarray, after), out, not alone


def _changed(what: str, want: Any) -> ValueError:
    return ValueError(
        f"scan_layers: fn was given x of the structure {want}, {what}. Return the next x, or a "
        "pair of it and the layer's outputs."
    )


def _count(stacked: Tree, handles: list[_Handle]) -> int:
    """Number of layers, which every leaf must have."""
    if not handles:
        raise ValueError(
            "scan_layers: stacked has no leaves, so there is no number of layers. Pass the "
            "layers' parameters, each stacked along its first dim."
        )
    paths = jax.tree.leaves_with_path(stacked, is_leaf=lambda leaf: isinstance(leaf, Partitioned))
    counts = {}
    for (path, _), handle in zip(paths, handles, strict=True):
        name = jax.tree_util.keystr(path) or "the only leaf"
        if handle.value.ndim == 0:
            raise ValueError(
                f"scan_layers: stacked{name} is a scalar; every leaf needs a leading dim of the "
                "number of layers. Pass what all layers share as a broadcast input."
            )
        counts.setdefault(handle.value.shape[0], name)
    if len(counts) > 1:
        (one, here), (other, there) = list(counts.items())[:2]
        raise ValueError(
            f"scan_layers: stacked{here} has {one} layers and stacked{there} has {other}; all "
            "leaves must be stacked alike. Pass what all layers share as a broadcast input."
        )
    (count,) = counts
    if count == 0:
        raise ValueError("scan_layers: stacked has 0 layers, 1 or more were expected. Pass x on.")
    return count


def _one_remat(remat: Remat | None, policy: Policy | None, every: int | Literal["sqrt"]) -> Remat:
    """The two arguments that say a part of it, as the one that says it all."""
    if remat is None:
        return Remat("nothing" if policy is None else policy, every)
    if policy is not None or every != 1:
        raise ValueError(
            f"scan_layers: remat is {remat}, and remat_policy or checkpoint_every is given, too; "
            "one of them was expected. Say it as Remat(saved=remat_policy, every=checkpoint_every)."
        )
    return remat


def _every(remat: Remat, count: int) -> int:
    """Layers between two kept inputs."""
    if remat.every == "sqrt":
        return max(1, round(math.sqrt(count)))
    return min(remat.every, count)
