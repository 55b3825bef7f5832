"""Cases for every kernel of attention: small, and awkward in every allowed way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists, Members
from sparsek.attn.mask.mask import BlockMask
from sparsek.core import dtypes
from tests.attn.mask.members import drawn

Lengths = tuple[int, int]
Block = tuple[int, int]


@dataclass(frozen=True)
class AttentionCase:
    """q [batch, q_heads, S, dim] and N(0, 1) keys and values of `heads` = (q_heads, kv_heads), dims (dim, v_dim).

    `mask(device)` builds the mask, whose lengths are the case's. `note`: what is special. `bshd`: q, k and v are
    views of [B, S, H, D] tensors.
    """

    note: str
    mask: Callable[[str], BlockMask]
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    batch: int = 1
    dtype: str = "fp16"
    bshd: bool = False

    def __str__(self) -> str:
        (hq, hkv), (d, dv) = self.heads, self.dims
        return f"{self.note.replace(' ', '_')}-b{self.batch}-h{hq}:{hkv}-d{d}:{dv}-{self.dtype}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
        """q, k, v and the mask on `device`, in the case's dtype unless another is given."""
        mask = self.mask(device)
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        draw = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, length: int, dim: int) -> Tensor:
            shape = (self.batch, length, heads, dim) if self.bshd else (self.batch, heads, length, dim)
            x = torch.randn(shape, generator=draw, dtype=torch.float32, device=device).to(kind)
            return x.transpose(1, 2) if self.bshd else x

        (hq, hkv), (d, dv) = self.heads, self.dims
        return normal(hq, mask.q_len, d), normal(hkv, mask.kv_len, d), normal(hkv, mask.kv_len, dv), mask


def random_bits(
    device: str,
    lengths: Lengths,
    block: Block,
    *,
    heads: int = 1,
    batch: int = 1,
    density: float = 0.3,
    seed: int = 0,
) -> BlockMask:
    """A mask without structure: some blocks absent, some whole, the others with random elements, as bits.

    The last rows of each even tile see nothing.
    """
    draw = torch.Generator("cpu").manual_seed(seed)
    (s, t), (bq, bk) = lengths, block
    shape = (batch, heads, -(-s // bq), -(-t // bk))
    kind = torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu")
    elements = torch.rand((batch, heads, s, t), generator=draw, dtype=torch.float32, device="cpu") < 0.5
    over_elements = kind.repeat_interleave(bq, 2)[:, :, :s].repeat_interleave(bk, 3)[..., :t]
    seen = torch.where(over_elements < density / 2, elements, over_elements < density)
    query = torch.arange(s, device="cpu")
    seen[:, :, (query % bq >= bq - 5) & (query // bq % 2 == 0)] = False
    return BlockMask.from_dense(seen.to(device), block)


def _top_blocks(device: str, lengths: Lengths, block: Block, k: int, **rest: object) -> BlockMask:
    """k blocks per query tile by random scores, different for each of 2 batch items and 2 heads."""
    (s, t), (bq, bk) = lengths, block
    draw = torch.Generator("cpu").manual_seed(1)
    scores = torch.rand(2, 2, -(-s // bq), -(-t // bk), generator=draw, dtype=torch.float32, device="cpu")
    return BlockMask.topk(scores.to(device), k, q_len=s, kv_len=t, block=block, **rest)  # type: ignore[arg-type]


def _some_blocks(device: str, lengths: Lengths, block: Block) -> BlockMask:
    """Query tile i visits the key blocks of multiples of i + 1 above 0: tile 0 most of them, some tiles none."""
    mb, nb = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    rows = [range(i + 1, nb, i + 1) for i in range(mb)]
    return _listed(device, rows, lengths, block)


def _one_long_row(device: str, blocks: int) -> BlockMask:
    """The second of four tiles visits all blocks, the others one each."""
    rows = [range(1), range(blocks), range(2, 3), range(blocks - 1, blocks)]
    return _listed(device, rows, (4 * 64, blocks * 64), (64, 64))


def _listed(device: str, rows: Sequence[Sequence[int]], lengths: Lengths, block: Block) -> BlockMask:
    ends = list(accumulate(map(len, rows), initial=0))
    columns = [j for row in rows for j in row]
    indptr, indices = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, columns))
    return BlockMask.from_blocks(indptr, indices, *lengths, block)


def _of(make: Callable[..., BlockMask], *sizes: Any, **rest: Any) -> Callable[[str], BlockMask]:
    """make(*sizes, **rest) on any device."""
    return lambda device: make(*sizes, **rest, device=device)


SMALL, LARGE, TALL, WIDE = (64, 64), (128, 128), (128, 64), (64, 128)

ATTENTION_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("all blocks", _of(BlockMask.full, 256)),
    AttentionCase("all blocks ragged", _of(BlockMask.full, q_len=200, kv_len=333, block=SMALL)),
    AttentionCase("causal", _of(BlockMask.causal, 384), dims=(128, 128)),
    AttentionCase("causal bf16", _of(BlockMask.causal, 384), dtype="bf16"),
    AttentionCase("causal bshd", _of(BlockMask.causal, 256), batch=2, bshd=True),
    AttentionCase("causal tall blocks", _of(BlockMask.causal, 300, block=TALL)),
    AttentionCase("causal wide blocks", _of(BlockMask.causal, 300, block=WIDE)),
    AttentionCase("causal gqa", _of(BlockMask.causal, 320, block=SMALL), (6, 2)),
    AttentionCase("causal mqa", _of(BlockMask.causal, 200), (4, 1), batch=2),
    AttentionCase("chunked prefill", _of(BlockMask.causal, q_len=100, kv_len=400, block=SMALL)),
    AttentionCase(
        "more queries than keys, the first see none",
        _of(BlockMask.causal, q_len=400, kv_len=150, block=SMALL),
    ),
    AttentionCase("one query", _of(BlockMask.causal, q_len=1, kv_len=300)),
    AttentionCase("one key", _of(BlockMask.full, q_len=130, kv_len=1)),
    AttentionCase("window", _of(BlockMask.sliding_window, 512, 100, block=SMALL), (4, 2)),
    AttentionCase("window both ways", _of(BlockMask.sliding_window, 300, 70, causal=False)),
    AttentionCase("window of one", _of(BlockMask.sliding_window, 200, 1, block=SMALL)),
    AttentionCase(
        "window and sinks", _of(BlockMask.sliding_window, 500, 130, sinks=4, block=SMALL), dims=(128, 64)
    ),
    AttentionCase("strided", _of(BlockMask.strided, 640, 256, 128, block=SMALL)),
    AttentionCase("dilated", _of(BlockMask.dilated, 512, 128, 2, block=SMALL)),
    AttentionCase("bigbird", _of(BlockMask.bigbird, 640, 128, 64, 2, seed=3, block=SMALL)),
    AttentionCase("documents", _of(BlockMask.block_diagonal, [1, 70, 128, 201], block=SMALL)),
    AttentionCase("documents both ways", _of(BlockMask.block_diagonal, [130, 126], causal=False)),
    AttentionCase(
        "documents per item", _of(BlockMask.block_diagonal, [[200, 56], [3, 253]], block=SMALL), batch=2
    ),
    AttentionCase(
        "top k per item and head", lambda device: _top_blocks(device, (384, 384), SMALL, 3), batch=2
    ),
    AttentionCase(
        "top k causal",
        lambda device: _top_blocks(device, (512, 512), LARGE, 2, causal=True, always=(1, 1)),
        batch=2,
        dims=(128, 128),
    ),
    AttentionCase(
        "top k per head of keys",
        lambda device: _top_blocks(device, (256, 256), SMALL, 2),
        heads=(8, 2),
        batch=2,
        dims=(32, 96),
    ),
    AttentionCase("blocks by list", lambda device: _some_blocks(device, (500, 450), SMALL)),
    AttentionCase("blocks by list, large", lambda device: _some_blocks(device, (384, 500), LARGE)),
    AttentionCase("one long row", lambda device: _one_long_row(device, 40), heads=(4, 2)),
    AttentionCase("bits", lambda device: random_bits(device, (256, 256), SMALL)),
    AttentionCase(
        "bits ragged", lambda device: random_bits(device, (210, 333), TALL, density=0.8), dims=(96, 192)
    ),
    AttentionCase(
        "bits per item and query head",
        lambda device: random_bits(device, (200, 130), WIDE, heads=4, batch=2),
        heads=(4, 2),
        batch=2,
    ),
    AttentionCase(
        "bits large", lambda device: random_bits(device, (300, 300), LARGE, density=0.9), dtype="bf16"
    ),
    AttentionCase(
        "window and bits",
        lambda device: (
            BlockMask.sliding_window(256, 100, block=SMALL, device=device)
            & random_bits(device, (256, 256), SMALL, density=1.5)
        ),
    ),
    AttentionCase(
        "window or bits",
        lambda device: (
            BlockMask.sliding_window(256, 60, block=SMALL, device=device)
            | random_bits(device, (256, 256), SMALL, density=0.4)
        ),
    ),
    AttentionCase(
        "a mask for each head",
        lambda device: BlockMask.per_head(
            [
                BlockMask.causal(256, block=SMALL, device=device),
                BlockMask.sliding_window(256, 64, block=SMALL, device=device),
                BlockMask.full(256, block=SMALL, device=device),
                BlockMask.bigbird(256, 64, 64, 1, block=SMALL, device=device),
            ]
        ),
        heads=(4, 2),
    ),
    AttentionCase(
        "no blocks", lambda device: random_bits(device, (200, 200), LARGE, density=0.0), dims=(64, 32)
    ),
    AttentionCase("dim 32", _of(BlockMask.causal, 256), dims=(32, 32)),
    AttentionCase("dim 96", _of(BlockMask.causal, 256), dims=(96, 96)),
    AttentionCase("dim 192 128", _of(BlockMask.causal, 256), dims=(192, 128)),
    AttentionCase("dim 256", _of(BlockMask.causal, 256), dims=(256, 256)),
    AttentionCase("fp32", _of(BlockMask.sliding_window, 300, 90, block=SMALL), dtype="fp32"),
)


def _of_tokens(*sizes: Any, **rest: Any) -> Callable[[str], BlockMask]:
    """A drawn mask by members, on any device."""
    return lambda device: drawn(*sizes, **rest, device=device).mask


# The tile of a mask by members has 128 rows: tokens times the heads of a group that are packed.
MEMBER_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("members", _of_tokens(150, 150, (128, 64)), dims=(32, 32)),
    AttentionCase("members window", _of_tokens(70, 200, (64, 64), window=20, heads=2), (4, 2), (64, 64)),
    AttentionCase(
        "members sinks, bshd",
        _of_tokens(70, 200, (32, 64), sinks=3, batch=2),
        (4, 1),
        (32, 64),
        batch=2,
        bshd=True,
    ),
    AttentionCase(
        "members 3 of 6 heads", _of_tokens(100, 170, (64, 128), window=9, sinks=70), (6, 1), (32, 32)
    ),
    AttentionCase("members all keys", _of_tokens(20, 300, (16, 64), causal=False), (8, 1), (128, 128)),
    AttentionCase(
        "members of two heads of keys",
        _of_tokens(37, 130, (32, 64), heads=2, batch=2, window=5),
        (24, 2),
        (32, 32),
        batch=2,
    ),
    AttentionCase("members of one list", _of_tokens(17, 140, (8, 64), window=1, sinks=1), (32, 2), (32, 32)),
    AttentionCase("members of 64 heads", _of_tokens(5, 90, (2, 64), sinks=2), (64, 1), (32, 32)),
    AttentionCase("members all alike", _of_tokens(37, 290, (16, 64), chosen=3, alike=1.0), (8, 1), (32, 32)),
    AttentionCase("members none", _of_tokens(30, 50, (16, 64), chosen=0), (8, 1), (32, 32)),
    AttentionCase(
        "members one block", _of_tokens(40, 50, (16, 64), chosen=1, causal=False), (8, 1), (32, 32)
    ),
    AttentionCase("members turned", _of_tokens(100, 200, (16, 64), turned=True), (8, 1), (32, 32)),
    AttentionCase(
        "members all sinks", _of_tokens(40, 200, (16, 64), turned=True, sinks=2**31 - 1), (8, 1), (32, 32)
    ),
    AttentionCase("members more tokens than keys", _of_tokens(50, 20, (16, 128)), (8, 1), (32, 32)),
)
# 32 key blocks and more for each token of a tile. Too many for the interpreter.
SPARSE_MEMBER_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("8 tokens", _of_tokens(8, 16400, (8, 64), chosen=16), (16, 1), (128, 128), dtype="bf16"),
    AttentionCase(
        "groups of 16", _of_tokens(301, 16400, (8, 64), chosen=16, heads=2), (32, 2), (128, 128), bshd=True
    ),
    AttentionCase("groups of 8", _of_tokens(77, 32800, (16, 64), chosen=16), (8, 1), (128, 64)),
    AttentionCase(
        "groups of 4",
        _of_tokens(193, 65600, (32, 64), chosen=16, causal=False),
        (4, 1),
        (128, 128),
        dtype="bf16",
    ),
    AttentionCase("groups of 64", _of_tokens(601, 4160, (2, 64), chosen=16), (64, 1), (128, 128)),
    AttentionCase("turned", _of_tokens(301, 16400, (8, 64), chosen=99, turned=True), (16, 1), (64, 64)),
    AttentionCase(
        "window and sinks",
        _of_tokens(37, 16400, (8, 64), chosen=16, window=70, sinks=100),
        (16, 1),
        (128, 128),
        dtype="bf16",
    ),
)


# Starts and counts of two rows that have entries of one list of four.
SHARED_ROWS = {"prefix": ((0, 0), (2, 4)), "shifted": ((0, 1), (3, 3)), "one list": ((0, 0), (4, 4))}


def shared_rows(case: str, device: str = "cpu", side: int = 128) -> BlockMask:
    """A mask by members of 64 queries, 32 a tile, and four blocks of keys."""

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts, counts = SHARED_ROWS[case]
    bits = torch.randint(-(2**31), 2**31, (4,), generator=torch.Generator().manual_seed(3))
    none = numbers(0, 0)
    return BlockMask(
        q_len=64, kv_len=4 * side, block=(32, side), batch=1, heads=1, full=BlockLists(none, none, numbers()),
        partial=BlockLists(numbers(*starts), numbers(*counts), numbers(0, 1, 2, 3)), lo=numbers(*[0] * 64)[None],
        hi=numbers(*[4 * side] * 64)[None], rules=bits.int().to(device), members=Members(),
    )  # fmt: skip
