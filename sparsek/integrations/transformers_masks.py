"""Masks of transformers as documents and windows where they have that form, else from their elements.

transformers describes masks by functions of (batch item, head, query, key), joined by `and_masks`. The functions of
`masking_utils` are recognized by name and read by the values in their closures; then a mask costs O(S). Any other
function is evaluated at every pair of a query and a key: exact, and O(S^2), like transformers' own masks.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers.masking_utils as masking_utils
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.attn.mask.build.banded import Band, bounded_band, room_of_documents
from sparsek.attn.mask.build.documents import Documents, PackedLayout, Window
from sparsek.attn.mask.layout import Counted, MaskLayout
from sparsek.attn.mask.lists import Place, Sizes
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.readback import Readback
from sparsek.attn.mask.rule import MaskPolicy, ResolvedRule
from sparsek.attn.mask.traced import traceable
from sparsek.attn.policies.policy import Policy
from sparsek.core import arguments
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced
from sparsek.integrations.config import misfit

if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
    raise ImportError(f"SparseK needs transformers 5.4 or newer; this is {version('transformers')}")

EVERY_KEY = MaskPolicy(causal=False)


class LayerPolicy(NamedTuple):
    """A policy of sk.policies, which chooses in each layer.

    Attributes:
        policy: The policy.
        q_offset: The position of the first query among the keys.
        kv_len: The keys that are used, the first ones of a cache.
        within: The model's own mask; None if the policy's hides what this hides.
    """

    policy: Policy
    q_offset: int
    kv_len: int
    within: BlockMask | None

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None) -> BlockMask:
        """The mask of one layer, for q [B, Hq, S, D] and the used keys k [B, Hkv, kv_len, D]."""
        chosen = self.policy.mask(q, k, scale=scale, q_offset=self.q_offset)
        return chosen if self.within is None else chosen & self.within

    def to(self, device: torch.device) -> LayerPolicy:
        """The same with the mask on another device."""
        return self if self.within is None else self._replace(within=self.within.to(device))


class ModelMask:
    """The `attention_mask` of a model's layers: the visible pairs, one object for all layers of a forward pass.

    transformers takes anything with `ndim` 4 for a finished mask.

    Attributes:
        visible: The pairs that the model and the policy admit; the model alone where there is a `choice`.
        shape: (batch, 1, queries, keys).
        packed: Whether documents are kept apart.
        choice: A policy that chooses in each layer.
        own: The pairs that the model alone admits, for cross-attention, where it may be that and there is a policy; or
            a function that makes it.
        misfit: Why the policy does not go with these layers.
        padded: Whether it may hide padding.
        causal: Whether every query of a token sees exactly the keys up to its own, the last query at the last key.
    """

    ndim = 4

    def __init__(
        self,
        visible: ResolvedRule,
        shape: tuple[int, int, int, int],
        packed: bool = False,
        choice: LayerPolicy | None = None,
        own: ModelMask | Callable[[], ModelMask] | None = None,
        misfit: str | None = None,
    ) -> None:
        self.visible, self.shape, self.packed, self.choice = visible, shape, packed, choice
        self.own, self.misfit, self.padded, self.causal = own, misfit, True, False
        self.device = visible.within.device
        self._moved: dict[torch.device, ModelMask] = {}

    def contiguous(self) -> ModelMask:
        """This mask; generate() calls it."""
        return self

    def to(self, device: Any, **_: Any) -> ModelMask:
        """The mask on another device, for a model spread over several; copied once for each."""
        within, always, k = self.visible
        target = arguments.device("device", device)
        if target == within.device:
            return self
        if target not in self._moved:
            moved = ResolvedRule(within.to(target), None if always is None else always.to(target), k)
            self._moved[target] = ModelMask(
                moved,
                self.shape,
                self.packed,
                self.choice and self.choice.to(target),
                None if self.own is None else lambda: self._found_own().to(target),
                self.misfit,
            )
            self._moved[target].padded, self._moved[target].causal = self.padded, self.causal
        return self._moved[target]

    def _found_own(self) -> ModelMask:
        own = self.own
        return own if isinstance(own, ModelMask) else own() if own else self

    def explain(self) -> str:
        """What computes attention under this mask, and over which keys."""
        chosen = "" if self.choice is None else f" and {self.choice.policy.label} in each layer"
        return f"sparsek.attention over the blocks of {self.visible.within!r}{chosen}"

    def __repr__(self) -> str:
        return f"ModelMask({self.visible.within!r}{f', {self.visible.k} best' if self.visible.k else ''})"


class Restarts:
    """Warns, once a model, of packed documents that no mask separates: with a cache transformers looks for none.

    On a CPU the position ids of every forward pass are read. On a GPU those of the first passes are, by a copy that
    nothing waits for; the warning then comes with a later pass.
    """

    def __init__(self, most: int = 16) -> None:
        self.most = most
        self._warned: Any = None  # the config of the model that had the last warning
        self._last: Any = None  # the position ids of this pass, which its layers share
        self._found: tuple[Readback, Any] | None = None

    def look(self, config: Any, positions: Any, q_len: int) -> None:
        """At the position ids [1 or B, S] of a causal layer, whose mask hides neither documents nor padding."""
        if self._found is not None:
            readback, owner = self._found
            restart = readback.read(wait=False)
            if restart is not None:
                self._found = None
                self._warn(owner, restart)
        if not isinstance(positions, Tensor) or positions.ndim != 2 or not 1 < q_len == positions.shape[1]:
            return
        if _is(self._last, positions) or _is(self._warned, config) or is_functorch_wrapped_tensor(positions):
            return
        if positions.device.type == "cpu" and not is_fake(positions):
            self._last = weakref.ref(positions)
            self._warn(config, _restart(positions).item())
        elif positions.is_cuda and self.most and not torch.cuda.is_current_stream_capturing():
            self._last, self.most = weakref.ref(positions), self.most - 1
            if self._found is None:
                self._found = Readback(_restart(positions).to(torch.int64)), config

    def _warn(self, config: Any, restart: Any) -> None:
        if restart:
            self._warned = weakref.ref(config)
            warnings.warn(
                "position_ids restart, but the mask does not separate documents, so they see each other: transformers "
                "separates packed documents only without a cache and an attention_mask; pass use_cache=False",
                stacklevel=2,
            )


def _is(kept: Any, x: Any) -> bool:
    """Whether a weak reference is to this object."""
    return kept is not None and kept() is x


def _restart(positions: Tensor) -> Tensor:
    """Whether a document begins after the first token: positions fall, or 0 is repeated. Others may be repeated."""
    return ((positions.diff(dim=1) < 0) | (positions[:, 1:] == 0) & (positions[:, :-1] == 0)).any()


@dataclass
class Rules:
    """The mask functions of a model, joined.

    `ids`: the document of each token [B, S]. `chunks`: their length, and each batch item's keys of left padding [B].
    """

    back: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    ids: Tensor | None = None
    chunks: tuple[int, Tensor] | None = None
    remapped: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Rules | None:
        """None if a function is unknown."""
        rules = cls()
        known = rules._take(function)
        # In a document, positions differ as the tokens do: windows stay what they are. Chunks do not.
        no_ids, no_chunks = rules.ids is None, rules.chunks is None
        return rules if known and (no_chunks or no_ids) and not (rules.remapped and no_ids) else None

    @property
    def causal(self) -> bool:
        """Whether a query sees no token after its own."""
        return 1 in self.ahead

    @property
    def near(self) -> Window:
        return Window(min(self.back, default=None), min(self.ahead, default=None))

    def _take(self, function: Any) -> bool:
        if function is masking_utils.causal_mask_function:
            self.ahead.append(1)
            return True
        if function is masking_utils.bidirectional_mask_function:
            return True
        if getattr(function, "__module__", None) != masking_utils.__name__:
            return False
        maker, _, inner = function.__qualname__.partition(".<locals>.")
        take = MAKERS.get(maker)
        if take is None or not inner:
            return False
        held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        try:
            return take(self, **{name: cell.cell_contents for name, cell in held})
        except TypeError:  # its closure differs from that of the known versions
            return False

    def _all_of(self, mask_functions: Any) -> bool:
        return all(self._take(each) for each in mask_functions)

    def _window(self, sliding_window: Any) -> bool:
        self.back.append(operator.index(sliding_window))
        return True

    def _both_ways(self, sliding_window: Any) -> bool:
        self.back.append(operator.index(sliding_window) + 1)
        self.ahead.append(self.back[-1])
        return True

    def _chunks(self, chunk_size: Any, left_padding: Any) -> bool:
        is_new = self.chunks is None
        self.chunks = operator.index(chunk_size), left_padding
        return is_new

    def _packed(self, packed_sequence_mask: Any) -> bool:
        is_new = self.ids is None
        self.ids = packed_sequence_mask
        return is_new

    def _remapped(self, mask_function: Any, position_ids: Any) -> bool:
        self.remapped = True
        return self._take(mask_function)


MAKERS: dict[str, Callable[..., bool]] = {
    "and_masks": Rules._all_of,
    "sliding_window_overlay": Rules._window,
    "sliding_window_bidirectional_overlay": Rules._both_ways,
    "chunked_overlay": Rules._chunks,
    "packed_sequence_mask_function": Rules._packed,
    "remap_positions_for_packed_sequence": Rules._remapped,
}


class PairsRequest(NamedTuple):
    """The pairs of queries and keys that a mask of transformers is for.

    `q_offset`: an int, or a tensor of one. `padding`: [B or 1, tokens], true for a token; None for none.
    """

    batch: int
    q_len: int
    kv_len: int
    q_offset: Any
    kv_offset: int
    function: Callable[..., Any]
    padding: Tensor | None
    use_vmap: bool
    device: Any

    @property
    def plain(self) -> bool:
        """Whether every query sees all keys, or all up to its own, but for padding."""
        return self.function in (
            masking_utils.causal_mask_function,
            masking_utils.bidirectional_mask_function,
        )

    def evaluated(self, batch: int) -> Tensor:
        """The pairs that `function` and the padding admit, bool [batch, 1, q_len, kv_len]."""
        seen = masking_utils.sdpa_mask(
            batch, self.q_len, self.kv_len, self.q_offset, self.kv_offset, self.function, self.padding,
            allow_is_causal_skip=False, use_vmap=self.use_vmap, device=self.device,
        )  # fmt: skip
        assert seen is not None  # only skips give None
        return seen


@dataclass(frozen=True)
class MaskRequest:
    """The arguments of a mask: lengths, first positions of queries and keys, padding [B, keys], and the device."""

    batch: int
    q_len: int
    kv_len: int
    q_offset: int
    kv_offset: int
    padding: Tensor | None
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    @property
    def place(self) -> int:
        """The position of the first query among the keys."""
        return self.q_offset - self.kv_offset

    @functools.cached_property
    def keys(self) -> tuple[np.ndarray, bool]:
        """The present keys: start, end and first token of each batch item, as positions here, int64 [B, 3].

        And whether the keys between have no gap. One sync if the padding is on a GPU.
        """
        if self.padding is None or not self.kv_len:
            return np.tile(np.array([0, self.kv_len, -self.kv_offset], np.int64), (self.batch, 1)), True
        there = self.padding.to(self.device, torch.bool).expand(self.batch, -1)
        end = self.kv_offset + self.kv_len
        there = torch.nn.functional.pad(there, (0, max(end - there.shape[1], 0)))
        here = there[:, self.kv_offset : end]
        place = torch.arange(self.kv_len, device=here.device)
        start, last = torch.where(here, place, self.kv_len).amin(1), torch.where(here, place + 1, 0).amax(1)
        first = there.to(torch.uint8).argmax(1) - self.kv_offset
        found = torch.stack((start, last, first, here.sum(1)), 1).cpu().numpy()
        found[found[:, 3] == 0] = 0
        found[:, 2] = np.minimum(found[:, 2], found[:, 0])
        return found[:, :3], bool((found[:, 1] - found[:, 0] == found[:, 3]).all())

    def layout(self, rules: Rules) -> PackedLayout:
        """The documents, of one batch item if all are equal. Gaps in the padding are ignored."""
        ids = None if rules.ids is None else rules.ids.expand(self.batch, -1).cpu().numpy()
        size, padding = (0, []) if rules.chunks is None else (rules.chunks[0], rules.chunks[1].tolist())
        made = []
        for item, (start, end, origin) in enumerate(self.keys[0]):
            if ids is not None:
                spans = _runs(ids[item])
            elif size:
                spans = self._chunks(size, padding[item])
            else:
                spans = np.array([[0], [self.q_len], [0], [self.kv_len]], np.int64)
            q_start, q_end, k_start, k_end = spans
            k_start, k_end = k_start.clip(start, end), k_end.clip(start, end)
            shift = np.full_like(q_start, self.q_offset - self.kv_offset)
            # Packed documents have first keys of their own; chunks and the whole have the sequence's.
            origin = k_start if ids is not None else np.full_like(q_start, origin)
            made.append(np.stack((q_start, q_end, k_start, k_end, shift, np.minimum(origin, k_start))))
        if not made:
            raise InvalidInput("a mask is for one batch item at least; got a batch of 0")
        if all(np.array_equal(each, made[0]) for each in made):
            made = made[:1]
        item = np.repeat(np.arange(len(made)), [each.shape[1] for each in made])
        docs = Documents(item, *np.concatenate(made, 1))
        return PackedLayout(docs, self.q_len, self.kv_len, len(made), rules.near)

    def _chunks(self, size: int, padding: int) -> np.ndarray:
        """First and end of the queries and of the keys of each chunk, int64 [4, n]."""
        first, last = ((p - padding) // size for p in (self.q_offset, self.q_offset + self.q_len - 1))
        start = padding + np.arange(first, last + 1) * size
        q, k = start - self.q_offset, start - self.kv_offset
        return np.stack((q.clip(0), (q + size).clip(None, self.q_len), k, k + size))

    def seen(self, function: Callable[..., Any], use_vmap: bool) -> Tensor:
        """Every pair, bool [B, 1, q_len, kv_len]."""
        return PairsRequest(
            self.batch, self.q_len, self.kv_len, self.q_offset, self.kv_offset, function, self.padding, use_vmap,
            self.device,
        ).evaluated(self.batch)  # fmt: skip


def _runs(ids: np.ndarray) -> np.ndarray:
    """First and end of each run of equal ids, as queries and as keys: int64 [4, n]."""
    edges = np.concatenate(([0], np.flatnonzero(np.diff(ids)) + 1, [ids.size])).astype(np.int64)
    return np.stack((edges[:-1], edges[1:], edges[:-1], edges[1:]))


def model_mask(
    request: MaskRequest,
    function: Callable[..., Any],
    policy: MaskPolicy | Policy | None,
    use_vmap: bool = False,
) -> ModelMask:
    """The pairs that `function`, the padding and `policy` admit."""
    rules = Rules.of(function)
    packed = rules is not None and rules.ids is not None
    if isinstance(policy, Policy):
        return _chosen_in_layers(request, function, rules, policy, use_vmap)
    if rules is None or not request.keys[1]:
        seen = request.seen(function, use_vmap)
        made = dense_mask(request, seen, policy, packed)
        if policy is not None and (rules is None or not rules.causal):
            made.own = lambda: dense_mask(request, seen, None, packed)
        return made
    layout = request.layout(rules)
    own = None
    if policy is not None and not rules.causal:
        own = ModelMask(EVERY_KEY.visible_in(layout, request.device), request.shape, packed)
    visible = (policy or EVERY_KEY).visible_in(layout, request.device)
    made = ModelMask(visible, request.shape, packed, own=own)
    plain = (
        policy is None and not rules.back and set(rules.ahead) == {1} and not packed and rules.chunks is None
    )
    at_end = request.place + request.q_len == request.kv_len and not request.keys[0][:, 0].any()
    made.causal = plain and at_end  # padding at the end is behind all tokens
    return made


@traceable
@not_traced("a block mask")
def packed_mask(documents: Tensor) -> BlockMask:
    """The causal mask of packed documents, int [B, S]: the document of each token. One sync if they are on a GPU.

    Inside torch.compile it is one node of the graph, whose sizes are those of a causal mask.
    """
    (batch, length), device = documents.shape, documents.device
    place, label = Place.of(length, device=device, q_offset=0), "packed documents"
    if is_fake(documents):
        band = Band.of(place, None, 1)
        stored, partial, longest, _ = bounded_band(place, band).sizes
        bound = Counted(Sizes(batch * stored, batch * partial, longest, exact=False), batch * stored)
        layout = MaskLayout.of(place, bound, room_of_documents(place, band, False, batch), label, batch=batch)
        return BlockMask.of_layout(layout, layout.base(device))
    rows = [np.diff(_runs(each)[1], prepend=0) for each in documents.cpu().numpy()]
    return BlockMask.block_diagonal(rows, device=device)


def stored_block(policy: Policy) -> tuple[int, int]:
    """The block of a policy's masks."""
    bq, bk = policy.sides
    return min(bq, 128), min(bk, 128)


def _chosen_in_layers(
    request: MaskRequest, function: Callable[..., Any], rules: Rules | None, policy: Policy, use_vmap: bool
) -> ModelMask:
    """The mask of a policy that chooses from the queries and keys of each layer, and of the model's own.

    Of a cache it is for the keys up to the last query's, where the model is causal.
    """
    causal = rules is not None and rules.causal
    if rules is not None and rules.ids is not None:
        raise InvalidInput(
            f"config.sparsek is {policy.label}, which chooses blocks of one sequence and keeps no documents apart; "
            "pass one document for each batch item, or options of MaskPolicy"
        )
    end = min(max(request.place + request.q_len, 0), request.kv_len) if causal else request.kv_len
    some, sides = replace(request, kv_len=end), MaskPolicy(causal=False, block=stored_block(policy))
    if rules is None:
        seen = some.seen(function, use_vmap)
        own, found = dense_mask(some, seen, sides), misfit_of_pairs(policy, seen, request.place)
    else:
        own, found = model_mask(some, function, sides, use_vmap), None
        if request.q_len > 1 if causal else request.place < request.kv_len - 1:
            found = misfit(policy, causal)
    whole = rules is not None and not rules.back and rules.chunks is None and set(rules.ahead) <= {1}
    alone = whole and bool((some.keys[0][:, 0] == 0).all() and (some.keys[0][:, 1] >= end).all())
    within = None if alone and some.keys[1] else own.visible.within
    choice = LayerPolicy(policy, request.place, end, within)
    plain = None if causal else ModelMask(own.visible, request.shape, own.packed)
    return ModelMask(own.visible, request.shape, own.packed, choice, plain, found)


def misfit_of_pairs(policy: Policy, seen: Tensor, place: int) -> str | None:
    """Why a policy does not go with a mask [B or 1, H or 1, q_len, kv_len], bool or additive; None for one that does.

    The mask is that of a causal layer if no query sees a token after its own. Waits for the device.
    """
    q_len, kv_len = seen.shape[-2:]
    if q_len <= 1 and place + 1 >= kv_len:  # one query at the last key is of either kind
        return None
    there = seen if seen.dtype == torch.bool else seen == 0
    return misfit(policy, not bool(there.triu(place + 1).any()))


def dense_mask(
    request: MaskRequest, seen: Tensor, policy: MaskPolicy | Policy | None, packed: bool = False
) -> ModelMask:
    """The pairs that a mask [B or 1, H or 1, q_len, kv_len], bool or additive, and `policy` admit. O(S^2)."""
    if isinstance(policy, Policy):
        within = BlockMask.from_transformers(seen, stored_block(policy))
        return ModelMask(
            ResolvedRule(within),
            request.shape,
            packed,
            LayerPolicy(policy, request.place, request.kv_len, within),
            misfit=misfit_of_pairs(policy, seen, request.place),
        )
    admitted = BlockMask.from_transformers(seen, (policy or EVERY_KEY).block)
    if policy is None:
        return ModelMask(ResolvedRule(admitted), request.shape, packed)
    if admitted.heads > 1 and policy.topk is not None:
        raise InvalidInput(f"top-k goes with masks for all heads; this one is for {admitted.heads}")
    within, always, k = policy.visible_in(request.layout(Rules()), request.device)
    visible = ResolvedRule(within & admitted, None if always is None else always & admitted, k)
    return ModelMask(visible, request.shape, packed)
