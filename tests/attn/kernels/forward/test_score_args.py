"""Softcap, ALiBi slopes and learned sinks on a GPU: every kernel of attention and of its gradients against float64.

Outputs are poisoned, and the same bits come again. Inputs are fresh in every run; a failure prints the seed. Compiling
dominates: run it under pytest-xdist.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.kernels.backward.sinks import launched
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.scores import Scores, sink_gradients
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention, check_attention_backward
from tests.attn.attention_cases import random_bits
from tests.attn.kernels.backward.grad_cases import differentiate, inputs, judged
from tests.attn.kernels.backward.grad_cases import problem as grad_problem
from tests.attn.kernels.forward.changes import CHANGES
from tests.attn.kernels.planned import attend, default_and
from tests.attn.kernels.planned import attention_problem as problem
from tests.attn.mask import members
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh
from tests.sampling import sampled

pytestmark = pytest.mark.gpu
BF16, HALF = torch.bfloat16, torch.float16
FAMILIES = ("hopper", "portable")
# Configs beside the default one.
COUNT = {"hopper": 1, "portable": 0}
BLOCKS = ((128, 128), (64, 64))
# Heads (q, k), queries and keys, head dims: packed and cut tiles, gqa, ragged ends, queries that see nothing.
SHAPES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "gqa": ((4, 2), (333, 401), (64, 64)),
    "wide": ((2, 2), (300, 300), (128, 128)),
    "the first see nothing": ((2, 1), (400, 150), (128, 64)),
    "few queries": ((8, 2), (5, 3000), (64, 64)),
    "members": ((8, 2), (200, 300), (128, 64)),
    "members of one head": ((2, 2), (200, 150), (64, 64)),
}


def drawn(shape: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; scores are of the size of a softcap."""
    (hq, hkv), (s, t), (d, dv) = SHAPES[shape]
    draw = torch.Generator("cuda").manual_seed(seed)

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=draw, device="cuda", dtype=torch.float32).to(dtype)

    return 2 * normal(2, hq, s, d), normal(2, hkv, t, d), normal(2, hkv, t, dv)


def mask_of(shape: str, block: tuple[int, int], seed: int) -> BlockMask:
    (hq, heads), (s, t), _ = SHAPES[shape]
    if shape.startswith("members"):
        sides, ends = (128 * heads // hq, block[1]), 9 * (shape == "members of one head")
        return members.drawn(s, t, sides, batch=2, heads=heads, window=ends, seed=seed, device="cuda").mask
    if shape == "gqa":
        return random_bits("cuda", (s, t), block, heads=hq, density=0.7, seed=seed)
    return BlockMask.causal(q_len=s, kv_len=t, block=block, device="cuda")


def kinds(case: tuple[str, str, str, tuple[int, int]]) -> list[tuple[object, ...]]:
    """What each run holds: every change by each family, every shape in every block by each, every change in each."""
    family, name, shape, block = case
    return [(family, name), (family, shape, block), (name, block)]


DRAWN = once(product(FAMILIES, CHANGES, SHAPES, BLOCKS), kinds)


@pytest.mark.parametrize(("family", "name", "shape", "block"), DRAWN, ids=str)
def test_out_and_lse(family: str, name: str, shape: str, block: tuple[int, int]) -> None:
    kernel, seed = load(f"{family}.attention_fwd"), fresh()
    q, k, v = drawn(shape, BF16 if shape == "wide" else HALF, seed)
    scores, mask = CHANGES[name](q), mask_of(shape, block, seed)
    p = problem(q, k, v, mask, scores=scores)
    assert kernel.why_not(p) == []
    for c in default_and(COUNT[family], kernel, p, of=(name, shape, block)):
        found, again = (attend(kernel, q, k, v, mask, c, scores=scores) for _ in range(2))
        gate = check_attention(q, k, v, mask, *found, scores=scores)
        assert gate.passed, f"{c}, seed {seed}: {gate}"
        assert all(map(torch.equal, found, again)), f"{c}, seed {seed}: other bits"


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_near_and_far_beyond_the_cap(family: str, cap: float) -> None:
    """A few keys with scores of almost the cap share a query's weight: errors of the cap would show."""
    kernel, seed = load(f"{family}.attention_fwd"), fresh()
    q, k, v = drawn("wide", BF16, seed)
    mask, scores = mask_of("wide", (128, 128), seed), Scores(cap)
    for size in (1, 4, 40):
        out, lse = attend(kernel, size * q, k, v, mask, scores=scores)
        gate = check_attention(size * q, k, v, mask, out, lse, scores=scores)
        assert gate.passed, f"scores {size} times as large, seed {seed}: {gate}"


@pytest.mark.parametrize("family", FAMILIES)
def test_distances_of_thousands_are_exact(family: str) -> None:
    """Queries see the first keys alone: those at their sides would outweigh them."""
    kernel, draw = load(f"{family}.attention_fwd"), torch.Generator("cuda").manual_seed(fresh())
    (q, k, v) = (
        torch.randn(1, 2, length, 64, generator=draw, device="cuda", dtype=torch.float32).to(HALF)
        for length in (130, 5001, 5001)
    )
    seen = torch.zeros(2, 40, dtype=torch.bool, device="cuda")
    seen[:, :2] = True
    mask = BlockMask.from_block_map(seen, q_len=130, kv_len=5001, device="cuda")
    scores = Scores(alibi_slopes=torch.tensor([0.25, 0.02], device="cuda"))
    gate = check_attention(q, k, v, mask, *attend(kernel, q, k, v, mask, scores=scores), scores=scores)
    assert gate.passed, gate


@pytest.mark.parametrize(("family", "name", "shape", "block"), DRAWN, ids=str)
def test_gradients(family: str, name: str, shape: str, block: tuple[int, int]) -> None:
    seed = fresh()
    q, k, v = drawn(shape, BF16 if shape == "wide" else HALF, seed)
    scores, mask = CHANGES[name](q), mask_of(shape, block, seed)
    kernel, given = load(f"{family}.attention_bwd"), inputs(q, k, v, mask, with_lse=True, scores=scores)
    orders = (True, False) if family == "hopper" and name == "all" else (True,)
    for ordered in (False,) if family == "hopper" and block[1] == 64 else orders:
        p = grad_problem(q, k, v, mask, deterministic=ordered, scores=scores)
        if family == "hopper" and shape == "members" and p.alibi:
            assert kernel.why_not(p) == ["has no ALiBi of several heads in one tile"]
            continue
        assert kernel.why_not(p) == []
        for c in default_and(COUNT[family], kernel, p, of=(p, ordered)):
            gate = judged(given, differentiate(kernel, given, c, deterministic=ordered))
            assert gate.passed, f"{c}, seed {seed}: {gate}"


@pytest.mark.parametrize("dtype", [BF16, HALF, torch.float32])
@pytest.mark.parametrize("length", [1, 300, 20_000])
def test_the_gradient_of_sinks(dtype: torch.dtype, length: int) -> None:
    """Of strided inputs, by two launches: against float64, and the same bits again."""
    draw = torch.Generator("cuda").manual_seed(fresh())

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=draw, device="cuda", dtype=torch.float32)

    out, grad = (normal(2, length, 3, 40).to(dtype).transpose(1, 2) for _ in range(2))
    lse, grad_lse = normal(2, 3, length), normal(2, 3, length)
    lse[:, 0, 0] = -torch.inf
    sinks = torch.tensor([0.3, -torch.inf, 2.0], device="cuda", dtype=dtype)
    found = launched(out, lse, grad, grad_lse, sinks)
    right = sink_gradients(out.double(), lse.double(), grad.double(), grad_lse.double(), sinks)
    sizes = out.double().abs(), lse.double(), grad.double().abs(), -grad_lse.double().abs()
    size = sink_gradients(*sizes, sinks)
    assert ((found - right).abs() <= 1e-5 * size.abs() + 1e-30).all()
    assert torch.equal(found, launched(out, lse, grad, grad_lse, sinks))


@pytest.mark.parametrize("family", [*sampled(["hopper", None], 1), "portable"])
def test_training_steps_recorded_and_compiled_agree(family: str | None) -> None:
    """Every option, with new values in each step: in eager mode the third step repeats a recorded call."""
    mask = BlockMask.sliding_window(700, 200, sinks=9, device="cuda")
    kernel = None if family is None else f"{family}.attention_fwd"
    compiled = torch.compile(sk.attention, fullgraph=True)
    for step in range(5):
        q, k, v = drawn("wide", BF16, fresh())
        q, k, v = (x.repeat(1, 1, 3, 1)[:, :, :700].contiguous().requires_grad_() for x in (q, k, v))
        slopes, sinks = (
            torch.rand(2, q.shape[1], device="cuda"),
            torch.randn(2, device="cuda").requires_grad_(),
        )
        options: Any = {"softcap": 20.0, "alibi_slopes": slopes, "sink_logits": sinks, "kernel": kernel}
        grad = torch.randn_like(q)
        out, lse = sk.attention(q, k, v, mask, return_lse=True, **options)
        scores = Scores(20.0, slopes, sinks.detach())
        gate = check_attention(q, k, v, mask, out, lse, scores=scores)
        assert gate.passed, f"step {step}: {gate}"
        leaves = q, k, v, sinks
        *found, of_sinks = torch.autograd.grad(out, leaves, grad)
        gate = check_attention_backward(q, k, v, mask, grad, found, scores=scores)
        assert gate.passed, f"step {step}: {gate}"
        right = sink_gradients(out.double(), lse.double(), grad.double(), None, sinks.detach()).sum(0)
        torch.testing.assert_close(of_sinks.double(), right, rtol=1e-3, atol=1e-2)
        if step > 2:
            more = torch.autograd.grad(compiled(q, k, v, mask, **options), leaves, grad)
            assert all(map(torch.equal, more, (*found, of_sinks))), f"step {step}: compiled, other bits"


def test_a_captured_call_follows_slopes_and_sinks_that_change() -> None:
    mask = BlockMask.causal(300, device="cuda")
    q, k, v = drawn("wide", BF16, fresh())
    slopes, sinks = torch.rand(2, device="cuda"), torch.randn(2, device="cuda")
    options: Any = {"softcap": 10.0, "alibi_slopes": slopes, "sink_logits": sinks}
    sk.attention(q, k, v, mask, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(q, k, v, mask, **options)
    for _ in range(2):
        slopes.uniform_()
        sinks.normal_()
        graph.replay()
        assert torch.equal(out, sk.attention(q, k, v, mask, **options))
