"""Calls functions of the tests under the newest Triton, which lies in .venv-triton-next beside the pinned one.

One process of that environment serves a pytest worker from its first call on: starting one takes 2 s.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import spawn
from pathlib import Path
from typing import Any, TypeVar

from tests.house.tools import ROOT, python_beside

Result = TypeVar("Result")
# Of one call, on a busy machine too.
SECONDS = 300
PINNED = ROOT / "constraints-triton-next.txt"


def call(function: Callable[..., Result], *arguments: Any) -> Result:
    """What a function of a module returns there. Arguments and result are pickled; its module imports triton there."""
    return next(iter(calls(function, [arguments])))


def calls(function: Callable[..., Result], each: Iterable[tuple[Any, ...]]) -> list[Result]:
    """The same for several lists of arguments. Skips where `make env` could not install the newest Triton."""
    running = [_pool().submit(function, *arguments) for arguments in each]
    return [one.result(timeout=SECONDS) for one in running]


@cache
def _pool() -> ProcessPoolExecutor:
    python = python_beside(".venv-triton-next", "triton")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(python).parents[1] / "lib" / version / "site-packages"
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (str(packages),))
    before = os.fsdecode(spawn.get_executable())
    spawn.set_executable(python)
    try:
        found = pool.submit(_version).result(timeout=SECONDS)
    finally:
        spawn.set_executable(before)
    assert found == PINNED.read_text(encoding="utf-8").split("triton==")[1].split()[0]
    return pool


def _begin(packages: str) -> None:
    """A spawned process has the path of the one that started it, where the pinned Triton comes first."""
    sys.path.insert(0, packages)
    threading.Thread(target=_end_with_the_worker, daemon=True).start()


def _end_with_the_worker() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def _version() -> str:
    import triton

    return triton.__version__
