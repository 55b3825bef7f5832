"""hopper.attention_paged with its Gluon kernel replaced by a walk in torch, and the schedule in Triton's interpreter.

What `launch` hands over is what the walk works on: records, descriptions for TMA, tables, lists and strides.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.kernels.paged import hopper
from sparsek.attn.kernels.paged.hopper import KERNEL, Config
from sparsek.attn.kernels.paged.schedule import FAR, FIELDS
from sparsek.core.device import H200
from sparsek.testing.paged_budget import expected_attention_paged
from tests.attn.kernels.forward.hopper_fwd_interpreted import Box, read
from tests.attn.kernels.paged.calls import PagedRun, check_beyond_windows, check_cleared, paged_problem
from tests.attn.paged_cases import LISTS, ListForm, PagedCase, drawn_case
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("one_thread")


def walked(device: torch.device, kernel: Any, ctas: int, args: Sequence[Any], options: Any = None) -> None:
    """Stands in for `launch_on`: every tile of every CTA, each warpgroup's rows at once, in float64."""
    a = dict(zip(kernel.arg_names, args, strict=True))
    total = int(a["count"]) * a["units"]
    met: set[int] = set()
    for cta in range(ctas):
        for t in range(cta, total, ctas):
            turn = t // ctas
            back = turn < total // ctas and (total // ctas - 1 - turn) % 2 == 0
            number = turn * ctas + ctas - 1 - t % ctas if back else t
            met.add(number)
            record = a["tiles"].flatten()[FIELDS * (number // a["units"]) :][:FIELDS].tolist()
            for group in range(a["T"].groups):
                attend(a, record, number % a["units"] * a["T"].pack, group)
    assert met == set(range(total))


def attend(a: dict[str, Any], record: list[int], h: int, group: int) -> None:
    """One warpgroup's rows of one tile."""
    c: Config = a["T"]
    row_0, request, p_0, live, length = record[:5]
    r = 64 * group + torch.arange(64, device="cpu")
    own, corner = r // c.pack, [h // c.pack, row_0 + group * (64 // c.pack), 0, 0]
    q = read(a["q_desc"], corner)
    scores, values = [], []
    for key, masked, entry in steps(a, record, h):
        near = p_0 - a["window"] + 1 if c.window else 0
        k, v = (
            loaded(a, name, request, h // a["group"], key, (length, near)) for name in ("k_desc", "v_desc")
        )
        s = q @ k.T
        if c.softcap:
            s = 1 - 2 / (1 + torch.exp2(s * a["bend"]))
        s = s * a["scale"]
        if masked or (c.lists and key + c.keys > length):
            seen = allowed(a, p_0 + own, key, length)
            if c.members and masked and entry >= 0:
                words = a["words"][entry * c.words :][: c.words].long()
                seen &= (words[own // 32] >> own % 32 & 1).bool()[:, None]
            s = s.masked_fill(~seen, -torch.inf)
        scores.append(s)
        v[max(0, length - key) :] = 0
        values.append(v)
    s = torch.cat(scores, 1)
    if c.sink_logits:
        sink = a["sink_logits"][h + r % c.pack].double() * 1.4426950408889634
        s = torch.cat((s, sink[:, None]), 1)
        values.append(values[0][:1] * 0)
    top = s.amax(1)
    p = torch.exp2(s - top.masked_fill(top == -torch.inf, 0.0)[:, None])
    total = p.sum(1)
    o = p @ torch.cat(values) / total.masked_fill(total == 0, 1.0)[:, None]
    there = own < live
    if c.lse:
        lse = (top + total.log2()) * 0.6931471805599453
        a["lse"].view(-1)[((h + r % c.pack) * a["tokens"] + row_0 + own)[there]] = lse.float()[there]
    if a["whole_rows"] and live >= (group + 1) * (64 // c.pack):
        inside, at = Box.of(a["o_desc"], corner)
        inside.copy_(o.view(a["o_desc"].box)[at])
    else:
        out = a["out"].as_strided((a["tokens"], h + c.pack, a["v_len"]), (a["out_row"], a["out_head"], 1))
        out[row_0 + own[there], h + (r % c.pack)[there]] = o[there, : a["v_len"]].to(out.dtype)


def loaded(a: dict[str, Any], name: str, request: int, head: int, key: int, seen: tuple[int, int]) -> Tensor:
    """K or V of a step, box by box. `seen`: the end of the keys, and the first one in a window."""
    c: Config = a["T"]
    d = a[name]
    width = c.dim if name == "k_desc" else c.v_dim
    rows = []
    for at in range(key, key + c.keys, c.box):
        page = a["pages"]
        length, near = seen
        if at < length and (at + c.box > near or at < a["sinks"]):
            entry = a["table"].storage_offset() + request * a["table_row"] + at // c.page * a["table_step"]
            page = min(max(int(a["table"].as_strided((1,), (1,), entry)), 0), a["pages"] - 1)
        rows.append(torch.cat([read(d, [page, head, at % c.page, x]) for x in range(0, width, d.box[-1])], 1))
    return torch.cat(rows)


def steps(a: dict[str, Any], record: list[int], h: int) -> Iterator[tuple[int, bool, int]]:
    """First key of every step of a tile, whether it is masked, and its entry in the lists; -1 for none."""
    c: Config = a["T"]
    if not c.lists:
        masked, total, f_1, n_1, edge, n_2, sink, f_0, blocks = record[5:14]
        for i in range(masked):
            yield (f_1 + i if i < n_1 else edge + i - n_1 if i < n_2 else sink + i - n_2) * c.keys, True, -1
        for i in range(total - masked):
            yield (f_0 + i if i < blocks else i - blocks) * c.keys, False, -1
        return
    row = h // a["of_list"] * a["list_rows"] + record[6 if c.members else 5]
    count = 0
    for name, entries, masked in (("p", "partial", True), ("f", "full", False)):
        for i in range(int(a[f"{name}_counts"][row])):
            entry = int(a[f"{name}_starts"][row]) + i
            block = int(a[entries][entry])
            known = 0 <= block < FAR // c.list_block[1]
            for start in range(0, c.list_block[1], c.keys):
                count += 1
                yield (block * c.list_block[1] + start if known else FAR), masked, entry
    if count == 0:
        yield FAR, True, -1


def allowed(a: dict[str, Any], at: Tensor, key: int, length: int) -> Tensor:
    """Which of a step's keys each row sees, bool [64, keys]."""
    c: Config = a["T"]
    k = (key + torch.arange(c.keys, device="cpu"))[None]
    lo, hi = at * 0, at * 0 + length
    if c.window:
        lo = at - a["window"] + 1
    if c.causal:
        hi = torch.minimum(hi, at + 1)
    sunk = hi.clamp(max=a["sinks"])
    if c.window and not c.causal:
        hi = torch.minimum(hi, at + a["window"])
    seen = (k >= lo[:, None]) & (k < hi[:, None])
    return seen | (k < sunk[:, None]) if c.sinks else seen


@pytest.fixture(autouse=True)
def walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "launch_on", walked)


def hold(case: PagedCase, seed: int, form: str = "wide") -> None:
    """Every config that an H200 is offered for the case."""
    inputs = case.make(seed=seed)
    expected = expected_attention_paged(inputs)
    for c in KERNEL.configs(paged_problem(inputs, H200)):
        made = PagedRun(KERNEL, inputs, c, form, H200)
        made.run()
        made.check(f"{case}, seed {seed}", expected)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from(("contiguous", "wide", "odd")))
def test_drawn_batches(seed: int, form: str) -> None:
    hold(drawn_case(seed, queries=300, keys=200, lists=[None, None, None, *LISTS[::5]]), seed, form)


def test_pages_that_no_window_reaches_may_hold_nan() -> None:
    base = PagedCase(
        "windows", ((3, 500), (1, 400), (130, 700)), heads=(4, 2), dims=(64, 64), page=16, form="pair", window=90,
        sinks=20,
    )  # fmt: skip
    for case in (base, replace(base, sinks=0, page=64), replace(base, causal=False)):
        for c in sampled(list(KERNEL.configs(paged_problem(case.make(), H200))), 2, of=case):
            check_beyond_windows(KERNEL, case.make(), c, H200)


@pytest.mark.parametrize("lengths", [((3, 500), (1, 400)), ((0, 9),)], ids=str)
def test_rows_behind_the_last_request_are_cleared(lengths: tuple[tuple[int, int], ...]) -> None:
    inputs = PagedCase("tail", lengths, heads=(4, 2), dims=(64, 40), form="pair", tail=150, loose=True).make()
    check_cleared(KERNEL, inputs, next(iter(KERNEL.configs(paged_problem(inputs, H200)))), H200)


def test_every_rule_at_once() -> None:
    seed = int.from_bytes(os.urandom(3), "little")
    base = PagedCase(
        "rules",
        ((130, 400), (0, 9), (3, 300)),
        heads=(4, 2),
        page=128,
        form="pair",
        softcap=5.0,
        sink_logits=True,
    )
    hold(replace(base, window=90, sinks=70, page=64, loose=True), seed)
    hold(replace(base, lists=ListForm((64, 128), full=True)), seed, "odd")
    hold(replace(base, causal=False, page=16, heads=(16, 1), form="pair by rows"), seed)


@pytest.mark.parametrize(
    "case", sampled([((16, 1), 128), ((16, 2), 64), ((8, 2), 64), ((6, 3), 64)], 1), ids=str
)
def test_lists_of_single_queries_are_joined(case: tuple[tuple[int, int], int]) -> None:
    """Also lists without full blocks, as `from_indices` makes them: full and partial entries differ in number."""
    heads, block = case
    lengths = ((37, 400), (0, 9), (3, 300), (1, 130))
    most = 3 if heads[0] > 6 else 1
    for full in (False, True):
        lists = ListForm((1, block), most=most, full=full)
        made = PagedCase(
            "joined", lengths, heads=heads, page=64, form="pair", lists=lists, sink_logits=True
        ).make()
        for c in sampled(list(KERNEL.configs(paged_problem(made, H200))), 1, of=case):
            run = PagedRun(KERNEL, made, c, "wide", H200)
            run.run()
            run.check(str(case), expected_attention_paged(made))
