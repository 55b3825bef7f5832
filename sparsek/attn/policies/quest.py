"""Quest: pages of a cache chosen for decode, by bounds from the minimum and maximum of each page's keys."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import PageLists, check_contiguous, check_list
from sparsek.attn.reference import quest as reference
from sparsek.core import arguments, env
from sparsek.core.arguments import INT32_MAX, faking
from sparsek.core.errors import InvalidInput, Unsupported

E4M3 = torch.float8_e4m3fn
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
DTYPES = (torch.float64, *KERNEL_DTYPES)
PAGES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Quest:
    """Keeps, for each new token and head of k, the pages whose keys may have the largest products with its query.

    For decode over paged keys: 1 to 16 queries of each request. A page has a summary, the elementwise minimum and
    maximum of its keys. With it the score of a page is an upper bound, sum over d of max(q_d min_d, q_d max_d), and for
    heads of q that share a head of k the largest of theirs (the source has one head of q for each of k). The first page
    and that of the token itself are always kept and count among the topk.

    Call `update` after the keys of a step are written to the cache, then `lists`, and pass the lists to attention over
    pages. Both launch kernels only, read lengths on the device, and can be captured in a CUDA graph; torch.compile does
    not trace them.

    Args:
        topk: Pages that each token keeps, from 2.
        page: Keys of a page: 16, 32, 64, 128 or 256.

    Raises:
        InvalidInput: For other values.

    Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv:2406.10774.

    Example:
        >>> import torch, sparsek as sk
        >>> quest = sk.policies.Quest(topk=2, page=16)
        >>> keys = torch.randn(8, 2, 16, 64)  # a cache of 8 pages, 2 heads
        >>> summaries = quest.summaries(keys)
        >>> quest.update(keys, torch.arange(16 * 5), summaries)
        >>> table, length, edges = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1, 2, 3, 4]], [80], [0, 1]))
        >>> lists = quest.lists(torch.randn(1, 4, 64), summaries, table, length, edges)
        >>> lists.heads, lists.block, lists.longest
        (2, (1, 16), 2)
    """

    topk: int = 16
    page: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "topk", arguments.integer("topk", self.topk, 2))
        object.__setattr__(self, "page", arguments.integer("page", self.page, 1))
        if self.page not in PAGES:
            raise InvalidInput(f"page is {self.page}; use one of {', '.join(map(str, PAGES))}")

    def summaries(self, cache_keys: Tensor) -> Tensor:
        """Return new summaries for a cache, [pages, Hkv, 2, D] of its dtype: zeros.

        Args:
            cache_keys: [pages, Hkv, page, D], as in `update`.

        Raises:
            InvalidInput: For another shape or dtype.
        """
        pages, heads, _, dim = self._checked_keys(cache_keys)
        return torch.zeros(pages, heads, 2, dim, dtype=cache_keys.dtype, device=cache_keys.device)

    @torch.no_grad()
    def update(self, cache_keys: Tensor, slot_mapping: Tensor, summaries: Tensor) -> None:
        """Bring the summaries up to date, in place, for tokens whose keys were just written to the cache.

        A page whose row 0 is among them begins anew; other rows widen its range. Rows that are written again, as
        after rejected drafts, widen it too, so the bound stays one.

        Args:
            cache_keys: The cache's keys [pages, Hkv, page, D], any strides with a contiguous last dim. Of a cache
                [pages, Hkv, page, 2 D] of keys and values pass cache[..., :D]. bfloat16, float16, float32, float64, or
                e4m3, whose scale is not needed: it changes no order.
            slot_mapping: int64 [tokens], as vLLM's: page * rows of a page + row. Negative ones, and those beyond the
                cache, are skipped. Several tokens of one page may be in any order.
            summaries: [pages, Hkv, 2, D], contiguous, of the cache's dtype: minimum and maximum.

        Raises:
            InvalidInput: For another shape, dtype, layout or device.
            Unsupported: For a dtype that the GPU's kernels do not have: float64, and e4m3 before sm_89.
        """
        pages, heads, _, dim = self._checked_keys(cache_keys)
        arguments.tensor("slot_mapping", slot_mapping, (torch.int64,), 1)
        check_contiguous("slot_mapping", slot_mapping)
        arguments.one_device("cache_keys are", cache_keys.device, "slot_mapping", slot_mapping.device)
        arguments.check_real("cache_keys", cache_keys, "slot_mapping", slot_mapping)
        arguments.tensor("summaries", summaries, (cache_keys.dtype,), 4)
        arguments.one_device("cache_keys are", cache_keys.device, "summaries", summaries.device)
        arguments.check_real("cache_keys", cache_keys, "summaries", summaries)
        if tuple(summaries.shape) != (pages, heads, 2, dim):
            raise InvalidInput(
                f"summaries is {list(summaries.shape)}; keys {list(cache_keys.shape)} need {[pages, heads, 2, dim]}"
            )
        check_contiguous("summaries", summaries)
        if summaries.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidInput(
                "summaries is an inference tensor, which cannot be written to outside inference mode; clone it"
            )
        if slot_mapping.numel() and summaries.numel():
            _module(cache_keys).update(cache_keys, slot_mapping, summaries)

    @torch.no_grad()
    def lists(
        self, q: Tensor, summaries: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor
    ) -> PageLists:
        """Return the pages of every token and head of k, ascending, as lists of blocks of (1, page).

        A token's own page is listed as partial unless it ends with the token. Pages behind a token are never listed. A
        row has room for min(topk, width) pages, and -1 where it has fewer.

        Args:
            q: Queries [tokens, Hq, D], any strides with a contiguous last dim. No gradient goes through the choice.
            summaries: [pages, Hkv, 2, D], as in `update`: of q's dtype, or e4m3.
            block_table: int32 [requests, width], contiguous rows: the pages of each request.
            seq_lens: int32 [requests]: keys of each request, those of its new tokens included.
            cu_seqlens_q: int32 [requests + 1]: where the queries of each request begin in q, and where all end. Later
                queries get empty lists.

        Raises:
            InvalidInput: For another shape, dtype, layout or device, and for more than 16384 pages in a row.
            Unsupported: As `update`.
        """
        arguments.tensor("q", q, DTYPES[:-1], 3)
        arguments.tensor("summaries", summaries, tuple({q.dtype, E4M3}), 4)
        (tokens, q_heads, dim), (pages, heads, two, width_of) = q.shape, summaries.shape
        if two != 2 or width_of != dim or not heads or not pages or q_heads % heads or not q_heads or not dim:
            raise InvalidInput(
                f"summaries is {list(summaries.shape)}; q {list(q.shape)} needs [pages, Hkv, 2, {dim}], of one page or "
                f"more, where Hkv divides {q_heads}"
            )
        check_contiguous("summaries", summaries)
        if q.stride(2) != 1 and dim > 1:
            raise InvalidInput(f"q has strides {list(q.stride())}; the last must be 1: call q.contiguous()")
        arguments.tensor("block_table", block_table, (torch.int32,), 2)
        requests, width = block_table.shape
        for name, x, many in (("seq_lens", seq_lens, requests), ("cu_seqlens_q", cu_seqlens_q, requests + 1)):
            check_list(name, x, 1)
            if len(x) != many:
                raise InvalidInput(
                    f"{name} is {list(x.shape)}; block_table {[requests, width]} needs [{many}]"
                )
        if width > 1 and block_table.stride(1) != 1:
            raise InvalidInput(
                f"block_table has strides {list(block_table.stride())}; call block_table.contiguous()"
            )
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        for name, x in {"summaries": summaries, **tables}.items():
            arguments.one_device("q is", q.device, name, x.device)
            arguments.check_real("q", q, name, x)
        module = _module(q, summaries)
        if width > 16384:
            raise InvalidInput(
                f"block_table has {width} pages in a row; Quest chooses among 16384 at most: use larger pages"
            )
        k = min(self.topk, width)
        if heads * tokens * max(k, 1) > INT32_MAX:
            raise InvalidInput(
                f"lists of {heads} heads, {tokens} tokens and {k} pages have more than {INT32_MAX} entries (int32); "
                "Quest is for decode"
            )
        made = module.choose(q, summaries, block_table, seq_lens, cu_seqlens_q, self.page, self.topk)
        entries = made.indices.view(-1)
        return PageLists(
            BlockLists(made.starts, made.whole, entries), BlockLists(made.cut_starts, made.cut, entries),
            heads=heads, tiles=tokens, block=(1, self.page), longest=k,
        )  # fmt: skip

    def _checked_keys(self, cache_keys: Any) -> tuple[int, int, int, int]:
        arguments.tensor("cache_keys", cache_keys, DTYPES, 4)
        pages, heads, rows, dim = cache_keys.shape
        if rows != self.page:
            raise InvalidInput(
                f"cache_keys is {list(cache_keys.shape)}, with {rows} rows in a page; this Quest has pages of "
                f"{self.page}: [pages, Hkv, {self.page}, D]"
            )
        if cache_keys.stride(3) != 1 and dim > 1:
            raise InvalidInput(f"cache_keys has strides {list(cache_keys.stride())}; the last must be 1")
        return pages, heads, rows, dim


def _module(*tensors: Tensor) -> Any:
    """The kernels for tensors on a GPU, or the reference on a CPU. The same functions."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise InvalidInput("Quest has no gradient and no batching rule for torch.func; call it outside")
    on_gpu = tensors[0].is_cuda
    if faking() or not (on_gpu or env.interpreting()):
        return reference
    wrong = [x.dtype for x in tensors if x.dtype not in KERNEL_DTYPES]
    if (
        on_gpu
        and E4M3 in (x.dtype for x in tensors)
        and torch.cuda.get_device_capability(tensors[0].device) < (8, 9)
    ):
        wrong.append(E4M3)
    if not wrong:
        try:
            return import_module("sparsek.attn.kernels.paged.quest")
        except ImportError:
            wrong = ["no Triton"]
    if on_gpu:
        raise Unsupported(f"Quest on {tensors[0].device}", {"paged.quest": [f"has no kernel for {wrong[0]}"]})
    return reference
