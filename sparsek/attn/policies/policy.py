"""Policy: chooses the blocks of attention from q and k. Policies combine by | and &."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.lists import Frame, Place, mask_block
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.readback import DeferredFault, Fault
from sparsek.attn.mask.recorded import repeated
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.plan.attention_operands import checked_scale
from sparsek.attn.policies.maps import joined
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced


class PolicyInputs(NamedTuple):
    """What a policy chooses from: q [B, Hq, S, D] and k [B, Hkv, T, D] without gradients, checked; their place; ints
    [1 or B, Nb]: how many keys of each block exist, or None; and the factor of q @ k in attention.
    """

    q: Tensor
    k: Tensor
    place: Place
    kv_lengths: Tensor | None
    scale: float

    @property
    def group(self) -> int:
        """Heads of q that share a head of k."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def frame(self) -> Frame:
        """The lengths, block and offset, as builders of masks take them."""
        place = self.place
        return Frame(q_len=place.q_len, kv_len=place.kv_len, block=place.block, q_offset=place.q_offset)

    def topk(
        self, scores: Tensor, k: int, causal: bool, always: tuple[int, int] | Tensor | None = None
    ) -> BlockMask:
        """BlockMask.topk at this place."""
        return BlockMask.topk(scores, k, causal, always, kv_lengths=self.kv_lengths, **self.frame)

    def cumulative(
        self, mass: Tensor, threshold: float | Tensor, causal: bool, always: Any = None, **bounds: Any
    ) -> BlockMask:
        """BlockMask.cumulative at this place; `bounds` are its `least` and `most`."""
        return BlockMask.cumulative(
            mass, threshold, causal, always, kv_lengths=self.kv_lengths, **bounds, **self.frame
        )

    def blank_map(self) -> Tensor:
        """A map of blocks without values, for fake q and k."""
        shape = self.q.shape[0], self.q.shape[1], *self.place.grid
        return torch.empty(shape, dtype=torch.bool, device=self.q.device)

    def from_map(self, block_map: Tensor, causal: bool, of: tuple[BlockMask, ...] = ()) -> BlockMask:
        """BlockMask.from_block_map at this place, of a map made from the masks `of`, whose faults it has too."""
        made = BlockMask.from_block_map(block_map, causal=causal, kv_lengths=self.kv_lengths, **self.frame)
        found = (each for mask in of for each in mask._memo.get("readbacks", ()))
        wrong = [each for each in found if isinstance(each, (Fault, DeferredFault))]
        if wrong:
            made._memo["readbacks"] = (*wrong, *made._memo.get("readbacks", ()))
        return made


class Policy(MaskRule):
    """Chooses which blocks attention visits. `sk.attention(q, k, v, policy)` chooses anew in every call.

    A policy is frozen and hashable, and has no tensors. `a | b` keeps the blocks that either chooses, `a & b` those
    that both choose. A policy of your own is a frozen dataclass with a method `choose(given)`, and fields `block` (64
    or 128, or a pair; 128 without the field) and `causal` (False without it).
    """

    block: Any = 128  # of classes without this field
    causal: Any = False  # of classes without this field
    of_fields = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", mask_block(self.block))
        arguments.flag("causal", self.causal)

    @property
    def sides(self) -> tuple[int, int]:
        """The block in tokens, (queries, keys)."""
        return mask_block(self.block)

    def mask(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float | None = None,
        q_offset: int | None = None,
        kv_lengths: Tensor | None = None,
    ) -> BlockMask:
        """Return the mask for q and k, on their device, without a sync on a GPU. The choice has no gradient.

        Args:
            q: Queries [B, Hq, S, D], float32, float16, bfloat16 or float64. For a chunk of a prompt its queries alone.
            k: Keys [B, Hkv, T, D], of q's dtype. Heads of q that share a head of k have masks of their own.
            scale: The factor of q @ k.T in the attention that the mask is for, from 1e-30 to 1e30; D**-0.5 by default.
            q_offset: The position of the first query among the keys; T - S by default: the last query stands at the
                last key.
            kv_lengths: int32 or int64 [Nb] or [1 or B, Nb]: the keys that exist of each block, its first ones, for
                sequences padded block by block. Others are not seen, and must be finite. None: all up to T.

        Raises:
            InvalidInput: For q and k that do not fit together, and for lengths of another shape, dtype or device.
        """
        return _chosen(self, q, k, scale, q_offset, kv_lengths)

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None = None) -> BlockMask:
        """Return `mask(q, k, scale=scale)`, as `attention` does for a policy in place of a mask.

        Args:
            q: Queries [B, Hq, S, D].
            k: Keys [B, Hkv, T, D].
            scale: The factor of q @ k.T; D**-0.5 by default.

        Raises:
            InvalidInput: As `mask`.
        """
        return self.mask(q, k, scale=scale)

    def __or__(self, other: Policy) -> Composed:
        """The blocks that either policy chooses."""
        return Composed(self, other, True) if isinstance(other, Policy) else _no_policy(other, "|")

    __ror__ = __or__

    def __and__(self, other: Policy) -> Composed:
        """The blocks that both policies choose."""
        return Composed(self, other, False) if isinstance(other, Policy) else _no_policy(other, "&")

    __rand__ = __and__

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments. On a GPU launches, allocations and views only. What a policy implements."""
        raise InvalidInput(f"{type(self).__name__} has no method choose(given), which returns the BlockMask")

    @property
    def label(self) -> str:
        """The class and the options that are not default: "MeanTopK(topk=16)"."""
        shown = {
            name: value.label if isinstance(value, Policy) else repr(value)
            for name, value in changed_fields(self).items()
        }
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in shown.items())})"


def changed_fields(policy: Policy) -> dict[str, Any]:
    """The fields that are not default, with one int for a square block."""
    found: dict[str, Any] = {}
    for each in fields(policy) if is_dataclass(policy) else ():
        value, default = getattr(policy, each.name), each.default
        if each.name == "block":
            value, default = (
                side if side[0] != side[1] else side[0] for side in map(mask_block, (value, default))
            )
        if value != default:
            found[each.name] = value
    return found


@dataclass(frozen=True)
class Composed(Policy):
    """`a | b`: the blocks that either policy chooses; `a & b`: those that both choose.

    Args:
        first: A policy.
        second: A policy of the same block and causality.
        union: Whether blocks of either are kept, or blocks of both.

    Raises:
        InvalidInput: For policies that do not go together.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 4, 2048, 64).unbind()
        >>> policy = sk.policies.MeanTopK(topk=4) | sk.policies.Streaming(window=512, sinks=128)
        >>> policy.mask(q, k).heads, policy.label
        (4, 'MeanTopK(topk=4) | Streaming(window=512)')
    """

    first: Policy
    second: Policy
    union: bool

    def __post_init__(self) -> None:
        sign = "|" if self.union else "&"
        for name in ("sides", "causal"):
            a, b = getattr(self.first, name), getattr(self.second, name)
            if a != b:
                shown = "block" if name == "sides" else name
                raise InvalidInput(
                    f"{self.first.label} {sign} {self.second.label}: {shown} is {a} and {b}; it must be the same"
                )

    @property
    def block(self) -> tuple[int, int]:
        """The block in tokens."""
        return self.first.sides

    @property
    def causal(self) -> bool:
        """Whether a query sees no keys after its own."""
        return self.first.causal

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        a, b = self.first.choose(given), self.second.choose(given)
        return given.from_map(joined(a, b, self.union), self.causal, of=(a, b))

    @property
    def label(self) -> str:
        """Both labels."""
        parts = [
            f"({each.label})" if isinstance(each, Composed) else each.label
            for each in (self.first, self.second)
        ]
        return f" {'|' if self.union else '&'} ".join(parts)


def _no_policy(other: Any, sign: str) -> Any:
    """InvalidInput for masks; for other objects what Python's operators return."""
    if isinstance(other, BlockMask):
        raise InvalidInput(
            f"a policy combines with policies, and its mask depends on q and k; write policy.mask(q, k) {sign} mask"
        )
    if isinstance(other, MaskRule):
        raise InvalidInput(
            f"a policy combines with policies of sk.policies; write policy.mask(q, k) {sign} other.mask_for(q, k), or "
            "use sk.policies.Streaming"
        )
    return NotImplemented


@repeated
@not_traced("a policy's mask")
@torch.no_grad()
def _chosen(
    policy: Policy,
    q: Tensor,
    k: Tensor,
    scale: float | None,
    q_offset: int | None,
    kv_lengths: Tensor | None,
) -> BlockMask:
    found = given(policy.block, q, k, scale, q_offset, kv_lengths)
    if not q.shape[0]:  # no batch item to choose for, and a mask has at least one
        return BlockMask.full(**{**found.frame, "device": q.device})
    mask = policy.choose(found)
    if not isinstance(mask, BlockMask):
        raise InvalidInput(
            f"{type(policy).__name__}.choose returned {arguments.shown(mask)}; it must return a BlockMask, as "
            "given.topk, given.cumulative and given.from_map do"
        )
    lengths = found.place.q_len, found.place.kv_len
    if (mask.q_len, mask.kv_len) != lengths:
        raise InvalidInput(
            f"{type(policy).__name__}.choose returned a mask of {mask.q_len} queries and {mask.kv_len} keys; q and k "
            f"have {lengths[0]} and {lengths[1]}"
        )
    return mask


def given(
    block: Any,
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    q_offset: int | None = None,
    kv_lengths: Tensor | None = None,
) -> PolicyInputs:
    """The checked arguments of a policy."""
    check_tensors(q, k, k)
    for name, x in (("q", q), ("k", k)):
        arguments.tensor(name, x)
    place = Place.of(q_len=q.shape[2], kv_len=k.shape[2], block=block, device=q.device, q_offset=q_offset)
    if kv_lengths is not None:
        kv_lengths = block_lengths("kv_lengths", kv_lengths, q.shape[0], place.grid[1], place.device)
    return PolicyInputs(q.detach(), k.detach(), place, kv_lengths, checked_scale(scale, q.shape[3]))


def block_lengths(name: str, lengths: Any, batch: int, blocks: int, device: torch.device) -> Tensor:
    """int32 [1 or B, blocks], from [blocks] too."""
    arguments.tensor(name, lengths, (torch.int32, torch.int64))
    arguments.one_device(f"{name} are", lengths.device, "q", device)
    wide = lengths[None] if lengths.ndim == 1 else lengths
    if wide.ndim != 2 or wide.shape[0] not in (1, batch) or wide.shape[1] != blocks:
        raise InvalidInput(
            f"{name} are {list(lengths.shape)}; {blocks} blocks need [{blocks}] or [1 or {batch}, {blocks}]"
        )
    if wide.dtype == torch.int64:
        wide = wide.clamp(-1, INT32_MAX).int()  # a length out of range stays one
    return wide.detach()
