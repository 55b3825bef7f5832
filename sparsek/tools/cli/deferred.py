"""Commands whose modules load when they run, or when their own help is printed."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sparsek.tools.cli.output import Commands, without_boxes


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
        """The command itself."""
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
