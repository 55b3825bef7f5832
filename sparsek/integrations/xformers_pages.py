"""Biases of xFormers whose keys lie in pages: their tables and lengths as `sparsek.attention_paged` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import Documents, PackedLayout, documents_mask
from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.convert.xformers import Sequences
from sparsek.attn.mask.lists import upload
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_paged import attention_paged
from sparsek.attn.reference.attention import merge_attention
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, wait_for
from sparsek.core.tracing import reads_values
from sparsek.integrations.foreign_options import check_shape

LEAST, MOST = 16, 256  # rows of a page that attention_paged takes, powers of two


def kept_with(mask: BlockMask, key: str, build: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Tensors that belong to a kept mask, for the current stream."""
    found, made = mask.derived(key, lambda: (build(), Ready.here(mask.device)))
    if made is not None and not torch.cuda.is_current_stream_capturing():
        wait_for(made, found)
    return found


class KeyPages(NamedTuple):
    """The pages from the first on that holds no rows before a sequence's first key; `lengths` counts their keys.

    `page`: rows of a page. `skipped`: pages before those of the table, int64 [sequences] on the host.
    """

    table: Tensor
    lengths: Tensor
    page: int
    skipped: np.ndarray


def paged(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, found: Sequences, pages: KeyPages, scale: float | None
) -> Tensor:
    """out [1, M, Hq, Kv] for q [1, M, Hq, K], k [1, N, Hkv, K] and v [1, N, Hkv, Kv], by the tensors of the bias.

    Keys that begin inside a page are attended in two parts: those of that page, which are copied, and the others.
    """
    edges = _on("q_seqinfo.seqstart", bias.q_seqinfo.seqstart, q.device, found.q_edges.size)
    lengths = np.diff(found.q_edges), found.k_end - found.k_start
    given: Any = (bias.q_seqinfo, bias.k_seqinfo)
    # xFormers may replace lengths in place by others up to its own maxima, also behind a captured graph.
    most = [max(int(each.max(initial=1)), info.max_seqlen) for each, info in zip(lengths, given, strict=True)]
    cache = tuple(x[0].unflatten(0, (x.shape[1] // pages.page, pages.page)).transpose(1, 2) for x in (k, v))
    policy = policy_of(found)
    out, lse = attention_paged(
        q[0], cache, pages.table, pages.lengths, edges, policy if found.near.back else None, max_seqlen_q=most[0],
        max_seqlen_k=min(most[1], pages.table.shape[1] * pages.page), causal=found.near.ahead == 1, scale=scale,
        return_lse=True,
    )  # fmt: skip
    end = np.minimum(np.maximum(pages.skipped * pages.page, found.k_start), found.k_end)
    if (end == found.k_start).all():
        return out[None]
    mask, rows = _first_rows(found, end, bias, q.device)
    k, v = (x.index_select(1, rows).transpose(1, 2) for x in (k, v))
    first, sums = attention(q.transpose(1, 2), k, v, mask, scale=scale, return_lse=True)
    return merge_attention(out, lse.T, first[0].transpose(0, 1), sums[0].T)[0][None]


def policy_of(found: Sequences) -> MaskPolicy | None:
    """The policy of paged attention in which a query sees the same keys; None if there is none."""
    back, ahead = found.near[:2]
    if ahead in (None, 1) or back == ahead:
        return MaskPolicy(window=back, causal=ahead == 1)
    return None


def padded_pages(bias: Any, found: Sequences, device: torch.device) -> KeyPages | None:
    """Padded keys as pages; None where they have no rows for whole pages, or no policy has the window."""
    info = bias.k_seqinfo
    padding, count = getattr(info, "padding", 0), found.k_start.size
    if not isinstance(padding, int) or padding < LEAST or padding % LEAST or policy_of(found) is None:
        return None
    if found.kv_len != count * padding or (found.k_start != np.arange(count) * padding).any():
        return None
    side = min(padding & -padding, MOST)
    lengths = _on("k_seqinfo.seqlen", info.seqlen, device, count)
    table = torch.arange(found.kv_len // side, dtype=torch.int32, device=device).view(count, -1)
    return KeyPages(table, lengths, side, np.zeros_like(found.k_start))


def _on(name: str, x: Any, device: torch.device, *shape: int) -> Tensor:
    """A tensor of the bias, on the device of query."""
    check_shape(name, arguments.tensor(name, x, (torch.int32,)), shape, "a number for each sequence")
    arguments.one_device(f"{name} is", x.device, "query is", device, "pass attn_bias.to(query.device)")
    return x


@reads_values("the pages of a bias are read", "pass plain tensors")
def pages_of(bias: Any, found: Sequences, device: torch.device) -> KeyPages:
    """The pages of a bias: split where its own are larger than 256 rows, and from the first whole page on."""
    info, page = bias.k_seqinfo, int(bias.page_size)
    if found.kv_len % page:
        raise InvalidInput(f"key has {found.kv_len} rows; they must be whole pages of page_size {page}")
    table = _on("block_tables", bias.block_tables, device, *bias.block_tables.shape)
    lengths = _on("k_seqinfo.seqlen", info.seqlen, device, table.shape[0])
    side = min(page & -page, MOST)
    if side < LEAST:
        raise InvalidInput(
            f"page_size is {page}; it must be a multiple of {LEAST}. For others make the mask of all rows, "
            "BlockMask.from_xformers(attn_bias, kv_len=key.shape[1]), and call sparsek.attention"
        )
    apart = int(np.bitwise_or.reduce(found.k_start, initial=0)) | side
    if apart & -apart >= LEAST:  # then no sequence begins inside a page
        side = apart & -apart
    if page > side:
        part = torch.arange(page // side, dtype=table.dtype, device=device)
        table = (table[..., None] * (page // side) + part).flatten(1)
    if not found.k_start.any():
        return KeyPages(table, lengths, side, np.zeros_like(found.k_start))
    start = _on("k_seqinfo.seqstart", info.seqstart, device, table.shape[0] + 1)[:-1]
    skipped = (start + (side - 1)) // side
    at = skipped[:, None] + torch.arange(table.shape[1], dtype=torch.int32, device=device)
    table = table.gather(1, at.clamp(0, table.shape[1] - 1).long())  # whatever seqstart holds
    return KeyPages(table, (lengths - skipped * side).clamp(min=0), side, -(-found.k_start // side))


def _first_rows(
    found: Sequences, end: np.ndarray, bias: Any, device: torch.device
) -> tuple[BlockMask, Tensor]:
    """Of the keys from each k_start to `end`, which lie in one page each: their mask, one sequence behind the other,
    and their rows in the cache.
    """
    page, counts = int(bias.page_size), end - found.k_start
    start = np.cumsum(counts) - counts
    total = int(counts.sum())

    def build() -> BlockMask:
        shift = found.shift(start)
        docs = Documents(
            np.zeros_like(start), found.q_edges[:-1], found.q_edges[1:], start, start + counts, shift, start
        )
        layout = PackedLayout(docs, found.q_len, total)
        return documents_mask(BlockMask, layout, found.near, 128, device, f"first pages of {found.name}")

    def numbers() -> list[Tensor]:
        return upload([found.k_start // page, found.k_start % page - start, counts], device)

    mask = kept_mask(("first pages", *found.key, end.tobytes(), page, device), build)
    column, offset, count = kept_with(mask, "rows of pages", numbers)
    column = column.clamp(max=bias.block_tables.shape[1] - 1).long()
    first = bias.block_tables.gather(1, column[:, None])[:, 0] * page + offset
    rows = torch.repeat_interleave(first, count, output_size=total)
    rows = rows + torch.arange(total, dtype=torch.int32, device=device)
    return mask, rows.clamp(0, max(found.kv_len - 1, 0))  # whatever the table holds
