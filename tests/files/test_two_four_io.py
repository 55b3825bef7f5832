"""Saving and loading Semi24 and BSR24: what was saved comes back, and forged metadata is refused.

Damaged bytes and forged files are tried on all kinds in test_damage.py and test_forgery.py.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsek.core.errors import InvalidInput
from sparsek.files import io
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from tests.files.test_io import crc_of, forge, same, small
from tests.products.formats.two_four import bsr24, semi24


@pytest.mark.gpu
@pytest.mark.parametrize("make", [semi24, bsr24])
def test_a_2_4_matrix_is_saved_from_a_gpu_and_loaded_onto_it(tmp_path, make):
    a = make()
    io.save(a.to("cuda"), tmp_path / "a.safetensors")
    loaded = io.load(tmp_path / "a.safetensors", device="cuda")
    assert loaded.device.type == loaded.meta.device.type == "cuda"
    assert same(loaded.to("cpu"), a)


def test_all_kinds_in_one_file_are_aligned_for_any_reader(tmp_path):
    torch.manual_seed(0)
    saved = {
        "a": semi24(1, 8), "b": semi24(3, 8, torch.float64), "c": bsr24(64, 64), "d": semi24(5, 8, torch.float32),
        "e": small(dtype=torch.float64), "f": bsr24(dtype=torch.float64),
    }  # fmt: skip
    io.save(saved, tmp_path / "d.safetensors")
    assert same(io.load(tmp_path / "d.safetensors"), saved)
    assert torch.equal(load_file(tmp_path / "d.safetensors")["c.meta"], saved["c"].meta)
    content = (tmp_path / "d.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    for name, entry in entries.items():
        if name != "__metadata__":
            size = {"F16": 2, "F32": 4, "F64": 8, "I32": 4, "U8": 1}[entry["dtype"]]
            blocks = name.endswith(".values") and len(entry["shape"]) == 3
            assert (start + entry["data_offsets"][0]) % (64 if blocks else size) == 0


def test_metadata_that_was_spoiled_in_place_is_not_saved(tmp_path):
    for a in (semi24(), bsr24()):
        a.meta.zero_()
        with pytest.raises(InvalidInput, match="groups have malformed metadata"):
            io.save(a, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def record24(a: Semi24 | BSR24, **changes: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"kind": "semi24", "shape": list(a.shape), "dtype": "fp16"}
    if isinstance(a, BSR24):
        about |= {"kind": "bsr24", "block": list(a.block)}
    return about | {"crc32": crc_of(parts24("", a))} | changes


def parts24(name: str, a: Semi24 | BSR24) -> dict[str, torch.Tensor]:
    pattern = {} if isinstance(a, Semi24) else {"indptr": a.pattern.indptr, "indices": a.pattern.indices}
    return {f"{name}.{part}": each for part, each in (pattern | {"values": a.values, "meta": a.meta}).items()}


def forge24(path: Path, a: Semi24 | BSR24, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    about = {
        "version": 1,
        "single": True,
        "matrices": {"matrix": record24(a, crc32=crc_of(tensors)) | changes},
    }
    return forge(path, about, tensors)
