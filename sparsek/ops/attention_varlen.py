"""Attention over packed sequences: documents of any lengths behind one another, none of which sees another."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.mask.mask import BlockMask
from sparsek.mask.operands import check_tensors
from sparsek.mask.rule import MaskPolicy, packed_scene
from sparsek.ops.attention import attention
from sparsek.ops.autocast import autocasts, follow_autocast

DIMS = {"q": "[total_q, Hq, D]", "k": "[total_k, Hkv, D]", "v": "[total_k, Hkv, Dv]"}
EVERY_KEY = MaskPolicy(causal=False)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskPolicy | BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = True,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskPolicy | BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskPolicy | BlockMask | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed documents, each by itself: queries see keys of their own document only.

    q: [total_q, Hq, D]. k: [total_k, Hkv, D]. v: [total_k, Hkv, Dv]; dtypes, heads and head dims as in `attention`,
    which gets views of them. Documents may be empty, and begin and end anywhere in a block.
    cu_seqlens_q: int32 or int64 [documents + 1]: 0, then where each document ends, as flash-attention has them.
    cu_seqlens_k: where those of k and v end, if these are others. The last query of a document then stands at its last
    key; queries before the first key see nothing, if the mask is causal.
    mask: None for every key of the document. A MaskPolicy, which each document is masked by: `MaskPolicy()` is causal,
    `MaskPolicy(window=4096, sinks=128)` counts window and sinks in the document; blocks of a stride and of top-k are
    those of the packed sequence, and need as many keys as queries. Or a BlockMask of total_q queries and total_k keys,
    which must keep documents apart itself (`BlockMask.block_diagonal(...) & ...`); cu_seqlens are then not read.
    scale, deterministic: as in `attention`.

    Returns out [total_q, Hq, Dv]; with return_lse also lse [Hq, total_q]. Differentiable in q, k and v, as `attention`.

    The mask is made on q's device in O(tokens + blocks), without a wait if cu_seqlens are on the CPU. On a GPU they are
    read with one sync each, once for a tensor and again after it was written to; writes by a replayed CUDA graph go
    unnoticed. The 32 last masks are kept: layers share them, and their plans. For torch.compile make the mask outside,
    `policy.packed(cu_seqlens_q)`, as where `attention` is to be called with a plan or a kernel of your choice.

    Raises InvalidInput for what does not fit together, and Unsupported as `attention` does.
    """
    if autocasts():
        q, k, v = follow_autocast(q, k, v)
    arguments.flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if arguments.dense(name, x).dim() != 3:
            raise InvalidInput(
                f"{name} must be {DIMS[name]} of packed documents, got {x.dim()}-D {list(x.shape)}"
            )
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    found = mask if isinstance(mask, BlockMask) else _made(q, k, cu_seqlens_q, cu_seqlens_k, mask)
    if return_lse:
        out, lse = attention(q, k, v, found, scale=scale, return_lse=True, deterministic=deterministic)
        return out[0].transpose(0, 1), lse[0]
    return attention(q, k, v, found, scale=scale, deterministic=deterministic)[0].transpose(0, 1)


def _made(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, policy: Any) -> BlockMask:
    if not isinstance(policy, MaskPolicy | None):
        raise InvalidInput(f"mask must be a MaskPolicy, a BlockMask or None, got {type(policy).__name__}")
    if torch.compiler.is_compiling():
        raise InvalidInput(
            "torch.compile cannot read cu_seqlens: make the mask outside, mask = policy.packed(cu_seqlens_q), and "
            "pass it as mask="
        )
    check_tensors(q, k, k)
    scene = packed_scene(cu_seqlens_q, cu_seqlens_k, (q.shape[2], k.shape[2]))
    return (policy or EVERY_KEY).visible_in(scene, q.device).mask_for(q, k)
