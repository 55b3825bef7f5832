"""Runs commands, and a file that they read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two 128 x 96 matrices, one of 64 x 64, and things that are no choosable matrices."""
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(128, 96, generator=draw) for name in ("layer.0.weight", "layer.1.weight")}
    tensors["head.weight"] = torch.randn(64, 64, generator=draw).bfloat16()
    tensors["bias"] = torch.randn(64, generator=draw)
    tensors["ids"] = torch.arange(4096).view(64, 64)
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path
