"""Files with forged records and forged tensors, and with the right checksums over them, are refused, of every kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidFile
from sparsek.files import io
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.random import random_bsr
from tests.files import test_io, test_mask_io, test_quantized_io, test_two_four_io
from tests.files.test_damage import same
from tests.files.test_io import small
from tests.products.formats import fp8
from tests.products.formats.fp8 import E5M2
from tests.products.formats.two_four import bsr24, semi24

Change = Callable[[Tensor], Tensor]


def zeros() -> BSR:
    """A block in each of five rows."""
    starts, columns = torch.arange(6, dtype=torch.int32), torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32)
    pattern = BlockPattern((70, 50), (16, 32), starts, columns)
    return BSR(pattern, torch.zeros(5, 16, 32, dtype=torch.float16))


def whole24() -> BSR24:
    return BSR24.from_bsr(random_bsr(150, 190, 64, 1.0, dtype=torch.float16))


def mask() -> BlockMask:
    return test_mask_io.small()


def q_bsr() -> Quantized:
    return quantize(fp8.bsr())


def q_semi24() -> Quantized:
    return quantize(fp8.semi24())


def q_bsr24() -> Quantized:
    return quantize(fp8.bsr24())


OF_FP8 = (q_bsr, q_semi24, q_bsr24)


def put(tensor: Tensor, at: int, value: float) -> Tensor:
    """The tensor with one element changed."""
    changed = tensor.clone()
    changed.view(-1)[at] = value
    return changed


def loaded(folder: Path, a: Any, part: str = "", change: Change | None = None, **changes: Any) -> Any:
    """What a file gives that holds `a` with a changed tensor, or with changes in its record."""
    path, prefix = folder / "forged.safetensors", "" if isinstance(a, BlockMask) else "matrix."
    if isinstance(a, BSR):
        tensors = test_io.parts("matrix", a)
    elif isinstance(a, BlockMask):
        tensors = test_mask_io.tensors_of(a)
    elif isinstance(a, Quantized):
        tensors = test_quantized_io.parts(a)
    else:
        tensors = test_two_four_io.parts24("matrix", a)
    if change is not None:
        tensors[prefix + part] = change(tensors[prefix + part]).contiguous()
    if isinstance(a, BSR):
        about = test_io.about(a, **({"crc32": test_io.crc_of(tensors)} | changes))
        return io.load(test_io.forge(path, about, tensors))
    if isinstance(a, BlockMask):
        return io.load(test_mask_io.forge(path, a, tensors, **changes))
    made: Any = test_quantized_io.forged if isinstance(a, Quantized) else test_two_four_io.forge24
    return io.load(made(path, a, tensors, **changes))


@pytest.mark.parametrize("make", [small, semi24, bsr24, mask])
def test_the_forgery_without_changes_is_a_right_file(tmp_path: Path, make: Callable[[], Any]) -> None:
    a = make()
    assert same(loaded(tmp_path, a), a)


@pytest.mark.parametrize(("make", "kind"), fp8.CASES)
def test_the_forgery_in_fp8_without_changes_is_a_right_file(tmp_path: Path, make: Any, kind: Any) -> None:
    q = quantize(make(), scale=kind)
    assert same(loaded(tmp_path, q), q)


RECORDS: tuple[tuple[Callable[[], Any], dict[str, Any]], ...] = (
    *((small, changes) for changes in (
        {"kind": "csr"}, {"kind": ["bsr"]}, {"extra": 1}, {"dtype": "fp8"}, {"dtype": None}, {"dtype": ["fp16"]},
        {"dtype": "fp32"}, {"crc32": 1}, {"crc32": "1"}, {"transposed": 1},
        {"shape": [70]}, {"shape": "70"}, {"shape": [70.0, 50]}, {"shape": [True, 50]}, {"shape": [70, 50, 1]},
        {"shape": [-70, 50]}, {"shape": [70, -1]}, {"shape": [2**31, 50]},
        {"shape": [10**30, 50]}, {"shape": [70, 2**63]},
        {"shape": [100, 50]}, {"shape": [70, 20]}, {"shape": [66, 50]},
        {"block": [0, 32]}, {"block": [-16, 32]}, {"block": [17, 32]}, {"block": [1024, 32]}, {"block": [32, 16]},
        {"block": [10**30, 32]}, {"block": {}},
    )),
    *((semi24, changes) for changes in (
        {"kind": "bsr"}, {"kind": "bsr24"}, {"kind": "block_mask"}, {"extra": 1}, {"block": [64, 64]},
        {"dtype": "bf16"}, {"dtype": 16}, {"crc32": 1}, {"shape": [6]}, {"shape": [6, 20]}, {"shape": [7, 40]},
        {"shape": [6.0, 40]}, {"shape": [6, 10**30]}, {"shape": None},
    )),
    *((whole24, changes) for changes in (
        {"kind": "bsr"}, {"kind": "semi24"}, {"extra": 1}, {"transposed": False}, {"dtype": "bf16"}, {"dtype": None},
        {"crc32": 1}, {"shape": [150]}, {"shape": [150, 100]}, {"shape": [15, 190]}, {"shape": [10**30, 190]},
        {"shape": [150, 129]}, {"block": [64, 32]}, {"block": [32, 64]}, {"block": [128, 128]}, {"block": [64, True]},
        {"block": 64},
    )),
    *((make, changes) for make in OF_FP8 for changes in (
        {"kind": "bsr"}, {"kind": "semi24"}, {"kind": "bsr24"}, {"of": "csr"}, {"of": None}, {"of": ["bsr"]},
        {"dtype": "e5m2"}, {"dtype": "fp8"}, {"dtype": "fp16"}, {"dtype": 8}, {"scale": "tensor"}, {"scale": "column"},
        {"scale": None}, {"scale": "block"}, {"transposed": True}, {"transposed": 0}, {"extra": 1}, {"crc32": 1},
        {"shape": [70]}, {"shape": None}, {"shape": [1, 1]}, {"shape": [10**30, 50]}, {"shape": [70.0, 50]},
        {"block": [16, 32, 1]}, {"block": "x"}, {"block": [17, 32]}, {"block": [10**30, 64]}, {"fast_accum": 1},
    )),
    (q_bsr, {"of": "bsr24"}), (q_bsr, {"of": "semi24"}), (q_bsr, {"block": None}), (q_bsr, {"block": [32, 16]}),
    (q_bsr, {"shape": [50, 70]}), (q_bsr24, {"of": "bsr"}), (q_bsr24, {"block": [64, 32]}),
    (q_bsr24, {"of": "semi24"}), (q_bsr24, {"block": None}), (q_semi24, {"block": [16, 16]}),
    (q_semi24, {"of": "bsr24"}), (q_semi24, {"shape": [9, 48]}), (q_semi24, {"shape": [9, 20]}),
    *((mask, changes) for changes in (
        {"kind": "bsr"}, {"kind": "mask"}, {"kind": ["block_mask"]}, {"extra": 1}, {"crc32": 1}, {"crc32": None},
        {"lengths": [130]}, {"lengths": "130"}, {"lengths": [130.0, 200]}, {"lengths": [-130, 200]},
        {"lengths": [300, 200]}, {"lengths": [130, 60]}, {"lengths": [2**40, 200]}, {"lengths": [130, 2**40]},
        {"lengths": [130, 10**30]},
        {"block": [64, 128]}, {"block": [32, 32]}, {"block": [128, 128]}, {"block": [0, 64]}, {"block": None},
        {"batch": 2}, {"batch": 0}, {"batch": -1}, {"batch": True}, {"batch": "1"}, {"heads": 1}, {"heads": 10**18},
        {"heads": 2.0}, {"pure": True}, {"pure": 0}, {"pure": None}, {"label": 3}, {"label": "a\nb"},
        {"rule": []}, {"rule": ["bits"]}, {"rule": ["bits", "rules"]}, {"rule": "rules"}, {"rule": [["rules"]]},
        {"rule": ["rules", "rules", "bits"]}, {"rule": ["lo", "rules", "bits"]}, {"rule": {"rules": 1}},
    )),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "changes"), RECORDS, ids=lambda x: str(x) if isinstance(x, dict) else x.__name__
)
def test_a_forged_record_is_refused(tmp_path: Path, make: Callable[[], Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidFile, match=r"forged\.safetensors: "):
        loaded(tmp_path, make(), **changes)


TENSORS: tuple[tuple[Callable[[], Any], str, Any], ...] = (
    *((zeros, part, lambda _, tensor=tensor: tensor) for part, tensor in (
        ("indptr", torch.tensor([0, 1, 2, 3, 4, 999], dtype=torch.int32)),
        ("indptr", torch.tensor([0, 3, 1, 3, 4, 5], dtype=torch.int32)),
        ("indptr", torch.tensor([0, 5], dtype=torch.int32)),
        ("indptr", torch.zeros(0, dtype=torch.int32)),
        ("indices", torch.full((5,), 2, dtype=torch.int32)),
        ("indices", torch.full((5,), -1, dtype=torch.int32)),
        ("indptr", torch.arange(6)),
        ("indices", torch.zeros(5)),
        ("indices", torch.zeros(5, 1, dtype=torch.int32)),
        ("values", torch.zeros(5, 16 * 32, dtype=torch.float16)),
        ("values", torch.zeros(5, 32, 16, dtype=torch.float16)),
        ("values", torch.zeros(4, 16, 32, dtype=torch.float16)),
        ("values", torch.zeros(5, 16, 32, dtype=torch.bfloat16)),
        ("values", torch.zeros(5, 16, 32, dtype=torch.float8_e4m3fn)),
        ("values", torch.ones(5, 16, 32, dtype=torch.float16)),
    )),
    *((make, part, change) for make in (semi24, bsr24) for part, change in (
        ("meta", torch.zeros_like),
        ("meta", lambda m: m | 0x0F),
        ("meta", lambda m: m.view(-1)),
        ("meta", lambda m: m[:1]),
        ("meta", lambda m: m[..., :1]),
        ("meta", lambda m: m.int()),
        ("meta", lambda m: m.view(torch.int8)),
        ("values", lambda v: v.view(-1)),
        ("values", lambda v: v[:1]),
        ("values", lambda v: v[..., :4]),
        ("values", lambda v: v.bfloat16()),
        ("values", lambda v: v.to(torch.float8_e4m3fn)),
    )),
    *((make, "scale", change) for make in OF_FP8 for change in (
        lambda s: put(s, 0, 0.0), lambda s: put(s, 0, -1.0), lambda s: put(s, 0, float("nan")),
        lambda s: put(s, 0, float("inf")), lambda s: s[1:], lambda s: s[None],
        lambda s: s[0], lambda s: s.double(), lambda s: s.int(),
    )),
    *((make, "values", change) for make in OF_FP8 for change in (
        lambda v: v.view(-1), lambda v: v[:1], lambda v: v.to(torch.float16), lambda v: v.view(torch.uint8),
        lambda v: v.to(E5M2), lambda v: v[..., :4],
    )),
    *((make, "meta", change) for make in (q_semi24, q_bsr24) for change in (
        torch.zeros_like, lambda m: m | 0x0F, lambda m: m[:1], lambda m: m.int(), lambda m: m[..., :1],
    )),
    (q_bsr, "values", lambda v: v.view(torch.uint8).fill_(1).view(v.dtype)),
    (q_bsr, "indices", lambda i: i - i.min() - 1),
    (q_bsr24, "indptr", lambda i: i + 1),
    *((mask, part, change) for part, change in (
        ("full_starts", lambda x: x - 1000),
        ("full_starts", lambda x: x + 2**30),
        ("partial_counts", lambda x: put(x, 1, -1)),
        ("partial_counts", lambda x: put(x, -1, 1000)),
        ("partial_indices", lambda x: put(x, 0, 4)),
        ("partial_indices", lambda x: put(x, 0, -1)),
        ("partial_indices", lambda x: x.flip(0)),
        ("full_indices", lambda x: x[:0]),
        ("rules", lambda x: put(x, 0, 1000)),
        ("rules", lambda x: put(x, 0, -2)),
        ("rules", lambda x: x[1:]),
        ("bits", lambda x: x[:-1]),
        ("bits", lambda x: x[:, :32]),
        ("bits", lambda x: x.to(torch.float32)),
        ("bits", lambda x: x.flatten()),
        ("bits", lambda x: torch.full_like(x, -1)),
        ("full_counts", lambda x: x.long()),
        ("full_counts", lambda x: x[None]),
        ("full_counts", lambda x: x[1:]),
    )),
)  # fmt: skip


@pytest.mark.parametrize(("make", "part", "change"), TENSORS)
def test_forged_tensors_are_refused_even_with_the_right_checksum(
    tmp_path: Path, make: Callable[[], Any], part: str, change: Change
) -> None:
    with pytest.raises(InvalidFile, match=r"forged\.safetensors: "):
        loaded(tmp_path, make(), part, change)
