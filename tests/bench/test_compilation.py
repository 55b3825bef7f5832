"""Kernels compiled before they are timed: each is launched once, by one of several processes."""

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from sparsek_bench.engine import compilation
from tests.sampling import sampled


def noted(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that write a line each."""
    for name in ("a", "b"):
        yield name, partial(_write, Path(folder) / name)


def _write(path: Path) -> None:
    with path.open("a") as file:
        file.write("once ")


def failing(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "c", lambda: 1 / 0
    yield from noted(folder)


def dying(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "d", partial(os._exit, 1)


def test_what_another_process_has_claimed_is_not_launched(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    for _ in range(2):
        compilation.launch_unclaimed(noted, claims, str(tmp_path))
    assert [(tmp_path / name).read_text() for name in "ab"] == ["once ", "once "]


def test_a_kernel_that_fails_is_left_to_the_benchmark(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    compilation.launch_unclaimed(failing, claims, str(tmp_path))
    assert len(list(claims.iterdir())) == 3
    assert [(tmp_path / name).read_text() for name in "ab"] == ["once ", "once "], (
        "those after it are launched"
    )


def test_an_error_that_shows_when_the_gpu_is_waited_for_is_left_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def fail() -> None:
        waited.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    compilation.launch_unclaimed(noted, tmp_path, str(tmp_path))
    assert waited


# Three processes import torch: one of the two in every run.
@pytest.mark.parametrize("prepare", sampled([noted, dying], 1))
def test_items_go_to_several_processes_and_one_that_dies_ends_the_compiling_ahead(
    prepare: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    thread = threading.Thread(target=compilation.compiled, args=([str(tmp_path)] * 3, prepare), daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "waits for a process that is gone"
    if prepare is noted:
        assert [(tmp_path / name).read_text() for name in "ab"] == ["once ", "once "]


def test_a_small_machine_compiles_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    compilation.compiled([str(tmp_path)] * 3, noted)
    assert not list(tmp_path.iterdir())
