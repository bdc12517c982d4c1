"""The smallest change that fits, found on a small network over 8 virtual devices."""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import plan_lm
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from lm.microbatches import value_and_grad

import zero_jax
from zero_jax.planning import fit
from zero_jax.planning.fit import Planner, make_planner
from zero_jax.planning.forecast import Compiled, lay_out
from zero_jax.planning.program import Choice, Program
from zero_jax.planning.topology import parse_topology

CONFIG = Path("network.toml")
PLENTY = 2**40


class Layer(nn.Module):
    """A residual layer, four times as wide inside: what recomputing it saves."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(4 * x.shape[-1])(x)))


class Network(nn.Module):
    """Two layers and a head."""

    remat: bool

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = (nn.remat(Layer) if self.remat else Layer)()(x)
        return nn.Dense(1)(x)


@dataclass(frozen=True)
class Builder:
    """Builds the network: `own` is what its configuration would say."""

    own: Choice = Choice(0, False, 1)
    rows: int = 128
    width: int = 64
    gathers: bool = True

    def __call__(self, config, overrides, choice, devices) -> Program:
        choice = choice or self.own
        model = Network(choice.remat)

        def create():
            params = model.init(jax.random.key(0), jnp.zeros((1, self.width)))["params"]
            return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

        def step(state, batch):
            def loss(params, x):
                params = zero_jax.gather_at_use(params, state) if self.gathers else params
                return (state.apply_fn({"params": params}, x) ** 2).mean()

            loss, grads = value_and_grad(loss, state.params, batch, choice.microbatches)
            return state.apply_gradients(grads=grads), loss

        return Program(
            name=config.stem,
            choice=choice,
            create=create,
            arguments=(),
            step=step,
            batch=jax.ShapeDtypeStruct((self.rows, self.width), jnp.float32),
            rows=self.rows,
            options={"mesh": Mesh(devices, ("data",))},
        )


OWN = Choice(0, False, 1)
WIDE = Builder(OWN, rows=128, width=256)
ONE_ROW_EACH = Builder(OWN, rows=8)
MANY_ROWS = Builder(OWN, rows=8 * 4 * 127, width=64)  # 508 on each device: 1, 2, 4 microbatches
ODD_ROWS = Builder(OWN, rows=8 * 511, width=32)  # 511 on each device: no microbatches


def planner(builder, memory_bytes=PLENTY) -> Planner:
    return make_planner(builder, CONFIG, "cpu:8", memory_bytes=memory_bytes)


def changes(choice: Choice, own: Choice) -> int:
    return sum(getattr(choice, name) != getattr(own, name) for name in vars(own))


@functools.cache
def peaks_within(builder, number=3) -> dict[Choice, int]:
    """Predicted peaks of all choices that differ from `OWN` in at most so many things."""
    choices = [
        Choice(stage, remat, parts)
        for stage in range(4)
        for remat in (False, True)
        for parts in (1, 2, 4, 8, 16)
        if builder.rows // 8 % parts == 0
    ]
    few = [c for c in choices if changes(c, OWN) <= number]
    return {c: planner(builder).forecast(c).peak_bytes for c in few}


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        (WIDE, Choice(3, False, 1)),
        (ODD_ROWS, Choice(0, True, 1)),
        (MANY_ROWS, Choice(0, False, 4)),
        (MANY_ROWS, Choice(3, False, 4)),
    ],
)
def test_the_smallest_change_that_fits_is_found(builder, expected):
    """Memory is just that of the expected candidate; none with as few changes needs as little."""
    peaks = peaks_within(builder, changes(expected, OWN))
    memory_bytes = peaks[expected]
    assert [c for c, peak in peaks.items() if peak <= memory_bytes] == [expected]

    found = fit.plan(planner(builder, memory_bytes))
    assert found.smallest_change is not None and found.smallest_change.choice == expected
    assert found.smallest_change.missing_bytes == 0 and found.smallest_change.fits
    (own,) = found.forecasts
    assert own.choice == OWN and own.missing_bytes == peaks[OWN] - memory_bytes
    assert found.advice == f"The smallest change that fits: {expected} instead of {OWN}."


def test_nothing_fits_by_how_much_the_best_is_short():
    peaks = peaks_within(ODD_ROWS)
    best = min(peaks, key=lambda c: peaks[c])
    found = fit.plan(planner(ODD_ROWS, peaks[best] - 3 * 2**10))
    assert found.smallest_change is None
    assert found.advice.startswith(f"Nothing fits: {best} needs least")
    assert "is short of 3.00 KiB on each device" in found.advice


def test_what_fits_as_it_is_is_not_changed():
    found = fit.plan(planner(Builder(Choice(2, True, 4))), [3, 0])
    assert [f.choice for f in found.forecasts] == [Choice(3, True, 4), Choice(0, True, 4)]
    assert found.smallest_change is not None
    assert found.smallest_change.choice == Choice(2, True, 4)
    assert found.advice == "Fits as it is (stage 2, remat, 4 microbatches)."
    width = Builder.width
    layer = width * 4 * width + 4 * width + 4 * width * width + width
    assert found.parameters == 2 * layer + width + 1
    assert (found.program, found.topology, found.memory_bytes) == ("network", "cpu:8", PLENTY)
    assert "take 4 + 4 + 8" in found.convention  # float32, and Adam's two moments


def test_the_states_of_a_forecast_are_exact():
    """Stage 0 whole, Adam's two moments and a count; a step's time is not known on a CPU."""
    f = planner(Builder()).forecast(OWN)
    params_bytes, rows_bytes = 4 * f.parameters, Builder.rows // 8 * Builder.width * 4
    assert (f.params_bytes, f.grads_bytes) == (params_bytes, params_bytes)
    assert f.optimizer_bytes == 2 * params_bytes + 4
    assert f.other_bytes == rows_bytes + 4  # the batch, and the state's own count of steps
    assert f.peak_bytes > 4 * params_bytes and math.isnan(f.step_seconds)


def test_planning_allocates_nothing():
    """`create` takes no argument and its devices are here: its state is described all the same."""
    before = len(jax.live_arrays())
    program = planner(Builder()).program(Choice(3, False, 1))
    state, batch, layout = lay_out(program)
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert layout.size == 8 and len(jax.live_arrays()) == before


def test_compiling_verifies_the_forecasts_and_the_change():
    """One byte less than stage 2 needs: stage 3 is the smallest change, says the compiler too."""
    memory_bytes = peaks_within(WIDE, 1)[Choice(2, False, 1)] - 1
    found = fit.plan(planner(WIDE, memory_bytes), [1], compile=True)
    asked, change = found.forecasts[0], found.smallest_change
    assert change is not None and change.choice == Choice(3, False, 1)
    for f in (asked, change):
        assert f.compiled is not None
        assert f.compiled.argument_bytes == f.params_bytes + f.optimizer_bytes + f.other_bytes
        assert f.compiled.wire_bytes > 0 and f.compiled.host_bytes == 0
        assert f.missing_bytes == max(0, f.compiled.peak_bytes - memory_bytes)
    assert change.fits and not asked.fits


@functools.cache
def some_forecast():
    return planner(Builder(), 100).forecast(OWN)


@dataclass(frozen=True)
class Told(Planner):
    """A planner that is told its forecasts: bytes and seconds of each choice."""

    peaks: dict[Choice, int] | None = None
    seconds: dict[Choice, float] | None = None

    def foresee(self, choice, *, compile=False):
        assert self.peaks is not None and self.seconds is not None
        made = some_forecast()
        other = self.peaks.get(choice, PLENTY) - made.peak_bytes + made.other_bytes
        seconds = self.seconds.get(choice, 1.0)
        return replace(made, choice=choice, other_bytes=other, step_seconds=seconds)


def told(peaks, seconds, builder=ONE_ROW_EACH) -> Told:
    return Told(**vars(planner(builder, 100)), peaks=peaks, seconds=seconds)


def smallest(told: Told, **options) -> Choice | None:
    found, _ = fit.find_smallest_change(told, told.program(), **options)
    return None if found is None else found.choice


@dataclass(frozen=True)
class Offloading(Builder):
    """The network, with its optimizer state on the host if that is chosen; it keeps parameters."""

    def __call__(self, config, overrides, choice, devices) -> Program:
        made = super().__call__(config, overrides, choice, devices)
        if made.choice.offload == "none":
            return made
        options = {**made.options, "offload": zero_jax.HostMemory()}
        return replace(made, options=options)


def test_what_is_on_the_device_stays_there_if_another_change_suffices():
    """The optimizer state goes to the host where nothing else fits; parameters cannot here."""
    builder = Offloading(OWN, rows=8, width=256)
    resident = min(peaks_within(replace(builder), 3).values())
    found = fit.plan(planner(builder, resident))
    assert found.smallest_change is not None and found.notes == ()
    assert found.smallest_change.choice.offload == "none"

    found = fit.plan(planner(builder, resident - 1))
    change = found.smallest_change
    assert change is not None and change.fits and change.choice.offload == "optimizer"
    assert found.advice == f"The smallest change that fits: {change.choice} instead of {OWN}."
    assert str(change.choice).endswith("optimizer offloaded")
    moments = 2 * 4 * change.parameters  # of all devices
    shared = moments if change.choice.stage == 0 else -(-moments // 8)
    assert shared <= change.host_bytes <= shared + 8 * 3 * 4  # padded leaves
    assert change.process_host_bytes == 8 * change.host_bytes
    assert change.from_host_bytes == change.to_host_bytes == change.host_bytes
    assert change.optimizer_bytes == 4 and change.disk_bytes == 0  # a count of steps


def test_a_program_that_offloads_is_told_apart_by_its_policy():
    """Its builder says nothing of it, and keeps it when it is asked for less."""

    def offloads(config, overrides, choice, devices):
        made = Builder()(config, overrides, choice, devices)
        return replace(made, options={**made.options, "offload": zero_jax.HostMemory(params=True)})

    made = planner(offloads).program()
    assert made.choice == replace(OWN, offload="params")
    assert str(made.choice) == "stage 0, no remat, optimizer and parameters offloaded"
    assert planner(offloads).foresee(OWN) is None
    assert planner(Builder()).foresee(replace(OWN, offload="optimizer")) is None


def test_a_state_in_files_needs_the_disk_twice_and_the_host_for_its_buffer():
    """Nothing is made there: a plan does not touch the directory."""

    def filed(config, overrides, choice, devices):
        made = Builder()(config, overrides, choice, devices)
        nvme = {"offload": zero_jax.Nvme("nowhere", buffer_bytes=2**20), "executor": "explicit"}
        return replace(made, options={**made.options, **nvme})

    def hosted(config, overrides, choice, devices):
        made = filed(config, overrides, choice, devices)
        host = zero_jax.HostMemory(chunk_bytes=2**20 // 3 // 8)
        return replace(made, options={**made.options, "offload": host})

    (found,) = fit.plan(planner(filed)).forecasts
    (other,) = fit.plan(planner(hosted)).forecasts
    assert found.disk_bytes == 3 * other.host_bytes + 8  # fp32 parameters, too, and the count
    assert found.host_bytes == 2**20 // 8  # of a process with eight devices
    assert (found.peak_bytes, found.from_host_bytes) == (other.peak_bytes, other.from_host_bytes)


def test_notes_of_the_link_and_of_the_pinned_pool(monkeypatch):
    """Of the candidate that waits longest for its host, on a GPU that may pin 64 GB."""
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    few = replace(some_forecast(), host_bytes=8 * 10**9, host_seconds=0.5, compute_seconds=1.0)
    many = replace(few, host_bytes=9 * 10**9, host_seconds=3.0, devices_per_process=8)
    gpus = parse_topology("a100-80:8")
    assert fit._notes([some_forecast()], gpus) == ()
    (link,) = fit._notes([few], gpus)
    assert link == (
        "The link to the host takes 500 ms of a step, less than computing (1.00 s), at 31.5 GB/s "
        "each way (PCI Express 4.0, 16 lanes)."
    )
    link, limit = fit._notes([few, many], gpus)
    assert "3.00 s of a step, 3 times as long as computing" in link
    assert "67.1 GiB of a process's state" in limit  # 8 x 9 GB
    assert "pin at most 64 GB; set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=90 before" in limit
    assert len(fit._notes([many], parse_topology("v5p:2x2x2"))) == 1  # of GPUs alone


ONE, TWO, BOTH = Choice(1, False, 1), Choice(2, False, 1), Choice(1, True, 1)


def test_among_as_small_changes_the_fastest_that_fits():
    seconds = {ONE: 0.3, TWO: 0.2, BOTH: 0.1, Choice(3, False, 1): 0.05}
    fits = {ONE: 100, TWO: 100, BOTH: 100}
    assert smallest(told(fits, seconds)) == TWO  # both is faster, and two changes
    assert smallest(told({ONE: 101, BOTH: 100}, seconds)) == BOTH


def test_microbatches_that_the_rows_do_not_allow_are_not_tried():
    """8 rows are one on each device; 24 rows in the configuration's own 3 parts may stay so."""
    assert smallest(told({Choice(0, False, 2): 1}, {})) is None
    three = Builder(Choice(0, False, 3), rows=24)
    assert smallest(told({Choice(3, False, 3): 1}, {}, three)) == Choice(3, False, 3)


def test_a_candidate_has_to_fit_by_the_compilers_word(monkeypatch):
    """The compiler finds stage 1 to need a byte more than there is, and refuses stage 2."""
    asked = []

    def verified(forecast, program, topology):
        asked.append(program.choice)
        if program.choice == TWO:
            return replace(forecast, refusal="RESOURCE_EXHAUSTED")
        peak = 101 if program.choice == ONE else 100
        return replace(forecast, compiled=Compiled(0, peak, peak, 0, {}, math.nan, 0.0))

    monkeypatch.setattr(fit, "verified", verified)
    seconds = {ONE: 0.1, TWO: 0.2, BOTH: 0.1}
    found = smallest(told(dict.fromkeys((ONE, TWO, BOTH), 50), seconds), compile=True)
    assert found == BOTH and asked == [ONE, TWO, BOTH]

    advice = fit.plan(told({TWO: 50}, seconds), compile=True).advice
    assert advice.startswith("Nothing fits: ") and str(TWO) not in advice  # it is not known
    assert " needs least, and is short of " in advice


def test_a_candidate_that_is_predicted_just_too_large_is_tried(monkeypatch):
    """A forecast is an upper bound: the compiler may say that it fits after all."""

    def verified(forecast, program, topology):
        return replace(forecast, compiled=Compiled(0, 100, 100, 0, {}, math.nan, 0.0))

    monkeypatch.setattr(fit, "verified", verified)
    assert smallest(told({ONE: 125}, {}), compile=True) == ONE
    assert smallest(told({ONE: 126}, {}), compile=True) is None


def test_a_program_that_has_no_such_choice_is_left_out():
    def stubborn(config, overrides, choice, devices):
        return ONE_ROW_EACH(config, overrides, None, devices)

    found = fit.plan(planner(stubborn, 1))
    assert found.smallest_change is None and len(found.forecasts) == 1
    with pytest.raises(ValueError, match="its program has no way to make stage 3"):
        fit.plan(planner(stubborn), [3])
    with pytest.raises(TypeError, match="its program returned a NoneType"):
        fit.plan(planner(lambda *_: None))


def test_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="network: a batch of 100 rows is computed in 8 parts"):
        fit.plan(planner(Builder(rows=100)))
    with pytest.raises(ValueError, match="24 rows is computed in 16 parts .* times 2 microbatches"):
        fit.plan(planner(Builder(Choice(0, False, 2), rows=24)))


def test_a_model_that_cannot_be_divided_says_so():
    """Every leaf of a network of width 1 has fewer than 8 elements."""
    with pytest.warns(zero_jax.ZeroWarning, match="stage 3 over 8 devices leaves .* on every dev"):
        made = planner(Builder(width=1)).forecast(Choice(3, False, 1))
    assert made.params_bytes == 4 * made.parameters


def test_a_step_that_gathers_nothing_says_so():
    with pytest.warns(zero_jax.ZeroWarning, match="network, stage 3: the step gathers no param"):
        planner(Builder(gathers=False)).forecast(Choice(3, False, 1))
    planner(Builder(gathers=False)).forecast(Choice(2, False, 1))  # which has nothing to gather


def test_of_the_example_only_the_prefetching_loop_fetches_parameters(tmp_path):
    """And its policy is what was chosen, whatever the configuration says."""
    config = tmp_path / "run.toml"
    config.write_text('[step]\nexecutor = "explicit"\n[offload]\noptimizer = true\n')
    made = make_planner(plan_lm.program, config, "cpu:8", memory_bytes=PLENTY)
    assert made.program().choice.offload == "optimizer"
    assert made.program(Choice(3, False, 1, "params")).choice == Choice(3, False, 1, "optimizer")
    assert made.program(Choice(3, False, 1)).options["offload"] is None

    prefetch = ("step.layer_loop=prefetch", "model.remat=true", "step.reduce_dtype=bfloat16")
    made = replace(made, overrides=prefetch)
    program = made.program(Choice(3, True, 1, "params"))
    assert program.choice.offload == "params" and program.options["offload"].params
    assert program.options["precision"].reduce == jnp.bfloat16
    waiting = replace(made, overrides=(*prefetch, "offload.gradients=host"))
    parts = Choice(3, True, 2, "optimizer")  # gradients that wait there are not summed
    assert waiting.program(parts).choice == replace(parts, microbatches=1)
    found = made.forecast(Choice(3, True, 1, "params"))
    matrices = 4 * 12 * 128**2 // 8  # of 4 layers, an eighth each
    rest = found.parameters // 8 - matrices
    held = (4 + 8 + 2) * matrices + 8 * rest  # with two moments; gradients in half precision
    assert held <= found.host_bytes <= 1.01 * held
    assert found.to_host_bytes == found.host_bytes


def test_a_prefetching_loop_has_no_program_that_does_not_recompute(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        '[step]\nexecutor = "explicit"\nlayer_loop = "prefetch"\n[model]\nremat = true\n'
    )
    made = make_planner(plan_lm.program, config, "cpu:8", memory_bytes=PLENTY)
    assert made.foresee(Choice(3, False, 1)) is None
    assert made.program(Choice(3, False, 1)).choice == Choice(3, True, 1)
    with pytest.raises(ValueError, match="no way to make stage 3, no remat"):
        made.forecast(Choice(3, False, 1))
    assert made.forecast(Choice(3, True, 1)).wire_bytes > 0  # and no note of gathers


@pytest.mark.parametrize("size", [0, -8])
def test_a_batch_of_no_rows_is_a_letter(tmp_path, size):
    config = tmp_path / "run.toml"
    config.write_text(f"[data]\nbatch_size = {size}\n")
    made = make_planner(plan_lm.program, config, "cpu:8", memory_bytes=PLENTY)
    with pytest.raises(ValueError, match=f"batch_size={size}; expected at least 1"):
        fit.plan(made)


@pytest.mark.parametrize(
    ("topology", "memory_bytes", "words"),
    [
        ("cpu:8", None, "memory: that of 'cpu' devices is not known"),
        ("cpu:8", 0, "say how much one of them has"),
        ("h1000:8", None, "unknown accelerator 'h1000'.*Did you mean 'h100'"),
        ("cpu:9", PLENTY, "JAX has 8 CPU devices"),
    ],
)
def test_a_machine_that_is_not_known(topology, memory_bytes, words):
    with pytest.raises(ValueError, match=words):
        fit.plan(make_planner(Builder(), CONFIG, topology, memory_bytes=memory_bytes))
