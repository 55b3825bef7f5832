"""O = softmax(scale Q K^T, where the mask allows) V on Hopper over e4m3: host side of hopper_fp8.cu.

Schedule, rules of partial blocks, parts of tiles and their merge are those of hopper.attention_fwd. The kernel is CUDA
C++, because it holds S of two steps in registers beside O: Triton's compiler copies or spills some of them. NVRTC
compiles it on first use (launch/nvrtc.py).

Limits: heads of at most 256 columns for k and 128 for v; no change of scores; partial blocks by interval or bits. Steps
have 64 keys in tiles of 64 rows, where two CTAs share the registers of an SM, and where bits meet scales of blocks and
V has more than 32 columns: 128 would spill.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsek.attn.kernels.forward import rules, score_args
from sparsek.attn.kernels.forward.hopper_fwd import HopperAttention, Work, mask_args, query_rows, too_long
from sparsek.attn.kernels.forward.pipeline import BlockPipeline
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionKernel, unless_heads, unless_members
from sparsek.engine.launch import driver, nvrtc
from sparsek.engine.launch.driver import Boxed
from sparsek.engine.launch.gluon import Described, describe_heads
from sparsek.engine.launch.launch import launch_cuda
from sparsek.engine.launch.nvrtc import Program
from sparsek.engine.plan.kernel import unless_aligned, unless_hopper

PROGRAM = Program(Path(__file__).with_name("hopper_fp8.cu"), "attention_fp8_kernel")
WHOLE_HEAD = 1 << 30  # rows of a scale, where a head has one


@dataclass(frozen=True, repr=False)
class Config(BlockPipeline):
    """In e4m3. `by_block`: scales of K and V change between steps. `half`: the result is in fp16, not bf16."""

    by_block: bool = False
    half: bool = False

    @property
    def texts(self) -> list[str]:
        scales = f"scales of {'blocks' if self.by_block else 'heads'}"
        shape = self.pipeline_texts(scales, f"blocks {self.block[0]}x{self.block[1]}", of=" in e4m3")
        return [*shape, rules.named(self), *self.true_names("split", "lse", "half")]

    @property
    def smem_bytes(self) -> int:
        """Slots of Q, K and V, O, 16 bytes of every row, 24 of two steps a slot, and barriers."""
        slots = self.q_slots * self.rows * self.dim + self.stages * self.keys * (self.dim + self.v_dim)
        barriers = 2 * self.q_slots * self.groups + 4 * self.stages + 4 * self.groups
        return slots + self.rows * (2 * self.v_dim + 16) + 48 * self.stages + 8 * barriers + 16

    @property
    def smem(self) -> int:
        return self.smem_bytes

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_fp8.cu."""
        names = {
            "DIM": self.dim, "V_DIM": self.v_dim, "BM": self.block[0], "BK": self.block[1], "GROUPS": self.groups,
            "KEYS": self.keys, "STAGES": self.stages, "Q_SLOTS": self.q_slots, "PACK": self.pack,
            "INTERVAL": int(self.interval), "BITS": int(self.bits), "SPLIT": int(self.split), "LSE": int(self.lse),
            "BY_BLOCK": int(self.by_block), "HALF": int(self.half), "SMEM_BYTES": self.smem,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in names.items()]


POINTERS = "tiles count partial full rules bits lo hi q_scale k_scale v_scale lse part part_lse"
NUMBERS = "group q_len heads kv_len bound_item bound_head bound_group of_q of_k of_v q_rows"


class AttentionFp8Params(ctypes.Structure):
    """The struct Params of hopper_fp8.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in ("per_k", "per_v")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in NUMBERS.split()),
    ]


class HopperAttentionFp8(HopperAttention):
    """Implements the Kernel protocol for hopper_fp8.cu."""

    name = "hopper.attention_fp8"
    _config = Config
    _tile_seconds = 2.7e-6

    def why_not(self, p: Any) -> list[str]:
        reasons = unless_hopper(p, ("e4m3",)) or nvrtc.missing()
        if p.out not in ("bf16", "fp16"):
            reasons.append(f"gives bf16 and fp16, not {p.out}")
        if p.changes:
            reasons.append(f"does not change scores, and these have {', '.join(p.changes)}")
        reasons += unless_heads(p, "registers hold O beside S of two steps", 256, 128, unit=16)
        return reasons + unless_members(p) + unless_aligned(p, "strides of the values") + too_long(p)

    def configs(self, p: Any) -> Iterable[Any]:
        return [c for c in super().configs(p) if c.groups == 2 or c.keys == 64]

    def _own_rules(self, p: Any) -> dict[str, Any]:
        return {"by_block": any(p.scale_rows[1:]), "half": p.out == "fp16"}

    def _fits(self, p: Any, keys: int) -> bool:
        """A step's keys lie in one block of the mask, and have one scale."""
        rows = p.scale_rows[1:]
        most = 64 if p.by_bits and any(rows) and p.v_dim > 32 else 128
        return keys <= min(most, p.block[1]) and not any(each % keys for each in rows)

    def _step_seconds(self, p: Any, c: Any) -> float:
        """A step of a whole SM: 1.5 times the smooth maximum of tensor core and exp2 at 1.6 GHz. Of five calls with
        tiles of 128x128 on an H200 (2026-11-30), within 3 %; steps of 64 keys as in bf16.
        """
        card = p.card
        mma = c.rows * c.keys * (c.dim + c.v_dim) / (4096 * card.pace)
        exp = c.rows * c.keys / 16
        slower = (1.2 if c.keys == 64 else 1.0) * (1.05 if c.by_block else 1.0)
        busy = 1.5 * slower * (mma**3 + exp**3) ** (1 / 3) / 1.6e9
        return max(busy, c.keys * (c.dim + c.v_dim) * card.sm_count / (0.9 * card.fabric))

    def prepare(self, p: Any, c: Any, mask: BlockMask) -> Work:
        if mask.device.type == "cuda":  # a launch that is captured must not load the kernel
            with torch.cuda.device(mask.device):
                nvrtc.loaded(PROGRAM, c, mask.device.index)
        return super().prepare(p, c, mask)

    def launch(self, c: Any, work: Work, call: AttentionCall) -> None:
        q, k, v, mask, scale, _, _, scores = call
        index = q.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(c, work, call)
        driver.enter(index)  # in a new thread torch may not have set a context yet
        heads, outs = q.shape[1], work.outputs(c, call)
        lists, strides = mask_args(mask, q.shape[2], work.none)
        given = (work.schedule.tiles, work.schedule.count, *lists, q.scale, k.scale, v.scale, *outs.sums)
        per_head = [x.scale.shape[2] if x.rows else 1 for x in (q, k, v)]
        rows = [x.rows or WHOLE_HEAD for x in (q, k, v)]
        params = AttentionFp8Params(
            *(x.data_ptr() for x in given), *(-(-(1 << 40) // (each // 64)) for each in rows[1:]),
            score_args.factor(scale, scores), heads // k.shape[1], q.shape[2], heads, k.shape[2], *strides,
            heads // mask.heads, *per_head, rows[0],
        )  # fmt: skip
        described = (
            query_rows(q.values, c.pack, c.dim), describe_heads(k.values, c.keys, c.dim),
            describe_heads(v.values, c.v_dim, c.keys), query_rows(outs.whole, c.pack, c.v_dim),
        )  # fmt: skip
        function, boxes = nvrtc.loaded(PROGRAM, c, index), map(boxed, described)
        launch_cuda(function, work.ctas, 128 * (c.groups + 1), c.smem, index, (*boxes, params), given)
        work.finish(c, outs, call)


def boxed(d: Described) -> Boxed:
    """A described tensor, with boxes of at most 128 bytes of a row."""
    first, *outer = reversed(d.strides[:-1])
    width, *box = reversed(d.box)
    box = min(width, 128 // d.dtype.itemsize), *box
    return Boxed(d.base.data_ptr(), d.dtype, tuple(reversed(d.shape)), first, box, outer=tuple(outer))


KERNEL: AttentionKernel = HopperAttentionFp8()
