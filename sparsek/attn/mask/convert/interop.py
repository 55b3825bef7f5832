"""Block masks from dense tensors, transformers and block patterns; to FlexAttention, FlashAttention-4 and patterns.

Elements are read in chunks of blocks, and only of blocks that may be stored. Everything here may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.build.lists import from_blocks
from sparsek.attn.mask.build.tiles import TileMask, rows_of_cells
from sparsek.attn.mask.data import Mask, MaskData
from sparsek.attn.mask.elements import (
    NOT_STORED,
    WHOLE,
    refuse_members,
    stored_cells,
    stored_entries,
    table_of,
)
from sparsek.attn.mask.lists import BY_INTERVAL, WORD, BlockLists, mask_block
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced, reads_values
from sparsek.products.formats.pattern import BlockPattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    from sparsek.attn.mask.convert.flex import MaskMod

CHUNK = 1 << 22  # elements that are read in one step
CLOSED = (
    -1e4
)  # the number nearest to 0 that means a closed pair in transformers: of old models; now the dtype's lowest
HEADS_MOST = 65535  # FlexAttention launches one row of a CUDA grid for each head


class FlashLists(NamedTuple):
    """A mask in the form that FlashAttention-4 takes; see `to_fa4`. All tensors are int32."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]
    lo: Tensor
    hi: Tensor
    table: Tensor | None
    bits: Tensor | None


@not_traced("a block mask")
def from_dense(cls: type[Mask], dense: Tensor, block: int | tuple[int, int] = 128) -> Mask:
    """Return the mask of a bool tensor, true where a query sees a key. Blocks without a true element are not stored.

    The mask is `pure` if one interval of keys per query explains all partial blocks. Other blocks keep their bits, and
    equal blocks share them. O(elements), with a sync.

    Args:
        dense: bool [q_len, kv_len], [heads, q_len, kv_len] or [batch, heads, q_len, kv_len], with any strides.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For another dtype, number of dimensions or block.

    Example:
        >>> import torch, sparsek as sk
        >>> seen = torch.ones(300, 300, dtype=torch.bool).tril()
        >>> sk.BlockMask.from_dense(seen)
        BlockMask(from_dense, 300 x 300, block 128x128, batch 1, heads 1, 6 of 9 blocks, 66.7 %, 3 partial, cpu)
    """
    if arguments.tensor("dense", dense).dtype != torch.bool or not 2 <= dense.ndim <= 4:
        raise InvalidInput(
            "a dense mask must be a bool tensor [q_len, kv_len], [heads, q_len, kv_len] or "
            f"[batch, heads, q_len, kv_len]; got {arguments.shown(dense)}"
        )
    while dense.ndim < 4:
        dense = dense[None]
    return _from_elements(cls, dense, block, lambda slab, _: slab, "from_dense")


@not_traced("a block mask")
def from_transformers(cls: type[Mask], mask: Tensor, block: int | tuple[int, int] = 128) -> Mask:
    """Return the mask of an `attention_mask` that Hugging Face transformers passes to the attention of a model.

    A query that sees no key (left padding) gets output 0 here; transformers' eager attention gives the mean of all
    values.

    Args:
        mask: [B, 1 or H, S, T]: bool, true where a query sees a key; or additive in a float dtype, 0 where it does, and
            -1e4 or less (mostly the dtype's lowest number) where it does not.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For None, which transformers passes where it relies on causality; for numbers between 0 and -1e4,
            which are a bias; and for another shape, dtype or block.

    Example:
        >>> import torch, sparsek as sk
        >>> additive = torch.zeros(1, 1, 200, 200).masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf)
        >>> sk.BlockMask.from_transformers(additive).elements
        20100
    """
    if mask is None:
        raise InvalidInput(
            "attention_mask is None, which transformers passes where is_causal is enough; "
            "use BlockMask.causal or no mask"
        )
    is_known = arguments.tensor("attention_mask", mask).dtype in (torch.bool, *dtypes.FLOATS)
    if not is_known or mask.ndim != 4:
        raise InvalidInput(
            "attention_mask must be bool or additive float [B, 1 or H, S, T], as a model's attention gets it, not a "
            f"tokenizer's [B, T]; got {arguments.shown(mask)}"
        )
    opened = _additive if mask.dtype in dtypes.FLOATS else lambda slab, _: slab
    return _from_elements(cls, mask, block, opened, "from_transformers")


def _additive(slab: Tensor, where: tuple[int, ...]) -> Tensor:
    """Where a slab [rows, T] of an additive mask is 0. `where` is the index of its first row."""
    opened = slab == 0
    strange = torch.nonzero(~(opened | (slab <= CLOSED)))
    if strange.numel():
        row, column = strange[0].tolist()
        at = (*where[:-1], where[-1] + row, column)
        raise InvalidInput(
            f"attention_mask{list(at)} is {slab[row, column].item():g}: an additive mask holds 0 where a query sees "
            f"a key and {CLOSED:g} or less where it does not; a block mask holds no biases"
        )
    return opened


def _from_elements(
    cls: type[Mask],
    dense: Tensor,
    block: int | tuple[int, int],
    opened: Callable[[Tensor, tuple[int, ...]], Tensor],
    label: str,
) -> Mask:
    """The mask of a tensor [batch, heads, q_len, kv_len]; `opened` turns slabs of its rows into bool."""
    sides = mask_block(block)
    batch, heads, q_len, kv_len = dense.shape
    made = TileMask((q_len, kv_len), sides, batch, heads, dense.device)
    step = max(CHUNK // (sides[0] * max(kv_len, 1)), 1) * sides[0]
    for b in range(batch):
        for h in range(heads):
            for q in range(0, q_len, step):
                slab = opened(dense[b, h, q : q + step], (b, h, q))
                made.add_slab(((b * heads + h) * made.tiles + q // sides[0], 0), slab)
    return made.mask(cls, label)


@reads_values("to_flex reads the lists of a mask")
def to_flex(mask: MaskData, q_heads: int | None = None) -> FlexMask:
    """Return the same mask as a FlexAttention BlockMask, for eager and compiled flex_attention on the mask's device.

    FlexAttention's lists are dense: at least eight bytes for each of the B * H * Mb * Nb blocks, stored or not, and as
    much again for its transposed lists. Its `mask_mod` reads the mask's tensors, so another mask whose tensors have the
    same sizes recompiles nothing. Waits for the device.

    Args:
        q_heads: Heads of q, a multiple of the mask's heads. Needed under GQA for a mask of the heads of k and v,
            because FlexAttention counts the heads of q.

    Raises:
        InvalidInput: If `q_heads` is no multiple of the mask's heads, for a length of 0, and for a mask by members.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.causal(1000).to_flex().shape
        (1, 1, 1000, 1000)
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    refuse_members(mask, "to_flex")
    if 0 in mask.grid:
        raise InvalidInput(f"the mask is {mask.q_len} x {mask.kv_len}; FlexAttention has no length of 0")
    repeat = _repeat(mask, q_heads)
    mask.verify(wait=True)
    lists = [part for each in (mask.partial, mask.full) for part in _padded(mask, each, mask.grid[1], repeat)]
    return FlexMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.block, mask_mod=_mask_mod(mask, repeat), seq_lengths=(mask.q_len, mask.kv_len)
    )


@reads_values("to_fa4 reads the lists of a mask")
def to_fa4(mask: MaskData, q_heads: int | None = None) -> FlashLists:
    """Return the same mask in the form that FlashAttention-4 (`flash_attn.cute`) takes.

    B and H are 1 where the mask is shared. Counts are [B, H, Mb]; indices are [B, H, Mb, w], with w the blocks of the
    longest row, at least 1, and 0 after a row's count. `lo` and `hi` are [1 or B, 1 or H, Mb * bq], and 0 beyond q_len,
    because kernels read whole tiles. A mask that is not `pure` has two more tensors: `table` [B, H, Mb, Nb], which
    holds -3 for a block that is not stored, -2 for full, -1 for one by interval, and else the index of its `bits` [n,
    bq, bk / 32]. Waits for the device.

    FlashAttention-4 compiles the rule of partial blocks into its kernel, so the caller writes it. By interval:

        @cute.jit
        def rule(b, h, q, k, seqlen_info, aux):
            lo = utils.scalar_to_ssa(aux[0][0, 0, q[0]], cutlass.Int32)
            hi = utils.scalar_to_ssa(aux[1][0, 0, q[0]], cutlass.Int32)
            return (k >= lo) & (k < hi)

        lists = mask.to_fa4()
        flash_attn_func(q, k, v, mask_mod=rule, aux_tensors=[lists.lo, lists.hi],
                        block_sparse_tensors=BlockSparseTensorsTorch(*lists[:4], block_size=lists.block_size))

    with b[0] and h[0] in place of 0 where the mask is not shared, and q, k, v [B, S, H, D]. On Hopper the block must be
    the kernel's tile: 128 x 128 up to D = 128.

    Args:
        q_heads: As in `to_flex`.

    Raises:
        InvalidInput: If `q_heads` is no multiple of the mask's heads, and for a mask by members.
    """
    refuse_members(mask, "to_fa4")
    repeat = _repeat(mask, q_heads)
    mask.verify(wait=True)
    lists = []
    for each in (mask.partial, mask.full):
        longest = int(each.counts.amax()) if mask.rows else 0
        lists += _padded(mask, each, max(longest, 1), repeat)
    lo, hi = (_whole_tiles(mask, bound, repeat) for bound in _interval(mask))
    table, bits = (None, None) if mask.pure else (table_of(mask).repeat_interleave(repeat, 1), mask.bits)
    return FlashLists(*lists, block_size=mask.block, lo=lo, hi=hi, table=table, bits=bits)


def from_pattern(cls: type[Mask], pattern: BlockPattern) -> Mask:
    """Return the mask in which a query sees every key of each stored block of a pattern. No sync.

    Args:
        pattern: A `BlockPattern` [q_len, kv_len] with blocks of 64 or 128. All batch items and heads share it.

    Raises:
        InvalidInput: For anything else, and for other blocks.

    Example:
        >>> import sparsek as sk
        >>> pattern = sk.random_bsr(512, 512, 128, density=0.5).pattern
        >>> sk.BlockMask.from_pattern(pattern).stored_blocks
        8
    """
    if not isinstance(pattern, BlockPattern):
        raise InvalidInput(
            f"from_pattern takes a BlockPattern, got {arguments.shown(pattern)}; of a BSR, its .pattern"
        )
    lists = pattern.indptr, pattern.indices
    return from_blocks(cls, *lists, *pattern.shape, block=pattern.block, device=pattern.device)


def to_pattern(mask: MaskData, head: int = 0, batch: int = 0) -> BlockPattern:
    """Return the blocks that one head of one batch item visits, in full or in part, as a `BlockPattern`.

    Waits for the device.

    Args:
        head: The head, 0 to heads - 1.
        batch: The batch item, 0 to batch - 1.

    Raises:
        InvalidInput: If the mask has no such head or batch item, and for a mask by members.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.causal(512).to_pattern().nnzb
        10
    """
    refuse_members(mask, "to_pattern")
    first, (tiles, columns) = as_row(mask, head, batch), mask.grid
    mask.verify(wait=True)
    rows = torch.arange(first, first + tiles, device=mask.device)
    lists = rows_of_cells(stored_cells(mask, rows).sort().values, tiles, columns)
    return BlockPattern.unchecked((mask.q_len, mask.kv_len), mask.block, *lists)


def as_row(mask: MaskData, head: int, batch: int) -> int:
    """The first row of a head of a batch item. InvalidInput if the mask has no such head or item."""
    head = arguments.integer("head", head, 0, mask.heads - 1)
    batch = arguments.integer("batch", batch, 0, mask.batch - 1)
    return (batch * mask.heads + head) * mask.grid[0]


def _mask_mod(mask: MaskData, repeat: int) -> MaskMod:
    """The mask as a function of positions, from its tensors; q head h uses the mask's head h // repeat.

    It holds for every block, stored or not: eager flex_attention evaluates all of them and does not read the lists.
    """
    q_len, (bq, bk), (tiles, columns) = mask.q_len, mask.block, mask.grid
    lo, hi = _interval(mask)
    per_batch = mask.heads if mask.batch > 1 else 0
    per_head = 1 if mask.heads > 1 else 0
    per_group = q_len if lo.shape[0] > 1 else 0
    rules = table_of(mask)
    needs_rules = not _is_all_of_interval(mask, rules)
    lo, hi, rules = lo.flatten(), hi.flatten(), rules.flatten()
    bits = None if mask.bits is None else mask.bits.flatten()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        group = b * per_batch + h // repeat * per_head
        at = group * per_group + q
        inside = (lo[at] <= k) & (k < hi[at])
        if not needs_rules:
            return inside
        rule = rules[(group * tiles + q // bq) * columns + k // bk]
        seen = (rule == WHOLE) | (rule == BY_INTERVAL) & inside
        if bits is not None:
            word = bits[(rule.clamp(min=0) * bq + q % bq) * (bk // WORD) + k % bk // WORD]
            seen = seen | (rule >= 0) & ((word >> k % WORD & 1) == 1)
        return seen

    return mask_mod


def _interval(mask: MaskData) -> tuple[Tensor, Tensor]:
    """lo and hi, int32 [1 or batch * heads, q_len]; for a mask without them those that admit every key."""
    if mask.lo is not None and mask.hi is not None:
        return mask.lo, mask.hi
    hi = torch.full((1, mask.q_len), mask.kv_len, dtype=torch.int32, device=mask.device)
    return torch.zeros_like(hi), hi


def _is_all_of_interval(mask: MaskData, table: Tensor) -> bool:
    """Whether each query sees exactly its interval: a row's stored blocks are one run that covers it."""
    if not mask.pure:
        return False
    lo, hi = _interval(mask)
    sees = lo < hi
    lo = _tiles(mask, torch.where(sees, lo, mask.kv_len), mask.kv_len).amin(2, keepdim=True)
    hi = _tiles(mask, torch.where(sees, hi, 0), 0).amax(2, keepdim=True)
    start = torch.arange(mask.grid[1], device=mask.device) * mask.block[1]
    needed = (start + mask.block[1] > lo) & (start < hi)
    return bool(((table != NOT_STORED).flatten(0, 1) == needed).all())


def _whole_tiles(mask: MaskData, bound: Tensor, repeat: int) -> Tensor:
    """[1 or B, 1 or H, Mb * bq] of [1 or B * H, q_len], 0 beyond q_len."""
    whole = _tiles(mask, bound, 0)
    if whole.shape[0] == 1:
        return whole.view(1, 1, -1)
    return _by_head(mask, whole.flatten(0, 1), repeat).flatten(2)


def _padded(mask: MaskData, lists: BlockLists, width: int, repeat: int) -> tuple[Tensor, Tensor]:
    """Counts [B, H, Mb] and indices [B, H, Mb, width], 0 after the counts; each head `repeat` times."""
    rows, entries = stored_entries(lists, torch.arange(mask.rows, device=mask.device))
    indices = torch.zeros(mask.rows, width, dtype=torch.int32, device=mask.device)
    indices[rows, entries - lists.starts[rows]] = lists.indices[entries]
    return _by_head(mask, lists.counts, repeat), _by_head(mask, indices, repeat)


def _by_head(mask: MaskData, rows: Tensor, repeat: int) -> Tensor:
    """[B, H * repeat, Mb, ...] from [rows, ...]."""
    return rows.view(mask.batch, mask.heads, mask.grid[0], *rows.shape[1:]).repeat_interleave(repeat, dim=1)


def _tiles(mask: MaskData, bound: Tensor, beyond: int) -> Tensor:
    """[groups, Mb, bq] of [groups, q_len], with `beyond` for the queries beyond q_len."""
    missing = mask.grid[0] * mask.block[0] - mask.q_len
    return functional.pad(bound, (0, missing), value=beyond).unflatten(1, (-1, mask.block[0]))


def _repeat(mask: MaskData, q_heads: int | None) -> int:
    """How many heads of q share a head of the mask."""
    if q_heads is None:
        return 1
    q_heads = arguments.integer("q_heads", q_heads, 1, HEADS_MOST)
    if q_heads % mask.heads:
        raise InvalidInput(f"q_heads is {q_heads}; the mask has {mask.heads} heads, which must divide it")
    return q_heads // mask.heads if mask.heads > 1 else 1
