"""Saving and loading FP8 with scales: what was saved comes back, and damaged or forged files are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.files import io
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from tests.files.test_io import crc_of, forge
from tests.files.test_io import same as same_matrix
from tests.products.formats.fp8 import CASES, E4M3, E5M2, FP8, KINDS, bsr, bsr24, same, semi24


@pytest.mark.parametrize(("make", "kind"), CASES)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_it_comes_back_to_the_last_bit(
    tmp_path: Path, make: Callable[..., Any], kind: Any, dtype: torch.dtype, device: str
):
    q = quantize(make(), dtype, kind).to(device)
    io.save(q, tmp_path / "q.safetensors")
    loaded = io.load(tmp_path / "q.safetensors", device=device)
    assert loaded.device.type == loaded.scale.device.type == device
    assert same(loaded.to("cpu"), q.to("cpu"))
    io.save({"a": q, "b": q.to("cpu")}, tmp_path / "d.safetensors")
    assert same(io.load(tmp_path / "d.safetensors", "b"), q.to("cpu"))


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_a_transposed_view_comes_back_as_a_view(tmp_path: Path, kind: Any):
    q = quantize(bsr(), scale=kind)
    io.save({"t": q.T}, tmp_path / "t.safetensors")
    loaded = io.load(tmp_path / "t.safetensors", "t")
    assert same(loaded, q.T)
    assert same(loaded.T, q)


def test_fast_accum_is_kept_and_missing_in_files_of_before(tmp_path: Path):
    q = quantize(bsr(), fast_accum=True)
    io.save(q, tmp_path / "q.safetensors")
    assert same(io.load(tmp_path / "q.safetensors"), q)
    of_before = forged(tmp_path / "f.safetensors", q, parts(q))
    assert same(io.load(of_before), q.with_fast_accum(False))
    assert same(io.load(forged(of_before, q, parts(q), fast_accum=True)), q)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (64, 64)], ids=str)
def test_matrices_without_values_come_back(tmp_path: Path, shape: tuple[int, int]):
    blocks = random_bsr(*shape, 64, 0.0)
    sources: list[Any] = [blocks, BSR24.from_bsr(blocks), Semi24.from_dense(torch.zeros(shape))]
    all_of = {
        f"{type(a).__name__} {kind}": quantize(a, scale=kind)
        for a in sources
        for kind in KINDS
        if (type(a), kind) != (Semi24, "block")
    }
    io.save(all_of, tmp_path / "d.safetensors")
    loaded = io.load(tmp_path / "d.safetensors")
    assert list(loaded) == list(all_of)
    assert all(same(loaded[name], all_of[name]) for name in all_of)


def test_a_file_with_all_sorts_is_aligned_and_any_reader_opens_it(tmp_path: Path):
    saved: dict[str, Any] = {
        "a": quantize(semi24(1, 8)), "b": semi24(3, 8, torch.float64), "c": quantize(bsr(16, 16, density=1.0)),
        "d": bsr(dtype=torch.float64), "e": quantize(semi24(5, 8), E5M2, "tensor"),
        "f": quantize(bsr24(), scale="block"), "g": bsr24(64, 64), "h": bsr24(dtype=torch.float64),
    }  # fmt: skip
    io.save(saved, tmp_path / "d.safetensors")
    loaded = io.load(tmp_path / "d.safetensors")
    for name, each in saved.items():
        assert (same if isinstance(each, Quantized) else same_matrix)(loaded[name], each)
    tensors = load_file(tmp_path / "d.safetensors")
    assert tensors["f.values"].dtype == E4M3
    for name, part in (
        ("f.scale", saved["f"].scale),
        ("g.meta", saved["g"].meta),
        ("d.values", saved["d"].values),
    ):
        assert torch.equal(tensors[name], part)
    assert torch.equal(tensors["d.indices"], saved["d"].pattern.indices)
    content = (tmp_path / "d.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            blocks = name.endswith(".values") and len(entry["shape"]) == 3
            step = 64 if blocks else tensors[name].element_size()
            assert (start + entry["data_offsets"][0]) % step == 0


def test_what_was_spoiled_in_place_is_not_saved(tmp_path: Path):
    a, b, c = quantize(bsr()), quantize(semi24()), quantize(bsr24())
    a.matrix.values.view(torch.uint8).fill_(1)
    b.matrix.meta.zero_()  # type: ignore[union-attr]
    c.scale[5] = 0
    plain: list[Any] = [semi24(), bsr24()]
    for each in plain:
        each.meta.zero_()
    for each, message in (
        *((each, "groups have malformed metadata") for each in plain),
        (a, "values in the padding"),
        (b, "groups have malformed metadata"),
        (c, "1 of 150 scales are not positive"),
    ):
        with pytest.raises(InvalidInput, match=message):
            io.save({"q": each}, tmp_path / "q.safetensors")
    assert os.listdir(tmp_path) == []


def parts(q: Quantized) -> dict[str, Tensor]:
    a: Any = q.matrix
    found = {} if isinstance(a, Semi24) else {"indptr": a.pattern.indptr, "indices": a.pattern.indices}
    found["values"] = a.values
    if not isinstance(a, BSR):
        found["meta"] = a.meta
    return {f"matrix.{name}": part for name, part in (found | {"scale": q.scale}).items()}


def forged(path: Path, q: Quantized, tensors: dict[str, Tensor], **changes: Any) -> Path:
    record = {
        "kind": "scaled",
        "of": type(q.matrix).__name__.lower(),
        "shape": list(q.shape),
        "block": None if isinstance(q.matrix, Semi24) else list(q.matrix.block),
        "dtype": {E4M3: "e4m3", E5M2: "e5m2"}[q.dtype],
        "transposed": False,
        "scale": q.kind,
        "crc32": crc_of(tensors),
    }
    return forge(path, {"version": 1, "single": True, "matrices": {"matrix": record | changes}}, tensors)
