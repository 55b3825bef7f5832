"""torch's `flex_attention` for its block masks, on SparseK's kernels and without torch.compile.

from sparsek.integrations.flex import flex_attention    # was: from torch.nn.attention.flex_attention
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsek.attn.ops.attention import attention
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.foreign_options import absent, check_operands, refusing, require_neutral

__getattr__ = absent(
    __name__,
    **dict.fromkeys(
        ("BlockMask", "create_block_mask", "create_mask", "and_masks", "or_masks", "noop_mask", "AuxRequest"),
        "import it from torch.nn.attention.flex_attention",
    ),
)


@refusing(
    "flex_attention", dropout_p=(0.0, "attention drops no weights"),
    score_mod=(None, "attention does not change scores"),
)  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return attention by a FlexAttention block mask.

    `mask_mod` is evaluated once for each block mask, and again after a write to a tensor that it reads: see
    `BlockMask.from_flex`.

    Args:
        query: [B, Hq, S, D].
        key: [B or 1, Hkv, T, D].
        value: [B or 1, Hkv, T, Dv].
        score_mod: Must be None.
        block_mask: A FlexAttention BlockMask of S queries and T keys with BLOCK_SIZE 64 or 128, or any mask that
            `sparsek.attention` takes; every key for None.
        scale: The factor of the scores; D**-0.5 for None.
        enable_gqa: Whether Hq may be a multiple of Hkv.
        return_lse: Whether to return (out, lse), lse float32 [B, Hq, S], the natural logarithm.
        kernel_options: Not read: it is for torch's kernels.
        return_aux: An AuxRequest, for (out, AuxOutput) with lse. max_scores must not be requested.

    Returns:
        out [B, Hq, S, Dv], 0 where a query sees no key, with gradients for query, key and value.

    Raises:
        InvalidInput: For a score_mod, for operands that do not fit, and for masks with other blocks.

    Source: FlexAttention, Dong et al., arXiv:2412.05496.

    Example:
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> from sparsek.integrations.flex import flex_attention
        >>> q, k, v = torch.randn(3, 1, 2, 300, 64).unbind()
        >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300, device="cpu")
        >>> flex_attention(q, k, v, block_mask=causal).shape
        torch.Size([1, 2, 300, 64])
    """
    require_neutral("flex_attention", "max_scores", getattr(return_aux, "max_scores", None), False)
    check_operands(query, key, value, "[B, H, S, D]")
    if arguments.flag("return_lse", return_lse) and return_aux is not None:
        raise InvalidInput("return_lse and return_aux are both given; give one")
    if not arguments.flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise InvalidInput(f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True")
    batch = query.shape[0]
    key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 != batch else x for x in (key, value))
    with_lse = return_lse or bool(getattr(return_aux, "lse", False))
    out, lse = attention(query, key, value, block_mask, scale=scale, return_lse=True)
    if return_aux is None:
        return (out, lse) if with_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if with_lse else None)
