"""Masks of a benchmark, each written as one short text, "window:4096+sinks:128". MASK_FORMS is the grammar."""

import lzma
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine.data import Draw, TokenMaker, random_dense

Maker = Callable[[], BlockMask]
NEIGHBOURS = 64  # queries that mostly choose alike
# What benchmarks/token_lists recorded: 16 blocks of 64 keys for 8,192 tokens and 4 heads of k.
RECORDED, RECORDED_SHAPE, RECORDED_BLOCK = Path(__file__).with_name("recorded_lists.xz"), (4, 8192, 16), 64
NUMBER = r"(\\d+(?:\\.\\d+)?)"  # the replacement of a letter


@dataclass(frozen=True)
class MaskForm:
    """One kind of mask.

    `form` is how it is written; letters stand for numbers. `named(*numbers)` is its name in tables.
    `prepare(case, draw, *numbers)` draws what is random, for each head, and returns the call that builds the mask: only
    that call is SparseK's own. `causal`: no query sees a later key. `uniform`: every query tile keeps as many blocks,
    whole ones where the block divides the lengths. `rule(q, k, *numbers)`, for rules of positions: whether the query at
    key position q [rows, 1] sees key k [1, keys]. `numbers`: those of a parsed text.
    """

    form: str
    named: Callable[..., str]
    prepare: Callable[..., Maker]
    causal: bool = False
    uniform: bool = False
    rule: Callable[..., Tensor] | None = None
    numbers: tuple[float, ...] = ()

    @property
    def words(self) -> str:
        """ "window:2048" -> "window 2048"."""
        return self.named(*self.numbers)

    def sees(self, q: Tensor, k: Tensor) -> Tensor | None:
        """bool [rows, keys]: which keys k [keys] the queries at key positions q [rows] see; None for random masks."""
        return None if self.rule is None else self.rule(q[:, None], k[None, :], *self.numbers)


def parse_mask(text: str, forms: Sequence[MaskForm] = ()) -> MaskForm:
    """The kind of a text, with its numbers; `forms`: unless MASK_FORMS. Raises InvalidInput that lists the forms."""
    forms = forms or MASK_FORMS
    for kind in forms:
        found = re.fullmatch(re.sub(r"[A-Z]", NUMBER, re.escape(kind.form)), text.strip())
        if found:
            return replace(kind, numbers=tuple(map(float, found.groups())))
    known = ", ".join(kind.form for kind in forms)
    raise InvalidInput(f"no mask is written {text!r}; known, with numbers for the letters: {known}")


def _window(case: Any, draw: Draw, window: float, sinks: float = 0) -> Maker:
    given = {"window": int(window), "sinks": int(sinks), "causal": True}
    return partial(BlockMask.sliding_window, **given, **case.frame, device=draw.device)


def _sees_window(q: Tensor, k: Tensor, window: float, sinks: float = 0) -> Tensor:
    return (k <= q) & ((k > q - window) | (k < sinks))


def _topk(case: Any, draw: Draw, count: float) -> Maker:
    shape = (1, case.heads, *case.grid)
    scores = random_dense(*shape, dtype=torch.float32, device=draw.device, seed=draw.seed)
    return partial(BlockMask.topk, scores, int(count), **case.frame)


def _documents(case: Any, draw: Draw, length: float) -> Maker:
    """Documents of that many tokens, as many for every seed; what is left over is shared by the first and the last."""
    longest, generator = int(length), torch.Generator("cpu").manual_seed(draw.seed)
    left = case.q_len % longest or longest
    first = int(torch.randint(1, max(2, left), (), generator=generator, device="cpu"))
    edges = [0, *range(first, case.q_len - left + first + 1, longest), case.q_len]
    ends = torch.tensor(edges, dtype=torch.int32, device=draw.device)
    return partial(BlockMask.documents, ends, case.q_len, max_seqlen=longest, block=case.block)


def _blocks(case: Any, draw: Draw, share: float) -> Maker:
    rows, columns = case.heads * case.grid[0], case.grid[1]
    kept = max(1, min(columns, round(share * columns)))
    return _drawn(case, draw, torch.full((rows,), kept, device=draw.device))


def _bigbird(case: Any, draw: Draw, window: float, globals_: float, random: float) -> Maker:
    given = {"window": int(window), "globals": int(globals_), "random": int(random), "heads": case.heads}
    return partial(BlockMask.bigbird, **given, seed=draw.seed, **case.frame, device=draw.device)


def _like_bigbird(case: Any, draw: Draw, *numbers: float) -> Maker:
    """As many blocks as that bigbird has, shared out evenly among its rows."""
    rows = case.heads * case.grid[0]
    stored = _bigbird(case, draw, *numbers)().stored_blocks
    counts = torch.full((rows,), stored // rows, device=draw.device)
    counts[: stored % rows] += 1
    return _drawn(case, draw, counts[torch.randperm(rows, generator=_generator(draw), device=draw.device)])


def _drawn(case: Any, draw: Draw, counts: Tensor) -> Maker:
    """Distinct random blocks, counts[row] of them in each row of the heads' query tiles."""
    shape = (len(counts), case.grid[1])
    keys = torch.rand(shape, generator=_generator(draw), dtype=torch.float32, device=draw.device)
    ranks = keys.argsort(1).argsort(1)
    indices = (ranks < counts[:, None]).nonzero()[:, 1].int()
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return partial(BlockMask.from_blocks, indptr, indices, heads=case.heads, **case.frame)


def _tokens(case: Any, draw: Draw, blocks: float, noise: float) -> Maker:
    """The first block, the query's own, and those of the largest scores: NEIGHBOURS queries share these but for `noise`
    percent; with 100 they are random. With 15, unions of 8 tokens have 1.15 times as many blocks at 8K, 1.5 at 32K.
    """
    block, generator = case.block[1], _generator(draw)
    columns, ahead = case.grid[1], case.kv_len - case.q_len

    def drawn(rows: int) -> Tensor:
        return torch.rand(rows, columns, generator=generator, device=draw.device, dtype=torch.float32)

    own = ((torch.arange(case.q_len, dtype=torch.int64, device=draw.device) + ahead) // block)[:, None]
    beyond = torch.arange(columns, dtype=torch.int64, device=draw.device) > own
    kept = []
    for _ in range(case.kv_heads):  # one at a time: a score for each query and block
        score = drawn(case.q_len)
        if noise < 100:
            groups = drawn(-(-case.q_len // NEIGHBOURS))
            score = score * (noise / 100) + groups.repeat_interleave(NEIGHBOURS, 0)[: case.q_len]
        score.masked_fill_(beyond, -1.0)
        score[:, 0] = 8.0
        score.scatter_(1, own, 9.0)
        value, index = score.topk(min(int(blocks), columns))
        kept.append(torch.where(value < 0, -1, index).int())
    return TokenMaker(torch.stack(kept)[None], case)


def read_recorded(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """The lists [heads, tokens, blocks] that benchmarks/token_lists wrote, int32."""
    heads, tokens, blocks = shape
    steps = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8).reshape(heads, blocks, tokens)
    places = np.cumsum(steps, -1, dtype=np.uint8).astype(np.int32).transpose(0, 2, 1)
    return torch.from_numpy(np.where(places == 255, -1, places))


def _recorded(case: Any, draw: Draw) -> Maker:
    """The first heads and tokens of the recorded lists, which see no later block."""
    heads, tokens, _ = RECORDED_SHAPE
    if (
        case.q_len != case.kv_len
        or case.q_len > tokens
        or case.kv_heads > heads
        or case.block[1] != RECORDED_BLOCK
    ):
        raise InvalidInput(
            f"recorded lists are of {heads} heads, {tokens} queries and keys, blocks of {RECORDED_BLOCK}"
        )
    kept = read_recorded(RECORDED, RECORDED_SHAPE)[: case.kv_heads, : case.q_len]
    return TokenMaker(kept[None].to(draw.device), case)


def _generator(draw: Draw) -> torch.Generator:
    return torch.Generator(device=draw.device).manual_seed(draw.seed)


MASK_FORMS: tuple[MaskForm, ...] = (
    MaskForm(
        "full",
        "full".format,
        lambda case, draw: partial(BlockMask.full, **case.frame, device=draw.device),
        rule=lambda q, k: (q == q) & (k == k),
    ),
    MaskForm(
        "causal",
        "causal".format,
        lambda case, draw: partial(BlockMask.causal, **case.frame, device=draw.device),
        causal=True,
        rule=lambda q, k: k <= q,
    ),
    MaskForm("window:W", "window {:g}".format, _window, causal=True, rule=_sees_window),
    MaskForm("window:W+sinks:S", "window {:g} + sinks {:g}".format, _window, causal=True, rule=_sees_window),
    MaskForm("blocks:F", lambda share: f"random {100 * share:g} %", _blocks, uniform=True),
    MaskForm("topk:K", "top {:g}".format, _topk, uniform=True),
    MaskForm("tokens:K:N", "{:g} blocks per token, noise {:g} %".format, _tokens, causal=True),
    MaskForm("tokens:recorded", "16 blocks per token, of a trained model".format, _recorded, causal=True),
    MaskForm("documents:L", "documents of {:g}".format, _documents, causal=True),
    MaskForm("bigbird:W:G:R", "bigbird {:g} / {:g} / {:g}".format, _bigbird),
    MaskForm("uniform-like-bigbird:W:G:R", "uniform as bigbird {:g} / {:g} / {:g}".format, _like_bigbird),
)
