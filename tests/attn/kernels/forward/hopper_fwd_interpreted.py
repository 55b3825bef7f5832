"""hopper.attention_fwd with its Gluon kernel replaced by a walk in torch, and the merge in Triton's interpreter.

What `prepare` and `launch` hand over is what the walk works on: schedules, descriptions for TMA, strides of bounds,
parts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.forward import hopper_fwd as attention_fwd
from sparsek.attn.kernels.forward.hopper_fwd import KERNEL, Config
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_operands as operands
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.reference.scores import PLAIN, Scores
from sparsek.core.device import H200
from sparsek.engine.launch.gluon import Described
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import ATTENTION_CASES, MEMBER_CASES, AttentionCase, random_bits
from tests.attn.kernels.forward.changes import CHANGES
from tests.attn.kernels.planned import attention_problem as problem
from tests.sampling import sampled

FIELDS = 8  # of a record of the schedule
SLOT = 128  # rows of a part
NOWHERE = 1 << 22
LOG2E = 1.4426950408889634


class Box(NamedTuple):
    """One box of a described tensor: what lies in the tensor, and where that is in the box."""

    inside: Tensor
    at: tuple[slice, ...]

    @classmethod
    def of(cls, d: Described, corner: Sequence[int]) -> "Box":
        whole = d.base.as_strided(d.shape, d.strides, d.base.storage_offset())
        ends = [min(first + side, n) for first, side, n in zip(corner, d.box, d.shape, strict=True)]
        inside = whole[tuple(slice(min(a, b), b) for a, b in zip(corner, ends, strict=True))]
        return cls(inside, tuple(slice(0, n) for n in inside.shape))


def read(d: Described, corner: Sequence[int]) -> Tensor:
    """TMA's load, as rows of the last dim: zeros outside the tensor."""
    inside, at = Box.of(d, corner)
    box = torch.zeros(d.box, dtype=torch.float64)
    box[at] = inside.double()
    return box.view(-1, d.box[-1])


def write(d: Described, corner: Sequence[int], rows: Tensor) -> None:
    """TMA's store: what lies outside the tensor is dropped."""
    inside, at = Box.of(d, corner)
    inside.copy_(rows.view(d.box)[at])


def walked(device: torch.device, kernel: Any, ctas: int, args: Sequence[Any], options: Any = None) -> None:
    """Stands in for `launch_on`: every tile of every CTA, each warpgroup's rows at once, in float64."""
    a = dict(zip(kernel.arg_names, args, strict=True))
    for cta in range(ctas):
        for t in range(cta, int(a["count"]), ctas):
            record = a["tiles"].flatten()[FIELDS * t : FIELDS * (t + 1)].tolist()
            for group in range(a["T"].groups):
                attend(a, record, group)


def attend(a: dict[str, Any], record: list[int], group: int) -> None:
    """One warpgroup's rows of one tile."""
    c: Config = a["T"]
    pos, b, h, _, _, _, _, part = record
    r = 64 * group + torch.arange(64)
    at, corner = pos + r // c.pack, [b, h // c.pack, pos + group * (64 // c.pack), 0, 0]
    q = read(a["q_desc"], corner)
    scores, values = [], []
    for key, entry in steps(a, record):
        s = changed(a, q @ read(a["k_desc"], [b, h // a["group"], key, 0]).T, record, r, at, key)
        if entry is not None:
            s = s.masked_fill(~allowed(a, record, r, at, key, entry), -torch.inf)
        scores.append(s)
        values.append(read(a["v_desc"], [b, h // a["group"], key, 0]))
    s = torch.cat(scores, 1)
    top = s.amax(1)
    sink = torch.full_like(top, -torch.inf)
    if c.sinks and part < 0:
        sink = raw(a["sinks"])[(h + r % c.pack) * a["sink_step"]].double() * LOG2E
    top = torch.maximum(top, sink)
    base = top.masked_fill(top == -torch.inf, 0.0)
    p = torch.exp2(s - base[:, None])
    total = p.sum(1) + torch.exp2(sink - base)
    o = p @ torch.cat(values) / total.masked_fill(total == 0, 1.0)[:, None]
    lse = top + total.log2()
    if part < 0:
        write(a["o_desc"], corner, o.to(a["o_desc"].base.dtype))
        if c.lse:
            here = at < a["q_len"]
            row = (b * a["heads"] + h + r % c.pack) * a["q_len"] + at
            a["lse"].view(-1)[row[here]] = (lse * 0.6931471805599453).float()[here]
    else:
        assert c.split, "a kernel without parts met one"
        a["part_lse"].view(-1)[part * SLOT + r] = lse.float()
        at_row = (part * SLOT + r) * c.v_dim
        a["part"].view(-1)[at_row[:, None] + torch.arange(c.v_dim)] = o.float()


def raw(x: Tensor) -> Tensor:
    """Memory from x's first element on, as a pointer sees it."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))


def changed(a: dict[str, Any], s: Tensor, record: list[int], r: Tensor, at: Tensor, key: int) -> Tensor:
    """Scores of a step in base 2: capped and biased."""
    c: Config = a["T"]
    _, b, h = record[:3]
    if c.softcap:
        s = torch.tanh(s * a["cap"] / (2 * LOG2E))
    s = s * a["scale"]
    if c.alibi:
        head = b * a["slope_item"] + (h + r % c.pack) * a["slope_head"]
        slope = raw(a["slopes"])[head].double() * LOG2E
        distance = (at + a["ahead"])[:, None] - (key + torch.arange(c.keys))[None]
        s = s - slope[:, None] * distance.abs()
    return s


def steps(a: dict[str, Any], record: list[int]) -> Iterator[tuple[int, int | None]]:
    """First key of every step of a tile, and for steps of partial blocks their entry, -1 where there is none."""
    c: Config = a["T"]
    _, _, _, p_begin, partial, f_begin, full, _ = record
    assert partial + full > 0, "a tile has no step"
    starts = range(0, c.block[1], c.keys)
    for i in range(partial):
        entry = p_begin + i if p_begin >= 0 else -1
        column = int(a["partial"][entry]) if entry >= 0 else NOWHERE
        yield from ((column * c.block[1] + start, entry) for start in starts)
    for i in range(full):
        yield from ((int(a["full"][f_begin + i]) * c.block[1] + start, None) for start in starts)


def allowed(a: dict[str, Any], record: list[int], r: Tensor, at: Tensor, key: int, entry: int) -> Tensor:
    """Which of a step's keys each row sees, bool [64, keys]."""
    c: Config = a["T"]
    pos, b, h = record[:3]
    if c.bits and entry >= 0 and (rule := int(a["rules"][entry])) >= 0:
        row = (pos % c.block[0] * c.pack + r) // c.pack
        word = (rule * c.block[0] + row[:, None]) * (c.block[1] // 32)
        column = key % c.block[1] + torch.arange(c.keys)
        return (a["bits"].view(-1)[word + column // 32] >> (column % 32) & 1).bool()
    k = key + torch.arange(c.keys)
    if not c.interval:
        return (k < a["kv_len"]).expand(64, -1)
    base = b * a["bound_item"] + h // a["bound_group"] * a["bound_head"]
    lo, hi = (
        torch.where(at < a["q_len"], a[name].view(-1)[base + at.clamp(max=a["q_len"] - 1)], 0)
        for name in ("lo", "hi")
    )
    lo, hi = lo[:, None], hi[:, None]
    seen = (k >= lo) & (k < hi)
    if c.members and entry >= 0:
        token = (pos % c.block[0] * c.pack + r) // c.pack // c.members
        words = a["rules"][entry * c.words :][: c.words].long()
        member = (words[token // 32] >> token % 32 & 1).bool()[:, None]
        seen &= member | (k >= hi - a["window"]) | (k < lo + a["sunk"]) if c.member_ends else member
    return seen


@pytest.fixture(autouse=True)
def walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fwd, "launch_on", walked)


def hold(case: AttentionCase, made: Callable[[Tensor], Scores] | None = None) -> list[Config]:
    """Every config that an H200 is offered for the case, over poisoned outputs, with lse and without. `made`: scores of
    q that are changed.
    """
    q, k, v, mask = case.make()
    scores = PLAIN if made is None else made(q)
    p = replace(problem(q, k, v, mask, scores=scores), card=H200)
    assert KERNEL.why_not(p) == []
    configs = list(KERNEL.configs(p))
    for c in configs:
        out = operands.empty_out(q, v.shape[3]).fill_(torch.nan)
        lse = poisoned(q.shape[:3], torch.float32)
        work = KERNEL.prepare(p, c, mask)
        KERNEL.launch(c, work, AttentionCall(q, k, v, mask, q.shape[3] ** -0.5, out, lse, scores))
        gate = check_attention(q, k, v, mask, out, lse, scores=scores)
        assert gate.passed, f"{c}: {gate}"
    c = replace(configs[0], lse=False)
    out = operands.empty_out(q, v.shape[3]).fill_(torch.nan)
    call = AttentionCall(q, k, v, mask, q.shape[3] ** -0.5, out, None, scores)
    KERNEL.launch(c, KERNEL.prepare(p, c, mask), call)
    assert check_attention(q, k, v, mask, out, scores=scores).passed
    return configs


@pytest.mark.parametrize("case", sampled([x for x in ATTENTION_CASES if x.dtype != "fp32"], 8), ids=str)
def test_every_case_in_every_config(case: AttentionCase) -> None:
    hold(case)


@pytest.mark.parametrize("case", sampled(MEMBER_CASES, 4), ids=str)
def test_members_in_every_config(case: AttentionCase) -> None:
    hold(case)
    hold(case, CHANGES["all"])


@pytest.mark.parametrize(
    ("block", "dims"),
    sampled(list(itertools.product([(128, 128), (64, 64)], [(64, 64), (192, 96), (32, 40)])), 2),
    ids=str,
)
def test_heads_that_are_packed_and_cut(block: tuple[int, int], dims: tuple[int, int]) -> None:
    def mask(device: str) -> BlockMask:
        return BlockMask.causal(q_len=5, kv_len=10 * block[1], block=block, device=device)

    configs = hold(AttentionCase("few queries", mask, heads=(4, 2), dims=dims, bshd=True))
    assert all(c.split for c in configs)
    assert {c.pack for c in configs} == {1, 2}


@pytest.mark.parametrize("heads", sampled([1, 2, 4], 2))
def test_tiles_that_are_cut_beside_whole_ones(heads: int) -> None:
    """Bits and intervals; a list for all heads, for each head of k or of q; another for each batch item."""

    def mask(device: str) -> BlockMask:
        shape = {"q_len": 100, "kv_len": 1500, "block": 64, "device": device}
        bits = random_bits(device, (100, 1500), (64, 64), heads=heads, batch=2, density=0.33)
        return bits | BlockMask.sliding_window(**shape, window=100)

    configs = hold(AttentionCase("bits", mask, heads=(4, 2), dims=(32, 96), batch=2, dtype="bf16"))
    assert all(c.split for c in configs)


@pytest.mark.parametrize("name", ["slopes per item", "all"])
def test_changed_scores_of_packed_cut_and_whole_tiles(name: str) -> None:
    """Two items: slopes differ between them. The first queries of the second mask see no key."""

    def few(device: str) -> BlockMask:
        return BlockMask.causal(q_len=5, kv_len=640, block=64, device=device)

    def none_first(device: str) -> BlockMask:
        return BlockMask.causal(q_len=100, kv_len=50, block=64, device=device)

    configs = hold(AttentionCase("few", few, heads=(4, 2), batch=2, dims=(32, 32)), CHANGES[name])
    assert {(c.split, c.pack) for c in configs} == {(True, 1), (True, 2)}
    hold(AttentionCase("none first", none_first, batch=2, dims=(32, 32)), CHANGES[name])
