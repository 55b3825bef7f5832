"""Shared pieces of the plain Triton attention kernels: tiles of rows, rules of partial blocks, supported problems."""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch import tensors
from sparsek.engine.launch.tensors import SIZE_LIMIT, at

DIMS = (32, 64, 96, 128, 192, 256)
LOG2E = 1.4426950408889634


@triton.jit
def load_tile(
    base, first, limit, row_stride, col_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `first` on, of COLS columns padded to a power of two. RAGGED: zeros from row `limit` on."""
    PADDED: tl.constexpr = triton.next_power_of_2(COLS)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, PADDED)
    where = base + first.to(tl.int64) * row_stride
    where = where + ((at(row, WIDE) * row_stride)[:, None] + (at(col, WIDE) * col_stride)[None, :])
    live = (row < (limit - first if RAGGED else ROWS))[:, None]
    if PADDED != COLS:
        live = live & (col < COLS)[None, :]
    return tl.load(where, mask=live, other=0.0)


@triton.jit
def capped(s, cap):
    """tanh(cap s / (2 log2(e))): see score_args.py."""
    return 1.0 - 2.0 / (tl.exp2(s * cap) + 1.0)


@triton.jit
def slope_of_cap(s):
    """The derivative of capped scores s, 1 - s^2. A masked one is -inf, which would make a weight of 0 NaN."""
    bounded = tl.maximum(s, -1.0)
    return 1.0 - bounded * bounded


@triton.jit
def bias(slope, place, key):
    """slope |place - key|, float32. `place` and `key` are int32 that broadcast to a tile of scores."""
    return tl.abs(place - key).to(tl.float32) * slope


def padded(dim: int) -> int:
    """`dim` padded to a power of two."""
    return 1 << (dim - 1).bit_length()


def is_hopper(p: Any) -> bool:
    """Whether configs for Hopper suit the problem; also true in the interpreter."""
    return p.on_cpu or p.card.capability[0] == 9


def why_not(p: Any) -> list[str]:
    """Why no plain Triton kernel of attention runs problem `p`: its device, dtype, head dims or lengths."""
    why = tensors.why_not(p, ("bf16", "fp16"))
    if p.dim not in DIMS or p.v_dim not in DIMS:
        why.append(f"head dims must be among {', '.join(map(str, DIMS))}; got {p.dim} and {p.v_dim}")
    if max(p.q_len, p.kv_len) > SIZE_LIMIT:
        why.append(f"lengths must be at most {SIZE_LIMIT}; got {p.q_len} queries and {p.kv_len} keys")
    return why


def members_of(mask: Any) -> int:
    """The rows of a token of a mask by members, 0 for others."""
    return 0 if mask.members is None else mask.members.rows


def table_of(p: Any) -> int:
    """The key of `p` in the tables of configs: the wider head dim, padded."""
    return max(64, padded(p.dim), padded(p.v_dim))


def is_wide(rows: int, *tensors: Tensor) -> bool:
    """Whether offsets inside one tile of these tensors may pass 2^31."""
    return any(rows * x.stride(2) + x.shape[3] * x.stride(3) > SIZE_LIMIT for x in tensors)


class PortableKernel:
    """What the forward and backward kernels share. `tables`: configs by `table_of`, for Hopper and before. At most
    `most` programs, one for each tile of `tiled`.
    """

    tables: tuple[dict[int, tuple[Any, ...]], dict[int, tuple[Any, ...]]]
    most: int
    tiled: str

    def programs(self, p: Any, c: Any) -> tuple[int, ...]:
        """Number of programs of each launch."""
        raise NotImplementedError

    def fits(self, p: Any, c: Any) -> bool:
        """Whether tiles divide the mask's blocks and fit into the card's shared memory."""
        raise NotImplementedError

    def why_not(self, p: Any) -> list[str]:
        """Reasons why `p` cannot run here."""
        why = why_not(p)
        if not why and not any(True for _ in self.configs(p)):
            blocks = f"blocks of {p.block[0]}x{p.block[1]}"
            why.append(f"no tile divides {blocks} and fits into {p.card.smem_bytes} bytes of shared memory")
        if not why and max(self.programs(p, self.default(p))) > self.most:
            why.append(f"more than {self.most} tiles of {self.tiled}")
        return why

    def default(self, p: Any) -> Any:
        """The first of `configs` with enough tiles for all SMs, else the first with the most tiles."""
        configs = list(self.configs(p))
        enough = min(p.card.sm_count, max(min(self.programs(p, c)) for c in configs))
        return next(c for c in configs if min(self.programs(p, c)) >= enough)

    def configs(self, p: Any) -> Iterator[Any]:
        """Alternatives worth timing, best guess first, limited by the mask's block and the card's shared memory."""
        return (c for c in self.tables[not is_hopper(p)][table_of(p)] if self.fits(p, c))

    def notes(self, p: Any, c: Any) -> list[str]:
        wider = [f"{d} as {padded(d)}" for d in sorted({p.dim, p.v_dim}) if padded(d) != d]
        return [f"head dim {' and '.join(wider)}, padded with zeros"] if wider else []


def section(p: Any, heads: int, head_bytes: int, shared_by: int) -> int:
    """How many of `heads` are walked together, where `shared_by` of them read the same `head_bytes`: those whose
    bytes fit in half of L2, so that programs reuse each other's reads. More, if otherwise a section would be so short
    that its longest row, started late, outlasts the rest.
    """
    held = max(1, p.card.l2_bytes // 2 // max(1, head_bytes)) * shared_by
    shortest = 2 * p.card.sm_count * max(1, p.longest)
    sections = max(1, min(-(-heads // held), p.visited // shortest))
    return -(-heads // sections)
