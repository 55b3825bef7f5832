"""Per-token lists for tests: with repeats, absent entries, entries out of range, and empty tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.build.unions import ROWS, UnionInputs, packed_heads
from sparsek.attn.mask.lists import Place

FAR = 2**31 - 1


def drawn_indices(shape: tuple[int, ...], block: int, kv_len: int, seed: int) -> Tensor:
    """int32 [batch, heads, queries, n]."""
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-kv_len // block)
    indices = torch.randint(-1, blocks + 1, shape, generator=draw, dtype=torch.int32)
    odd = torch.tensor([FAR, -FAR - 1, blocks, -2], dtype=torch.int32)
    some = torch.rand(shape, generator=draw) < 0.1
    indices[some] = odd[torch.randint(0, 4, shape, generator=draw)][some]
    indices[:, :, 3::11] = -1
    return indices


def drawn_lists(shape: tuple[int, ...], block: int, kv_len: int, seed: int, **options: Any) -> sk.TokenLists:
    """Lists of indices as above."""
    return sk.TokenLists(drawn_indices(shape, block, kv_len, seed), block, **options)


class Case(NamedTuple):
    """`alike`: how many neighbours have one list. `documents`: lengths of documents in blocks, whose tokens lie in
    between.
    """

    group: int
    shape: tuple[int, int, int, int]
    side: int
    kv_len: int
    causal: bool = True
    window: int = 0
    sinks: int = 0
    alike: int = 1
    documents: bool = False


CASES = (
    Case(16, (1, 2, 70, 3), 64, 300, alike=8),
    Case(4, (1, 1, 100, 2), 128, 700, window=90, sinks=5, alike=64),
    Case(1, (1, 1, 200, 2), 64, 200, alike=200),
    Case(2, (2, 1, 130, 2), 64, 190, sinks=70, alike=50),
    Case(64, (1, 1, 9, 5), 64, 500, causal=False, sinks=130),
    Case(8, (1, 1, 40, 0), 128, 333, window=200),
    Case(8, (1, 1, 40, 1), 64, 20, window=1),
    Case(8, (1, 2, 60, 3), 64, 640, documents=True, window=70, sinks=65, alike=20),
    Case(1, (1, 1, 0, 2), 64, 64),
    Case(1, (1, 1, 5, 2), 64, 0),
)  # fmt: skip


def drawn(case: int, device: str = "cpu") -> UnionInputs:
    """The checked arguments of a case."""
    c = CASES[case]
    indices = drawn_indices(c.shape, c.side, c.kv_len, case)
    queries = c.shape[2]
    indices = indices[:, :, torch.arange(queries) // c.alike * c.alike]
    counts = torch.randint(-1, c.shape[3] + 2, c.shape[:3]) if case % 2 else None
    if case % 3 == 0:
        indices = indices.long().mT.contiguous().mT
    place = Place(
        queries, c.kv_len, (ROWS // packed_heads(c.group), c.side), torch.device(device), c.kv_len - queries
    )
    bounds = None
    if c.documents:
        lo = torch.randint(0, c.kv_len // c.side, (queries,)).sort().values // 3 * 3 * c.side
        bounds = (
            torch.stack((lo, (lo + torch.randint(-5, 300, (queries,))).clamp(0, c.kv_len))).int().to(device)
        )
    there = None if counts is None else counts.to(device)
    return UnionInputs(indices.to(device), there, bounds, place, c.side, c.causal, c.window, c.sinks, "drawn")
