"""kernels/estimate in Triton's interpreter, against attn/reference/estimates.py."""

import math

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.estimate.coarse import add_means
from sparsek.attn.kernels.estimate.maps import mark
from sparsek.attn.kernels.estimate.mass import to_mass
from sparsek.attn.kernels.estimate.means import split_means
from sparsek.attn.kernels.estimate.scores import HOPPER, SMALL, Config, block_scores
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies import estimates
from sparsek.attn.reference import estimates as reference

# q_len, kv_len, heads of q and k, head dim, block, parts, causal_from, batch items with lengths of their own
CASES = [
    (200, 200, 2, 1, 64, (64, 64), (4, 4), None, None),
    (129, 300, 2, 2, 32, (128, 64), (1, 1), None, 2),
    (64, 321, 1, 1, 80, (64, 128), (2, 8), 257, 1),
    (260, 260, 1, 1, 16, (64, 64), (1, 1), 0, None),
    (3, 600, 1, 1, 40, (128, 128), (4, 4), -5, 2),
]
CONFIGS = [(case, SMALL) for case in CASES] + [(case, HOPPER) for case in CASES if case[6] == (4, 4)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def lengths_of(blocks: int, side: int, batch: int) -> Tensor:
    found = torch.randint(-3, side + 9, (batch, blocks), generator=torch.Generator().manual_seed(7))
    found[:, blocks // 2] = 0
    return found.int()


@pytest.mark.parametrize(("case", "config"), CONFIGS)
def test_scores_are_those_of_the_reference(case: tuple, config: Config) -> None:
    q_len, kv_len, q_heads, k_heads, dim, block, parts, causal_from, batch = case
    q, k = normal(2, q_heads, q_len, dim, seed=0), normal(2, k_heads, kv_len, dim, seed=1)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # [B, S, H, D] in memory
    lengths = None if batch is None else lengths_of(-(-kv_len // block[1]), block[1], batch)
    rows = lengths_of(-(-q_len // block[0]), block[0], 2) if parts == (1, 1) else None
    found = block_scores(q, k, block, parts, 0.3, lengths, causal_from, rows, config)
    wanted = reference.block_scores(q, k, block, parts, 0.3, lengths, rows)
    if causal_from is not None:
        last = torch.arange(wanted.shape[2])[:, None] * block[0] + block[0]
        beyond = torch.arange(wanted.shape[3]) * block[1] >= last.clamp(max=q_len) + causal_from
        found, wanted = found.masked_fill(beyond, 0), wanted.masked_fill(beyond, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 4])
def test_means_of_one_tensor(parts: int) -> None:
    x = normal(1, 3, 150, 24, seed=3)[..., ::2]
    high, low = split_means(x, None, (64, 64), (parts, 1))[0].float()
    wanted = reference.block_means(x, 64 // parts)
    assert high.shape == (1, 3, 3 * parts, 12)
    torch.testing.assert_close((high + low)[:, :, : wanted.shape[2]], wanted, rtol=1e-6, atol=1e-6)
    assert not (high + low)[:, :, wanted.shape[2] :].any()


def test_keys_that_do_not_exist_are_not_read() -> None:
    q, k = normal(1, 1, 64, 16, seed=4), normal(1, 1, 192, 16, seed=5)
    k[:, :, 70:128], k[:, :, 128:] = torch.nan, torch.inf
    lengths = torch.tensor([[64, 6, 0]], dtype=torch.int32)
    found = block_scores(q, k, (64, 64), (4, 4), 1.0, lengths)
    assert found.isfinite().tolist() == [[[[True, True, False]]]]
    assert found[..., 2] == -torch.inf


@pytest.mark.parametrize("columns", [1, 70, 1030])
@pytest.mark.parametrize("causal_from", [None, 0, 500, -100])
def test_mass_is_the_softmax_of_each_row(columns: int, causal_from: int | None) -> None:
    scores = 9 * torch.randn(2, 1, 3, columns, generator=torch.Generator().manual_seed(columns))
    scores[0, 0, 1], scores[1, 0, 0, 0] = -math.inf, -math.inf
    wanted = reference.block_mass(scores, (64, 128), 150, causal_from)
    found = to_mass(scores.clone(), (64, 128), 150, causal_from)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    seen = wanted.sum(-1)
    torch.testing.assert_close(seen, (seen > 0.5).float())


def test_a_nan_is_a_nan_in_its_row() -> None:
    scores = torch.zeros(1, 1, 2, 1030)
    scores[0, 0, 1, 1029] = math.nan
    assert to_mass(scores, (64, 64), 128).isnan().any(-1).tolist() == [[[False, True]]]


def test_maps_have_the_stored_blocks() -> None:
    wide, narrow = BlockMask.sliding_window(900, 200, block=64), BlockMask.causal(900, block=64)
    many = BlockMask.per_batch([BlockMask.per_head([wide, narrow]), BlockMask.per_head([narrow, wide])])
    made = torch.zeros(2, 4, *many.grid, dtype=torch.int8)
    mark(many, made)
    stored, one = (_blocks(each.to_dense()) for each in (many, wide))
    assert torch.equal(made.bool(), stored.repeat_interleave(2, 1))
    within = torch.zeros_like(made)
    mark(wide, within, made)
    assert torch.equal(within.bool(), stored.repeat_interleave(2, 1) & one)


def _blocks(dense: Tensor) -> Tensor:
    """Whether any pair of a block of 64 x 64 is seen."""
    whole = torch.nn.functional.pad(dense, (0, -dense.shape[-1] % 64, 0, -dense.shape[-2] % 64))
    return whole.unflatten(3, (-1, 64)).unflatten(2, (-1, 64)).any(5).any(3)


@pytest.mark.parametrize("lengths", [None, torch.tensor([[64, 3, 0]], dtype=torch.int32)])
def test_means_have_gradients(lengths: Tensor | None) -> None:
    x = normal(2, 2, 150, 8, seed=1).requires_grad_()
    found, wanted = estimates.block_means(x, 64, lengths), reference.block_means(x, 64, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    a, b = (torch.autograd.grad((each * weight).sum(), x)[0] for each in (found, wanted))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [None, [[64, 5, 0]], [[0, 64, 22], [7, -1, 64]]])
def test_vsa_adds_means_in_place(gated: bool, sizes: list[list[int]] | None) -> None:
    """Rows after the lengths of their tile become 0, whatever they held."""
    out = normal(2, 2, 150, 24, seed=2).transpose(1, 2).contiguous().transpose(1, 2)
    gate = normal(2, 150, 1, seed=3) if gated else None
    means = torch.randn(2, 2, 3, 24, generator=torch.Generator().manual_seed(4))
    wanted = out + means.repeat_interleave(64, 2)[:, :, :150] * (1 if gate is None else gate)
    lengths = None
    if sizes is not None:
        row = torch.arange(150)
        lengths = torch.tensor(sizes, dtype=torch.int32).mT.contiguous().mT
        after = (row % 64 >= lengths[:, row // 64])[:, None, :, None]
        out.masked_fill_(after, torch.nan)
        wanted = wanted.masked_fill(after, 0)
    add_means(out, means, gate, 64, lengths)
    torch.testing.assert_close(out, wanted.half(), rtol=1e-3, atol=1e-3)
