"""Block masks from and to what others use: FlexAttention, FlashAttention-4, transformers, dense masks, block patterns.

Elements are looked at block by block, in chunks, and only where a block may be stored. Everything here may sync.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.mask.elements import TileMask, rows_of_cells
from sparsek.mask.lists import BLOCK_SIZES, BY_INTERVAL, WORD, BlockLists, Place, check_stored, mask_block
from sparsek.mask.view import NOT_STORED, WHOLE, stored_cells, stored_entries, table_of
from sparsek.matrix.padding import tiles_of
from sparsek.matrix.pattern import BlockPattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    from sparsek.mask.mask import BlockMask

CHUNK = 1 << 22  # elements that are looked at in one step
CLOSED = -1e4  # the nearest to 0 that transformers closes a pair with, in old models; now the dtype's lowest
HEADS_MOST = 65535  # rows of a CUDA grid, of which FlexAttention takes one for each head

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlashLists(NamedTuple):
    """A mask as FlashAttention-4 takes it; see `to_fa4`. All tensors are int32."""

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
def from_dense(cls: type[BlockMask], dense: Tensor, block: int | tuple[int, int] = 128) -> BlockMask:
    """The mask of a bool tensor, true where query q sees key k. Blocks with nothing in them are not stored.

    `dense` is [q_len, kv_len], [heads, q_len, kv_len] or [batch, heads, q_len, kv_len], with any strides. If for every
    query one interval of keys explains all partial blocks, the mask is `pure`. Otherwise the blocks that it does not
    explain get bits, and equal blocks share them. Raises InvalidInput for other dtypes, shapes and block sizes.
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
def from_transformers(cls: type[BlockMask], mask: Tensor, block: int | tuple[int, int] = 128) -> BlockMask:
    """The mask of an `attention_mask` that Hugging Face transformers hands to its models' attention.

    `mask` is [B, 1 or H, S, T]: bool, true where query q sees key k, or additive in a float dtype, 0 where it does and
    -1e4 or less (mostly the dtype's lowest number) where it does not. A query that sees nothing (left padding) stays
    so: its output is 0, where transformers' eager attention takes the mean of all values. Raises InvalidInput for
    anything between 0 and -1e4, which is a bias and no mask, and for None, which transformers passes where causality
    alone is meant: use BlockMask.causal, or no mask.
    """
    if mask is None:
        raise InvalidInput(
            "attention_mask is None: transformers leaves it out where `is_causal` says all; "
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
    """Where a slab [rows, T] of an additive mask is open. `where` is the index of its first row."""
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
    cls: type[BlockMask],
    dense: Tensor,
    block: int | tuple[int, int],
    opened: Callable[[Tensor, tuple[int, ...]], Tensor],
    label: str,
) -> BlockMask:
    """The mask of a tensor [batch, heads, q_len, kv_len] of which `opened` says where slabs of rows are open."""
    sides = mask_block(block)
    batch, heads, q_len, kv_len = dense.shape
    made = TileMask((q_len, kv_len), sides, batch, heads, dense.device)
    step = max(CHUNK // (sides[0] * max(kv_len, 1)), 1) * sides[0]
    for b in range(batch):
        for h in range(heads):
            for q in range(0, q_len, step):
                slab = opened(dense[b, h, q : q + step], (b, h, q))
                _add_blocks(made, ((b * heads + h) * made.tiles + q // sides[0], 0), slab)
    return made.mask(cls, label)


def _add_blocks(made: TileMask, first: tuple[int, int], slab: Tensor) -> None:
    """Add the blocks of bool [queries, keys], of which the first is in this row and column of the mask's blocks."""
    row, column = first
    blocks = tiles_of(slab, made.block)
    some, whole = blocks.any(3).any(1), blocks.all(3).all(1)
    tiles, columns = torch.nonzero(whole, as_tuple=True)
    made.add_full((row + tiles) * made.columns + column + columns)
    tiles, columns = torch.nonzero(some & ~whole, as_tuple=True)
    made.add((row + tiles) * made.columns + column + columns, blocks[tiles, :, columns])


@not_traced("a block mask")
def from_mask_mod(
    cls: type[BlockMask],
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    *,
    block: int | tuple[int, int] = 128,
    device: str | torch.device | None = None,
) -> BlockMask:
    """Return the mask of a `mask_mod` of FlexAttention, as create_block_mask does.

    The function is evaluated at every query and key under torch.vmap, in chunks of at most 4 M elements, each a few
    rows of blocks or a part of one. O(B * H * Q_LEN * KV_LEN) time; memory of a chunk and of the blocks that are
    stored. A MaskPolicy or another builder makes a mask of known form in O(Q_LEN). Waits for the device.

    Args:
        mask_mod: A function (b, h, q_idx, kv_idx) of four int64 tensors without dimensions. It returns a bool tensor
            without dimensions, true where the query sees the key. It computes with tensors: `&` and torch.where, not
            `and` and `if`.
        B: Batch items; 1 or None if all share the mask.
        H: Heads of q, or of k and v; 1 or None if all share the mask.
        Q_LEN: Queries.
        KV_LEN: Keys.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.
        device: Where the mask is made; torch's default device for None. Tensors that `mask_mod` reads are there too.

    Returns:
        A mask of B batch items and H heads. It does not read `mask_mod` again.

    Raises:
        InvalidInput: For a function that does not take four arguments or does not return bool, and for sizes or blocks
            that no mask has. Errors inside of `mask_mod` are raised as they are.

    Source: the programming model of FlexAttention, Dong et al., arXiv:2412.05496.

    Example:
        >>> import sparsek as sk
        >>> def prefix_lm(b, h, q_idx, kv_idx):
        ...     return (kv_idx <= q_idx) | (kv_idx < 100)
        >>> sk.BlockMask.from_mask_mod(prefix_lm, None, None, 512, 512, device="cpu")
        BlockMask(from_mask_mod, 512 x 512, block 128x128, batch 1, heads 1, 10 of 16 blocks, 62.5 %, 4 partial, cpu)
    """
    _check_mask_mod(mask_mod)
    place = Place.of(q_len=Q_LEN, kv_len=KV_LEN, block=block, device=device)
    batch = 1 if B is None else arguments.integer("B", B, 1)
    heads = 1 if H is None else arguments.integer("H", H, 1)
    check_stored(batch * heads * place.grid[0])
    made = TileMask((place.q_len, place.kv_len), place.block, batch, heads, place.device)
    bq, bk = made.block
    width = min(max(CHUNK // bq // bk, 1), max(made.columns, 1)) * bk
    height = max(CHUNK // width // bq, 1) * bq
    for group in range(batch * heads):
        for q in range(0, made.q_len, height):
            for k in range(0, made.kv_len, width):
                lengths = min(height, made.q_len - q), min(width, made.kv_len - k)
                seen = _evaluated(mask_mod, (group // heads, group % heads, q, k), lengths, made.device)
                _add_blocks(made, (group * made.tiles + q // bq, k // bk), seen)
    return made.mask(cls, "from_mask_mod")


def _check_mask_mod(mask_mod: Any) -> None:
    """InvalidInput for anything but a function of four arguments, as far as its signature is known."""
    if not callable(mask_mod):
        raise InvalidInput(
            f"mask_mod is {arguments.shown(mask_mod)}; it must be a function (b, h, q_idx, kv_idx) that returns bool"
        )
    try:
        found = inspect.signature(mask_mod)
    except ValueError:  # some functions written in C have none
        return
    try:
        found.bind(*range(4))
    except TypeError as error:
        raise InvalidInput(
            f"mask_mod takes {found}; it must take (b, h, q_idx, kv_idx), and not a score as a score_mod does"
        ) from error


def _evaluated(
    mask_mod: MaskMod, first: tuple[int, int, int, int], lengths: tuple[int, int], device: torch.device
) -> Tensor:
    """A `mask_mod` at one batch item and head, for `lengths` queries and keys from `first` on: bool [queries, keys]."""
    from torch.nn.attention.flex_attention import create_mask

    b, h, q, k = torch.tensor(first, dtype=torch.int64, device="cpu").to(device)

    def at(_b: Tensor, _h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask_mod(b, h, q + row, k + column)

    seen = create_mask(at, 1, 1, *lengths, device=device)[0, 0]
    if seen.dtype != torch.bool:
        raise InvalidInput(f"mask_mod returns {seen.dtype}; it must return bool, as q_idx >= kv_idx does")
    return seen


@not_traced("a block mask")
def from_flex(cls: type[BlockMask], bm: FlexMask) -> BlockMask:
    """The mask of a FlexAttention BlockMask (`torch.nn.attention.flex_attention`) with blocks of 64 or 128.

    Full blocks are taken over. `mask_mod` is evaluated at the elements of the partial blocks and nowhere else, under
    torch.vmap as FlexAttention does it; a block where it turns out to hold everywhere or nowhere becomes full or goes.
    Lists with B = 1 or H = 1 are shared, and their `mask_mod` is asked for batch item or head 0 only. The lengths may
    be ragged. Raises InvalidInput for other block sizes, for a sliced BlockMask, which has lost its `mask_mod`, and
    for lists that repeat blocks or point outside.
    """
    from torch.nn.attention import flex_attention

    if not isinstance(bm, flex_attention.BlockMask):
        raise InvalidInput(f"from_flex takes a FlexAttention BlockMask, got {arguments.shown(bm)}")
    if any(side not in BLOCK_SIZES for side in bm.BLOCK_SIZE):
        raise InvalidInput(
            f"BLOCK_SIZE is {tuple(bm.BLOCK_SIZE)}; blocks have sides of 64 or 128: "
            "create_block_mask(..., BLOCK_SIZE=128), and no mask at all where every query sees every key"
        )
    if bm.kv_num_blocks.ndim != 3:
        raise InvalidInput(
            f"kv_num_blocks is {list(bm.kv_num_blocks.shape)}; it must be [B, H, query tiles]: "
            "index a BlockMask with slices"
        )
    batch, heads, _ = bm.kv_num_blocks.shape
    q_len, kv_len = bm.seq_lengths
    made = TileMask((q_len, kv_len), mask_block(bm.BLOCK_SIZE), batch, heads, bm.kv_num_blocks.device)
    partial = _cells(made, bm.kv_num_blocks, bm.kv_indices, "kv")
    full = partial[:0]
    if bm.full_kv_num_blocks is not None and bm.full_kv_indices is not None:
        full = _cells(made, bm.full_kv_num_blocks, bm.full_kv_indices, "full_kv")
    _refuse_repeats(made, torch.cat((partial, full)))
    if partial.numel() and bm.mask_mod is getattr(flex_attention, "_sliced_mask_mod_error", None):
        raise InvalidInput(
            "a sliced BlockMask has lost its mask_mod; set it again from the BlockMask that was sliced"
        )
    reaches_beyond = (full % made.columns + 1) * made.block[1] > kv_len
    made.add_full(full[~reaches_beyond])
    step = CHUNK // (made.block[0] * made.block[1])
    for cells in full[reaches_beyond].split(step):
        made.add(cells, torch.ones(cells.numel(), *made.block, dtype=torch.bool, device=made.device))
    for cells in partial.split(step):
        made.add(cells, _asked(made, bm.mask_mod, cells))
    return made.mask(cls, "from_flex")


def _cells(made: TileMask, counts: Tensor, indices: Tensor, name: str) -> Tensor:
    """Where the blocks of FlexAttention's lists are: row * Nb + column, in any order."""
    shape = (made.batch, made.heads, made.tiles)
    if tuple(counts.shape) != shape or tuple(indices.shape[:-1]) != shape:
        raise InvalidInput(
            f"{name}_num_blocks is {list(counts.shape)} and {name}_indices {list(indices.shape)}; "
            f"{made.q_len} queries in tiles of {made.block[0]} need {list(shape)} and {[*shape, 'blocks']}"
        )
    counts, indices = counts.flatten(), indices.flatten(0, 2)
    longest = indices.shape[1]
    if bool((counts > longest).any()):
        raise InvalidInput(
            f"{name}_num_blocks counts {counts.max()} blocks in a row; {name}_indices holds {longest}"
        )
    rows, slots = torch.nonzero(torch.arange(longest, device=made.device) < counts[:, None], as_tuple=True)
    columns = indices[rows, slots].long()
    wrong = torch.nonzero((columns < 0) | (columns >= made.columns))
    if wrong.numel():
        at = wrong[0, 0]
        raise InvalidInput(
            f"{name}_indices lists block {columns[at]} for row {rows[at]} of {made.rows}; "
            f"{made.kv_len} keys in blocks of {made.block[1]} are blocks 0 to {made.columns - 1}"
        )
    return rows * made.columns + columns


def _refuse_repeats(made: TileMask, cells: Tensor) -> None:
    ordered = cells.sort().values
    again = torch.nonzero(ordered[1:] == ordered[:-1])
    if again.numel():
        cell = int(ordered[again[0, 0]])
        row, column = divmod(cell, made.columns)
        raise InvalidInput(
            f"row {row} of {made.rows} lists block {column} twice; a block is partial or full, once"
        )


def _asked(made: TileMask, mask_mod: MaskMod, cells: Tensor) -> Tensor:
    """What `mask_mod` says of the elements of blocks, bool [n, bq, bk]. It is not asked beyond the lengths."""
    from torch.nn.attention.flex_attention import create_mask

    if not cells.numel():
        return torch.empty(0, *made.block, dtype=torch.bool, device=made.device)
    queries, keys = made.positions(cells)
    queries.clamp_(max=made.q_len - 1)
    keys.clamp_(max=made.kv_len - 1)
    groups = cells // (made.columns * made.tiles)
    batch_items, heads = groups // made.heads, groups % made.heads

    def at(block: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask_mod(batch_items[block], heads[block], queries[block, row], keys[block, column])

    # The number of the block stands where FlexAttention counts batch items, so that its own vmap does the rest.
    return create_mask(at, cells.numel(), 1, *made.block, device=made.device)[:, 0].bool()


def to_flex(mask: BlockMask, q_heads: int | None = None) -> FlexMask:
    """The same mask as a FlexAttention BlockMask, for eager and compiled flex_attention on the mask's device.

    FlexAttention's lists are dense: eight bytes or more for each of the B * H * Mb * Nb blocks, stored or not, and its
    transposed lists as much again. A mask whose `heads` are those of k and v under GQA needs `q_heads`, since
    FlexAttention counts the heads of q. `mask_mod` reads the mask's tensors, so that another mask whose tensors have
    the same sizes makes nothing compile again. Raises InvalidInput if `q_heads` is not a multiple of the mask's heads,
    and for a length of 0.
    """
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    if 0 in mask.grid:
        raise InvalidInput(f"the mask is {mask.q_len} x {mask.kv_len}; FlexAttention knows no length of 0")
    repeat = _repeat(mask, q_heads)
    mask.verify(wait=True)
    lists = [part for each in (mask.partial, mask.full) for part in _padded(mask, each, mask.grid[1], repeat)]
    return FlexMask.from_kv_blocks(
        *lists, BLOCK_SIZE=mask.block, mask_mod=_mask_mod(mask, repeat), seq_lengths=(mask.q_len, mask.kv_len)
    )


def to_fa4(mask: BlockMask, q_heads: int | None = None) -> FlashLists:
    """The same mask as FlashAttention-4 (`flash_attn.cute`) takes it: compact lists, and tensors for its rule.

    B and H are 1 where the mask is shared; `q_heads` as in `to_flex`. Counts are [B, H, Mb]; indices are [B, H, Mb, w]
    with w blocks of the longest row, at least 1, and 0 behind a row's count. `lo` and `hi` are [1 or B, 1 or H,
    Mb * bq] and 0 beyond q_len, since kernels read whole tiles. A mask that is not `pure` has two more: `table`
    [B, H, Mb, Nb] holds -3 for a block that is not stored, -2 for full, -1 for one that goes by interval, and for any
    other the number of its `bits` [n, bq, bk / 32].

    FlashAttention-4 compiles the rule of partial blocks into its kernel, so the caller writes it. By interval:

        @cute.jit
        def rule(b, h, q, k, seqlen_info, aux):
            lo = utils.scalar_to_ssa(aux[0][0, 0, q[0]], cutlass.Int32)
            hi = utils.scalar_to_ssa(aux[1][0, 0, q[0]], cutlass.Int32)
            return (k >= lo) & (k < hi)

        lists = mask.to_fa4()
        flash_attn_func(q, k, v, mask_mod=rule, aux_tensors=[lists.lo, lists.hi],
                        block_sparse_tensors=BlockSparseTensorsTorch(*lists[:4], block_size=lists.block_size))

    with b[0] and h[0] for 0 where the mask is not shared, and q, k, v [B, S, H, D]. On Hopper the block must be the
    kernel's tile: 128 x 128 up to D = 128. Raises InvalidInput if `q_heads` is not a multiple of the mask's heads.
    """
    repeat = _repeat(mask, q_heads)
    mask.verify(wait=True)
    lists = []
    for each in (mask.partial, mask.full):
        longest = int(each.counts.amax()) if mask.rows else 0
        lists += _padded(mask, each, max(longest, 1), repeat)
    lo, hi = (_whole_tiles(mask, bound, repeat) for bound in _interval(mask))
    table, bits = (None, None) if mask.pure else (table_of(mask).repeat_interleave(repeat, 1), mask.bits)
    return FlashLists(*lists, block_size=mask.block, lo=lo, hi=hi, table=table, bits=bits)


def from_pattern(cls: type[BlockMask], pattern: BlockPattern) -> BlockMask:
    """The mask that sees all of each stored block of a pattern [q_len, kv_len]; blocks of 64 or 128. No sync.

    All batch items and heads share it. `& BlockMask.causal(...)` takes the upper triangle away.
    """
    if not isinstance(pattern, BlockPattern):
        raise InvalidInput(
            f"from_pattern takes a BlockPattern, got {arguments.shown(pattern)}; of a BSR, its .pattern"
        )
    q_len, kv_len = pattern.shape
    return cls.from_blocks(
        pattern.indptr,
        pattern.indices,
        q_len=q_len,
        kv_len=kv_len,
        block=pattern.block,
        device=pattern.device,
    )


def to_pattern(mask: BlockMask, head: int = 0, batch: int = 0) -> BlockPattern:
    """Which blocks one head of one batch item visits, in full or in part, as a pattern [q_len, kv_len]. Syncs."""
    first, (tiles, columns) = as_row(mask, head, batch), mask.grid
    mask.verify(wait=True)
    rows = torch.arange(first, first + tiles, device=mask.device)
    lists = rows_of_cells(stored_cells(mask, rows).sort().values, tiles, columns)
    return BlockPattern.unchecked((mask.q_len, mask.kv_len), mask.block, *lists)


def as_row(mask: BlockMask, head: int, batch: int) -> int:
    """The first row of a head of a batch item. InvalidInput if the mask has no such head or item."""
    head = arguments.integer("head", head, 0, mask.heads - 1)
    batch = arguments.integer("batch", batch, 0, mask.batch - 1)
    return (batch * mask.heads + head) * mask.grid[0]


def _mask_mod(mask: BlockMask, repeat: int) -> MaskMod:
    """The mask as a function of positions, from its tensors; q head h uses the mask's head h // repeat.

    It holds for every block, stored or not: eager flex_attention asks for all of them and does not look at the lists.
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


def _interval(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """lo and hi, int32 [1 or batch * heads, q_len]; a mask without them admits every key."""
    if mask.lo is not None and mask.hi is not None:
        return mask.lo, mask.hi
    hi = torch.full((1, mask.q_len), mask.kv_len, dtype=torch.int32, device=mask.device)
    return torch.zeros_like(hi), hi


def _is_all_of_interval(mask: BlockMask, table: Tensor) -> bool:
    """Whether every query sees exactly its interval: the stored blocks of a row are one run, and all that is needed."""
    if not mask.pure:
        return False
    lo, hi = _interval(mask)
    sees = lo < hi
    lo = _tiles(mask, torch.where(sees, lo, mask.kv_len), mask.kv_len).amin(2, keepdim=True)
    hi = _tiles(mask, torch.where(sees, hi, 0), 0).amax(2, keepdim=True)
    start = torch.arange(mask.grid[1], device=mask.device) * mask.block[1]
    needed = (start + mask.block[1] > lo) & (start < hi)
    return bool(((table != NOT_STORED).flatten(0, 1) == needed).all())


def _whole_tiles(mask: BlockMask, bound: Tensor, repeat: int) -> Tensor:
    """[1 or B, 1 or H, Mb * bq] of [1 or B * H, q_len], 0 beyond q_len."""
    whole = _tiles(mask, bound, 0)
    if whole.shape[0] == 1:
        return whole.view(1, 1, -1)
    return _by_head(mask, whole.flatten(0, 1), repeat).flatten(2)


def _padded(mask: BlockMask, lists: BlockLists, width: int, repeat: int) -> tuple[Tensor, Tensor]:
    """Counts [B, H, Mb] and indices [B, H, Mb, width], 0 behind the counts; each head `repeat` times."""
    rows, entries = stored_entries(lists, torch.arange(mask.rows, device=mask.device))
    indices = torch.zeros(mask.rows, width, dtype=torch.int32, device=mask.device)
    indices[rows, entries - lists.starts[rows]] = lists.indices[entries]
    return _by_head(mask, lists.counts, repeat), _by_head(mask, indices, repeat)


def _by_head(mask: BlockMask, rows: Tensor, repeat: int) -> Tensor:
    """[B, H * repeat, Mb, ...] from [rows, ...]."""
    return rows.view(mask.batch, mask.heads, mask.grid[0], *rows.shape[1:]).repeat_interleave(repeat, dim=1)


def _tiles(mask: BlockMask, bound: Tensor, beyond: int) -> Tensor:
    """[groups, Mb, bq] of [groups, q_len], with a number for the queries beyond q_len."""
    missing = mask.grid[0] * mask.block[0] - mask.q_len
    return functional.pad(bound, (0, missing), value=beyond).unflatten(1, (-1, mask.block[0]))


def _repeat(mask: BlockMask, q_heads: int | None) -> int:
    """How many heads of q share a head of the mask."""
    if q_heads is None:
        return 1
    if arguments.integer("q_heads", q_heads, 1, HEADS_MOST) % mask.heads:
        raise InvalidInput(f"q_heads is {q_heads}; the mask has {mask.heads} heads, which must divide it")
    return q_heads // mask.heads if mask.heads > 1 else 1
