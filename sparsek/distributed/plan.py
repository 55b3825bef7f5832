"""The plan of attention over a mesh: the deal of a sequence, and what each rank gets from whom."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskRule
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX, faking
from sparsek.core.errors import InvalidInput
from sparsek.core.plan_owner import drop_oldest
from sparsek.core.tracing import untransformed
from sparsek.distributed.deal import Deal, entries_of, imbalance, unit_pairs

Made = TypeVar("Made")

MOST = 1 << 16  # heads, and numbers of a head
MOST_BYTES = 1 << 62
KEPT = 64  # results of a plan, such as the exchanges of one batch size
MASKS = 4  # other masks that calls with a plan have, and their plans


@dataclass(frozen=True, eq=False)
class MeshParts:
    """What a plan consists of.

    Attributes:
        queries: The deal of queries, and of keys where there are as many.
        keys: The deal of keys and values.
        group: The process group; None for "both", and for a plan of a number of ranks.
        sequence: With "both" the plan of "gather" over the ranks of a column of the mesh, whose shards are those of
            whole rows.
        heads: With "both" the plan of "heads" over the ranks of this process's row.
        kept: What is made once for the deal, whatever the mask.
    """

    queries: Deal
    keys: Deal
    group: Any = None
    sequence: MeshPlan | None = None
    heads: MeshPlan | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def deal(self, of: str) -> Deal:
        """The deal of "queries" or "keys"."""
        return self.queries if of == "queries" else self.keys


@dataclass(frozen=True, eq=False, repr=False)
class MeshPlan:
    """How the ranks of a mesh share attention. `sk.distributed.plan` makes it.

    Attributes:
        mask: The mask of the whole sequence; with a `rule` all blocks from which it may choose.
        how: "gather", "heads" or "both".
        rank: This process's rank in the mesh; None for a plan of a number of ranks.
        rule: A policy that chooses the mask from q and k in each call, or None.
    """

    mask: BlockMask
    how: str
    rank: int | None
    rule: MaskRule | None
    _parts: MeshParts
    _kept: dict[Any, Any] = field(default_factory=dict)
    _masks: dict[Any, MeshPlan] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> MeshPlan:
        return self  # as of a module that holds it: process groups have no copies

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return self._parts.queries.ranks

    @property
    def imbalance(self) -> float:
        """Visited query-key pairs of the fullest rank over the mean."""
        return imbalance(self._pairs)

    def with_mask(self, mask: BlockMask) -> MeshPlan:
        """Return the plan of another mask under this deal, as for masks that are chosen in each step. No communication.

        The lists of the mask are read on the host.

        Args:
            mask: A mask of as many queries and keys, in blocks that divide the units of the deal.

        Raises:
            InvalidInput: For another mask.

        Example:
            >>> import sparsek as sk
            >>> plan = sk.distributed.plan(sk.BlockMask.causal(4096), 4)
            >>> plan.with_mask(sk.BlockMask.sliding_window(4096, 256)).imbalance < 1.2
            True
        """
        if not isinstance(mask, BlockMask):
            raise InvalidInput(
                f"mask is {arguments.shown(mask)}; it must be a BlockMask of the whole sequence"
            )
        unit = self._parts.queries.unit
        lengths, wanted = (mask.q_len, mask.kv_len), (self.mask.q_len, self.mask.kv_len)
        if lengths != wanted or (self.how != "heads" and any(unit % side for side in mask.block)):
            raise InvalidInput(
                f"mask has {lengths[0]} queries, {lengths[1]} keys and blocks of {mask.block}; the plan deals "
                f"{wanted[0]} queries and {wanted[1]} keys in units of {unit} tokens, which blocks must divide"
            )
        mask.verify(wait=True)
        return self._of(mask)

    def _of(self, mask: BlockMask) -> MeshPlan:
        sequence, heads = (each and each._of(mask) for each in (self._parts.sequence, self._parts.heads))
        parts = replace(self._parts, sequence=sequence, heads=heads)
        return replace(self, mask=mask, rule=None, _parts=parts, _kept={}, _masks={})

    @property
    def _here(self) -> int:
        """This process's rank. InvalidInput for a plan of a number of ranks."""
        if self.rank is None:
            raise InvalidInput(
                f"the plan was made for {self.ranks} ranks without processes; pass a DeviceMesh or a process group to "
                "sk.distributed.plan"
            )
        return self.rank

    @property
    def _groups(self) -> list[Any]:
        """The process groups that connect all ranks: that of all, or of the column, then of the row."""
        parts = self._parts
        if parts.sequence is None or parts.heads is None:
            return [parts.group]
        return [parts.sequence._parts.group, parts.heads._parts.group]

    @cached_property
    def _text(self) -> str:
        """The plan in words, with a checksum of the mask's lists and of the deal: the same text on all ranks."""
        mask, total = self.mask, 0
        for part in (self._parts.queries.owner, *(each for pair in entries_of(mask) for each in pair)):
            total = zlib.crc32(np.ascontiguousarray(part).tobytes(), total)
        for part in mask.host[2:]:
            total = total if part is None else zlib.crc32(np.ascontiguousarray(part).tobytes(), total)
        members = "" if mask.members is None else f", {mask.members}"
        rule = "" if self.rule is None else f", chosen by {self.rule.label}"
        return (
            f"a plan by {self.how} of {mask.label or 'blocks'}, {mask.q_len} x {mask.kv_len}, blocks of {mask.block}, "
            f"batch {mask.batch}, heads {mask.heads}{members}, lists {total:08x}{rule}"
        )

    @cached_property
    def _pairs(self) -> np.ndarray:
        """Visited query-key pairs of each rank, int64 [ranks], summed over the mask's batch items and heads."""
        sequence, heads = self._parts.sequence, self._parts.heads
        if sequence is not None and heads is not None:
            share = heads._pairs / max(heads._pairs.sum(), 1)
            return (sequence._pairs[:, None] * share).ravel().astype(np.int64)
        mask, deal = self.mask, self._parts.queries
        if self.how == "gather":
            return np.bincount(deal.owner, unit_pairs(mask, deal.unit), deal.ranks).astype(np.int64)
        visited = mask.host.full.counts.astype(np.int64) + mask.host.partial.counts
        of_heads = (
            visited.reshape(mask.batch, mask.heads, mask.grid[0]).sum((0, 2)) * mask.block[0] * mask.block[1]
        )
        if mask.heads == 1:  # which heads share; of as many for each rank
            return np.full(deal.ranks, of_heads[0] // deal.ranks)
        mine = (heads_of(mask.heads, mask.heads, deal.ranks, rank)[0] for rank in range(deal.ranks))
        return np.array([of_heads[each].sum() for each in mine])

    @cached_property
    def _seen(self) -> np.ndarray:
        """Which key blocks some query of a rank visits, bool [ranks, batch * heads of the mask, key blocks]."""
        mask, (tiles, columns) = self.mask, self.mask.grid
        seen = np.zeros((self.ranks, mask.batch * mask.heads, columns), bool)
        owner = self._parts.queries.owners(mask.block[0])
        for row, column in entries_of(mask):
            seen[owner[row % max(tiles, 1)], row // max(tiles, 1), column] = True
        return seen

    def _needs(self, kv_heads: int) -> np.ndarray:
        """The key blocks that each rank needs, bool [ranks, batch of the mask * (1 or kv_heads), key blocks]."""
        heads, seen = self.mask.heads, self._seen
        if heads <= kv_heads:
            return seen
        shape = (self.ranks, self.mask.batch, kv_heads, heads // kv_heads, self.mask.grid[1])
        return seen.reshape(shape).any(3).reshape(self.ranks, -1, self.mask.grid[1])

    def received(
        self,
        batch: int,
        q_heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> np.ndarray:
        """Return the bytes that each rank receives in a forward pass, int64 [ranks].

        By "gather" these are keys and values of blocks that some query of the rank visits and another rank owns, each
        once: no rank needs fewer. A backward pass receives them again, and gradients of as many rows return.

        Args:
            batch: Batch items.
            q_heads: Heads of q.
            kv_heads: Heads of k and v.
            dim: The head dim of q and k.
            v_dim: That of v; `dim` for None.
            dtype: The dtype of q, k and v.

        Raises:
            InvalidInput: For heads that do not fit together, or not the mask.

        Example:
            >>> import sparsek as sk
            >>> plan = sk.distributed.plan(sk.BlockMask.sliding_window(65536, 4096), 8)
            >>> int(plan.received(1, 32, 8, 128).max()) // 2**20  # MiB of 256 of all K and V
            16
        """
        batch = arguments.integer("batch", batch, 1, INT32_MAX)
        q_heads = arguments.integer("q_heads", q_heads, 1, MOST)
        kv_heads = arguments.integer("kv_heads", kv_heads, 1, MOST)
        dim = arguments.integer("dim", dim, 1, MOST)
        v_dim = dim if v_dim is None else arguments.integer("v_dim", v_dim, 1, MOST)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(
                f"dtype is {arguments.shown(dtype)}; it must be a torch.dtype, such as torch.bfloat16"
            )
        mask = self.mask
        if q_heads % kv_heads or mask.heads not in (1, kv_heads, q_heads) or mask.batch not in (1, batch):
            raise InvalidInput(
                f"{batch} batch items, {q_heads} heads of q and {kv_heads} of k do not fit the mask, which has "
                f"{mask.batch} batch items and {mask.heads} heads"
            )
        whole = batch * 2 * q_heads * (dim + v_dim) * dtype.itemsize * (mask.q_len + mask.kv_len)
        if whole > MOST_BYTES:
            raise InvalidInput(f"q, k, v and out have {whole} bytes; at most {MOST_BYTES} are counted")
        return self._received(batch, q_heads, kv_heads, dim, v_dim, dtype.itemsize)

    def _received(
        self, batch: int, q_heads: int, kv_heads: int, dim: int, v_dim: int, itemsize: int
    ) -> np.ndarray:
        sequence, heads, row = self._parts.sequence, self._parts.heads, (dim + v_dim) * itemsize
        if sequence is not None and heads is not None:
            each = (heads_of(q_heads, kv_heads, heads.ranks, at) for at in range(heads.ranks))
            found = np.stack(
                [sequence._keys_received(batch, q_heads, kv_heads, *of) for of in each], 1
            ).ravel()
            return found * row + self._exchanged(batch, q_heads, kv_heads, dim, v_dim, heads.ranks) * itemsize
        if self.how == "heads":
            return self._exchanged(batch, q_heads, kv_heads, dim, v_dim, self.ranks) * itemsize
        return self._keys_received(batch, q_heads, kv_heads, np.arange(q_heads), np.arange(kv_heads)) * row

    def _keys_received(
        self, batch: int, q_heads: int, kv_heads: int, of_q: np.ndarray, of_k: np.ndarray
    ) -> np.ndarray:
        """Keys that each rank gets by "gather" for some heads of q and the heads of k that they read."""
        mask, keys = self.mask, self._parts.keys
        seen = self._seen.reshape(self.ranks, mask.batch, mask.heads, mask.grid[1])
        reads, even = reads_of(of_q, of_k, q_heads // kv_heads)
        times = batch // mask.batch
        if mask.heads == 1:
            times *= of_k.size if even else of_q.size
        elif mask.heads == kv_heads and even:
            seen = seen[:, :, of_k]
        else:
            seen = seen[:, :, of_q * mask.heads // q_heads]
            if even and of_q.size:
                seen = np.logical_or.reduceat(seen, np.searchsorted(reads, np.arange(of_k.size)), 2)
        tokens = np.diff(np.append(np.arange(mask.grid[1]) * mask.block[1], mask.kv_len))
        foreign = keys.owners(mask.block[1]) != np.arange(self.ranks)[:, None]
        return ((seen & foreign[:, None, None]) @ tokens).sum((1, 2)).astype(np.int64) * times

    def _exchanged(
        self, batch: int, q_heads: int, kv_heads: int, dim: int, v_dim: int, across: int
    ) -> np.ndarray:
        """Numbers that each rank receives when rows of `across` ranks exchange heads: q, k and v, then outputs."""
        heads = [heads_of(q_heads, kv_heads, across, rank % across) for rank in range(self.ranks)]
        of_q, of_k = (np.array([each[at].size for each in heads]) for at in range(2))
        own, keys = self._parts.queries.tokens, self._parts.keys.tokens
        of_row, keys_of_row = (x.reshape(-1, across).sum(1).repeat(across) for x in (own, keys))
        elements = (of_row - own) * of_q * dim + (keys_of_row - keys) * of_k * (dim + v_dim)
        return batch * (elements + own * (q_heads - of_q) * v_dim)

    def explain(self) -> str:
        """Return the deal in words, a line for each of the first ranks, and what has the bits of one process."""
        parts, columns = self._parts, self.mask.grid[1]
        even = f"fullest rank {self.imbalance:.3f} of the mean, units of {parts.queries.unit} tokens"
        by = "" if self.rule is None else f", chosen by {self.rule.label} in each call"
        lines = [f"{self.how} of {self.mask!r}{by} over {self.ranks} ranks: {even}"]
        for rank in range(min(self.ranks, 8)):
            blocks = (
                f", {int(self._seen[rank].any(0).sum())} of {columns} key blocks"
                if self.how == "gather"
                else ""
            )
            lines.append(
                f"  rank {rank}: {parts.queries.tokens[rank]} queries, {self._pairs[rank]:.3g} visited pairs{blocks}"
            )
        return "\n".join([*lines, f"  bits: {self._bits}"])

    @property
    def _bits(self) -> str:
        """Which results have the bits of one process, or why none has."""
        members, row = self.mask.members, self._parts.heads
        if self.rule is not None:
            return (
                "within rounding of one process, which plans a mask chosen in a call by bounds of its sizes"
            )
        if self.how != "heads" and members is not None and members.at_ends:
            return "within rounding of one process: exact=True takes no window and sinks of lists"
        across = self.ranks if self.how == "heads" else 1 if row is None else row.ranks
        conditions = ["kernels of a GPU"]
        conditions += [f"at least {across} heads of k"] * (across > 1) + ["exact=True"] * (
            self.how != "heads"
        )
        return f"out, lse and gradients as of one process with {', '.join(conditions)}; otherwise within rounding"

    def __repr__(self) -> str:
        return f"MeshPlan({self.how}, {self.ranks} ranks, imbalance {self.imbalance:.3f}, {self.mask!r})"


def once(kept: dict[Any, Any], key: Any, make: Callable[[], Made], most: int = KEPT) -> Made:
    """What `make()` returned under this key, made outside of inference mode, whose tensors no backward pass saves, and
    of torch.func. Not kept where its tensors are fake, or of a graph that is compiled.
    """
    compiled = torch.compiler.is_compiling()
    if not compiled and faking():
        return make()
    if key not in kept:
        if compiled:
            return make()
        while len(kept) >= most:
            drop_oldest(kept)
        with torch.inference_mode(False):
            kept[key] = untransformed(make)
    return kept[key]


def heads_of(q_heads: int, kv_heads: int, ranks: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The heads of q that a rank computes by "heads", and the heads of k that they read, ascending.

    Contiguous; whole groups of heads that share a head of k while there are as many of these as ranks.
    """
    group = q_heads // kv_heads
    step = group if kv_heads >= ranks else 1
    of_q = np.arange(q_heads)
    of_q = of_q[(of_q // step) * ranks // (q_heads // step) == rank]
    return of_q, np.unique(of_q // group)


def reads_of(of_q: np.ndarray, of_k: np.ndarray, group: int) -> tuple[np.ndarray, bool]:
    """Which of `of_k` each head of `of_q` reads, and whether as many read each; if not, each gets a copy of its own."""
    reads = np.searchsorted(of_k, of_q // group)
    counts = np.bincount(reads)
    return reads, not (counts != counts[:1]).any()
