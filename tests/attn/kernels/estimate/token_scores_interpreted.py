"""kernels/estimate/token_scores.py in Triton's interpreter, against the torch code of policies for query tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.kernels.estimate import token_scores
from sparsek.attn.policies import token

P = sk.policies
PACKED = {"cu_seqlens": torch.tensor([0, 3, 3, 32])}
SHORT = {"cu_seqlens": torch.tensor([0, 3, 3, 20])}
TWO = {"cu_seqlens": torch.tensor([0, 75, 105])}
# policy, heads of q and k, queries, keys, options
CASES: "dict[str, tuple[Any, tuple[int, int], int, int, dict[str, Any]]]" = {
    "NSA": (P.NSA(topk=4, block=16, span=8, stride=4), (6, 2), 9, 150, {"scale": 0.4}),
    "NSA, parts between": (P.NSA(topk=3, block=8, always=(0, 0), span=12, stride=4), (3, 1), 16, 90, {"scale": 2}),
    "NSA, spans over blocks": (P.NSA(topk=3, block=4, always=(1, 1), span=12, stride=2), (1, 1), 7, 40, {}),
    "NSA, blocks of steps": (P.NSA(topk=2, block=256, always=(0, 1), span=8, stride=2), (2, 1), 5, 900, {}),
    "NSA of documents": (P.NSA(topk=3, block=4, always=(1, 1), span=2, stride=1), (8, 2), 32, 32, PACKED),
    "NSA, two in a tile": (P.NSA(topk=2, block=4, span=2, stride=1, always=(0, 1)), (2, 1), 105, 105, TWO),
    "InfLLM-v2": (P.InfLLMv2(topk=4, block=16, always=(1, 2), span=8, stride=4), (3, 1), 12, 120, {}),
    "M3": (P.IndexHead(topk=3, block=16), (2, 1), 9, 130, {}),
    "M3, parts of blocks": (P.IndexHead(topk=2, block=64, always=(1, 0)), (2, 2), 4, 270, {}),
    "M3, documents": (P.IndexHead(topk=2, block=4), (2, 1), 20, 20, SHORT),
    "M3, before the keys": (P.IndexHead(topk=2, block=4), (1, 1), 12, 9, {}),
    "MoBA": (P.MoBAGate(topk=3, block=8), (4, 2), 8, 70, {}),
    "MoBA, parts of blocks": (P.MoBAGate(topk=2, block=256), (1, 1), 6, 700, {}),
}  # fmt: skip


def drawn(heads: "tuple[int, int]", queries: int, keys: int, dtype: torch.dtype) -> "tuple[Tensor, Tensor]":
    """Small integers, so that scores are equal often, in memory as few have them."""
    made = torch.Generator().manual_seed(queries + keys)
    q = torch.randint(-2, 3, (1, queries, heads[0], 40), generator=made).transpose(1, 2)
    k = torch.randint(-2, 3, (1, heads[1], 20, keys), generator=made).transpose(2, 3)
    return q.to(dtype)[..., ::2], k.to(dtype)


def lists(policy: Any, q: Tensor, k: Tensor, by_kernel: bool, **options: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            token, "SCORES", 600 if q.shape[2] < 100 else 1 << 20
        )  # few: several parts of the queries
        if not by_kernel:
            patch.setattr(token, "kernels", lambda *_: None)
        return policy.lists(q, k, **options).indices


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES)
def test_lists_are_those_of_torch(case: str) -> None:
    policy, heads, queries, keys, options = CASES[case]
    dtype = torch.float32 if "M3" in case or " of " in case else torch.float16
    q, k = drawn(heads, queries, keys, dtype)
    if not case.startswith("M"):  # weights that differ by rounding alone have another order
        q, k = (
            x + torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype) for x in (q, k)
        )
    assert torch.equal(lists(policy, q, k, True, **options), lists(policy, q, k, False, **options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", ["NSA", "InfLLM-v2", "M3"])
def test_keys_without_a_product_exclude_what_they_exclude_in_torch(case: str) -> None:
    policy, heads, queries, keys, _ = CASES[case]
    q, k = drawn(heads, queries, keys, torch.float32)
    q = q.abs() + 0.5
    k[:, :, 20:24], k[:, 0, 40:60], k[:, :, 96:112] = -torch.inf, -torch.inf, 3.0
    k[:, :, 100, 3] = torch.nan
    q[:, 0, 3], q[:, 0, 5, 0], q[:, 0, 6] = torch.nan, torch.inf, 0
    assert torch.equal(lists(policy, q, k, True), lists(policy, q, k, False))
    q, k = q * 0, k.nan_to_num(1, 1, 1)  # all scores are equal
    assert torch.equal(lists(policy, q, k, True), lists(policy, q, k, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_highest_of_a_row_are_those_of_torch(dtype: torch.dtype) -> None:
    made, high = torch.Generator().manual_seed(1), torch.finfo(dtype).max
    grid = token.TokenGrid.of(torch.empty(1, 1, 13, 1), torch.empty(1, 1, 13 * 8, 1), 8, None)
    scores = torch.randint(-3, 4, (1, 2, 13, 13), generator=made).to(dtype) * 1e-3
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, high, -high, 0.0, -0.0, 1e-310], dtype=dtype)
    place = torch.rand(scores.shape, generator=made) < 0.4
    scores[place] = odd[torch.randint(0, 8, (int(place.sum()),), generator=made)]
    scores[0, 1, 4:6] = -torch.inf
    for topk, always in ((4, (1, 2)), (13, (0, 1)), (1, (0, 0))):
        found = torch.full((1, 2, 13, topk), -1, dtype=torch.int32)
        places = grid.position, grid.first, 0, (0, 13), 8
        assert token_scores.pick(found, scores.mT.contiguous().mT, *places, topk, always)
        assert torch.equal(found.long(), token.best_blocks(grid, scores, 0, topk, always))
    assert not token_scores.pick(found, scores, *places[:3], (0, 1 << 20), 8, topk, always)


def test_operands_without_a_kernel_are_left_to_torch() -> None:
    q, k = drawn((2, 1), 9, 80, torch.float16)
    grid = token.TokenGrid.of(q, k, 16, None)
    rule = {"scale": 1.0, "softmax": False, "sums": False}
    for x, y in ((q.double(), k.double()), (q.bfloat16(), k.bfloat16()), (q.repeat(1, 1, 1, 20), k)):
        assert token.tile_scores(grid, x, y, 2, (16, 1, 1), **rule) is None
    many = q[:, :1].expand(-1, 256, -1, -1)
    assert token.tile_scores(grid, many, k, 1, (16, 1, 1), **rule) is None
