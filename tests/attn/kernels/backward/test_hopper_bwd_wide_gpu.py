"""hopper.attention_bwd_wide on a GPU: every case, dims and blocks, over poisoned outputs, the same bits every time.

Inputs are fresh in every run; a failure prints the seed. Compiling dominates: run it under pytest-xdist.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.engine.table import load
from sparsek.testing.attention_cases import AttentionCase, random_bits
from tests.attn.kernels.backward.grad_cases import (
    cases,
    differentiate,
    hold,
    inputs,
    judged,
    poisoned_keys,
    problem,
)
from tests.engine.launch.drawn import fresh
from tests.sampling import sampled

pytestmark = pytest.mark.gpu
LOW = (torch.float16, torch.bfloat16)
DIMS = ((256, 256), (192, 192), (256, 128), (192, 128), (40, 256), (256, 64))
BLOCKS = ((128, 128), (128, 64))
NAME = "hopper.attention_bwd_wide"


def large(case: AttentionCase) -> AttentionCase:
    """The same case with heads of 256."""
    return replace(case, dims=(256, 256))


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, dtype) for case in cases() for dtype in sampled(LOW, 1, of=str(case))], ids=str
)
def test_every_case(case: AttentionCase, dtype: torch.dtype) -> None:
    kernel = load(NAME)
    case = large(case)
    q, k, v, mask = case.make("cuda", dtype)
    if 0 in (*q.shape, *k.shape):
        return  # the plan answers these
    reasons = kernel.why_not(problem(q, k, v, mask))
    if reasons:
        assert mask.block[0] == 64 or "16 bytes" in str(reasons), reasons
        return
    hold(kernel, case, device="cuda", dtype=dtype, with_lse=True)


@pytest.mark.parametrize(("dims", "block"), list(product(DIMS, BLOCKS)), ids=str)
def test_every_head_dim_and_block(dims: tuple[int, int], block: tuple[int, int]) -> None:
    """Bits, intervals and whole blocks; ragged ends; two heads of q to one of k, each with its own list."""
    kernel, seed = load(NAME), fresh()
    mask = random_bits("cuda", (333, 401), block, heads=4, seed=seed)
    draw = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(2, heads, length, dim, generator=draw, device="cuda", dtype=torch.bfloat16)
        for heads, length, dim in ((4, 333, dims[0]), (2, 401, dims[0]), (2, 401, dims[1]))
    )
    given = inputs(q, k, v, mask)
    gate = judged(given, differentiate(kernel, given))
    assert gate.passed, f"seed {seed}: {gate}"


@pytest.mark.parametrize("kind", ["topk", "causal", "window", "full"])
def test_more_tiles_than_sms(kind: str) -> None:
    """Sinks are tiles that are cut into parts."""
    kernel, seed = load(NAME), fresh()
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, 16, 2048, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = {
        "topk": lambda: BlockMask.topk(torch.rand(2, 16, 16, 16, device="cuda"), 5, seq_len=2048, block=128),
        "causal": lambda: BlockMask.causal(2048, block=128, device="cuda"),
        "window": lambda: BlockMask.sliding_window(2048, 300, sinks=70, block=128, device="cuda"),
        "full": lambda: BlockMask.full(2048, block=128, device="cuda"),
    }[kind]()
    given = inputs(q, k, v, mask)
    found = differentiate(kernel, given)
    gate = judged(given, found)
    assert gate.passed, f"seed {seed}: {gate}"
    for _ in range(20):
        again = differentiate(kernel, given)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"seed {seed}: other bits"


def test_what_no_stored_block_holds_reaches_nothing() -> None:
    kernel = load(NAME)
    case = AttentionCase(
        "keys that no query visits",
        lambda device: BlockMask.from_blocks([0, 1, 2], [0, 2], 256, 512, 128, device=device),
        heads=(2, 1),
        dims=(256, 256),
    )
    q, *_ = case.make("cuda", torch.bfloat16)
    given = poisoned_keys(case, "cuda")
    given = given._replace(
        **{name: getattr(given, name).to(q.dtype) for name in ("q", "k", "v", "out", "grad")}
    )
    assert all(x.isfinite().all() for x in differentiate(kernel, given))


def test_ten_thousand_launches_give_the_same_bits() -> None:
    """Rare races are this field's classic bug: small launches of drawn masks, each against its first answer."""
    kernel, seed = load(NAME), fresh()
    torch.manual_seed(seed)
    stored: list[Any] = []
    for kind in range(6):
        heads, length = (2, 4, 16)[kind % 3], (256, 700, 1024)[kind % 3]
        q, k, v = (torch.randn(1, heads, length, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        tiles = -(-length // 128)
        scores = torch.rand(1, heads, tiles, tiles, device="cuda")
        mask = BlockMask.topk(scores, max(1, tiles // 2), seq_len=length, block=128, causal=kind % 2 == 1)
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
