"""The programs with the library's own step: what `make_train_step` is given beside a loss.

`driving` has the same programs with their own steps. Here a program gives its loss, and what its
step does besides is said in options. `explicit` opens them, `explicit_run` trains them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cases.programs import c12_moe_unused_experts as moe
from flax.core import freeze

import zero_jax

Built = dict[str, Any]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Means:
    """How a program is put to `make_train_step`.

    Attributes:
      loss: (what `build` returned, axes of the batch) -> the loss of one device's rows.
      options: keyword arguments of `make_train_step`.
    """

    loss: Callable[[Built, Axes], Any] = lambda built, axes: built["loss_fn"]
    options: Mapping[str, Any] = field(default_factory=dict)


def _with_statistics(built: Built, axes: Axes) -> Any:
    """C02: BatchNorm's statistics go in by name and come back in the aux."""

    def loss_fn(params, batch, *, batch_stats):
        loss, changed = built["loss_fn"](params, batch_stats, batch)
        return loss, {"batch_stats": changed}

    return loss_fn


def _average(state: Any) -> Any:
    """C02: the moving average, of the updated parameters."""
    d = state.ema_decay
    ema = jax.tree.map(lambda e, p: d * e + (1 - d) * p, state.ema, freeze(state.params))
    return state.replace(ema=ema)


def _balanced(built: Built, axes: Axes) -> Any:
    """C12: the balance term is a product of two means over the whole batch, so it takes them so."""

    def loss_fn(params, batch):
        logits, load = moe.forward(params, batch["x"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        routed, probable = zero_jax.mean_over_batch(load)
        return nll.mean() + 0.05 * moe.E * jnp.sum(routed * probable)

    return loss_fn


def _with_tables(built: Built, axes: Axes) -> Any:
    """C15: tables and key are read; a device takes its rows of the whole batch's noise."""

    def loss_fn(params, batch, *, tables, rng):
        rows = batch["y"].size
        whole = 0.01 * jax.random.normal(
            jax.random.split(rng)[1], (rows * jax.lax.axis_size(axes),)
        )
        noise = jax.lax.dynamic_slice_in_dim(whole, rows * jax.lax.axis_index(axes), rows)
        error = built["forward"](params, tables, batch["ids"]) - batch["y"] - noise
        return jnp.mean(error**2)

    return loss_fn


def _next_keys(state: Any) -> Any:
    """C15: both keys, one on."""
    rng, _ = jax.random.split(state.rng)
    return state.replace(rng=rng, old_rng=jax.random.split(state.old_rng, 1)[0])


PLAIN = {"regather": "keep"}
"""Functions of a dict of arrays, in no module: at stage 3 gathered once, and said so."""

MEANS = {
    "c01": Means(),
    "c02": Means(
        _with_statistics,
        {"has_aux": True, "collections": {"batch_stats": "mean"}, "after_update": _average},
    ),
    "c03": Means(options=PLAIN),
    "c04": Means(options={"frozen": lambda path: path.startswith("backbone")}),
    "c05": Means(lambda built, axes: built["loss_sum_and_weight"]),
    "c08": Means(),
    "c11": Means(options=PLAIN | {"transform_grads": lambda g: jax.tree.map(jnp.conj, g)}),
    "c12": Means(_balanced, PLAIN),
    "c13": Means(),
    "c15": Means(
        _with_tables,
        PLAIN | {"collections": {"tables": "read", "rng": "read"}, "after_update": _next_keys},
    ),
    "c18": Means(),
    "c19": Means(options=PLAIN | {"nonfinite": "pass"}),
}
"""By name; C10 has two states and two steps, in `explicit`."""
