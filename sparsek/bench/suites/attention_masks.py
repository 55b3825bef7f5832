"""Masks of a benchmark, each written as one short text, "window:4096+sinks:128". MASK_FORMS is the grammar."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.mask.mask import BlockMask

Maker = Callable[[], BlockMask]


class Geometry(NamedTuple):
    """What a mask covers: q_len queries and kv_len keys in blocks (bq, bk), on a device. Random blocks are drawn for
    each head, from the seed.
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    heads: int
    device: torch.device
    seed: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def sides(self) -> dict[str, Any]:
        """Lengths and block, as builders of masks take them."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "block": self.block}

    @property
    def frame(self) -> dict[str, Any]:
        """Also the device."""
        return {**self.sides, "device": self.device}

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(self.seed)


@dataclass(frozen=True)
class MaskForm:
    """One kind of mask.

    `form` is how it is written; letters stand for numbers. `named(*numbers)` is its name in tables.
    `prepare(geometry, *numbers)` draws what is random and returns the call that builds the mask: only that call is
    SparseK's own. `causal`: no query sees a later key. `uniform`: every query tile keeps as many blocks, whole ones
    where the block divides the lengths. `rule(q, k, *numbers)`, for rules of positions: whether the query at key
    position q [rows, 1] sees key k [1, keys]. `numbers`: those of a parsed text.
    """

    form: str
    named: Callable[..., str]
    prepare: Callable[..., Maker]
    causal: bool = False
    uniform: bool = False
    rule: Callable[..., Tensor] | None = None
    numbers: tuple[float, ...] = ()

    @property
    def pattern(self) -> str:
        """A regular expression for the whole text, one group for each number."""
        return re.sub(r"[A-Z]", r"(\\d+(?:\\.\\d+)?)", re.escape(self.form))

    @property
    def words(self) -> str:
        """ "window:2048" -> "window 2048"."""
        return self.named(*self.numbers)

    def maker(self, over: Geometry) -> Maker:
        """Draws what is random now; each call of the result builds the mask anew from it."""
        return self.prepare(over, *self.numbers)

    def sees(self, q: Tensor, k: Tensor) -> Tensor | None:
        """bool [rows, keys]: which keys k [keys] the queries at key positions q [rows] see; None for random masks."""
        return None if self.rule is None else self.rule(q[:, None], k[None, :], *self.numbers)


def parse_mask(text: str) -> MaskForm:
    """The kind of a text, with its numbers. Raises InvalidInput that lists the forms."""
    for kind in MASK_FORMS:
        found = re.fullmatch(kind.pattern, text.strip())
        if found:
            return replace(kind, numbers=tuple(map(float, found.groups())))
    forms = ", ".join(kind.form for kind in MASK_FORMS)
    raise InvalidInput(f"no mask is written {text!r}; known, with numbers for the letters: {forms}")


def _window(over: Geometry, window: float, sinks: float = 0) -> Maker:
    given = {"window": int(window), "sinks": int(sinks), "causal": True}
    return partial(BlockMask.sliding_window, **given, **over.frame)


def _sees_window(q: Tensor, k: Tensor, window: float, sinks: float = 0) -> Tensor:
    return (k <= q) & ((k > q - window) | (k < sinks))


def _topk(over: Geometry, count: float) -> Maker:
    shape = (1, over.heads, *over.grid)
    scores = torch.randn(shape, generator=over.generator, dtype=torch.float32, device=over.device)
    return partial(BlockMask.topk, scores, int(count), **over.sides)


def _blocks(over: Geometry, share: float) -> Maker:
    rows, columns = over.heads * over.grid[0], over.grid[1]
    kept = max(1, min(columns, round(share * columns)))
    return _drawn(over, torch.full((rows,), kept, device=over.device))


def _bigbird(over: Geometry, window: float, globals_: float, random: float) -> Maker:
    given = {"window": int(window), "globals": int(globals_), "random": int(random)}
    return partial(BlockMask.bigbird, **given, seed=over.seed, heads=over.heads, **over.frame)


def _like_bigbird(over: Geometry, *numbers: float) -> Maker:
    """As many blocks as that bigbird has, shared out evenly among its rows."""
    rows = over.heads * over.grid[0]
    stored = _bigbird(over, *numbers)().stored_blocks
    counts = torch.full((rows,), stored // rows, device=over.device)
    counts[: stored % rows] += 1
    return _drawn(over, counts[torch.randperm(rows, generator=over.generator, device=over.device)])


def _drawn(over: Geometry, counts: Tensor) -> Maker:
    """Distinct random blocks, counts[row] of them in each row of the heads' query tiles."""
    shape = (len(counts), over.grid[1])
    keys = torch.rand(shape, generator=over.generator, dtype=torch.float32, device=over.device)
    ranks = keys.argsort(1).argsort(1)
    indices = (ranks < counts[:, None]).nonzero()[:, 1].int()
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return partial(BlockMask.from_blocks, indptr, indices, heads=over.heads, **over.sides)


MASK_FORMS: tuple[MaskForm, ...] = (
    MaskForm(
        "full",
        "full".format,
        lambda over: partial(BlockMask.full, **over.frame),
        rule=lambda q, k: (q == q) & (k == k),
    ),
    MaskForm(
        "causal",
        "causal".format,
        lambda over: partial(BlockMask.causal, **over.frame),
        causal=True,
        rule=lambda q, k: k <= q,
    ),
    MaskForm("window:W", "window {:g}".format, _window, causal=True, rule=_sees_window),
    MaskForm("window:W+sinks:S", "window {:g} + sinks {:g}".format, _window, causal=True, rule=_sees_window),
    MaskForm("blocks:F", lambda share: f"random {100 * share:g} %", _blocks, uniform=True),
    MaskForm("topk:K", "top {:g}".format, _topk, uniform=True),
    MaskForm("bigbird:W:G:R", "bigbird {:g} / {:g} / {:g}".format, _bigbird),
    MaskForm("uniform-like-bigbird:W:G:R", "uniform as bigbird {:g} / {:g} / {:g}".format, _like_bigbird),
)
