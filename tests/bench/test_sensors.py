"""Power and clock of a GPU, read through NVML; nothing where there is none."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsek.core.clock import time_rounds
from sparsek_bench.engine import records, report, sensors
from sparsek_bench.engine.sensors import Sensors

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Make = Callable[..., records.Record]


class Nvml:
    """A card that draws 500 W, 600 W, ... at 1700 MHz, under one UUID."""

    def __init__(self, power_fails: bool = False) -> None:
        self.milliwatts = 400_000
        self.power_fails = power_fails

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-abc" else 6

    def nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> int:  # noqa: N802
        self.milliwatts += 100_000
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = self.milliwatts
        return 3 if self.power_fails else 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, out: Any) -> int:  # noqa: N802
        assert kind == sensors.SM_CLOCK
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = 1700
        return 0


def with_nvml(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, uuid: str = "abc") -> None:
    monkeypatch.setattr(sensors, "library", lambda: nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))


def test_means_are_taken_over_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvml(monkeypatch, Nvml())
    seen = Sensors(GPU)
    seen.sample()
    seen.sample()
    assert seen.means() == {"watts": 550.0, "sm_mhz": 1700.0}


@pytest.mark.parametrize(("nvml", "uuid"), [(None, "abc"), (Nvml(), "gone"), (Nvml(power_fails=True), "abc")])
def test_what_nvml_does_not_tell_is_null(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, uuid: str
) -> None:
    with_nvml(monkeypatch, nvml, uuid)
    seen = Sensors(GPU)
    seen.sample()
    assert seen.means() == {"watts": None, "sm_mhz": None}


def test_a_machine_without_nvml_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "LIBRARY", "libnvidia-gone.so.1")
    sensors.library.cache_clear()
    assert sensors.library() is None
    sensors.library.cache_clear()


def test_a_cpu_has_no_sensors() -> None:
    seen = Sensors(CPU)
    seen.sample()
    assert seen.means() == {"watts": None, "sm_mhz": None}
    assert set(records.environment(CPU, seen)) == set(records.ENV_FIELDS)


def test_every_sample_of_every_competitor_is_sensed() -> None:
    heard: list[int] = []
    calls = {"one": lambda: None, "two": lambda: None}
    time_rounds(calls, device=CPU, rounds=3, inner_ms=0.0, on_sample=lambda: heard.append(1))
    assert len(heard) == 6


def test_old_records_are_read_with_nulls(make_record: Make, tmp_path: Any) -> None:
    old, path = make_record(), tmp_path / "spmm.jsonl"
    assert "watts" not in old["env"]
    assert records.faults(old) == []
    records.append(path, [old])
    (found,) = records.read(path)
    assert (found["env"]["watts"], found["env"]["sm_mhz"]) == (None, None)
    wrong = old | {"env": old["env"] | {"watts": "many", "sm_mhz": None}}
    assert records.faults(wrong) == ["env.watts is neither a number nor null"]


def test_a_page_says_at_what_power_and_clock_its_rows_were_measured(make_record: Make) -> None:
    old = make_record()
    assert "Mean power" not in report.markdown([old], "spmm")
    half = old["case"] | {"density": 0.5}
    found = [
        old | {"env": old["env"] | {"watts": 640.4, "sm_mhz": 1500.0}},
        old | {"case": half, "env": old["env"] | {"watts": 690.0, "sm_mhz": 1500.0}},
    ]
    assert "range. Mean power 640 to 690 W, SM clock 1500 MHz." in report.markdown(found, "spmm")
