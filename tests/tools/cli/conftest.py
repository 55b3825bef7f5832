"""Runs commands."""

import pytest
from typer.testing import CliRunner, Result

from sparsek.tools.cli.__main__ import app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs a command at a width of 100 characters, without colours."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call
