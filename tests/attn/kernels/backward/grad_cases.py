"""Cases that every kernel of attention's gradients must get right, and how one kernel is run on them without a planner.

Each is an AttentionCase: batch, heads (q, kv), dims (D, Dv), a maker of the mask, which has the lengths, and a note.

    for case in cases(): hold(KERNEL, case)                    every case in its own dtype
    hold(KERNEL, case, device="cuda", dtype=torch.bfloat16, with_lse=True, config=...)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.attn.reference.attention import attention
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.testing.attention_budget import AttentionGradGate, check_attention_backward
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import ATTENTION_CASES, AttentionCase, random_bits

SMALL, LARGE, TALL, WIDE = (64, 64), (128, 128), (128, 64), (64, 128)


def _columns(
    device: str, columns: list[list[int]], lengths: tuple[int, int], block: tuple[int, int]
) -> BlockMask:
    """Key block j is visited by the tiles columns[j]."""
    tiles = -(-lengths[0] // block[0])
    rows = [[j for j, visitors in enumerate(columns) if i in visitors] for i in range(tiles)]
    indptr = [0]
    for row in rows:
        indptr.append(indptr[-1] + len(row))
    return BlockMask.from_blocks(indptr, [j for row in rows for j in row], *lengths, block, device=device)


MORE: tuple[AttentionCase, ...] = (
    AttentionCase(
        "keys that no query visits",
        lambda device: _columns(device, [[0, 1], [], [2], [], [0]], (192, 300), SMALL),
        heads=(4, 2),
    ),
    AttentionCase(
        "large blocks of keys that no query visits",
        lambda device: _columns(device, [[0, 1], [], [2], [], [0]], (384, 600), LARGE),
        heads=(4, 2),
    ),
    AttentionCase(
        "one key block that all visit",
        lambda device: _columns(device, [[0], list(range(40)), [1], [2]], (40 * 64, 4 * 64), SMALL),
        heads=(2, 1),
    ),
    AttentionCase(
        "sinks that all visit, gqa",
        lambda device: BlockMask.sliding_window(900, 100, sinks=130, block=LARGE, device=device),
        heads=(4, 1),
    ),
    AttentionCase("all blocks, one head", lambda device: BlockMask.full(512, device=device), heads=(1, 1)),
    AttentionCase(
        "gqa, a list per head of q, ragged, bshd",
        lambda device: random_bits(device, (333, 210), TALL, heads=6, batch=2, density=0.7),
        heads=(6, 2),
        batch=2,
        bshd=True,
    ),
    AttentionCase(
        "gqa, a list per head of k",
        lambda device: random_bits(device, (270, 330), WIDE, heads=2, density=0.9),
        heads=(8, 2),
        batch=2,
        dims=(128, 128),
    ),
    AttentionCase(
        "mqa of documents, bf16",
        lambda device: BlockMask.block_diagonal([1, 2, 61, 64, 65, 127, 130], block=SMALL, device=device),
        heads=(6, 1),
        dtype="bf16",
        bshd=True,
    ),
    AttentionCase("dim 64 256", lambda device: BlockMask.causal(300, device=device), dims=(64, 256)),
    AttentionCase("dim 256 32", lambda device: BlockMask.causal(300, device=device), dims=(256, 32)),
    AttentionCase("one query of one key", lambda device: BlockMask.full(q_len=1, kv_len=1, device=device)),
)


def cases() -> tuple[AttentionCase, ...]:
    """Those of the forward pass, and more whose keys are awkward."""
    return ATTENTION_CASES + MORE


class Inputs(NamedTuple):
    """What a backward pass is given. out and lse are the reference's in the dtype of q."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    scale: float
    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None
    scores: Scores = PLAIN


def inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    with_lse: bool = False,
    scale: float | None = None,
    seed: int = 1,
    scores: Scores = PLAIN,
) -> Inputs:
    """A forward pass by the reference, and N(0, 1) gradients of out, which lies as out does, and of lse."""
    factor = operands.checked_scale(scale, q.shape[3])
    found, lse = attention(q, k, v, mask, scale=factor, scores=scores)
    out = operands.empty_out(q, v.shape[3]).copy_(found)
    draw = torch.Generator(q.device).manual_seed(seed)

    def normal(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=draw, device=q.device).to(dtype)

    grad = torch.empty_like(out).copy_(normal(out.shape, q.dtype))
    grad_lse = normal(lse.shape, lse.dtype) if with_lse else None
    return Inputs(q, k, v, mask, factor, out, lse, grad, grad_lse, scores)


def problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    deterministic: bool = True,
    scores: Scores = PLAIN,
) -> AttentionGradProblem:
    """The problem that the gradients of attention of q, k and v under `mask` pose."""
    call = Attended(q, k, v, mask, deterministic=deterministic, scores=scores)
    return Differentiated(call).problem(card_of(q.device))


def differentiate(
    kernel: Any, given: Inputs, config: Any = None, *, deterministic: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `kernel`, written over NaN. Without a config its default."""
    q, k, v, mask = given[:4]
    p = problem(q, k, v, mask, deterministic=deterministic, scores=given.scores)
    c = kernel.default(p) if config is None else config
    dq, dk, dv = (operands.empty_out(x, x.shape[3]).fill_(torch.nan) for x in (q, k, v))
    with torch.no_grad(), dtypes.as_given(q.device):
        kernel.launch(c, kernel.prepare(p, c, mask), AttentionGradCall(*given[:9], dq, dk, dv, given.scores))
    return dq, dk, dv


def judged(given: Inputs, found: tuple[Tensor, Tensor, Tensor]) -> AttentionGradGate:
    """The gate of gradients that were found for `given`."""
    q, k, v, mask, scale, _, _, grad, grad_lse, scores = given
    return check_attention_backward(q, k, v, mask, grad, found, grad_lse, scale=scale, scores=scores)


def hold(
    kernel: Any,
    case: AttentionCase,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    with_lse: bool = False,
    config: Any = None,
    deterministic: bool = True,
) -> None:
    """Fails unless the kernel's gradients are within the error budget, and the same bits when it runs again."""
    given = inputs(*case.make(device, dtype), with_lse=with_lse)
    found = differentiate(kernel, given, config, deterministic=deterministic)
    gate = judged(given, found)
    assert gate.passed, f"{case}: {gate}"
    if deterministic:
        again = differentiate(kernel, given, config)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), f"{case}: other bits"


def poisoned_keys(case: AttentionCase, device: str = "cpu") -> Inputs:
    """A case whose keys and values hold NaN where no stored block is."""
    q, k, v, mask = case.make(device)
    given = inputs(q, k, v, mask)
    seen = mask.to_dense().flatten(0, 2).any(0)
    stored = seen.new_zeros(-(-mask.kv_len // mask.block[1]) * mask.block[1])
    stored[: mask.kv_len] = seen
    whole = stored.view(-1, mask.block[1]).any(1).repeat_interleave(mask.block[1])[: mask.kv_len]
    bad = poisoned((1,), q.dtype, device)
    k, v = (torch.where(whole[:, None], x, bad) for x in (k, v))
    return given._replace(k=k, v=v)
