"""Parts of an attention problem: a reference for long sequences is computed for some heads alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sparsek.attn.mask.lists import BlockLists, Sizes
from sparsek.attn.mask.mask import BlockMask
from sparsek.testing.attention_budget import ExpectedGradients, expected_gradients
from sparsek.testing.budget import Gate
from sparsek.testing.compare import worst


class HeadGroup(NamedTuple):
    """A head of keys of one batch item, and the heads of queries that it serves."""

    item: int
    head: int

    def _of(self, heads: int, kv_heads: int) -> slice:
        """Its heads among `heads`, which is a multiple of kv_heads, or 1 for a list that all share."""
        count = max(1, heads // kv_heads)
        first = self.head * count if heads > 1 else 0
        return slice(first, first + count)

    def of(self, x: Tensor, kv_heads: int) -> Tensor:
        """Its part of x [B, H, L, E]."""
        return x[self.item : self.item + 1, self._of(x.shape[1], kv_heads)]

    def mask(self, mask: BlockMask, kv_heads: int) -> BlockMask:
        """Its part of a mask: the same lists and rules, other rows."""
        heads = self._of(mask.heads, kv_heads)
        begin = (self.item if mask.batch > 1 else 0) * mask.heads
        of_rows = slice((begin + heads.start) * mask.grid[0], (begin + heads.stop) * mask.grid[0])
        of_heads = slice(begin + heads.start, begin + heads.stop)

        def cut(lists: BlockLists) -> BlockLists:
            return BlockLists(lists.starts[of_rows], lists.counts[of_rows], lists.indices)

        def interval(bound: Tensor | None) -> Tensor | None:
            return bound if bound is None or len(bound) == 1 else bound[of_heads]

        full, partial = cut(mask.full), cut(mask.partial)
        stored = full.counts + partial.counts
        sizes = Sizes(int(stored.sum()), int(partial.counts.sum()), int(stored.max()), exact=True)
        given = {"q_len": mask.q_len, "kv_len": mask.kv_len, "block": mask.block, "batch": 1}
        given |= {"rules": mask.rules, "bits": mask.bits, "members": mask.members}
        given |= {"lo": interval(mask.lo), "hi": interval(mask.hi)}
        return BlockMask.unchecked(
            **given, heads=heads.stop - heads.start, full=full, partial=partial, sizes=sizes
        )


@dataclass(frozen=True)
class HeadGradients:
    """The expected dq, dk and dv of some heads. A head's gradients depend on nothing outside it."""

    parts: Mapping[HeadGroup, ExpectedGradients]
    kv_heads: int

    def judge(self, found: Sequence[Tensor]) -> Gate:
        """The gate of dq, dk and dv of all heads, by those that are expected."""
        gates = (
            each.judge([group.of(x, self.kv_heads) for x in found]) for group, each in self.parts.items()
        )
        return worst(list(gates))


def expected_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    grad: Tensor,
    rows: Sequence[int],
    columns: Sequence[int] | None,
) -> HeadGradients:
    """Some tiles of queries and blocks of keys of the first and of the last head of keys."""
    batch, kv_heads = k.shape[:2]

    def of(group: HeadGroup) -> ExpectedGradients:
        own_q, own_k, own_v, own_grad = (group.of(x, kv_heads) for x in (q, k, v, grad))
        own_mask = group.mask(mask, kv_heads)
        return expected_gradients(own_q, own_k, own_v, own_mask, own_grad, rows=rows, columns=columns)

    return HeadGradients(
        {each: of(each) for each in {HeadGroup(0, 0), HeadGroup(batch - 1, kv_heads - 1)}}, kv_heads
    )
