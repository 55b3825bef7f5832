"""Saving and loading: what was saved comes back, and no file, however damaged or hostile, does anything else."""

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsek.core import arguments, memory
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files import io
from sparsek.files.tensor_file import as_bytes
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.products.formats.two_four import bsr24, semi24

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit: names, shapes, patterns, dtypes, values, and whether it is a transposed view."""
    if isinstance(a, dict) or isinstance(b, dict):
        return (
            isinstance(a, dict)
            and isinstance(b, dict)
            and list(a) == list(b)
            and all(same(a[n], b[n]) for n in a)
        )
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not isinstance(a, Semi24) and not a.pattern.same_as(b.pattern):
        return False
    if isinstance(a, BSR):
        return (a.order is None) == (b.order is None) and same_bytes(a.values, b.values)
    return same_bytes(a.values, b.values) and same_bytes(a.meta, b.meta)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bytes(as_bytes(a)) == bytes(as_bytes(b))


def small(seed: int = 0, dtype: torch.dtype = torch.float16) -> BSR:
    return random_bsr(70, 50, (16, 32), 0.4, dtype=dtype, seed=seed)


def parts(name: str, a: BSR) -> dict[str, torch.Tensor]:
    return {
        f"{name}.indptr": a.pattern.indptr,
        f"{name}.indices": a.pattern.indices,
        f"{name}.values": a.values,
    }


def crc_of(tensors: dict[str, torch.Tensor]) -> int:
    crc = 0
    for tensor in tensors.values():
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def record(a: BSR, **changes: Any) -> dict[str, Any]:
    dtype = {torch.float16: "fp16", torch.float32: "fp32"}[a.dtype]
    right = {
        "kind": "bsr",
        "shape": list(a.shape),
        "block": list(a.block),
        "dtype": dtype,
        "transposed": False,
    }
    return right | {"crc32": crc_of(parts("", a))} | changes


def forge(path: Path, about: Any, tensors: dict[str, torch.Tensor]) -> Path:
    """A file with any metadata at all, and with the right checksum over it."""
    text = about if isinstance(about, str) else json.dumps(about)
    save_file(tensors, path, {"sparsek": text, "sparsek.crc32": str(zlib.crc32(text.encode()))})
    return path


def about(a: BSR, **changes: Any) -> dict[str, Any]:
    return {"version": 1, "single": True, "matrices": {"matrix": record(a, **changes)}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [small, semi24, bsr24])
def test_a_matrix_comes_back_to_the_last_bit(tmp_path, make, dtype):
    a = make(dtype=dtype)
    a.values.view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=dtype)
    io.save(a, tmp_path / "a.safetensors")
    assert same(io.load(tmp_path / "a.safetensors"), a)
    io.save({"s": a}, tmp_path / "d.safetensors")
    assert same(io.load(tmp_path / "d.safetensors", "s"), a)
    headers = (path.read_bytes()[:8] for path in tmp_path.iterdir())
    assert all((8 + int.from_bytes(each, "little")) % 64 == 0 for each in headers), "values are not aligned"


def test_a_dict_comes_back_in_its_order_and_one_name_can_be_chosen(tmp_path):
    matrices = {"z.weight": small(1), "a": small(2, torch.float32), "Größe 3": small(3)}
    io.save(matrices, tmp_path / "d.safetensors")
    assert same(io.load(tmp_path / "d.safetensors"), matrices)
    assert same(io.load(tmp_path / "d.safetensors", "a"), matrices["a"])


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (64, 64), (1, 1)], ids=str)
def test_a_matrix_without_blocks_comes_back(tmp_path, shape):
    saved: dict[str, Any] = {"a": random_bsr(shape[0], shape[1], 16, 0.0)}
    if 0 in shape:
        saved |= {"s": semi24(*shape), "b": bsr24(*shape)}
    io.save(saved, tmp_path / "a.safetensors")
    assert same(io.load(tmp_path / "a.safetensors"), saved)


def test_an_empty_dict_comes_back(tmp_path):
    io.save({}, tmp_path / "d.safetensors")
    assert io.load(tmp_path / "d.safetensors") == {}


def test_a_transposed_view_comes_back_as_a_view_and_its_values_were_not_moved(tmp_path):
    a = small()
    io.save({"t": a.T}, tmp_path / "t.safetensors")
    loaded = io.load(tmp_path / "t.safetensors", "t")
    assert same(loaded, a.T)
    assert same(loaded.T, a)
    assert torch.equal(load_file(tmp_path / "t.safetensors")["t.values"], a.values)


def test_matrices_that_share_values_can_be_saved_together(tmp_path):
    a = small()
    io.save({"a": a, "again": a, "t": a.T}, tmp_path / "d.safetensors")
    assert same(io.load(tmp_path / "d.safetensors"), {"a": a, "again": a, "t": a.T})


def test_values_that_need_a_gradient_are_saved(tmp_path):
    a = small(dtype=torch.float32)
    a.values.requires_grad_()
    io.save(a, tmp_path / "a.safetensors")
    loaded = io.load(tmp_path / "a.safetensors")
    assert isinstance(loaded, BSR)
    assert torch.equal(loaded.values, a.values)


def test_a_loaded_matrix_does_not_depend_on_the_file(tmp_path):
    a, path = small(), tmp_path / "a.safetensors"
    io.save(a, path)
    loaded = io.load(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert same(a, loaded)


def test_saving_replaces_the_file_as_a_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.safetensors"
    io.save(small(1), path)
    io.save(small(2), path)
    assert same(io.load(path), small(2))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_failed_save_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    io.save(small(1), path)

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        io.save(small(2), path)
    assert same(io.load(path), small(1))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    io.save(small(), tmp_path / "a.safetensors")
    (tmp_path / "other").write_text("")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.safetensors", "other")]
    assert modes[0] == modes[1]


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    io.save(small(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(io.load(tmp_path / "real"), small())


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (torch.zeros(3), "not a torch.Tensor"),
        ({"a": torch.zeros(3)}, "'a' is a torch.Tensor"),
        ({3: small()}, "name of a matrix"),
        ({"": small()}, "name of a matrix"),
        ({"a\n": small()}, "cannot be printed"),
        ({"\ud800": small()}, "cannot be printed"),
    ],
    ids=["tensor", "dict of tensors", "number", "empty", "newline", "surrogate"],
)
def test_only_matrices_with_plain_names_are_saved(tmp_path, obj, message):
    with pytest.raises(InvalidInput, match=message):
        io.save(obj, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def test_an_object_of_another_class_is_refused(tmp_path):
    a, path = random_bsr(64, 64, 16, 0.5), tmp_path / "a.safetensors"
    io.save(a, path)
    assert torch.equal(io.load(path, kind=BSR).values, a.values)
    with pytest.raises(InvalidInput, match="it holds a BSR, not a Semi24"):
        io.load(path, kind=Semi24)
    io.save({"half": semi24(), "up": a, "down": a.T}, path)
    assert list(io.load(path, kind=dict)) == ["half", "up", "down"]
    assert io.load(path, "up", kind=BSR).shape == (64, 64)
    with pytest.raises(
        InvalidInput, match=r"it holds a dict, not a BSR; pass name='up', one of 'up', 'down'$"
    ):
        io.load(path, kind=BSR)
    with pytest.raises(InvalidInput, match=r"it holds a dict, not a Tensor$"):
        io.load(path, kind=torch.Tensor)
    with pytest.raises(InvalidInput, match=r"it holds a BSR, not a Semi24$"):
        io.load(path, "up", kind=Semi24)
    with pytest.raises(InvalidInput, match="kind is 'BSR'; it must be a class"):
        io.load(path, kind="BSR")  # type: ignore[call-overload]


def test_a_file_of_torch_save_is_told_as_such(tmp_path):
    path = tmp_path / "layer.pt"
    torch.save({"weight": torch.ones(3, 3)}, path)
    with pytest.raises(
        InvalidFile, match=r"no .safetensors file but a zip, as torch.save writes; read it by torch.load"
    ):
        io.load(path)


def test_a_missing_name_lists_near_ones(tmp_path):
    io.save({"encoder.query": small(), "encoder.key": small()}, tmp_path / "d.safetensors")
    with pytest.raises(InvalidInput, match=r"no matrix named 'encoder.qery'; did you mean 'encoder.query'"):
        io.load(tmp_path / "d.safetensors", "encoder.qery")
    with pytest.raises(InvalidInput, match=r"it holds 'encoder.query', 'encoder.key'$"):
        io.load(tmp_path / "d.safetensors", "zzz")


def test_a_missing_file_is_told_by_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        io.load(tmp_path / "none.safetensors")


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    save_file({"w": torch.zeros(3, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(InvalidFile, match=r"w.safetensors: not saved by SparseK"):
        io.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "3", '"x"', "{", "NaN", "{}", '{"version": 1}', '{"version": true}', '{"version": "1"}',
        '{"version": 2, "single": false, "matrices": {}}',
        '{"version": 1, "single": 0, "matrices": {}}',
        '{"version": 1, "single": false, "matrices": []}',
        '{"version": 1, "single": true, "matrices": {}}',
        '{"version": 1, "single": false, "matrices": {}, "more": 1}',
        '{"version": 1, "single": false, "matrices": {"a": null}}',
        '{"version": 1, "single": false, "matrices": {"a": {}, "a": {}}}',
        '{"version": 1, "version": 1, "single": false, "matrices": {}}',
        '{"version": ' + "9" * 10_000 + "}",
        "[" * 200_000,
    ],
)  # fmt: skip
def test_metadata_of_the_wrong_shape_is_refused(tmp_path, text):
    with pytest.raises(InvalidFile, match=r"forged\.safetensors: "):
        io.load(forge(tmp_path / "forged.safetensors", text, {}))


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path):
    a = small()
    tensors = parts("matrix", a)
    lacking = {name: tensor for name, tensor in tensors.items() if "indices" not in name}
    with pytest.raises(InvalidFile, match=r"lacks 1 tensors: matrix\.indices"):
        io.load(forge(tmp_path / "a.safetensors", about(a), lacking))
    with pytest.raises(InvalidFile, match=r"also has 1 tensors: other"):
        io.load(forge(tmp_path / "b.safetensors", about(a), tensors | {"other": torch.zeros(1)}))


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        bytes(8),
        (2**63).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        raw(b"{"),
        raw(b"[" * 100_000),
        raw(b"\xff\xfe"),
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
        raw({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}, bytes(8)),
        raw({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)),
        raw({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}, bytes(8)),
        raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],'
            b'"data_offsets":[4,8]}}', bytes(8)),
        raw({"__metadata__": {"sparsek": 3}}),
        raw({"__metadata__": {"sparsek": "{}", "sparsek.crc32": "0"}}),
    ],
    ids=range(15),
)  # fmt: skip
def test_hostile_bytes_are_refused(tmp_path, content):
    (tmp_path / "h.safetensors").write_bytes(content)
    with pytest.raises(InvalidFile, match=r"h\.safetensors: "):
        io.load(tmp_path / "h.safetensors")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**30 + 8)  # sparse on disk
    with pytest.raises(InvalidFile, match="a header of 1073741824 bytes is over the limit"):
        io.load(path)


def test_the_host_needs_memory_for_the_largest_object_of_those_that_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, many = tmp_path / "w.safetensors", random_bsr(1024, 512, 32, 1.0)
    io.save({"one": many, "two": many, "few": small()}, path)
    monkeypatch.setattr(memory, "available_memory", lambda: 3_000_000)
    monkeypatch.setattr(arguments, "device", lambda _, name: torch.device(name))  # meta in place of a GPU
    assert io.load(path, device="meta")["two"].values.is_meta
    assert same(io.load(path, "two"), many)
    with pytest.raises(InvalidFile, match=r"all of it takes 0\.00\d+ GB; 0\.003 GB of memory are free"):
        io.load(path)
    monkeypatch.setattr(memory, "available_memory", lambda: 2_000_000)
    with pytest.raises(InvalidFile, match=r"'one' takes 0\.0021 GB; 0\.002 GB of memory are free"):
        io.load(path, device="meta")
