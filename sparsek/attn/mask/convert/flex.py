"""Block masks from FlexAttention: of its BlockMask, and of a mask_mod. Elements are read in chunks of blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsek.attn.mask.build.tiles import TileMask
from sparsek.attn.mask.convert.evaluate import (
    BlockVisibility,
    Classes,
    Evaluation,
    QueryWindow,
    classified,
    seen_in,
    seen_on_cpu,
)
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.lists import BLOCK_SIZES, Place, check_stored, mask_block
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_has_values, not_traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


CHUNK = 1 << 20  # elements that are evaluated in one step: few enough for a CPU's cache
BIG_CHUNK = 1 << 26  # in one step of a GPU, or of compiled code, which holds no element
FUNCTIONS = 256  # that may be compiled in one process

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Given = ParamSpec("Given")
Made = TypeVar("Made")

# Names of other libraries' arguments, and what they are here.
OTHER_NAMES = {
    "q_len": "it is called Q_LEN here, as in create_block_mask",
    "kv_len": "it is called KV_LEN here, as in create_block_mask",
    "BLOCK_SIZE": "it is called block",
    "_compile": "it is called compiled",
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
    cls: type[Mask],
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    *,
    block: int | tuple[int, int] = 128,
    device: str | torch.device | None = None,
    compiled: bool = False,
) -> Mask:
    """Return the mask of a `mask_mod` of FlexAttention, as create_block_mask does.

    The function is evaluated at every query and key under torch.vmap, in chunks, each a few rows of blocks or a part of
    one. O(B * H * Q_LEN * KV_LEN) time; memory of a chunk, a byte for each block, and the blocks that are stored. A
    MaskPolicy or another builder makes a mask of known form in O(Q_LEN). Waits for the device, with `compiled` once.

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
        compiled: Whether torch.compile makes kernels of the function, which keep no element in memory. That takes
            seconds for each new function, and pays from about 10^9 elements on, or for masks made again and again.

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
    compiled = arguments.flag("compiled", compiled)
    check_stored(batch * heads * place.grid[0])
    on_cpu = place.device.type == "cpu"
    evaluation = Evaluation(place, batch, heads, CHUNK if on_cpu and not compiled else BIG_CHUNK)
    lengths = place.q_len, place.kv_len
    if compiled and all(lengths):  # a wrong function is refused here, in the usual words
        zero = evaluation.number[0]
        _values(mask_mod, QueryWindow(zero, zero, zero, zero), (1, 1), lengths)
    seen = partial(_seen, of_blocks=seen_on_cpu) if on_cpu else _seen
    by = _compiled() if compiled else _Steps(seen, classified, _values_at)

    def look(window: QueryWindow, queries: int, start: Tensor) -> BlockVisibility:
        return by.seen(mask_mod, window, queries, start, lengths, place.block[1])

    def look_at(batch_items: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return by.values_at(mask_mod, batch_items, heads, queries, keys)

    found = evaluation.classes(look, by.classify)
    return evaluation.mask(cls, found, look_at, "from_mask_mod", share=not compiled)


class _Steps(NamedTuple):
    """The steps of a evaluation, as they are or compiled."""

    seen: Callable[..., BlockVisibility]
    classify: Callable[..., Classes]
    values_at: Callable[..., Tensor]


@lru_cache(maxsize=1)
def _compiled() -> _Steps:
    """Each step as one kernel, by torch.compile, for every function anew."""
    return _Steps(_compiled_for_any(_seen), _compiled_for_any(classified), _compiled_for_any(_values_at))


def _compiled_for_any(step: Callable[Given, Made]) -> Callable[Given, Made]:
    """A compiled step. Each mask_mod compiles it once; torch compiles only a few by default."""
    import torch._dynamo

    compiled = torch.compile(step, fullgraph=True, dynamic=True)

    def run(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with torch._dynamo.config.patch(recompile_limit=FUNCTIONS, accumulated_recompile_limit=8 * FUNCTIONS):
            return compiled(*args, **kwargs)

    return run


def _seen(
    mask_mod: MaskMod,
    window: QueryWindow,
    queries: int,
    start: Tensor,
    lengths: tuple[int, int],
    bk: int,
    of_blocks: Callable[[Tensor, Tensor], BlockVisibility] = seen_in,
) -> BlockVisibility:
    blocks = len(start)
    values = _values(mask_mod, window, (queries, blocks * bk), lengths)
    return of_blocks(values.view(queries, blocks, bk), start)


def _check_mask_mod(mask_mod: Any) -> None:
    """InvalidInput for anything but a function of four arguments, as far as its signature is known."""
    if not callable(mask_mod) or isinstance(mask_mod, type):
        raise InvalidInput(
            f"mask_mod is {arguments.shown(mask_mod)}; it must be a function (b, h, q_idx, kv_idx) that returns bool"
        )
    try:
        found = inspect.signature(mask_mod.forward if isinstance(mask_mod, torch.nn.Module) else mask_mod)
    except ValueError:  # some functions written in C have none
        return
    try:
        found.bind(*range(4))
    except TypeError as error:
        raise InvalidInput(
            f"mask_mod takes {found}; it must take (b, h, q_idx, kv_idx), and not a score as a score_mod does"
        ) from error


def _values(
    mask_mod: MaskMod, window: QueryWindow, shape: tuple[int, int], lengths: tuple[int, int]
) -> Tensor:
    """A `mask_mod` at one batch item and head, bool [queries, keys]; False for keys beyond the lengths.

    It is not evaluated beyond them: at the last query and key instead.
    """
    b, h, q, k = window
    query, key = (first + torch.arange(n, device=q.device) for first, n in zip((q, k), shape, strict=True))
    last_query, last_key = (length - 1 for length in lengths)
    with _index_mode():
        rows = torch.vmap(partial(_called, mask_mod), (None, None, None, 0))
        seen = torch.vmap(rows, (None, None, 0, None))(
            b, h, query.clamp(max=last_query), key.clamp(max=last_key)
        )
    return seen & (key <= last_key)


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
def from_flex(cls: type[Mask], bm: FlexMask) -> Mask:
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
    check_has_values("a block mask follows values", "pass plain tensors", bm.kv_num_blocks, bm.kv_indices)
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
    if not cells.numel():
        return torch.empty(0, *made.block, dtype=torch.bool, device=made.device)
    queries, keys = made.positions(cells)
    queries.clamp_(max=made.q_len - 1)
    keys.clamp_(max=made.kv_len - 1)
    groups = cells // (made.columns * made.tiles)
    return _values_at(mask_mod, groups // made.heads, groups % made.heads, queries, keys)


def _values_at(
    mask_mod: MaskMod, batch_items: Tensor, heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """`mask_mod` at the queries [n, bq] and keys [n, bk] of blocks, bool [n, bq, bk]."""
    with _index_mode():
        rows = torch.vmap(partial(_called, mask_mod), (None, None, None, 0))
        blocks = torch.vmap(rows, (None, None, 0, None))
        return torch.vmap(blocks)(batch_items, heads, queries, keys)


class _IndexByTensors(TorchFunctionMode):
    """Lets a function under torch.vmap index a tensor by its positions, as in `document[q_idx]`.

    Tensor.__getitem__ would ask for the values of indices without dimensions. As FlexAttention has it; its own needs
    torch._dynamo, whose import takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(each, Tensor) for each in index):
                return torch.ops.aten.index(args[0], index)
        return func(*args, **(kwargs or {}))


def _index_mode() -> AbstractContextManager[Any]:
    """Tensors as indices, for this code and for torch.compile, which knows only torch's own mode."""
    if not torch.compiler.is_compiling():
        return _IndexByTensors()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
