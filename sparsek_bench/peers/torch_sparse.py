"""torch.sparse as a peer: its Triton kernels for BSR, with tuned parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsek.core.clock import time_rounds
from sparsek.products.formats.bsr import BSR
from sparsek_bench.engine.case import block_name
from sparsek_bench.engine.peer import (
    Peer,
    ReadyPeer,
    UnavailableError,
    accepted,
    first_line,
    holding,
    rotating,
    setting_up,
)

# Parameters of a kernel, and the values that are tried for each of them.
Meta = dict[str, int]
Space = dict[str, tuple[int, ...]]


def refused_blocks(rows: int, columns: int, block: tuple[int, int], *, by_kernel: bool) -> list[str]:
    """Why torch.sparse takes no BSR of this shape and block. `by_kernel`: its Triton kernel, on a GPU."""
    ragged, shown = rows % block[0] or columns % block[1], block_name(block)
    odd = by_kernel and any(side & (side - 1) for side in block)
    return holding(
        {
            f"torch.sparse BSR needs sides that are multiples of the block {shown}": ragged,
            f"its kernel needs block sides that are powers of 2, not {shown}": odd,
        }
    )


@dataclass(frozen=True)
class Tuned(Peer):
    """A Triton kernel of torch.sparse, with the fastest correct parameters that coordinate descent finds, by timing.

    `spaces(case)`: where parameters are searched, each from the best of the one before. `prepare(one)`: a set's result,
    and the call with given parameters, which writes it.
    """

    _: KW_ONLY
    spaces: Callable[[Any], Sequence[Space]]
    prepare: Callable[[Any], tuple[Any, Callable[[Meta], object]]]

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        """Raises UnavailableError if no parameters ran and were right."""
        timed: dict[tuple[tuple[str, int], ...], float] = {}

        def calls(meta: Meta) -> tuple[Callable[[], object], ...]:
            return tuple(partial(call, meta) for _, call in prepared)

        def milliseconds(meta: Meta) -> float:
            key = tuple(meta.items())
            if key not in timed:
                try:
                    turn = {"one": rotating(calls(meta))}
                    got = time_rounds(turn, device=device, rounds=3, inner_ms=3.0, settle_ms=0.0)
                    timed[key] = got["one"].median
                except Exception as error:  # Triton: out of shared memory or registers, or a compiler fault
                    timed[key] = math.inf
                    tried(f"torch.sparse {meta}: {first_line(error)}")
                else:
                    tried(f"torch.sparse {meta}: {timed[key]:.3f} ms")
            return timed[key]

        with setting_up("torch.sparse BSR"):
            prepared, device = [self.prepare(one) for one in sets], sets[0].given[0].device
            out, first = prepared[0]
            best: Meta = {}
            for space in self.spaces(case):
                best = _descend(space, milliseconds, best)
            for key in sorted((key for key in timed if timed[key] < math.inf), key=lambda key: timed[key]):
                # num_stages has given silently wrong results before (pytorch #113587).
                (out.values if isinstance(out, BSR) else out).fill_(torch.nan)
                first(dict(key))
                if sets[0].judge(out).passed:
                    return ReadyPeer(calls(dict(key)), ", ".join(f"{name}={value}" for name, value in key))
            raise UnavailableError(
                f"none of {len(timed)} parameter sets of torch.sparse's kernel ran and was right"
            )


def _descend(space: Space, cost: Callable[[Meta], float], start: Meta) -> Meta:
    """Coordinate descent from `start`: each parameter in turn takes its best value, in four sweeps.

    Parameters that `start` leaves out begin with their first value. `cost` remembers: a sweep that changes nothing is
    free.
    """
    best = {name: start.get(name, values[0]) for name, values in space.items()}
    for name, values in 4 * [*space.items()]:
        best[name] = min((*values, best[name]), key=lambda value: cost({**best, name: value}))
    return best


# BSR @ dense


@dataclass(frozen=True)
class TorchSparse(Tuned):
    """torch.sparse BSR @ dense. On a GPU its Triton kernel: torch 2.13 has a table of parameters for the A100 only, and
    runs every other card with num_stages=1.
    """

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        by_kernel = device.type == "cuda"
        reasons = super().why_not(case, device)
        reasons += refused_blocks(case.m, case.k, case.block, by_kernel=by_kernel)
        reason = f"its kernel needs N to be a multiple of 16, not {case.n}"
        return reasons + holding({reason: by_kernel and case.n % 16})

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        if sets[0].b.device.type == "cuda":
            return super().ready(case, sets, tried)
        with setting_up(f"torch.sparse BSR refuses {case.dtype} on this CPU"):
            calls = tuple(partial(torch.matmul, one.a.to_torch(), one.b) for one in sets)
            accepted(sets[0].judge(calls[0]()), "torch.sparse BSR on this CPU")
        return ReadyPeer(calls)


def addmm(one: Any) -> tuple[Tensor, Callable[[Meta], object]]:
    """C of a set, and the call of torch.sparse's kernel that writes it."""
    from torch.sparse import _triton_ops  # imports Triton, which a CPU may lack

    ops: Any = _triton_ops
    matrix, kernel = one.a.to_torch(), ops.bsr_dense_addmm
    return one.out, lambda meta: kernel(one.out, matrix, one.b, alpha=1, beta=0, out=one.out, meta=meta)


def addmm_space(case: Any) -> Space:
    """The values tried for each parameter.

    SPLIT_N cuts N into that many column tiles, whose width must be a power of 2 of at least 16.
    """
    widths = [width for width in (128, 64, 256, 32, 16) if case.n % width == 0]
    return {
        "SPLIT_N": tuple(case.n // width for width in widths),
        "GROUP_SIZE_ROW": (4, 1, 8, 16),
        "num_stages": (3, 1, 2, 4, 5, 6),
        "num_warps": (4, 8, 2) if min(case.block) < 64 else (8, 4),
    }


def stage_space(case: Any) -> Space:
    """num_stages alone; the others as torch's `bsr_dense_addmm_meta` sets them for a card that it does not know."""
    split = max(case.n // case.block[0], 1)
    return {"SPLIT_N": (split,), "GROUP_SIZE_ROW": (4,), "num_stages": (1, 2, 3, 4, 5, 6), "num_warps": (4,)}


# Products at the blocks of a pattern


def _refused_sampled(case: Any) -> list[str]:
    reasons = refused_blocks(case.m, case.n, case.block, by_kernel=True)
    return [*reasons, "its kernel multiplies no fp64"] if case.dtype == "fp64" else reasons


def sampled_space(case: Any) -> Space:
    """The values tried for each parameter; the first ones are those that torch 2.13 sets."""
    tiles = (max(case.block), *(tile for tile in (32, 64, 128) if tile != max(case.block)))
    return {"TILE_K": tiles, "num_stages": (1, 2, 3, 4), "num_warps": (4, 8)}


def _sampled(one: Any) -> tuple[BSR, Callable[[Meta], object]]:
    """Writes X @ Y at the blocks of a pattern, as `_run_sampled_addmm_kernel` of torch does for alpha 1 and beta 0."""
    from torch.sparse import _triton_ops  # imports Triton, which a CPU may lack

    ops: Any = _triton_ops
    x, y, pattern = one.given
    k, (bm, bn) = x.shape[1], pattern.block
    out = BSR.unchecked(pattern, x.new_zeros((pattern.nnzb, bm, bn)))
    crow, columns, values, x, y = ops.prepare_inputs(out.to_torch(), x, y)
    x, y = ops.tile_to_blocksize(x, (bm, k)), ops.tile_to_blocksize(y, (k, bn))
    low = values.dtype in (torch.half, torch.bfloat16)
    fixed = {"acc_dtype": ops.tl.float32 if low else ops.tl.float64, "allow_tf32": low}
    places = {values: (0, None), crow: (0, -1), columns: (0, None), x: (0, -4), y: (0, None)}
    grid = (values.shape[0], crow.shape[-1] - 1)

    def call(meta: Meta) -> object:
        options = {name: meta[name] for name in ("num_stages", "num_warps")}

        def kernel(grid: Any, *tensors: Tensor) -> None:
            parts = ops.ptr_stride_extractor(*tensors)
            launch = ops._sampled_addmm_kernel[tuple(grid)]
            launch(1, 0, True, bm, bn, k, meta["TILE_K"], *parts, **fixed, **options)

        return ops.launch_kernel(kernel, places, grid)

    return out, call


SAMPLED = Tuned(
    "torch_sparse",
    "torch.sparse",
    "cuda",
    spaces=lambda case: [sampled_space(case)],
    unless=_refused_sampled,
    prepare=_sampled,
)
