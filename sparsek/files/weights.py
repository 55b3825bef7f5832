"""Weight files of other programs: .safetensors, .npy, .npz (NumPy's or SciPy's) and MatrixMarket .mtx.

`open_weights(path)` lists the contents of a file without reading them; `.read(name)` returns one matrix as a dense CPU
tensor in the dtype of the file. No pickle is ever read. Sizes that a file declares are checked against its length,
`MAX_ELEMENTS` and the free memory before anything is allocated.
"""

import ast
import importlib
import itertools
import math
import os
import re
import reprlib
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import dtypes, files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.files import StrPath, faults, shortened
from sparsek.core.memory import check_free
from sparsek.files.io import unknown_name
from sparsek.files.tensor_file import TAGS, opened

MAX_ELEMENTS = 2**31
NPY_HEADER_LIMIT = 10_000  # NumPy's own limit: a longer literal can overflow the stack of Python's parser
NPY_SIDES = 64  # as NumPy 2 allows
NPY_PLAIN = re.compile("[<>|=](b1|[iu][1248]|f[248]|c8|c16|[SU][1-9][0-9]{0,3})")
NPY_FLOATS = {"f2": "fp16", "f4": "fp32", "f8": "fp64"}
DEFLATE_RATIO = 1032  # deflate makes 258 bytes of 2 bits at best
MTX_BANNER = re.compile(
    r"%%matrixmarket\s+matrix\s+(coordinate|array)\s+(real|double|integer|pattern|complex)\s+"
    r"(general|symmetric|skew-symmetric|hermitian)"
)
MTX_LINE = 65_536  # characters; the format allows 1024
MTX_SIZES = re.compile(r"[0-9]{1,18}(\s+[0-9]{1,18})+")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
SCIPY_FORMATS = ("csr", "csc", "bsr", "coo", "dia")
SCIPY_PARTS = {"data", "indices", "indptr", "row", "col", "coords", "offsets"}
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


class Entry(NamedTuple):
    """One array of a file: name, shape, and dtype ("bf16", "fp16", "fp32", "fp64" or the name in the file)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def choosable(self) -> bool:
        """Whether it is a 2-D matrix of floats, which can be pruned to blocks."""
        return len(self.shape) == 2 and self.dtype in TAGS

    @property
    def words(self) -> str:
        """Dtype and shape, for messages: "int32 of shape [64, 64]"."""
        if self.dtype in ("|O", "O"):
            return f"pickled Python objects of shape {shown(list(self.shape))}, which are never read"
        plain = NPY_PLAIN.fullmatch(self.dtype)
        word = np.dtype(self.dtype).name if plain else shortened(self.dtype)
        return f"{word} of shape {shown(list(self.shape))}"


class WeightFile(ABC):
    """A file of weights. `entries` maps every name to its Entry; only headers have been read."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, Entry] = {}
        for entry in self._entries():
            if entry.name in self.entries:
                raise InvalidFile(f"{path}: two arrays are named {shown(entry.name)}")
            self.entries[entry.name] = entry

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.names())} matrices)"

    def names(self) -> list[Entry]:
        """Return the 2-D float matrices, as (name, shape, dtype)."""
        return [entry for entry in self.entries.values() if entry.choosable]

    def described(self) -> str:
        """Return a summary of the file: name, dtype and shape of its first arrays."""
        found = [
            f"{shown(entry.name)} ({entry.words})" for entry in itertools.islice(self.entries.values(), 3)
        ]
        more = len(self.entries) - len(found)
        return ", ".join(found) + (f" and {more} more" if more else "") if found else "no array at all"

    def read(self, name: str) -> Tensor:
        """Return the matrix `name` as a dense contiguous CPU tensor [M, K] in the dtype of the file.

        Raises:
            InvalidInput: For a name that is not in the file (the message lists similar ones) or is no 2-D float matrix.
            InvalidFile: For bytes that contradict the header, for more than 2^31 elements, and for more bytes than the
                machine has free.
        """
        entry = self.entries.get(name) if isinstance(name, str) else None
        if entry is None:
            raise unknown_name(self.path, name, {entry.name: entry for entry in self.names()})
        if not entry.choosable:
            raise InvalidInput(f"{self.path}: {shown(name)} is {entry.words}; choose a 2-D float matrix")
        if max(*entry.shape, math.prod(entry.shape)) > MAX_ELEMENTS:
            raise self._fault(
                f"{shown(name)} of shape {list(entry.shape)} is over the limit of {MAX_ELEMENTS} elements"
            )
        takes = math.prod(entry.shape) * dtypes.itemsize(entry.dtype)
        check_free(self.path, f"{shown(name)} of shape {list(entry.shape)}", takes, " as a dense matrix")
        matrix = self._matrix(entry)
        if tuple(matrix.shape) != entry.shape:
            raise self._fault(
                f"{shown(name)} is of shape {list(matrix.shape)}; {list(entry.shape)} was declared"
            )
        return matrix

    def raw(self, name: str) -> Tensor:
        """Return an array of any shape and dtype as it is stored, where the format has other dtypes than floats."""
        raise InvalidInput(f"{self.path}: {shown(name)} can only be read as a matrix of floats")

    def _fault(self, what: str) -> InvalidFile:
        return InvalidFile(f"{self.path}: {what}")

    @abstractmethod
    def _entries(self) -> Iterable[Entry]:
        """The arrays that the headers declare."""

    @abstractmethod
    def _matrix(self, entry: Entry) -> Tensor:
        """The values of a choosable entry."""


class Safetensors(WeightFile):
    """A .safetensors file of another program; SparseK's own files contain parts of sparse matrices, not weights."""

    def _entries(self) -> Iterator[Entry]:
        words: dict[str, str] = {tag: name for name, tag in TAGS.items()}
        with opened(self.path) as file:
            if "sparsek.crc32" in file.metadata:
                raise self._fault("saved by SparseK, so it holds no dense weights; sparsek.load reads it")
            for name, found in file.tensors.items():
                yield Entry(name, found.shape, words.get(found.tag, found.tag))

    def _matrix(self, entry: Entry) -> Tensor:
        return self.raw(entry.name)

    def raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        with opened(self.path) as file:
            found = file.tensors.get(name)
            if found is None or (TAGS.get(entry.dtype, entry.dtype), entry.shape) != found[:2]:
                raise self._fault(f"{shown(name)} has changed since the file was opened first")
            return file.read(name)


class Npy(WeightFile):
    """A .npy file: one array, named after the file."""

    def _entries(self) -> Iterator[Entry]:
        with self._opened() as (_, header):
            yield header.entry(self.path.stem)

    def _matrix(self, entry: Entry) -> Tensor:
        with self._opened() as (file, header):
            return torch.from_numpy(header.array(file, self.path))

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], "NpyHeader"]]:
        """The file, positioned after its header, which fits its size."""
        with files.regular(self.path) as file:
            header = NpyHeader.read(file, self.path)
            header.check(os.fstat(file.fileno()).st_size, self.path)
            yield file, header


class Npz(WeightFile):
    """A zip of .npy files, from numpy.savez or numpy.savez_compressed."""

    def _entries(self) -> Iterator[Entry]:
        for name, header in _npz_headers(self.path).items():
            yield header.entry(name)

    def _matrix(self, entry: Entry) -> Tensor:
        return torch.from_numpy(_npz_array(self.path, entry.name))


class ScipyNpz(WeightFile):
    """A matrix from scipy.sparse.save_npz (csr, csc, bsr, coo or dia), named after the file. Needs SciPy."""

    def _entries(self) -> Iterator[Entry]:
        shape = _npz_array(self.path, "shape", limit=2)
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape.min() < 0:
            raise self._fault("the shape of its matrix must be two integers that are not negative")
        header = _npz_headers(self.path)["data"]
        yield Entry(self.path.stem, (int(shape[0]), int(shape[1])), header.dtype)

    def _matrix(self, entry: Entry) -> Tensor:
        sparse = _scipy("scipy.sparse", self.path)
        with faults(self.path, ValueError):
            word = _npz_array(self.path, "format", limit=1).item()
        word = word.decode("ascii", "replace") if isinstance(word, bytes) else word
        if word not in SCIPY_FORMATS:
            raise self._fault(f"its sparse format is {shown(word)}; known: {', '.join(SCIPY_FORMATS)}")
        held = SCIPY_PARTS & set(_npz_headers(self.path))
        parts = {name: _npz_array(self.path, name) for name in held}
        for name, part in parts.items():
            if name != "data" and part.dtype.kind not in "iu":
                raise self._fault(f"its {name} must be integers, not {part.dtype}")
        with faults(self.path, ValueError, TypeError, LookupError, ArithmeticError):
            matrix = _sparse(sparse, word, parts, entry.shape)
            return torch.from_numpy(np.ascontiguousarray(matrix.toarray()))


class MatrixMarket(WeightFile):
    """A MatrixMarket .mtx file, named after the file. https://math.nist.gov/MatrixMarket/formats.html

    Text has no dtype: real, integer and pattern matrices are read as float64, which is exact except for integers over
    2^53. Duplicate coordinates are added, and symmetric matrices are completed. The parser is NumPy's, because SciPy
    1.17 crashes with a segmentation fault on some damaged arrays.
    """

    def _entries(self) -> Iterator[Entry]:
        with self._text() as file:
            size = os.fstat(file.fileno()).st_size
            header = self._header(self._lines(file))
        # An entry is "1 1\n" at least, a number of an array "1\n"; the last newline may be missing.
        if header.lines * (4 if header.layout == "coordinate" else 2) > size + 1:
            raise self._fault(f"{size} bytes cannot hold the {header.lines} entries that are declared")
        yield Entry(self.path.stem, header.shape, "fp64" if header.field != "complex" else header.field)

    def _matrix(self, entry: Entry) -> Tensor:
        with self._text() as file, faults(self.path, ValueError, OverflowError):
            every = self._lines(file)
            header = self._header(every)
            numbers = (line for line in every if line.strip() and not line.lstrip().startswith("%"))
            lines = itertools.islice(
                numbers, header.lines + 1
            )  # one too many is seen, and a million are not read
            first = next(lines, None)
            width = 1 if header.layout == "array" else 2 if header.field == "pattern" else 3
            table = np.empty((0, width))
            if first is not None:
                table = np.loadtxt(itertools.chain([first], lines), np.float64, comments=None, ndmin=2)
            if table.shape != (header.lines, width):
                raise self._fault(f"must go on with {header.lines} lines of {width} numbers")
            return torch.from_numpy(header.fill(table))

    def _text(self) -> TextIOWrapper:
        return TextIOWrapper(files.regular(self.path), encoding="latin-1")

    def _lines(self, file: TextIOWrapper) -> Iterator[str]:
        """The lines of the file. Raises InvalidFile for a line that is longer than any program writes."""
        for number in itertools.count(1):
            line = file.readline(MTX_LINE + 1)
            if len(line) > MTX_LINE:
                raise self._fault(f"line {number} is longer than the limit of {MTX_LINE} characters")
            if not line:
                return
            yield line

    def _header(self, lines: Iterator[str]) -> "MtxHeader":
        banner = MTX_BANNER.fullmatch(next(lines, "").strip().lower())
        if banner is None:
            raise self._fault("must begin with %%MatrixMarket matrix, a layout, a field and a symmetry")
        layout, field, symmetry = banner.groups()
        line = next((line for line in lines if line.strip() and not line.startswith("%")), "")
        sizes = line.split()
        if len(sizes) != (3 if layout == "coordinate" else 2) or not MTX_SIZES.fullmatch(line.strip()):
            raise self._fault(
                f"its size line must be M, K{' and entries' * (layout != 'array')}, not {line[:60]!r}"
            )
        rows, columns, *stored = map(int, sizes)
        if symmetry != "general" and rows != columns:
            raise self._fault(f"is {symmetry}, so it must be square, not {rows} x {columns}")
        if layout == "array" and field == "pattern":
            raise self._fault("is an array without values")
        return MtxHeader((rows, columns), stored[0] if stored else None, field, symmetry)


class MtxHeader(NamedTuple):
    """The header of a .mtx file. `stored` is the number of coordinates, None for an array."""

    shape: tuple[int, int]
    stored: int | None
    field: str
    symmetry: str

    @property
    def layout(self) -> str:
        """ "array" or "coordinate"."""
        return "array" if self.stored is None else "coordinate"

    @property
    def lines(self) -> int:
        """The number of lines that follow: for a symmetric array, its lower triangle (a skew one: without diagonal)."""
        rows, columns = self.shape
        if self.stored is not None:
            return self.stored
        if self.symmetry == "general":
            return rows * columns
        return rows * (rows - 1 if self.symmetry == "skew-symmetric" else rows + 1) // 2

    def fill(self, table: np.ndarray) -> np.ndarray:
        """Return the dense float64 matrix of these lines. Raises ValueError for a coordinate out of bounds."""
        rows, columns = self.shape
        if self.layout == "array" and self.symmetry == "general":
            return np.ascontiguousarray(table.reshape(columns, rows).T)
        if self.layout == "array":
            j, i = np.triu_indices(rows, k=int(self.symmetry == "skew-symmetric"))
            value = table[:, 0]
        else:
            at = table[:, :2]
            bad = np.flatnonzero(~((at >= 1) & (at <= self.shape) & (at == np.floor(at))).all(axis=1))
            if bad.size:
                raise ValueError(
                    f"entry {bad[0] + 1} is at {at[bad[0]].tolist()}, outside {rows} x {columns}"
                )
            i, j = at.astype(np.int64).T - 1
            value = np.ones(len(table)) if self.field == "pattern" else table[:, 2]
        if self.symmetry != "general":
            half = i != j
            mirrored = -value[half] if self.symmetry == "skew-symmetric" else value[half]
            i, j = np.concatenate([i, j[half]]), np.concatenate([j, i[half]])
            value = np.concatenate([value, mirrored])
        dense = np.zeros((rows, columns))  # pages without an entry are never touched
        np.add.at(dense.reshape(-1), i * columns + j, value)
        return dense


class NpyHeader(NamedTuple):
    """The header of a .npy array: shape, order, dtype as in the file, and the length of the header in bytes.

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """

    shape: tuple[int, ...]
    fortran: bool
    descr: Any
    length: int

    @classmethod
    def read(cls, file: IO[bytes], where: StrPath) -> "NpyHeader":
        """Parse the header at the start of `file`. Raises InvalidFile if there is none."""
        start = file.read(8)
        if len(start) < 8 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
            raise InvalidFile(f"{where}: no .npy array: it must begin with \\x93NUMPY and version 1, 2 or 3")
        width = 2 if start[6] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        if length > NPY_HEADER_LIMIT:
            raise InvalidFile(f"{where}: .npy header of {length} bytes, over the limit of {NPY_HEADER_LIMIT}")
        text = file.read(length).decode("utf-8" if start[6] == 3 else "latin-1", "replace")
        with faults(where, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            fields = ast.literal_eval(text.strip())
        if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
            raise InvalidFile(f"{where}: a .npy header must have descr, fortran_order and shape")
        shape = fields["shape"]
        if not isinstance(shape, tuple) or len(shape) > NPY_SIDES:
            raise InvalidFile(
                f"{where}: the shape in a .npy header must be a tuple of at most {NPY_SIDES} sides"
            )
        if any(type(side) is not int or not 0 <= side < 2**63 for side in shape):
            raise InvalidFile(f"{where}: the shape in a .npy header must be integers from 0 to 2^63 - 1")
        if type(fields["fortran_order"]) is not bool:
            raise InvalidFile(f"{where}: fortran_order in a .npy header must be True or False")
        return cls(shape, fields["fortran_order"], fields["descr"], 8 + width + length)

    @property
    def numpy(self) -> np.dtype | None:
        """The NumPy dtype of plain numbers, bools and fixed text; None for objects and everything else."""
        plain = isinstance(self.descr, str) and NPY_PLAIN.fullmatch(self.descr)
        return np.dtype(self.descr) if plain else None

    @property
    def dtype(self) -> str:
        """The short name of a float dtype, otherwise the name in the file."""
        word = str(self.descr)
        return NPY_FLOATS.get(word[1:], word) if self.numpy is not None else word

    @property
    def nbytes(self) -> int:
        """The bytes of the array; 0 for an unknown dtype."""
        return math.prod(self.shape) * (self.numpy.itemsize if self.numpy is not None else 0)

    def entry(self, name: str) -> Entry:
        return Entry(name, self.shape, self.dtype)

    def check(self, size: int, where: StrPath) -> None:
        """Raise InvalidFile unless header and array fill `size` bytes. Unknown dtypes are not checked."""
        must = self.length + self.nbytes
        if self.numpy is not None and must != size:
            what = f"{self.dtype} of shape {reprlib.repr(list(self.shape))}"
            raise InvalidFile(f"{where}: {what} needs {must} bytes, not {size}")

    def array(self, file: IO[bytes], where: StrPath) -> np.ndarray:
        """Return the array that follows, in C order and native byte order; it must end where `file` does."""
        if self.numpy is None:
            raise InvalidFile(f"{where}: arrays of {shortened(self.dtype)} are not read")
        flat = np.empty(math.prod(self.shape), self.numpy)
        view, done = flat.view(np.uint8).data, 0
        while done < len(view):
            chunk = file.read(min(len(view) - done, 1 << 24))
            if not chunk:
                raise InvalidFile(f"{where}: ends after {done} of {len(view)} bytes of its array")
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
        if file.read(1):  # zipfile compares the checksum of a member only at its end
            raise InvalidFile(f"{where}: goes on after the {done} bytes of its array")
        array = flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)
        return np.ascontiguousarray(array, dtype=self.numpy.newbyteorder("="))


@contextmanager
def _zip(path: Path) -> Iterator[zipfile.ZipFile]:
    with files.regular(path) as file, faults(path, *ZIP_ERRORS), zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def _npz_member(
    archive: zipfile.ZipFile, path: Path, info: zipfile.ZipInfo
) -> Iterator[tuple[IO[bytes], NpyHeader]]:
    """One .npy member: its stream, positioned after the header, which fits the size that the zip declares."""
    where = f"{path}: {shown(info.filename)}"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidFile(f"{where}: compressed by method {info.compress_type}; NumPy only deflates")
    if info.file_size > DEFLATE_RATIO * info.compress_size + 64:
        raise InvalidFile(f"{where}: {info.compress_size} bytes cannot be unpacked to {info.file_size}")
    with archive.open(info) as stream:
        header = NpyHeader.read(stream, where)
        header.check(info.file_size, where)
        yield stream, header


def _npz_headers(path: Path) -> dict[str, NpyHeader]:
    headers: dict[str, NpyHeader] = {}
    with _zip(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                continue
            if name in headers:
                raise InvalidFile(f"{path}: two arrays are named {shown(name)}")
            with _npz_member(archive, path, info) as (_, header):
                headers[name] = header
    return headers


def _npz_array(path: Path, name: str, limit: int = MAX_ELEMENTS) -> np.ndarray:
    with _zip(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        with _npz_member(archive, path, info) as (stream, header):
            what = f"{shown(name)} of shape {shown(list(header.shape))}"
            if math.prod(header.shape) > limit:
                raise InvalidFile(f"{path}: {what} is over {limit} elements")
            check_free(path, what, header.nbytes)
            return header.array(stream, f"{path}: {shown(info.filename)}")


def _sparse(sparse: Any, word: str, parts: dict[str, np.ndarray], shape: tuple[int, ...]) -> Any:
    """The SciPy array of these parts, after checking all indices."""
    data = parts["data"]
    if word == "dia":
        return sparse.dia_array((data, parts["offsets"]), shape=shape)
    if word == "coo":
        coords = parts["coords"] if "coords" in parts else np.stack([parts["row"], parts["col"]])
        if data.ndim != 1 or coords.shape != (2, len(data)):
            raise ValueError(f"{data.shape} values and {coords.shape} coordinates do not fit together")
        return sparse.coo_array((data, tuple(coords)), shape=shape)
    indptr, indices = parts["indptr"], parts["indices"]
    # SciPy checks no index at all if the last pointer is 0.
    if not indptr.size or indptr[0] != 0 or indptr[-1] != indices.size or (indptr[1:] < indptr[:-1]).any():
        raise ValueError(f"indptr must rise from 0 to the number of indices, {indices.size}")
    made = getattr(sparse, f"{word}_array")((data, indices, indptr), shape=shape)
    made.check_format(full_check=True)
    return made


def _scipy(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(f"{path}: reading this file needs SciPy: pip install 'sparsek[scipy]'") from error


def _open_npz(path: Path) -> WeightFile:
    is_sparse = {"format", "shape", "data"} <= set(_npz_headers(path))
    return ScipyNpz(path) if is_sparse else Npz(path)


READERS: dict[str, Callable[[Path], WeightFile]] = {
    ".safetensors": Safetensors,
    ".npy": Npy,
    ".npz": _open_npz,
    ".mtx": MatrixMarket,
}


def open_weights(path: StrPath) -> WeightFile:
    """Open the weight file at `path`, in the format of its suffix; only its headers are read.

    Raises:
        FileNotFoundError: If there is no file.
        InvalidInput: For an unknown suffix.
        InvalidFile: For bad bytes, and for a path that is no regular file's.
    """
    path = files.as_path("path", path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        why = "; pickles can run code and are never read" if path.suffix in PICKLES else ""
        raise InvalidInput(f"{path}: the suffix must be one of {', '.join(READERS)}{why}")
    return reader(path)
