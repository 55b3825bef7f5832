"""spgemm: what it computes, dense and at patterns, and what it keeps of two patterns."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.products.formats.bsr import BSR, padding_nonzeros, zero_padding
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops import library_args
from sparsek.products.ops import spgemm as spgemm_ops
from sparsek.products.plan.matches import match
from sparsek.products.plan.spgemm import LIMIT, MatchCache
from sparsek.testing.product_budget import check_spgemm
from tests.ops.operands import BF16

F32 = torch.float32


def two(
    sizes: tuple[int, int, int] = (96, 112, 80),
    blocks: tuple[int, int, int] = (32, 16, 48),
    dtype: torch.dtype = F32,
    device: str = "cpu",
) -> tuple[BSR, BSR]:
    """A [m, k] and B [k, n] in blocks of (bm, bk) and (bk, bn)."""
    (m, k, n), (bm, bk, bn) = sizes, blocks
    a = random_bsr(m, k, (bm, bk), 0.4, pattern="powerlaw", dtype=dtype, device=device, seed=0)
    b = random_bsr(k, n, (bk, bn), 0.4, pattern="powerlaw", dtype=dtype, device=device, seed=1)
    return a, b


def wanted(a: BSR, b: BSR, density: float = 0.5) -> BlockPattern:
    """A pattern for C, some of whose blocks no pair of blocks meets."""
    sides = a.block[0], b.block[1]
    return random_bsr(a.shape[0], b.shape[1], sides, density, device=a.device, seed=2).pattern


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [None, "reference.spgemm", "vendor.spgemm"])
@pytest.mark.parametrize("out", ["dense", "bsr", "pattern"])
def test_it_multiplies(out: str, kernel: str | None, dtype: torch.dtype):
    a, b = two((90, 100, 70), dtype=dtype)
    at = wanted(a, b) if out == "pattern" else out
    c = sk.spgemm(a, b, at, kernel=kernel)  # pyright: ignore[reportCallIssue, reportArgumentType]
    gate = check_spgemm(a, b, c)
    assert gate.passed, gate
    assert isinstance(c, BSR) != (out == "dense")
    if isinstance(c, BSR):
        assert padding_nonzeros(c) == 0
        assert c.pattern is at or out == "bsr"


@pytest.mark.parametrize("views", [(False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("out", ["dense", "bsr", "pattern"])
def test_transposed_views_multiply_without_moving_values(out: str, views: tuple[bool, bool], device: str):
    a, b = two(dtype=BF16, device=device)
    if views[0]:
        a = random_bsr(112, 96, (16, 32), 0.5, dtype=BF16, device=device, seed=3).T
    if views[1]:
        b = random_bsr(80, 112, (48, 16), 0.5, dtype=BF16, device=device, seed=4).T
    at = wanted(a, b) if out == "pattern" else out
    c = sk.spgemm(a, b, at)  # pyright: ignore[reportCallIssue, reportArgumentType]
    gate = check_spgemm(a, b, c)
    assert gate.passed, gate


def test_the_operator_gives_a_bsr(device: str):
    a, b = two(device=device)
    c = a @ b
    assert isinstance(c, BSR)
    torch.testing.assert_close(c.to_dense(), a.to_dense() @ b.to_dense())
    assert torch.equal((a @ b).values, torch.matmul(a, b).values)  # pyright: ignore[reportArgumentType]
    assert (b.T @ a.T).pattern.same_as(c.pattern.T)


def test_rectangular_blocks_of_a_mixture_of_experts_multiply(device: str):
    a, b = two((1024, 336, 256), (512, 112, 128), BF16, device)
    gate = check_spgemm(a, b, sk.spgemm(a, b))
    assert gate.passed, gate


def test_a_plan_serves_new_values(device: str):
    a, b = two(device=device)
    for out in ("dense", "bsr", wanted(a, b)):
        plan = sk.plan_spgemm(a, b, out)
        a2 = BSR(a.pattern, torch.randn_like(a.values))
        b2 = BSR(b.pattern, zero_padding(b.pattern, torch.randn_like(b.values)))
        assert check_spgemm(a2, b2, plan(a2, b2)).passed
        again = sk.spgemm(a2, b2, out, plan=plan)
        assert check_spgemm(a2, b2, again).passed


def test_patterns_are_matched_and_planned_once(plans_made: list[str], monkeypatch: pytest.MonkeyPatch):
    matched: list[Any] = []
    monkeypatch.setattr(
        spgemm_ops, "matcher", lambda device: lambda *args: matched.append(args) or match(*args)
    )
    a, b = two()
    at = wanted(a, b)
    calls: list[tuple[Callable[[], Any], int, int]] = [
        (lambda: sk.spgemm(a, b), 1, 1),
        (lambda: a @ b, 1, 2),
        (lambda: sk.spgemm(a, b, (a @ b).pattern), 1, 2),
        (lambda: sk.spgemm(a, b, at), 2, 3),
        (lambda: sk.spgemm(a, b, kernel="reference.spgemm"), 2, 4),
        (lambda: b.T @ a.T, 3, 5),
    ]
    for call, matches, made in calls:
        call()
        assert (len(matched), len(plans_made)) == (matches, made)
    for call, *_ in calls:
        call()
    assert (len(matched), len(plans_made)) == (3, 5)


def test_a_pattern_that_is_let_go_takes_its_matches_along():
    a, b = two()
    cache = a.pattern.derived("matches", MatchCache)
    gone = weakref.ref(b.pattern)
    c = a @ b
    assert len(cache) == 2, "one entry by C's pattern and one without"
    del b
    gc.collect()
    assert gone() is None, "A's pattern keeps no pattern of B alive"
    torch.testing.assert_close(c.norm(), c.to_dense().norm())
    other = two()[1]
    _ = a @ other
    assert len(cache) == 2, "what was kept for a pattern that is gone goes with the next one"


def test_a_pattern_keeps_no_more_matches_than_the_limit():
    a, b = two()
    kept = [BSR.unchecked(BlockPattern(b.shape, b.block, b.pattern.indptr, b.pattern.indices), b.values)]
    for _ in range(LIMIT + 8):
        kept.append(
            BSR.unchecked(BlockPattern(b.shape, b.block, b.pattern.indptr, b.pattern.indices), b.values)
        )
        sk.spgemm(a, kept[-1])
    assert len(a.pattern.derived("matches", MatchCache)) <= LIMIT + 1


def test_a_plan_for_an_h200_is_made_on_any_machine_and_predicts():
    a = random_bsr(4096, 4096, 128, 0.125, dtype=BF16, seed=0)
    b = random_bsr(4096, 4096, 128, 0.125, dtype=BF16, seed=1)
    plan = sk.plan_spgemm(a, b, device="h200")
    assert plan.bound_seconds < plan.seconds < 1e-2
    first, second, *_ = plan.explain().splitlines()
    assert first.startswith(
        "C = A @ B   A [4096, 4096] bf16, 128 blocks of 128x128, B [4096, 4096] bf16, 128 blocks"
    )
    assert first.endswith("with a pair, on NVIDIA H200")
    assert second.startswith(f"  matches    {plan.problem.pairs} pairs of blocks, at most ")
    with pytest.raises(InvalidInput, match="prediction for NVIDIA H200"):
        plan(a, b)


def test_a_named_kernel_that_cannot_run_says_why_and_which_can():
    with pytest.raises(Unsupported, match=r"hopper.spgemm cannot run this; .*reference.spgemm can"):
        sk.spgemm(*two(), kernel="hopper.spgemm")


@pytest.mark.parametrize("views", [(False, False), (True, True)], ids=str)
def test_the_ops_pass_torchs_own_checks(views: tuple[bool, bool]):
    a, b = two((90, 100, 70))
    a, b = (
        BSR.unchecked(x.T.pattern, x.T.logical_values()).T if view else x
        for x, view in zip((a, b), views, strict=True)
    )
    at, x = wanted(a, b), torch.randn(90, 70, requires_grad=True)
    for each in (a, b):
        each.requires_grad_()
    both = *library_args.flat(a), *library_args.flat(b)
    torch.library.opcheck(torch.ops.sparsek.spgemm_dense.default, (*both, None))
    torch.library.opcheck(torch.ops.sparsek.spgemm.default, (*both, *library_args.flat_pattern(at)[:2], None))
    for operand, sampled in ((b, a), (b.T.T, BSR.unchecked(a.T.pattern, a.values).T)):
        _, *pattern = library_args.flat(sampled)
        args = x, *library_args.flat(operand.T), *pattern, None
        torch.library.opcheck(torch.ops.sparsek.sampled.default, args)


def test_compiled_it_gives_the_same_with_gradients():
    torch._dynamo.reset()
    a, b = two()
    at = wanted(a, b)

    def run(a: BSR, b: BSR) -> torch.Tensor:
        return sk.spgemm(a, b).sum(1) * sk.spgemm(a, b, at).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), run(a, b))
    found = []
    for call in (compiled, run):
        leaves = [x.values.clone().requires_grad_() for x in (a, b)]
        out = call(*(BSR.unchecked(x.pattern, v) for x, v in zip((a, b), leaves, strict=True)))
        found.append(torch.autograd.grad(out.sum(), leaves))
    torch.testing.assert_close(*found)


def test_compiled_a_pattern_that_is_data_is_refused_with_a_hint():
    torch._dynamo.reset()
    a, b = two()
    with pytest.raises(Exception, match=r"make the pattern outside, spgemm\(A, B, .*\)\.pattern"):
        torch.compile(lambda a, b: sk.spgemm(a, b, "bsr"), fullgraph=True, backend="aot_eager")(a, b)
