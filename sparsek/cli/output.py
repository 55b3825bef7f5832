"""How the commands talk: one console, one progress bar, one red line for an error.

Names of matrices, kernels and files come from outside. So no text is read as markup, and no control character of it
reaches the terminal: both hold for whatever `console()` prints. Style goes by `style=` and by `Text`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

import typer
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from sparsek import __version__
from sparsek.core import env
from sparsek.core.errors import SparseKError

EXIT_ERROR = 2
PIPE_WIDTH = 120
NARROWEST = 20
NARROW = 60  # columns into which three of text do not go
TICK_SECONDS = 5.0
UNBOUNDED = 10_000  # columns
# Where the encoding of the output lacks a character: signs of one column each, and before lines are laid out, longer.
ONE_FOR_ONE = str.maketrans("…│─┌┐└┘█▓▒░▀▄×·→↳", "~|-++++#%+.',x.>>")
SPELLED_OUT = str.maketrans({"²": "^2", "³": "^3", "…": "...", "→": "->"})


class Commands(TyperGroup):
    """A group of commands, the outermost with --version."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.parent is None and args[:1] == ["--version"]:
            console().print(f"sparsek {__version__}")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command. SparseK's and file errors, missing memory, and an output that takes no more (a full disk)
        become one red line and exit code 2; a pipe that its reader has closed ends the command without a word.
        """
        if (env.columns() or PIPE_WIDTH) < NARROW:
            without_boxes(self)
        try:
            with _usable_output():
                return super().main(*args, **kwargs)
        except BrokenPipeError:
            _abandon_output()
            sys.exit(1)
        except (SparseKError, OSError) as error:
            said = str(error)
        except (MemoryError, RuntimeError) as error:
            from sparsek.bench.engine.memory import (
                out_of_memory,
            )  # and torch, which `sparsek --help` does without

            missing = out_of_memory(error)
            if missing is None:
                raise
            said = missing
        with suppress(OSError):
            complain(said)
        _abandon_output()
        sys.exit(EXIT_ERROR)


def without_boxes(command: Any) -> None:
    """Typer's pages of help and of wrong usage in plain lines, which fit where boxes would cut words."""
    command.rich_markup_mode = None
    for each in getattr(command, "commands", {}).values():
        without_boxes(each)


@contextmanager
def _usable_output() -> Iterator[None]:
    """Standard output that replaces what it cannot encode and is written to its end, and a COLUMNS that typer's own
    pages can be printed in."""
    width, before = env.columns(), os.environ.pop("COLUMNS", None)
    if width is not None:
        os.environ["COLUMNS"] = str(max(width, NARROWEST))
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        if sys.stdout is not None:
            sys.stdout.flush()


def _abandon_output() -> None:
    """If standard output takes no more, what is left of it goes nowhere: Python would complain of it at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    """A console that prints text as it is, without markup, emoji codes and control characters.

    What the encoding of the output cannot say is drawn in ASCII, or becomes "?".
    """

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a str, with what the output cannot say spelled out before lines are broken."""
        return super().render_str(text if self._can_say(text) else text.translate(SPELLED_OUT), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of any renderable; rich's own control segments pass."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(self._drawn(plain(part.text)), part.style)

    def _can_say(self, text: str) -> bool:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def _drawn(self, text: str) -> str:
        if self._can_say(text):
            return text
        return text.translate(ONE_FOR_ONE).encode(self.encoding, "replace").decode(self.encoding)


class _Table(Table):
    """A table without lines. Where the screen has no room for its columns it is a list of its rows: nothing is cut.

    Rich would cut numbers of narrow columns before it breaks the words of wide ones.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width - len(self.columns)  # a space stands behind each
        spans = [_span(console, column) for column in self.columns]
        slack = room - sum(least for least, _ in spans)
        if slack < 0 if not self.expand else options.max_width < NARROW:
            yield from self._listed()
            return
        if not self.expand:
            narrowest_need = sorted(range(len(spans)), key=lambda at: spans[at][1] - spans[at][0])
            for done, at in enumerate(narrowest_need):
                least, most = spans[at]
                more = min(most - least, slack // (len(spans) - done))
                self.columns[at].width, slack = least + more, slack - more
        yield from super().__rich_console__(console, options)

    def _listed(self) -> Iterator[RenderableType]:
        if self.title:
            yield Text(str(self.title), "bold")
        heads = [_text(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = map(_text, cells)
            yield first
            for head, cell in zip(heads[1:], others, strict=True):
                if cell.plain:
                    yield Padding(
                        Text.assemble(head, ": " if head.plain else "", cell), (0, 0, 0, 2), expand=False
                    )


def _span(console: Console, column: Column) -> tuple[int, int]:
    """The least columns that cut no word, and the most that are of use."""
    wide = console.options.update_width(UNBOUNDED)
    found = [Measurement.get(console, wide, each) for each in (column.header, *column.cells)]
    most = max((each.maximum for each in found), default=0)
    least = most if column.no_wrap else max((each.minimum for each in found), default=0)
    return max(least, column.min_width or 0), max(most, column.min_width or 0)


def _text(cell: RenderableType) -> Text:
    """A cell on one line."""
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return Text(" ").join(text.split("\n"))


def console(stderr: bool = False) -> Console:
    """A console on the current standard output or error, made when needed so that tests can redirect it.

    Text that goes to a file or a pipe is 120 columns wide, unless COLUMNS says otherwise; no text is narrower than 20.
    """
    made, width = _Screen(stderr=stderr), env.columns()
    if width is not None:
        made.size = ConsoleDimensions(
            max(width, NARROWEST), made.height
        )  # a width alone is ignored if TERM=dumb
    elif not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def table(title: str) -> Table:
    """An empty table in the style of every command: no lines, so that nine columns fit in 100 characters."""
    return _Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))


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
