"""Block masks from FlexAttention: of its BlockMask, and of a mask_mod. Elements are read in chunks of blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.mask.elements import TileMask
from sparsek.mask.lists import BLOCK_SIZES, Place, check_stored, mask_block

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    from sparsek.mask.mask import BlockMask

CHUNK = 1 << 22  # elements that are evaluated in one step

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Given = ParamSpec("Given")
Made = TypeVar("Made")

# Names of other libraries' arguments, and what they are here.
OTHER_NAMES = {
    "q_len": "it is called Q_LEN here, as in create_block_mask",
    "kv_len": "it is called KV_LEN here, as in create_block_mask",
    "BLOCK_SIZE": "it is called block",
    "_compile": "leave it out",
}
# In the messages of torch.vmap on code that needs one value of a tensor; the second for numpy and tolist.
NEEDS_A_VALUE = "vmap: ", "Cannot access data pointer of Tensor"


def _refusing_other_names(make: Callable[Given, Made]) -> Callable[Given, Made]:
    @wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        for name in OTHER_NAMES.keys() & kwargs.keys():
            raise InvalidInput(f"from_mask_mod has no argument {name}: {OTHER_NAMES[name]}")
        return make(*args, **kwargs)

    return made


@_refusing_other_names
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
        InvalidInput: For a function that does not take four arguments, does not return one bool tensor, or branches on
            a value; for sizes or blocks that no mask has. Other errors of `mask_mod` are raised as they are.

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
                made.add_slab((group * made.tiles + q // bq, k // bk), seen)
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
        return _called(mask_mod, b, h, q + row, k + column)

    return create_mask(at, 1, 1, *lengths, device=device)[0, 0]


def _called(mask_mod: MaskMod, *position: Tensor) -> Tensor:
    """What `mask_mod` returns under vmap. InvalidInput unless that is a bool tensor without dimensions."""
    right = "it must return one bool tensor without dimensions for a query and a key, as q_idx >= kv_idx is"
    try:
        seen: Any = mask_mod(*position)
    except RuntimeError as error:
        if str(error).startswith(NEEDS_A_VALUE):
            raise InvalidInput(
                f"mask_mod cannot run under torch.vmap; {right}, by &, | and torch.where in place of `if`, `and`, "
                "`in`, .item() and numpy"
            ) from error
        raise
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool or seen.ndim:
        found = arguments.shown(seen) if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
        raise InvalidInput(f"mask_mod returns {found}; {right}")
    return seen


@not_traced("a block mask")
def from_flex(cls: type[BlockMask], bm: FlexMask) -> BlockMask:
    """Return the mask of a FlexAttention BlockMask.

    Full blocks are taken over. `mask_mod` is evaluated under torch.vmap, as in FlexAttention, at the elements of
    partial blocks only; a block where it holds everywhere becomes full, and one where it holds nowhere is dropped.
    Where B or H of the lists is 1, it is evaluated at batch item or head 0, and the mask is shared.

    Args:
        bm: A `torch.nn.attention.flex_attention.BlockMask` with BLOCK_SIZE 64, 128 or a pair of them, for any lengths.

    Raises:
        InvalidInput: For another BLOCK_SIZE; for a BlockMask that was sliced, which has lost its `mask_mod`; and for
            lists that repeat a block or point outside.

    Source: FlexAttention, Dong et al., arXiv:2412.05496.

    Example:
        >>> import sparsek as sk
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> bm = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1000, 1000, device="cpu")
        >>> sk.BlockMask.from_flex(bm)
        BlockMask(from_flex, 1000 x 1000, block 128x128, batch 1, heads 1, 36 of 64 blocks, 56.2 %, 8 partial, cpu)
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
        made.add(cells, _values_in(made, bm.mask_mod, cells))
    return made.mask(cls, "from_flex")


def _cells(made: TileMask, counts: Tensor, indices: Tensor, name: str) -> Tensor:
    """The cells row * Nb + column of FlexAttention's lists, in any order."""
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


def _values_in(made: TileMask, mask_mod: MaskMod, cells: Tensor) -> Tensor:
    """`mask_mod` at the elements of blocks, bool [n, bq, bk]. It is not evaluated beyond the lengths."""
    from torch.nn.attention.flex_attention import create_mask

    if not cells.numel():
        return torch.empty(0, *made.block, dtype=torch.bool, device=made.device)
    queries, keys = made.positions(cells)
    queries.clamp_(max=made.q_len - 1)
    keys.clamp_(max=made.kv_len - 1)
    groups = cells // (made.columns * made.tiles)
    batch_items, heads = groups // made.heads, groups % made.heads

    def at(block: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at_row, at_column = queries[block, row], keys[block, column]
        return _called(mask_mod, batch_items[block], heads[block], at_row, at_column)

    # The index of the block takes the place of FlexAttention's batch item, and its own vmap does the rest.
    return create_mask(at, cells.numel(), 1, *made.block, device=made.device)[:, 0]
