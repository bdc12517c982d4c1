"""Seconds of a step against what JAX users write by hand, as the table `step_time.md`.

    python tests/benchmarks/step_time.py            # writes the table; about six minutes

A GPT of 20 million parameters, float32, AdamW, over 2 and 8 virtual CPU devices. Every round runs
one step of each program, in an order that is drawn anew, so that a noisy machine slows all of them;
a ratio is the median over the rounds of this program's seconds over those of the program it is
compared with, in the same round.

  plain data parallel   parameters replicated, the batch split, one `jax.jit`
  hand-written FSDP     parameters and moments split along their largest dim by `NamedSharding`s,
                        the batch split, one `jax.jit`: as JAX's documentation teaches it
  unguarded             `nonfinite="pass"`, as the two above do: a step never leaves the state as it
                        was. Otherwise every new value is chosen against the old one

The last line is the time that calling the returned step takes beyond calling the jitted function
inside it, for a state of as many leaves and no work.
"""

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".md")
sys.path.insert(0, str(ROOT / "examples"))

ROUNDS, ROWS, TOKENS = 9, 16, 64
COMPARED = {
    "explicit, stage 1": "plain data parallel",
    "explicit, stage 1, unguarded": "plain data parallel",
    "annotated, stage 1": "plain data parallel",
    "explicit, stage 3": "hand-written FSDP",
    "explicit, stage 3, unguarded": "hand-written FSDP",
    "annotated, stage 3": "hand-written FSDP",
}


def programs():
    """Name -> (state, function of state and batch that returns both a state and a loss)."""
    from lm.loss import mean_loss
    from lm.model import GPT
    from lm.schema import Model

    import zero_jax

    model = GPT(Model(layers=6, hidden=512, heads=8, sequence_length=TOKENS))
    tx = optax.adamw(1e-3)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (ROWS, TOKENS + 1)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))

    def create(key):
        params = model.init(key, jnp.zeros((1, TOKENS), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, batch):
        return mean_loss(model.apply({"params": params}, batch["inputs"]), batch["targets"])

    def plain_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def gathering_step(state, batch):
        def gathered_loss(params):
            return loss_fn(zero_jax.gather_at_use(params, state), batch)

        loss, grads = jax.value_and_grad(gathered_loss)(state.params)
        return state.apply_gradients(grads=grads), loss

    def by_hand(split):
        abstract = jax.eval_shape(create, jax.random.key(0))

        def lies(leaf):
            dims = [d for d, size in enumerate(leaf.shape) if size % mesh.size == 0]
            if not split or not dims:
                return NamedSharding(mesh, PartitionSpec())
            at = max(dims, key=lambda d: leaf.shape[d])
            return NamedSharding(mesh, PartitionSpec(*[None] * at, "data"))

        shardings = jax.tree.map(lies, abstract)
        state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(
            plain_step,
            in_shardings=(shardings, NamedSharding(mesh, PartitionSpec("data"))),
            out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
        )
        return state, step

    def ours(stage, executor, **options):
        state = zero_jax.init_train_state(
            create, jax.random.key(0), stage=stage, mesh=mesh, executor=executor,
            rules={"blocks/*": "stacked"},
        )  # fmt: skip
        if executor == "annotated":
            return state, jax.jit(gathering_step, donate_argnums=0)
        step = zero_jax.make_train_step(loss_fn, **options)
        return state, lambda state, batch: _loss_of(*step(state, batch))

    made = {"plain data parallel": by_hand(False), "hand-written FSDP": by_hand(True)}
    for executor in ("annotated", "explicit"):
        for stage in (1, 3):
            made[f"{executor}, stage {stage}"] = ours(stage, executor)
    for stage in (1, 3):
        made[f"explicit, stage {stage}, unguarded"] = ours(stage, "explicit", nonfinite="pass")
    return made, batch


def _loss_of(state, metrics):
    return state, metrics.loss


def measure():
    """Ratios of medians on the devices of this process, a line for each program."""
    made, batch = programs()
    states = {name: state for name, (state, _) in made.items()}
    seconds = {name: [] for name in made}
    for round_ in range(ROUNDS + 2):
        for name in random.Random(round_).sample(sorted(made), len(made)):
            started = time.perf_counter()
            states[name], loss = made[name][1](states[name], batch)
            loss.block_until_ready()
            jax.block_until_ready(states[name].params)
            if round_ > 1:  # the first two compile and warm up
                seconds[name].append(time.perf_counter() - started)
    for name, base in COMPARED.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
        middle = statistics.median(ratios)
        low, high = np.quantile(ratios, (0.25, 0.75))
        own = 1000 * statistics.median(seconds[name])
        print(
            f"| {jax.device_count()} | {name} | {base} | {own:.0f} | {middle:.3f} | "
            f"{low:.2f} to {high:.2f} |",
            flush=True,
        )


def dispatch():
    """Microseconds of a call of the returned step beyond one of the jitted function."""
    import zero_jax

    params = {f"w{i}": jnp.ones(8) for i in range(16)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    state = zero_jax.shard_train_state(state, 2, executor="explicit")
    step = zero_jax.make_train_step(
        lambda params, batch: sum(jnp.sum(p) for p in params.values()) * batch.mean(), donate=False
    )
    batch = zero_jax.shard_batch(jnp.ones(8), state)
    jax.block_until_ready(step(state, batch))
    jitted, both = step._jitted, {"step": [], "jitted": []}
    calls = {"step": lambda: step(state, batch), "jitted": lambda: jitted(state, batch, None)}
    for _ in range(300):
        for name, call in calls.items():
            started = time.perf_counter()
            out = call()
            both[name].append(time.perf_counter() - started)
            jax.block_until_ready(out)
    beyond = statistics.median(both["step"]) - statistics.median(both["jitted"])
    print(f"Dispatch beyond the jitted function: {1e6 * beyond:.0f} microseconds.")


def main():
    """Run every part in a process with its own number of devices; write the table."""
    head = (__doc__ or "").strip().split("\n\n")[2].replace("\n", " ")
    columns = ["devices", "program", "against", "ms", "median ratio", "middle half"]
    lines = [
        f"# Seconds of a step against hand-written JAX (jax {jax.__version__}, 2 cores)",
        "",
        head,
        "",
        f"| {' | '.join(columns)} |",
        "|---:|---|---|---:|---:|---|",
    ]
    for devices in (2, 8):
        lines += _run("measure", devices)
    lines += ["", *_run("dispatch", 1)]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(part, devices):
    command = [sys.executable, __file__, part, str(devices)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(out, end="", flush=True)
    return out.splitlines()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    {"measure": measure, "dispatch": dispatch}[sys.argv[1]]()
