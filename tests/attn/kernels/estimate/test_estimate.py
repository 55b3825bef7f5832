"""kernels/estimate and policies: code for cards that are not there; on a GPU against the reference and the CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.kernels.estimate.maps import mark
from sparsek.attn.kernels.estimate.mass import to_mass
from sparsek.attn.kernels.estimate.means import split_means
from sparsek.attn.kernels.estimate.scores import block_scores
from sparsek.attn.reference import estimates as reference
from tests.attn.policies.drawn import chosen, lengths_of, normal
from tests.engine.launch.covering import once

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import coarse, maps, mass, means, scores, token_scores
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS
from tests.sampling import sampled


def code_of_means(card: str, dtype: str, dim: int, side: int, parts: int) -> Code:
    types = {"x": f"*{dtype}", "y": f"*{dtype}", "x_means": "*bf16", "y_means": "*bf16"}
    constants: dict[str, Any] = {
        "X_SIDE": side, "X_PARTS": parts, "Y_SIDE": side, "Y_PARTS": parts, "D": dim, "WIDE": means.WIDE,
        "sx_d": 1, "sy_d": 1, "x_lengths": None, "y_lengths": None, "X_ORDER": parts // 4, "Y_ORDER": parts // 2,
    }  # fmt: skip
    return compiled(means._means, types, constants, CARDS[card], side // means.ROWS, 3)


def code_of_scores(c: scores.Config, card: str, dim: int, block: int, parts: int, causal: bool) -> Code:
    boxes = ((c.tile_m, "q"), (c.tile_n, "k"))
    kinds = {name: f"tensordesc<bf16[{many}, {c.depth}]>" if c.tma else "*bf16" for many, name in boxes}
    types = kinds | {"scores": "*fp32", "scale": "fp32"}
    constants: dict[str, Any] = {
        "kv_lengths": None, "BM": block, "BK": block, "DOWN": parts, "ACROSS": parts, "CAUSAL": causal, "D": dim,
        "TM": c.tile_m, "TN": c.tile_n, "DEPTH": c.depth, "VISITS": scores.VISITS, "STAGES": c.num_stages,
        "TMA": c.tma, "QUADS": c.quads,
    }  # fmt: skip
    aligned = () if c.tma else None
    return compiled(scores._scores, types, constants, CARDS[card], c.num_warps, c.num_stages, aligned=aligned)


OF_MEANS = (("bf16", 128, 128, 1), ("bf16", 128, 64, 4), ("fp32", 64, 64, 4), ("fp16", 128, 256, 1))

OF_SCORES = ((128, 64, 4, False), (128, 128, 1, True), (64, 64, 4, True))

CARD_NAMES = ("sm_90", "sm_80")


@pytest.mark.parametrize(("card", "what"), once(product(CARD_NAMES, OF_MEANS), most=2), ids=str)
def test_means_read_16_bytes_at_once_and_keep_all_in_registers(
    card: str, what: tuple[str, int, int, int]
) -> None:
    dtype, dim, side, parts = what
    code = code_of_means(card, dtype, dim, side, parts)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx
    assert code.registers <= 168


@pytest.mark.parametrize(("card", "what"), once(product(CARD_NAMES, OF_SCORES), most=2), ids=str)
def test_scores_use_tensor_cores_and_pipelined_loads(card: str, what: tuple[int, int, int, bool]) -> None:
    dim, block, parts, causal = what
    code = code_of_scores(scores.SMALL, card, dim, block, parts, causal)
    assert code.stack == 0 or card == "sm_80"  # whose tensor cores read both operands from registers
    assert code.copies
    assert ("wgmma.mma_async" in code.ptx) == (card == "sm_90")
    assert code.shared <= CARDS[card].smem_bytes // 2  # two programs on an SM


@pytest.mark.parametrize("dim", sampled([64, 128], 1))
def test_parts_of_a_block_are_added_within_a_thread(dim: int) -> None:
    code = code_of_scores(scores.HOPPER, "sm_90", dim, 64, 4, False)
    assert code.stack == 0
    assert "wgmma.mma_async" in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx
    assert code.ptx.count("shfl.sync") < 20  # of whole tiles; none for each block
    assert code.shared <= CARDS["sm_90"].smem_bytes // 2


@pytest.mark.parametrize("softmax", sampled([False, True], 1))
def test_scores_for_each_query_leave_only_cells(softmax: bool) -> None:
    c = token_scores.WEIGHTS if softmax else token_scores.PRODUCTS
    types = {"q": "*bf16", "k": "*bf16", "out": "*fp32", "position": "*i64", "first": "*i64", "scale": "fp32"}
    spans = (16, 16, 4, 2, 2, 4, 16, 32) if softmax else (1, 1, 64, 1, 1, 128, 1, 1)
    names = ("GROUP", "PACK", "CELL", "PLANES", "COVERS", "PARTS", "STRIDE", "SPAN")
    constants: dict[str, Any] = dict(zip(names, spans, strict=True)) | {
        "SOFTMAX": softmax, "SUMS": softmax, "D": 128, "WIDE": 128, "ROWS": c.rows, "TN": c.keys, "sq_d": 1, "sk_d": 1,
    }  # fmt: skip
    code = compiled(token_scores._score, types, constants, CARDS["sm_90"], c.num_warps, c.num_stages)
    assert code.stack == 0
    assert code.copies
    assert "wgmma.mma_async" in code.ptx
    assert code.shared <= CARDS["sm_90"].smem_bytes // 2
    assert code.registers * 32 * c.num_warps <= 32768  # two programs on an SM
    assert softmax or "max.NaN.f32" in code.ptx  # one that is NaN excludes its block


UNUSED: dict[bool, dict[str, Any]] = {True: {"within": None}, False: {}}


@pytest.mark.parametrize(("within", "causal"), once(product((False, True), (False, True))))
def test_maps_and_masses_compile(within: bool, causal: bool) -> None:
    names = ("full", "part")
    types = {f"{name}_{part}": "*i32" for name in names for part in ("starts", "counts", "indices")} | {
        "made": "*i8"
    }
    constants: dict[str, Any] = {"CHUNK": maps.CHUNK}
    code = compiled(
        maps._map, types | {"within": "*i8"}, constants | UNUSED[not within], CARDS["sm_90"], 1, 3
    )
    assert code.stack == 0
    constants = {"BM": 64, "BK": 64, "CAUSAL": causal, "CHUNK": mass.CHUNK}
    assert compiled(mass._mass, {"scores": "*fp32"}, constants, CARDS["sm_90"], mass.WARPS, 3).stack == 0


def test_vsa_moves_16_bytes_at_once() -> None:
    types = {"out": "*bf16", "gate": "*bf16", "means": "*fp32", "lengths": "*i32"}
    constants: dict[str, Any] = {"so_d": 1, "sg_d": 1, "SIDE": 64, "DV": 128, "ROWS": coarse.ROWS}
    code = compiled(coarse._add, types, constants, CARDS["sm_90"], coarse.WARPS, 3)
    assert code.stack == 0
    assert "v4.b32" in code.stores


policies = sk.policies

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# q_len, kv_len, heads of q and k, head dim, block, parts, causal_from
CASES = [
    (1000, 1000, 4, 2, 128, (64, 64), (4, 4), None),
    (130, 900, 2, 2, 64, (128, 64), (1, 1), 770),
    (511, 2100, 2, 1, 80, (64, 128), (2, 8), 1589),
    (2048, 2048, 1, 1, 256, (128, 128), (1, 1), 0),
    (3, 600, 2, 1, 40, (128, 128), (4, 4), -5),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bshd", "batch", "case", "dtype"),
    once(product((False, True), (None, 1, 2), CASES, DTYPES), together=2),
    ids=str,
)
def test_scores_are_those_of_the_reference(
    case: Any, dtype: torch.dtype, batch: int | None, bshd: bool
) -> None:
    q_len, kv_len, q_heads, k_heads, dim, block, parts, causal_from = case
    q, k = (
        normal(2, heads, length, dim, seed=seed).to("cuda", dtype)
        for seed, (heads, length) in enumerate(((q_heads, q_len), (k_heads, kv_len)))
    )
    if bshd:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    lengths = None if batch is None else lengths_of(-(-kv_len // block[1]), block[1], batch, 7).cuda()
    found = block_scores(q, k, block, parts, 0.3, lengths, causal_from).cpu()
    wanted = reference.block_scores(q, k, block, parts, 0.3, lengths).cpu()
    if causal_from is not None:
        last = (torch.arange(1, wanted.shape[2] + 1) * block[0]).clamp(max=q_len)[:, None] + causal_from
        beyond = torch.arange(wanted.shape[3]) * block[1] >= last
        found, wanted = found.masked_fill(beyond, 0), wanted.masked_fill(beyond, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [64, 128, 256])
def test_halves_of_means_add_up(side: int) -> None:
    x = normal(1, 2, 3000, 128).to("cuda", torch.bfloat16)
    high, low = split_means(x, None, (side, side))[0].float()
    torch.testing.assert_close(high + low, reference.block_means(x, side), rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 1000, 5000])
def test_mass_is_the_softmax_of_each_row(columns: int) -> None:
    scores = 9 * normal(2, 2, 40, columns).cuda()
    scores[0, 0, 1] = -torch.inf
    for causal_from in (None, 0, 3000):
        wanted = reference.block_mass(scores, (64, 64), 2500, causal_from)
        torch.testing.assert_close(
            to_mass(scores.clone(), (64, 64), 2500, causal_from), wanted, rtol=1e-4, atol=1e-7
        )


@pytest.mark.gpu
def test_maps_have_the_stored_blocks() -> None:
    mask = sk.BlockMask.sliding_window(20000, 3000, sinks=200, block=64, device="cuda")
    made = torch.zeros(1, 2, *mask.grid, dtype=torch.int8, device="cuda")
    mark(mask, made)
    assert torch.equal(made.bool().cpu(), chosen(mask.to("cpu")).expand(1, 2, -1, -1))


TILES = policies.SlidingTile((4, 32, 32), (3, 3, 3), (1, 8, 8), clamped=False)

ALL: list[Any] = [
    policies.MeanTopK(topk=6),
    policies.MeanTopK(density=0.2, block=64, causal=False),
    policies.SubBlock(density=0.2),
    policies.Nabla(0.6),
    policies.Nabla(0.3, tiles=TILES),
    policies.Nabla(0.5, block=128, causal=True),
    policies.VSA(topk=9),
    TILES,
    policies.Radial(8, 512, block=64),
    policies.Streaming(window=512, sinks=128),
    policies.MeanTopK(topk=4) | policies.Streaming(window=256),
    policies.SubBlock() & TILES,
]

# Masks by position alone are made once and kept.
CHOOSING = [
    each for each in ALL if not isinstance(each, (policies.SlidingTile, policies.Radial, policies.Streaming))
]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
@pytest.mark.parametrize("lengths", [False, True])
def test_a_policy_chooses_as_on_the_cpu(policy: Any, lengths: bool) -> None:
    q, k, v = (normal(2, heads, 4096, 64, seed=heads).to(torch.bfloat16) for heads in (4, 2, 2))
    held = lengths_of(4096 // policy.sides[1], policy.sides[1], 2, 3) if lengths else None
    here = policy.mask(q, k, kv_lengths=held)
    there = policy.mask(q.cuda(), k.cuda(), kv_lengths=None if held is None else held.cuda())
    there.verify(wait=True)
    a, b = chosen(here), chosen(there.to("cpu"))
    share = (a != b).float().mean() / a.float().mean()
    assert share < 0.002, (
        f"{share:.2%} of the blocks differ"
    )  # scores that differ by rounding may change places
    if share == 0 and lengths is False:
        q, k, v = (x.cuda() for x in (q, k, v))
        made = policy.mask(
            q, k
        )  # as new as the one of the call: `there` has exact sizes, and so another plan
        assert torch.equal(sk.attention(q, k, v, policy), sk.attention(q, k, v, made))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", CHOOSING, ids=lambda policy: policy.label)
def test_a_cuda_graph_chooses_anew_at_each_replay(policy: Any) -> None:
    q, k = (normal(1, heads, 4096, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (4, 2))
    policy.mask(q, k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        policy.mask(q, k)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = policy.mask(q, k)
    for seed in (5, 6):
        q.copy_(normal(1, 4, 4096, 64, seed=seed))
        graph.replay()
        assert torch.equal(chosen(mask.to("cpu")), chosen(policy.mask(q, k).to("cpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
def test_nothing_waits_for_the_gpu(policy: Any, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    q, k = (normal(1, heads, 4096, 64, seed=heads).to("cuda", torch.bfloat16) for heads in (4, 2))
    for _ in range(3):
        policy.mask(q, k)
        torch.cuda.synchronize()
        with no_sync():
            policy.mask(q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_vsa_adds_its_coarse_branch(gated: bool) -> None:
    operands = [normal(1, 4, 1024, 64, seed=seed).to(torch.bfloat16) for seed in range(4 if gated else 3)]
    lengths = lengths_of(16, 64, 1, 3)
    policy = policies.VSA(topk=4)
    wanted = policy.attention(*(x.float() for x in operands), kv_lengths=lengths, q_lengths=lengths)
    there = lengths.cuda()
    found = policy.attention(*(x.cuda() for x in operands), kv_lengths=there, q_lengths=there)
    torch.testing.assert_close(found.float().cpu(), wanted, rtol=2e-2, atol=2e-2)
    after = (torch.arange(1024) % 64 >= lengths.repeat_interleave(64, -1).view(-1)).view(1, 1, -1, 1)
    assert not found.cpu().masked_fill(~after, 0).any()
