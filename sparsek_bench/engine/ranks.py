"""Processes that are the ranks of a group, one on each GPU: started once, they run what they are sent until they end.

Nobody waits for ever: collectives end after the timeout of the group, and a call of a rank that does not answer within
its limit ends all of them.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from sparsek.core.errors import MeshError

GROUP_SECONDS = 60.0
START_SECONDS = 120.0  # imports, and the first use of a GPU
# Multicast of NVLink stays off unless the environment has other values: a fault in it takes all GPUs of a host.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
if sys.platform == "linux":  # where the host's name may have no address
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
PRELOADED = ["torch._dynamo", "sparsek_bench.suites.mesh"]
_STARTED: dict[tuple[str, int], Ranks] = {}


class Ranks:
    """So many processes of one group on a kind of device."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._folder = kind, tempfile.TemporaryDirectory()
        # New processes in any case: a fork of this one would have its GPU and its threads.
        context: Any = multiprocessing.get_context("spawn" if kind == "cuda" else "forkserver")
        if kind != "cuda":
            context.set_forkserver_preload(PRELOADED)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # which the processes inherit
        for rank in range(count):
            here, there = context.Pipe()
            given = rank, count, kind, self._folder.name, there
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers(START_SECONDS, "the start", lambda text: None)

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        limit: float,
        report: Callable[[str], None] = lambda text: None,
    ) -> list[Any]:
        """What `work(tell, device, *args)` returns on each rank; `tell(text)` reports what rank 0 does.

        Raises MeshError, and ends all ranks, if one of them raises, ends, or has no answer within `limit` seconds.
        """
        for pipe in self._pipes:
            pipe.send((work, args))
        return self._answers(limit, getattr(work, "__name__", "work"), report)

    def _answers(self, limit: float, what: str, report: Callable[[str], None]) -> list[Any]:
        end, found, last = time.monotonic() + limit, dict[int, Any](), "nothing"
        while len(found) < len(self._pipes):
            open_ = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(open_, max(0.0, end - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(len(self._pipes)) if rank not in found]
                self._fail(f"{what}: ranks {missing} have no answer after {limit:.0f} s; last report: {last}")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    code = self._processes[rank].exitcode
                    self._fail(f"{what}: rank {rank} ended, exit code {code}; last report: {last}")
                if kind == "error":
                    self._fail(f"{what}: rank {rank} raised an error: {value}")
                elif kind == "reports":
                    last = value
                    report(value)
                else:
                    found[rank] = value
        return [found[rank] for rank in range(len(self._pipes))]

    def _fail(self, why: str) -> None:
        self.end()
        raise MeshError(why)

    def end(self) -> None:
        """End all processes now."""
        for key in [key for key, each in _STARTED.items() if each is self]:
            del _STARTED[key]
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def ranks_of(kind: str, count: int) -> Ranks:
    """Those that run already, or new ones."""
    key = kind, count
    if key not in _STARTED:
        end_ranks()  # others would hold the GPUs' memory
        _STARTED[key] = Ranks(kind, count)
    return _STARTED[key]


def end_ranks() -> None:
    """End all that run."""
    for each in list(_STARTED.values()):
        each.end()


atexit.register(end_ranks)


def together(value: float = 0.0) -> float:
    """The sum of the ranks' values, once all of them are here; on the host, while their GPUs rest."""
    total = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.all_reduce(total)
    return float(total)


def _serve(rank: int, count: int, kind: str, folder: str, pipe: Connection) -> None:
    """Runs what the parent sends, until it ends."""
    try:
        device = _begun(rank, count, kind, folder)
        pipe.send(("done", None))
        while True:
            work, args = pipe.recv()
            tell = (lambda text: pipe.send(("reports", text))) if rank == 0 else (lambda text: None)
            pipe.send(("done", work(tell, device, *args)))
            if kind == "cuda":
                torch.cuda.empty_cache()
    except EOFError:  # the parent has ended
        return
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"))
        time.sleep(5)  # so that others do not end first, and the parent gets the cause


def _begun(rank: int, count: int, kind: str, folder: str) -> torch.device:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        store=dist.FileStore(f"{folder}/store", count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    probe: Tensor = torch.ones(1, dtype=torch.float32, device=device)
    dist.all_reduce(probe)
    assert int(probe) == count
    together()
    return device
