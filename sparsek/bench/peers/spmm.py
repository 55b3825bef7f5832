"""What a user would pick instead of `sk.spmm`. One line per peer in PEERS, at the end."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsek.bench.engine.data import random_dense
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted, first_line
from sparsek.bench.peers import cusparse
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE, Meta, Own, Space, refused_blocks, settings, tuned
from sparsek.bench.suites.product import A_AT_B, ProductOperands, form_name
from sparsek.bench.suites.spmm import SpmmCase


def a_at_b(case: SpmmCase, one: ProductOperands, index: int) -> ProductOperands:
    """A @ B on the same pattern, with B as wide: what the other forms are held against."""
    plain = replace(case, form=A_AT_B)
    b = random_dense(*plain.b_shape, dtype=one.b.dtype, device=one.b.device, seed=2000 + index)
    return ProductOperands(one.a, b, one.b.new_empty(plain.out_shape))


@dataclass(frozen=True)
class TorchSparse(Peer):
    """torch.sparse BSR @ dense. On a GPU its Triton kernel, with the parameters tuned here: torch 2.13 ships
    a table for the A100 only, and runs every other card with num_stages=1.

    `stages_only` leaves the other three parameters as torch sets them where its table has no entry.
    """

    stages_only: bool = False

    def why_not(self, case: SpmmCase, device: torch.device) -> list[str]:
        reasons = _only_a_at_b(case)
        reasons += refused_blocks(case.m, case.k, case.block, by_kernel=device.type == "cuda")
        if device.type != "cuda":
            return [*reasons, "there is nothing to tune on a CPU"] if self.stages_only else reasons
        if case.n % 16:
            reasons.append(f"its kernel needs N to be a multiple of 16, not {case.n}")
        return reasons

    def ready(self, case: SpmmCase, sets: Sequence[ProductOperands], tried: Callable[[str], None]) -> Ready:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its BSR support beta on first use
            matrices = [one.a.to_torch() for one in sets]
        if sets[0].b.device.type != "cuda":
            try:
                accepted(sets[0].judge(matrices[0] @ sets[0].b), "torch.sparse BSR on this CPU")
            except RuntimeError as error:
                raise UnavailableError(
                    f"torch.sparse BSR refuses {case.dtype} on this CPU: {first_line(error)}"
                ) from None
            return Ready(tuple(lambda w=w, one=one: w @ one.b for w, one in zip(matrices, sets, strict=True)))

        meta = self.tuned(case, matrices, sets, tried)
        calls = tuple(_addmm_call(w, one, meta) for w, one in zip(matrices, sets, strict=True))
        return Ready(calls, settings(meta))

    def tuned(
        self,
        case: SpmmCase,
        matrices: Sequence[Tensor],
        sets: Sequence[ProductOperands],
        tried: Callable[[str], None],
    ) -> Meta:
        """The fastest correct parameters that coordinate descent finds, by timing: num_stages first, then all four."""

        def calls(meta: Meta) -> list[Callable[[], object]]:
            return [_addmm_call(w, one, meta) for w, one in zip(matrices, sets, strict=True)]

        def right(meta: Meta) -> bool:
            sets[0].out.fill_(float("nan"))
            calls(meta)[0]()
            return sets[0].judge(sets[0].out).passed

        spaces = [stage_space(case)] if self.stages_only else [stage_space(case), meta_space(case)]
        return tuned(spaces, calls, right, sets[0].b.device, tried)


def _addmm_call(w: Tensor, one: ProductOperands, meta: Meta) -> Callable[[], object]:
    from torch.sparse import _triton_ops  # needs Triton, so only where a GPU asks for it

    addmm: Any = _triton_ops.bsr_dense_addmm
    return lambda: addmm(one.out, w, one.b, alpha=1, beta=0, out=one.out, meta=meta)


def meta_space(case: SpmmCase) -> Space:
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


def stage_space(case: SpmmCase) -> Space:
    """num_stages alone; the others as torch's `bsr_dense_addmm_meta` sets them for a card it does not know."""
    split = max(case.n // case.block[0], 1)
    return {"SPLIT_N": (split,), "GROUP_SIZE_ROW": (4,), "num_stages": (1, 2, 3, 4, 5, 6), "num_warps": (4,)}


def _only_a_at_b(case: SpmmCase) -> list[str]:
    return [] if case.form == A_AT_B else [f"multiplies A @ B, not {form_name(case.form)}"]


@dataclass(frozen=True)
class CuSparse(Peer):
    """cuSPARSE SpMM on Blocked-ELL, through ctypes: torch brings the library but binds no such call."""

    def why_not(self, case: SpmmCase, device: torch.device) -> list[str]:
        reasons = _only_a_at_b(case)
        if device.type != "cuda":
            reasons.append("cuSPARSE needs an NVIDIA GPU")
        if case.block[0] != case.block[1]:
            reasons.append(f"Blocked-ELL blocks are square, not {case.block_name}")
        if case.m % case.block[0] or case.k % case.block[1]:
            reasons.append(f"Blocked-ELL needs sides that are multiples of the block {case.block_name}")
        if case.dtype not in cusparse.CUDA_TYPES:
            reasons.append(f"not set up here for {case.dtype}")
        return reasons

    def ready(self, case: SpmmCase, sets: Sequence[ProductOperands], tried: Callable[[str], None]) -> Ready:
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
                accepted(sets[0].judge(sets[0].out), f"Blocked-ELL stored by {layout}")
            except UnavailableError as error:
                failures.append(str(error))
                tried(f"cuSPARSE: {error}")
                continue
            others = [cusparse.prepare(library, one, layout, case.dtype) for one in sets[1:]]
            note = f"Blocked-ELL stored by {layout}, {first.width} blocks in every row"
            return Ready((first, *others), note)
        raise UnavailableError("; ".join(failures))


PEERS: tuple[Peer, ...] = (
    CUBLAS,
    TorchSparse("torch_sparse", "torch.sparse"),
    TorchSparse("torch_sparse_stages", "torch.sparse, stages", "cuda", stages_only=True),
    CuSparse("cusparse", "cuSPARSE"),
    TORCH_DENSE,
    Own(
        "a_at_b",
        "A @ B",
        other=a_at_b,
        unless=lambda case: ["the case is A @ B itself"] if case.form == A_AT_B else [],
    ),
)
