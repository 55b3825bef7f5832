"""dQ, dK and dV of attention on Hopper for heads of 129 to 256: two passes over the stored blocks, float32 sums.

    P = exp(scale Q K^T - lse) where the mask allows      dV = P^T dO         dK = scale dS^T Q
    dS = P (dO V^T - delta)                               dQ = scale dS K     delta = rowsum(dO O) - dlse

One pass would keep three sums of 64 x 256 float32, and a warpgroup's registers hold one. So there are two:

    keys      a CTA holds 64 keys, a step loads 64 queries          scores are [keys, queries]
              warpgroup 1    S^T = K Q^T, P^T to shared memory      dV += P^T dO      64 x v_dim, kept
              warpgroup 0    dP^T = V dO^T, dS^T from P^T           dK += dS^T Q      64 x dim, kept
    queries   a CTA holds 128 queries, a step loads 64 keys         scores are [queries, keys]
              each warpgroup, 64 rows: S = Q K^T, dP = dO V^T       dQ += dS K        64 x dim, kept

Seven products instead of five, and in return no sum leaves the registers before it is complete: no atomics, no
workspace for dQ, the same bits every time. In both passes one warpgroup multiplies while the other computes weights.

Both passes launch a CTA for every tile, longest first; tiles with more than their share of the blocks are split into
parts, whose float32 sums `add_parts` adds in a fixed order (parts.py), as in portable.attention_bwd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparsek.attn.kernels.backward.bwd_walks import Walks, parts_of, room, walks
from sparsek.attn.kernels.backward.bwd_wide_keys import attention_bwd_keys
from sparsek.attn.kernels.backward.bwd_wide_queries import attention_bwd_queries
from sparsek.attn.kernels.backward.delta import prepare_rows
from sparsek.attn.kernels.forward import rules, score_args
from sparsek.attn.kernels.forward.packed_rows import PackedRows
from sparsek.attn.kernels.forward.parts import add_parts, longest_part
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_grad_schedule import padded_rows
from sparsek.attn.plan.kernels import (
    AttentionGradCall,
    AttentionGradKernel,
    padded_heads,
    padding_notes,
    unless_heads,
)
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.engine.launch.gluon import Described, describe_heads, launch_on
from sparsek.engine.launch.kinds import KernelConfig, source_of
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper


@dataclass(frozen=True, repr=False)
class Config(KernelConfig, rules.Ruled):
    """Heads, blocks and rings of both passes. All of it is known at compile time.

    `dim` and `v_dim` are powers of two; narrower heads are padded by the zeros that TMA reads outside a tensor. The
    pass over keys has `stages` slots of Q, dO and P; the pass over queries two slots of K and `v_slots` of V.
    `interval`, `bits`, `members` and `member_ends`: the rules that partial blocks may have, as in the forward pass;
    without any only the end of the keys.
    """

    dim: int
    v_dim: int
    block: tuple[int, int]
    stages: int = 2
    v_slots: int = 1
    interval: bool = False
    bits: bool = False
    members: int = 0
    member_ends: bool = False

    @property
    def texts(self) -> list[str]:
        return [
            f"two passes, heads {self.dim}/{self.v_dim}, blocks {self.block[0]}x{self.block[1]}",
            f"{self.stages} stages of queries, {self.v_slots} of V", rules.named(self),
        ]  # fmt: skip

    @property
    def keys_bytes(self) -> int:
        """Shared memory of the pass over keys."""
        halves = 64 * (1 + self.stages) * (self.dim + self.v_dim) + self.stages * 64 * 64
        return 2 * halves + 2 * 256 * self.stages + 256

    @property
    def queries_bytes(self) -> int:
        """Shared memory of the pass over queries."""
        return 2 * (128 * (self.dim + self.v_dim) + 64 * (2 * self.dim + self.v_slots * self.v_dim)) + 256


SOURCE = source_of(__file__)


class HopperWideAttentionGrad:
    """Implements the Kernel protocol for the device code above."""

    name = "hopper.attention_bwd_wide"

    def why_not(self, p: AttentionGradProblem) -> list[str]:
        reasons = unless_hopper(p) + unless_heads(p, "a warpgroup holds one sum of at most 256 columns", 256)
        reasons += unless_aligned(p, "strides of q, k, v and grad")
        if max(p.dim, p.v_dim) <= 128:
            reasons.append(
                f"is for head dims above 128, not {p.dim} and {p.v_dim}; hopper.attention_bwd takes those"
            )
        if p.block[0] != 128:
            reasons.append(f"a tile has 128 queries, so blocks must too, not {p.block[0]}")
        if p.softcap or p.alibi:
            reasons.append("has no softcap and no ALiBi")
        programs = p.batch * max(p.q_heads * p.grid[0], p.kv_heads * p.grid[1] * 2)
        if p.batch * p.q_heads * padded_rows(p) >= 2**31 or programs >= 2**30:
            reasons.append(f"numbers of rows and tiles are 32 bits: at most 2^31 rows and {2**30} tiles")
        return reasons

    def default(self, p: AttentionGradProblem) -> Config:
        return next(iter(self.configs(p)))

    def configs(self, p: AttentionGradProblem) -> Iterable[Config]:
        dim, v_dim = padded_heads(p)
        rules = p.by_interval, p.by_bits, p.members, p.member_ends
        return [Config(dim, v_dim, p.block, 2, 1 if v_dim > 128 else 2, *rules)]

    def seconds(self, p: AttentionGradProblem, c: Config) -> float:
        """Products of both passes, begin and end of every tile, and a pass over rows before.

        Constants are from an H100 (2026-11-26, script): products run at 719 TFLOPS, a tile of 64 keys takes
        7 us more, one of 128 queries 10.
        """
        mma = 2.0 * p.block[0] * p.block[1] * (4 * c.dim + 3 * c.v_dim)
        rate, sms = 7.19e14 * p.card.pace, p.card.sm_count
        around = p.batch * (7e-6 * p.kv_heads * p.grid[1] * (p.block[1] // 64) + 1e-5 * p.q_heads * p.grid[0])
        longest = min(p.longest, longest_part(p.visited, p.block, sms))
        busy = max((p.visited * mma / rate) + around / sms, longest * mma / (rate / sms) + 1e-5)
        rows = 4.0 * p.batch * p.q_heads * p.q_len * p.v_dim / p.card.bandwidth
        return busy + rows + 3 * p.card.launch_seconds

    def notes(self, p: AttentionGradProblem, c: Config) -> list[str]:
        return parts_of(p) + padding_notes(p, c)

    def prepare(self, p: AttentionGradProblem, c: Config, mask: BlockMask) -> Walks:
        return walks(p, mask)

    def launch(self, c: Config, work: Walks, call: AttentionGradCall) -> None:
        q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores = call
        (batch, heads, q_len, _), (tiles, columns) = q.shape, mask.grid
        kv_heads, group = k.shape[1], heads // k.shape[1]
        numbers = prepare_rows(out, grad, lse, grad_lse, tiles * mask.block[0])
        rows, flat = numbers.shape[3], numbers.view(-1, 64)
        plane, none, lists = batch * heads * rows, work.keys.order, work.lists
        rules = [
            none if x is None or x.numel() == 0 else x for x in (mask.lo, mask.hi, mask.rules, mask.bits)
        ]
        rule_step = q_len if mask.lo is not None and len(mask.lo) > 1 else 0
        mask_step = mask.heads if mask.batch > 1 else 0
        factors = score_args.factor(scale, scores), scale
        ends = score_args.ends(mask)
        described = (
            describe_heads(q, 64, c.dim), describe_heads(k, 64, c.dim),
            describe_heads(v, 64, c.v_dim), describe_heads(grad, 64, c.v_dim),
        )  # fmt: skip
        sums = room(work.keys, mask.block[1], c.dim + c.v_dim, q.device)
        order = work.keys.order
        args = (
            *described, Described(flat, tuple(flat.shape), (64, 1), (1, 64)),
            describe_heads(dk, 64, c.dim), describe_heads(dv, 64, c.v_dim), numbers if sums is None else sums, order,
            *lists.partial, *lists.full, lists.partial_entries if c.bits or c.members else none, *rules, *factors,
            q_len, k.shape[2], rows, plane // 64, columns, kv_heads, group, heads // mask.heads, mask_step,
            order.shape[0] // mask.batch if mask.batch > 1 else 0, kv_heads if mask.heads == 1 else 1, rule_step,
            order.shape[1], work.keys.lead, work.keys.section, batch * kv_heads, work.keys.slots, *ends, c, SOURCE,
        )  # fmt: skip
        launch_on(
            q.device, attention_bwd_keys, order.shape[1] * (mask.block[1] // 64) * batch * kv_heads, args
        )
        if sums is not None:
            add_parts(sums, 0, work.keys, mask.batch, scale, dk)
            add_parts(sums, c.dim, work.keys, mask.batch, 1.0, dv)
        sums = room(work.queries, 128, c.dim, q.device)
        order = work.queries.order
        args = (
            *described, describe_heads(dq, 64, c.dim), numbers, numbers if sums is None else sums, order,
            *mask.partial, *mask.full, *rules, *factors, q_len, k.shape[2], rows, plane, tiles, heads, group,
            heads // mask.heads, mask_step, rule_step, order.shape[1], work.queries.lead, work.queries.section,
            batch * heads, work.queries.slots, *ends, c, SOURCE,
        )  # fmt: skip
        launch_on(q.device, attention_bwd_queries, order.shape[1] * batch * heads, args)
        if sums is not None:
            add_parts(sums, 0, work.queries, mask.batch, scale, dq)


KERNEL: AttentionGradKernel = PackedRows(HopperWideAttentionGrad())
