"""Calls of kernels of attention over paged keys: poisoned outputs with canaries around them, and their gate."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.kernels import PagedCall
from sparsek.attn.plan.paged_call import Paged
from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.device import card_of
from sparsek.testing.paged_budget import ExpectedPaged, PagedInputs, expected_attention_paged
from tests.attn.paged_cases import PagedCase

CANARY = 3.0
BEFORE = 128  # elements of a room before an output, which stays aligned


def paged_problem(inputs: PagedInputs, card: Any = None) -> PagedProblem:
    """The problem of a case on its device, or on another card; with lse."""
    call = Paged(
        **inputs.operands(), causal=inputs.causal, window=inputs.window, sinks=inputs.sinks, max_q=inputs.max_q,
        max_k=inputs.max_k, lse=True,
    )  # fmt: skip
    return call.problem(card_of(inputs.q.device) if card is None else card)


class PagedRun:
    """A kernel's call of `inputs`. `out` and `lse` are views into rooms that hold CANARY around them.

    `form` of out [tokens, Hq, Dv]: "contiguous"; "wide" with 8 elements and a head between rows, "odd" with 3, so that
    rows are not aligned; "heads", a view of [Hq, tokens, Dv].
    """

    def __init__(
        self, kernel: Any, inputs: PagedInputs, config: Any = None, form: str = "contiguous", card: Any = None
    ) -> None:
        self.kernel, self.inputs, self.problem = kernel, inputs, paged_problem(inputs, card)
        assert kernel.why_not(self.problem) == [], kernel.why_not(self.problem)
        self.config = kernel.default(self.problem) if config is None else config
        (tokens, heads, _), dv, q = inputs.q.shape, inputs.v.shape[3], inputs.q
        wide = {"wide": 8, "odd": 3}.get(form, 0)
        more = 1 if wide else 0
        sides = (heads, tokens) if form == "heads" else (tokens, heads + more)
        self.out = _room((*sides, dv + wide), q.dtype, q.device)[..., :dv]
        self.out = self.out.transpose(0, 1) if form == "heads" else self.out[:, :heads]
        of_lse = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.lse = _room((heads, tokens), of_lse, q.device)
        self.call = PagedCall(**inputs.operands(), out=self.out, lse=self.lse)
        self.empty = not (tokens and inputs.max_k and inputs.max_q)
        self.work = None if self.empty else kernel.prepare(self.problem, self.config, q.device)

    def poison(self) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)

    def launch(self) -> None:
        if not self.empty:
            self.kernel.launch(self.config, self.work, self.call)
            return
        end, sinks = self.inputs.end, self.inputs.sink_logits
        self.out[:end] = 0
        self.lse[:, :end] = -torch.inf if sinks is None else sinks[:, None]

    def run(self) -> tuple[Tensor, Tensor]:
        """out and lse of one launch over poison."""
        self.poison()
        self.launch()
        return self.out, self.lse

    def check_canaries(self, what: object = "") -> None:
        """Nothing beside out and lse was written."""
        for x in (self.out, self.lse):
            rest = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).clone()
            rest.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(CANARY)
            assert bool((rest == CANARY).all()), f"{what}: written beside out or lse"

    def check(self, what: object = "", expected: ExpectedPaged | None = None) -> None:
        """out and lse are within the budget, and nothing else was written."""
        end = self.inputs.end
        expected = expected_attention_paged(self.inputs) if expected is None else expected
        gate = expected.judge(self.out, self.lse)
        assert gate.passed, f"{what}, {self.config}: {gate}"
        assert bool(self.out[end:].isnan().all()), f"{what}: rows of no request were written"
        assert bool(self.lse[:, end:].isnan().all()), f"{what}: lse of no request was written"
        self.check_canaries(what)


def check_cleared(kernel: Any, inputs: PagedInputs, config: Any = None, card: Any = None) -> None:
    """Rows behind the last request become 0 and -inf as far as the call asks for that, and no other bit changes."""
    made = PagedRun(kernel, inputs, config, card=card)
    out, lse = (x.clone() for x in made.run())
    end, tokens = inputs.end, inputs.q.shape[0]
    for ends in ((tokens, tokens), (tokens, 0), (0, tokens)):
        made.call = made.call._replace(out_end=ends[0], lse_end=ends[1])
        made.run()
        made.check_canaries(kernel.name)
        assert torch.equal(made.out[:end], out[:end])
        assert torch.equal(made.lse[:, :end], lse[:, :end])
        if ends[0]:
            assert torch.equal(made.out[end:], torch.zeros_like(out[end:]))
        else:
            assert bool(made.out[end:].isnan().all())
        behind = made.lse[:, end:]
        assert bool((behind == -torch.inf).all() if ends[1] else behind.isnan().all())


def attend_paged(
    kernel: Any, inputs: PagedInputs, config: Any = None, form: str = "contiguous"
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a kernel over poison; nothing beside them was written."""
    made = PagedRun(kernel, inputs, config, form)
    made.run()
    made.check_canaries(kernel.name)
    return made.out, made.lse


def check_paged(
    kernel: Any,
    case: PagedCase,
    config: Any = None,
    *,
    device: str = "cpu",
    seed: int = 0,
    form: str = "contiguous",
) -> None:
    """The kernel's result of the case is within the budget."""
    made = PagedRun(kernel, case.make(device, seed=seed), config, form)
    made.run()
    made.check(f"{case}, seed {seed}")


def alone(inputs: PagedInputs, r: int) -> PagedInputs:
    """Request r of a batch without lists, alone, with the same bounds of lengths."""
    first, last = inputs.cu_seqlens_q[r : r + 2].tolist()
    return inputs._replace(
        q=inputs.q[first:last], block_table=inputs.block_table[r : r + 1], seq_lens=inputs.seq_lens[r : r + 1],
        cu_seqlens_q=inputs.cu_seqlens_q[r : r + 2] - first, end=last - first,
    )  # fmt: skip


def check_alone(kernel: Any, inputs: PagedInputs, rows: Any, config: Any = None) -> None:
    """The requests `rows` have the same bits alone."""
    whole = PagedRun(kernel, inputs, config)
    whole.run()
    edges = inputs.cu_seqlens_q.tolist()
    for r in rows:
        out, lse = attend_paged(kernel, alone(inputs, r), whole.config)
        assert torch.equal(out, whole.out[edges[r] : edges[r + 1]]), r
        assert torch.equal(lse, whole.lse[:, edges[r] : edges[r + 1]]), r


def check_beyond_windows(kernel: Any, inputs: PagedInputs, config: Any = None, card: Any = None) -> None:
    """Pages that no query's window and no sink reaches become NaN, and no bit changes."""
    made = PagedRun(kernel, inputs, config, card=card)
    want = [x.clone() for x in made.run()]
    page, given = inputs.k.shape[2], 0
    edges, lengths = inputs.cu_seqlens_q.tolist(), inputs.seq_lens.tolist()
    for r, length in enumerate(lengths):
        first_seen = length - (edges[r + 1] - edges[r]) - inputs.window + 1
        for j in range(-(-length // page)):
            if inputs.sinks <= j * page and (j + 1) * page <= first_seen:
                given += 1
                for x in (inputs.k, inputs.v):
                    x[int(inputs.block_table[r, j])] = torch.nan
    assert given, "no page is out of reach"
    for found, before in zip(made.run(), want, strict=True):
        assert torch.equal(found.nan_to_num(7.0), before.nan_to_num(7.0)), made.config


def hostile(inputs: PagedInputs, seed: int, *names: str) -> PagedInputs:
    """Half of the entries of these tensors are any numbers of 32 bits; "lists" is all of theirs."""
    draw = torch.Generator("cpu").manual_seed(seed)

    def of(x: Tensor) -> Tensor:
        made = torch.randint(-(2**31), 2**31, x.shape, generator=draw, device="cpu").to(x)
        half = torch.rand(x.shape, generator=draw, dtype=torch.float32, device="cpu").to(x.device) < 0.5
        return torch.where(half, made, x)

    def of_lists(lists: PageLists) -> PageLists:
        full, partial = (BlockLists(*map(of, each)) for each in (lists.full, lists.partial))
        return replace(lists, full=full, partial=partial)

    found = {name: getattr(inputs, name) for name in names}
    changed = {name: of_lists(x) if name == "lists" else of(x) for name, x in found.items() if x is not None}
    return inputs._replace(**changed)


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor inside a larger one full of CANARY."""
    size = torch.Size(shape).numel()
    return torch.full((BEFORE + size + BEFORE,), CANARY, dtype=dtype, device=device)[
        BEFORE : BEFORE + size
    ].view(shape)
