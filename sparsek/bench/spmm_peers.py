"""What a user would pick instead of `sk.spmm`. One line per peer in PEERS, at the end."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.bench import cusparse
from sparsek.bench.case import random_dense
from sparsek.bench.peer import Peer, Ready, UnavailableError, elsewhere, first_line, rotating
from sparsek.bench.spmm import SpmmCase, SpmmOperands
from sparsek.core.clock import time_rounds
from sparsek.formats.bsr import BSR
from sparsek.testing.budget import check_spmm


def _gated(a: BSR, b: Tensor, out: Tensor, what: str) -> None:
    gate = check_spmm(a, b, out)
    if not gate.passed:
        raise UnavailableError(f"{what} is wrong here: error {gate.error:.2e}, budget {gate.budget:.2e}")


@dataclass(frozen=True)
class DenseMatmul:
    """torch.matmul on dense random data of the same shape: zeros of a pruned matrix would make it faster."""

    name: str
    title: str
    device: str

    def why_not(self, case: SpmmCase, device: torch.device) -> list[str]:
        return elsewhere(self, device)

    def ready(self, case: SpmmCase, sets: Sequence[SpmmOperands], tried: Callable[[str], None]) -> Ready:
        calls = []
        for index, one in enumerate(sets):
            dense = random_dense(case.m, case.k, dtype=one.b.dtype, device=one.b.device, seed=1000 + index)
            dense.mul_(1 / math.sqrt(case.k))
            calls.append(lambda w=dense, one=one: torch.matmul(w, one.b, out=one.out))
        return Ready(tuple(calls), flops=case.dense_flops)


@dataclass(frozen=True)
class TorchSparse:
    """torch.sparse BSR @ dense. On a GPU its Triton kernel, with the parameters tuned here: torch 2.13 ships
    a table for the A100 only, and runs every other card with num_stages=1.

    `stages_only` leaves the other three parameters as torch sets them where its table has no entry.
    """

    name: str = "torch_sparse"
    title: str = "torch.sparse BSR, all parameters tuned"
    device: str = ""
    stages_only: bool = False

    def why_not(self, case: SpmmCase, device: torch.device) -> list[str]:
        reasons = []
        bm, bk = case.block
        if case.m % bm or case.k % bk:
            reasons.append(f"torch.sparse BSR needs sides that are multiples of the block {case.block_name}")
        if device.type != "cuda":
            return [*reasons, "there is nothing to tune on a CPU"] if self.stages_only else reasons
        if bm & (bm - 1) or bk & (bk - 1):
            reasons.append(f"its kernel needs block sides that are powers of 2, not {case.block_name}")
        if case.n % 16:
            reasons.append(f"its kernel needs N to be a multiple of 16, not {case.n}")
        return reasons

    def ready(self, case: SpmmCase, sets: Sequence[SpmmOperands], tried: Callable[[str], None]) -> Ready:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its BSR support beta on first use
            matrices = [one.a.to_torch() for one in sets]
        if sets[0].b.device.type != "cuda":
            try:
                _gated(sets[0].a, sets[0].b, matrices[0] @ sets[0].b, "torch.sparse BSR on this CPU")
            except RuntimeError as error:
                raise UnavailableError(
                    f"torch.sparse BSR refuses {case.dtype} on this CPU: {first_line(error)}"
                ) from None
            return Ready(tuple(lambda w=w, one=one: w @ one.b for w, one in zip(matrices, sets, strict=True)))
        meta = self.tuned(case, matrices, sets, tried)
        calls = tuple(_addmm_call(w, one, meta) for w, one in zip(matrices, sets, strict=True))
        return Ready(calls, ", ".join(f"{key}={value}" for key, value in meta.items()))

    def tuned(
        self,
        case: SpmmCase,
        matrices: Sequence[Tensor],
        sets: Sequence[SpmmOperands],
        tried: Callable[[str], None],
    ) -> dict[str, int]:
        """The fastest correct parameters that coordinate descent finds, by timing: num_stages first, then all four."""
        device = sets[0].b.device
        timed: dict[tuple[tuple[str, int], ...], float] = {}

        def milliseconds(meta: dict[str, int]) -> float:
            key = tuple(meta.items())
            if key not in timed:
                calls = [_addmm_call(w, one, meta) for w, one in zip(matrices, sets, strict=True)]
                try:
                    call = rotating(calls)
                    got = time_rounds({"one": call}, device=device, rounds=3, inner_ms=3.0, settle_ms=0.0)
                    timed[key] = got["one"].median
                except Exception as error:  # Triton: out of shared memory or registers, or a compiler fault
                    timed[key] = math.inf
                    tried(f"torch.sparse {meta}: {first_line(error)}")
                else:
                    tried(f"torch.sparse {meta}: {timed[key]:.3f} ms")
            return timed[key]

        best = _descend(stage_space(case), milliseconds, {})
        if not self.stages_only:
            _descend(meta_space(case), milliseconds, best)
        for key, value in sorted(timed.items(), key=lambda item: item[1]):
            if math.isinf(value):
                break
            meta = dict(key)
            sets[0].out.fill_(float("nan"))
            _addmm_call(matrices[0], sets[0], meta)()
            # num_stages has given silently wrong results before (pytorch #113587).
            if check_spmm(sets[0].a, sets[0].b, sets[0].out).passed:
                return meta
        raise UnavailableError(
            f"none of {len(timed)} parameter sets of torch.sparse's kernel ran and was right"
        )


def _addmm_call(w: Tensor, one: SpmmOperands, meta: dict[str, int]) -> Callable[[], object]:
    from torch.sparse import _triton_ops  # needs Triton, so only where a GPU asks for it

    addmm: Any = _triton_ops.bsr_dense_addmm
    return lambda: addmm(one.out, w, one.b, alpha=1, beta=0, out=one.out, meta=meta)


def meta_space(case: SpmmCase) -> dict[str, tuple[int, ...]]:
    """The values tried for each parameter of torch.sparse's kernel.

    SPLIT_N cuts N into that many column tiles, whose width must be a power of 2 of at least 16.
    """
    widths = [width for width in (128, 64, 256, 32, 16) if case.n % width == 0]
    return {
        "SPLIT_N": tuple(case.n // width for width in widths),
        "GROUP_SIZE_ROW": (4, 1, 8, 16),
        "num_stages": (3, 1, 2, 4, 5, 6),
        "num_warps": (4, 8, 2) if min(case.block) < 64 else (8, 4),
    }


def stage_space(case: SpmmCase) -> dict[str, tuple[int, ...]]:
    """num_stages alone; the others as torch's `bsr_dense_addmm_meta` sets them for a card it does not know."""
    split = max(case.n // case.block[0], 1)
    return {"SPLIT_N": (split,), "GROUP_SIZE_ROW": (4,), "num_stages": (1, 2, 3, 4, 5, 6), "num_warps": (4,)}


def _descend(
    space: dict[str, tuple[int, ...]], cost: Callable[[dict[str, int]], float], start: dict[str, int]
) -> dict[str, int]:
    """Coordinate descent from `start`: each parameter in turn takes its best value, until a sweep changes nothing.

    Parameters that `start` leaves out begin with their first value. `cost` keeps what it has seen.
    """
    best = {name: start.get(name, values[0]) for name, values in space.items()}
    for _ in range(4):
        before = dict(best)
        for name, values in space.items():
            best[name] = min((*values, best[name]), key=lambda value: cost({**best, name: value}))
        if best == before:
            break
    return best


@dataclass(frozen=True)
class CuSparse:
    """cuSPARSE SpMM on Blocked-ELL, through ctypes: torch brings the library but binds no such call."""

    name: str = "cusparse"
    title: str = "cuSPARSE Blocked-ELL"
    device: str = ""

    def why_not(self, case: SpmmCase, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append("cuSPARSE needs an NVIDIA GPU")
        if case.block[0] != case.block[1]:
            reasons.append(f"Blocked-ELL blocks are square, not {case.block_name}")
        if case.m % case.block[0] or case.k % case.block[1]:
            reasons.append(f"Blocked-ELL needs sides that are multiples of the block {case.block_name}")
        if case.dtype not in cusparse.CUDA_TYPES:
            reasons.append(f"not set up here for {case.dtype}")
        return reasons

    def ready(self, case: SpmmCase, sets: Sequence[SpmmOperands], tried: Callable[[str], None]) -> Ready:
        library = cusparse.load()
        if isinstance(library, str):
            raise UnavailableError(library)
        failures = []
        # NVIDIA's pages do not say whether a row of blocks is stored row by row or block by block; the gate
        # decides.
        for layout in ("rows", "blocks"):
            try:
                first = cusparse.prepare(library, sets[0], layout, case.dtype)
                sets[0].out.fill_(float("nan"))
                first()
                _gated(sets[0].a, sets[0].b, sets[0].out, f"Blocked-ELL stored by {layout}")
            except UnavailableError as error:
                failures.append(str(error))
                tried(f"cuSPARSE: {error}")
                continue
            others = [cusparse.prepare(library, one, layout, case.dtype) for one in sets[1:]]
            note = f"Blocked-ELL stored by {layout}, {first.width} blocks in every row"
            return Ready((first, *others), note)
        raise UnavailableError("; ".join(failures))


PEERS: tuple[Peer, ...] = (
    DenseMatmul("cublas", "cuBLAS dense", "cuda"),
    DenseMatmul("torch_dense", "dense torch.matmul", "cpu"),
    TorchSparse(),
    TorchSparse("torch_sparse_stages", "torch.sparse BSR, num_stages tuned", "cuda", stages_only=True),
    CuSparse(),
)
