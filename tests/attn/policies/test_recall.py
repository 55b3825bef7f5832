"""recall, true_mass and plot, against dense softmax."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.policies import mass as module
from sparsek.attn.policies.mass import true_mass
from sparsek.core.errors import InvalidInput
from sparsek.pictures.mass import levels
from tests.attn.attention_cases import ATTENTION_CASES
from tests.attn.policies.drawn import chosen, lengths_of, normal
from tests.refusals import refused

policies, recall, plot = sk.policies, sk.policies.recall, sk.policies.plot


def softmax(
    q: Tensor, k: Tensor, scale: float, causal: bool, lengths: Tensor | None = None, side: int = 64
) -> Tensor:
    """float32 [B, Hq, S, T], with every key repeated."""
    scores = scale * q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    key, query = torch.arange(k.shape[2]), torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    if causal:
        scores = scores.masked_fill(key > query, -torch.inf)
    if lengths is not None:
        exists = key % side < lengths[:, key // side]
        scores = scores.masked_fill(~exists[:, None, None], -torch.inf)
    return scores.softmax(-1).nan_to_num(0)


NOTES = ("all blocks ragged", "chunked prefill", "more queries than keys, the first see none", "window and sinks",
         "documents per item", "top k per item and head", "causal wide blocks", "bits per item and query head",
         "window and bits", "a mask for each head", "no blocks")  # fmt: skip
MASKS = [case for case in ATTENTION_CASES if case.note in NOTES]


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.note)
@pytest.mark.parametrize("causal", [False, True])
def test_recall_is_the_share_of_the_mass(case: Any, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mask: sk.BlockMask = case.mask("cpu")
    monkeypatch.setattr(module, "ELEMENTS", 40 * mask.kv_len)
    q = 2 * normal(mask.batch, 2 * mask.heads, mask.q_len, 8)
    k = normal(mask.batch, mask.heads, mask.kv_len, 8, seed=1)
    found = recall(mask, q, k, scale=0.7, samples=10**6, causal=causal)
    weights = softmax(q, k, 0.7, causal)
    share = (weights * mask.to_dense().repeat_interleave(2, 1)).sum(-1)
    wanted = torch.where(weights.any(-1), share, 1).mean(-1)
    torch.testing.assert_close(found, wanted)


def test_samples_are_those_of_the_seed() -> None:
    q = 3 * normal(1, 2, 500, 8)
    mask = sk.BlockMask.sliding_window(500, 64)
    a, b, c, whole = (recall(mask, q, q, samples=n, seed=s) for n, s in ((50, 0), (50, 0), (50, 1), (500, 0)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    torch.testing.assert_close(a, whole, atol=0.2, rtol=0)


def test_a_mask_is_causal_if_no_query_sees_later_keys() -> None:
    q = normal(1, 1, 256, 8)
    assert recall(sk.BlockMask.causal(256), q, q).item() == pytest.approx(1)
    assert recall(sk.BlockMask.causal(256), q, q, causal=False).item() < 0.9
    assert recall(sk.BlockMask.full(256), q, q).item() == pytest.approx(1)
    assert recall(sk.MaskPolicy(), q, q).item() == pytest.approx(1)
    assert recall(policies.Streaming(window=256, causal=True), q, q).item() == pytest.approx(1)


def test_keys_that_do_not_exist_have_no_mass() -> None:
    q, k = normal(2, 2, 200, 8), normal(2, 1, 300, 8, seed=1)
    lengths = lengths_of(5, 64, 2, 3).clamp(max=44)
    policy = policies.SubBlock(density=0.4)
    mask = policy.mask(q, k, kv_lengths=lengths)
    found = recall(policy, q, k, samples=200, kv_lengths=lengths)
    torch.testing.assert_close(found, recall(mask, q, k, samples=200, causal=False, kv_lengths=lengths))
    weights = softmax(q, k, 8**-0.5, False, lengths)
    torch.testing.assert_close(found, (weights * mask.to_dense()).sum(-1).mean(-1))
    full = policies.SubBlock(density=1.0)
    torch.testing.assert_close(recall(full, q, k, kv_lengths=lengths), torch.ones(2, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [None, 1, 5])
def test_true_mass_is_summed_over_blocks(
    causal: bool, queries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ELEMENTS", 40 * 300)
    q, k = normal(1, 2, 150, 8), normal(1, 1, 300, 8, seed=1)
    found = true_mass(q, k, (64, 128), causal=causal, queries=queries)
    weights = torch.nn.functional.pad(softmax(q, k, 8**-0.5, causal), (0, 84)).unflatten(-1, (3, 128)).sum(-1)
    for i in range(3):
        rows = torch.arange(64 * i, min(64 * i + 64, 150))
        if queries is not None:
            rows = 64 * i + torch.arange(queries) * 39 % 64
            rows = rows[rows < 150]
        torch.testing.assert_close(found[:, :, i], weights[:, :, rows].mean(2))


def test_levels_mark_the_cells_that_hold_most() -> None:
    mass = torch.tensor([[5, 30, 4, 55, 6], [0, 0, 0, 0, 0], [20, 20, 20, 20, 20]]).double().numpy()
    assert levels(mass).tolist() == [[1, 3, 0, 4, 2], [0, 0, 0, 0, 0], [4, 4, 4, 3, 2]]


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_a_picture_of_a_large_mask(heads: tuple[int, int], tmp_path: Path) -> None:
    q, k = normal(2, heads[0], 64 * 40, 8), normal(2, heads[1], 64 * 40, 8, seed=1)
    policy = policies.VSA(topk=10)
    text = plot(policy, q, k, heads[0] - 1, 1, tmp_path / "mask.svg")
    lines = text.splitlines()
    assert len(lines) == 20 + 2 + 4
    assert lines[-1] == "one character is 2 x 2 blocks"
    mass = true_mass(q[1:, -1:], k[1:, -1:], (64, 64), queries=8)
    stored = chosen(policy.mask(q, k))[1, -1]
    held = float(100 * mass[0, 0][stored].sum() / 40)
    assert f"400 of 1600 blocks, 25 %, hold {held:.3g} % of the mass" in text
    assert (tmp_path / "mask.svg").read_bytes().startswith(b"<svg")


WRONG: dict[str, Any] = {
    "mask is 3; it must be a BlockMask or a policy": lambda q: recall(3, q, q),  # type: ignore[arg-type]
    "mask is for 128 queries and 128 keys; q and k have 256 and 256": lambda q: recall(
        sk.BlockMask.full(128), q, q
    ),
    "samples is 0": lambda q: recall(policies.VSA(), q, q, samples=0),
    "head is 2; it must be an int from 0 to 1": lambda q: plot(policies.VSA(), q, q, head=2),
    "pictures are SVG, so its name must end in .svg": lambda q: plot(policies.VSA(), q, q, path="mask.png"),
    "mask has 1 batch items and 3 heads; q has 1 and 2": lambda q: recall(
        sk.BlockMask.per_head([sk.BlockMask.full(256)] * 3), q, q
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_operands_that_do_not_fit_are_refused(message: str) -> None:
    refused(message, WRONG[message], normal(1, 2, 256, 8))


@pytest.mark.parametrize("offset", [0, 64, 100, 192])
def test_a_causal_chunk_keeps_everything_at_its_own_offset(offset: int) -> None:
    q, k = 2 * normal(1, 2, 64, 8), normal(1, 1, 256, 8, seed=1)
    mask = sk.BlockMask.causal(q_len=64, kv_len=256, block=64, q_offset=offset)
    ones = torch.ones(1, 2)
    torch.testing.assert_close(recall(mask, q, k), ones)
    torch.testing.assert_close(recall(mask, q, k, causal=True), ones)
    torch.testing.assert_close(recall(mask, q, k, causal=True, q_offset=offset), ones)
    assert "100 % of the mass" in plot(mask, q, k)
    assert (recall(mask, q, k, causal=False) < 1).all()
    policy = policies.XAttention(threshold=1.0, block=64)
    torch.testing.assert_close(recall(policy, q, k, q_offset=offset), ones)
    assert "100 % of the mass" in plot(policy, q, k, q_offset=offset)


def test_a_mask_that_may_be_of_causal_attention_or_not_is_asked_about() -> None:
    q, k = normal(1, 1, 64, 8), normal(1, 1, 256, 8, seed=1)
    first = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    either = sk.BlockMask.topk(
        first, 2, q_len=64, kv_len=256, block=64
    )  # whole blocks, all of them before the queries
    kept = softmax(q, k, 8**-0.5, False)[..., :128].sum(-1).mean(-1)
    torch.testing.assert_close(recall(either, q, k), kept)
    near = sk.BlockMask.sliding_window(q_len=64, kv_len=256, window=32, block=64, q_offset=64, causal=False)
    refused("causal attention or not; pass causal=True or causal=False, and q_offset=", recall, near, q, k)
    rows = torch.arange(64)[:, None] + 64
    seen = (torch.arange(256) - rows).abs() < 32
    torch.testing.assert_close(
        recall(near, q, k, causal=False), (softmax(q, k, 8**-0.5, False) * seen).sum(-1).mean(-1)
    )
    with pytest.raises(InvalidInput, match="q_offset is 3; MaskPolicy puts the last query at the last key"):
        recall(sk.MaskPolicy(), q, k, q_offset=3)
