"""Up to which share of stored values does a sparse weight beat a dense one? By the kernels' predictions, for any card.

For x [tokens, K] @ W.T with W [N, K] in BSR or BSR24, its blocks spread evenly, or in 2:4, which stores half. Nothing
is timed, and no matrix made.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsek.core.device import card_named
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.plan.dense import dense_seconds
from sparsek.engine.planning import choose
from sparsek.pictures import svg
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr24 import BLOCK_STEP
from sparsek.products.formats.storage import BlockStats, Storage
from sparsek.products.plan.problems import DenseSpec, SpmmProblem

FORMATS = {"semi24": "2:4", "bsr": "BSR", "bsr24": "BSR24"}
BLOCKS = (16, 32, 64, 128)
TOKENS = (16, 64, 256, 1024, 4096, 16384)
# Shares are found to a fraction of this many.
FINE = 256
PANEL = 400, 320  # pixels
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
)  # Okabe and Ito, for readers who do not see red and green


@dataclass(frozen=True)
class CurveSetting:
    """What all points of a picture share: W's shape [N, K], the dtype, the card by its short name."""

    shape: tuple[int, int] = (4096, 4096)
    dtype: str = "bf16"
    card: str = "h200"

    @property
    def words(self) -> str:
        card = card_named(self.card)
        rates = f" by {card.source}" if card.source else ""
        return f"W [{self.shape[0]}, {self.shape[1]}] {self.dtype}, predicted for {card.name}{rates}"

    def dense_seconds(self, tokens: int) -> float:
        n, k = self.shape
        return dense_seconds(card_named(self.card), self.dtype, tokens, n, k)

    def seconds(self, form: str, block: int, tokens: int, share: float) -> float:
        """Predicted seconds with so large a share of the blocks; infinite where no kernel runs."""
        try:
            return choose(self._problem(form, block, tokens, share)).seconds
        except Unsupported:
            return float("inf")

    def _problem(self, form: str, block: int, tokens: int, share: float) -> SpmmProblem:
        n, k = self.shape
        dense = DenseSpec(self.dtype, "col")
        a = Storage(self.dtype, self._blocks(form, block, share), two_four=form != "bsr")
        return SpmmProblem(a, dense, dense, n, k, tokens, card_named(self.card))

    def _blocks(self, form: str, block: int, share: float) -> BlockStats | None:
        """So large a share of blocks at random places, as many in each row."""
        if form == "semi24":
            return None
        n, k = self.shape
        rows, columns = -(-n // block), -(-k // block)
        nnzb = max(1, round(share * rows * columns))
        stats = BlockStats((block, block), nnzb, -(-nnzb // rows))
        if form == "bsr24":
            return stats
        # R rows of blocks at random places have this many distinct columns.
        apart = 1 - min(1.0, nnzb / (rows * columns))
        factors = [each for each in (2, 4, 8) if block <= 64 and each * block <= 128]
        merged = tuple((each, round(-(-rows // each) * columns * (1 - apart**each))) for each in factors)
        return replace(stats, merged=merged)


def break_even(form: str, block: int, tokens: int, setting: CurveSetting | None = None) -> float:
    """The largest share of W's values that a BSR ("bsr") or BSR24 ("bsr24") of such blocks may store and be as fast as
    a dense W: 1 if it is whatever it stores (half for BSR24, all its blocks), 0 if not even with a single block.

    Of "semi24", which has no blocks, a half or 0.
    """
    if form not in FORMATS:
        raise InvalidInput(f"no format is called {form!r}; known: {', '.join(FORMATS)}")
    if tokens < 1:
        raise InvalidInput(f"tokens must be at least 1, got {tokens}")
    if form == "bsr24" and block % BLOCK_STEP:
        raise InvalidInput(f"blocks of a BSR24 are multiples of {BLOCK_STEP}, not {block}")
    setting = setting or CurveSetting()
    limit = setting.dense_seconds(tokens)
    if form == "semi24":
        return 0.5 if setting.seconds(form, 0, tokens, 0.5) <= limit else 0.0
    values = 0.5 if form == "bsr24" else 1.0

    def wins(step: int) -> bool:
        return setting.seconds(form, block, tokens, step / FINE) <= limit

    if wins(FINE):
        return values
    low, high = 0, FINE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low / FINE * values


@dataclass(frozen=True)
class Curve:
    """Break-even shares of one format and block over tokens."""

    form: str
    block: int
    shares: tuple[float, ...]


def curves(
    setting: CurveSetting, blocks: Sequence[int] = BLOCKS, tokens: Sequence[int] = TOKENS
) -> list[Curve]:
    """A curve for every format and every block that it can have and that fits W; 0 stands for none."""
    fitting = [block for block in blocks if block <= min(setting.shape)]
    pairs = [("semi24", 0)] if setting.shape[1] % two_four.STEP == 0 else []
    pairs += [("bsr", block) for block in fitting]
    pairs += [("bsr24", block) for block in fitting if block % BLOCK_STEP == 0]
    return [
        Curve(form, block, tuple(break_even(form, block, count, setting) for count in tokens))
        for form, block in pairs
    ]


def draw(
    found: Sequence[Curve],
    setting: CurveSetting,
    path: str | os.PathLike[str],
    tokens: Sequence[int] = TOKENS,
) -> None:
    """The curves as an SVG picture, a panel for each format with blocks: below its line sparse is faster than dense."""
    where, parts = svg.as_path("path", path), []
    found = [curve for curve in found if curve.block]
    forms = [form for form in FORMATS if any(curve.form == form for curve in found)]
    blocks = sorted({curve.block for curve in found})
    width, height = PANEL
    for at, form in enumerate(forms):
        left = svg.LEFT + at * (width + svg.LEFT)
        title = FORMATS[form] + (", at most half of the values" if form == "bsr24" else "")
        parts.append(svg.text(left, -8, title, colour=svg.INK))
        for share in (0, 25, 50, 75, 100):
            y = height * (1 - share / 100)
            parts.append(f'<path stroke="{svg.EMPTY}" d="M{left} {y:g}h{width}"/>')
            parts.append(svg.text(left - 6, y + 4, f"{share} %", anchor="end"))
        steps = {count: left + width * place / max(len(tokens) - 1, 1) for place, count in enumerate(tokens)}
        parts += [svg.text(x, height + svg.LINE, str(count), anchor="middle") for count, x in steps.items()]
        parts.append(svg.text(left + width, height + 2 * svg.LINE, "tokens", anchor="end"))
        for curve in (each for each in found if each.form == form):
            colour = COLOURS[blocks.index(curve.block) % len(COLOURS)]
            line = [
                (steps[count], height * (1 - share))
                for count, share in zip(tokens, curve.shares, strict=True)
            ]
            corners = " ".join(f"{x:g},{y:g}" for x, y in line)
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{corners}"/>')
            parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{colour}"/>' for x, y in line]
    for at, block in enumerate(blocks):
        colour = COLOURS[at % len(COLOURS)]
        parts.append(svg.text(svg.LEFT + 80 * at, height + 3 * svg.LINE, f"block {block}", colour=colour))
    facts = ["% of the values stored: below a line sparse is faster", ""]
    size = len(forms) * (width + svg.LEFT) + svg.MARGIN, height + 3 * svg.LINE + svg.MARGIN
    svg.write(where, svg.page(f"as fast as dense: {setting.words}", facts, *size, parts))
