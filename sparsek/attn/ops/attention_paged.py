"""Attention over paged keys and values, for serving: checks, then a plan and its launch, or the torch.library op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.attn.ops.attention_paged_lists import choose_lists
from sparsek.attn.ops.attention_paged_op import ATTENTION_PAGED, through_op
from sparsek.attn.plan.attention_paged import AttendedPages, PagedPlan, pass_lists
from sparsek.attn.plan.paged_checks import check_values
from sparsek.core import arguments
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import Calls, Slot

PagedCache = Tensor | Sequence[Tensor]
PagedMask = MaskPolicy | PageLists | MaskRule

_compiling = torch.compiler.is_compiling  # a name, because a cached call looks it up each time
_CALLS = Calls()


@overload
def attention_paged(
    q: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: PagedMask | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    kernel: str | None = None,
    check: bool = False,
) -> Tensor: ...
@overload
def attention_paged(
    q: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: PagedMask | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    kernel: str | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]: ...
def attention_paged(
    q: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: PagedMask | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention of a ragged batch of requests, whose keys and values lie in the pages of a cache.

    Request r has the queries cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1 and the first seq_lens[r] keys of its pages;
    key j is row j % page of page block_table[r, j // page]. Query i of n stands at p = seq_lens[r] - n + i: decoding
    has n = 1, a chunk of a prompt its length. For head h, with h' = h // (Hq / Hkv) and j over the keys that it sees:

        s[j]   = scale * k_scale[h'] * sum_d q[i, h, d] * k[j, h', d]     softcap > 0: softcap * tanh(s[j] / softcap)
        lse    = log(sum_j exp(s[j]) + exp(sink_logits[h]))               without sink_logits: log(sum_j exp(s[j]))
        out[d] = sum_j exp(s[j] - lse) * v[j, h', d] * v_scale[h']

    A query that sees no key gets out = 0 and lse = -inf, or its sink.

    Args:
        q: Queries [tokens, Hq, D] of all requests, one request after the other. Rows after the last request are
            ignored.
        cache: One tensor [pages, Hkv, page, 2 * D], keys before values, or a pair (k [pages, Hkv, page, D], v [pages,
            Hkv, page, Dv]), with any strides: a cache [pages, page, Hkv, D] goes in as `x.transpose(1, 2)`. Pages have
            16, 32, 64, 128 or 256 rows, in the dtype of q or in float8_e4m3fn. Hq is a multiple of Hkv.
        block_table: int32 [requests, width]: the pages of each request. Entries after its last page may be anything.
        seq_lens: int32 [requests]: keys of each request, those of its new tokens included.
        cu_seqlens_q: int32 [requests + 1]: 0, then the end of each request in q.
        mask: Which keys a query sees, causality aside.

            - None: all.
            - A `MaskPolicy` of a window, sinks and `causal`, which replaces the argument. Not `topk` and `stride`.
            - `PageLists`: key blocks for each tile of queries, written by the caller, on the device.
            - `TokenLists` of all tokens, [1, heads, tokens, n], of blocks from 16 keys, without window and sinks.
              Its `causal` replaces the argument. One more launch removes repeated blocks.
            - A policy of `sk.policies`, or a `MaskPolicy` with `topk`: chooses for each request from its queries and
              all its keys, which are gathered. For prompts. It needs the lengths on the host: pass cu_seqlens_q and
              seq_lens as CPU tensors, which are copied to the device; otherwise the call waits for the device once.
              It must be causal if and only if the argument is True.
        max_seqlen_q: The most queries of a request. By default the rows of q. Bounds grids and workspaces, and may be
            larger than needed. The result of a request that has more has no meaning.
        max_seqlen_k: The same for keys; width * page by default.
        causal: Whether a query sees no key after its own position.
        scale: The factor of the scores, from 1e-30 to 1e30; D**-0.5 by default.
        softcap: The cap of scores: 0 for none, or from 1e-3 to 1e3.
        sink_logits: float32 [Hq]: a learned score of each head that takes part in the softmax without a value, finite
            or -inf, as in `attention`. (`MaskPolicy.sinks` counts first keys.)
        k_scale: What FP8 keys are multiplied by: a float, or float32 [1] or [Hkv].
        v_scale: The same for values.
        out: Where to write [tokens, Hq, Dv], in the dtype of q, with a contiguous last dim and memory that no
            other argument shares. Rows after the last request stay as they are.
        return_lse: Whether to return lse as well.
        kernel: A name from the table of kernels. It runs or raises `Unsupported`.
        check: Whether to check page ids, lengths and lists on the device, with a wait. Without it wrong ones are
            refused on a CPU; on a GPU they give a result without meaning, but nothing outside the tensors is read, and
            shapes and bounds without room for any query are refused. Refused under torch.compile.

    Returns:
        out [tokens, Hq, Dv] in the dtype of q. With return_lse (out, lse), lse [Hq, tokens] in float32, or float64 for
        float64. Rows after the last request are 0 and -inf, without a wait for the device.

    Raises:
        InvalidInput: For operands that do not fit together, also for those that require a gradient: this is for
            inference. With check=True for values that do not fit, with their position.
        Unsupported: If no kernel can run, with the reasons of each.

    Synchronization: none, and all kernels may be captured in a CUDA graph, which then follows lengths, tables and lists
    that change in place; grids follow max_seqlen_q and max_seqlen_k. A plan depends on shapes alone. The bits of a
    request depend on its own queries and keys, and on max_seqlen_q and max_seqlen_k, not on other requests: give both,
    because their defaults are of the batch. Under torch.compile the call is one node of the
    graph; policies are refused there and during capture. torch.autocast changes nothing.

    Sources: paged keys and block tables, Kwon et al., arXiv:2309.06180; parts of keys that are merged by their lse,
    Flash-Decoding (Dao et al., 2023); learned sinks, gpt-oss (OpenAI, 2025).

    Example:
        >>> import torch, sparsek as sk
        >>> cache = torch.randn(8, 2, 16, 2 * 64)  # 8 pages of 16 tokens
        >>> block_table = torch.tensor([[5, 0, 3], [2, 7, 0]], dtype=torch.int32)
        >>> seq_lens = torch.tensor([40, 20], dtype=torch.int32)
        >>> cu_seqlens_q = torch.tensor([0, 1, 4], dtype=torch.int32)  # a decoding request, and a chunk of 3 tokens
        >>> q = torch.randn(4, 8, 64)
        >>> sk.attention_paged(q, cache, block_table, seq_lens, cu_seqlens_q).shape
        torch.Size([4, 8, 64])
    """
    if type(return_lse) is not bool or type(check) is not bool:
        arguments.flag("return_lse", return_lse)
        arguments.flag("check", check)
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    call = AttendedPages(
        q, cache, block_table, seq_lens, cu_seqlens_q, mask, max_seqlen_q, max_seqlen_k, causal, scale, softcap,
        sink_logits, k_scale, v_scale, out, return_lse, kernel,
    )  # fmt: skip
    if isinstance(mask, TokenLists):
        pass_lists(call)
    elif isinstance(mask, MaskRule) and _is_rule(mask):
        arguments.flag("causal", causal)
        choose_lists(call)
    both = route(call, check)
    if out is not None and not _compiling():  # kernels write by its address, which autograd does not see
        increment_version(out)
    return both if return_lse else both[0]


def route(call: AttendedPages, check: bool) -> Any:
    """(out, lse) of a call: a recorded one's, or by the torch.library op, or the plan."""
    slot = recorded_calls.UNBOUND
    if not check and not _compiling():
        more, operands = _binding(call)
        if operands:
            slot = recorded_calls.repeat(_CALLS, more, operands)
            if slot.__class__ is not Slot:
                return slot
    if torch._C._are_functorch_transforms_active() and not _compiling():
        raise InvalidInput(
            "attention_paged has no gradient and no batching rule for torch.func; call it outside"
        )
    if _compiling() or torch._C._len_torch_dispatch_stack() or is_fake(call.q) or is_fake(call.seq_lens):
        if check:
            raise InvalidInput(
                "check=True reads values; call it outside of torch.compile, dispatch modes and fake tensors"
            )
        return through_op(call)
    given = call.checked()
    if check:
        check_values(given)
    return slot.run(lambda: ATTENTION_PAGED.run(given, call.kernel))


def plan_attention_paged(
    q: Tensor,
    cache: PagedCache,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: MaskPolicy | PageLists | TokenLists | None = None,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    **options: Any,
) -> PagedPlan:
    """Return the plan that `attention_paged` uses for such operands: frozen, callable, with `explain()`.

    It depends on shapes, dtypes and options, not on lengths, tables or the cache.

    Args:
        q: Queries [tokens, Hq, D], as in `attention_paged`. On any device, meta too, if `device` is given.
        cache: The pages, one tensor or a pair.
        block_table: int32 [requests, width].
        seq_lens: int32 [requests].
        cu_seqlens_q: int32 [requests + 1].
        mask: None, a `MaskPolicy`, `PageLists` or `TokenLists`.
        kernel: A name from the table of kernels. Without it the one predicted to be fastest.
        config: A config of the named kernel, by its text or by some of its fields.
        device: The name of a card ("h200"). The plan is then a prediction for that card and cannot be called.
        **options: Options of `attention_paged` from max_seqlen_q to return_lse.

    Returns:
        A `PagedPlan`. `plan(q, cache, block_table, seq_lens, cu_seqlens_q, mask, **options)` runs it.

    Raises:
        InvalidInput: For operands that do not fit together, and for an unknown kernel, config or card.
        Unsupported: If no kernel can run, with the reasons of each.

    Example:
        >>> import torch, sparsek as sk
        >>> cache, q = torch.randn(8, 2, 16, 128), torch.randn(2, 8, 64)
        >>> table, lengths, edges = (torch.zeros(s, dtype=torch.int32) for s in ((2, 4), (2,), (3,)))
        >>> sk.plan_attention_paged(q, cache, table, lengths, edges).kernel
        'reference.attention_paged'
    """
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    if torch._C._are_functorch_transforms_active():
        raise InvalidInput("plans are made outside of functions that torch.func transforms")
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"plan_attention_paged() got an unexpected keyword argument '{unknown[0]}'")
    call = AttendedPages(q, cache, block_table, seq_lens, cu_seqlens_q, mask, **options)
    given = call.checked(planned=True, predicted=device is not None)
    return ATTENTION_PAGED.plan(given, kernel, config, device)


OPTIONS = {
    "max_seqlen_q", "max_seqlen_k", "causal", "scale", "softcap", "sink_logits", "k_scale", "v_scale", "out",
    "return_lse",
}  # fmt: skip


def _is_rule(mask: MaskRule) -> bool:
    """Whether the mask is chosen from q and the keys."""
    return not isinstance(mask, MaskPolicy) or mask.topk is not None


def _binding(call: AttendedPages) -> tuple[Any, tuple[Any, ...]]:
    """The settings and operands of a recorded call; no operands where it must not be recorded."""
    q, cache, mask, out, scale, softcap = call.q, call.cache, call.mask, call.out, call.scale, call.softcap
    operands = [q, call.block_table, call.seq_lens, call.cu_seqlens_q]
    if cache.__class__ in recorded_calls.TENSORS:
        operands.append(cache)
    elif cache.__class__ in (tuple, list):
        operands += cache
    else:
        return None, ()
    form: Any = None
    if mask.__class__ is PageLists:
        operands += mask.tensors
        form = mask.heads, mask.tiles, mask.block, mask.longest
    elif mask.__class__ is MaskPolicy:
        if mask.stride is not None:
            return None, ()
        form = mask.window, mask.sinks, mask.causal
    elif mask is not None:
        return None, ()
    # The checks refuse that, and a recorded call skips them.
    if out.__class__ in recorded_calls.TENSORS and _begin_together(out, q):
        return None, ()
    kinds = []
    for x in (call.sink_logits, call.k_scale, call.v_scale, out):
        if x.__class__ in recorded_calls.TENSORS:
            operands.append(x)
            kinds.append(Tensor)  # not True, which equals a scale of 1.0
        elif x is None or type(x) is float:
            kinds.append(x)
        else:
            return None, ()
    bounds, causal = (call.max_seqlen_q, call.max_seqlen_k), call.causal
    for x in bounds:
        if x is not None and type(x) is not int:
            return None, ()
    if type(causal) is not bool or type(softcap) is not float or not (scale is None or type(scale) is float):
        return None, ()
    settings = *bounds, causal, scale, softcap, call.return_lse, call.kernel
    return (len(operands), form, *settings, *kinds), tuple(operands)


def _begin_together(x: Any, y: Any) -> bool:
    """Whether two tensors begin at one address. False for what has none, which no recorded call takes."""
    try:
        return x is y or x.data_ptr() == y.data_ptr()
    except (AttributeError, RuntimeError):
        return False
