"""The protocols of kernels of attention, and the tensors of one launch."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.problems import AttentionGradProblem, AttentionProblem, PagedProblem
from sparsek.attn.reference.scores import PLAIN as PLAIN_SCORES
from sparsek.attn.reference.scores import Scores
from sparsek.engine.plan.kernel import Kernel


def unless_heads(
    p: AttentionProblem | PagedProblem, room: str, most: int, most_v: int = 0, unit: int = 8
) -> list[str]:
    """TMA moves units of 16 bytes, `unit` numbers, and a kernel has `room` for so many columns of k and of v."""
    most_v = most_v or most
    if p.dim <= most and p.v_dim <= most_v and p.dim % unit == p.v_dim % unit == 0:
        return []
    upto = f"{most}" if most == most_v else f"{most} for k and {most_v} for v"
    right = f"multiples of {unit} up to {upto}, not {p.dim} and {p.v_dim}"
    return [f"TMA moves whole 16 bytes and {room}, so head dims must be {right}"]


def unless_members(p: AttentionProblem) -> list[str]:
    """A kernel whose partial blocks are by interval or bits."""
    return ["does not compute partial blocks by members"] if p.members else []


def padded_heads(p: AttentionProblem | PagedProblem, least: int = 32) -> tuple[int, int]:
    """Powers of two, `least` or more, that hold the columns of q and k, and of v."""
    dim, v_dim = (max(least, 1 << (side - 1).bit_length()) for side in (p.dim, p.v_dim))
    return dim, v_dim


def padding_notes(p: AttentionProblem | PagedProblem, c: Any) -> list[str]:
    """A note of `explain()` where heads are padded."""
    if (c.dim, c.v_dim) == (p.dim, p.v_dim):
        return []
    return [f"heads of {p.dim}/{p.v_dim} are computed as {c.dim}/{c.v_dim}"]


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
    dim of any tensor is 0. dk and dv are float32 where the problem is `wide` and the kernel has `widens`.

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
