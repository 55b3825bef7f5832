"""The Kernel protocol: the interface between the planner and kernels. Kernels implement it; ops join the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.mask.mask import BlockMask
from sparsek.mask.pages import PageLists
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.matches import Matches
from sparsek.plan.problem import (
    AttentionGradProblem,
    AttentionProblem,
    PagedProblem,
    Problem,
    ProductProblem,
    SddmmProblem,
    SpgemmProblem,
    SpmmProblem,
)
from sparsek.plan.ring import norm
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.reference.scores import PLAIN as PLAIN_SCORES
from sparsek.reference.scores import Scores

P = TypeVar("P", contravariant=True)


def beside(busy: float, moved: float) -> float:
    """Seconds of a kernel that computes for `busy` seconds and moves memory for `moved` seconds.

    Neither hides the other wholly: 50 layers on an H200 (2026-11-22, op planner of benchmarks/results/h200) follow
    the root of the sum of squares.
    """
    return norm(2, busy, moved)


def rounding_seconds(p: SpmmProblem) -> float:
    """Seconds to round B to FP8 before the product; 0 for a B that is not rounded.

    A launch; bytes at 95 % of copy bandwidth, or as its instructions allow; and the time that one program takes for a
    row (H200, 2026-11-22: 58 us at 8192x8192, 4.4 us at 16x14336; H100, 2026-11-26: about 70 us at 8192x8192).
    """
    if not p.b.rounds:
        return 0.0
    moved = p.batch * p.n * p.k * (dtypes.itemsize(p.b.rounds) + 1)
    return 2.2e-6 + beside(moved / min(3.34e12, 0.95 * p.card.bandwidth), 0.2e-9 * p.k)


def activation_seconds(p: SpmmProblem) -> float:
    """Seconds of torch to read C and write its activation, and what the derivative costs more than a product with a
    matrix: it reads no less, but takes 1.3 times as long (H200, 2026-11-26: 193 us; 256 us beside 185 us).
    """
    moved = 2.0 * p.m * p.n * p.batch * dtypes.itemsize(p.c.dtype)
    return p.card.launch_seconds + moved * 1.4 / (0.58 * p.card.bandwidth)


def unless_hopper(
    p: ProductProblem | AttentionProblem | PagedProblem, multiplied: tuple[str, ...] = ("bf16", "fp16")
) -> list[str]:
    """Why wgmma over these dtypes and TMA cannot run `p`: its card, its dtype."""
    reasons = []
    if p.card.capability != (9, 0):
        reasons.append(f"needs a Hopper card (sm_90) for wgmma and TMA, this is {p.card.name}")
    if p.dtype not in multiplied:
        reasons.append(f"multiplies {' and '.join(multiplied)}, not {p.dtype}")
    return reasons


class Kernel(Protocol[P]):
    """One implementation of one operation, as far as the choice of a kernel needs it.

    Optional attributes. `only_by_name`, a reason: the kernel is chosen only if `kernel=` names it. `notes(p, c) ->
    list[str]`: further lines of `explain()` for that choice. `paced`: names of config fields that follow from the
    problem, which a tuned config may have with other values. `successor`: the kernel of a retargeted plan, for a
    kernel whose lists are made on the host.
    """

    name: str

    def why_not(self, p: P) -> list[str]:
        """Every reason why this kernel cannot run `p`, as text; [] means that it can."""
        ...

    def default(self, p: P) -> Any:
        """The config this kernel would use: deterministic, no timing. A frozen dataclass."""
        ...

    def configs(self, p: P) -> Iterable[Any]:
        """Every legal config, for the tuner."""
        ...

    def seconds(self, p: P, c: Any) -> float:
        """Predicted time of one call on `p.card`."""
        ...


class SpmmKernel(Kernel[SpmmProblem], Protocol):
    """One implementation of C = A @ B for a sparse A of some kinds of storage, with an epilogue.

    The first reason of `why_not` is an unsupported storage, because `why_not` is called for every storage. A kernel
    may have a method `make(c, work, a, b, epilogue, by_columns)`, which returns C as `SpmmPlan.run` does, in a tensor
    of its own, or None if it can only write to an `out`. A kernel whose attribute `writes_slope` is true also writes
    the epilogue's slope. `seconds` includes the rounding of B to FP8, `rounding_seconds(p)`.
    """

    def prepare(self, p: SpmmProblem, c: Any, a: Any) -> Any:
        """Work that is done once per plan: schedules, a dense copy. Kept by the plan and passed to `launch`.

        A 2:4 matrix is given as stored; p.a.transposed: the product uses its transpose, and the work must
        record that.
        """
        ...

    def launch(self, c: Any, work: Any, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        """Launches the kernel. `out` [..., M, N] is preallocated and fully overwritten; its layout is the problem's
        c.layout.

        A quantized `a` is a Quantized, and `b` then a transposed QuantizedTensor: b.values [..., N, K] is contiguous
        and begins at a multiple of 16 bytes, B is b.values.mT, and b.scale is float32 [..., N] or []. Of `a`,
        a.matrix.values is FP8 and a.scale float32, in the shape that a.kind implies. The epilogue's bias [M] and
        other matrix [..., M, N] have out's dtype, and apply to the scaled sums in float32.
        """
        ...


class SddmmKernel(Kernel[SddmmProblem], Protocol):
    """One implementation of S = X @ Y at the blocks of a pattern."""

    def prepare(self, p: SddmmProblem, c: Any, pattern: BlockPattern) -> Any:
        """Work that is done once per pattern and plan."""
        ...

    def launch(self, c: Any, work: Any, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor) -> None:
        """Launches the kernel. `values` [nnzb, bm, bn] is preallocated and fully overwritten; 0 outside the matrix."""
        ...


class SpgemmKernel(Kernel[SpgemmProblem], Protocol):
    """One implementation of C = A @ B for BSR A and B."""

    def prepare(self, p: SpgemmProblem, c: Any, matches: Matches) -> Any:
        """Work that is done once per pair of patterns and plan."""
        ...

    def launch(self, c: Any, work: Any, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        """Launches the kernel. `out` is preallocated and fully overwritten: dense [M, N], or values [nnzb, bm, bn] of
        C's pattern.
        """
        ...


class AttentionCall(NamedTuple):
    """The tensors and settings of one launch of attention.

    `out` [B, Hq, S, Dv] and `lse` [B, Hq, S] are preallocated and fully overwritten. `out` is stored as [B, Hq, S,
    Dv] or as [B, S, Hq, Dv], without gaps; `lse` is contiguous. No dim of either is 0, nor T. `scale` is positive and
    multiplies q k^T, base e. `scores`: what changes the product; its slopes and sinks have any strides. Of attention in
    FP8 q, k and v are QuantizedHeads, and `out` has q.source_dtype.
    """

    q: Any
    k: Any
    v: Any
    mask: BlockMask
    scale: float
    out: Tensor
    lse: Tensor | None
    scores: Scores = PLAIN_SCORES


class AttentionKernel(Kernel[AttentionProblem], Protocol):
    """One implementation of attention over the blocks of a mask."""

    def prepare(self, p: AttentionProblem, c: Any, mask: BlockMask) -> Any:
        """Work that is done once per mask and plan, on the mask's device, without a host sync.

        If the work has an attribute `imbalance`, a number or a function without arguments (which may sync), it is the
        work of the fullest CTA over the mean.
        """
        ...

    def launch(self, c: Any, work: Any, call: AttentionCall) -> None:
        """Launches the kernel."""
        ...


class PagedCall(NamedTuple):
    """The tensors and settings of one launch of attention over paged keys and values.

    Queries cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1 of q [tokens, Hq, D] belong to request r, whose keys are the
    first seq_lens[r] of its pages: key j is row j % page of page block_table[r, j // page] of k [P, Hkv, page, D] and v
    [P, Hkv, page, Dv]. Query i of n stands at position seq_lens[r] - n + i. Lengths are on the device only: kernels
    must not read outside a tensor whatever they hold; the problem's `max_q` and `max_k` bound them.

    FP8 pages hold values over `k_scale` and `v_scale`, float32 [1] or [Hkv], or None for 1. Scores are
    softcap * tanh(scale * q.k / softcap), or scale * q.k for softcap 0. `sink_logits`: float32 [Hq], a score without a
    value that every query sees, or None.

    `out` [tokens, Hq, Dv], any strides with a contiguous last dim, and `lse` float32 [Hq, tokens], contiguous, are
    preallocated. Rows of requests are fully overwritten: 0 and -inf for a query that sees nothing. Rows from
    cu_seqlens_q[-1] to `out_end` of out become 0, and those to `lse_end` of lse -inf; further ones are not written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    lists: PageLists | None
    sink_logits: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    softcap: float
    out: Tensor
    lse: Tensor | None
    out_end: int = 0
    lse_end: int = 0


class PagedKernel(Kernel[PagedProblem], Protocol):
    """One implementation of attention over paged keys and values."""

    def prepare(self, p: PagedProblem, c: Any, device: torch.device) -> Any:
        """Work that is done once per plan. It depends on the problem alone, never on lengths or tables, and holds what
        `launch` needs of the problem.
        """
        ...

    def launch(self, c: Any, work: Any, call: PagedCall) -> None:
        """Launches the kernels, without a sync: those that schedule by the lengths on the device, then the others."""
        ...


class AttentionGradCall(NamedTuple):
    """The tensors and settings of one launch of the gradients of attention: writes `dq`, `dk` and `dv`.

    P = exp(scale q k^T - lse) where the mask allows it, delta = rowsum(grad * out) - grad_lse, dv = P^T grad, dS = P
    * (grad v^T - delta), dq = scale dS k, dk = scale dS^T q. Rows with lse = -inf, which see no key, contribute
    nothing. dk and dv are summed over the query heads that share a head of k.

    `out` and `lse` are those of the forward pass, `lse` contiguous. `grad` [B, Hq, S, Dv] has q's dtype. `grad_lse`
    [B, Hq, S] is float32 (float64 for float64) and contiguous, or None for 0. dq, dk and dv have the shapes of q, k
    and v. They are preallocated, fully overwritten, and stored as [B, H, L, E] or as [B, L, H, E], without gaps. No
    dim of any tensor is 0.

    `scores` is that of the forward pass. P is exp(s - lse) of the changed scores s, lse includes the sinks, and a
    softcap multiplies dS by 1 - tanh^2. The gradient of the sinks is not part of the launch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    scale: float
    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_lse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scores: Scores = PLAIN_SCORES


class AttentionGradKernel(Kernel[AttentionGradProblem], Protocol):
    """One implementation of the gradients of attention over the blocks of a mask."""

    def prepare(self, p: AttentionGradProblem, c: Any, mask: BlockMask) -> Any:
        """As `AttentionKernel.prepare`. What the kernel reads of `mask.transposed` must be part of the work, because
        calls on other streams wait for the work's tensors.
        """
        ...

    def launch(self, c: Any, work: Any, call: AttentionGradCall) -> None:
        """Launches the kernel."""
        ...


@dataclass(frozen=True)
class MissingKernel:
    """Stands for a kernel whose module does not import, for example on machines without Triton."""

    name: str
    error: str

    def why_not(self, p: Problem) -> list[str]:
        return [f"does not import here: {self.error}"]
