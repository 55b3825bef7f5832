"""Access to files at untrusted paths: only regular files are read and replaced.

So no call waits for a FIFO, reads a device without end, or replaces a device by a file. The check is made on the open
file, because a path may lead elsewhere a moment later.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError

StrPath: TypeAlias = str | os.PathLike[str]

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a symbolic link",
}
MOST_READ = 100_000_000  # bytes that `content` reads
# Errors caused by the path. Others, of a full or failing disk, are raised unchanged.
OF_A_PATH = frozenset({
    errno.EACCES, errno.EBUSY, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENODEV, errno.ENOTDIR, errno.ENXIO, errno.EPERM, errno.EROFS,
})  # fmt: skip


def as_path(name: str, value: Any) -> Path:
    """The path in the argument `name`: a str or an os.PathLike of one. Raises InvalidInput for anything else."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a path: a str or an os.PathLike of one")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        text = ""
    if not text or "\0" in text:
        raise InvalidInput(f"{name} is {shown(value)}; no file can have this name")
    return Path(text)


def regular(path: Path) -> BinaryIO:
    """A regular, non-empty file, opened for reading without waiting for a writer.

    Raises FileNotFoundError if there is none. Raises InvalidFile for an empty file (files in /proc have size 0, and
    some have no end), for a folder, FIFO, socket or device, and for a path that may not or cannot be opened.
    """
    file, size = _opened(path)
    if not size:
        file.close()
        raise InvalidFile(f"{path}: is empty")
    return file


def content(path: Path) -> bytes:
    """All bytes of a small regular file, by its size when opened. Raises as `regular`, but accepts an empty file, and
    raises InvalidFile for one of more than `MOST_READ` bytes.
    """
    file, size = _opened(path)
    with file:
        if size > MOST_READ:
            raise InvalidFile(f"{path}: has {size} bytes, over the limit of {MOST_READ}")
        return file.read(size)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` once all of it is on disk, and is removed if writing fails.

    Links are followed. Raises InvalidInput if `path` is anything but a regular file, before and after the file is
    written, and for a path that may not or cannot be written.
    """
    with blamed_on(path, InvalidInput, "cannot be written"):
        target = Path(os.path.realpath(path))
        _check_replaceable(path, target)
        beside = target.with_name(f".sparsek-{secrets.token_hex(8)}.tmp")
        try:
            with beside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _check_replaceable(path, target)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """Waits until no other thread or process has its turn in this folder; where folders have no locks, for nothing."""
    handle = None
    with suppress(OSError, ImportError):
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


@contextmanager
def blamed_on(path: Path, kind: type[SparseKError], what: str) -> Iterator[None]:
    """Turns an OSError caused by `path` into one of `kind`; a missing folder too, unless a file is read."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise kind(f"{shown(str(path))}: {what}: {error.strerror}") from error
        if error.errno == errno.ENOENT and kind is InvalidInput:
            folder = Path(os.path.realpath(path)).parent
            why = error.strerror if folder.is_dir() else f"there is no folder {folder}"
            raise kind(f"{path}: {what}: {why}") from error
        if error.errno in OF_A_PATH:
            raise kind(f"{path}: {what}: {error.strerror}") from error
        raise


def _opened(path: Path) -> tuple[BinaryIO, int]:
    """The file and its size. The path is checked before it is opened, because opening alone affects some devices."""
    with blamed_on(path, InvalidFile, "cannot be opened"):
        _check_regular(path, path.stat(), InvalidFile, "read")
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    found = os.fstat(file.fileno())
    try:
        _check_regular(path, found, InvalidFile, "read")
    except InvalidFile:
        file.close()
        raise
    return file, found.st_size


def _open_at_once(path: str, flags: int) -> int:
    """os.open that does not wait at a FIFO and does not take a terminal; later reads may wait, as for any file."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(handle, True)
    return handle


def _check_replaceable(path: Path, target: Path) -> None:
    """`path` as given, through links that only the system can resolve; `target` as a rename would see it."""
    for look in (path.stat, target.lstat):
        try:
            found = look()
        except FileNotFoundError:
            continue
        _check_regular(path, found, InvalidInput, "replaced")
    # A link of /proc to an unnamed file works, but its text names no path.
    if path.exists() and not target.exists():
        raise InvalidInput(
            f"{path}: is an open file without a name of its own; only files that have one are replaced"
        )


def _check_regular(path: Path, found: os.stat_result, kind: type[SparseKError], what: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        word = KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise kind(f"{path}: is {word}; only regular files are {what}")
