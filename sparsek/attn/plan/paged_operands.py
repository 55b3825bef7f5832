"""Checks of the operands of attention over paged keys that read no values: shapes, dtypes, devices and layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.plan.attention_operands import Layout
from sparsek.attn.reference.scores import check_sinks, checked_softcap
from sparsek.core import arguments, dtypes
from sparsek.core.arguments import MOVE, is_fake, shown
from sparsek.core.errors import InvalidInput
from sparsek.core.memory import overlap
from sparsek.core.tracing import check_no_tangent, wants_gradient

PAGES = (16, 32, 64, 128, 256)
E4M3 = torch.float8_e4m3fn
CACHE = (
    "one tensor [pages, Hkv, page, 2 * D], keys before values, or a pair (k [pages, Hkv, page, D], v [pages, "
    "Hkv, page, Dv]); a cache [pages, page, Hkv, D] goes in as x.transpose(1, 2)"
)
APART = "pass keys and values apart: (x[0].transpose(1, 2), x[1].transpose(1, 2)) of [2, pages, page, Hkv, D]"
FORWARD_ONLY = "attention_paged has no gradient, and {name} requires one; use torch.no_grad(), or .detach()"
NO_TANGENT = "attention_paged has no forward-mode derivative (jvp, jacfwd)"


class VisibleKeys(NamedTuple):
    """Which keys queries see: a window, sinks and causality, or lists."""

    causal: bool
    window: int = 0
    sinks: int = 0
    lists: PageLists | None = None


def split_cache(q: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of the pages, as views. InvalidInput unless they are what `CACHE` describes, and fit q."""
    arguments.dense("q", q)
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise InvalidInput(f"q is {list(q.shape)}; it must be [tokens, Hq, D]")
    dtypes.name(q.dtype)
    dim = q.shape[2]
    pages = _tensors_of(cache)
    for each in pages:
        arguments.check_real("q", q, "cache", each)
    if len(pages) == 1:
        (both,) = pages
        if both.dim() != 4 or both.shape[3] != 2 * dim:
            apart = f"; of one 5-D tensor, {APART}" if both.dim() == 5 else ""
            raise InvalidInput(
                f"cache is {list(both.shape)} and q has head dim {dim}; it must be {CACHE}{apart}"
            )
        k, v = both[..., :dim], both[..., dim:]
    else:
        k, v = pages
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.shape[3] != dim or v.shape[3] == 0:
            raise InvalidInput(
                f"cache is {list(k.shape)} and {list(v.shape)}, and q has head dim {dim}; it must be {CACHE}"
            )
    _check_cache(q, k, v)
    return k, v


def _tensors_of(cache: Any) -> list[Tensor]:
    """The one tensor of a cache, or both."""
    if isinstance(cache, Tensor):
        return [arguments.dense("cache", cache)]
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return [arguments.dense(f"cache[{i}]", each) for i, each in enumerate(cache)]
    raise InvalidInput(f"cache is {shown(cache)}; it must be {CACHE}")


def check_tensors(q: Any, cache: Any, tables: Any, others: dict[str, Any]) -> Tensor:
    """The pages of keys. InvalidInput unless all are tensors, for a torch.library op; it checks the rest."""
    arguments.dense("q", q)
    for name, x in zip(("block_table", "seq_lens", "cu_seqlens_q"), tables, strict=True):
        arguments.dense_beside(name, x, "q", q)
    for name, x in others.items():
        if x is not None:
            arguments.dense_beside(name, x, "q", q)
    pages = _tensors_of(cache)
    for each in pages:
        arguments.check_real("q", q, "cache", each)
    if pages[0].dim() != 4:
        raise InvalidInput(f"cache is {list(pages[0].shape)}; it must be {CACHE}")
    return pages[0]


def _check_cache(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (k, v):
        arguments.one_device("q is", q.device, "cache", x.device, MOVE)
        if x.dtype not in (q.dtype, E4M3) or x.dtype != k.dtype:
            stored = ": x.view(torch.float8_e4m3fn), if they are that" if x.dtype == torch.uint8 else ""
            raise InvalidInput(
                f"q is {q.dtype} and the pages {x.dtype}; pages have the dtype of q, or float8_e4m3fn with k_scale and "
                f"v_scale{stored}"
            )
    heads, page = k.shape[1], k.shape[2]
    if page not in PAGES:
        nhd = ": it seems to be [pages, page, Hkv, D], so pass x.transpose(1, 2)" if heads in PAGES else ""
        raise InvalidInput(
            f"cache has {heads} heads of pages of {page} rows; pages have 16, 32, 64, 128 or 256 rows{nhd}"
        )
    if heads == 0 or q.shape[1] % heads:
        raise InvalidInput(
            f"q has {q.shape[1]} heads and the cache {heads}; q needs a positive multiple of these"
        )


def check_tables(q: Tensor, block_table: Any, seq_lens: Any, cu_seqlens_q: Any) -> None:
    """InvalidInput unless the three are int32 on q's device, and of one number of requests."""
    for name, x, ndim in (
        ("block_table", block_table, 2),
        ("seq_lens", seq_lens, 1),
        ("cu_seqlens_q", cu_seqlens_q, 1),
    ):
        arguments.dense_beside(name, x, "q", q)
        if x.dtype != torch.int32:
            raise InvalidInput(f"{name} is {x.dtype}; it must be int32: {name}.int()")
        if x.dim() != ndim:
            right = "[requests, width]" if ndim == 2 else "[requests]" if x is seq_lens else "[requests + 1]"
            raise InvalidInput(f"{name} is {list(x.shape)}; it must be {right}")
        arguments.one_device("q is", q.device, name, x.device, f"move it: {name}.to({str(q.device)!r})")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InvalidInput(f"{name} has strides {list(x.stride())}; call {name}.contiguous()")
    requests = block_table.shape[0]
    if seq_lens.shape[0] != requests or cu_seqlens_q.shape[0] != requests + 1:
        raise InvalidInput(
            f"block_table has {requests} rows, seq_lens {seq_lens.shape[0]} and cu_seqlens_q {cu_seqlens_q.shape[0]}; "
            "they must be requests, requests and requests + 1"
        )


def visible(q: Tensor, k: Tensor, mask: Any, causal: bool) -> VisibleKeys:
    """What a checked mask means: None, a MaskPolicy or PageLists."""
    arguments.flag("causal", causal)
    if mask is None:
        return VisibleKeys(causal)
    if isinstance(mask, MaskPolicy):
        check_policy(mask, causal)
        return VisibleKeys(mask.causal, min(mask.window or 0, 2**31 - 1), min(mask.sinks, 2**31 - 1))
    if isinstance(mask, PageLists):
        _check_lists(q, k, mask)
        return VisibleKeys(causal, lists=mask)
    raise InvalidInput(
        f"mask is {shown(mask)}; it must be None, a MaskPolicy, PageLists, TokenLists, or a policy of "
        "sparsek.policies. Masks of single requests join by PageLists.of_masks; Quest's pages go in as quest.lists(...)"
    )


def check_policy(mask: MaskPolicy, causal: bool) -> None:
    """InvalidInput unless a policy is one of a window, sinks and causality, which `causal` does not contradict."""
    if mask.topk is not None or mask.stride is not None:
        option = "topk" if mask.stride is None else "stride"
        raise InvalidInput(
            f"mask has the option {option}, which no paged kernel has; pass sparsek.PageLists, or a policy of "
            "sparsek.policies"
        )
    if mask.causal and not causal:
        raise InvalidInput(
            f"causal=False contradicts mask, {mask.label}; write MaskPolicy(causal=False, ...)"
        )


def _check_lists(q: Tensor, k: Tensor, lists: PageLists) -> None:
    (bq, bk), page, heads = lists.block, k.shape[2], (1, k.shape[1], q.shape[1])
    if lists.heads not in heads:
        raise InvalidInput(
            f"mask has lists for {lists.heads} heads; it needs 1, {k.shape[1]} as the cache, or {q.shape[1]} as q"
        )
    if bk % page and page % bk:
        raise InvalidInput(
            f"mask has blocks of {bq} queries and {bk} keys, and pages have {page} rows; blocks have a "
            "multiple of the page of keys, or a divisor of it"
        )
    arguments.one_device("q is", q.device, "mask", lists.device, "make the lists on q's device")


def check_sizes(q: Tensor, k: Tensor, block_table: Tensor, seen: VisibleKeys, max_q: int) -> None:
    """InvalidInput for sizes that leave no query of q room, unless values are checked, which finds more.

    Any number of rows of q may be after the last request, so lists of few tiles may be those of all requests.
    """
    if not q.shape[0] or not block_table.shape[0]:
        return
    if not max_q:
        raise InvalidInput(
            f"max_seqlen_q is 0 and q has {q.shape[0]} rows; give the most queries of a request"
        )
    if not k.shape[0]:
        raise InvalidInput(f"cache has no pages: {list(k.shape)}; it needs one at least")
    if not block_table.shape[1]:
        raise InvalidInput(
            f"block_table is {list(block_table.shape)}; it needs a column for each page of a request"
        )
    if seen.lists is not None and not seen.lists.tiles:
        raise InvalidInput(
            f"mask has lists of no tiles, and q has {q.shape[0]} rows; it needs the tiles of each request, "
            f"of {seen.lists.block[0]} queries each"
        )


def check_scores(q: Tensor, sink_logits: Any, softcap: Any) -> float:
    """The cap of scores. InvalidInput unless it is positive or 0, and sink_logits are None or float32 [Hq]."""
    if sink_logits is not None:
        arguments.dense_beside("sink_logits", sink_logits, "q", q)
        if sink_logits.dtype != torch.float32 or tuple(sink_logits.shape) != (q.shape[1],):
            raise InvalidInput(
                f"sink_logits is {sink_logits.dtype} {list(sink_logits.shape)}; it must be float32 [{q.shape[1]}], one "
                "for each head of q: sink_logits.float()"
            )
        if not sink_logits.is_contiguous():
            raise InvalidInput("sink_logits has gaps; call sink_logits.contiguous()")
        arguments.one_device("q is", q.device, "sink_logits", sink_logits.device, MOVE)
        check_sinks(sink_logits)
    return checked_softcap(softcap)


def check_page_scale(name: str, k: Tensor, scale: Any) -> Any:
    """None for 1, a float, or a float32 tensor [1] or [Hkv]."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        number = arguments.number(name, scale, 1e-30, 1e30)
        if number == 1.0:
            return None
        if k.dtype != E4M3:
            raise InvalidInput(f"{name} is {number} and the pages are {k.dtype}; only FP8 pages have a scale")
        return number
    arguments.dense(name, scale)
    if k.dtype != E4M3:
        raise InvalidInput(
            f"{name} is given and the pages are {k.dtype}; only FP8 pages have a scale: leave it out"
        )
    right = () if scale.dim() == 0 else (1,) if scale.numel() == 1 else (k.shape[1],)
    if scale.dtype != torch.float32 or tuple(scale.shape) != right or not scale.is_contiguous():
        raise InvalidInput(
            f"{name} is {scale.dtype} {list(scale.shape)}; it must be a float, or float32 [1] or [{k.shape[1]}], "
            f"contiguous{': ' + name + '.view(1)' if scale.numel() == 1 and scale.dtype == torch.float32 else ''}"
        )
    arguments.one_device("q is", k.device, name, scale.device, MOVE)
    return scale.view(1) if scale.dim() == 0 else scale


def check_out(q: Tensor, v: Tensor, out: Any) -> None:
    """InvalidInput unless `out` is None, or of the shape, dtype and device of the result, with contiguous rows."""
    if out is None:
        return
    arguments.dense("out", out)
    right = (q.shape[0], q.shape[1], v.shape[3])
    if tuple(out.shape) != right or out.dtype != q.dtype or out.device != q.device:
        raise InvalidInput(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; it must be {q.dtype} {list(right)} on {q.device}"
        )
    if out.stride(2) != 1 and out.shape[2] > 1:
        raise InvalidInput(f"out has strides {list(out.stride())}; its last dim must be contiguous")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise InvalidInput(
            f"out has strides {list(out.stride())}, so rows share memory; call out.contiguous()"
        )


def check_memory(out: Tensor | None, read: dict[str, Tensor | None]) -> None:
    """InvalidInput if `out` cannot be written, or spans memory that the call reads."""
    if out is None or out.is_meta or is_fake(out):
        return
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            "out is an inference tensor, which cannot be written to outside inference mode; clone it"
        )
    for name, x in read.items():
        if x is not None and overlap(out, x):
            raise InvalidInput(
                f"out overlaps the memory of {name}, which other parts of the call still read; give out its own"
            )


def check_no_gradient(named: dict[str, Tensor | None]) -> None:
    """InvalidInput if autograd needs a gradient of one of these, or one has a tangent."""
    for name, x in named.items():
        if x is not None and wants_gradient(x):
            raise InvalidInput(FORWARD_ONLY.format(name=name))
    check_no_tangent(NO_TANGENT, *(x for x in named.values() if x is not None))


def layout(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """Layouts of q and of the pages, as of attention's operands."""
    unit_stride = q.stride(2) == k.stride(3) == v.stride(3) == 1
    bits = (
        q.data_ptr()
        | k.data_ptr()
        | v.data_ptr()
        | (q.stride(0) | q.stride(1)) * q.element_size()
        | (k.stride(0) | k.stride(1) | k.stride(2) | v.stride(0) | v.stride(1) | v.stride(2))
        * k.element_size()
    )
    return Layout(unit_stride, unit_stride and bits % 16 == 0)
