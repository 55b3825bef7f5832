"""Access to files at untrusted paths: only regular files are read and replaced.

So no call waits for a FIFO, reads a device without end, or replaces a device by a file. The check is made on the open
file, because a path may lead elsewhere a moment later.
"""

import errno
import os
import platform
import re
import secrets
import stat
import zlib
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
LONGEST_FAULT = 300  # characters
MOST_READ = 100_000_000  # bytes that `content` reads
# Names of half-written files: the machine's name as a number, the process, and a random number.
OWN = f".sparsek-{zlib.crc32(platform.node().encode()):08x}-"
ABANDONED = re.compile(r"\.sparsek-[0-9a-f]{8}-[0-9]{1,9}-[0-9a-f]{16}\.tmp")
# Errors caused by the path. Others, of a full or failing disk, are raised unchanged.
OF_A_PATH = frozenset({
    errno.EACCES, errno.EBUSY, errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
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
    path = Path(text)
    if text.endswith((os.sep, f"{os.sep}.", os.altsep or os.sep)) and not path.is_dir():
        raise InvalidInput(f"{name} is {shown(value)}; a name that ends so is a folder's, and there is none")
    return path


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

    Links are followed. The mode of a replaced file stays, and its owner where this process may give files away. Files
    that a killed process left half-written in the folder are removed first. Raises InvalidInput if `path` is anything
    but a regular file, before and after the file is written, and for a path that may not or cannot be written.
    """
    with blamed_on(path, InvalidInput, "cannot be written"):
        target = Path(os.path.realpath(path))
        _check_replaceable(path, target)
        _remove_abandoned(target.parent)
        old = target.stat() if target.exists() else None
        beside, file, lock = _begun(target.parent, 0o666 if old is None else 0o600)
        try:
            with file:
                yield file
                file.flush()
                if old is not None:
                    _give_away(file.fileno(), old)
                os.fsync(file.fileno())
            _check_replaceable(path, target)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
            if lock is not None:
                os.close(lock)


def _begun(folder: Path, mode: int) -> tuple[Path, BinaryIO, int | None]:
    """A new file in a folder, its path, and its lock, held while this process writes it."""
    while True:
        beside = folder / f"{OWN}{os.getpid()}-{secrets.token_hex(8)}.tmp"
        file = open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        lock = _locked(file.fileno())
        if lock is None or os.fstat(lock).st_nlink:
            return beside, file, lock
        file.close()  # another thread has taken it for abandoned before it was locked
        os.close(lock)


def _locked(handle: int, wait: bool = True) -> int | None:
    """A second handle of a file, locked until it is closed or the process ends; None if it cannot be locked."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return os.dup(handle)
    except (OSError, ImportError):
        return None


def _remove_abandoned(folder: Path) -> None:
    """Removes half-written files of processes on this machine that have ended: their locks are free.

    Names have the machine, because locks may not reach others, and the process, because it may have failed to lock.
    """
    if os.name != "posix":
        return  # without locks
    with suppress(OSError), os.scandir(folder) as listed:
        for name in [each.name for each in listed if ABANDONED.fullmatch(each.name)]:
            process = int(name.split("-")[2])
            with suppress(OSError):
                if name.startswith(OWN) and (process == os.getpid() or not _lives(process)):
                    _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_uid == getattr(os, "geteuid", int)():
            lock = _locked(handle, wait=False)
            if lock is not None:
                path.unlink(missing_ok=True)
                os.close(lock)
    finally:
        os.close(handle)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with suppress(OSError):  # an ended process is a zombie until its parent waits
        return not Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].startswith(b" Z")
    return True


def _give_away(handle: int, old: os.stat_result) -> None:
    """Owner, group and mode of a file as another has them. Where the group cannot stay, it may do what all may do."""
    if not hasattr(os, "fchown"):
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    for owner in (old.st_uid, -1):
        with suppress(OSError):
            os.fchown(handle, owner, old.st_gid)
            break
    if os.fstat(handle).st_gid != old.st_gid:
        mode = mode & ~0o070 | (mode & 0o007) << 3
    os.fchmod(handle, mode)


@contextmanager
def faults(path: object, *errors: type[Exception]) -> Iterator[None]:
    """Convert `errors`, which a parser raises on bad bytes, to an InvalidFile that names the file."""
    try:
        yield
    except InvalidFile:
        raise
    except errors as error:
        raise InvalidFile(f"{path}: {shortened(str(error) or type(error).__name__)}") from error


def shortened(text: str) -> str:
    """A text of a parser or of a file, cut to a length for a message: it may quote the file at any length."""
    return text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}..."


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
        file = open(path, "rb", opener=open_at_once)  # noqa: SIM115
    found = os.fstat(file.fileno())
    try:
        _check_regular(path, found, InvalidFile, "read")
    except InvalidFile:
        file.close()
        raise
    return file, found.st_size


def open_at_once(path: str, flags: int) -> int:
    """os.open that does not wait at a FIFO and does not take a terminal; later reads may wait, as for any file."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0), 0o666)
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
