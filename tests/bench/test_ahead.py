"""Kernels compiled before they are timed: each is launched once, by one of several processes."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sparsek.bench.engine import ahead


def noted(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that write a line each."""
    for name in ("a", "b"):
        yield name, partial(_write, Path(folder) / name)


def _write(path: Path) -> None:
    with path.open("a") as file:
        file.write("once ")


def failing(folder: str) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "c", lambda: 1 / 0


def test_what_another_process_has_claimed_is_not_launched(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    for _ in range(2):
        ahead.launch_unclaimed(noted, claims, str(tmp_path))
    assert [(tmp_path / name).read_text() for name in "ab"] == ["once ", "once "]


def test_a_kernel_that_fails_is_left_to_the_benchmark(tmp_path: Path) -> None:
    ahead.launch_unclaimed(failing, tmp_path, "")
    assert len(list(tmp_path.iterdir())) == 1


def test_items_go_to_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    ahead.compiled([str(tmp_path)] * 3, noted)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["once ", "once "]


def test_a_small_machine_compiles_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ahead.compiled([str(tmp_path)] * 3, noted)
    assert not list(tmp_path.iterdir())
