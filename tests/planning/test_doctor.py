"""The doctor finds what is here, and measures one collective by the ring convention."""

import jax
import pytest
from rich.console import Console

from zero_jax.planning import doctor
from zero_jax.planning.topology import compile_only_devices
from zero_jax.reporting.doctor_table import doctor_table


@pytest.fixture(autouse=True)
def _targets_and_small_messages(monkeypatch):
    words = {"cpu": "ok", "tpu": "Run pip install 'zero_jax[plan]'."}
    monkeypatch.setattr(doctor, "available_targets", lambda: words)
    monkeypatch.setattr(doctor, "CPU_MESSAGE_BYTES", 2**16)


def text(findings, width=100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(doctor_table(findings))
    return capture.get()


def test_findings():
    found = doctor.examine()
    assert found.versions["jax"] == jax.__version__ and "python" in found.versions
    kind = jax.devices()[0].device_kind
    assert found.devices == doctor.DevicesFound(8, 8, 1, "cpu", (kind,))
    assert found.mesh == {"data": 8}
    assert found.memory.kinds[0] == jax.devices()[0].default_memory().kind
    assert "pinned_host" in found.memory.kinds
    assert found.memory.limit_bytes is None  # a CPU does not tell
    assert found.bandwidth is not None
    assert (found.bandwidth.devices, found.bandwidth.message_bytes) == (8, 2**16)
    assert 0 < found.bandwidth.latency_seconds and 0 < found.bandwidth.seconds


def test_the_convention_is_that_of_a_ring():
    measured = doctor.Bandwidth(4, 400, seconds=2.0, latency_seconds=1.0)
    assert measured.bytes_per_second == 150  # 3/4 of 400 bytes in 2 s


def test_what_is_timed_is_an_all_gather_that_is_waited_for(monkeypatch):
    waits, clock = [], iter(range(100))
    monkeypatch.setattr(doctor.jax, "block_until_ready", lambda x: waits.append(x) or x)
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    measured = doctor.measure_all_gather(jax.devices(), 8 * 100 + 31)
    assert measured.message_bytes == 8 * 100  # whole floats on each device
    assert measured.seconds == 1  # two looks at this clock are 1 apart
    assert len(waits) == 2 + 2 * doctor.RUNS  # to warm up, and every run
    assert all(x.sharding.is_fully_replicated for x in waits)
    sizes = [x.size for x in waits]
    assert sizes == [200, 8] * (1 + doctor.RUNS)  # the small message between the large ones


def test_one_device_has_nothing_to_measure():
    found = doctor.examine(jax.devices()[:1])
    assert found.bandwidth is None and found.mesh == {"data": 1}
    assert "partition nothing" in found.notes[0]
    assert "nothing to measure: this process has one device" in text(found)


def test_devices_that_cannot_be_examined():
    with pytest.raises(ValueError, match="devices is empty"):
        doctor.examine([])
    with pytest.raises(ValueError, match=r"devices: 1 .* at least two devices"):
        doctor.measure_all_gather(jax.devices()[:1])
    with pytest.raises(ValueError, match="message_bytes=16"):
        doctor.measure_all_gather(jax.devices(), 16)


@pytest.mark.aot
def test_a_described_machine_cannot_be_examined():
    with pytest.raises(ValueError, match="is described, not present"):
        doctor.examine(compile_only_devices("v5e:2x2"))


@pytest.mark.parametrize("path", ["/dev/nvidiactl", "/dev/accel*"])
def test_an_accelerator_that_jax_does_not_use_is_noted(monkeypatch, path):
    monkeypatch.setattr(doctor.os.path, "exists", lambda p: p == path)
    monkeypatch.setattr(doctor.glob, "glob", lambda p: ["/dev/accel0"] if p == path else [])
    (note,) = doctor.examine().notes
    assert note.startswith("A GPU" if "nvidia" in path else "A TPU")


def test_the_table_tells_the_findings(monkeypatch):
    found = doctor.Findings(
        versions={"python": "3.11", "libtpu": None, "zero_jax": None},
        devices=doctor.DevicesFound(16, 8, 2, "gpu", ("H100",)),
        mesh={"data": 16},
        memory=doctor.MemoryFound(("device", "pinned_host"), 60 * 2**30),
        targets={"cuda": "ok", "tpu": "Run [this]."},
        bandwidth=doctor.Bandwidth(8, 64 * 2**20, 0.0005, 2e-5),
        notes=("Look [here].",),
    )
    said = text(found)
    for words in (
        "not installed: this is a copy of its sources",
        "16 x H100 (gpu)",
        "2; this one has 8",
        "data=16",
        "device, pinned_host",
        "60.0 GiB a device",
        "no: Run [this].",
        "117 GB/s sent by each of 8 devices",  # 7/8 of 67.1 MB in 0.5 ms
        "64.0 MiB in 500 us; 4 bytes a device in 20.0 us",
        "Look [here].",
    ):
        assert words in said, words
    assert max(map(len, text(found, 60).splitlines())) <= 60
