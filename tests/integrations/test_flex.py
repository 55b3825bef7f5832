"""flex_attention against torch's own, which runs eagerly on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from sparsek import InvalidInput
from sparsek.integrations.flex import flex_attention
from tests.integrations.dense import dense, of_mask_mod, operands, same, same_gradients
from tests.refusals import refused


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q // 70 == k // 70) & (q >= k) & ((h != 1) | (q > 100))


@pytest.mark.parametrize("lengths", [(300, 300), (130, 260)])
@pytest.mark.parametrize("kv_batch", [1, 2])
def test_a_block_mask(lengths: tuple[int, int], kv_batch: int) -> None:
    S, T = lengths
    leaves = operands((2, 4, S, 16), (kv_batch, 2, T, 16), (kv_batch, 2, T, 8))
    mask = torch_flex.create_block_mask(documents, None, 4, S, T, device="cpu")
    out, lse = flex_attention(*leaves, block_mask=mask, scale=0.2, enable_gqa=True, return_lse=True)
    wanted, sums = dense(*leaves, of_mask_mod(documents, (1, 4, S, T)), 0.2)
    same(out, wanted)
    same(lse, sums)
    same_gradients(out, wanted, leaves)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_as_torch_itself() -> None:
    q, k, v = (x.detach().float() for x in operands((1, 2, 256, 16)))
    mask = torch_flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    request = torch_flex.AuxRequest(lse=True)
    options: list[dict[str, Any]] = [{"block_mask": mask}, {}, {"return_lse": True}, {"return_aux": request}]
    for each in options:
        found, wanted = flex_attention(q, k, v, **each), torch_flex.flex_attention(q, k, v, **each)
        torch.testing.assert_close(found, wanted)


def test_what_is_refused() -> None:
    q, k, v = operands((1, 4, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16))
    refused("score_mod", flex_attention, q, k, v, lambda score, *at: score, enable_gqa=True)
    refused("enable_gqa=True", flex_attention, q, k, v)
    with pytest.raises(InvalidInput, match="max_scores"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=torch_flex.AuxRequest(max_scores=True))
    mask = torch_flex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=32
    )
    refused("BLOCK_SIZE", flex_attention, q, k, v, block_mask=mask, enable_gqa=True)
    options: Any = {"dropout_p": 0.0, "enable_gqa": True}
    flex_attention(q, k, v, **options)
    for name in ("dropout_p", "is_causal"):
        with pytest.raises(InvalidInput, match=f"flex_attention has no (argument )?{name}"):
            flex_attention(q, k, v, **{**options, name: 0.5})
    with pytest.raises(ImportError, match=r"create_block_mask.*: import it from torch\.nn"):
        exec("from sparsek.integrations.flex import create_block_mask, flex_attention")
