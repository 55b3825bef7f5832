"""A line while a kernel is compiled, where somebody sees it."""

import io
import sys

import pytest

from sparsek.engine.launch.progress import patient


@pytest.mark.parametrize("name", ["none", "closed", "strange"])
def test_a_process_without_stderr_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "strange": object()}[name])
    with patient("kernel"):
        pass
