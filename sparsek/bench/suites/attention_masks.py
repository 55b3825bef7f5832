"""Masks of a benchmark, each written as one short text, "window:4096+sinks:128". MASK_FORMS is the grammar."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.mask.mask import BlockMask

Maker = Callable[[], BlockMask]


class Geometry(NamedTuple):
    """What a mask covers: q_len queries and kv_len keys in blocks (bq, bk); what is random is drawn for each head."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    heads: int

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    def frame(self, device: torch.device) -> dict[str, Any]:
        """Lengths, block and device, as builders of masks take them."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "block": self.block, "device": device}


@dataclass(frozen=True)
class MaskForm:
    """One kind of mask.

    `form` is how it is written; letters stand for numbers. `words(*numbers)` is its name in tables.
    `prepare(geometry, numbers, device, seed)` draws what is random and returns the call that builds the mask: only that
    call is SparseK's own. `causal`: no query sees a later key. `uniform`: every query tile keeps as many blocks, whole
    ones where the block divides the lengths. `sees(q, k, numbers)`, for rules of positions: whether the query that
    stands at key position q sees key k.
    """

    form: str
    words: Callable[..., str]
    prepare: Callable[[Geometry, tuple[float, ...], torch.device, int], Maker]
    causal: bool = False
    uniform: bool = False
    sees: Callable[[Tensor, Tensor, tuple[float, ...]], Tensor] | None = None

    @property
    def pattern(self) -> str:
        """A regular expression for the whole text, one group for each number."""
        return re.sub(r"[A-Z]", r"(\\d+(?:\\.\\d+)?)", re.escape(self.form))


@dataclass(frozen=True)
class MaskText:
    """A parsed text: its kind and its numbers."""

    kind: MaskForm
    numbers: tuple[float, ...]

    @property
    def words(self) -> str:
        """ "window:2048" -> "window 2048"."""
        return self.kind.words(*self.numbers)

    def maker(self, over: Geometry, device: torch.device, seed: int = 0) -> Maker:
        """What is random is drawn now; each call of the result builds the mask anew from it."""
        return self.kind.prepare(over, self.numbers, device, seed)

    def sees(self, q: Tensor, k: Tensor) -> Tensor | None:
        """bool [rows, keys]: which keys k [keys] the queries at key positions q [rows] see; None for random masks."""
        return None if self.kind.sees is None else self.kind.sees(q[:, None], k[None, :], self.numbers)


def parse_mask(text: str) -> MaskText:
    """The kind and numbers of a text. Raises InvalidInput that lists the forms."""
    for kind in MASK_FORMS:
        found = re.fullmatch(kind.pattern, text.strip())
        if found:
            return MaskText(kind, tuple(float(number) for number in found.groups()))
    forms = ", ".join(kind.form for kind in MASK_FORMS)
    raise InvalidInput(f"no mask is written {text!r}; known, with numbers for the letters: {forms}")


def _full(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    return lambda: BlockMask.full(**over.frame(device))


def _causal(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    return lambda: BlockMask.causal(**over.frame(device))


def _window(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    window, sinks = (int(number) for number in (*numbers, 0)[:2])
    return lambda: BlockMask.sliding_window(window=window, sinks=sinks, causal=True, **over.frame(device))


def _bigbird(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    names = ("window", "globals", "random")
    given = dict(zip(names, map(int, numbers), strict=True)) | {"seed": seed, "heads": over.heads}
    return lambda: BlockMask.bigbird(**given, **over.frame(device))


def _topk(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    generator = torch.Generator(device=device).manual_seed(seed)
    scores = torch.randn(1, over.heads, *over.grid, generator=generator, dtype=torch.float32, device=device)
    return lambda: BlockMask.topk(
        scores, int(numbers[0]), q_len=over.q_len, kv_len=over.kv_len, block=over.block
    )


def _blocks(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    rows, columns = over.heads * over.grid[0], over.grid[1]
    kept = max(1, min(columns, round(numbers[0] * columns)))
    return _drawn(over, torch.full((rows,), kept, device=device), seed)


def _like_bigbird(over: Geometry, numbers: tuple[float, ...], device: torch.device, seed: int) -> Maker:
    """As many blocks as that bigbird has, shared out evenly among its rows."""
    rows = over.heads * over.grid[0]
    stored = _bigbird(over, numbers, device, seed)().stored_blocks
    counts = torch.full((rows,), stored // rows, device=device)
    counts[: stored % rows] += 1
    generator = torch.Generator(device=device).manual_seed(seed)
    return _drawn(over, counts[torch.randperm(rows, generator=generator, device=device)], seed)


def _drawn(over: Geometry, counts: Tensor, seed: int) -> Maker:
    """Distinct random blocks, counts[row] of them in each row of the heads' query tiles."""
    generator = torch.Generator(device=counts.device).manual_seed(seed)
    shape, device = (len(counts), over.grid[1]), counts.device
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
    ranks = drawn.argsort(1).argsort(1)
    indices = (ranks < counts[:, None]).nonzero()[:, 1].int()
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return lambda: BlockMask.from_blocks(
        indptr, indices, q_len=over.q_len, kv_len=over.kv_len, block=over.block, heads=over.heads
    )


def _sees_all(q: Tensor, k: Tensor, numbers: Sequence[float]) -> Tensor:
    return torch.ones(q.shape[0], k.shape[1], dtype=torch.bool, device=q.device)


def _sees_window(q: Tensor, k: Tensor, numbers: Sequence[float]) -> Tensor:
    window, sinks = (*numbers, 0)[:2]
    return (k <= q) & ((k > q - window) | (k < sinks))


MASK_FORMS: tuple[MaskForm, ...] = (
    MaskForm("full", "full".format, _full, sees=_sees_all),
    MaskForm("causal", "causal".format, _causal, causal=True, sees=lambda q, k, numbers: k <= q),
    MaskForm("window:W", "window {:g}".format, _window, causal=True, sees=_sees_window),
    MaskForm("window:W+sinks:S", "window {:g} + sinks {:g}".format, _window, causal=True, sees=_sees_window),
    MaskForm("blocks:F", lambda share: f"random {100 * share:g} %", _blocks, uniform=True),
    MaskForm("topk:K", "top {:g}".format, _topk, uniform=True),
    MaskForm("bigbird:W:G:R", "bigbird {:g} / {:g} / {:g}".format, _bigbird),
    MaskForm("uniform-like-bigbird:W:G:R", "uniform as bigbird {:g} / {:g} / {:g}".format, _like_bigbird),
)
