"""Compiles kernels in several processes before a benchmark times them in one.

A kernel is compiled at its first launch, in seconds, and kept on disk. The planner's layers launch about a hundred that
a new machine has not compiled.

    process:   its items -- prepare --> (kernel and config, call)    claimed by a file of that name, then called once
"""

import contextlib
import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

# What an item holds: the text that names a compiled kernel, and a call that launches it.
Prepare = Callable[[Any], Iterable[tuple[str, Callable[[], object]]]]
MOST_PROCESSES = 12  # each holds a CUDA context of half a GB


def compiled(items: Sequence[Any], prepare: Prepare) -> None:
    """Launches every kernel of `prepare(item)` once in some process; `prepare` is a function of a module.

    A kernel that fails is left for the benchmark to report. With fewer than four processors nothing is done. If a
    process dies, the rest is left to be compiled at its first launch.
    """
    count = min(MOST_PROCESSES, len(items), (os.cpu_count() or 1) - 1)
    if count < 3:
        return
    with tempfile.TemporaryDirectory() as folder:
        run = partial(launch_unclaimed, prepare, Path(folder))
        spawn = multiprocessing.get_context("spawn")
        # multiprocessing.Pool would wait for ever for a process that died.
        with ProcessPoolExecutor(count, spawn) as pool, contextlib.suppress(BrokenProcessPool):
            for _ in pool.map(run, items):
                pass


def launch_unclaimed(prepare: Prepare, folder: Path, item: Any) -> None:
    """Launches the kernels of an item that no process has claimed in `folder`."""
    with contextlib.suppress(Exception), torch.no_grad():
        for name, call in prepare(item):
            try:
                (folder / hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
            except FileExistsError:
                continue
            with contextlib.suppress(Exception):  # the other kernels of the item are launched all the same
                call()
    if torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # a failed kernel may be reported only here
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
