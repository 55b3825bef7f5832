"""Processes that tests start once: each runs the same cases as one rank, and sends what it found."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from sparsek.attn.kernels import KERNELS as ATTENTION
from sparsek.products.kernels import KERNELS as PRODUCTS

PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "sparsek.policies",
    *(f"sparsek.attn.kernels.{module}" for _, _, module, *_ in ATTENTION),
    *(f"sparsek.products.kernels.{module}" for _, _, module, *_ in PRODUCTS),
]


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns in each of `ranks` processes of one gloo group.

    They are forks of one new process, which imports torch, the kernels and the module of `work` once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, work.__module__])
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, ranks, folder, work, args) for rank in range(ranks)]
        started = [context.Process(target=_begin, args=each, daemon=True) for each in given]
        for each in started:
            each.start()
        for each in started:
            each.join(120)
        found = [Path(folder) / f"{rank}.pt" for rank in range(ranks)]
        wrong = [path.with_suffix(".txt").read_text() for path in found if path.with_suffix(".txt").exists()]
        for each in started:
            each.kill()
        assert not wrong, "\n".join(wrong)
        assert all(path.exists() for path in found), "a rank did not end"
        return [torch.load(path, weights_only=False) for path in found]


def _begin(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(work(rank, *args), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
