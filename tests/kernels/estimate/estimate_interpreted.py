"""kernels/estimate in Triton's interpreter, against reference/estimates.py."""

import pytest
import torch
from torch import Tensor

from sparsek.kernels.estimate.means import split_means
from sparsek.kernels.estimate.scores import block_scores
from sparsek.reference import estimates as reference

# q_len, kv_len, heads of q and k, head dim, block, parts, causal_from
CASES = [
    (200, 200, 2, 1, 64, (64, 64), (4, 4), None),
    (129, 300, 2, 2, 32, (128, 64), (1, 1), None),
    (64, 321, 1, 1, 80, (64, 128), (2, 8), 257),
    (260, 260, 1, 1, 16, (64, 64), (1, 1), 0),
    (3, 600, 1, 1, 40, (128, 128), (4, 4), -5),
]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def lengths_of(blocks: int, side: int, batch: int) -> Tensor:
    found = torch.randint(-3, side + 9, (batch, blocks), generator=torch.Generator().manual_seed(7))
    found[:, blocks // 2] = 0
    return found.int()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [None, 1, 2])
def test_scores_are_those_of_the_reference(case: tuple, batch: int | None) -> None:
    q_len, kv_len, q_heads, k_heads, dim, block, parts, causal_from = case
    q, k = normal(2, q_heads, q_len, dim, seed=0), normal(2, k_heads, kv_len, dim, seed=1)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # [B, S, H, D] in memory
    lengths = None if batch is None else lengths_of(-(-kv_len // block[1]), block[1], batch)
    found = block_scores(q, k, block, parts, 0.3, lengths, causal_from)
    wanted = reference.block_scores(q, k, block, parts, 0.3, lengths)
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
