"""Every kernel of attention's gradients on a GPU: over poisoned results, within the budget, the same bits every time.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: run it under pytest-xdist.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.kernels.backward import hopper_bwd
from sparsek.attn.kernels.backward.schedule_bwd import padded_bounds
from sparsek.attn.kernels.forward.packed_rows import halved_tiles, packed_mask
from sparsek.attn.mask.lists import BlockLists, Members
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention_autograd import AttentionBackward
from sparsek.attn.plan.attention import NONE, Attended
from sparsek.attn.plan.attention_grad_schedule import TileParts
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.engine.table import load
from tests.attn.attention_cases import (
    MEMBER_CASES,
    SHARED_ROWS,
    AttentionCase,
    random_bits,
    shared_rows,
)
from tests.attn.kernels.backward.grad_cases import (
    Inputs,
    cases,
    differentiate,
    hold,
    inputs,
    judged,
    poisoned_keys,
    problem,
)
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh, randn
from tests.sampling import dealt, half, sampled

pytestmark = pytest.mark.gpu
HOPPER, WIDE, PORTABLE = "hopper.attention_bwd", "hopper.attention_bwd_wide", "portable.attention_bwd"
LOW = (torch.float16, torch.bfloat16)
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))
DIMS = {
    HOPPER: ((32, 32), (64, 64), (96, 96), (128, 128), (64, 128), (128, 40)),
    WIDE: ((256, 256), (192, 192), (256, 128), (192, 128), (40, 256), (256, 64)),
    PORTABLE: ((64, 64), (128, 128), (256, 256), (192, 128), (96, 64)),
}
# Each on hopper.attention_bwd, and on one of the others.
MEMBERS = {HOPPER: MEMBER_CASES, WIDE: dealt(MEMBER_CASES, 2, 0), PORTABLE: dealt(MEMBER_CASES, 2, 1)}


def may_refuse(name: str, q: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> bool:
    """Whether a case is one that a kernel refuses for its shapes."""
    dims = q.shape[3], v.shape[3]
    if name == HOPPER:
        return any(dim % 8 for dim in dims) or max(dims) > 128
    return name == WIDE and mask.block[0] == 64


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (name, case, dtype)
        for name, some in MEMBERS.items()
        for case in (*cases(), *some)
        for dtype in sampled(LOW, 1, of=(name, case.dims, case.heads))
    ],
    ids=str,
)
def test_every_case(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    kernel = load(name)
    case = replace(case, dims=(256, 256)) if name == WIDE else case
    q, k, v, mask = case.make("cuda", dtype)
    if 0 in (*q.shape, *k.shape):
        return  # the plan answers these
    ordered = name != HOPPER or mask.block[1] == 128
    reasons = kernel.why_not(problem(q, k, v, mask, deterministic=ordered))
    if reasons:
        assert may_refuse(name, q, v, mask) or (name != PORTABLE and "16 bytes" in str(reasons)), reasons
        return
    for with_lse in sampled((False, True), 1, of=f"lse {case}") if name == PORTABLE else (True,):
        hold(kernel, case, device="cuda", dtype=dtype, with_lse=with_lse, deterministic=ordered)


def of_two_heads(dims: tuple[int, int], block: tuple[int, int], seed: int) -> Inputs:
    """Bits, intervals and whole blocks; ragged ends; two heads of q to one of k, each with its own list."""
    mask = random_bits("cuda", (333, 401), block, heads=4, seed=seed)
    draw = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(2, heads, length, dim, generator=draw, device="cuda", dtype=torch.bfloat16)
        for heads, length, dim in ((4, 333, dims[0]), (2, 401, dims[0]), (2, 401, dims[1]))
    )
    return inputs(q, k, v, mask)


def of_bits_and_a_window(dims: tuple[int, int], block: tuple[int, int], seed: int) -> Inputs:
    """Several tiles a side, a list for each head of k, and gradients of lse."""
    mask = random_bits("cuda", (1000, 900), block, heads=2, density=0.8, seed=seed)
    mask = mask | BlockMask.sliding_window(q_len=1000, kv_len=900, window=200, block=block, device="cuda")
    d, dv = dims
    return inputs(randn(1, 4, 1000, d), randn(1, 2, 900, d), randn(1, 2, 900, dv), mask, with_lse=True)


@pytest.mark.parametrize(
    ("name", "dims", "block"),
    [
        *((HOPPER, *each) for each in once(product(DIMS[HOPPER], BLOCKS))),
        *((WIDE, *each) for each in product(DIMS[WIDE], ((128, 128), (128, 64)))),
        *((PORTABLE, *each) for each in once(product(DIMS[PORTABLE], BLOCKS))),
    ],
    ids=str,
)
def test_every_head_dim_and_block(name: str, dims: tuple[int, int], block: tuple[int, int]) -> None:
    """Each config of the Hopper kernel in one of the two orders, and half of those of the portable one."""
    kernel, seed = load(name), fresh()
    given = (of_bits_and_a_window if name == PORTABLE else of_two_heads)(dims, block, seed)
    for hand, ordered in enumerate((True, False) if name == HOPPER else (True,)):
        every = kernel.configs(problem(*given[:4], deterministic=ordered))
        chosen = dealt(every, 2, hand, of=(dims, block)) if name == HOPPER else half(every, of=(dims, block))
        for c in [None] if name == WIDE else chosen:
            gate = judged(given, differentiate(kernel, given, c, deterministic=ordered))
            assert gate.passed, f"{c}, seed {seed}: {gate}"


def right_and_the_same_again(kernel: Any, given: Any, seed: int) -> None:
    found = differentiate(kernel, given)
    gate = judged(given, found)
    assert gate.passed, f"seed {seed}: {gate}"
    for _ in range(20):
        again = differentiate(kernel, given)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"seed {seed}: other bits"


@pytest.mark.parametrize(
    ("name", "block", "dim", "kind"),
    [
        *(
            (HOPPER, *each, kind)
            for each, kind in product(((64, 128), (128, 128), (128, 64)), ("topk", "causal", "window"))
        ),
        *((WIDE, 128, 256, kind) for kind in ("topk", "causal", "window", "full")),
    ],
)
def test_many_tiles_for_every_cta(name: str, block: int, dim: int, kind: str) -> None:
    """CTAs take several tiles, so that every barrier sees more than two phases of every tile; sinks are cut."""
    kernel, seed = load(name), fresh()
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 16, 2048, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scores = torch.rand(2, 16, 2048 // block, 2048 // block, device="cuda")
    mask = {
        "topk": lambda: BlockMask.topk(scores, 5, seq_len=2048, block=block),
        "causal": lambda: BlockMask.causal(2048, block=block, device="cuda"),
        "window": lambda: BlockMask.sliding_window(2048, 300, sinks=70, block=block, device="cuda"),
        "full": lambda: BlockMask.full(2048, block=block, device="cuda"),
    }[kind]()
    given = inputs(q, k, v, mask)
    right_and_the_same_again(kernel, given, seed)


@pytest.mark.parametrize(
    ("block", "dim", "ordered"),
    once(product(((128, 128), (128, 64)), (64, 128), (True, False)), together=2),
    ids=str,
)
def test_key_tiles_in_parts(
    block: tuple[int, int], dim: int, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks that every query sees, tiles that none does, ragged ends; the sums of parts without visits hold NaN.

    One config, whatever the parts are, of heads and of ranges of queries.
    """
    kernel, seed = load(HOPPER), fresh()
    mask = BlockMask.sliding_window(1900, 200, sinks=70, block=block, device="cuda")
    q, k, v = (randn(2, heads, 1900, dim) for heads in (8, 2, 2))
    given = inputs(q, k, v, mask, with_lse=True)
    every = kernel.configs(problem(q, k, v, mask, deterministic=ordered))
    for c, cut in product(sampled(every, 1, of=(block, dim, ordered)), ((4, 1), (1, 1), (1, 3), (1, 8))):
        monkeypatch.setattr(hopper_bwd, "tile_parts", lambda p, ctas, cut=cut: TileParts(*cut))
        config, where = replace(c, parts=True), f"{c}, cut {cut}, seed {seed}"
        torch.full((1 << 24,), torch.nan, device="cuda")
        found = differentiate(kernel, given, config, deterministic=ordered)
        gate = judged(given, found)
        assert gate.passed, f"{where}: {gate}"
        for _ in range(20 if ordered else 0):
            again = differentiate(kernel, given, config)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"{where}: other bits"


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "dim"), [(1500, 32, 2, 128), (2048, 16, 1, 64), (700, 12, 1, 128)]
)
def test_lists_of_tokens_whose_tiles_are_cut(tokens: int, heads: int, groups: int, dim: int) -> None:
    """Of every token its own block, the first, and others; a captured call repeats with other numbers."""
    seed = fresh()
    torch.manual_seed(seed)
    blocks = -(-tokens // 128)
    own = torch.arange(tokens, device="cuda") // 128
    chosen = torch.randint(0, blocks, (1, groups, tokens, 4), device="cuda", dtype=torch.int32)
    chosen[..., 0], chosen[..., 1] = 0, own
    q, k, v = (randn(1, each, tokens, dim) for each in (heads, groups, groups))
    mask = sk.TokenLists(chosen, 128).mask_for(q, k)
    p = problem(q, k, v, mask)
    kernel, given = load(HOPPER), inputs(q, k, v, mask, with_lse=True)
    assert kernel.default(p).parts
    found = differentiate(kernel, given)
    gate = judged(given, found)
    assert gate.passed, f"seed {seed}: {gate}"
    work, c = kernel.prepare(p, kernel.default(p), mask), kernel.default(p)
    again = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        kernel.launch(c, work, AttentionGradCall(*given[:9], *again))
    for _ in range(20):
        for x in again:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"seed {seed}: other bits"


@pytest.mark.parametrize("case", SHARED_ROWS, ids=str)
def test_half_tiles_of_rows_that_share_entries(case: str) -> None:
    seed = fresh()
    torch.manual_seed(seed)
    given = inputs(
        randn(2, 16, 64, 128), randn(2, 2, 512, 128), randn(2, 2, 512, 128), shared_rows(case, "cuda")
    )
    kernel = load(HOPPER)
    assert kernel.default(problem(*given[:4])).block == (64, 128)
    right_and_the_same_again(kernel, given, seed)


@pytest.mark.parametrize(("heads", "tokens", "each"), [(32, 700, 3), (8, 1500, 1), (16, 333, 2)])
def test_a_block_that_nobody_sees_may_hold_anything_beside_one_that_is_seen(
    heads: int, tokens: int, each: int
) -> None:
    """Of lists of blocks of 64 in pairs: one block of each pair is in no list, now the first, now the second."""
    seed = fresh()
    torch.manual_seed(seed)
    block = torch.arange(-(-tokens // 64), device="cuda")
    in_list = (block + block // 2) % 2 == 0
    (seen,) = in_list.nonzero(as_tuple=True)
    chosen = seen[torch.randint(0, len(seen), (1, 2, tokens, each), device="cuda")].int()
    q, k, v = (randn(1, n, tokens, 128) for n in (heads, 2, 2))
    mask = sk.TokenLists(chosen, 64, causal=False).mask_for(q, k)
    kernel, given = load(HOPPER), inputs(q, k, v, mask)
    assert kernel.default(problem(q, k, v, mask)).paired
    found = differentiate(kernel, given)
    gate = judged(given, found)
    assert gate.passed, f"seed {seed}: {gate}"
    unseen = ~in_list.repeat_interleave(64)[:tokens, None]
    poisoned = given._replace(k=k.masked_fill(unseen, torch.nan), v=v.masked_fill(unseen, torch.nan))
    again = differentiate(kernel, poisoned)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"seed {seed}"


@pytest.mark.parametrize(
    ("name", "heads", "tokens", "dim"),
    [(HOPPER, 128, 70, 128), (HOPPER, 16, 500, 64), (HOPPER, 4, 500, 128), (PORTABLE, 128, 70, 128)],
)
def test_one_gradient_for_all_heads_of_tokens(name: str, heads: int, tokens: int, dim: int) -> None:
    """Its stride over heads is 0, of rows that are read in place; 128 heads are packed 64 at a time."""
    seed = fresh()
    torch.manual_seed(seed)
    q, k, v = (randn(1, each, tokens, dim) for each in (heads, 1, 1))
    chosen = torch.randint(0, -(-tokens // 128), (1, 1, tokens, 2), device="cuda", dtype=torch.int32)
    given = inputs(q, k, v, sk.TokenLists(chosen, 128).mask_for(q, k))
    given = given._replace(grad=given.grad[:, :1].expand(given.grad.shape))
    gate = judged(given, differentiate(load(name), given))
    assert gate.passed, f"seed {seed}: {gate}"


def test_tiles_of_one_token_of_128_heads() -> None:
    """A mask by members that no lists of tokens make, with partial blocks for each token."""
    seed, rows = fresh(), torch.arange(14, dtype=torch.int32, device="cuda")
    torch.manual_seed(seed)
    none = torch.zeros_like(rows)
    mask = BlockMask(
        q_len=14, kv_len=256, block=(1, 128), batch=1, heads=1, full=BlockLists(none, none, none[:0]),
        partial=BlockLists(rows, none + 1, rows % 2), lo=none[None], hi=none[None] + 256, rules=none + 1,
        members=Members(),
    )  # fmt: skip
    given = inputs(randn(1, 128, 14, 128), randn(1, 1, 256, 128), randn(1, 1, 256, 128), mask)
    for name in (HOPPER, PORTABLE):
        gate = judged(given, differentiate(load(name), given))
        assert gate.passed, f"{name}, seed {seed}: {gate}"


@pytest.mark.parametrize("sizes", [(0, 33, 33), (1, 0, 33), (1, 33, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("window", [0, 8])
def test_lists_of_no_batch_items_tokens_or_keys(sizes: tuple[int, int, int], window: int) -> None:
    """By calls, which are repeated, and by the launches of a mask without rows."""
    batch, queries, keys = sizes
    q, k, v = (randn(batch, *each, 128).requires_grad_() for each in ((32, queries), (2, keys), (2, keys)))
    lists = sk.TokenLists(torch.zeros(1, 2, queries, 2, device="cuda", dtype=torch.int32), 128, window=window)
    for _ in range(4):
        out = sk.attention(q, k, v, lists)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert torch.equal(out, torch.zeros_like(q))
        assert all(torch.equal(x, torch.zeros_like(x)) for x in grads)
    mask = packed_mask(lists.mask_for(q, k), 16)
    assert mask.lo is not None
    assert mask.hi is not None
    if not window:
        assert halved_tiles(mask).rows == -(-queries * 16 // 64) * 2
    padded_bounds(mask.lo, mask.hi, -(-queries * 16 // 64) * 64)
    torch.cuda.synchronize()


def test_keys_of_blocks_that_are_not_stored_are_never_read() -> None:
    for case in (*cases(), *MEMBER_CASES):
        given = poisoned_keys(case, "cuda")
        if case.dtype != "fp32" and bool(given.k.isnan().any()):
            gate = judged(given, differentiate(load(PORTABLE), given))
            assert gate.passed, f"{case}: {gate}"


@pytest.mark.parametrize("name", [HOPPER, WIDE])
def test_what_no_stored_block_holds_reaches_nothing(name: str) -> None:
    case = next(case for case in cases() if case.note == "keys that no query visits")
    if name == WIDE:
        case = AttentionCase(
            case.note,
            lambda device: BlockMask.from_blocks([0, 1, 2], [0, 2], 256, 512, 128, device=device),
            heads=(2, 1),
            dims=(256, 256),
        )
    q, *_ = case.make("cuda", torch.bfloat16)
    given = poisoned_keys(case, "cuda")
    given = given._replace(
        **{name: getattr(given, name).to(q.dtype) for name in ("q", "k", "v", "out", "grad")}
    )
    assert all(x.isfinite().all() for x in differentiate(load(name), given))


@pytest.mark.parametrize(
    ("name", "sides", "kinds"), [(HOPPER, ((64, 128), (128, 128), (128, 64)), 5), (WIDE, ((128, 256),), 6)]
)
def test_ten_thousand_launches_give_the_same_bits(
    name: str, sides: tuple[tuple[int, int], ...], kinds: int
) -> None:
    """Rare races are this field's classic bug: small launches of drawn masks, each against its first answer."""
    kernel, seed = load(name), fresh()
    torch.manual_seed(seed)
    stored: list[Any] = []
    for (block, dim), kind in product(sides, range(kinds)):
        heads, length = (2, 4, 16)[kind % 3], (256, 700, 1024)[kind % 3]
        q, k, v = (torch.randn(1, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        tiles = -(-length // block)
        scores = torch.rand(1, heads, tiles, tiles, device="cuda")
        mask = BlockMask.topk(scores, max(1, tiles // 2), seq_len=length, block=block, causal=kind % 2 == 1)
        given = inputs(q, k, v, mask)
        found = differentiate(kernel, given)
        assert judged(given, found).passed, f"seed {seed}"
        p = problem(q, k, v, mask)
        c = kernel.default(p)
        stored.append((given, found, c, kernel.prepare(p, c, mask)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for launch in range(10_000):
            given, found, c, work = stored[launch % len(stored)]
            again = [torch.empty_like(x) for x in given[:3]]
            kernel.launch(c, work, AttentionGradCall(*given[:9], *again))
            wrong += sum((a != b).any() for a, b in zip(found, again, strict=True))
    assert int(wrong) == 0, f"seed {seed}: {int(wrong)} tensors differ"


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", ["window", "causal"])
def test_wide_gradients_of_keys_round_to_those_in_the_dtype(name: str, dim: int) -> None:
    """Of the default kernel, recorded and not. That of more than 128 columns has none in float32."""
    options: Any = {"block": 128, "device": "cuda"}
    window = BlockMask.sliding_window(1500, 300, sinks=20, **options)
    mask = window if name == "window" else BlockMask.causal(1500, **options)
    q, k, v, grad = (torch.randn(1, heads, 1500, dim, device="cuda").bfloat16() for heads in (8, 2, 2, 8))
    out, lse = sk.attention(q, k, v, mask, return_lse=True)
    given = q, k, v, out, lse, grad, None, None
    narrow, *several = (
        AttentionBackward.forward(*given, Attended(NONE, NONE, NONE, mask, wide=wide))
        for wide in (False, *[True] * 4)
    )
    for dq, *of_keys in several:
        assert torch.equal(dq, narrow[0])
        for x, y in zip(of_keys, narrow[1:], strict=True):
            assert x.dtype == (torch.float32 if dim == 128 else torch.bfloat16)
            assert torch.equal(x.bfloat16(), y)
