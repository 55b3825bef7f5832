"""`sparsek`: doctor, demo, bench, report, advise, tune."""

import typer

from sparsek.cli import advise, bench, demo, doctor, report, tune
from sparsek.cli.output import Commands

app = typer.Typer(
    name="sparsek",
    cls=Commands,
    help="Block-sparse matrix products and attention for NVIDIA Hopper: look, plan, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("advise")(advise.advise)
app.add_typer(bench.app, name="bench")
app.command("report")(report.report)
app.command("tune")(tune.tune)


def main() -> None:
    """Entry point of the `sparsek` program."""
    app()


if __name__ == "__main__":
    main()
