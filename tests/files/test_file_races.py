"""Files that others change, cut or leave half-written while they are saved and read, and what a replaced file keeps."""

import json
import os
import signal
import stat
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparsek.core import files, memory
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files import io, tensor_file
from sparsek.files.weights import open_weights
from sparsek.products.formats.random import random_bsr
from tests.files.test_io import record, same, small

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes, owners and locks of Unix")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_mode_and_owner_of_a_replaced_file_stay(tmp_path, monkeypatch, mode):
    path = tmp_path / "a.safetensors"
    io.save(small(1), path)
    path.chmod(mode)
    owner = (12345, 23456) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(path, *owner)
    seen = []
    sync = os.fsync

    def looked(handle: int) -> None:
        sync(handle)
        seen.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob(".sparsek-*"))

    monkeypatch.setattr(os, "fsync", looked)
    io.save(small(2), path)
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, *owner)
    assert seen == [mode]
    assert same(io.load(path), small(2))


def test_a_group_that_cannot_stay_gets_no_more_than_all_have(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    io.save(small(1), path)
    path.chmod(0o664)
    old = path.stat()
    given = os.stat_result([*old[:5], old.st_gid + 1, *old[6:]])

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refused)
    with path.open("rb") as file:
        files._give_away(file.fileno(), given)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def killed_while_it_saves(path: Path) -> int:
    """A child that writes and ends itself by SIGKILL: nothing of Python runs afterwards."""
    child = os.fork()
    if not child:
        with files.replacing(path) as file:
            file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(
        os.P_PID, child, os.WEXITED | os.WNOWAIT
    )  # stays a zombie, as that of a parent that does not wait
    return child


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_next_save_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    path = tmp_path / "a.safetensors"
    child = killed_while_it_saves(path)
    (left,) = os.listdir(tmp_path)
    _, machine, process, number = left.split("-")
    living, elsewhere = f".sparsek-{machine}-1-{number}", f".sparsek-00000000-{process}-{number}"
    notes = ".sparsek-notes.tmp"
    for name in (living, elsewhere, notes):
        (tmp_path / name).write_text("stays")
    io.save(small(), path)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, living, elsewhere, notes])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_what_another_thread_is_writing_is_not_removed(tmp_path):
    with files.replacing(tmp_path / "first") as file:
        file.write(b"first")
        io.save(small(), tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_a_folder_s_name_is_no_file(tmp_path):
    io.save(small(), tmp_path / "a")
    for name in ("new/", "new/.", "a/"):
        with pytest.raises(InvalidInput, match="a name that ends so is a folder's"):
            io.save(small(), f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_change_while_they_are_saved_leave_a_file_that_loads(tmp_path, monkeypatch, dtype):
    """Another thread writes at the worst moment: between the checksum and the bytes."""
    a, path = random_bsr(64, 64, 16, 0.5, dtype=dtype, seed=0), tmp_path / "a.safetensors"
    checksum = io._crc32

    def moved(parts: dict[str, torch.Tensor]) -> int:
        found = checksum(parts)
        a.values.add_(1)
        return found

    monkeypatch.setattr(io, "_crc32", moved)
    before = a.values.clone()
    io.save({"a": a, "b": a}, path)
    monkeypatch.undo()
    loaded = io.load(path)
    assert torch.equal(loaded["a"].values, before)
    assert torch.equal(loaded["b"].values, before + 1)


@pytest.mark.parametrize("part", ["padding", "indices"])
def test_what_another_thread_makes_wrong_does_not_replace_a_good_file(tmp_path, monkeypatch, part):
    a, path = small(), tmp_path / "a.safetensors"
    io.save(a, path)
    snapshot = io._snapshot

    def broken(*given: Any) -> Any:
        (a.values if part == "padding" else a.pattern.indices).add_(1)
        return snapshot(*given)

    monkeypatch.setattr(io, "_snapshot", broken)
    with pytest.raises(InvalidInput, match="'matrix' was changed while it was saved"):
        io.save(a, path)
    assert same(io.load(path), small())
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("left", [0, 7, 100, -200, -1])
def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch, left):
    """As `cp` or `rsync --inplace` does; a file that is mapped into memory would end the process."""
    path = tmp_path / "a.safetensors"
    io.save(random_bsr(512, 512, 64, 0.9, seed=0), path)
    size = path.stat().st_size
    about = io._about

    def cut(*given: Any) -> Any:
        os.truncate(path, left if left >= 0 else size + left)
        return about(*given)

    monkeypatch.setattr(io, "_about", cut)
    with pytest.raises(InvalidFile, match=r"a\.safetensors: ends after \d+ of the \d+ bytes of 'matrix"):
        io.load(path)


def test_a_header_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    io.save({f"{at}": small() for at in range(40)}, path)
    regular = files.regular

    def cut(path: Path) -> Any:
        found = regular(path)
        size = os.fstat(found.fileno())
        os.truncate(path, 100)
        monkeypatch.setattr(os, "fstat", lambda handle: size)
        return found

    monkeypatch.setattr(files, "regular", cut)
    with pytest.raises(InvalidFile, match=r"ends after 92 of the \d+ bytes of its header"):
        io.load(path)


@pytest.mark.parametrize("left", [0, 1000, -1])
def test_weights_that_are_cut_while_they_are_read_are_refused(tmp_path, left):
    path = tmp_path / "w.safetensors"
    save_file({"v": torch.zeros(2, 2), "w": torch.ones(256, 256)}, path)
    weights = open_weights(path)
    read = tensor_file.TensorFile.read

    def cut(file: Any, name: str) -> torch.Tensor:
        os.truncate(path, left if left >= 0 else path.stat().st_size + left)
        return read(file, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file.TensorFile, "read", cut)
        with pytest.raises(InvalidFile, match=r"w\.safetensors: ends after \d+ of the 262144 bytes of 'w'"):
            weights.read("w")


def test_weights_that_have_become_others_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(8, 8)}, path)
    weights = open_weights(path)
    for other in ({"w": torch.ones(8, 4)}, {"w": torch.ones(8, 8).half()}, {"v": torch.ones(8, 8)}):
        save_file(other, path)
        with pytest.raises(InvalidFile, match="'w' has changed since the file was opened first"):
            weights.read("w")


def holes(path: Path, size: int) -> Path:
    """A file of few bytes on disk whose right header declares a matrix of `size` bytes."""
    about = {"version": 1, "single": True, "matrices": {"matrix": record(small(), shape=[size // 64, 32])}}
    text = json.dumps(about)
    metadata = {"sparsek": text, "sparsek.crc32": str(zlib.crc32(text.encode()))}
    tensors = {
        "indptr": ("I32", [1], 4),
        "indices": ("I32", [1], 4),
        "values": ("F16", [size // 1024, 16, 32], size),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (tag, shape, count) in tensors.items():
        header[f"matrix.{name}"] = {"dtype": tag, "shape": shape, "data_offsets": [end, end + count]}
        end += count
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(path, 8 + len(content) + end)
    return path


def test_a_file_of_holes_is_not_allocated(tmp_path):
    path = holes(tmp_path / "h.safetensors", 2**43)
    with pytest.raises(InvalidFile, match=r"all of it takes 8\.8e\+03 GB; .* GB of memory are free"):
        io.load(path)
    with pytest.raises(InvalidFile, match=r"takes 8\.8e\+03 GB; .* GB of memory are free"):
        io.load(path, "matrix")


def test_memory_that_the_system_does_not_give_is_told(tmp_path, monkeypatch):
    io.save(small(), tmp_path / "a.safetensors")

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5120 bytes.")

    monkeypatch.setattr(tensor_file.torch, "empty", refused)
    with pytest.raises(InvalidFile, match=r"'matrix\.\w+' of shape .* takes .* GB, which are not free"):
        io.load(tmp_path / "a.safetensors")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_limit_of_the_process_or_its_container_counts_as_memory(monkeypatch):
    told = {"/proc/self/cgroup": "0::/job/step\n4:cpu,memory:/old\n"}
    read = memory._read
    monkeypatch.setattr(memory, "_read", lambda path: told.get(path, "" if "cgroup" in path else read(path)))
    assert memory.available_memory() is not None
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/job", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory/old", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        told |= {f"{folder}/{limit}": "1000000\n", f"{folder}/{used}": "900000\n"}
        told[f"{folder}/memory.stat"] = "anon 800000\ninactive_file 50000\n"
        assert memory.available_memory() == 150_000
        told[f"{folder}/{limit}"] = "max\n"
        assert memory.available_memory() != 150_000
