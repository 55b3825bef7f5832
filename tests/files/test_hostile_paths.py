"""Paths that lead to no regular file: nothing waits, no device is read to its end or replaced, and errors are ours."""

import errno
import os
import re
import signal
import stat
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sparsek as sk
from sparsek.core import files, memory
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files import io, weights
from sparsek.files.weights import open_weights
from sparsek.pictures.blocks import spy_svg
from sparsek.products.formats.random import random_bsr
from sparsek.tools.advise import break_even
from sparsek.tools.advise.break_even import CurveSetting, curves
from sparsek.tools.cli.tune import shapes_in
from sparsek_bench.commands.bench_run import write_html
from sparsek_bench.engine import records
from tests.house.tools import need

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="these are files of Unix")
MATRIX = random_bsr(32, 32, 16, 0.5, seed=0)
SUFFIXES = list(weights.READERS)
SPECIAL = {"FIFO": stat.S_IFIFO, "socket": stat.S_IFSOCK, "character device": stat.S_IFCHR}
LONGEST_MESSAGE = 800  # characters beside the path


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """A test that waits for ever fails instead."""

    def late(*_: Any) -> None:
        raise AssertionError("waited for ten seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def special(path: Path, kind: str) -> Path:
    """A file of a kind that is not regular. The device is the null device's twin: no test can harm the true one."""
    try:
        os.mknod(path, SPECIAL[kind] | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    return path


def peak(call: Callable[[], Any]) -> int:
    """The most bytes that Python and NumPy held at once during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_save_replaces_nothing_but_regular_files(tmp_path: Path, kind: str, linked: bool) -> None:
    there = special(tmp_path / "there", kind)
    path = tmp_path / "link" if linked else there
    if linked:
        path.symlink_to(there)
    with pytest.raises(InvalidInput, match=f": is a {kind}; only regular files are replaced"):
        sk.save(MATRIX, path)
    assert stat.S_IFMT(there.lstat().st_mode) == SPECIAL[kind]
    assert sorted(os.listdir(tmp_path)) == sorted({"there", path.name})


@pytest.mark.parametrize("kind", ["FIFO", "folder", "link"])
def test_what_takes_the_place_of_a_file_while_it_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "w.safetensors"
    sk.save(MATRIX, path)

    def swapped(handle: int) -> None:
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path)

    monkeypatch.setattr(os, "fsync", swapped)
    with pytest.raises(InvalidInput, match="only regular files are replaced"):
        sk.save(MATRIX, path)
    assert not path.is_file()
    assert os.listdir(tmp_path) == [path.name]


def test_save_to_a_stream_of_the_system_is_refused(tmp_path: Path) -> None:
    """A path through a descriptor has no name that could be replaced."""
    reader, writer = os.pipe()
    try:
        with pytest.raises(InvalidInput, match="is a FIFO"):
            sk.save(MATRIX, f"/dev/fd/{writer}")
    finally:
        os.close(reader)
        os.close(writer)


def test_save_over_a_loop_of_links_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InvalidInput, match="a: cannot be written: Too many levels of symbolic links"):
        sk.save(MATRIX, tmp_path / "a")
    assert (tmp_path / "a").is_symlink()
    with pytest.raises(InvalidFile, match="a: cannot be opened: Too many levels of symbolic links"):
        sk.load(tmp_path / "a")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_no_reader_opens_anything_but_regular_files(
    tmp_path: Path, kind: str, suffix: str, linked: bool
) -> None:
    path = tmp_path / f"w{suffix}"
    if linked:
        path.symlink_to(special(tmp_path / "there", kind))
    else:
        special(path, kind)
    for read in (sk.load, open_weights):
        with pytest.raises(InvalidFile, match=f": is a {kind}; only regular files are read"):
            read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_link_to_an_endless_device_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.symlink_to("/dev/zero")
    for read in (sk.load, open_weights):
        with pytest.raises(InvalidFile, match="is a character device"):
            read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs /proc")
def test_a_file_of_proc_is_not_read(tmp_path: Path, suffix: str) -> None:
    """It calls itself regular, is as long as it likes, and some wait for news."""
    path = tmp_path / f"w{suffix}"
    path.symlink_to("/proc/self/pagemap")
    with pytest.raises(InvalidFile, match="is empty"):
        open_weights(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_fifo_that_comes_between_the_look_and_the_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"w{suffix}"
    opening = files.open_at_once

    def swapped(name: str, flags: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return opening(name, flags)

    monkeypatch.setattr(files, "open_at_once", swapped)
    for read in (sk.load, open_weights):
        path.unlink(missing_ok=True)
        path.write_bytes(b"something")
        with pytest.raises(InvalidFile, match="is a FIFO"):
            read(path)


def test_the_file_that_was_looked_at_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    sk.save(MATRIX, path)
    parse = io._about

    def swapped(*given: Any) -> Any:
        sk.save(random_bsr(32, 32, 16, 0.5, seed=1), path)
        return parse(*given)

    monkeypatch.setattr(io, "_about", swapped)
    assert torch.equal(sk.load(path).values, MATRIX.values)


ODD = {
    "None": None, "number": 5, "bytes": b"w.safetensors", "empty": "", "NUL": "w\0.safetensors", "surrogate": "\ud800",
    "list": ["w"], "tensor": torch.zeros(2), "file": sys.stdout,
}  # fmt: skip


@pytest.mark.parametrize("path", ODD.values(), ids=ODD)
def test_what_is_no_path_is_refused_by_name(path: Any) -> None:
    mask = sk.BlockMask.causal(128, block=64)
    uses = [sk.load, open_weights, lambda it: sk.save(MATRIX, it), lambda it: spy_svg(MATRIX, it)]
    if path is not None:  # means no picture
        uses += [MATRIX.spy, mask.plot]
    for use in uses:
        with pytest.raises(InvalidInput, match="path is "):
            use(path)


def test_a_name_that_is_too_long_is_refused_and_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 5000}.npz"
    for use, error in ((sk.load, InvalidFile), (open_weights, InvalidFile), (saved, InvalidInput)):
        with pytest.raises(error, match="File name too long") as caught:
            use(path)
        assert len(str(caught.value)) < 200
    for use in (MATRIX.spy, sk.BlockMask.causal(128, block=64).plot):
        with pytest.raises(InvalidInput, match="File name too long"):
            use(path.with_suffix(".svg"))


def saved(path: Path) -> None:
    sk.save(MATRIX, path)


@pytest.mark.parametrize("use", [sk.load, open_weights], ids=["load", "weights"])
def test_a_folder_or_what_is_below_a_file_cannot_be_read(tmp_path: Path, use: Callable[[Path], Any]) -> None:
    folder, below = tmp_path / "w.npz", tmp_path / "file" / "w.npz"
    folder.mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidFile, match=r"w\.npz: is a folder"):
        use(folder)
    with pytest.raises(InvalidFile, match=r"w\.npz: cannot be opened: Not a directory"):
        use(below)


@pytest.mark.parametrize("kind", SPECIAL)
def test_pictures_and_records_replace_nothing_but_regular_files_and_wait_for_none(
    tmp_path: Path, kind: str
) -> None:
    mask = sk.BlockMask.causal(128, block=64)
    q = torch.zeros(1, 1, 128, 16)
    setting, shown = CurveSetting((512, 512)), curves(CurveSetting((512, 512)), tokens=(16, 32))
    for suffix, write in {
        "a.svg": MATRIX.spy,
        "b.svg": mask.plot,
        "c.svg": lambda path: sk.policies.plot(mask, q, q, path=path),
        "d.svg": lambda path: break_even.draw(shown, setting, path, tokens=(16, 32)),
        "e.html": lambda path: write_html(path, [], "none"),
    }.items():
        path = special(tmp_path / suffix, kind)
        with pytest.raises(InvalidInput, match=f"is a {kind}; only regular files are replaced"):
            write(path)
        assert stat.S_IFMT(path.lstat().st_mode) == SPECIAL[kind]
    if kind != "character device":
        with pytest.raises(InvalidInput, match="cannot be written"):
            records.append(special(tmp_path / "f.jsonl", kind), [])


def test_records_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("[" * 100_000)
    with pytest.raises(
        InvalidFile, match=r"r\.jsonl:1: not JSON: its lists or objects are nested too deeply"
    ):
        records.read(tmp_path / "r.jsonl")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "w", f"cannot be written: there is no folder {tmp_path / 'none'}"),
        (tmp_path / "file" / "w", "cannot be written: Not a directory"),
    ):
        with pytest.raises(InvalidInput) as caught:
            sk.save(MATRIX, path)
        assert str(caught.value).startswith(f"{path}: {why}")
    assert os.listdir(tmp_path) == ["file"]


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    mask = sk.BlockMask.causal(128, block=64)
    for draw in (MATRIX.spy, mask.plot):
        with pytest.raises(InvalidInput, match=r"p\.svg: cannot be written: there is no folder"):
            draw(tmp_path / "none" / "p.svg")


@pytest.mark.parametrize(
    ("code", "expected"), [(errno.EACCES, InvalidFile), (errno.EPERM, InvalidFile), (errno.EIO, OSError)]
)
def test_a_file_that_may_not_be_read_is_named_and_a_failing_disk_is_not_the_path_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception]
) -> None:
    path = tmp_path / "w.npy"
    path.write_bytes(b"secret")

    def denied(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr("builtins.open", denied)
    for read in (sk.load, open_weights):
        with pytest.raises(expected, match=os.strerror(code)):
            read(path)


@pytest.mark.parametrize("name", [5, ["w"], torch.zeros(2)], ids=str)
def test_what_is_no_name_of_a_matrix_is_refused(tmp_path: Path, name: Any) -> None:
    sk.save({"w": MATRIX}, tmp_path / "w.safetensors")
    np.save(tmp_path / "w.npy", np.zeros((2, 2)))
    with pytest.raises(InvalidInput, match=r"no matrix named|must be a text"):
        sk.load(tmp_path / "w.safetensors", name)
    with pytest.raises(InvalidInput, match=r"no matrix named|must be a text"):
        open_weights(tmp_path / "w.npy").read(name)


def test_load_takes_devices_that_are_there(tmp_path: Path) -> None:
    sk.save(MATRIX, tmp_path / "w.safetensors")
    for device in (0, "tpu", "cuda:99", None):
        with pytest.raises(InvalidInput, match="device"):
            sk.load(tmp_path / "w.safetensors", device=device)  # type: ignore[arg-type]


BANNER = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize("before", ["", BANNER, f"{BANNER}9 9 1\n"], ids=["banner", "sizes", "entry"])
def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, before: str) -> None:
    path = tmp_path / "w.mtx"
    path.write_text(before)
    os.truncate(path, 2**26)  # zeros, none of them on disk

    def read() -> None:
        with pytest.raises(
            InvalidFile, match=r"w\.mtx: line \d is longer than the limit of 65536 characters"
        ):
            open_weights(path).read("w")

    assert peak(read) < 2**21


def test_lines_beyond_those_declared_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "w.mtx"
    path.write_text(f"{BANNER}9 9 1\n" + 300_000 * "1 1 1\n")

    def read() -> None:
        with pytest.raises(InvalidFile, match="must go on with 1 lines of 3 numbers"):
            open_weights(path).read("w")

    assert peak(read) < 2**20


def test_a_long_comment_is_read(tmp_path: Path) -> None:
    (tmp_path / "w.mtx").write_text(f"{BANNER}%{'c' * 60_000}\n2 2 1\n%{'c' * 60_000}\n2 1 3\n")
    assert open_weights(tmp_path / "w.mtx").read("w").tolist() == [[0, 0], [3, 0]]


def test_arrays_beyond_the_free_memory_are_refused_even_where_the_matrix_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("scipy")
    many = np.zeros(10**6)
    parts = {
        "format": b"coo",
        "shape": (2, 2),
        "row": many.astype(int),
        "col": many.astype(int),
        "data": many,
    }
    np.savez_compressed(tmp_path / "w.npz", **parts)
    monkeypatch.setattr(memory, "available_memory", lambda: 10**6)
    with pytest.raises(
        InvalidFile, match=r"of shape \[1000000\] takes 0.008 GB; 0.001 GB of memory are free"
    ):
        open_weights(tmp_path / "w.npz").read("w")


def fault_of(use: Callable[[], Any]) -> str:
    with pytest.raises((InvalidFile, InvalidInput)) as caught:
        use()
    return str(caught.value)


def test_a_renamed_member_of_a_zip_is_not_quoted_whole(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w" * 8000 + ".npy", b"")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"www", b"\xff\xff\xff", 100))
    said = fault_of(lambda: open_weights(path))
    assert "File name in directory" in said
    assert len(said) < len(str(path)) + LONGEST_MESSAGE


LONG = "n" * 50_000


def test_no_message_quotes_a_long_name_of_a_file_whole(tmp_path: Path) -> None:
    ours, theirs, zipped = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.npz"))
    sk.save({LONG: MATRIX}, ours)
    save_file({LONG: torch.zeros(2, 2, dtype=torch.int32)}, theirs)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(f"{LONG}.npy", b"bad")
    damaged = bytearray(ours.read_bytes())
    damaged[-1] ^= 1
    ours.write_bytes(damaged)
    for use in (
        lambda: sk.load(ours),
        lambda: sk.load(ours, "w"),
        lambda: open_weights(theirs).read(LONG),
        lambda: open_weights(theirs).read("w"),
        lambda: open_weights(zipped),
        lambda: sk.save({f"{LONG}\n": MATRIX}, tmp_path / "d"),
        lambda: sk.save({LONG: None}, tmp_path / "d"),  # type: ignore[dict-item]
    ):
        assert len(fault_of(use)) < len(str(ours)) + LONGEST_MESSAGE
    assert len(open_weights(theirs).described()) < LONGEST_MESSAGE


def test_no_message_quotes_a_long_dtype_or_shape_whole(tmp_path: Path) -> None:
    plain = {"descr": "<f4", "fortran_order": False, "shape": (1,)}
    for at, changes in enumerate(
        ({"descr": "x" * 9000}, {"descr": [("x" * 9000, "<f4")]}, {"shape": (2**62,) * 64})
    ):
        text = repr(plain | changes).encode()
        path = tmp_path / f"{at}.npy"
        path.write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text)
        assert len(fault_of(lambda path=path: open_weights(path).read(path.stem))) < 2 * LONGEST_MESSAGE
    many = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros([1] * 5000)}, many)
    assert len(fault_of(lambda: open_weights(many).read("w"))) < len(str(many)) + LONGEST_MESSAGE


@pytest.mark.parametrize("kind", SPECIAL)
def test_records_are_regular_files_too(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path / "t.jsonl", kind)
    with pytest.raises(InvalidFile, match=f"is a {kind}"):
        records.read(path)
    assert stat.S_IFMT(path.lstat().st_mode) == SPECIAL[kind]


def test_a_list_of_shapes_may_be_longer_than_a_file_name() -> None:
    assert len(shapes_in(",".join(f"{side}x64" for side in range(1, 400)))) == 399


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_link_to_an_open_file_without_a_name_is_refused(tmp_path: Path) -> None:
    """Its text names another file, which would be written in its place."""
    with (tmp_path / "gone").open("w+b") as file:
        (tmp_path / "gone").unlink()
        with pytest.raises(InvalidInput, match="without a name of its own"):
            sk.save(MATRIX, f"/proc/self/fd/{file.fileno()}")
    assert not list(tmp_path.iterdir())


def test_the_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "w.safetensors")
    with pytest.raises(InvalidInput, match=f"there is no folder {re.escape(str(tmp_path / 'nowhere'))}"):
        sk.save(MATRIX, tmp_path / "link")
