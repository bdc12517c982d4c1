"""Write the HLO texts beside this file: our own small programs, as each compiler printed them.

    python tests/reporting/hlo/make_texts.py            all that this version of jax can
    python tests/reporting/hlo/make_texts.py v5e_pref   those whose name has this in it

Needs the extra `plan`. A name is TARGET_PROGRAM_JAX. The texts were made with jax and jaxlib 0.10.2
and 0.12.0.1 and their GPU plugins, and libtpu 0.0.52. Lines are what the compiler printed, less
what no test reads: source positions, frontend attributes, and of a backend's JSON all but KEPT.
tpu7x needs jax 0.12: the older jaxlib cannot read what today's libtpu returns.
"""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parents[2]))
from reporting.hlo import programs

jax.config.update("jax_num_cpu_devices", 8)

KEPT = (
    r'"known_trip_count":\{"n":"\d+"\}',
    r'"is_sync":\w+',
    r'"async_collective_fusion_config":\{[^}]*\}',
    r'"dot_dimension_numbers":\{[^}]*\}',
)

FLAT = {"data": -1}
GRID = {"a": 2, "b": 4}
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
RINGS = {"xla_gpu_threshold_for_windowed_einsum_mib": 0}
TEXTS = [
    ("cpu:8", FLAT, programs.every_kind, None),
    ("h100:8", FLAT, programs.every_kind, None),
    ("v5p:2x2x2", FLAT, programs.every_kind, None),
    ("tpu7x:2x2x1", FLAT, programs.every_kind, None),
    ("cpu:8", FLAT, programs.loops, None),
    ("h100:8", FLAT, programs.loops, None),
    ("v5p:2x2x2", FLAT, programs.loops, None),
    ("tpu7x:2x2x1", FLAT, programs.loops, None),
    ("h100:8", FLAT, programs.prefetch, None),
    ("v5e:4x4", FLAT, programs.prefetch, None),
    ("tpu7x:2x2x1", FLAT, programs.prefetch, None),
    ("h100:8", FLAT, programs.gradients, None),
    ("cpu:8", FLAT, programs.constraints, None),
    ("h100:8", FLAT, programs.constraints, None),
    ("v5p:2x2x2", FLAT, programs.constraints, None),
    ("v5e:4x4", FLAT, programs.constraints, None),
    ("v5e:4x4", FLAT, programs.gathered_product, None),
    ("h100:8", FLAT, programs.gathered_product, RINGS),
    ("v5p:2x2x2", {"x": 2, "y": 2, "z": 2}, programs.one_axis, None),
    ("v6e:4x4", {"x": 4, "y": 4}, programs.one_axis, None),
    ("cpu:8", GRID, programs.two_axes, None),
    ("cpu:8", GRID, programs.moved, None),
    ("cpu:8", FLAT, programs.part_of_axis, None),
    ("cpu:8", FLAT, programs.branches, None),
    ("cpu:8", FLAT, programs.products, None),
    ("h100:8", FLAT, programs.products, NO_TRITON),
    ("v5p:2x2x2", FLAT, programs.products, None),
]


def make_mesh(target, axes):
    """Devices in the order JAX lists them; a mesh called x, y, z lies on the torus as it is."""
    from zero_jax.planning.topology import compile_only_devices

    devices = list(compile_only_devices(target))
    if "x" in axes:
        devices.sort(key=lambda device: tuple(device.coords))
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def stripped(text):
    """The text without source positions and without what no test reads."""
    header, _, body = text.partition("\n")
    body = re.sub(r"(?s)^\s*FileNames\n.*?\n\n\n", "\n", body)
    body = re.sub(r", metadata=\{(op_name=\"[^\"]*\")?[^}]*\}", _named, body)
    body = re.sub(r", (frontend_attributes|origin)=\{[^}]*\}", "", body)
    body = re.sub(r", backend_config=(\{.*)$", _kept_config, body, flags=re.M)
    header = re.sub(r", (input_output_alias|entry_computation_layout)=\{.*\}(?=, \w+=)", "", header)
    return header + "\n" + body


def _named(found):
    return f", metadata={{{found[1]}}}" if found[1] else ""


def _kept_config(found):
    kept = [match[0] for key in KEPT for match in re.finditer(key, found[1])]
    return f", backend_config={{{','.join(kept)}}}" if kept else ""


if __name__ == "__main__":
    version = ".".join(jax.__version__.split(".")[:2])
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for target, axes, program, options in TEXTS:
        path = Path(__file__).parent / f"{target.split(':')[0]}_{program.__name__}_{version}.txt"
        if wanted not in path.name or (target.startswith("tpu7x") and version == "0.10"):
            continue
        step, args = program(make_mesh(target, axes))
        text = stripped(step.lower(*args).compile(compiler_options=options).as_text())
        path.write_text(text)
        sys.stdout.write(f"{path.name}: {len(text)} bytes\n")
