"""Saving and loading Semi24 and BSR24: what was saved comes back, and forged metadata is refused.

Damaged bytes and forged files are tried on all kinds in test_damage.py and test_forgery.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek.files import io
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from tests.files.test_io import crc_of, forge, same
from tests.products.formats.two_four import bsr24, semi24


@pytest.mark.gpu
@pytest.mark.parametrize("make", [semi24, bsr24])
def test_a_2_4_matrix_is_saved_from_a_gpu_and_loaded_onto_it(tmp_path, make):
    a = make()
    io.save(a.to("cuda"), tmp_path / "a.safetensors")
    loaded = io.load(tmp_path / "a.safetensors", device="cuda")
    assert loaded.device.type == loaded.meta.device.type == "cuda"
    assert same(loaded.to("cpu"), a)


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
