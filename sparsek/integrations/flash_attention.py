"""FlashAttention-4's `flash_attn_func` with block-sparse lists, and `flash_attn_varlen_func`, on SparseK's kernels.

    from sparsek.integrations.flash_attention import BlockSparseTensorsTorch, flash_attn_func, flash_attn_varlen_func
    # was: from flash_attn.cute.interface, flash_attn.cute.block_sparsity

A `mask_mod` is a torch function (b, h, q_idx, kv_idx), as FlexAttention has it, and not one of the CuTe DSL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import Window
from sparsek.attn.mask.build.structured import of_window
from sparsek.attn.mask.cache import kept_mask
from sparsek.attn.mask.convert.argument import kept_conversion
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.recorded import of_options
from sparsek.attn.mask.rule import MaskPolicy, packed_layout
from sparsek.attn.ops.attention import attention
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.integrations.foreign_options import (
    absent,
    check_operands,
    check_shape,
    check_values,
    cut_side,
    ints_on,
    readable,
    refusing,
    require_neutral,
)

BLOCK = (128, 128)
NO_SCORES = (None, "attention changes scores by softcap and learnable_sink only")
BY_CLOSURE = ((), "mask_mod reads tensors and numbers by its closure")
IN_PAGES = "call sparsek.attention_paged, which takes lengths and tables of pages on the device"
# Of FlashAttention-2 and 3.
OLDER: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "attention drops no weights"),
    "alibi_slopes": (None, "call sparsek.attention, which has alibi_slopes"),
    "return_attn_probs": (False, "pass return_lse=True for the lse"),
    "attention_chunk": (0, "pass block_sparse_tensors"),
    "sm_margin": (0, "leave it out"),
    "fa_version": (4, "leave it out"),
}
REFUSED: dict[str, tuple[Any, str]] = {
    **OLDER,
    "qv": (None, ""),
    "gather_kv_indices": (None, ""),
    **dict.fromkeys(("score_mod", "score_mod_bwd"), NO_SCORES),
    **dict.fromkeys(("aux_tensors", "aux_scalars"), BY_CLOSURE),
}
REFUSED_PACKED: dict[str, tuple[Any, str]] = {
    **OLDER,
    "score_mod": NO_SCORES,
    "aux_tensors": BY_CLOSURE,
    **dict.fromkeys(("mask_mod", "block_sparse_tensors"), (None, "call flash_attn_func for each sequence")),
    **dict.fromkeys(
        ("seqused_q", "seqused_k", "page_table", "block_table", "leftpad_k", "k_new", "v_new"),
        (None, IN_PAGES),
    ),
}

__getattr__ = absent(
    __name__,
    _flash_attn_fwd="call flash_attn_func(..., return_lse=True)",
    _flash_attn_bwd="call backward on the result of flash_attn_func, whose gradients SparseK makes",
    flash_attn_combine="call sparsek.merge_attention, which merges two results and their lse",
    flash_attn_with_kvcache=IN_PAGES,
    compute_block_sparsity="make a mask by sparsek.BlockMask.from_mask_mod, and call sparsek.attention",
    flash_attn_qkvpacked_func="call flash_attn_func(*qkv.unbind(2))",
    flash_attn_kvpacked_func="call flash_attn_func(q, *kv.unbind(2))",
)


class BlockSparseTensorsTorch(NamedTuple):
    """Lists of key blocks for each query tile, as FlashAttention-4 takes them.

    Attributes:
        mask_block_cnt: int32 [1 or B, 1 or H, Mb]: how many entries of mask_block_idx count.
        mask_block_idx: int32 [1 or B, 1 or H, Mb, n]: key blocks that `mask_mod` decides, in any order, none twice.
        full_block_cnt: int32 [1 or B, 1 or H, Mb] or None: the same of full_block_idx.
        full_block_idx: int32 [1 or B, 1 or H, Mb, n] or None: key blocks whose keys are all seen.
        cu_total_m_blocks: Must be None: it is for packed sequences.
        cu_block_idx_offsets: Must be None.
        block_size: (queries, keys) of a block, multiples of 64; (128, 128) for None.
        dq_write_order: Not read: gradients have a fixed order without it.
        dq_write_order_full: Not read.
        spt: Not read.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


@refusing("flash_attn_func", **REFUSED)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return attention over the listed blocks, or over all keys, in the layout [B, S, H, D].

    Without `mask_mod` the lists of partial blocks count as full ones, and neither the mask nor its plan waits for a
    GPU. With it, `mask_mod` is evaluated at the elements of partial blocks, or of all blocks without lists. That waits
    for the device, and the mask is kept as long as mask_block_idx lives and nothing that was read has changed;
    a write through `.data` is not seen.

    Args:
        q: [B, S, Hq, D].
        k: [B, T, Hkv, D]. Hq is a multiple of Hkv.
        v: [B, T, Hkv, Dv].
        qv: Must be None.
        gather_kv_indices: Must be None.
        softmax_scale: The factor of the scores; D**-0.5 for None.
        causal: Whether query i sees no key after i + T - S. Ignored with mask_mod, as in the original.
        window_size: (left, right) keys around a query's position; None or -1 is no bound. Ignored with mask_mod.
        learnable_sink: [Hq], float32 or q's dtype: a score of each head that takes part in the softmax without a value,
            with a gradient.
        softcap: Scores become softcap * tanh(score / softcap); 0 for none.
        num_splits: Not read: the plan cuts long rows.
        pack_gqa: Not read.
        deterministic: As in `sparsek.attention`.
        score_mod: Must be None.
        score_mod_bwd: Must be None.
        mask_mod: A torch function (b, h, q_idx, kv_idx) of tensors without dims that returns one bool tensor.
        aux_tensors: Must be None: `mask_mod` reads tensors by its closure.
        aux_scalars: Must be None.
        block_sparse_tensors: The lists; every block for None. An lse or a gradient needs no others.
        block_sparse_tensors_bwd: Not read: the backward pass visits the blocks of block_sparse_tensors.
        return_lse: Whether to return the lse, float32 [B, Hq, S], in place of None.

    Returns:
        (out, lse): out [B, S, Hq, Dv], 0 where a query sees no key, with gradients for q, k, v and the sinks.

    Raises:
        InvalidInput: For options that SparseK does not have, lists that do not fit, and a mask_mod of the CuTe DSL.

    Example:
        >>> import torch
        >>> from sparsek.integrations.flash_attention import BlockSparseTensorsTorch, flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 256, 2, 64).unbind()
        >>> counts = torch.ones(1, 1, 2, dtype=torch.int32)
        >>> lists = BlockSparseTensorsTorch(counts, torch.tensor([[[[0], [1]]]], dtype=torch.int32))
        >>> flash_attn_func(q, k, v, block_sparse_tensors=lists)[0].shape
        torch.Size([1, 256, 2, 64])
    """
    check_operands(q, k, v, "[B, S, H, D]")
    options = _options(q, causal, return_lse, learnable_sink, softcap, softmax_scale, deterministic)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask_mod is not None:
        _check_torch(mask_mod)
        mask = _evaluated(q, k, mask_mod, block_sparse_tensors)
    else:
        window = window_bounds(window_size, causal)
        if block_sparse_tensors is None:
            mask = _near(q, k, window)
        elif window in (ALL, CAUSAL):
            mask = _listed(q, k, block_sparse_tensors, window == CAUSAL)
        else:
            raise InvalidInput(
                "flash_attn_func takes window_size or block_sparse_tensors, as the original; give one"
            )
    out, lse = attention(q, k, v, mask, **options)
    return out.transpose(1, 2), lse if return_lse else None


@refusing("flash_attn_varlen_func", **REFUSED_PACKED)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: list[Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return attention of packed sequences, each by itself, as `sparsek.attention_varlen`.

    cu_seqlens on a GPU are read with one wait, once for a tensor and again after a write to it.

    Args:
        q: [total_q, Hq, D], one sequence after the other.
        k: [total_k, Hkv, D]. Hq is a multiple of Hkv.
        v: [total_k, Hkv, Dv].
        cu_seqlens_q: int32 [sequences + 1]: 0, then the end of each sequence.
        cu_seqlens_k: The same for k and v. The last query of a sequence stands at its last key.
        max_seqlen_q: Not read: the lengths follow from cu_seqlens_q.
        max_seqlen_k: Not read.
        seqused_q: Must be None.
        seqused_k: Must be None.
        page_table: Must be None: `sparsek.attention_paged` reads pages.
        softmax_scale: The factor of the scores; D**-0.5 for None.
        causal: Whether a query sees no key after its own.
        window_size: (left, right) keys around a query's position; None or -1 is no bound.
        learnable_sink: [Hq], as in flash_attn_func.
        softcap: Scores become softcap * tanh(score / softcap); 0 for none.
        num_splits: Not read.
        pack_gqa: Not read.
        deterministic: As in `sparsek.attention`.
        score_mod: Must be None.
        mask_mod: Must be None.
        block_sparse_tensors: Must be None.
        aux_tensors: Must be None.
        return_lse: Whether to return the lse, float32 [Hq, total_q], in place of None.

    Returns:
        (out, lse): out [total_q, Hq, Dv], 0 where a query sees no key, with gradients for q, k, v and the sinks.

    Raises:
        InvalidInput: For options that SparseK does not have, and for lengths that do not fit.

    Example:
        >>> import torch
        >>> from sparsek.integrations.flash_attention import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 300, 2, 64).unbind()
        >>> ends = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, ends, ends, 200, 200, causal=True)[0].shape
        torch.Size([300, 2, 64])
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise InvalidInput(
            "cu_seqlens_q or cu_seqlens_k is None; give both, or call flash_attn_func for [B, S, H, D]"
        )
    check_operands(q, k, v, "[total, H, D]")
    options = _options(q, causal, return_lse, learnable_sink, softcap, softmax_scale, deterministic)
    left, right = window = window_bounds(window_size, causal)
    mask: Any = MaskPolicy(causal=window == CAUSAL)
    if left is not None and right in (0, left):
        mask = MaskPolicy(window=left + 1, causal=right == 0)
    elif window not in (ALL, CAUSAL):
        layout = packed_layout(cu_seqlens_q, cu_seqlens_k, (q.shape[0], k.shape[0]))
        near = layout._replace(near=_sides(left, right))
        mask = mask.visible_in(near, q.device).mask_for(*(x.transpose(0, 1)[None] for x in (q, k)))
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, mask, **options)
    return out, lse if return_lse else None


def _options(
    q: Tensor, causal: Any, return_lse: Any, sink: Any, softcap: Any, scale: Any, deterministic: Any
) -> dict[str, Any]:
    """Options of q [..., H, D], checked, by the names that SparseK has for them."""
    arguments.flag("causal", causal)
    arguments.flag("return_lse", return_lse)
    if sink is not None:
        arguments.tensor("learnable_sink", sink, {torch.float32, q.dtype})
        check_shape("learnable_sink", sink, (q.shape[-2],), "a score of each head of q")
    softcap = 0.0 if softcap is None else softcap
    return {
        "scale": scale, "softcap": softcap, "sink_logits": sink, "deterministic": deterministic, "return_lse": True
    }  # fmt: skip


def _sides(left: int | None, right: int | None) -> Window:
    return Window(None if left is None else left + 1, None if right is None else right + 1)


ALL, CAUSAL = (None, None), (None, 0)


def window_bounds(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) keys that a query sees beside that at its position; None for no bound."""
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise InvalidInput(f"window_size is {arguments.shown(window_size)}; it must be (left, right)")
    unbound = [n is None or (isinstance(n, int) and n == -1) for n in window_size]
    left, right = (
        None if none else arguments.integer("window_size", n)
        for n, none in zip(window_size, unbound, strict=True)
    )
    return left, 0 if causal else right


def _near(q: Tensor, k: Tensor, window: tuple[int | None, int | None]) -> BlockMask | None:
    """The mask of a window, aligned to the last query and key; None for all keys. The same object each time."""
    if window == ALL:
        return None
    q_len, kv_len = q.shape[2], k.shape[2]
    (left, right), frame = window, {"q_len": q_len, "kv_len": kv_len, "device": q.device}

    def build() -> BlockMask:
        if window == CAUSAL:
            return BlockMask.causal(**frame)
        if left is not None and right in (0, left):
            return BlockMask.sliding_window(window=left + 1, causal=right == 0, **frame)
        return _uneven(BlockMask, left, right, **frame)

    if torch.compiler.is_compiling():  # a constant of the graph
        return build()
    return kept_mask(("flash attention", window, *frame.values()), build)


@of_options
@not_traced("a block mask")
def _uneven(cls: type[BlockMask], left: int | None, right: int | None, **frame: Any) -> BlockMask:
    """The mask of a window with other sides."""
    place = Place.of(**frame)
    return of_window(cls, place, _sides(left, right), f"window({left}, {right})")


def _check_torch(mask_mod: Any) -> None:
    """InvalidInput for a function of the CuTe DSL, which torch cannot evaluate."""
    if not callable(mask_mod) or type(mask_mod).__module__.split(".")[0] in ("cutlass", "flash_attn"):
        raise InvalidInput(
            f"mask_mod is {arguments.shown(mask_mod)}; it must be a torch function (b, h, q_idx, kv_idx), as for "
            "FlexAttention"
        )


def _lists(lists: Any, q: Tensor, k: Tensor) -> tuple[BlockSparseTensorsTorch, tuple[int, int], int]:
    """Checked lists, their block, and the number of key blocks."""
    wanted = BlockSparseTensorsTorch._fields
    if not isinstance(lists, tuple) or not all(hasattr(lists, name) for name in wanted[:4]):
        raise InvalidInput(
            f"block_sparse_tensors is {arguments.shown(lists)}; it must be a BlockSparseTensorsTorch"
        )
    parts: dict[str, Any] = {name: getattr(lists, name, None) for name in wanted}
    lists = BlockSparseTensorsTorch(**parts)
    for name in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        require_neutral("flash_attn_func", name, getattr(lists, name), None, "it is for packed sequences")
    if (lists.full_block_cnt is None) != (lists.full_block_idx is None):
        raise InvalidInput("full_block_cnt and full_block_idx must both be given, or both be None")
    block = BLOCK if lists.block_size is None else arguments.pair("block_size", lists.block_size, 1)
    tiles, columns = (-(-x.shape[2] // side) for x, side in zip((q, k), block, strict=True))
    for kind in ("mask", "full"):
        counts, indices = (getattr(lists, f"{kind}_block_{part}") for part in ("cnt", "idx"))
        if counts is None:
            continue
        counts = ints_on(f"{kind}_block_cnt", counts, q.device, 3)
        indices = ints_on(f"{kind}_block_idx", indices, q.device, 4)
        lists = lists._replace(**{f"{kind}_block_cnt": counts, f"{kind}_block_idx": indices})
        for part, x, right in (("cnt", counts, (tiles,)), ("idx", indices, (tiles, indices.shape[3]))):
            batch, heads = (1 if n == 1 else m for n, m in zip(x.shape[:2], q.shape[:2], strict=True))
            name = f"{kind}_block_{part}"
            check_shape(name, x, (batch, heads, *right), "[1 or B, 1 or H, query tiles] and the entries")
        if readable(counts) and readable(indices):
            _check_values(kind, counts, indices, columns)
    return lists, block, columns


def _check_values(kind: str, counts: Tensor, indices: Tensor, columns: int) -> None:
    """InvalidInput for counts that are more than the entries, and for key blocks that do not exist."""
    listed, crowded, absent = _read(counts, indices, columns)
    room = f"{kind}_block_idx has room for 0 to {indices.shape[3]} blocks"
    check_values(f"{kind}_block_cnt", counts, crowded, room)
    check_values(f"{kind}_block_idx", indices, listed & absent, f"key blocks are 0 to {columns - 1}")


def _read(counts: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which entries count, which counts are more than the entries, and which entries are no key blocks."""
    place = torch.arange(indices.shape[3], dtype=indices.dtype, device=indices.device)
    crowded, absent = (counts < 0) | (counts > indices.shape[3]), (indices < 0) | (indices >= columns)
    return place < counts[..., None], crowded, absent


def _packed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The entries that count, and -1: int [.., Mb, n]. What is wrong on a GPU becomes `columns`, which masks refuse."""
    listed, crowded, absent = _read(counts, indices, columns)
    wrong = crowded[..., None] | listed & absent
    return torch.where(wrong, columns, torch.where(listed, indices, -1))


class _Cut(NamedTuple):
    """Blocks of queries and of keys as the ones of 64 or 128 that a mask has, and how many each gives."""

    block: tuple[int, int]
    parts: tuple[int, int]

    @classmethod
    def of(cls, block: tuple[int, int]) -> _Cut:
        of_q, of_k = (cut_side(side) for side in block)
        if of_q is None or of_k is None:
            raise InvalidInput(f"block_size is {block}; its sides must be multiples of 64")
        return cls((of_q[0], of_k[0]), (of_q[1], of_k[1]))

    def entries(self, packed: Tensor, columns: int, lengths: tuple[int, int]) -> Tensor:
        """The entries of `_packed`, for the blocks of the mask."""
        (bq, bk), (q_parts, k_parts) = self.block, self.parts
        if k_parts > 1:
            part = torch.arange(k_parts, dtype=packed.dtype, device=packed.device)
            cut = packed[..., None] * k_parts + part
            beyond = (packed[..., None] < columns) & (cut >= -(-lengths[1] // bk))
            packed = torch.where((packed[..., None] < 0) | beyond, -1, cut).flatten(-2)
        return packed.repeat_interleave(q_parts, 2)[:, :, : -(-lengths[0] // bq)]


def _listed(q: Tensor, k: Tensor, given: Any, causal: bool) -> BlockMask:
    """The mask of every key of the listed blocks."""
    lists, block, columns = _lists(given, q, k)
    cut, lengths = _Cut.of(block), (q.shape[2], k.shape[2])
    frame: Any = {"q_len": lengths[0], "kv_len": lengths[1], "block": cut.block, "causal": causal}
    if lists.full_block_idx is None and cut.parts == (1, 1):
        return BlockMask.from_indices(lists.mask_block_idx, lists.mask_block_cnt, **frame)
    parts = [_packed(lists.mask_block_cnt, lists.mask_block_idx, columns)]
    if lists.full_block_cnt is not None and lists.full_block_idx is not None:
        parts.append(_packed(lists.full_block_cnt, lists.full_block_idx, columns))
    batch, heads = (max(x.shape[dim] for x in parts) for dim in (0, 1))
    entries = torch.cat([x.expand(batch, heads, -1, -1) for x in parts], -1)
    return BlockMask.from_indices(cut.entries(entries, columns, lengths), **frame)


def _evaluated(q: Tensor, k: Tensor, mask_mod: Any, given: Any) -> BlockMask:
    """The mask of `mask_mod` in the listed blocks, or everywhere."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    lengths = q.shape[2], k.shape[2]
    if given is None:

        def everywhere() -> BlockMask:
            return BlockMask.from_mask_mod(mask_mod, q.shape[0], q.shape[1], *lengths, device=q.device)

        read = (mask_mod, *q.shape[:2], *lengths)
        return kept_conversion(mask_mod, read, q.device, "a mask_mod", everywhere)
    lists, block, columns = _lists(given, q, k)
    cut, nothing = _Cut.of(block), (None, None)

    def build() -> BlockMask:
        found: list[Any] = []
        for kind, counts, indices in (("mask", *lists[:2]), ("full", *lists[2:4])):
            if counts is None or indices is None:
                found += nothing
                continue
            _check_values(kind, counts, indices, columns)
            entries = cut.entries(_packed(counts, indices, columns), columns, lengths)
            entries = entries.sort(dim=-1, descending=True).values  # with -1 at the end
            entries = entries.expand(*q.shape[:2], -1, -1)
            found += (entries >= 0).sum(-1, dtype=torch.int32), entries
        # Its constructor, unlike from_kv_blocks, takes lists of fewer columns than there are key blocks.
        make: Any = FlexMask
        return BlockMask.from_flex(
            make(lengths, *found, *nothing, *nothing, BLOCK_SIZE=cut.block, mask_mod=mask_mod)
        )

    read = (mask_mod, *lists[:4], *block, *q.shape[:2], *lengths)
    return kept_conversion(lists.mask_block_idx, read, q.device, "lists with a mask_mod", build)
