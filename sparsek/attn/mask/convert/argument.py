"""Every form of a mask that attention takes, as a BlockMask. Conversions are kept with their source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparsek.attn.mask.cache import ByTensor, CachedMask, kept_mask, values_of
from sparsek.attn.mask.convert.rule_state import RuleState, read_by
from sparsek.attn.mask.lists import Frame
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors, swapped
from sparsek.attn.mask.rule import MaskPolicy, MaskRule
from sparsek.attn.mask.token_lists import TokenLists, mask_of
from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant, not_traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

MaskLike: TypeAlias = Union[BlockMask, MaskRule, Tensor, "FlexMask"]
"""What `mask` may be: a BlockMask, a MaskPolicy, a policy of sk.policies, TokenLists, a bool tensor, or a
FlexAttention BlockMask.
"""

FLEX = "torch.nn.attention.flex_attention"

_compiling = torch.compiler.is_compiling

_OF_TENSORS: ByTensor[CachedMask] = ByTensor()
# Of each FlexAttention mask or other owner: what its rule reads, and the mask.
_OF_FLEX: WeakIdKeyDictionary = WeakIdKeyDictionary()


def block_mask(
    mask: MaskLike | None,
    q: Tensor,
    k: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    predicted: bool = False,
) -> BlockMask | None:
    """The BlockMask for queries q [B, Hq, S, D] and keys k [B, Hkv, T, D]; None where every query sees every key.

    Args:
        mask: Any form of a mask. A bool tensor must broadcast to [B, Hq or Hkv, S, T]; the first of three dims is Hq.
        is_causal: As in scaled_dot_product_attention: query i sees keys 0 to i. Not together with a mask.
        scale: The factor of q @ k.T, for rules that estimate the softmax; D**-0.5 for None.
        predicted: The call is only planned, so q and k may be on the meta device.

    Raises:
        InvalidInput: For anything else, for q and k that do not fit together, and for a bool tensor of another shape.
    """
    if arguments.flag("is_causal", is_causal):
        if mask is not None:
            raise InvalidInput(
                "mask and is_causal=True are both given, and scaled_dot_product_attention refuses both too; give one"
            )
        return top_left(q, k)
    if mask is None or isinstance(mask, BlockMask):
        return mask
    if predicted and isinstance(mask, TokenLists):
        check_tensors(q, k, k, predicted=True)
        return mask_of(mask, q, k, predicted=True)
    if isinstance(mask, MaskRule) and not (predicted and isinstance(mask, MaskPolicy)):
        if predicted and isinstance(q, Tensor) and q.is_meta:
            raise InvalidInput(
                f"mask is {mask.label}, which chooses blocks by q and k, and q is on the meta device; pass a BlockMask"
            )
        return mask.mask_for(q, k, scale)
    if type(mask) is Tensor and type(q) is type(k) is Tensor and q.ndim == k.ndim == 4 and not _compiling():
        kept = _OF_TENSORS.find(mask, (q.shape[2], k.shape[2]))
        # Batch items and heads are checked with those of any BlockMask, which accepts Hkv.
        if kept is not None and (mask.ndim != 3 or mask.shape[0] in (1, q.shape[1])):
            return kept.here()
    if isinstance(mask, (MaskPolicy, Tensor)):
        check_tensors(q, k, k, predicted=predicted)
    if isinstance(mask, MaskPolicy):
        return mask.mask(q.shape[2], k.shape[2], "cpu" if q.is_meta else q.device)
    if isinstance(mask, Tensor):
        _check_bool(mask, q, k)
    return (_untraced if _compiling() else _converted)(mask, q, k)


def top_left(q: Any, k: Any) -> BlockMask:
    """The mask in which query i sees keys 0 to i, whatever the lengths: the same object each time.

    InvalidInput for q and k that do not fit together, if the mask is new.
    """
    check = partial(check_tensors, q, k, k)
    plain = type(q) is type(k) is Tensor and not (q.is_nested or k.is_nested) and q.ndim == k.ndim == 4
    if plain and not _compiling():
        return _top_left(q.shape[2], k.shape[2], q.device, check)
    check()
    # A compiled graph is for one mask, so the lengths are no symbols there.
    lengths = arguments.integer("q_len", q.shape[2]), arguments.integer("kv_len", k.shape[2])
    return (_constant_top_left if _compiling() else _top_left)(*lengths, q.device)


def _top_left(
    q_len: int, kv_len: int, device: torch.device, check: Callable[[], None] | None = None
) -> BlockMask:
    frame = Frame(q_len=q_len, kv_len=kv_len, device=device, q_offset=0)

    def build() -> BlockMask:
        if check is not None:
            check()
        return BlockMask.causal(**frame)

    return kept_mask(("top left", *frame.values()), build)


_constant_top_left = constant(_top_left)


def _check_bool(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """InvalidInput unless a tensor is bool and broadcasts to [B, Hq or Hkv, S, T].

    Three dims are [1 or Hq, S, T], as in torch: were Hkv allowed too, a mask [B, S, T] with B = Hkv would be misread.
    """
    arguments.dense("mask", mask)
    if mask.dtype in dtypes.FLOATS:
        raise InvalidInput(
            f"mask is {mask.dtype} {list(mask.shape)}, a bias, and attention adds none: where it holds only 0 and "
            "-inf, pass mask == 0; for any other bias, call flex_attention with a score_mod"
        )
    if mask.dtype != torch.bool:
        raise InvalidInput(
            f"mask is {mask.dtype} {list(mask.shape)}; it must be bool, true where a query sees a key: mask.bool(), or "
            "for blocks of each query TokenLists(mask, block)"
        )
    (batch, q_heads, q_len, _), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    given = (1,) * (4 - mask.ndim) + tuple(mask.shape) if 1 <= mask.ndim <= 4 else (0,) * 4
    heads = (1, q_heads) if mask.ndim == 3 else (1, q_heads, kv_heads)
    if all(
        side in right for side, right in zip(given, ((1, batch), heads, (1, q_len), (1, kv_len)), strict=True)
    ):
        return
    found, either = (
        f"mask is {list(mask.shape)}",
        f"{q_heads} or {kv_heads}" if kv_heads < q_heads else q_heads,
    )
    cures = (batch, "mask[:, None] for a mask per batch item"), (kv_heads, "mask[None] for one per head of k")
    fitting = [cure for size, cure in cures if mask.ndim == 3 and given[1] == size]
    if fitting and given[2] in (1, q_len) and given[3] in (1, kv_len):
        raise InvalidInput(
            f"{found}; the first of three dims is heads of q, as in torch, and q has {q_heads}: "
            f"pass {', '.join(fitting)}"
        )
    hint = swapped(q, k, tuple(mask.shape[-2:]))
    raise InvalidInput(
        f"{found}; it must broadcast to [B, Hq or Hkv, S, T], here [{batch}, {either}, {q_len}, {kv_len}]{hint}"
    )


def _converted(mask: Any, q: Tensor, k: Tensor) -> BlockMask:
    """The BlockMask of a bool tensor that `_check_bool` has seen, or of a FlexAttention mask."""
    if isinstance(mask, Tensor):
        dense, lengths = values_of(mask, "mask"), (q.shape[2], k.shape[2])
        return _OF_TENSORS.get(dense, lengths, lambda: _of_tensor(dense, lengths)).here()
    if (found := of_flex(mask)) is not None:
        return found
    kind = type(mask)
    if callable(mask) and not isinstance(mask, type):
        raise InvalidInput(
            f"mask is {arguments.shown(mask)}; a function (b, h, q_idx, kv_idx) becomes a mask by "
            "BlockMask.from_mask_mod(fn, B, H, S, T)"
        )
    raise InvalidInput(
        f"mask is a {kind.__module__}.{kind.__name__}; it must be a sparsek BlockMask, a MaskPolicy, TokenLists, a "
        "bool tensor, a FlexAttention BlockMask, a policy of sk.policies or None"
    )


_untraced = not_traced("a block mask")(_converted)


def _of_tensor(dense: Tensor, lengths: tuple[int, int]) -> CachedMask:
    _refuse_capture(dense.device, "a tensor")
    whole = dense[(None,) * (4 - dense.ndim)]
    if not whole.shape[0]:  # no batch item, and a mask has at least one
        whole = whole.new_ones(1, 1, 1, 1)
    return CachedMask.of(BlockMask.from_dense(whole.expand(*whole.shape[:2], *lengths)))


def of_flex(mask: FlexMask | Any) -> BlockMask | None:
    """As BlockMask.from_flex; made anew where its lists, its `mask_mod` or something that this reads has changed. None
    for anything but a FlexAttention mask.
    """
    flex = sys.modules.get(FLEX)  # nobody has one of its masks without it
    if flex is None or not isinstance(mask, flex.BlockMask):
        return None
    lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    read = (mask.mask_mod, *lists, *mask.seq_lengths, mask.BLOCK_SIZE)
    build = partial(BlockMask.from_flex, mask)
    return kept_conversion(mask, read, mask.kv_num_blocks.device, "a FlexAttention mask", build)


@torch._disable_dynamo  # Dynamo would trace what it reads
def kept_conversion(
    owner: Any, read: Sequence[Any], device: torch.device, what: str, build: Callable[[], BlockMask]
) -> BlockMask:
    """The mask that `build()` makes of `owner`: made anew where what is read, or what functions in it read, is not
    the same as before, or not known.
    """
    parts, known = read_by(*read), _OF_FLEX.get(owner)
    if known is None or parts is None or not known[0].is_same(parts):
        state = RuleState.of(parts)
        _refuse_capture(device, what, kept=state is not None)
        made = CachedMask.of(build())
        if state is None:
            return made.mask
        known = _OF_FLEX[owner] = state, made
    return known[1].here()


def _refuse_capture(device: torch.device, what: str, kept: bool = True) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidInput(
            f"mask is {what}, which is read while a CUDA graph is captured; "
            f"{'call once with it before the capture, or ' if kept else ''}pass a BlockMask"
        )
