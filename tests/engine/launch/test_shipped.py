"""Machine code that comes with the package: what of common calls it holds, when it is valid, and how it is found."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from scripts import cubins
from sparsek.core import env
from sparsek.engine.launch import driver, shipped
from sparsek_bench.suites.host import FIRST, HostCase
from tests.house.tools import ROOT

NAMES = """
import json
from scripts import cubins
walk = cubins.walked(only="products 64 torch.bfloat16")
print(json.dumps(sorted([*walk.kernels, *walk.cuda])))
"""


def names(seed: str) -> list[str]:
    seeded = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, check=True, env=seeded, cwd=ROOT
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def walk() -> cubins.Walk:
    """Of the calls in bf16. Those in fp16, and first calls with filled caches, take the same steps."""
    first = [case for case in FIRST if case.caches == "empty"]
    with mock.patch.multiple(cubins, HALVES=(torch.bfloat16,), FIRST=first):
        return cubins.walked()


def test_kernels_have_the_same_names_in_every_process(walk: cubins.Walk) -> None:
    found = names("1")
    assert set(found) <= {*walk.kernels, *walk.cuda}
    assert set(found) & set(walk.kernels)
    assert set(found) & set(walk.cuda)


def test_common_calls_are_planned_without_a_gpu_as_on_one(walk: cubins.Walk) -> None:
    kernels = {kernel.fn.__module__.rpartition(".")[0] for kernel, *_ in walk.kernels.values()}
    rooms = [f"products.kernels.{room}" for room in ("spmm", "sddmm", "pack")]
    rooms += [f"attn.kernels.{room}" for room in ("forward", "backward", "mask", "estimate")]
    assert kernels == {f"sparsek.{room}" for room in rooms}
    assert walk.cuda


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Path, tuple[Any, ...]]]:
    """With one small kernel of Triton in it, and one of CUDA C++ of two bytes."""
    kernels = cubins.walked(only="from_dense 64").kernels
    name, job = next(
        (name, job) for name, job in kernels.items() if job[0].fn.__module__.endswith("pack.to_bsr")
    )
    path = tmp_path / "shipped.zip"
    _, entry, cubin = cubins.compiled(name, job)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, cubin)
        file.writestr(shipped.cuda_name("text", ["-option"]), b"\1\2")
        file.writestr(shipped.INDEX, json.dumps({"source": shipped.source(), "kernels": {name: entry}}))
    monkeypatch.setattr(shipped, "ARCHIVE", path)
    monkeypatch.setattr(shipped, "_found", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    for each in (shipped.store, shipped._serves, shipped._is_hopper):
        each.cache_clear()
    yield path, job
    for each in (shipped.store, shipped._serves, shipped._is_hopper):
        each.cache_clear()


def test_a_kernel_of_the_archive_is_loaded_once_on_a_hopper_card(archive, monkeypatch) -> None:
    loaded = []
    monkeypatch.setattr(driver, "function", lambda code, *of: loaded.append((code, *of)) or 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    _, (kernel, args, named) = archive
    code = shipped.find(kernel, args, named)
    assert code is not None
    assert code is shipped.find(kernel, args, named)
    assert [each[0][:4] for each in loaded] == [b"\x7fELF"]
    assert (code.function, len(code.kinds)) == (7, len(kernel.arg_names))
    assert shipped.find(kernel, args, named | {"num_warps": 16}) is None
    assert shipped.cuda("text", ["-option"]) == b"\1\2"
    assert shipped.cuda("text", ["-other"]) is None


@pytest.mark.parametrize(
    "change",
    [
        "another card",
        "no GPU",
        "another source",
        "another Triton",
        "another setting",
        "no archive",
        "no index",
        "a list",
        "broken",
    ],
)
def test_nothing_is_found_where_it_does_not_fit(archive, monkeypatch, change: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: change != "no GPU")
    capability = (10, 0) if change == "another card" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    path, (kernel, args, named) = archive
    if change == "another source":
        monkeypatch.setattr(shipped, "source", lambda: "of yesterday")
    if change == "another Triton":
        monkeypatch.setattr(driver, "is_tested", lambda: False)
    if change == "another setting":
        monkeypatch.setenv("TRITON_DEBUG", "1")
    if change == "no archive":
        path.unlink()
    if change in ("no index", "a list"):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(shipped.INDEX, "[]" if change == "a list" else '{"kernels": {}}')
    if change == "broken":  # a byte of the first cubin
        held = bytearray(path.read_bytes())
        held[200] ^= 1
        path.write_bytes(held)
    assert shipped.find(kernel, args, named) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in FIRST if case.caches == "empty"], ids=lambda case: case.call
)
def test_a_first_call_compiles_nothing(case: HostCase, tmp_path: Path) -> None:
    """In a process of its own, with empty caches: what is shipped runs, and Triton and NVRTC are not asked."""
    if shipped.store() is None:
        pytest.skip("no archive of this source: make cubins")
    named = json.dumps(case.as_record())
    done = subprocess.run(
        [sys.executable, "-m", "sparsek_bench.suites.host_calls", named, "cuda:0"],
        capture_output=True,
        text=True,
        check=False,
        env=env.with_caches_in(tmp_path / "kernels", tmp_path / "bytecode") | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["passed"]
    assert [path for path in (tmp_path / "kernels").rglob("*") if path.suffix in (".cubin", ".so")] == []
