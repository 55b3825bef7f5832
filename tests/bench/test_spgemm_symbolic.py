"""What bench times as the symbolic phase: the device's own matcher, then the kernel's list of work, then nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from sparsek.core.clock import Times
from sparsek.engine.table import load
from sparsek.products.plan.matches import match
from sparsek_bench.engine import data
from sparsek_bench.suites import spgemm
from sparsek_bench.suites.spgemm import SpgemmCase

CPU = torch.device("cpu")
CASE = SpgemmCase(64, 96, 80, (32, 48), (48, 16), 0.5, dtype="fp32")
KERNEL = "reference.spgemm"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """The calls that would be timed, after one `kernel_extra` that saw 2 ms and 8 ms."""
    calls: dict[str, Callable[[], object]] = {}

    def wall_rounds(given: Any, device: torch.device, rounds: int) -> dict[str, Times]:
        calls.update(given)
        return {"symbolic": Times(2.0, 1.0, 3.0, 1), "whole": Times(8.0, 7.0, 9.0, 1)}

    monkeypatch.setattr(spgemm, "wall_rounds", wall_rounds)
    return calls


def test_the_share_is_of_the_whole_call(timed: dict[str, Callable[[], object]]) -> None:
    (one, *_) = CASE.operands(CPU)
    found = one.kernel_extra(KERNEL)
    assert found == {
        "symbolic_ms": 2.0,
        "symbolic_share": 0.25,
        "symbolic_gpu_ms": None,
        "symbolic_gpu_share": None,
    }


def test_the_time_of_the_gpu_is_that_of_its_kernels_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Seen:
        """4 calls of 10 + 30 + 2 us, and what the host saw of them."""

        def __init__(self, activities: Any, acc_events: bool = False) -> None:
            assert activities == [ProfilerActivity.CUDA]
            assert acc_events, "torch 2.10 to 2.12 warn: Profiler clears events at the end of each cycle"

        def __enter__(self) -> "Seen":
            made.append("begins")
            return self

        def __exit__(self, *why: object) -> None:
            made.append("ends")

        def key_averages(self) -> list[Any]:
            kinds = ((DeviceType.CUDA, 160), (DeviceType.CUDA, 8), (DeviceType.CPU, 5000))
            return [SimpleNamespace(device_type=kind, device_time_total=us) for kind, us in kinds]

    monkeypatch.setattr(spgemm, "profile", Seen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: made.append("wait"))
    assert spgemm.gpu_ms(lambda: made.append("call"), calls=4) == pytest.approx(0.042)
    assert made == ["call", "wait", "begins", *4 * ["call"], "wait", "ends"]


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["dense", "bsr"])
def test_a_gpu_is_busy_for_less_than_the_wall_shows(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_SETS", 2)
    (one, *_) = SpgemmCase(2048, 2048, 2048, (64, 64), (64, 64), 0.1, out).operands(torch.device("cuda"))
    for _ in range(5):  # the two clocks run one after the other, and other processes may come in between
        found = one.kernel_extra("hopper.spgemm")
        if found["symbolic_gpu_ms"] < found["symbolic_ms"] and found["symbolic_gpu_share"] < 1:
            break
    assert 0 < found["symbolic_gpu_ms"] < found["symbolic_ms"]
    assert 0 < found["symbolic_gpu_share"] < 1


def test_matches_are_made_as_the_device_makes_them_and_tiles_with_them(
    monkeypatch: pytest.MonkeyPatch, timed: dict[str, Callable[[], object]]
) -> None:
    done: list[str] = []

    def own(a: Any, b: Any, wanted: Any) -> Any:
        done.append("match")
        assert a is not one.a.pattern
        assert wanted is None
        return match(a, b, wanted)

    def matcher(device: torch.device) -> Any:
        assert device == CPU
        return own

    kernel = type(load(KERNEL))
    prepare, launch = kernel.prepare, kernel.launch
    monkeypatch.setattr(spgemm, "matcher", matcher)
    monkeypatch.setattr(
        kernel, "prepare", lambda self, *given: (done.append("prepare"), prepare(self, *given))[1]
    )
    monkeypatch.setattr(kernel, "launch", lambda self, *given: (done.append("run"), launch(self, *given))[1])
    (one, *_) = CASE.operands(CPU)
    one.kernel_extra(KERNEL)
    done.clear()
    timed["symbolic"]()
    assert done == ["match", "prepare"]
    done.clear()
    timed["whole"]()
    assert done == ["prepare", "run"]  # the verb brings its own matcher
