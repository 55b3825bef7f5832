"""Loaded by every Python process that a traced test starts, since its folder is on PYTHONPATH: traces that too."""

import contextlib
import os

if os.environ.get("SPARSEK_TRACE"):
    with contextlib.suppress(ImportError):  # in a folder whose own `tests` is found first
        from tests.evidence import trace

        trace.begin_child()
