"""Attention over packed documents: sequences of any lengths in one tensor, each masked by itself."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparsek.attn.mask.aligned import aligned_keys
from sparsek.attn.mask.build.documents import PackedLayout
from sparsek.attn.mask.build.unions import FEWEST
from sparsek.attn.mask.convert.argument import MaskLike, block_mask
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskPolicy, MaskRule, packed_layout
from sparsek.attn.mask.token_lists import TokenLists, mask_of
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.foreign_options import REFUSED_PACKED, refuse
from sparsek.attn.plan.attention_operands import NO_TANGENT
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_no_tangent
from sparsek.engine.call.autocast import autocasts, follow_autocast

DIMS = {"q": "[total_q, Hq, D]", "k": "[total_k, Hkv, D]", "v": "[total_k, Hkv, Dv]"}
EVERY_KEY = MaskPolicy(causal=False)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    **refused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of packed documents: `sk.attention` of each document by itself.

    Nothing is padded or copied, except k and v for `TokenLists`.

    Args:
        q: Queries [total_q, Hq, D] of all documents, one document after the other. Documents may be empty, and begin
            and end anywhere in a block.
        k: Keys [total_k, Hkv, D]. Dtypes, heads and head dims as in `attention`.
        v: Values [total_k, Hkv, Dv].
        cu_seqlens_q: int32 or int64 [documents + 1], as in flash-attention: 0, then the end of each document in tokens.
        cu_seqlens_k: The same for k and v, if their lengths differ. The last query of a document then stands at its
            last key, and with a causal mask queries before the first key see nothing.
        mask: Which keys of its document a query sees; all of them for None.

            - A `MaskPolicy` masks each document by itself. `MaskPolicy()` is causal; `MaskPolicy(window=4096,
              sinks=128)` counts window and sinks from the document's own tokens. The blocks of `stride` and `topk` are
              blocks of the packed sequence; they need as many keys as queries.
            - A `BlockMask` of total_q queries and total_k keys, a bool tensor that broadcasts to [1, Hq or Hkv,
              total_q, total_k], or a FlexAttention `BlockMask`, as in `attention`. It must keep the documents apart
              itself (`BlockMask.block_diagonal(...) & ...`), because cu_seqlens are then not read.
            - `TokenLists` of all queries, [1, heads, total_q, n]: block j of a query are keys j * block to
              (j + 1) * block - 1 of its document, and window and sinks count from the document's own tokens. k and v
              are copied, each document to a block of its own, unless all lengths are multiples of the block.
            - A policy of `sk.policies` that chooses by token, such as `NSA`: its lists for each document.
        scale: As in `attention`.
        return_lse: Whether to return lse as well.
        deterministic: As in `attention`.
        softcap: As in `attention`.
        alibi_slopes: float32 [Hq], as in `attention`. Distances are counted in the packed sequence, so they need
            documents of as many queries as keys: no cu_seqlens_k.
        sink_logits: [Hq], as in `attention`.
        **refused: Options of other libraries (max_seqlen_q, causal, dropout_p and others). Values that change nothing
            pass, such as None and dropout_p=0.0; others raise InvalidInput, with what to do instead.

    Returns:
        out [total_q, Hq, Dv]. With return_lse (out, lse), lse [Hq, total_q]. Gradients as in `attention`.

    Raises:
        InvalidInput: For operands that do not fit together.
        Unsupported: If no kernel can run, with the reasons of each.

    Values must be finite. Documents that meet in a block of 128 tokens are computed together, where a hidden weight of
    0 times NaN is NaN: NaN or Inf in v of one reaches outputs of the others there, and in q, k or v their gradients.
    `attention_paged` keeps requests apart, and so does `attention` of each document.

    The mask of a policy is made on the device of q in O(tokens + blocks). The host does not wait for it if cu_seqlens
    are on the CPU. It reads cu_seqlens on a GPU with one sync, once for a tensor and again after a write to it; writes
    by the replay of a CUDA graph go unnoticed. The 32 masks used last are kept with their plans, and the layers of
    a model share them. For torch.compile, or for a call with `plan` or `kernel`, make the mask outside,
    `policy.packed(cu_seqlens_q)`.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(512, 8, 64), torch.randn(512, 2, 64), torch.randn(512, 2, 64)
        >>> cu_seqlens = torch.tensor([0, 300, 317, 512], dtype=torch.int32)
        >>> sk.attention_varlen(q, k, v, cu_seqlens, mask=sk.MaskPolicy(window=128, sinks=4)).shape
        torch.Size([512, 8, 64])
    """
    if refused:
        refuse("attention_varlen", refused, REFUSED_PACKED)
    if autocasts():
        q, k, v = follow_autocast(q, k, v)
    arguments.flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if arguments.dense_beside(name, x, "q", q).dim() != 3:
            raise InvalidInput(
                f"{name} must be {DIMS[name]} of packed documents, got {x.dim()}-D {list(x.shape)}"
            )
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    check_no_tangent(NO_TANGENT, q, k, v)
    if isinstance(mask, MaskRule) and mask.by_token:
        mask = _chosen(mask, q, k, cu_seqlens_q, cu_seqlens_k, scale)
    if isinstance(mask, MaskPolicy | None):
        found = _packed(q, k, cu_seqlens_q, cu_seqlens_k, mask or EVERY_KEY)
    elif isinstance(mask, TokenLists):
        if alibi_slopes is not None:
            raise InvalidInput(
                "alibi_slopes count distances in the packed sequence, which TokenLists space out; call attention "
                "for each document"
            )
        check_tensors(q, k, v)
        documents = aligned_keys(
            _layout(q, k, cu_seqlens_q, cu_seqlens_k, "call attention_varlen with TokenLists outside"),
            max(mask.block, FEWEST), mask.causal, q.device,
        )  # fmt: skip
        found, k, v = mask_of(mask, q, k, documents), documents.spread(k), documents.spread(v)
    elif isinstance(mask, MaskRule):
        raise InvalidInput(
            f"mask is {mask.label}, which chooses blocks of one sequence and keeps no documents apart; call attention "
            "for each document, or pass a MaskPolicy"
        )
    else:
        found = block_mask(mask, q, k)
    if alibi_slopes is not None and not (cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q):
        raise InvalidInput(
            "alibi_slopes need documents of as many queries as keys, and cu_seqlens_k is given; leave it out where the "
            "lengths are the same, or call attention for each document"
        )
    settings: Any = {"scale": scale, "deterministic": deterministic}
    settings |= {"softcap": softcap, "alibi_slopes": alibi_slopes, "sink_logits": sink_logits}
    if return_lse:
        out, lse = attention(q, k, v, found, return_lse=True, **settings)
        return out[0].transpose(0, 1), lse[0]
    return attention(q, k, v, found, **settings)[0].transpose(0, 1)


def _packed(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, policy: MaskPolicy
) -> BlockMask:
    """The mask of a policy for packed documents."""
    cure = "make the mask outside, mask = policy.packed(cu_seqlens_q), and pass it as mask="
    layout = _layout(q, k, cu_seqlens_q, cu_seqlens_k, cure)
    return policy.visible_in(layout, q.device).mask_for(q, k)


def _chosen(
    policy: Any, q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, scale: float | None
) -> TokenLists:
    """The lists that a policy chooses in each document."""
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        raise InvalidInput(
            f"mask is {policy.label}, which chooses in documents of as many queries as keys, and cu_seqlens_k is "
            "given; leave it out where the lengths are the same, or call attention for each document"
        )
    check_tensors(q, k, k)
    return policy.lists(q, k, scale=scale, cu_seqlens=cu_seqlens_q)


def _layout(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, cure: str
) -> PackedLayout:
    """The documents, after the checks of q and k. `cure`: what to do under torch.compile."""
    if torch.compiler.is_compiling():
        raise InvalidInput(f"torch.compile cannot read cu_seqlens: {cure}")
    check_tensors(q, k, k)
    return packed_layout(cu_seqlens_q, cu_seqlens_k, (q.shape[2], k.shape[2]))
