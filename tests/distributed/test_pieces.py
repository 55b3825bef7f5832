"""The parts of masks and tensors that ranks have, without processes.

On a GPU out, lse and gradients have the bits of one process. Without one the plans of ranks have its order of sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.data import MaskPart
from sparsek.attn.ops.attention_plans import ATTENTION, ATTENTION_BACKWARD, differentiated
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.plan.attention_grad_schedule import FULL
from sparsek.attn.plan.attention_schedule import TileShape, part_blocks
from sparsek.core.device import H200
from sparsek.core.errors import Unsupported
from sparsek.distributed.exchange import rows_of
from sparsek.distributed.heads import HeadsExchange, _of_heads
from sparsek.distributed.pieces import Piece, key_pieces, query_piece
from sparsek.distributed.plan import MeshPlan, heads_of
from sparsek.distributed.submask import heads_part, submask
from tests.attn.attention_cases import random_bits
from tests.distributed.mesh_cases import masks
from tests.plan.test_attention_grad_schedule import ends

CPU = torch.device("cpu")
WHOLE = (
    "documents",
    "cu_seqlens",
    "window",
    "map of heads of k",
    "map of heads of q",
    "bits",
    "few",
    "other lengths",
)


def _of(parts: Sequence[np.ndarray], side: int, length: int, wide: int) -> np.ndarray:
    """Tokens of each group's blocks [groups, wide], filled up with -1."""
    made = np.full((len(parts), wide), -1)
    for row, blocks in zip(made, parts, strict=True):
        tokens = (blocks[:, None] * side + np.arange(side)).ravel()
        row[: tokens.size] = np.where(tokens < length, tokens, -1)
    return made


@pytest.mark.parametrize("name", WHOLE)
def test_a_part_of_a_mask_has_its_elements(name: str) -> None:
    mask, draw = masks()[name], np.random.default_rng(0)
    groups, (tiles, columns), (bq, bk) = mask.batch * mask.heads, mask.grid, mask.block
    kept = [np.flatnonzero(draw.random(columns) < 0.7) for _ in range(groups)]
    rows = [np.flatnonzero(draw.random(tiles) < 0.7) for _ in range(groups)]
    lengths = max(map(len, rows)) * bq, max(map(len, kept)) * bk
    part = submask(mask, rows, kept, *lengths, CPU)
    found = part.to_dense().view(groups, *lengths)
    if part.bits is not None:  # the first, and those that are used
        assert len(part.bits) <= 1 + part.host.partial.counts.sum()
    whole = mask.to_dense().expand(mask.batch, mask.heads, -1, -1).reshape(groups, mask.q_len, mask.kv_len)
    q, k = _of(rows, bq, mask.q_len, lengths[0]), _of(kept, bk, mask.kv_len, lengths[1])
    for group in range(groups):
        right = whole[group][q[group]][:, k[group]]
        there = torch.from_numpy((q[group] >= 0)[:, None] & (k[group] >= 0))
        assert torch.equal(found[group] & there, right & there)


@pytest.mark.parametrize(
    ("kept", "ordered"),
    [
        ([0, 1, 4, 5], True),
        ([2, 3, 6], True),
        ([6], True),
        ([], True),
        ([0, 2, 3], False),
        ([1], False),
        ([0, 1, 3, 4], False),
    ],
)
def test_blocks_of_64_of_lists_keep_the_order_of_one_process_in_pairs(kept: list[int], ordered: bool) -> None:
    """Kernels take them in pairs. Other masks keep it in any case."""
    for mask, right in ((lists_of_tokens(400, "cpu"), ordered), (sk.BlockMask.causal(400, block=64), True)):
        groups = mask.batch * mask.heads
        tiles, blocks = [np.arange(mask.grid[0])] * groups, [np.array(kept, np.int64)] * groups
        part = submask(mask, tiles, blocks, 400, 64 * len(kept), CPU, exact=True)
        assert (MaskPart.of(part) is not None) == right


def test_heads_of_a_mask_have_its_elements() -> None:
    mask = masks()["map of heads of q"]
    found = heads_part(mask, np.array([1, 1, 3]), CPU)
    assert torch.equal(found.to_dense(), mask.to_dense()[:, [1, 1, 3]])


def moved(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What an exchange brings to every rank, from the tensors [B, H, own, E] of all."""
    sent = [
        rows_of(x).index_select(0, piece.exchange.send).split(piece.exchange.send_counts)
        for piece, x in zip(pieces, tensors, strict=True)
    ]
    found = []
    for rank, piece in enumerate(pieces):
        each, x = piece.exchange, tensors[rank]
        made = x.new_zeros((each.rows, x.shape[3]))
        assert each.kept is not None
        each.kept.put(rows_of(x), made)
        made.index_copy_(0, each.place, torch.cat([of[rank] for of in sent]))
        found.append(made.view(*x.shape[:2], piece.length, x.shape[3]))
    return found


def gradients(
    given: Sequence[Tensor], mask: Any, kernel: str | None, results: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    (q, k, v), (out, lse, grad, grad_lse) = given, results
    return differentiated(Differentiated(Attended(q, k, v, mask), out, lse, grad, grad_lse), kernel)


def _bits(a: Tensor, b: Tensor, device: str) -> None:
    """Equal on a GPU; on a CPU, where bits follow shapes, within rounding."""
    if device == "cuda":
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def lists_of_tokens(n: int, device: str) -> sk.BlockMask:
    """Of blocks of 64 keys, which a kernel takes in pairs."""
    q, k = (torch.empty(1, heads, n, 8, device=device) for heads in (8 if device == "cuda" else 4, 2))
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, n // 64, (1, 2, n, 3), generator=draw, dtype=torch.int32)
    chosen[:, :, : n // 2] //= 8  # so that ranks see blocks whose neighbour they do not
    own = torch.arange(3 * n // 4, n, dtype=torch.int32) // 64
    chosen[:, :, -len(own) :] = torch.stack((own * 0, own, own * 0 - 1), 1)  # full blocks before partial ones
    mask = sk.TokenLists(chosen.to(device), 64).mask_for(q, k)
    mask.verify(wait=True)  # tiles are cut by its sizes, which are bounds until they are read
    return mask


MANY: dict[str, Any] = {
    "lists of tokens": lists_of_tokens,
    "causal": sk.BlockMask.causal,
    "window": lambda n, **at: sk.BlockMask.sliding_window(n, n // 5, sinks=3, **at),
    "documents": lambda n, **at: sk.BlockMask.block_diagonal([n // 3, 31, n - n // 3 - 31], **at),
    "heads": lambda n, **at: sk.BlockMask.from_block_map(
        torch.rand(1, 2, -(-n // 128), -(-n // 128), generator=torch.Generator().manual_seed(0)) < 0.4, n
    ).to(at["device"]),
}


@pytest.mark.parametrize(("kernel", "few"), [("hopper", False), ("hopper", True), ("portable", False)])
@pytest.mark.parametrize("name", MANY)
def test_exact_pieces_give_what_one_process_gives(name: str, kernel: str, few: bool, device: str) -> None:
    """To the bit on a GPU, and when computed again. `few`: so few tiles that plans cut them; dQ has two sums."""
    if device == "cpu" and (kernel == "portable" or few):
        pytest.skip("kernels of a GPU")
    narrow = (
        few and name != "lists of tokens"
    )  # Hopper's kernel takes pairs of blocks of 64 with D = 128 only
    n, dim, dtype = (
        (2000, 64 if narrow else 128, torch.bfloat16) if device == "cuda" else (400, 8, torch.float64)
    )
    batch, q_heads, kv_heads = (1 if few else 4, 8, 2) if device == "cuda" else (1, 4, 2)
    forward, backward = (
        (f"{kernel}.attention_fwd", f"{kernel}.attention_bwd") if device == "cuda" else (None, None)
    )
    mask = MANY[name](n, device=device)
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, heads, n, dim, generator=draw, device=device).to(dtype)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    try:
        out, lse = sk.attention(q, k, v, mask, return_lse=True, kernel=forward)
    except Unsupported:
        pytest.skip(f"{forward} does not run here")
    grad_lse = torch.randn(lse.shape, generator=draw, device=device).to(lse.dtype)
    plan = sk.distributed.plan(mask, 3)
    plans: list[MeshPlan] = [replace(plan, rank=rank, _kept={}) for rank in range(3)]
    at = [torch.from_numpy(plan._parts.queries.positions(rank)).to(device) for rank in range(3)]
    where = torch.device(device, 0) if device == "cuda" else CPU
    keys = [key_pieces(each, batch, kv_heads, where, 1, exact=True)[0] for each in plans]
    queries = [query_piece(each, batch, q_heads, where) for each in plans]

    def shards(x: Tensor) -> list[Tensor]:
        return [x.index_select(2, each) for each in at]

    all_k, all_v = moved(keys, shards(k)), moved(keys, shards(v))
    seen = [moved(queries, shards(x)) for x in (q, out, grad)]
    sums = [moved(queries, shards(x.unsqueeze(-1))) for x in (lse, grad_lse)]
    found = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    for rank, (mine, own_k, own_v, own_grad) in enumerate(
        zip(shards(q), shards(k), shards(v), shards(grad), strict=True)
    ):
        given = mine, all_k[rank], all_v[rank]
        outs = sk.attention(*given, keys[rank].mask, return_lse=True, kernel=forward)
        _bits(outs[0], shards(out)[rank], device)
        _bits(outs[1], shards(lse)[rank], device)
        results = *outs, own_grad, shards(grad_lse)[rank]
        all_lse, all_grad_lse = (x[rank].squeeze(-1) for x in sums)
        theirs = seen[1][rank], all_lse, seen[2][rank], all_grad_lse
        for again in (False, True):
            dq = gradients(given, keys[rank].mask, backward, results)[0]
            _, dk, dv = gradients((seen[0][rank], own_k, own_v), queries[rank].mask, backward, theirs)
            for whole, part in zip(found, (dq, dk, dv), strict=True):
                if again:
                    assert torch.equal(whole.index_select(2, at[rank]), part)
                whole.index_copy_(2, at[rank], part)
    for whole, part in zip(
        gradients((q, k, v), mask, backward, (out, lse, grad, grad_lse)), found, strict=True
    ):
        _bits(part, whole, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
@pytest.mark.parametrize("name", MANY)
def test_heads_give_what_one_process_gives(name: str, kernel: str) -> None:
    """To the bit: each of two ranks has half of the heads."""
    mask, where = MANY[name](2000, device="cuda"), torch.device("cuda", 0)
    q, k, v, grad = (torch.randn(1, heads, 2000, 128, device="cuda").bfloat16() for heads in (8, 2, 2, 8))
    forward, backward = f"{kernel}.attention_fwd", f"{kernel}.attention_bwd"
    try:
        out, lse = sk.attention(q, k, v, mask, return_lse=True, kernel=forward)
    except Unsupported:
        pytest.skip(f"{forward} does not run here")
    right = gradients((q, k, v), mask, backward, (out, lse, grad, torch.zeros_like(lse)))
    for rank, (of_q, of_k, of_v, own_grad) in enumerate(
        zip(*(x.chunk(2, 1) for x in (q, k, v, grad)), strict=True)
    ):
        rows = np.zeros(1, np.int64) if mask.heads == 1 else np.array([rank])
        part = heads_part(mask, rows, where, (2, rank))
        outs = sk.attention(of_q, of_k, of_v, part, return_lse=True, kernel=forward)
        results = *outs, own_grad, torch.zeros_like(outs[1])
        found = *outs, *gradients((of_q, of_k, of_v), part, backward, results)
        for each, whole in zip(found, (out, lse, *right), strict=True):
            assert torch.equal(each, whole.chunk(2, 1)[rank])


# A small card, so that plans follow the size of the problem.
CARD = replace(H200, sm_count=7, l2_bytes=1 << 22)
Heads = tuple[int, int]


class Part(NamedTuple):
    """A call of a rank: its mask, heads of q and k, and whose sums are complete."""

    mask: sk.BlockMask
    heads: Heads
    complete: str = "keys queries"


def parts(mask: sk.BlockMask, batch: int, heads: Heads, ranks: int, how: str) -> Iterator[Part]:
    """The calls of all ranks, those of "both" on a mesh of `ranks` x 2."""
    if how == "gather":
        plan = sk.distributed.plan(mask, ranks)
        for rank in range(ranks):
            mine = replace(plan, rank=rank, _kept={})
            yield Part(key_pieces(mine, batch, heads[1], CPU, 3, exact=True)[0].mask, heads, "queries")
            yield Part(query_piece(mine, batch, heads[0], CPU).mask, heads, "keys")
        return
    columns = 2 if how == "both" else ranks
    for column in range(columns):
        of_q, of_k = heads_of(*heads, columns, column)
        rows = np.zeros(1, np.int64) if mask.heads == 1 else of_k if mask.heads == heads[1] else of_q
        own = Part(heads_part(mask, rows, CPU, (heads[1], int(of_k[0]))), (of_q.size, of_k.size))
        yield from [own] if how == "heads" else parts(own.mask, batch, own.heads, ranks, "gather")


def call_of(part: Part, batch: int, dim: int) -> Attended:
    lengths = part.mask.q_len, part.mask.kv_len
    q, k = (
        torch.empty(batch, *of, dim, dtype=torch.bfloat16) for of in zip(part.heads, lengths, strict=True)
    )
    return Attended(q, k, k, part.mask, return_lse=True)


def whole_numbers(places: Tensor | None, count: int) -> list[dict[int, int]]:
    """For each list the whole's number of each tile or block that a part has."""
    if places is None:
        return [{each: each for each in range(1000)}] * count
    return [{local: whole for whole, local in enumerate(row)} for row in places.tolist()]


class Sums(NamedTuple):
    """Of hopper.attention_bwd kernel and config; for each key tile, or its parts, the visits, and for each query tile
    the key blocks, all in numbers of the whole and in the order of sums.
    """

    choice: Any
    keys: dict[Any, Any]
    queries: dict[Any, Any]


def order_of_sums(part: Part, batch: int, dim: int) -> Sums:
    p = Differentiated(call_of(part, batch, dim)).problem(CARD)
    choice = ATTENTION_BACKWARD.choose(p, "hopper.attention_bwd", None)
    work, mask, heads = choice.kernel.prepare(p, choice.config, part.mask), part.mask, p.packed.q_heads
    if p.pack > 1:
        work, mask = work.work, work.mask()
    made, place, group = work.schedule, MaskPart.of(mask) or MaskPart(mask), heads // p.kv_heads
    (bq, bk), (rows, columns), share = mask.block, mask.grid, heads // mask.heads
    of_tiles, of_blocks = (whole_numbers(x, mask.batch * mask.heads) for x in (place.tiles, place.blocks))
    found, waits, visits = Sums(choice[:2], {}, defaultdict(list)), [], made.visits.tolist()
    for begin, end in pairwise(made.starts.tolist()):
        waits.append([])
        for b, g, key, first, masked, _, n, number in made.tiles[begin:end].tolist():
            of_tile: list[Any] = []
            for pos, h, entry, ticket in visits[first : first + n]:
                lists = b * (mask.batch > 1) * mask.heads + h // share
                if pos >= rows * bq:  # fills up a step
                    of_tile.append(None)
                    continue
                if entry != FULL:
                    row = lists * rows + pos // bq
                    assert 0 <= entry - mask.partial.starts[row] < mask.partial.counts[row]
                    assert mask.partial.indices[entry] == key // bk
                tile, head = of_tiles[lists][pos // bq], h + place.first * group
                assert entry == FULL or len(of_tile) < masked * (1 if bq == 128 else 2)
                of_tile.append((head, tile, entry != FULL))
                found.queries[b, head, tile].append((ticket, of_blocks[lists][key // bk]))
                waits[-1].append((b, h, pos, key, entry, ticket))
            if n:
                lists = b * (mask.batch > 1) * mask.heads + g * group // share
                at = b, g + place.first, of_blocks[lists][key // bk], number // columns % made.parts
                found.keys[at] = masked, of_tile
    assert ends(waits), "CTAs wait for each other in a circle"
    return found._replace(queries={tile: sorted(each) for tile, each in found.queries.items()})


def holds(mask: sk.BlockMask, batch: int, heads: Heads, dim: int, ranks: int, how: str) -> None:
    """Together the ranks have every sum of one process, with the same addends in the same order."""
    right = order_of_sums(Part(mask, heads), batch, dim)
    shape = right.choice[1]
    keys, queries = {}, {}
    for part in parts(mask, batch, heads, ranks, how):
        found = order_of_sums(part, batch, dim)
        assert (found.choice[0].name, found.choice[1]) == (right.choice[0].name, shape)
        for name, all_of, own in (("keys", keys, found.keys), ("queries", queries, found.queries)):
            if name in part.complete:
                assert not all_of.keys() & own.keys()
                all_of |= own
    assert queries == right.queries
    assert keys == right.keys


def test_masks_of_a_ranks_heads_have_their_place() -> None:
    """Of as many heads of k as ranks; with fewer, dK and dV are sums over ranks."""
    for name in ("causal", "map of heads of k", "map of heads of q"):
        plan = replace(sk.distributed.plan(masks()[name], 2, "heads"), rank=1)
        for kv_heads in (2, 1):
            if plan.mask.heads == 2 > kv_heads:
                continue
            q, k = (torch.empty(2, heads, 1, 8) for heads in (4, kv_heads))
            found = _of_heads(plan, None, HeadsExchange.of(plan, q, k), q, kv_heads)
            place = MaskPart.of(found)
            assert (place is None) == (kv_heads == 1)
            assert place is None or (place.whole, place.kv_heads, place.first) == (plan.mask, 2, 1)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Any, ...]:
    """A mask of any kind and blocks, batch items, heads, head dim, ranks and a way."""
    block = draw(st.sampled_from([(64, 64), (128, 128), (64, 128), (128, 64)]))
    batch, n, density = draw(st.integers(1, 2)), draw(st.integers(1, 700)), draw(st.floats(0, 1))
    heads, how = draw(
        st.sampled_from([((4, 2), "gather"), ((6, 6), "gather"), ((8, 4), "heads"), ((4, 2), "both")])
    )
    lists = draw(st.sampled_from([1, *heads]))
    kind, seed = (
        draw(st.sampled_from(["bits", "window", "documents", "other lengths"])),
        draw(st.integers(0, 99)),
    )
    if kind == "bits":
        m = draw(st.integers(1, 700))
        mask = random_bits("cpu", (n, m), block, heads=lists, batch=batch, density=density, seed=seed)
    elif kind == "window":
        mask = sk.BlockMask.sliding_window(n, 1 + int(density * n), sinks=seed % 4, block=block)
    elif kind == "documents":
        mask = sk.BlockMask.block_diagonal([n, 1 + seed, 3 * seed], block=block)
    else:
        mask = sk.BlockMask.causal(q_len=n, kv_len=2 * n + seed, block=block)
    return (
        mask,
        batch,
        heads,
        draw(st.sampled_from([40, 128 if block[1] == 128 else 72])),
        draw(st.integers(2, 5)),
        how,
    )


@settings(max_examples=12)
@given(drawn())
def test_ranks_add_gradients_in_the_order_of_one_process(of: tuple[Any, ...]) -> None:
    mask, batch, heads, dim, ranks, how = of
    holds(mask, batch, heads, dim, min(ranks, 4) if how == "heads" else ranks, how)


@pytest.mark.parametrize(("heads", "side", "dim"), [((8, 2), 64, 40), ((32, 2), 128, 128)])
def test_parts_of_packed_tiles_are_added_in_the_order_of_one_process(
    heads: Heads, side: int, dim: int
) -> None:
    """Lists for each token: heads are rows of tiles, in halves too, and key tiles are cut by the size of a problem."""
    draw = torch.Generator().manual_seed(0)
    lists = sk.TokenLists(torch.randint(-1, 1000 // side, (1, 2, 1000, 3), generator=draw), side)
    call = call_of(Part(sk.BlockMask.full(1000), heads), 1, dim)
    mask = lists.mask_for(call.q, call.k)
    assert MaskPart.of(mask) is None
    for how in ("gather", "heads", "both"):
        holds(mask, 1, heads, dim, 2, how)


@pytest.mark.parametrize(
    "kernel", ["hopper.attention_fwd", "portable.attention_fwd", "portable.attention_bwd"]
)
def test_plans_of_ranks_are_those_of_one_process(kernel: str) -> None:
    """Config and the cut of tiles, which a rank of few tiles alone would choose otherwise."""
    mask, forward = sk.BlockMask.sliding_window(6000, 2000, sinks=200), kernel.endswith("fwd")

    def planned(part: Part, own: bool = False) -> Any:
        call = call_of(part, 1, 128)
        p = (call if forward else Differentiated(call)).problem(H200)
        p = replace(p, whole=None) if own else p
        choice = (ATTENTION if forward else ATTENTION_BACKWARD).choose(p, kernel, None)
        return choice.config, part_blocks(p, TileShape(128, 1, 132))

    right = planned(Part(mask, (4, 4)))
    of_ranks = [part for how in ("gather", "heads", "both") for part in parts(mask, 1, (4, 4), 4, how)]
    assert all(planned(part) == right for part in of_ranks)
    assert any(planned(part, own=True) != right for part in of_ranks)


@pytest.mark.gpu
def test_one_gpu_over_nccl_is_attention() -> None:
    mask = sk.BlockMask.sliding_window(1000, 300, sinks=4, device="cuda")
    q, k, v = (torch.randn(1, heads, 1000, 128, device="cuda").bfloat16() for heads in (4, 2, 2))
    lists = sk.TokenLists(torch.randint(0, 8, (1, 2, 1000, 4), device="cuda"), 128)
    here = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=here)
    try:
        for how in ("gather", "heads"):
            plan = sk.distributed.plan(mask, dist.group.WORLD, how)
            for seen, over in ((mask, plan), (lists, None)):
                learned = [x.clone().requires_grad_() for x in (q, k, v)]
                right = sk.attention(learned[0], learned[1], learned[2], seen)
                attend: Any = sk.distributed.attention
                found = attend(*learned, over or lists, plan=None if over else plan)
                # The mask of lists is made anew in a call of one process, whose plan knows bounds of its sizes.
                if seen is mask:
                    assert torch.equal(found, right)
                torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
                grads = (torch.autograd.grad(x.float().sum(), learned) for x in (found, right))
                for a, b in zip(*grads, strict=True):
                    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
            x = sk.distributed.unshard_sequence(q, plan)
            assert torch.equal(x, q)
    finally:
        dist.destroy_process_group()


def test_a_simulation_adds_the_pairs_of_the_fullest_rank_and_what_it_receives() -> None:
    mask = sk.BlockMask.causal(4096)
    each: dict[str, Any] = {"q_heads": 8, "kv_heads": 2, "dim": 64}
    (one,) = sk.distributed.simulate(mask, (4,), pair_seconds=1e-9, bandwidth=1e9, **each)
    pairs = 8 * 4096 * 4097 / 2 / 4
    assert one.received == 3 * 4096 // 4 * 2 * 2 * 64 * 2  # keys and values of the others, bfloat16
    assert one.seconds == pytest.approx(one.imbalance * pairs * 1e-9 + one.received / 1e9, rel=0.05)
    assert sk.distributed.simulate(mask, (4,), **each)[0].seconds == 0
