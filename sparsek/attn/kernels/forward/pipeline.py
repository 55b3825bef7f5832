"""The pipeline of Hopper's forward attention: its shape and rings, and how a warpgroup walks the steps of a tile.

    producer warp      Q of a tile, then K and V of each step, by TMA into rings of slots      each kernel's own
    warpgroups         S of step i    | P V of step i - 1, meanwhile the softmax of step i     `attended`
                       then O through shared memory to where a tile goes                       each kernel's own

S of step i is issued before P V of step i - 1, so that the softmax of step i overlaps with P V. Steps whose keys some
query does not see come first. What differs between kernels are three functions, constants of `attended`:

    CHANGE(T, s, i, masked, tile)                scores after what changes them (softcap, ALiBi)
    RULE(T, MASKED, i, masked, tile)             what MASK must know of step i, found while its S is not there yet
    MASK(T, MASKED, s, rule, i, masked, tile)    scores after the rules of step i, which is among the first if MASKED

`tile` is what they know of a tile. T is a kernel's Config, with the fields of `Pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from sparsek.attn.kernels.forward.rules import Ruled
from sparsek.attn.kernels.forward.softmax import rescaled, scores, softmax, weighted
from sparsek.core.device import Card
from sparsek.engine.launch.gluon import opaque, tma_store_wait
from sparsek.engine.launch.kinds import KernelConfig

HALF_AN_SM = (228 << 10) // 2 - 1024  # shared memory for each of two CTAs on an SM of sm_90
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)

Shape = TypeVar("Shape", bound="Pipeline")


class Pipeline(KernelConfig):
    """A tile and the rings that feed it. All of it is known at compile time. Base of dataclasses with these fields.

    `dim` and `v_dim` are powers of two; narrower heads are padded by the zeros that TMA reads outside a tensor.
    `groups` consumer warpgroups own 64 rows each; a step has `keys` keys, and K and V rings have `stages` slots, Q
    has `q_slots`. `pack` query heads share a tile: a row is one query of one head.
    """

    dim: int
    v_dim: int
    groups: int
    keys: int
    stages: int
    q_slots: int
    pack: int

    lead: ClassVar[tuple[int, ...]] = ()  # sides of a slot of K or V before [keys, dim]
    own_barriers: ClassVar[int] = 0  # of the producer alone, behind those of V
    passes: ClassVar[bool] = False  # the producer loads no step that no row of the tile sees

    @property
    def rows(self) -> int:
        return 64 * self.groups

    def pipeline_texts(self, *of_keys: str, of: str = "") -> list[str]:
        """Parts of the text; `of_keys`: those between heads and rings."""
        return [
            f"tile {self.rows}x{self.keys}{of} for {self.groups} warpgroups",
            f"{self.pack} heads packed" * (self.pack > 1),
            f"heads {self.dim}/{self.v_dim}",
            *of_keys,
            f"{self.stages} stages, {self.q_slots} of Q",
        ]

    @property
    def positions(self) -> int:
        """Query positions of a tile."""
        return self.rows // self.pack

    @property
    def k_slot(self) -> list[int]:
        """The shape of a slot of K."""
        return [*self.lead, self.keys, self.dim]

    @property
    def v_slot(self) -> list[int]:
        return [*self.lead, self.keys, self.v_dim]

    @property
    def o_in_q(self) -> bool:
        """Whether O is staged in Q's memory: that saves memory, but the next Q waits until O is stored."""
        return self.q_slots == 1 and self.v_dim == self.dim

    @property
    def smem_bytes(self) -> int:
        o = 0 if self.o_in_q else self.rows * self.v_dim
        loaded = self.q_slots * self.rows * self.dim + self.stages * self.keys * (self.dim + self.v_dim)
        barriers = 2 * self.q_slots * self.groups + 4 * self.stages + self.own_barriers
        return 2 * (loaded + o) + 8 * barriers + 64

    @property
    def ctas_per_sm(self) -> int:
        """Two CTAs of one consumer warpgroup each hide each other's softmax."""
        return 2 if self.groups == 1 and self.smem_bytes <= HALF_AN_SM else 1

    @property
    def options(self) -> dict[str, int]:
        """Compiler options: registers for two CTAs on an SM."""
        return {"maxnreg": 128} if self.ctas_per_sm == 2 else {}


@dataclass(frozen=True, repr=False)
class BlockPipeline(Pipeline, Ruled):
    """A pipeline for the blocks of a mask.

    `interval`, `bits` and `members`: the rules that partial blocks may have; without any only the end of the keys.
    `members`: query rows of one bit, 0 without; `member_ends`: they see keys at the ends of their intervals without it.
    `split`: tiles may be parts. `lse`: write the logarithms of the sums.
    """

    dim: int
    v_dim: int
    block: tuple[int, int]
    groups: int
    keys: int
    stages: int
    q_slots: int
    pack: int = 1
    interval: bool = False
    bits: bool = False
    split: bool = False
    lse: bool = False
    members: int = 0
    member_ends: bool = False

    lead: ClassVar[tuple[int, ...]] = (1, 1)

    @property
    def skips(self) -> bool:
        """Whether a warpgroup passes over steps that none of its rows sees."""
        return self.members > 0 and not self.member_ends

    @property
    def passes(self) -> bool:
        return self.skips and self.groups == 1


def fitted(c: Shape, smem: int) -> Shape:
    """The same tile with two slots of Q if they fit next to two stages, and then as many stages, up to 4, as fit."""
    # Two CTAs have 128 registers a thread at launch, too few for 64 x 256 accumulators.
    room = HALF_AN_SM if c.groups == 1 and c.v_dim <= 128 else smem - 1024
    for q_slots, stages in ((2, 4), (2, 3), (2, 2), (1, 4), (1, 3)):
        found = replace(c, q_slots=q_slots, stages=stages)
        if found.smem_bytes <= room:
            return found
    return replace(c, q_slots=1, stages=2)


def step_seconds(c: Pipeline, card: Card, work: float = 1.0) -> float:
    """A step of a whole SM. `work`: operations of the slow unit for a score, over those of exp2 alone.

    Constants are fitted on an H200 (2026-11-21): a step is bound by the tensor core (2048 multiply-adds a cycle) or by
    the softmax (8 scores a cycle), 3 % above their smooth maximum at 1.6 GHz; steps of 64 keys take 20 % more, two CTAs
    of one warpgroup 10 % less. CTAs of one warpgroup reuse every key for half as many rows: L2 bounds them.
    """
    mma = c.rows * c.keys * (c.dim + c.v_dim) / (2048 * card.pace)
    exp = c.rows * c.keys / 8 * work
    slower = 1.2 if c.keys == 64 else 0.9 if c.groups == 1 else 1.0
    busy = 1.03 * slower * (mma**3 + exp**3) ** (1 / 3) / 1.6e9
    return max(busy, 2 * c.keys * (c.dim + c.v_dim) * card.sm_count / (0.9 * card.fabric))


@gluon.jit
def rings(T: gl.constexpr, q_desc, o_desc):
    """Shared memory of Q, K, V and O, and the barriers of Q, K and V, each for full and for empty slots."""
    DTYPE: gl.constexpr = q_desc.dtype
    K: gl.constexpr = T.k_slot
    V: gl.constexpr = T.v_slot
    STAGES: gl.constexpr = T.stages
    GROUPS: gl.constexpr = T.groups
    QS: gl.constexpr = T.q_slots * T.groups
    V_FULL: gl.constexpr = T.stages + T.own_barriers
    q_s = gl.allocate_shared_memory(DTYPE, [QS] + q_desc.block_type.shape, q_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES] + K, gl.NVMMASharedLayout.get_default_for(K, DTYPE))
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES] + V, gl.NVMMASharedLayout.get_default_for(V, DTYPE))
    if T.o_in_q:
        o_s = q_s
    else:
        o_s = gl.allocate_shared_memory(o_desc.dtype, [GROUPS] + o_desc.block_type.shape, o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_FULL, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(STAGES, V_FULL):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    return q_s, k_s, v_s, o_s, (q_full, q_empty, k_full, k_empty, v_full, v_empty)


@gluon.jit
def after(slot, phase, SLOTS: gl.constexpr):
    """The slot of a ring that follows, and its phase."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def step(
    T: gl.constexpr, CHANGE: gl.constexpr, RULE: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
    DTYPE: gl.constexpr, i, masked, state, tile, scale, q, k_s, v_s, bars,
):  # fmt: skip
    """S of step i in parallel with P V of the previous step, with V in the slot of `state`; then step i's softmax."""
    acc, pairs, m, l, v_slot, v_phase = state
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    slot, phase = after(v_slot, v_phase, T.stages)
    mbarrier.wait(k_full.index(slot), phase)  # until K has landed
    s = scores(T, q, k_s, slot)
    mbarrier.wait(v_full.index(v_slot), v_phase)  # until V of the previous step has landed
    pv = weighted(T, pairs, v_s, v_slot, acc, DTYPE)
    rule = RULE(T, MASKED, i, masked, tile)
    s = warpgroup_mma_wait(1, deps=(s,))  # S is done, P V still runs
    mbarrier.arrive(k_empty.index(slot), count=1)
    s = MASK(T, MASKED, CHANGE(T, s, i, masked, tile), rule, i, masked, tile)
    pairs, m, l, alpha = softmax(T, s, m, l, scale, DTYPE)
    # Passes at once. It contains a branch, and ptxas does not move the next wait above it; otherwise P V would be
    # waited for before the softmax that should overlap with it.
    mbarrier.wait(v_full.index(v_slot), v_phase)
    acc = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    return rescaled(T, acc, alpha), pairs, m, l, slot, phase


@gluon.jit
def attended(
    T: gl.constexpr, CHANGE: gl.constexpr, RULE: gl.constexpr, MASK: gl.constexpr, WG: gl.constexpr,
    DTYPE: gl.constexpr, masked, steps, tile, scale, at_q, at_k, q_s, k_s, v_s, bars,
):  # fmt: skip
    """Sums of a tile's P V [64, v_dim], maxima and sums of its rows, and the next slot of K and V with its phase.

    The first `masked` of the `steps` have a rule. `scale` times scores is in base 2. `at_q`, `at_k`: slot and phase of
    Q, and of the first K and V.
    """
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    GROUPS: gl.constexpr = T.groups
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_slot, q_phase = at_q
    slot, phase = at_k
    mbarrier.wait(q_full.index(q_slot * GROUPS + WG), q_phase)  # until Q has landed
    q = q_s.index(q_slot * GROUPS + WG).reshape((64, DIM))
    mbarrier.wait(k_full.index(slot), phase)  # and the first K
    issued = scores(T, q, k_s, slot)
    if masked > 0:
        rule = RULE(T, True, 0, masked, tile)
        s = warpgroup_mma_wait(0, deps=(issued,))
        s = MASK(T, True, CHANGE(T, s, 0, masked, tile), rule, 0, masked, tile)
    else:
        s = warpgroup_mma_wait(0, deps=(issued,))
        s = MASK(T, False, CHANGE(T, s, 0, masked, tile), 0, 0, masked, tile)
    mbarrier.arrive(k_empty.index(slot), count=1)
    m = gl.full((64,), float("-inf"), gl.float32, ROW)
    l = gl.zeros((64,), gl.float32, ROW)
    pairs, m, l, alpha = softmax(T, s, m, l, scale, DTYPE)
    acc = gl.zeros((64, VDIM), gl.float32, O_LAYOUT)
    for i in range(1, masked):
        state = (acc, pairs, m, l, slot, phase)
        acc, pairs, m, l, slot, phase = step(
            T, CHANGE, RULE, MASK, True, DTYPE, i, masked, state, tile, scale, q, k_s, v_s, bars
        )
    for i in range(gl.maximum(masked, 1), steps):
        state = (acc, pairs, m, l, slot, phase)
        acc, pairs, m, l, slot, phase = step(
            T, CHANGE, RULE, MASK, False, DTYPE, i, masked, state, tile, scale, q, k_s, v_s, bars
        )
    if not T.o_in_q:
        mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
    mbarrier.wait(v_full.index(slot), phase)  # until the last V has landed
    acc = warpgroup_mma_wait(0, deps=(weighted(T, pairs, v_s, slot, acc, DTYPE),))
    mbarrier.arrive(v_empty.index(slot), count=1)
    slot, phase = after(slot, phase, T.stages)
    return acc, m, l, slot, phase


@gluon.jit
def begun(
    T: gl.constexpr, CHANGE: gl.constexpr, RULE: gl.constexpr, MASK: gl.constexpr, MASKED: gl.constexpr,
    DTYPE: gl.constexpr, i, masked, state, tile, scale, q, k_s, bars,
):  # fmt: skip
    """S of step i and its softmax, where no P V is left: `step` without one. The state after it has one left."""
    acc, pairs, m, l, slot, phase = state
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    slot, phase = after(slot, phase, T.stages)
    mbarrier.wait(k_full.index(slot), phase)  # until K has landed
    s = scores(T, q, k_s, slot)
    rule = RULE(T, MASKED, i, masked, tile)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    s = MASK(T, MASKED, CHANGE(T, s, i, masked, tile), rule, i, masked, tile)
    pairs, m, l, alpha = softmax(T, s, m, l, scale, DTYPE)
    return rescaled(T, acc, alpha), pairs, m, l, slot, phase


@gluon.jit
def completed(T: gl.constexpr, DTYPE: gl.constexpr, acc, pairs, slot, phase, v_s, bars):
    """The P V that is left, of the step whose V is in `slot`."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    mbarrier.wait(v_full.index(slot), phase)  # until V has landed
    acc = warpgroup_mma_wait(0, deps=(weighted(T, pairs, v_s, slot, acc, DTYPE),))
    mbarrier.arrive(v_empty.index(slot), count=1)
    return acc


@gluon.jit
def attended_by_some(
    T: gl.constexpr, CHANGE: gl.constexpr, RULE: gl.constexpr, MASK: gl.constexpr, SEES: gl.constexpr, WG: gl.constexpr,
    DTYPE: gl.constexpr, masked, steps, tile, scale, at_q, at_k, q_s, k_s, v_s, bars,
):  # fmt: skip
    """As `attended`, but the warpgroup passes over masked steps where SEES gives 0: where none of its rows sees a key.

    It finishes a P V that is left before it passes over a step: while that waits, its V keeps a slot of the ring, and
    after as many steps as the ring has slots nothing more would be loaded. K and V of a step are awaited before they
    are given back, because an arrival before they land would count for the load before. If T.passes, such steps are
    not loaded, and nothing is left to do.
    """
    DIM: gl.constexpr = T.dim
    VDIM: gl.constexpr = T.v_dim
    KEYS: gl.constexpr = T.keys
    HALF: gl.constexpr = T.keys // 2
    GROUPS: gl.constexpr = T.groups
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.keys, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 16])
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_slot, q_phase = at_q
    slot, phase = at_k
    slot -= 1  # of the step before
    if slot < 0:
        slot = T.stages - 1
        phase ^= 1
    mbarrier.wait(q_full.index(q_slot * GROUPS + WG), q_phase)  # until Q has landed
    m = gl.full((64,), float("-inf"), gl.float32, ROW)
    l = gl.zeros((64,), gl.float32, ROW)
    acc = gl.zeros((64, VDIM), gl.float32, O_LAYOUT)
    pairs, unused = gl.zeros((64, KEYS), gl.int32, S_LAYOUT).reshape((64, HALF, 2)).split()
    left = 0  # whether P V of the step before is
    sees = SEES(T, 0, masked, tile)
    for i in range(masked):
        following = SEES(T, i + 1, masked, tile)  # read a step ahead
        state = (acc, pairs, m, l, slot, phase)
        q = q_s.index(q_slot * GROUPS + WG + opaque(0)).reshape((64, DIM))
        if sees != 0:
            if left != 0:
                acc, pairs, m, l, slot, phase = step(
                    T, CHANGE, RULE, MASK, True, DTYPE, i, masked, state, tile, scale, q, k_s, v_s, bars
                )
            else:
                acc, pairs, m, l, slot, phase = begun(
                    T, CHANGE, RULE, MASK, True, DTYPE, i, masked, state, tile, scale, q, k_s, bars
                )
            left = 1
        elif not T.passes:
            if left != 0:
                acc = completed(T, DTYPE, acc, pairs, slot, phase, v_s, bars)
            left = 0
            slot, phase = after(slot, phase, T.stages)
            mbarrier.wait(k_full.index(slot), phase)  # until K and V have landed
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
        sees = following
    first = masked
    if (left == 0) & (masked < steps):
        state = (acc, pairs, m, l, slot, phase)
        q = q_s.index(q_slot * GROUPS + WG + opaque(0)).reshape((64, DIM))
        acc, pairs, m, l, slot, phase = begun(
            T, CHANGE, RULE, MASK, False, DTYPE, masked, masked, state, tile, scale, q, k_s, bars
        )
        left = 1
        first += 1
    q = q_s.index(q_slot * GROUPS + WG + opaque(0)).reshape((64, DIM))
    for i in range(first, steps):
        state = (acc, pairs, m, l, slot, phase)
        acc, pairs, m, l, slot, phase = step(
            T, CHANGE, RULE, MASK, False, DTYPE, i, masked, state, tile, scale, q, k_s, v_s, bars
        )
    if not T.o_in_q:
        mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
    if left != 0:
        acc = completed(T, DTYPE, acc, pairs, slot, phase, v_s, bars)
    slot, phase = after(slot, phase, T.stages)
    return acc, m, l, slot, phase


@gluon.jit
def room_of_o(T: gl.constexpr, WG: gl.constexpr, q_slot, q_s, o_s):
    """Where a warpgroup stages O."""
    GROUPS: gl.constexpr = T.groups
    if T.o_in_q:
        return q_s.index(q_slot * GROUPS + WG)
    else:
        tma_store_wait(0)  # until TMA has read the previous O, which is overwritten next
        return o_s.index(WG)


@gluon.jit
def stored(T: gl.constexpr, WG: gl.constexpr, at_q, bars):
    """The next slot of Q and its phase, after a tile's O has been handed to TMA."""
    GROUPS: gl.constexpr = T.groups
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_slot, q_phase = at_q
    if T.o_in_q:
        tma_store_wait(0)  # until TMA has read O, which the next Q overwrites
        mbarrier.arrive(q_empty.index(q_slot * GROUPS + WG), count=1)
    return after(q_slot, q_phase, T.q_slots)
