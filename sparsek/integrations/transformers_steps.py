"""Masks of few queries over a cache, as in decode steps: keys that torch's own attention takes as they are, or blocks.

A decode step without a choice of blocks has nothing to skip but what a window cuts off one end of the cache, and host
time decides it. So it goes to scaled_dot_product_attention, over the keys that are left: without a mask where every
query sees them all, else with one that is made once for all layers. Over many masked keys, where torch's kernels with a
mask have too few programs, and under capped scores or learned sinks, which they do not have, blocks are made instead.

Both are made on the device, by torch operators only, so torch.compile traces them as they are; made before a compiled
step, as by `generate`, they enter its graph as tensors. Blocks come from every pair of a query and a key, O(queries *
keys), as transformers' masks do, because only that follows padding with gaps without a look at it; those that no query
sees are not in the lists. All partial blocks have bits, and sizes are bounds, so masks of one shape differ in tensors
only, and a compiled step is for all positions. `sk.attention_paged` over the static cache would hide no padding.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from sparsek.attn.mask.build.selection_reference import rows_of
from sparsek.attn.mask.build.tiles import pack_bits
from sparsek.attn.mask.lists import Sizes, mask_block
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskPolicy, ResolvedRule
from sparsek.attn.policies.policy import Policy
from sparsek.core import arguments, dtypes
from sparsek.core.arguments import is_fake
from sparsek.integrations.transformers_masks import ModelMask, PairsRequest, Rules

TILE = 64  # queries of a tile
MOST = TILE // 2  # queries of a step: hopper.attention_fwd packs heads that share keys for up to half a tile
# Masked keys for torch's attention, all walked by one program; blocks are cut into parts for every multiprocessor. In a
# cache that grows, each length of blocks needs a plan, which takes as long as some thousand keys in all layers.
LONGEST, LONGEST_GROWING = 4096, 16384
ALIGNED = 8  # elements: torch copies a mask in each layer whose rows begin elsewhere
WIDEST = 256  # head dims of torch's kernels for heads that share keys; that on a CPU takes four times as long


class WindowKeys(NamedTuple):
    """What a `MaskPolicy` without stride and top-k admits: `window` keys on either side (0: all), the first `sinks`
    tokens; and the keys of a block.
    """

    window: int
    sinks: int
    block: int

    def most(self, q_len: int, kv_len: int) -> int:
        """The most blocks that a tile of q_len queries sees."""
        columns, side = -(-kv_len // self.block), self.block
        if not self.window:
            return columns
        blocks = (2 * self.window + q_len - 2) // side + 2
        if self.sinks:
            blocks += (self.sinks - 1) // side + 2
        return min(columns, blocks)

    def sides(self, rules: Rules) -> tuple[int | None, int | None]:
        """The keys back and ahead, the query's own included, that this and the rules of a model admit; None: all."""
        window = [self.window] if self.window else []
        return min([*rules.back, *window], default=None), min([*rules.ahead, *window], default=None)


EVERY = WindowKeys(0, 0, 128)


def near_of(policy: MaskPolicy | Policy | None) -> WindowKeys | None:
    """The policy as a `WindowKeys`; None for one whose masks of steps need lengths on the host."""
    if policy is None:
        return EVERY
    if isinstance(policy, Policy) or policy.topk is not None or policy.stride is not None:
        return None
    return WindowKeys(policy.window or 0, policy.sinks, mask_block(policy.block)[1])


class KeySpan(NamedTuple):
    """Keys that a step attends to, by their first and end in the cache: a few of the first, which are none for most
    masks, and the last ones. `whole`: whether every query sees all of them.
    """

    sinks: tuple[int, int]
    keys: tuple[int, int]
    whole: bool


class StepMask(ModelMask):
    """The mask of few queries over a cache, for torch's own attention. The blocks of `visible` are made on demand.

    Attributes:
        span: The keys that are attended to; None for all.
        seen: Those that a query sees, of the span, bool [1 or B, 1, S, keys]; None for all.
        bias: The same as scores that are added, 0 and -inf.
    """

    def __init__(
        self, of: PairsRequest, near: WindowKeys, span: KeySpan | None, seen: Tensor | None, dtype: Any = None
    ) -> None:
        self.shape = of.batch, 1, of.q_len, of.kv_len
        self.packed, self.choice, self.own, self.misfit, self.padded = False, None, None, None, True
        self.causal = of.q_len == 1 and span is None and seen is None
        self.device = torch.device(of.device)
        self.span, self.seen = span, seen
        self.bias = None
        if seen is not None:
            self.bias = _scores_of(seen, dtype if dtype in dtypes.FLOATS else torch.get_default_dtype())
        self._of, self._near = of, near
        self._made: ResolvedRule | None = None
        self._form: Any = None
        self._moved = {}
        self._biases: dict[Any, Tensor] = {}

    def among(self, seen: Tensor) -> StepMask:
        """This mask of all keys and bool [B, Hkv, S, keys], for `attended` alone."""
        return StepMask(self._of, self._near, None, seen if self.seen is None else self.seen & seen, None)

    def to(self, device: Any, **_: Any) -> ModelMask:
        target = arguments.device("device", device)
        if target == self.device:
            return self
        if target not in self._moved:
            of = self._of
            there = (
                x.to(target) if isinstance(x, Tensor) else x for x in (of.q_offset, of.padding, self.seen)
            )
            q_offset, padding, seen = there
            of = of._replace(q_offset=q_offset, padding=padding, device=target)
            dtype = None if self.bias is None else self.bias.dtype
            self._moved[target] = StepMask(of, self._near, self.span, seen, dtype)
        return self._moved[target]

    def _blocks(self) -> ResolvedRule:
        """The pairs as blocks, for scores that torch's attention does not have."""
        if torch.compiler.is_compiling():
            return blocks_of(self._of, self._near, None if self.span else self.seen)
        if self._made is None:
            with torch.inference_mode(False), torch.no_grad():
                self._made = blocks_of(self._of, self._near, None if self.span else self.seen)
        return self._made

    visible: Any = property(_blocks)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
        """out [B, S, Hq, Dv]; None for operands that `sk.attention` is to look at."""
        known = self._form  # that of the layer before
        if known is None or known != _form_of(query, key, value):
            check_tensors(query, key, value)
            if not self._takes(query, key):
                return None
            if not torch.compiler.is_compiling():
                self._form = _form_of(query, key, value)
        batch, heads, few, dim = query.shape
        shared, wide = key.shape[1], value.shape[3]
        bias, group = self.bias, heads // shared
        if self.span is not None:
            key, value = _cut(key, self.span), _cut(value, self.span)
        if bias is not None:
            bias = self._bias_for(query, 1 if few == 1 else group)
        elif group > 1 and dim == wide <= WIDEST and query.is_cuda:
            out = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
            return out.reshape(batch, few, heads, wide) if few == 1 else out.transpose(1, 2).contiguous()
        if group > 1:  # the queries of heads that share keys are rows of one head
            query = query.reshape(batch, shared, group * few, dim)
        out = scaled_dot_product_attention(query, key, value, bias, scale=scale)
        if few == 1:
            return out.reshape(batch, 1, heads, wide)
        return out.reshape(batch, heads, few, wide).transpose(1, 2).contiguous()

    def _takes(self, query: Tensor, key: Tensor) -> bool:
        """Whether this mask is for such queries and keys."""
        if (query.shape[2], key.shape[2]) != self.shape[2:] or query.device.type not in ("cpu", "cuda"):
            return False
        return self.seen is None or self.seen.shape[0] in (1, query.shape[0])

    def _bias_for(self, query: Tensor, group: int) -> Tensor:
        """The bias in the dtype and on the device of queries, for the rows of `group` heads."""
        bias = self.bias
        assert bias is not None
        if group == 1 and bias.dtype == query.dtype and bias.device == query.device:
            return bias
        key = query.dtype, query.device, group
        found = self._biases.get(key)
        if found is None:
            assert self.seen is not None
            with nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False):
                found = _scores_of(self.seen.to(query.device).repeat(1, 1, group, 1), query.dtype)
            if not torch.compiler.is_compiling():
                self._biases[key] = found
        return found

    def explain(self) -> str:
        """What computes attention under this mask, and over which keys."""
        span, keys = self.span, f"all {self.shape[3]} keys"
        if span is not None:
            parts = [f"{first} to {end - 1}" for first, end in span[:2] if first < end]
            keys = f"keys {' and '.join(parts)} of {self.shape[3]}"
        masked = "no mask" if self.seen is None else "a mask that layers share"
        return f"torch.nn.functional.scaled_dot_product_attention over {keys}, with {masked}"

    def __repr__(self) -> str:
        return f"StepMask({self.shape[2]} queries: {self.explain()})"


def _form_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
    kinds = query.dtype, query.device, key.dtype, key.device, value.dtype, value.device
    return query.shape, key.shape, value.shape, kinds


def _cut(x: Tensor, span: KeySpan) -> Tensor:
    """The keys or values of a span."""
    (sink, sinks_end), (first, end), _ = span
    last = x[:, :, first:end]
    return last if sink == sinks_end else torch.cat((x[:, :, sink:sinks_end], last), 2)


def _scores_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where bool [..., keys] is true, and -inf elsewhere: the logarithms of 1 and 0."""
    if torch.compiler.is_compiling():
        return seen.to(dtype).log()
    keys = seen.shape[-1]
    room = torch.empty((*seen.shape[:-1], -(-keys // ALIGNED) * ALIGNED), dtype=dtype, device=seen.device)
    return room[..., :keys].copy_(seen).log_()


def step(of: PairsRequest, near: WindowKeys, may_cut: bool, dtype: Any = None) -> ModelMask:
    """The mask of few queries.

    `may_cut`: whether it may depend on the position and the padding by more than the values of tensors. Padding on a
    GPU is then read, with one sync. `dtype`: that of the queries, if it is known.
    """
    known = not torch.compiler.is_compiling() or of.plain
    rules = Rules.of(of.function) if known else None
    if rules is not None and (rules.ids is not None or rules.chunks is not None):
        rules = None
    span = _span(of, rules, near) if may_cut and rules is not None else None
    if span is not None and span.whole:
        first, end = (of.kv_offset + at for at in span.keys)
        if all_there(of.padding, 0 if near.sinks else first, end):  # sinks count from the first token
            return StepMask(of, near, _less_than_all(span, of), None)
    if span is None or near.sinks:  # which are elsewhere in a sequence with padding
        span = KeySpan((0, 0), (0, of.kv_len), False)
    return _masked(of, near, rules, span, may_cut, dtype)


def last_step(of: PairsRequest, dtype: Any) -> ModelMask:
    """The mask of a request that `is_last`, in a causal model."""
    if all_there(of.padding, of.kv_offset, of.kv_offset + of.kv_len):
        return StepMask(of, EVERY, None, None)
    return _masked(of, EVERY, Rules(ahead=[1]), KeySpan((0, 0), (0, of.kv_len), False), True, dtype)


def _masked(
    of: PairsRequest, near: WindowKeys, rules: Rules | None, span: KeySpan, grows: bool, dtype: Any
) -> ModelMask:
    """The mask of queries that do not all see the same keys of a span."""
    if not torch.compiler.is_compiling() and (torch.is_inference_mode_enabled() or torch.is_grad_enabled()):
        with torch.inference_mode(False), torch.no_grad():
            return _masked(of, near, rules, span, grows, dtype)
    first, end = span.keys
    if end - first > (LONGEST_GROWING if grows else LONGEST):
        return ModelMask(blocks_of(of, near), (of.batch, 1, of.q_len, of.kv_len))
    seen = seen_pairs(of._replace(kv_offset=of.kv_offset + first, kv_len=end - first), near, rules)
    return StepMask(of, near, _less_than_all(span, of), seen, dtype)


def _less_than_all(span: KeySpan, of: PairsRequest) -> KeySpan | None:
    return None if span.keys == (0, of.kv_len) else span


def _span(of: PairsRequest, rules: Rules, near: WindowKeys) -> KeySpan | None:
    """The keys that any query sees, without a look at padding; None for none and for those without a form."""
    if isinstance(of.q_offset, Tensor):
        return None
    place = of.q_offset - of.kv_offset
    last, own = place + of.q_len - 1, max(0, place - min(rules.back) + 1) if rules.back else 0
    (back, ahead), first, end, whole = near.sides(rules), own, of.kv_len, True
    if back is not None:
        first, whole = max(0, place - back + 1), last - back + 1 <= max(0, place - back + 1)
    if ahead is not None:
        end = min(end, last + ahead)
        whole = whole and place + ahead >= end
    if first >= end:
        return None
    if not near.sinks:
        return KeySpan((0, 0), (first, end), whole)
    if not rules.causal or of.q_len > 1:
        return None
    sinks_end = min(near.sinks - of.kv_offset, end)
    if sinks_end >= first:
        return KeySpan((0, 0), (own, end), whole)
    return KeySpan((own, sinks_end) if own < sinks_end else (0, 0), (first, end), whole)


def is_last(of: PairsRequest) -> bool:
    """Whether arguments are as transformers passes them, for one query at the last of several keys."""
    if type(of.q_offset) is not int or type(of.kv_offset) is not int or type(of.kv_len) is not int:
        return False
    if of.q_len != 1 or of.q_offset + 1 != of.kv_offset + of.kv_len or of.kv_len < 2 or of.kv_offset < 0:
        return False
    if type(of.batch) is not int or of.batch < 1 or type(of.device) is not torch.device:
        return False
    padding = of.padding
    if padding is None:
        return True
    return type(padding) is Tensor and padding.ndim == 2 and padding.shape[0] == of.batch


def all_there(padding: Tensor | None, first: int, end: int) -> bool:
    """Whether these keys are tokens. False also where a look at the padding is not possible."""
    if padding is None:
        return True
    if torch.compiler.is_compiling() or is_fake(padding) or is_functorch_wrapped_tensor(padding):
        return False
    if padding.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return end <= padding.shape[1] and bool(padding[:, first:end].all())


def blocks_of(of: PairsRequest, near: WindowKeys, seen: Tensor | None = None) -> ResolvedRule:
    """The blocks of the pairs that a request and `near` admit, `seen` if they are known."""
    if seen is None:
        seen = seen_pairs(of, near)
    return ResolvedRule(step_mask(seen, near.block, near.most(of.q_len, of.kv_len)))


def seen_pairs(of: PairsRequest, near: WindowKeys, rules: Rules | None = None) -> Tensor:
    """The pairs that a request and `near` admit, bool [1 or B, 1, q_len, kv_len].

    `rules`: what the function of the request is, if it is known; they need fewer operators.
    """
    if rules is not None and not near.sinks and (rules.back or rules.ahead):
        return _seen_near(of, near, rules)
    seen = of.evaluated(1 if of.padding is None and of.plain else of.batch)
    if not near.window:
        return seen
    query = torch.arange(of.q_len, dtype=torch.int64, device=of.device)[:, None] + of.q_offset
    key = torch.arange(of.kv_len, dtype=torch.int64, device=of.device) + of.kv_offset
    admitted = (query - key).abs() < near.window
    if near.sinks:
        if of.padding is not None:  # sinks count from the first token
            key = key - of.padding.to(torch.uint8).argmax(1)[:, None, None, None]
        admitted = admitted | (key < near.sinks)
    return seen & admitted


def _seen_near(of: PairsRequest, near: WindowKeys, rules: Rules) -> Tensor:
    """Pairs by their distance alone, and padding."""
    end, (back, ahead) = of.kv_offset + of.kv_len, near.sides(rules)
    key = torch.arange(of.kv_offset, end, dtype=torch.int64, device=of.device)
    query = of.q_offset
    if of.q_len > 1:
        query = torch.arange(of.q_len, dtype=torch.int64, device=of.device)[:, None] + query
    found = [] if ahead is None else [key < query + ahead]
    if back is not None:
        found.append(key > query - back)
    seen = found[0] if len(found) == 1 else found[0] & found[1]
    seen = seen.view(1, 1, of.q_len, of.kv_len)
    if of.padding is None:
        return seen
    there = of.padding.to(of.device, torch.bool)[:, of.kv_offset : end]
    there = functional.pad(there, (0, of.kv_len - there.shape[1]))
    return seen & there[:, None, None]


def step_mask(seen: Tensor, block: int, most: int) -> BlockMask:
    """The mask of bool [batch, 1, q_len, kv_len], where a tile sees at most `most` blocks. Without a sync.

    Its sizes are bounds on a CPU too, so that they are equal for all positions.
    """
    batch, _, q_len, kv_len = seen.shape
    columns, device = -(-kv_len // block), seen.device
    tiles = functional.pad(seen[:, 0], (0, columns * block - kv_len)).view(batch, q_len, columns, block)
    whole, some = tiles.all(3).all(1), tiles.any(3).any(1)
    rows = rows_of(whole[:, None, None], (some & ~whole)[:, None, None], most)
    first = torch.arange(batch, dtype=torch.int32, device=device) * columns
    bits = pack_bits(tiles.transpose(1, 2).flatten(0, 1))
    return BlockMask.unchecked(
        q_len=q_len, kv_len=kv_len, block=(TILE, block), batch=batch, heads=1,
        full=rows.full, partial=rows.partial, rules=(rows.columns.flatten(1) + first[:, None]).flatten(),
        bits=functional.pad(bits, (0, 0, 0, TILE - q_len)), sizes=Sizes(batch * most, batch * most, most, exact=False),
        pure=False, label=f"{q_len} queries of a cache",
    )  # fmt: skip
