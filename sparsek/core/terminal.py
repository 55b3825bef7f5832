"""What all commands share: the console, tables, JSON, the progress bar, one red line for an error, exit codes, and
that the module of a command loads when it runs, or when its own help is printed.

Names of matrices, kernels and files come from outside. So no text is read as markup, and no control character of it
reaches the terminal: both hold for whatever `console()` prints. Style goes by `style=` and by `Text`.

Exit codes: 0; 1 for a wrong result or nothing measured; 2 for bad input; 130 after Ctrl-C; 141 for a closed pipe.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sparsek.core import env
from sparsek.core.errors import SparseKError

EXIT_ERROR = 2
INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 + the number of SIGINT, of SIGPIPE, as shells report them
HELP_WIDTH = 120
NARROWEST = 20
NARROW = 60  # columns into which three of text do not go
INDENT = 2
TICK_SECONDS = 2.0
RECENT = 3  # steps that the time left is estimated from
UNBOUNDED = 10_000  # columns
PIPE_WIDTH = UNBOUNDED  # lines of a file or a pipe are for other programs, and are not wrapped
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document and nothing else; progress goes to standard error."),
]
# Where the encoding of the output lacks a character: signs of one column each, and before lines are laid out, longer.
ONE_FOR_ONE = str.maketrans("…│─┌┐└┘█▓▒░▀▄×·→↳", "~|-++++#%+.',x.>>")
SPELLED_OUT = str.maketrans({"²": "^2", "³": "^3", "…": "...", "→": "->"})


class Commands(TyperGroup):
    """A group of commands, each with -h."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; Ctrl-C ends it with one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            with suppress(OSError):
                console(stderr=True).print("interrupted", style="red")
            raise typer.Exit(INTERRUPTED) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command. SparseK's and file errors, missing memory, and an output that takes no more (a full disk)
        become one red line and exit code 2. A pipe that its reader has closed ends the command silently.
        """
        kwargs["help_option_names"] = ["--help", "-h"]
        width = env.columns() or HELP_WIDTH
        if width < NARROW:
            without_boxes(self)
            kwargs["terminal_width"] = max(width, NARROWEST)  # typer's own least width is 50
        try:
            with _usable_output():
                return super().main(*args, **kwargs)
        except SystemExit as end:
            # Rich and typer turn a broken pipe into exit code 1.
            if isinstance(end.__context__, BrokenPipeError):
                _end_closed()
            raise
        except BrokenPipeError:
            _end_closed()
        except (SparseKError, OSError) as error:
            text = str(error)
        except (MemoryError, RuntimeError) as error:
            # Imports torch, which `sparsek --help` does without.
            from sparsek.core.memory import out_of_memory

            missing = out_of_memory(error)
            if missing is None:
                raise
            text = missing
        with suppress(OSError):
            complain(text)
        _abandon_output()
        sys.exit(EXIT_ERROR)


def _end_closed() -> NoReturn:
    _abandon_output()
    sys.exit(CLOSED_PIPE)


_Context: Any = TyperGroup.context_class


class _Stacked(_Context.formatter_class):
    """Help in which a name that is longer than a third of a line has a line of its own."""

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, min(col_max, self.width // 3), col_spacing)


class _Narrow(_Context):
    formatter_class = _Stacked


def without_boxes(command: Any) -> None:
    """Typer's pages of help and of wrong usage in plain lines, which fit where boxes would cut words."""
    command.rich_markup_mode, command.context_class = None, _Narrow
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
    """Discards what standard output does not take; Python would report it at exit."""
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
    """A table without lines that cuts nothing at any width.

    Where its columns do not fit side by side, the first cell of a row gets a line of its own above the others, as do
    long names. Where these do not fit either, each row is a list of headings and cells.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spans, room = [_span(console, column) for column in self.columns], options.max_width
        for column, width in zip(self.columns, _widths(spans, room), strict=False):
            column.width = width
        title, self.title = self.title, None  # rich would wrap it to the width of the columns
        if title:
            yield console.render_str(str(title), style="bold")
        if self.columns[0].width is not None:
            yield from super().__rich_console__(console, options)
            self.title = title
            return
        self.title = title
        widths = _widths(spans[1:], room - INDENT) if room >= NARROW else []
        yield from self._under_names(widths) if widths else self._listed()

    def _under_names(self, widths: Sequence[int]) -> Iterator[RenderableType]:
        """The first cell of a row on a line of its own, the others in columns below it."""
        first, *others = self.columns
        yield _text(first.header)
        yield self._line([Text(str(column.header), "bold") for column in others], widths)
        for name, *cells in zip(*(column.cells for column in self.columns), strict=True):
            if _text(name).plain:
                yield _text(name)
            yield self._line(cells, widths)

    def _line(self, cells: Sequence[RenderableType], widths: Sequence[int]) -> RenderableType:
        row = Table.grid(padding=(0, 1, 0, 0), pad_edge=True)
        for column, width in zip(self.columns[1:], widths, strict=True):
            row.add_column(justify=column.justify, width=width)
        row.add_row(*cells)
        return Padding(row, (0, 0, 0, INDENT), expand=False)

    def _listed(self) -> Iterator[RenderableType]:
        heads = [_text(column.header) for column in self.columns]
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = map(_text, cells)
            if first.plain:
                yield first
            for head, cell in zip(heads[1:], others, strict=True):
                if cell.plain:
                    yield Padding(
                        Text.assemble(head, ": " if head.plain else "", cell), (0, 0, 0, INDENT), expand=False
                    )


def _widths(spans: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Widths of columns that have these spans and a space behind each, in so much room; [] if they do not fit.

    Columns that need little more than their least get it first.
    """
    slack = room - len(spans) - sum(least for least, _ in spans)
    if slack < 0:
        return []
    widths = [least for least, _ in spans]
    for done, at in enumerate(sorted(range(len(spans)), key=lambda at: spans[at][1] - spans[at][0])):
        more = min(spans[at][1] - spans[at][0], slack // (len(spans) - done))
        widths[at], slack = widths[at] + more, slack - more
    return widths


def _span(console: Console, column: Column) -> tuple[int, int]:
    """The least width that cuts no word, and the greatest that is of use."""
    wide = console.options.update_width(UNBOUNDED)
    found = [Measurement.get(console, wide, each) for each in (column.header, *column.cells)]
    most = max((each.maximum for each in found), default=0)
    least = most if column.no_wrap else max((each.minimum for each in found), default=0)
    return max(least, column.min_width or 0), max(most, column.min_width or 0)


def is_whole(table: Table, console: Console) -> bool:
    """Whether a table that `table` made has every cell on one line at the console's width."""
    return sum(_span(console, column)[1] + 1 for column in table.columns) <= console.width


def _text(cell: RenderableType) -> Text:
    """A cell on one line."""
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return Text(" ").join(text.split("\n"))


def console(stderr: bool = False) -> Console:
    """A console on the current standard output or error, made when needed so that tests can redirect it.

    Text that goes to a file or a pipe is not wrapped, unless COLUMNS is set; no text is narrower than 20.
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
    """An empty table in the style of every command."""
    return _Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))


def print_json(document: Mapping[str, Any]) -> None:
    """Prints `json_text` of a document on standard output."""
    typer.echo(json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """A document as JSON. Tuples are lists, paths text, NaN and infinities null."""
    return json.dumps(_plain_json(document), indent=2, allow_nan=False)


def _plain_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def complain(text: str) -> None:
    """Prints an error in red on standard error."""
    console(stderr=True).print(Text("error:", "bold"), text, style="red", soft_wrap=True)


@contextmanager
def progress(
    total: int, what: str, watch: bool = True, left: bool = False
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Shows progress on standard error while the block runs: yields `say(text)` and `advance()`.

    A bar on a terminal; elsewhere a line whenever two seconds have passed since the last. Nothing may be printed on
    standard output meanwhile. `watch=False`: no thread looks at the clock, which could disturb times. `left`: with the
    time that is left, from what was done.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        ticker, done = _Ticker(screen, total, what, left), threading.Event()

        def ticks() -> None:
            while not done.wait(TICK_SECONDS / 4):
                ticker.tick()

        thread = threading.Thread(target=ticks, daemon=True)
        if watch:
            thread.start()
        try:
            yield ticker.say, ticker.advance
        finally:
            done.set()
            if watch:
                thread.join()
        return
    bar_if_wide = [BarColumn(bar_width=20)] if screen.width >= NARROW else []
    text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold", ratio=1))
    columns = [SpinnerColumn(), *bar_if_wide, MofNCompleteColumn(), TimeElapsedColumn()]
    columns += [*([TimeRemainingColumn()] if left else []), text]
    with Progress(*columns, console=screen, transient=True, expand=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, description=text), lambda: bar.advance(task)


class _Ticker:
    """Progress as plain lines."""

    def __init__(self, screen: Console, total: int, what: str, left: bool = False) -> None:
        self.screen = screen
        self.total = total
        self.done = 0
        self.text = what
        self.last = time.monotonic()
        self.ends, self.left = [self.last], left  # of steps
        self.turn = threading.Lock()

    def say(self, text: str) -> None:
        self.text = text
        self.tick()

    def tick(self) -> None:
        with self.turn:
            if time.monotonic() - self.last > TICK_SECONDS:
                self.last = time.monotonic()
                line = f"{self.done}/{self.total} {self.text}"
                self.screen.print(line + self.rest(), soft_wrap=True)

    def advance(self) -> None:
        self.done += 1
        self.ends.append(time.monotonic())
        self.say(self.text)

    def rest(self) -> str:
        """The time left, if it is wanted, by the last steps: a run that goes on somewhere skips its first ones.

        After two steps, as the first may be of another kind; and not by less than what the step that runs has taken.
        """
        some = self.ends[-1 - RECENT :]
        if not self.left or len(some) < 3 or self.done >= self.total:
            return ""
        now = self.last - some[-1]
        step = max((some[-1] - some[0]) / (len(some) - 1), now)
        seconds = step * (self.total - self.done - 1) + step - now
        return f", {seconds:.0f} s left" if seconds < 99.5 else f", {seconds / 60:.0f} min left"


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


def group(texts: Mapping[str, str], loaded: Callable[[str], Any]) -> type[Commands]:
    """A group of deferred commands by name, with the help of each; `loaded(name)` gives its function or group."""

    class Group(Commands):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            for name, text in texts.items():
                self.add_command(Deferred(name, text, self.rich_markup_mode, partial(loaded, name)))

    return Group


class Deferred(TyperCommand):
    """A command that is known by its name and its help. `loaded()` gives its function, or its group as a Typer."""

    def __init__(self, name: str, text: str, markup: Any, loaded: Callable[[], Any]) -> None:
        super().__init__(name, help=text, rich_markup_mode=markup)
        self._loaded = loaded

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.load().make_context(*args, **kwargs)

    def get_short_help_str(self, limit: int = 45) -> str:
        """All of the help, which is one sentence: a list of commands wraps it."""
        return self.help or ""

    def load(self) -> Any:
        name, found = str(self.name), self._loaded()
        holder = typer.Typer(callback=lambda: None, add_completion=False)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.command(name, help=_paragraphs(found.__doc__ or self.help or ""))(found)
        command = get_command(holder).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        if self.rich_markup_mode is None:
            without_boxes(command)
        return command


def _paragraphs(text: str) -> str:
    """The text with a line for each paragraph, which typer wraps."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))
