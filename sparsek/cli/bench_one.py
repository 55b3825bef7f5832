"""The command of one benchmark: its cases' options, then what all benchmarks take."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsek.bench.engine.bench import Bench
from sparsek.bench.engine.options import Option
from sparsek.cli.bench_run import Device, Request, Rounds, bench

Only = Annotated[str | None, typer.Option(help="Of a suite, the entries with these numbers (from 1): 1,3,5.")]
Out = Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw charts of what was measured into this folder.")]


def command(one: Bench) -> Callable[..., None]:
    """A function with the options of a benchmark as its parameters, as typer reads them."""
    parameters = {"context": _parameter("context", typer.Context, inspect.Parameter.empty)}
    for option in one.options:
        parameters[_python(option.name)] = _case_parameter(option)
    if one.kernels:
        parameters["kernel"] = _parameter("kernel", Annotated[str, typer.Option(help=one.kernels)], "auto")
    if one.peers:
        named = f"all, none, or some of {', '.join(peer.name for peer in one.peers)}."
        parameters["peers"] = _parameter("peers", Annotated[str, typer.Option(help=named)], "all")
    suites = f"A named suite instead of sizes: {', '.join(one.suites)}."
    for name, kind, default in (
        ("rounds", Rounds, one.rounds),
        ("suite", Annotated[str | None, typer.Option(help=suites)], None),
        ("only", Only, None),
        ("device", Device, None),
        ("out", Out, None),
        ("plot", Plot, None),
    ):
        parameters[name] = _parameter(name, kind, default)

    def run(**given: Any) -> None:
        context = given.pop("context")
        cases = {option.name: given.pop(_python(option.name)) for option in one.options}
        bench(one, cases, Request(context, **given))

    run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    vars(run)["__signature__"] = inspect.Signature(list(parameters.values()))
    return run


def _python(name: str) -> str:
    return name.replace("-", "_")


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _case_parameter(option: Option) -> inspect.Parameter:
    if isinstance(option.default, bool):
        written = f"--{option.name}" + (f"/--{option.off}" if option.off else "")
        return _parameter(
            _python(option.name), Annotated[bool, typer.Option(written, help=option.help)], option.default
        )
    kind = Annotated[str, typer.Option(f"--{option.name}", help=option.help)]
    return _parameter(_python(option.name), kind, option.default)
