"""How the commands talk: one console, one progress bar, one red line for an error.

Names of matrices, kernels and files come from outside. So no text is read as markup, and no control character of it
reaches the terminal: both hold for whatever `console()` prints. Style goes by `style=` and by `Text`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from sparsek import __version__
from sparsek.bench.memory import out_of_memory
from sparsek.core.errors import SparseKError

EXIT_ERROR = 2
PIPE_WIDTH = 120
TICK_SECONDS = 5.0


class Commands(TyperGroup):
    """A group of commands, the outermost with --version.

    SparseK's and file errors, and missing memory, become one red line and exit code 2.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.parent is None and args[:1] == ["--version"]:
            console().print(f"sparsek {__version__}")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SparseKError, OSError) as error:
            complain(str(error))
            raise typer.Exit(EXIT_ERROR) from None
        except (MemoryError, RuntimeError) as error:
            missing = out_of_memory(error)
            if missing is None:
                raise
            complain(missing)
            raise typer.Exit(EXIT_ERROR) from None


def plain(text: str) -> str:
    """`text` without what a terminal could obey: everything that is not printable, but for newlines."""
    if text.isprintable():
        return text
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")


def middle_out(text: str, longest: int) -> str:
    """`text` in at most `longest` characters, an ellipsis in the middle: like names differ at their ends, which get two
    thirds."""
    if len(text) <= longest:
        return text
    tail = longest * 2 // 3
    return f"{text[: longest - tail - 1]}…{text[len(text) - tail :]}"


class _Screen(Console):
    """A console that prints text as it is, without markup, emoji codes and control characters."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of any renderable; rich's own control segments pass."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(plain(part.text), part.style)


def console(stderr: bool = False) -> Console:
    """A console on the current standard output or error, made when needed so that tests can redirect it.

    Text that goes to a file or a pipe is 120 columns wide, unless COLUMNS says otherwise.
    """
    made = _Screen(stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def table(title: str) -> Table:
    """An empty table in the style of every command: no lines, so that nine columns fit in 100 characters."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))


def complain(text: str) -> None:
    """Prints an error in red on standard error."""
    console(stderr=True).print(Text("error:", "bold"), text, style="red", soft_wrap=True)


@contextmanager
def progress(total: int, what: str) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Shows progress on standard error while the block runs: yields `say(text)` and `advance()`.

    A bar on a terminal; elsewhere a line whenever five seconds have passed since the last.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        ticker = _Ticker(screen, total, what)
        yield ticker.say, ticker.advance
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, description=text), lambda: bar.advance(task)


class _Ticker:
    """Progress as plain lines."""

    def __init__(self, screen: Console, total: int, what: str) -> None:
        self.screen = screen
        self.total = total
        self.done = 0
        self.text = what
        self.last = time.monotonic()

    def say(self, text: str) -> None:
        self.text = text
        if time.monotonic() - self.last > TICK_SECONDS:
            self.last = time.monotonic()
            self.screen.print(f"{self.done}/{self.total} {self.text}", soft_wrap=True)

    def advance(self) -> None:
        self.done += 1
        self.say(self.text)


def duration(seconds: float) -> str:
    """Three digits with a fitting unit: "41.2 us", "1.52 ms", "2.10 s"."""
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(value: float) -> str:
    """412, 41.2, 4.12, 0.412."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:.{decimals}f}"
