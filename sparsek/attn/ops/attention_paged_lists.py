"""Lists of key blocks for a ragged batch over paged keys, as a policy chooses them for each request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan import paged_operands as operands
from sparsek.attn.plan.attention_paged import AttendedPages, page_block
from sparsek.core import arguments
from sparsek.core.arguments import faking, is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import reads_values


def choose_lists(call: AttendedPages) -> None:
    """Replace the rule of a call by the lists that it chooses for each request; its lengths are then on q's device.

    Gathers the keys of one request after the other. Waits for lengths on a GPU.
    """
    q, rule, block_table, causal = call.q, call.mask, call.block_table, call.causal
    seq_lens, cu_seqlens_q = call.seq_lens, call.cu_seqlens_q
    if torch.compiler.is_compiling():
        raise InvalidInput(
            f"mask is {rule.label}, which chooses from values, and torch.compile cannot trace lengths; call outside"
        )
    k, _ = operands.split_cache(q, call.cache)
    if faking() or is_fake(q):
        raise InvalidInput(f"mask is {rule.label}, which chooses from values, and fake tensors have none")
    arguments.supported("q", q.device)
    if captured(q):
        raise InvalidInput(
            f"mask is {rule.label}, which needs the lengths on the host; a CUDA graph cannot capture it. Pass PageLists"
        )
    edges, lengths = _on_host(cu_seqlens_q, seq_lens)
    seq_lens, cu_seqlens_q = (_moved(x, q.device) for x in (seq_lens, cu_seqlens_q))
    operands.check_tables(q, block_table, seq_lens, cu_seqlens_q)
    _check_lengths(edges, lengths, q.shape[0], block_table.shape[1] * k.shape[2])
    if not k.shape[0] and any(lengths):
        raise InvalidInput(f"cache has no pages, and a request of seq_lens has {max(lengths)} keys")
    if bool(getattr(rule, "causal", False)) is not causal:
        is_causal, other = ("is not", "is") if causal else ("is", "is not")
        raise InvalidInput(
            f"mask is {rule.label}, which {is_causal} causal, and causal={causal}: one of them must change. Write "
            f"causal={not causal}, or a policy that {other} causal"
        )
    factor = operands.check_page_scale("k_scale", k, call.k_scale)
    table = block_table.clamp(0, max(k.shape[0] - 1, 0))
    masks = []
    with torch.no_grad():
        for r, length in enumerate(lengths):
            queries = q[edges[r] : edges[r + 1]].transpose(0, 1)[None]
            if not queries.shape[2]:
                continue
            keys = _keys(q, k, table[r], length, factor)[None]
            if rule.by_token:
                masks.append(rule.lists(queries, keys, scale=call.scale))
                continue
            mask = rule.mask_for(queries, keys, call.scale)
            mask.verify()
            masks.append(mask)
        joined = _by_token if rule.by_token else partial(PageLists.of_masks, verify=False)
        call.mask = joined(masks) if masks else None
    call.seq_lens, call.cu_seqlens_q = seq_lens, cu_seqlens_q


def _by_token(lists: Sequence[Any]) -> PageLists:
    """The lists of all requests, of as many entries each, with -1 for none."""
    n = max(each.indices.shape[3] for each in lists)
    rows = [functional.pad(each.indices[0], (0, n - each.indices.shape[3]), value=-1) for each in lists]
    return PageLists.from_indices(torch.cat(rows, 1), page_block(lists[0].block))


@reads_values("lengths are read", "pass plain tensors")
def _on_host(cu_seqlens_q: Any, seq_lens: Any) -> tuple[list[int], list[int]]:
    for name, x in (("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        arguments.tensor(name, x, (torch.int32,), 1)
    if seq_lens.device == cu_seqlens_q.device:
        both = torch.cat((cu_seqlens_q, seq_lens)).tolist()
        return both[: cu_seqlens_q.shape[0]], both[cu_seqlens_q.shape[0] :]
    return cu_seqlens_q.tolist(), seq_lens.tolist()


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, without a wait. The caller may write to pinned memory before the device reads it: not read."""
    return x if x.device == device else x.clone().to(device, non_blocking=True)


def _check_lengths(edges: list[int], lengths: list[int], tokens: int, most: int) -> None:
    if len(edges) != len(lengths) + 1 or edges[0] != 0 or edges[-1] > tokens:
        raise InvalidInput(
            f"cu_seqlens_q has {len(edges)} entries from {edges[0] if edges else 0} to {edges[-1] if edges else 0}, "
            f"for {len(lengths)} requests and {tokens} rows of q; it must be [requests + 1], from 0"
        )
    for r, length in enumerate(lengths):
        if edges[r + 1] < edges[r]:
            raise InvalidInput(f"cu_seqlens_q falls from {edges[r]} to {edges[r + 1]} at request {r}")
        if not 0 <= length <= most:
            raise InvalidInput(
                f"seq_lens[{r}] is {length}; block_table has room for 0 to {most} keys of a request"
            )


def _keys(q: Tensor, k: Tensor, pages: Tensor, length: int, scale: Any) -> Tensor:
    """The keys of a request in the dtype of q, [Hkv, T, D]."""
    used = pages[: -(-length // k.shape[2])]
    found = k.view(torch.uint8)[used].view(k.dtype) if k.dtype != q.dtype else k[used]
    keys = found.transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
    if scale is None:
        return keys
    return keys * (scale.to(q.dtype).view(-1, 1, 1) if isinstance(scale, Tensor) else scale)
