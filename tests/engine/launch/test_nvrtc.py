"""Compiling by NVRTC, and what is kept of it."""

import os
import pwd
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek.core import env
from sparsek.core.errors import Unsupported
from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import CompilerError, compile_cuda, compiled, library

SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
OPTIONS = ["--gpu-architecture=sm_90a"]
needs_nvrtc = pytest.mark.skipif(library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEK_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@needs_nvrtc
def test_code_is_compiled_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compiled(SOURCE, "twice.cu", OPTIONS)
    assert code[:4] == b"\x7fELF"
    (file,) = folder.iterdir()
    assert file.name.startswith("twice-")
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_cuda", lambda *given: pytest.fail("compiled again"))
        assert compiled(SOURCE, "twice.cu", OPTIONS) == code
    assert compiled(SOURCE, "twice.cu", [*OPTIONS, "-lineinfo"]) != code
    assert len(list(folder.iterdir())) == 2


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda held: held[:-7], lambda held: b"", lambda held: b"something else"])
def test_a_file_that_is_not_whole_is_compiled_anew(folder: Path, damage) -> None:
    code = compiled(SOURCE, "twice.cu", OPTIONS)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert compiled(SOURCE, "twice.cu", OPTIONS) == code
    assert file.read_bytes().endswith(code)


@needs_nvrtc
def test_who_has_no_home_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "SPARSEK_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError, as for a user who is not listed
    assert compiled(SOURCE, "twice.cu", OPTIONS)[:4] == b"\x7fELF"


@pytest.mark.parametrize("variable", ["SPARSEK_CACHE", "HOME"])
def test_a_relative_folder_holds_no_machine_code(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEK_CACHE", raising=False)
    monkeypatch.setenv(variable, "here")
    assert Path(env.cache_dir()).is_absolute()


@pytest.mark.parametrize("kind", ["FIFO", "endless", "huge", "folder"])
def test_what_is_no_kept_code_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda *given: (b"code", ""))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    assert compiled(SOURCE, "twice.cu", OPTIONS) == b"code"
    (file,) = folder.iterdir()
    file.unlink()
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 2**40)  # no byte of it on disk
    assert compiled(SOURCE, "twice.cu", OPTIONS) == b"code"
    if kind != "folder":
        assert file.read_bytes().endswith(b"code")


@needs_nvrtc
def test_where_nothing_can_be_kept_it_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPARSEK_CACHE", str(tmp_path / "file" / "below"))
    assert compiled(SOURCE, "twice.cu", OPTIONS)[:4] == b"\x7fELF"


@needs_nvrtc
def test_what_the_compiler_says_is_told(folder: Path) -> None:
    with pytest.raises(CompilerError, match=r"wrong\.cu.*\n.*identifier \"nothing\" is undefined"):
        compile_cuda("__global__ void f() { nothing(); }", "wrong.cu", OPTIONS)
    assert not folder.exists()


def test_the_library_that_is_named_is_taken_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRTC", "/nowhere/libnvrtc.so.13")
    for each in (library, nvrtc.version):
        each.cache_clear()
    try:
        assert library() is None
        with pytest.raises(Unsupported, match="install nvidia-cuda-nvrtc, or name"):
            compile_cuda(SOURCE, "twice.cu", OPTIONS)
    finally:
        for each in (library, nvrtc.version):
            each.cache_clear()


@pytest.mark.parametrize(
    ("cuda", "first"), [("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "")]
)
def test_the_version_that_torch_loads_comes_first(
    cuda: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVRTC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    names = [path.name for path in nvrtc._places()]
    assert set(names) == set(nvrtc.NAMES)
    assert names[0] == (first or nvrtc.NAMES[0])
    assert names == sorted(names, key=names.index)  # wherever it lies, before the others


@needs_nvrtc
@pytest.mark.parametrize("fails", ["nvrtcGetProgramLogSize", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"])
def test_whatever_fails_is_told(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            return (lambda *given: 9) if name == fails else getattr(found, name)

    found = library()
    monkeypatch.setattr(nvrtc, "library", Failing)
    with pytest.raises(CompilerError, match=r"twice\.cu: NVRTC error 9"):
        compile_cuda(SOURCE, "twice.cu", OPTIONS)
