"""Any mask of any builder over any shape: attention and its gradients agree with the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.core import dtypes
from sparsek.testing.attention_budget import check_attention_backward
from tests.ops.tensors import Qkv, check
from tests.sampling import EVERY, SEED, sampled

LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 127, 128, 129)), st.integers(1, 300))
BLOCKS = st.tuples(st.sampled_from((64, 128)), st.sampled_from((64, 128)))
SEEDS = st.integers(0, 2**31)
# Kernels are compiled for each pair, so two in a run: the tests of each kernel have more.
DIMS_OF_A_GPU = sampled(((64, 64), (128, 128), (32, 96), (96, 64), (128, 32)), 2)


def random(shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@st.composite
def simple_masks(
    draw: st.DrawFn, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int, device: str
) -> BlockMask:
    """A mask of one builder. Masks that random numbers make may differ between batch items and heads."""
    frame = {"q_len": q_len, "kv_len": kv_len, "block": block, "device": device}
    grid = -(-q_len // block[0]), -(-kv_len // block[1])
    causal = draw(st.booleans())
    builders = ["full", "causal", "window", "strided", "dilated", "bigbird", "topk", "blocks", "dense"]
    kind = draw(st.sampled_from([*builders, "documents"] if q_len == kv_len else builders))
    if kind == "full":
        return BlockMask.full(**frame)
    if kind == "causal":
        return BlockMask.causal(**frame, q_offset=draw(st.none() | st.integers(-100, 100)))
    if kind == "window":
        width, sinks = draw(st.integers(1, 200)), draw(st.integers(0, 70)) if causal else 0
        return BlockMask.sliding_window(window=width, sinks=sinks, causal=causal, **frame)
    if kind == "strided":
        stride = draw(st.integers(1, 3)) * block[1]
        return BlockMask.strided(stride=stride, window=draw(st.integers(1, 200)), causal=causal, **frame)
    if kind == "dilated":
        reach, gap = draw(st.integers(1, 200)), draw(st.integers(1, 3))
        return BlockMask.dilated(window=reach, dilation=gap, causal=causal, **frame)
    if kind == "bigbird":
        counts = {name: draw(st.integers(1, 130)) for name in ("window", "globals", "random")}
        return BlockMask.bigbird(**counts, seed=draw(st.integers(0, 99)), causal=causal, heads=heads, **frame)
    if kind == "topk":
        scores = random((batch, heads, *grid), draw(SEEDS), device)
        del frame["device"]
        return BlockMask.topk(scores, draw(st.integers(1, grid[1])), causal=causal, **frame)
    if kind == "blocks":
        kept = random((batch * heads * grid[0], grid[1]), draw(SEEDS), "cpu") < draw(st.floats(0, 1))
        indptr = torch.cat((torch.zeros(1, dtype=torch.long), kept.sum(1).cumsum(0))).int()
        indices = kept.nonzero()[:, 1].int()
        lists = indptr.to(device), indices.to(device)
        return BlockMask.from_blocks(*lists, q_len, kv_len, block, batch=batch, heads=heads)
    if kind == "documents":
        cuts = sorted(draw(st.sets(st.integers(1, q_len), max_size=4)) | {q_len})
        lengths = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
        return BlockMask.block_diagonal(lengths, causal=causal, block=block, device=device)
    return BlockMask.from_dense(random((batch, heads, q_len, kv_len), draw(SEEDS), device) < 0.4, block)


@dataclass(frozen=True)
class Problem:
    """q, k, v and a mask for them."""

    tensors: Qkv
    mask: BlockMask

    def __repr__(self) -> str:
        shapes = [f"{list(x.shape)} {x.stride()}" for x in self.tensors]
        return f"{self.mask!r}, {self.tensors[0].dtype} {', '.join(shapes)}"


@st.composite
def problems(draw: st.DrawFn, device: str) -> Problem:
    """The mask may be made of two."""
    group, kv_heads, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    q_len = draw(LENGTHS)
    kv_len = q_len if draw(st.booleans()) else draw(LENGTHS)
    block = draw(BLOCKS)
    items, heads = draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, kv_heads, kv_heads * group)))
    parts = [
        draw(simple_masks(q_len, kv_len, block, items, heads, device))
        for _ in range(draw(st.sampled_from((1, 1, 2))))
    ]
    mask = (
        parts[0] if len(parts) == 1 else parts[0] & parts[1] if draw(st.booleans()) else parts[0] | parts[1]
    )
    on_gpu = device != "cpu"
    kind = draw(st.sampled_from(dtypes.LOW if on_gpu else dtypes.FLOATS))
    dims = st.sampled_from(DIMS_OF_A_GPU) if on_gpu else st.tuples(*2 * [st.sampled_from((1, 8, 32, 48))])
    dim, v_dim = draw(dims)
    bshd = draw(st.booleans())
    noise = torch.Generator().manual_seed(draw(SEEDS))

    def normal(heads: int, length: int, dim: int) -> torch.Tensor:
        shape = (batch, length, heads, dim) if bshd else (batch, heads, length, dim)
        x = torch.randn(shape, generator=noise, dtype=torch.float64).to(kind).to(device)
        return x.transpose(1, 2) if bshd else x

    q, k, v = (
        normal(group * kv_heads, q_len, dim),
        normal(kv_heads, kv_len, dim),
        normal(kv_heads, kv_len, v_dim),
    )
    return Problem((q, k, v), mask)


def drawn_anew(device: str) -> Callable[[Any], Any]:
    """On a GPU fewer examples, and in every run others."""
    return (lambda test: test) if device == "cpu" else seed(SEED)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_agrees_with_the_reference(device: str):
    @drawn_anew(device)
    @settings(max_examples=50 if EVERY or device == "cpu" else 25)
    @given(problem=problems(device))
    def agrees(problem: Problem) -> None:
        tensors, mask = problem.tensors, problem.mask
        out, lse = sk.attention(*tensors, mask, return_lse=True)
        check(tensors, mask, out, lse)
        assert torch.equal(sk.attention(*tensors, mask), out)

    agrees()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_agree_with_the_reference(device: str):
    @drawn_anew(device)
    @settings(max_examples=35 if EVERY or device == "cpu" else 20)
    @given(problem=problems(device), of_lse=st.booleans(), seed=SEEDS)
    def agrees(problem: Problem, of_lse: bool, seed: int) -> None:
        mask = problem.mask
        q, k, v = tensors = problem.tensors
        for x in tensors:
            x.requires_grad_()
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
        noise = torch.Generator(device).manual_seed(seed)
        grad, grad_lse = (
            torch.randn(x.shape, generator=noise, dtype=torch.float32, device=device).to(x.dtype)
            for x in (out, lse)
        )
        outputs = [(out, grad), (lse, grad_lse)][: 2 if of_lse else 1]
        found = [
            torch.autograd.grad([x for x, _ in outputs], tensors, [g for _, g in outputs], retain_graph=True)
            for _ in range(2)
        ]
        gate = check_attention_backward(q, k, v, mask, grad, found[0], grad_lse if of_lse else None)
        assert gate.passed, f"{problem!r}: {gate}"
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    agrees()
