"""Biases of xFormers: their masks beside its own materialised ones, and its call beside dense attention."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek import InvalidInput, Unsupported
from sparsek.attn.mask.build.documents import documents_mask
from sparsek.attn.mask.convert.xformers import KINDS
from sparsek.integrations import xformers, xformers_pages
from sparsek.integrations.xformers import memory_efficient_attention
from tests.integrations.dense import dense, operands, randn, same, same_gradients
from tests.integrations.xformers_biases import FIELDS, Drawn, draw, ints, originals, stand_ins
from tests.refusals import refused
from tests.sampling import EVERY

DRAWS = range(24 if EVERY else 4)
UNPAGED = [name for name in FIELDS if "Paged" not in name]


@pytest.fixture(params=["originals", "stand-ins"])
def lib(request: pytest.FixtureRequest) -> Any:
    """xFormers' own classes, and those with their names and fields."""
    return originals() if request.param == "originals" else stand_ins()


def poisoned(x: Tensor, held: Tensor) -> Tensor:
    """A leaf [1, N, ...] with NaN in the rows of no sequence."""
    return x.detach().masked_fill(~held[:, None, None], torch.nan).requires_grad_()


def right(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """Of tensors [B, M, H, K]; rows that nobody sees may be NaN."""
    k, v = (x.masked_fill(~seen.any(0)[:, None, None], 0) for x in (k, v))
    return dense(*(x.transpose(1, 2) for x in (q, k, v)), seen=seen, scale=scale)[0].transpose(1, 2)


def materialised(drawn: Drawn) -> Tensor:
    """The pairs that xFormers' own mask admits."""
    table = getattr(drawn.bias, "block_tables", None)
    keys = drawn.kv_len if table is None else table.numel() * drawn.bias.page_size
    found = drawn.bias.materialize((drawn.q_len, keys)) == 0
    rest = torch.zeros(drawn.q_len, max(drawn.kv_len - found.shape[1], 0), dtype=torch.bool)
    return torch.cat((found, rest), 1)[:, : drawn.kv_len]


def test_every_class_is_known() -> None:
    lib = originals()
    kinds = {
        name
        for name, each in vars(lib).items()
        if isinstance(each, type) and issubclass(each, lib.AttentionBias)
    }
    assert kinds - {"AttentionBias", "LowerTriangularMaskWithTensorBias"} == set(KINDS) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_the_mask_is_xformers_own(name: str) -> None:
    lib = originals()
    for seed in DRAWS:
        drawn = draw(lib, name, Random(f"{name} {seed}"))
        assert torch.equal(materialised(drawn), drawn.seen), seed
        mask = sk.BlockMask.from_xformers(drawn.bias, drawn.q_len, drawn.kv_len, block=(64, 128))
        assert mask.block == (64, 128)
        assert torch.equal(mask.to_dense()[0, 0], drawn.seen), seed


@pytest.mark.parametrize("name", UNPAGED)
def test_the_call(name: str, lib: Any) -> None:
    for seed in DRAWS:
        drawn = draw(lib, name, Random(f"{name} {seed}"))
        batch = 1 if "BlockDiagonal" in name else 2
        q, k, v = operands(
            (batch, drawn.q_len, 4, 16), (batch, drawn.kv_len, 2, 16), (batch, drawn.kv_len, 2, 8)
        )
        if "Padded" in name or "Gappy" in name:
            k, v = poisoned(k, drawn.held), poisoned(v, drawn.held)
        out = memory_efficient_attention(q, k, v, drawn.bias, scale=0.3)
        wanted = right(q, k, v, drawn.seen, 0.3)
        same(out, wanted)
        same_gradients(out, wanted, (q, k, v))
        with torch.no_grad():
            same(memory_efficient_attention(q, k, v, drawn.bias, scale=0.3), wanted)


@pytest.mark.parametrize("name", [name for name in FIELDS if "Paged" in name])
def test_pages(name: str, lib: Any) -> None:
    for seed in DRAWS:
        drawn = draw(lib, name, Random(f"{name} {seed}"))
        q = randn(1, drawn.q_len, 4, 16)
        k, v = (poisoned(randn(1, drawn.kv_len, 2, n, seed=n), drawn.held).detach() for n in (16, 8))
        table, page, info = drawn.bias.block_tables, drawn.bias.page_size, drawn.bias.k_seqinfo
        table[torch.arange(table.shape[1]) * page >= info.seqlen[:, None]] = (
            10**6
        )  # entries that nobody reads
        same(memory_efficient_attention(q, k, v, drawn.bias), right(q, k, v, drawn.seen))
    for which in (q, k, v):
        which.requires_grad_()
        refused("gradient", memory_efficient_attention, q, k, v, drawn.bias)
        which.requires_grad_(False)


@pytest.mark.parametrize("bias", [None, "LowerTriangularMask"])
def test_layouts(bias: str | None) -> None:
    mask = bias and getattr(stand_ins(), bias)()
    seen = torch.ones(70, 90, dtype=torch.bool)
    seen = seen.tril() if bias else seen
    q, k, v = operands((2, 70, 6, 16), (2, 90, 6, 16), (2, 90, 6, 8))
    wanted = right(q, k, v, seen)
    out = memory_efficient_attention(q, k, v, mask)
    same(out, wanted)
    grouped = memory_efficient_attention(*(x.unflatten(2, (2, 3)) for x in (q, k, v)), attn_bias=mask)
    assert grouped.shape == (2, 70, 2, 3, 8)
    same(grouped, wanted.unflatten(2, (2, 3)))
    same_gradients(grouped, wanted.unflatten(2, (2, 3)), (q, k, v))
    one = memory_efficient_attention(q[:, :, 1], k[:, :, 1], v[:, :, 1], mask)
    same(one, wanted[:, :, 1])
    # Heads of k that are one in memory are read once, and heads of q that are no view of one dim are copied.
    few = tuple(x[:, :, :2] for x in (k, v))
    wide = (x[:, :, :, None].expand(-1, -1, -1, 3, -1) for x in few)
    strided = q.detach().view(2, 70, 3, 2, 16).transpose(2, 3).requires_grad_()
    found = memory_efficient_attention(strided, *wide, attn_bias=mask)
    wanted = right(strided.flatten(2, 3), *few, seen=seen)
    same(found.flatten(2, 3), wanted)
    same_gradients(found.flatten(2, 3), wanted, (strided, k, v))
    same(
        memory_efficient_attention(strided, *(x[:, :, :, None] for x in few), attn_bias=mask).flatten(2, 3),
        wanted,
    )


def test_padded_keys_that_no_paged_kernel_takes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise Unsupported("no kernel", {})

    monkeypatch.setattr(xformers_pages, "attention_paged", refuse)
    lib, lengths, starts = stand_ins(), [40, 0, 9], [0, 48, 96, 144]
    at = lib._SeqLenInfo(ints([0, 3, 4, 9]), 5, 1, [0, 3, 4, 9])
    info = lib._PaddedSeqLenInfo(ints(starts), 40, 0, starts, ints(lengths), lengths, 48)
    q, k = randn(1, 9, 2, 16), randn(1, 144, 2, 16)
    bias = lib.BlockDiagonalPaddedKeysMask(at, info)
    seen = sk.BlockMask.from_xformers(bias).to_dense()[0, 0]
    same(memory_efficient_attention(q, k, k, bias), right(q, k, k, seen))
    table = ints([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    with pytest.raises(Unsupported, match="no kernel"):
        memory_efficient_attention(q, k, k, lib.PagedBlockDiagonalPaddedKeysMask(at, info, table, 16))


def test_lengths_that_change_in_place() -> None:
    lib = originals()
    bias = lib.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [3, 2], 48, [40, 20], device=torch.device("cpu")
    )
    q, k = randn(1, 5, 2, 16), randn(1, 96, 2, 16)
    for lengths in ([40, 20], [33, 2], [40, 20]):
        bias.k_seqinfo.from_seqlens_padded_inplace(lengths)
        wanted = right(q, k, k, bias.materialize((5, 96)) == 0)
        same(memory_efficient_attention(q, k, k, bias), wanted)
        same(memory_efficient_attention(q.requires_grad_(), k, k, bias), wanted)
        q = q.detach()


def test_masks_of_equal_lengths_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lib, made = stand_ins(), []
    real = documents_mask

    def counted(*given: Any) -> Any:
        made.append(given)
        return real(*given)

    monkeypatch.setattr(xformers, "documents_mask", counted)
    q = randn(1, 61, 1, 16)
    for _ in range(3):
        at = [0, 20, 61]
        info = lib._SeqLenInfo(torch.tensor(at), 41, 20, at)
        memory_efficient_attention(q, q, q, lib.BlockDiagonalMask(info, info))
    assert len(made) == 1


def test_sequences_without_tokens() -> None:
    lib = stand_ins()
    none = lib._SeqLenInfo(torch.zeros(1), -1, -1, [0])
    q = randn(1, 0, 2, 16)
    for bias in (lib.BlockDiagonalMask(none, none), lib.BlockDiagonalCausalMask(none, none), None):
        assert memory_efficient_attention(q, q, q, bias).shape == q.shape
    keys = lib._GappySeqInfo(torch.tensor([4, 9]), 0, 0, [4, 9], torch.tensor([0]), [0])
    queries = lib._SeqLenInfo(torch.tensor([0, 3]), 3, 3, [0, 3])
    k = randn(1, 9, 2, 16)
    out = memory_efficient_attention(randn(1, 3, 2, 16), k, k, lib.BlockDiagonalGappyKeysMask(queries, keys))
    assert not out.any()


def test_a_compiled_call_makes_the_mask_outside_of_the_graph() -> None:
    bias = stand_ins().LowerTriangularMask()
    q = randn(1, 30, 2, 16)
    wanted = right(q, q, q, torch.ones(30, 30, dtype=torch.bool).tril())
    same(torch.compile(memory_efficient_attention, backend="eager")(q, q, q, bias), wanted)


def test_what_is_refused() -> None:
    lib = stand_ins()
    q = randn(1, 60, 2, 16)
    info = lib._SeqLenInfo(torch.tensor([0, 20, 60]), 40, 20, [0, 20, 60])
    short = lib._SeqLenInfo(torch.tensor([0, 20, 50]), 30, 20, [0, 20, 50])
    falls = lib._SeqLenInfo(torch.tensor([0, 80, 60]), 30, 20, [0, 80, 60])
    far = lib._GappySeqInfo(torch.tensor([0, 20, 60]), 0, 0, [0, 20, 60], torch.tensor([20, 41]), [20, 41])
    biased = originals().LowerTriangularMaskWithTensorBias(torch.zeros(60, 60))
    unknown = type("BlockDiagonalSpecialMask", (lib.BlockDiagonalMask,), {})(info, info)
    table = torch.zeros(2, 3, dtype=torch.int32)
    rows = lib._PaddedSeqLenInfo(
        torch.zeros(3), 20, 20, [0, 36, 72], torch.tensor([20, 20], dtype=torch.int32), [20, 20], 36
    )
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"p": 0.1}, "no p, got 0.1.*drops no weights"),
        ({"p": False}, "no p, got False"),
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"attn_bias": torch.zeros(1, 2, 60, 60)}, "flex_attention"),
        ({"attn_bias": torch.ones(1, 2, 60, 60, dtype=torch.bool)}, "as its mask"),
        ({"attn_bias": biased}, "LowerTriangularMaskWithTensorBias.*added to the scores"),
        ({"attn_bias": unknown}, "BlockDiagonalSpecialMask"),
        ({"attn_bias": lib.BlockDiagonalMask}, "not of a subclass"),
        ({"attn_bias": 3}, "^attn_bias is 3"),
        ({"attn_bias": lib.BlockDiagonalMask(short, info)}, "^the length of query is 60.*end at 50"),
        ({"attn_bias": lib.BlockDiagonalMask(info, short)}, "^the length of key is 60.*end at 50"),
        ({"attn_bias": lib.BlockDiagonalMask(info, falls)}, "not decrease"),
        ({"attn_bias": lib.BlockDiagonalMask(info, None)}, "NoneType has no seqstart_py"),
        ({"attn_bias": lib.BlockDiagonalGappyKeysMask(info, far)}, "sequence 1 .* keys 20 to 61"),
        ({"attn_bias": lib.BlockDiagonalGappyKeysMask(info, info)}, "has no seqlen_py"),
        ({"attn_bias": lib.LocalAttentionFromBottomRightMask(-1, 2)}, "window_left"),
        ({"attn_bias": lib.BlockDiagonalCausalLocalAttentionMask(info, info, 0)}, "_window_size"),
        ({"attn_bias": lib.BlockDiagonalMask(info, info), "query": randn(2, 60, 2, 16)}, "batch items"),
        ({"attn_bias": lib.PagedBlockDiagonalPaddedKeysMask(info, rows, table, 12)}, "page_size is 12"),
        ({"attn_bias": lib.PagedBlockDiagonalPaddedKeysMask(info, rows, table, 16)}, "whole pages"),
        ({"attn_bias": lib.PagedBlockDiagonalPaddedKeysMask(info, rows, table[:1], 12)}, "block_tables"),
        ({"query": q[0, 0]}, "query is"),
        ({"key": q[0]}, "key is"),
        ({"query": q[:, :, None], "key": q[:, :, None], "value": q}, "value is"),
        ({"query": q[:, :, None], "key": q[:, :, :, None], "value": q[:, :, None]}, "groups and heads"),
    ]  # fmt: skip
    for options, message in wrong:
        refused(message, memory_efficient_attention, **{"query": q, "key": q, "value": q, **options})


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_other_lengths(name: str) -> None:
    drawn = draw(stand_ins(), name, Random(name))
    for other in (drawn.kv_len - 1, drawn.kv_len + 1, drawn.kv_len + 128):
        q, k, v = (randn(1, n, 2, 16) for n in (drawn.q_len, drawn.kv_len, max(other, 0)))
        with torch.no_grad(), pytest.raises(InvalidInput, match="every key needs one value"):
            memory_efficient_attention(q, k, v, drawn.bias)
        refused("every key needs one value", memory_efficient_attention, q.requires_grad_(), k, v, drawn.bias)


def test_names_of_xformers() -> None:
    q, call = randn(1, 8, 2, 16), memory_efficient_attention
    options: Any = {"scale_factor": 2}
    refused("memory_efficient_attention has no argument scale_factor; it has query", call, q, q, q, **options)
    with pytest.raises(ImportError, match=r"memory_efficient_attention_partial.*: call sparsek\.attention"):
        exec("from sparsek.integrations.xformers import memory_efficient_attention_partial")


def test_masks_that_are_refused() -> None:
    lib = stand_ins()
    info = lib._SeqLenInfo(torch.tensor([0, 20, 60]), 40, 20, [0, 20, 60])
    rows = lib._PaddedSeqLenInfo(
        torch.zeros(3), 20, 20, [0, 36, 72], torch.tensor([20, 20], dtype=torch.int32), [20, 20], 36
    )

    def pages(*table: list[int]) -> Any:
        return lib.PagedBlockDiagonalPaddedKeysMask(info, rows, torch.tensor(table, dtype=torch.int32), 12)

    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (lib.LowerTriangularMask(), {}, "give q_len and kv_len"),
        (torch.zeros(3, 3), {}, "block mask adds nothing"),
        (lib.BlockDiagonalMask(info, info), {"q_len": 3}, "end at 60"),
        (lib.BlockDiagonalMask(info, info), {"block": 32}, "block is 32"),
        (pages([0, 1], [2, 3]), {}, "kv_len is missing"),
        (pages([0, 1], [2, 3]), {"kv_len": 50}, "multiple of page_size"),
        (pages([0, 1], [2, 4]), {"kv_len": 48}, r"block_tables\[1, 1\] is 4; there are 4 pages"),
        (pages([0, 1], [2, 2]), {"kv_len": 48}, r"block_tables\[1\] has page 2 twice"),
        (pages([0], [1]), {"kv_len": 48}, "keys 0 to 20; they must be within 0 and 12"),
    ]
    for bias, options, message in wrong:
        refused(message, sk.BlockMask.from_xformers, bias, **options)
    assert sk.BlockMask.from_xformers(None, 3, 5).elements == 15
