"""portable.spmm_skinny_fp8 on a GPU: cases, the bits of a B that the kernel rounds, recorded calls, graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import sparsek as sk
from sparsek.engine.launch.recorder import Recorded
from sparsek.engine.table import load
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.quantized_tensor import quantize_dense
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.linear import plan_layer
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import hold, multiply, problem
from tests.engine.launch.drawn import fresh
from tests.products.cases import E4M3, FP8_CASES, Case, laid_out
from tests.sampling import sampled

pytestmark = pytest.mark.gpu
KERNEL: Any = load("portable.spmm_skinny_fp8")
BF16 = torch.bfloat16
CASES = [replace(case, n=min(case.n, KERNEL.widest)) for case in FP8_CASES if case.op == "spmm_fp8"]


def rounded(b: Tensor) -> Any:
    """B [..., K, N] as the launch before the kernel rounds it."""
    return quantize_dense(b.mT, E4M3, "row", check=False).mT


def spread(layout: str, sides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """B with numbers of all sizes, and a column of zeros."""
    b = laid_out(layout, sides, torch.float32, "cuda", fresh())
    b = b * torch.exp2(torch.randint(-20, 4, b.shape, device="cuda").float())
    b[..., sides[-1] // 2].zero_()
    placed = laid_out(layout, sides, dtype, "cuda", 0)
    return placed.copy_(b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_within_its_error_budget(case: Case):
    a, b, epilogue, out = case.make("cuda", BF16, fresh())
    hold(KERNEL, case, BF16, "cuda", fresh())
    if case.n:
        c = replace(KERNEL.default(problem(a, b, out, epilogue)), part=1)
        hold(KERNEL, case, BF16, "cuda", fresh(), config=c)


SIZES: tuple[tuple[int, int, Any, Any], ...] = (
    (256, 4096, 128, "row"),
    (200, 14336, (48, 96), "block"),
    (96, 160, 32, "tensor"),
    (512, 20000, 160, "row"),
)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["col", "row", "strided", "wide"])
def test_b_of_any_layout_and_size_is_rounded_to_the_same_bits(layout: str, dtype: torch.dtype):
    for m, k, block, scale in sampled(SIZES, 2, of=(layout, dtype)):
        n = sampled(range(1, 9), 1, of=(layout, dtype, k))[0]
        a = random_bsr(m, k, block, 0.3, pattern="powerlaw", dtype=torch.float32, device="cuda", seed=fresh())
        q = quantize(a, scale=scale)
        for matrix in (q,) if scale == "row" else (q, q.T):
            b = spread(layout, (matrix.shape[1], n), dtype)
            out = poisoned((n, matrix.shape[0]), dtype, "cuda").mT
            before = rounded(b)
            inside = list(KERNEL.configs(problem(matrix, b, out)))
            for c in (*sampled(inside, 1, of=(m, n)), replace(inside[0], part=1)):
                found = multiply(KERNEL, matrix, b, out=out.fill_(torch.nan), config=c).clone()
                wanted = multiply(KERNEL, matrix, before, out=out.fill_(torch.nan), config=c)
                assert torch.equal(found, wanted), f"{matrix} {b.shape} {c}"
                gate = check_spmm(matrix, before, found)
                assert gate.passed, f"{matrix} {c}: {gate}"


def test_numbers_of_every_size_nan_and_inf_are_rounded_as_before():
    """All bf16 numbers, a column of neighbours, so that scales and quotients are many."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).cuda()
    a = quantize(random_bsr(128, 128, 32, 0.8, dtype=torch.float32, device="cuda"), scale="tensor")
    for x in bits.view(BF16).view(-1, 128).split(8):
        b, out = x.mT, poisoned((128, 8), torch.float32, "cuda")
        c = KERNEL.default(problem(a, b, out))
        found = multiply(KERNEL, a, b, out=out, config=c).clone()
        wanted = multiply(KERNEL, a, rounded(b), out=out, config=c)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def layer(tokens: int, features: int = 1024) -> tuple[Any, Tensor]:
    w = quantize(random_bsr(2048, features, 128, 0.25, dtype=BF16, device="cuda", seed=fresh()))
    return w, torch.randn(tokens, features, dtype=BF16, device="cuda")


@pytest.mark.parametrize("tokens", [1, 7, 8])
def test_a_layer_of_few_tokens_is_one_recorded_launch_with_the_bits_of_rounding_first(tokens: int):
    w, x = layer(tokens)
    plan = plan_layer(x, w)
    assert plan.kernel == KERNEL.name
    wanted = multiply(
        KERNEL, w, rounded(x.mT), out=poisoned((tokens, 2048), BF16, "cuda").mT,
        config=plan.config,
    ).mT  # fmt: skip
    for _ in range(5):
        assert torch.equal(sk.linear(x, w), wanted)
        assert torch.equal(sk.linear(x.clone(), w), wanted)
    known = w.plan_owner()._memo["calls"].known.values()
    recorded = [call for call in known if isinstance(call, Recorded)]
    assert recorded
    for call in recorded:
        assert call.one is not None, "one allocation and one launch"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.linear(x, w)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


def test_x_has_the_gradient_of_a_launch_before_it():
    w, x = layer(4)
    grads = []
    for kernel in (KERNEL.name, "portable.spmm_fp8"):
        given = x.clone().requires_grad_()
        sk.linear(given, w, kernel=kernel).square().sum().backward()
        assert given.grad is not None
        grads.append(given.grad)
    assert (grads[0] - grads[1]).abs().max() <= 0.02 * grads[1].abs().max()


def test_c_in_the_memory_of_b_is_right():
    a = quantize(random_bsr(1024, 2048, 128, 0.25, dtype=BF16, device="cuda", seed=fresh()))
    b = torch.randn(2048, 8, dtype=BF16, device="cuda")
    wanted = sk.spmm(a, b, out=poisoned((1024, 8), BF16, "cuda"), kernel=KERNEL.name)
    for _ in range(4):
        mine = b.clone()
        assert torch.equal(sk.spmm(a, mine, out=mine[:1024], kernel=KERNEL.name), wanted)


def test_cut_rows_give_the_same_bits_on_two_streams():
    a = quantize(random_bsr(1024, 8192, 128, 0.5, dtype=BF16, device="cuda", seed=fresh()))
    b = spread("col", (8192, 4), BF16)
    out = poisoned((4, 1024), BF16, "cuda").mT
    c = replace(KERNEL.default(problem(a, b, out)), part=2)
    work = KERNEL.prepare(problem(a, b, out), c, a)
    assert work.slots
    KERNEL.launch(c, work, a, b, out)
    first, streams = out.clone(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = [[torch.empty_like(out) for _ in range(50)] for _ in streams]
    for at in range(50):
        for stream, mine in zip(streams, found, strict=True):
            with torch.cuda.stream(stream):
                KERNEL.launch(c, work, a, b, mine[at])
    torch.cuda.synchronize()
    assert all(torch.equal(each, first) for mine in found for each in mine)
    assert not any(arrivals.any() for _, arrivals in work.rooms.values())
    assert len(work.rooms) == len(streams) + 1
