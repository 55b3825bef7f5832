"""What a user would pick instead of `sk.sddmm`. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.bench.engine.peer import Peer, Ready, accepted, setting_up
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE, Meta, Space, refused_blocks, settings, tuned
from sparsek.bench.suites.sddmm import SddmmCase, SddmmOperands
from sparsek.matrix.bsr import BSR
from sparsek.testing.product_budget import stored


@dataclass(frozen=True)
class TorchSampled(Peer):
    """The Triton kernel of torch.sparse's sampled_addmm on BSR, with its tile of K, stages and warps tuned here.

    torch 2.13 runs it with one stage, four warps and a tile of the block's side, which is the first choice tried.
    """

    def why_not(self, case: SddmmCase, device: torch.device) -> list[str]:
        reasons = super().why_not(case, device)
        reasons += refused_blocks(case.m, case.n, case.block, by_kernel=True)
        if case.dtype == "fp64":
            reasons.append("its kernel multiplies no fp64")
        return reasons

    def ready(self, case: SddmmCase, sets: Sequence[SddmmOperands], tried: Callable[[str], None]) -> Ready:
        with setting_up("torch.sparse BSR"):
            outs = [_empty_like(one) for one in sets]
            matrices = [out.to_torch() for out in outs]

            def right(meta: Meta) -> bool:
                outs[0].values.fill_(torch.nan)
                _sampled_call(matrices[0], sets[0], meta)()
                return sets[0].judge(outs[0]).passed

            def calls(meta: Meta) -> list[Callable[[], object]]:
                return [_sampled_call(w, one, meta) for w, one in zip(matrices, sets, strict=True)]

            meta = tuned([meta_space(case)], calls, right, sets[0].x.device, tried)
            return Ready(tuple(calls(meta)), settings(meta))


def meta_space(case: SddmmCase) -> Space:
    """The values tried for each parameter; the first ones are those that torch sets."""
    tiles = (max(case.block), *(tile for tile in (32, 64, 128) if tile != max(case.block)))
    return {"TILE_K": tiles, "num_stages": (1, 2, 3, 4), "num_warps": (4, 8)}


def _empty_like(one: SddmmOperands) -> BSR:
    pattern = one.pattern
    return BSR.unchecked(pattern, one.x.new_zeros((pattern.nnzb, *pattern.block)))


def _sampled_call(matrix: Tensor, one: SddmmOperands, meta: Meta) -> Callable[[], object]:
    """Writes X @ Y into the values of `matrix`, as `_run_sampled_addmm_kernel` of torch does for alpha 1 and beta 0."""
    from torch.sparse import _triton_ops  # needs Triton, so only where a GPU asks for it

    ops: Any = _triton_ops
    k, (bm, bn) = one.x.shape[1], one.pattern.block
    crow, columns, values, x, y = ops.prepare_inputs(matrix, one.x, one.y)
    x, y = ops.tile_to_blocksize(x, (bm, k)), ops.tile_to_blocksize(y, (k, bn))
    low = values.dtype in (torch.half, torch.bfloat16)
    wide = ops.tl.float32 if low else ops.tl.float64
    options = {name: meta[name] for name in ("num_stages", "num_warps")}

    def kernel(grid: Any, *tensors: Tensor) -> None:
        parts = ops.ptr_stride_extractor(*tensors)
        fixed = {"acc_dtype": wide, "allow_tf32": low}
        ops._sampled_addmm_kernel[tuple(grid)](
            1, 0, True, bm, bn, k, meta["TILE_K"], *parts, **fixed, **options
        )

    places = {values: (0, None), crow: (0, -1), columns: (0, None), x: (0, -4), y: (0, None)}
    grid = (values.shape[0], crow.shape[-1] - 1)
    return lambda: ops.launch_kernel(kernel, places, grid)


@dataclass(frozen=True)
class TorchCsr(Peer):
    """torch.sparse.sampled_addmm on a CSR matrix of all elements of the blocks: cuSPARSE on a GPU, MKL on a CPU."""

    def why_not(self, case: SddmmCase, device: torch.device) -> list[str]:
        if case.dtype in ("fp32", "fp64"):
            return []
        return [f"torch.sparse.sampled_addmm takes fp32 and fp64, not {case.dtype}"]

    def ready(self, case: SddmmCase, sets: Sequence[SddmmOperands], tried: Callable[[str], None]) -> Ready:
        with setting_up("torch.sparse.sampled_addmm"):
            csr = _full_csr(sets[0])
            calls = tuple(
                lambda one=one: torch.sparse.sampled_addmm(csr, one.x, one.y, beta=0.0) for one in sets
            )
            found = calls[0]().to_dense()
            blocks = BSR.unchecked(sets[0].pattern, stored(found, sets[0].pattern))
            accepted(sets[0].judge(blocks), "torch.sparse.sampled_addmm")
        return Ready(calls)


def _full_csr(one: SddmmOperands) -> Tensor:
    """A CSR matrix of ones at every element of the pattern's blocks."""
    ones = BSR.unchecked(one.pattern, one.x.new_ones((one.pattern.nnzb, *one.pattern.block))).to_dense()
    return ones.to_sparse_csr()


PEERS: tuple[Peer, ...] = (
    CUBLAS,
    TorchSampled("torch_sparse", "torch.sparse", "cuda"),
    TorchCsr("torch_csr", "torch.sparse CSR"),
    TORCH_DENSE,
)
