"""The command of one benchmark: its cases' options, then those that all benchmarks have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsek.bench.benches import HELP
from sparsek.bench.engine.bench import Bench
from sparsek.bench.engine.options import Option
from sparsek.cli.bench_run import Device, Html, Rounds, bench
from sparsek.cli.output import AsJson

SCHEMA = """
--json: {benchmark, records: [{op, case, kernel, config, ms: {median, min, max, rounds}, tflops, gbps, roofline, gate,
peers, ratio, env, source_hash, date}], failed: [{case, why}], not_measured: [{name, why, cases}], notes: [{name, note,
cases}]}. Exit code 1 if a case failed or nothing was measured.
"""
Out = Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")]


def command(one: Bench) -> Callable[..., None]:
    """The function of a benchmark's command."""
    more: dict[str, tuple[Any, Any]] = {}
    if one.kernels:
        more["kernel"] = Annotated[str, typer.Option(help=one.kernels)], "auto"
    if one.peers:
        named = f"all, none, or some of {', '.join(peer.name for peer in one.peers)}."
        more["peers"] = Annotated[str, typer.Option(help=named)], "all"
    suites = f"A named suite instead of sizes: {', '.join(one.suites)}."
    more |= {
        "rounds": (Rounds, one.rounds),
        "suite": (Annotated[str | None, typer.Option(help=suites)], None),
        "device": (Device, None),
        "out": (Out, None),
        "html": (Html, None),
        "json": (AsJson, False),
    }

    def run(context: typer.Context, cases: Mapping[str, str | bool], **given: Any) -> None:
        bench(one, context, cases, **given)

    run.__doc__ = f"{HELP[one.name]}\n{SCHEMA}"
    return with_case_options(one.options, run, more)


def with_case_options(
    options: Sequence[Option], run: Callable[..., None], more: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """A function of these options of cases, and of `more`: types and defaults by name, as typer reads them. It calls
    `run(context, cases, **more)` with the values of the options by name.
    """
    named = {option.name.replace("-", "_"): option for option in options}
    parameters = {"context": _parameter("context", typer.Context, inspect.Parameter.empty)}
    parameters |= {name: _parameter(name, _kind(option), option.default) for name, option in named.items()}
    parameters |= {name: _parameter(name, *each) for name, each in more.items()}

    def called(**given: Any) -> None:
        context = given.pop("context")
        run(context, {option.name: given.pop(name) for name, option in named.items()}, **given)

    called.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    called.__doc__ = run.__doc__
    vars(called)["__signature__"] = inspect.Signature(list(parameters.values()))
    return called


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _kind(option: Option) -> Any:
    written = f"--{option.name}" + (f"/--{option.off}" if option.off else "")
    return Annotated[type(option.default), typer.Option(written, help=option.help)]
