"""Up to which share of stored values does a sparse weight beat a dense one? By the kernels' predictions, for any card.

For x [tokens, K] @ W.T with W [N, K] in BSR or BSR24, its blocks spread evenly, or in 2:4, which stores half. Nothing
is timed, and no matrix made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsek.bench.charts import COLOURS, pyplot
from sparsek.core import files
from sparsek.core.device import card_named
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.matrix import two_four
from sparsek.matrix.bsr24 import BLOCK_STEP
from sparsek.matrix.storage import BlockStats, Storage
from sparsek.ops.planning import choose
from sparsek.plan.dense import dense_seconds
from sparsek.plan.product_problems import DenseSpec, SpmmProblem

FORMATS = {"semi24": "2:4", "bsr": "BSR", "bsr24": "BSR24"}
BLOCKS = (16, 32, 64, 128)
TOKENS = (16, 64, 256, 1024, 4096, 16384)
# Shares are found to a fraction of this many.
FINE = 256


@dataclass(frozen=True)
class Setting:
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


def break_even(form: str, block: int, tokens: int, setting: Setting | None = None) -> float:
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
    setting = setting or Setting()
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


def curves(setting: Setting, blocks: Sequence[int] = BLOCKS, tokens: Sequence[int] = TOKENS) -> list[Curve]:
    """A curve for every format and every block that it can have and that fits W; 0 stands for none."""
    fitting = [block for block in blocks if block <= min(setting.shape)]
    pairs = [("semi24", 0)] if setting.shape[1] % two_four.STEP == 0 else []
    pairs += [("bsr", block) for block in fitting]
    pairs += [("bsr24", block) for block in fitting if block % BLOCK_STEP == 0]
    return [
        Curve(form, block, tuple(break_even(form, block, count, setting) for count in tokens))
        for form, block in pairs
    ]


def check_picture(path: Path) -> None:
    """Raises InvalidInput for a file whose ending names no kind of picture, as `draw` would after all the work."""
    known = sorted(pyplot().matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in known:
        raise InvalidInput(f"{path}: no picture is written as {path.suffix}; use one of {', '.join(known)}")


def draw(found: Sequence[Curve], setting: Setting, path: Path, tokens: Sequence[int] = TOKENS) -> None:
    """The curves as a picture, a panel for each format with blocks: below its line sparse is faster than dense.

    Needs the plot extra.
    """
    plt = pyplot()
    found = [curve for curve in found if curve.block]
    forms = [form for form in FORMATS if any(curve.form == form for curve in found)]
    blocks = sorted({curve.block for curve in found})
    figure, panels = plt.subplots(
        1, len(forms), figsize=(4.6 * len(forms), 4.2), layout="constrained", squeeze=False, sharey=True
    )
    for axes, form in zip(panels[0], forms, strict=True):
        for curve in found:
            if curve.form == form:
                axes.plot(
                    tokens,
                    [share * 100 for share in curve.shares],
                    marker="o",
                    color=COLOURS[blocks.index(curve.block) % len(COLOURS)],
                    label=f"block {curve.block}",
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(count) for count in tokens], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(0, 103)
        axes.set_title(
            FORMATS[form] + (", at most half of the values" if form == "bsr24" else ""), fontsize=10
        )
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    panels[0][0].set_ylabel("% of the values stored: below it sparse is faster")
    figure.suptitle(f"as fast as dense: {setting.words}", fontsize=10)
    with files.replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower() or "png", dpi=150)
    plt.close(figure)
