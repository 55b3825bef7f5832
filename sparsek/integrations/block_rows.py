"""The reverse of per-token lists, as MSA has it: for each block of keys the queries that listed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.cache import edges_of
from sparsek.attn.mask.lists import upload
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.integrations.foreign_options import readable


class BlockRows:
    """The rows of a CSR of blocks: of packed documents first their first blocks, then their second ones."""

    def __init__(self, cu_seqlens_q: Any, cu_seqlens_k: Any, block: int, queries: int) -> None:
        self.block = block
        self.queries = edges_of(cu_seqlens_q, "cu_seqlens_q", queries)
        self.keys = edges_of(cu_seqlens_k, "cu_seqlens_k")
        documents = len(self.queries) - 1, len(self.keys) - 1
        if documents[0] != documents[1]:
            raise InvalidInput(
                f"cu_seqlens_q has {documents[0]} documents and cu_seqlens_k {documents[1]}; give as many"
            )
        blocks = -(-np.diff(self.keys) // self.block)
        there = blocks[:, None] > np.arange(max(blocks.max(initial=0), 1))
        before = np.cumsum(there.sum(0)) - there.sum(0)
        self.count = int(blocks.sum())
        self.table = np.where(there, before + np.cumsum(there, 0) - 1, -1)  # [documents, blocks]: the row

    def key(self, topk: int) -> tuple[Any, ...]:
        return self.queries.tobytes(), self.keys.tobytes(), self.block, topk

    def uploaded(self, device: torch.device) -> list[Tensor]:
        """The table, and of each query its document and its place there, int64."""
        lengths = np.diff(self.queries)
        document = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(document)) - np.repeat(self.queries[:-1], lengths)
        table = self.table if len(self.table) else np.full((1, 1), -1)
        return [each.long() for each in upload([table, document, place], device)]

    def reversed(self, q2k: Tensor) -> tuple[Tensor, Tensor]:
        """row_ptr int32 [H, blocks + 1] and q_indices int32 [H, queries * n] of lists [H, queries, n]."""
        heads, _, topk = q2k.shape
        table, document, place = self.uploaded(q2k.device)
        at, levels = q2k.long(), table.shape[1]
        row = table[document[:, None], at.clamp(0, levels - 1)]
        row = torch.where((at >= 0) & (at < levels) & (row >= 0), row, INT32_MAX).flatten(1)
        ordered, order = row.sort(dim=1, stable=True)
        ends = torch.arange(self.count + 1, dtype=row.dtype, device=row.device).expand(heads, -1).contiguous()
        query = place[order // max(topk, 1)] if topk else order
        q_indices = torch.where(ordered == INT32_MAX, -1, query).to(torch.int32)
        return torch.searchsorted(ordered, ends).to(torch.int32), q_indices

    def lists(self, row_ptr: Tensor, q_indices: Tensor, topk: int) -> Tensor:
        """q2k int32 [H, queries, at most topk] of a CSR: its inverse."""
        if readable(row_ptr) and bool((row_ptr[:, self.count :] != row_ptr[:, -1:]).any()):
            raise InvalidInput(
                f"k2q_row_ptr has queries after its {self.count} blocks of {self.block} keys; blk_kv and "
                "cu_seqlens must be those that build_k2q_csr got"
            )
        heads, edges = q_indices.shape
        topk = min(topk, edges)
        total, lengths = int(self.queries[-1]), np.diff(self.queries)
        document, level = np.nonzero(self.table >= 0)
        order = np.argsort(self.table[document, level])
        document, level = document[order], level[order]
        rows = [self.queries[:-1][document], lengths[document], level]
        first, most, level = (
            each.long() for each in upload([np.append(each, 0) for each in rows], q_indices.device)
        )
        edge = torch.arange(edges, dtype=row_ptr.dtype, device=row_ptr.device).expand(heads, -1)
        row = torch.searchsorted(row_ptr.contiguous(), edge.contiguous(), right=True) - 1
        row = row.clamp(0, self.count)
        query = q_indices.long()
        there = (edge < row_ptr[:, -1:]) & (query >= 0) & (query < most[row])
        token = torch.where(there, first[row] + query, total)
        ordered, order = token.sort(dim=1, stable=True)
        rank = torch.arange(edges, dtype=torch.int64, device=row.device) - torch.searchsorted(
            ordered, ordered
        )
        found = torch.full((heads, (total + 1) * (topk + 1)), -1, dtype=torch.int64, device=row.device)
        found.scatter_(1, ordered * (topk + 1) + rank.clamp(max=topk), level[row].gather(1, order))
        return found.view(heads, total + 1, topk + 1)[:, :total, :topk].to(torch.int32)
