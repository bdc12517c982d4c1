"""The house keeps its order: floors, names, documentation, length.

The floors are those of the package docstring: a room imports only its own floor and lower ones.
"""

import ast
import inspect
from pathlib import Path

import pytest

import zero_jax

PACKAGE = Path(zero_jax.__file__).parent
FLOORS = [
    {"stage", "mesh", "partition", "rules", "loss_scale", "precision", "memories"}
    | {"choices", "compat", "offload_policy", "remat"}
    | {"compiler_options", "reporting.tables"},
    {"placement", "typed_keys", "cuts", "layout", "shortfall", "collectives"}
    | {"master_weights"}
    | {"offload.dataflow", "offload.boxes", "offload.grouping", "offload.streams"}
    | {"offload.on_host", "offload.disk", "offload.disk_claim", "offload.disk_array"}
    | {"offload.disk_passes", "offload.disk_update", "offload.disk_state"}
    | {"delayed", "extended_state", "optimizer", "update", "array_like", "at_use", "readings"}
    | {"layers", "layer_loop", "layer_store", "layer_forward", "layer_backward"}
    | {"layer_derivative"},
    {"residence"},
    {"flax_linen", "flax_nnx", "options", "anatomy", "train_state", "batch", "gather_at_use"}
    | {"at_use_nnx", "layers_linen", "layers_nnx", "offload.described"},
    {"step_options", "faults", "subject", "wires", "local_gradients", "gradients"}
    | {"joining", "subject_linen", "subject_nnx", "alike", "rehearsal", "explicit_step"}
    | {"update_report", "disk_step", "train_step"},
    {
        *(
            "reporting." + room
            for room in (
                "audit_table",
                "doctor_table",
                "flights",
                "hlo",
                "hlo_text",
                "hlo_walk",
                "loop_trips",
                "matmul_flops",
                "page",
                "plan_svg",
                "plan_table",
                "plan_words",
                "plots",
                "replica_groups",
                "rings",
                "schedule",
                "wire",
            )
        ),
        *(
            "planning." + room
            for room in (
                "activations",
                "compiler",
                "buffers",
                "communication",
                "doctor",
                "fit",
                "forecast",
                "gpu_target",
                "hardware",
                "host_link",
                "liveness",
                "memory",
                "operations",
                "program",
                "propagation",
                "topology",
                "traced",
                "traffic",
                "traced_traffic",
            )
        ),
    },
    {"checkpoint." + room for room in ("arrays", "leaves", "subject", "compare", "reading")}
    | {"checkpoint.claim", "checkpoint.handler", "checkpoint.manager", "checkpoint.opened"}
    | {"checkpoint.difference", "checkpoint.safetensors", "reporting.checkpoint_table"},
    {"config", "cli", "__main__"},
]
DRAWERS = {"utils", "util", "helpers", "common", "base", "core", "misc"}


def rooms():
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        ".".join(f.relative_to(PACKAGE).with_suffix("").parts): f
        for f in files
        if f.name != "__init__.py"
    }


def floor_of(room):
    return next(i for i, floor in enumerate(FLOORS) if room in floor)


def imports(room, path):
    """Rooms of this package that `path` imports, at any depth of nesting."""
    parents = room.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        start = parents[: len(parents) + 1 - node.level]
        module = start + (node.module.split(".") if node.module else [])
        names = [module] if node.module else [[*module, alias.name] for alias in node.names]
        yield from (".".join(name) for name in names)


def test_every_room_is_on_a_floor():
    assert set(rooms()) == set().union(*FLOORS)
    docstring = zero_jax.__doc__ or ""
    for room in rooms():
        assert room.split(".")[-1] in docstring, room


@pytest.mark.parametrize("room", rooms())
def test_imports_go_down(room):
    for other in imports(room, rooms()[room]):
        if other in rooms():
            assert floor_of(other) <= floor_of(room), f"{room} imports {other}"


def imported_packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("room", rooms())
def test_matplotlib_in_plots_only_and_no_prints(room):
    path = rooms()[room]
    assert ("matplotlib" in imported_packages(path)) == (room == "reporting.plots")
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n for n in calls if getattr(n.func, "id", None) == "print"]


@pytest.mark.parametrize("room", rooms())
def test_orbax_for_checkpoints_only(room):
    assert "orbax" not in imported_packages(rooms()[room]) or room.startswith("checkpoint.")


@pytest.mark.parametrize("room", rooms())
def test_length_and_names(room):
    assert len(rooms()[room].read_text().splitlines()) <= 300
    assert not DRAWERS & set(room.split("."))


@pytest.mark.parametrize("name", [n for n in dir(zero_jax) if not n.startswith("_")])
def test_public_names_are_documented(name):
    thing = getattr(zero_jax, name)
    if inspect.ismodule(thing):
        return
    assert inspect.getdoc(thing)
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        if inspect.isfunction(value) and not member.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{member}"
