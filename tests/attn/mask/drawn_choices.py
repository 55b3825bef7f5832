"""Choices of blocks of every kind, drawn at random, some with faults; and masks of them compared bit for bit."""

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.build.selection import LocalBlocks, Selection
from sparsek.attn.mask.lists import CHOSEN_SIZES, Place
from sparsek.attn.mask.mask import BlockMask

KINDS = ("topk", "mass", "map", "indices")
PLACES: tuple[dict[str, Any], ...] = (
    {"q_len": 128, "kv_len": 320, "block": 64},
    {"q_len": 200, "kv_len": 1300, "block": (128, 64)},
    {"q_len": 120, "kv_len": 500, "block": (64, 128), "q_offset": 250},
    {"q_len": 190, "kv_len": 130, "block": 64, "q_offset": -70},
    {"q_len": 130, "kv_len": 2600, "block": 128, "q_offset": 40},
    {"q_len": 300, "kv_len": 1500, "block": 256},
    {"q_len": 190, "kv_len": 700, "block": (64, 256), "q_offset": 300},
    {"q_len": 300, "kv_len": 300, "block": (256, 64)},
    {"q_len": 0, "kv_len": 100, "block": 64},
    {"q_len": 100, "kv_len": 0, "block": 64},
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def strided(x: Tensor, way: int) -> Tensor:
    """The same values in another memory layout."""
    if way == 0:
        return x
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2 + 3, dtype=x.dtype, device=x.device)
    view = wide[..., 1 : 1 + 2 * x.shape[-1] : 2] if way == 1 else wide[..., : x.shape[-1]].mT.contiguous().mT
    return view.copy_(x)


def drawn(
    kind: str, frame: int, causal: bool, seed: int, hostile: bool = False, device: str = "cpu"
) -> Selection:
    """A choice; `hostile`: with NaN, numbers out of range and repeated entries."""
    draw = torch.Generator().manual_seed(seed)
    place = Place.of(**PLACES[frame], device=device, sides_of=CHOSEN_SIZES)
    (tiles, columns), batch, heads, bk = place.grid, 2, 2, place.block[1]

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    def one(n: int) -> int:
        return int(ints(0, n, 1))

    lengths = None
    if one(2):
        lengths = ints(-30, bk + 40, 1 + one(2), columns)
        lengths = (lengths if hostile else lengths.clamp(0, bk)).to((torch.int32, torch.int64)[one(2)])
    names = {"kv_lengths": () if lengths is None else tuple(lengths.shape), "room": "k", "limit": (heads,)}
    always: Any = (
        None,
        None,
        LocalBlocks(1, None, 0),
        LocalBlocks(1, 100, 30),
        torch.rand(1, 1, tiles, columns, generator=draw) < 0.1,
    )
    always = always[one(5)]
    capacity, counts, limit, least, every = columns, None, 3, 0, False
    shape = (batch, heads, tiles, columns)
    if kind == "map":
        given = torch.rand(shape, generator=draw) < 0.4
    elif kind == "indices":
        each = min(columns, 6)
        given = torch.rand(shape, generator=draw).argsort(-1)[..., :each]
        given = torch.where(torch.rand(given.shape, generator=draw) < 0.2, -1, given)
        if one(2):
            given, counts = (
                given.abs() if hostile else given.sort(-1, descending=True).values,
                ints(0, each + 1, batch, 1, tiles),
            )
            counts = torch.minimum(counts, (given >= 0).sum(-1).amin(1, keepdim=True))
        if hostile:
            given = torch.where(
                torch.rand(given.shape, generator=draw) < 0.1, ints(-9, 2 * columns + 9, 1), given
            )
            counts = None if counts is None else counts + ints(-1, 2, *counts.shape) * 5
        given, capacity = given.to((torch.int32, torch.int64)[one(2)]), each
        names |= {"indices": tuple(given.shape), "counts": () if counts is None else tuple(counts.shape)}
    else:
        dtype = DTYPES[one(4)]
        given = torch.randn(shape, generator=draw, dtype=torch.float64)
        if one(2):
            given = given.round()
        if kind == "mass":
            given, least = given.abs() if one(2) else (4 * given).exp() * 1e-20, one(3)
        else:
            given = torch.where(torch.rand(shape, generator=draw) < 0.1, -torch.inf, given)
            given = torch.where(torch.rand(shape, generator=draw) < 0.1, -0.0, given)
        if hostile:
            given = torch.where(torch.rand(shape, generator=draw) < 0.05, torch.nan, given)
            given = torch.where(torch.rand(shape, generator=draw) < 0.05, -torch.inf, given)
        given = given.to(dtype)
        capacity = min(columns, 5 + one(columns + 1))
        limit = (ints(1 - 2 * hostile, 9, 1 + one(2), heads, 1, 1), 1 + one(9))[one(2)]
        if kind == "mass":
            share = torch.rand(1, heads, 1, 1, generator=draw) + (1e-3, -0.5)[hostile]
            limit, least = (share.clamp(max=1), (0.9, 1.0, 1e-9)[one(3)])[one(2)], min(least, capacity)
        elif not isinstance(limit, Tensor):
            every = always is not None and bool(one(2))
            capacity = columns if every else capacity
            limit = min(limit, capacity) if capacity else limit
    given = strided(given, one(3))

    def there(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    return Selection(
        kind, place, causal, given.to(device), there(lengths), capacity, "drawn", there(limit), least,
        there(always) if kind in ("topk", "mass") else None, there(counts), every, names,
    )  # fmt: skip


def same(found: BlockMask, wanted: BlockMask) -> None:
    """The kernel's mask and the specification's are equal in every element of every tensor."""
    for name in ("full", "partial"):
        for field, a, b in zip(
            ("starts", "counts", "indices"), getattr(found, name), getattr(wanted, name), strict=True
        ):
            assert torch.equal(a, b), (name, field)
    for name in ("lo", "hi", "rules", "bits"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.shape == b.shape and torch.equal(a, b)), name
    assert (found.pure, found.batch, found.heads) == (wanted.pure, wanted.batch, wanted.heads)
    base: Any = found._base
    assert all(part.data_ptr() % 16 == base.data_ptr() % 16 for part in (*found.full, *found.partial))
