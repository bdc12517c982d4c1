"""Host memory of GPUs that are only compiled for.

JAX writes into a lowered program which arguments and results lie in host memory, as the shardings
say. Devices of a described GPU have no memories there, and their shardings forget: every argument
would be taken for one on the device, and 12 bytes a parameter with it. So the program is told here
what the layout says. Where devices know their memories (real ones, CPUs, described TPUs) nothing is
changed.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.mlir import ir

from .. import flax_nnx
from ..anatomy import open_laid_out
from ..train_state import layout_of

ATTRIBUTE = "mhlo.memory_kind"


def describe_memories(lowered: jax.stages.Lowered, state: Any, tx: Any = None) -> Any:
    """Write down in which memory a step's state lies, where its devices do not know.

    Args:
      lowered: a step whose first argument and first result are the state; changed in place.
      state: the laid-out state that it was lowered for.
      tx: the wrapped optimizer of a state that has none of its own.

    Returns:
      `lowered`.
    """
    layout = layout_of(state if tx is None else tx)
    if layout.offload is None or layout.mesh.devices.flat[0].addressable_memories():
        return lowered
    places = open_laid_out(state, tx).close(layout.params, layout.opt_state, layout.other)
    places = nnx.split(places)[1] if flax_nnx.is_nnx(state) else places
    kinds = [place.memory for place in jax.tree.leaves(places)]
    counts = [len(jax.tree.leaves(x)) for x in (lowered.args_info, lowered.out_info)]
    arguments, results = ([*kinds, *["device"] * (n - len(kinds))] for n in counts)
    _state_memories(lowered, arguments, results)
    return lowered


def _state_memories(
    lowered: jax.stages.Lowered, arguments: Sequence[str], results: Sequence[str]
) -> None:
    kept: list[int] = sorted(lowered._lowering.compile_args["kept_var_idx"])  # pyright: ignore
    module: Any = lowered.compiler_ir()
    with module.context:
        for operation in module.body.operations:
            name = operation.attributes["sym_name"] if "sym_name" in operation.attributes else None
            if name is not None and ir.StringAttr(name).value == "main":
                _write(operation, "arg_attrs", [arguments[at] for at in kept])
                _write(operation, "res_attrs", results)


def _write(function: Any, which: str, kinds: Sequence[str]) -> None:
    attributes: list[dict[str, Any]] = [{} for _ in kinds]
    if which in function.attributes:
        attributes = [
            {named.name: named.attr for named in ir.DictAttr(each)}
            for each in function.attributes[which]
        ]
    if len(attributes) != len(kinds):
        raise ValueError(
            f"{which}: the program has {len(attributes)}, {len(kinds)} were described."
        )
    function.attributes[which] = ir.ArrayAttr.get(
        [
            ir.DictAttr.get({**known, ATTRIBUTE: ir.StringAttr.get(kind)})
            for known, kind in zip(attributes, kinds, strict=True)
        ]
    )
