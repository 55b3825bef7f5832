"""`sparsek report`: tables and charts from the records."""

from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement

from sparsek.bench import charts
from sparsek.bench.engine import records
from sparsek.bench.engine import report as reporting
from sparsek.cli.output import complain, console
from sparsek.cli.output import table as new_table
from sparsek.core import env


def report(
    folder: Annotated[
        Path | None,
        typer.Option("--records", help="A .jsonl file or a folder of them; default SPARSEK_RECORDS."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the tables into README.md and docs/.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 if the pages differ from the records.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The checkout that holds the pages.")] = Path(),
    plot: Annotated[Path | None, typer.Option(help="Draw the charts into this folder.")] = None,
) -> None:
    """Prints the tables of the newest records, and writes or checks the pages that show them."""
    source = folder or Path(env.bench_records_dir())
    found = records.read(source) if source.exists() or folder else []
    out = console()
    if check:
        wrong = reporting.stale(root, found)
        for line in wrong:
            complain(line)
        if wrong:
            raise typer.Exit(1)
        out.print("pages agree with the records")
        return
    if write:
        changed = reporting.write(root, found)
        out.print(
            f"wrote {', '.join(map(str, changed))}" if changed else "pages already agree with the records",
            soft_wrap=True,
        )
    else:
        for op in reporting.measured(found):
            out.print(_Page(reporting.markdown(found, op)))
    if plot is not None:
        for path in charts.draw(found, plot):
            out.print(f"drew {path}", soft_wrap=True)


class _PageTable(TableElement):
    """A table of a page in the style of every command, which cuts no figure where there is little room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = new_table("")
        for head in self.header.row.cells if self.header and self.header.row else ():
            shown.add_column(head.content)
        for row in self.body.rows if self.body else ():
            shown.add_row(*(cell.content for cell in row.cells))
        yield shown


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _PageTable}
