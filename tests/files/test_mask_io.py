"""Saving and loading block masks: what was saved comes back, and no damaged or hostile file does anything else."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidFile
from sparsek.files import io
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from tests.attn.attention_cases import ATTENTION_CASES, random_bits
from tests.refusals import refused

MASKS = {case.note: case.mask for case in ATTENTION_CASES}
PLAIN = ("q_len", "kv_len", "block", "batch", "heads", "pure", "label")
RULE = ("lo", "hi", "rules", "bits")


def tensors_of(mask: BlockMask) -> dict[str, Tensor]:
    """The tensors of a mask by the names that they have in a file."""
    lists = {"full": mask.full, "partial": mask.partial}
    found = {
        f"{name}_{part}": tensor for name, each in lists.items() for part, tensor in each._asdict().items()
    }
    rule = {name: getattr(mask, name) for name in RULE}
    return found | {name: tensor for name, tensor in rule.items() if tensor is not None}


def same(a: Any, b: Any) -> bool:
    """Equal to the last entry of every list and rule; of a matrix, to the last value."""
    if isinstance(a, BSR) or isinstance(b, BSR):
        return isinstance(b, BSR) and a.pattern.same_as(b.pattern) and torch.equal(a.values, b.values)
    if any(getattr(a, name) != getattr(b, name) for name in PLAIN):
        return False
    left, right = tensors_of(a), tensors_of(b)
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def small() -> BlockMask:
    return random_bits("cpu", (130, 200), (64, 64), heads=2, density=1.0)


def record(mask: BlockMask, tensors: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return {
        "kind": "block_mask",
        "lengths": [mask.q_len, mask.kv_len],
        "block": list(mask.block),
        "batch": mask.batch,
        "heads": mask.heads,
        "pure": mask.pure,
        "label": mask.label,
        "rule": [name for name in RULE if name in tensors],
        "crc32": checksum,
    } | changes


def forge(path: Path, mask: BlockMask, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A file with any record and any tensors, and with the right checksums over them."""
    text = json.dumps(
        {"version": 1, "single": True, "matrices": {"matrix": record(mask, tensors, **changes)}}
    )
    named = {f"matrix.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(named, path, {"sparsek": text, "sparsek.crc32": str(zlib.crc32(text.encode()))})
    return path


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_comes_back(tmp_path: Path, name: str):
    mask = MASKS[name]("cpu")
    io.save(mask, tmp_path / "m.safetensors")
    loaded = io.load(tmp_path / "m.safetensors")
    assert same(mask, loaded)
    assert loaded.sizes.exact
    assert torch.equal(loaded.to_dense(), mask.to_dense())


def test_masks_and_matrices_come_back_together_by_name(tmp_path: Path):
    objects = {"m": small(), "m.full": random_bsr(70, 50, (16, 32), 0.4), "other": BlockMask.causal(300)}
    io.save(objects, tmp_path / "d.safetensors")
    loaded = io.load(tmp_path / "d.safetensors")
    assert list(loaded) == list(objects)
    assert all(same(objects[name], loaded[name]) for name in objects)
    assert same(io.load(tmp_path / "d.safetensors", "other"), objects["other"])


def test_any_safetensors_reader_finds_the_lists(tmp_path: Path):
    mask = small()
    io.save({"m": mask}, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["m.partial_indices"], mask.partial.indices)
    assert set(found) == {f"m.{name}" for name in tensors_of(mask)}


def test_lists_that_are_views_are_saved_as_they_look(tmp_path: Path):
    causal = BlockMask.causal(500, block=64)
    wide = torch.zeros(2, 500, dtype=torch.int32)
    wide[1:] = causal.hi  # pyright: ignore[reportArgumentType]
    rows = BlockLists(torch.zeros((), dtype=torch.int32).expand(8), causal.full.counts, causal.full.indices)
    parts = {name: getattr(causal, name) for name in (*PLAIN, "sizes", "rules", "bits")}
    mask = BlockMask.unchecked(full=rows, partial=causal.partial, lo=causal.lo, hi=wide[1:], **parts)
    io.save(mask, tmp_path / "m.safetensors")
    assert same(io.load(tmp_path / "m.safetensors"), causal)


def test_a_large_mask_that_shares_its_lists_stays_small(tmp_path: Path):
    mask = BlockMask.causal(1 << 19, block=64)
    io.save(mask, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size < 5_000_000


def test_a_label_that_cannot_be_printed_is_not_saved(tmp_path: Path):
    mask = BlockMask.causal(64)
    object.__setattr__(mask, "label", "two\nlines")
    refused(r"the label 'two\\nlines' holds characters", io.save, mask, tmp_path / "m.safetensors")


def put(tensor: Tensor, at: int, value: int) -> Tensor:
    """The tensor with one element changed."""
    changed = tensor.clone()
    changed.view(-1)[at] = value
    return changed


@pytest.mark.parametrize("change", [{"lo": None}, {"hi": None}, {"lo": 5}, {"hi": -1}, {"hi": 301}], ids=str)
def test_forged_intervals_are_refused(tmp_path: Path, change: dict[str, int | None]):
    mask = BlockMask.causal(300, block=64)
    tensors = tensors_of(mask)
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = put(tensors[name], -1, value)
    with pytest.raises(InvalidFile, match=r"m\.safetensors: "):
        io.load(forge(tmp_path / "m.safetensors", mask, tensors))
