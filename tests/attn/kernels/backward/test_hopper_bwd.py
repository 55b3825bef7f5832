"""hopper.attention_bwd without a GPU: configs compiled for sm_90a, and their texts, limits, reasons and predictions."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparsek as sk
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core.device import H200
from sparsek.engine.table import load

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import delta, hopper_bwd
from sparsek.attn.kernels.backward.hopper_bwd import Config
from tests.attn.kernels.forward.problems import BLOCKS, attention_problem, hold_code
from tests.engine.launch import newest
from tests.engine.launch.covering import covering, once
from tests.engine.launch.hopper_code import Code, compiled
from tests.sampling import sampled

KERNEL = load("hopper.attention_bwd")
SIDES = (32, 64, 128)


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> AttentionGradProblem:
    return attention_problem(AttentionGradProblem, dim, v_dim, **{"mask_heads": 1, "lse": True} | more)


FLAGS = [
    (interval, bits, ordered)
    for interval in (False, True)
    for bits in (False, True)
    for ordered in (False, True)
]
PROBLEMS = [
    problem(*dims, block=block, by_interval=interval, by_bits=bits, deterministic=ordered)
    for dims, block, (interval, bits, ordered) in product(product(SIDES, SIDES), BLOCKS, FLAGS)
]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p)))


def choices(case: tuple[Config, str]) -> list[Any]:
    c, dtype = case
    ring = ("ring", c.halves, c.queries, c.stages, c.dq_slots)
    return [("heads", c.dim, c.v_dim), ring, c.block, ("rules", c.interval, c.bits), c.sums, dtype]


SPILL_WIDE, SPILL = 160, 96  # bytes of stack, for heads whose sides are 256 together and narrower ones
FULLEST = (Config(128, 128, (128, 128), 2, 2, interval=True, bits=True), "bf16")
CASES = [*covering([(c, dtype) for c in CONFIGS for dtype in ("bf16", "fp16")], choices), FULLEST]
# Every run compiles one that holds most choices, of the head dims as two, and one of the fullest.
COMPILED = once(CASES, lambda case: [case[0].dim, ("v_dim", case[0].v_dim), *choices(case)[1:]], most=1)
NEXT_CASES = sampled([FULLEST, *CASES[::12]], 1, of="the newest Triton")


def check(c: Config, dtype: str, code: Code, spilled: int) -> None:
    """What every compiled kernel must show."""
    # Two warpgroups with a loop each: S, dP, dV and dK of a step, and dQ from the dS of every half. With two halves one
    # of them multiplies a tile's last dQ after its loop, and with 128 queries a step each one its half of that. Of
    # pairs a warpgroup that passes over a step multiplies dQ there.
    products = c.dim // 16 + c.v_dim // 16 + c.queries // 8 + 4 * c.halves
    count = 2 * products + (c.queries // 8 if c.halves == 2 else 0) + (16 if c.paired else 0)
    # Descriptors of K and V are made before the loop and again in it (`mixed`): the same ones, as GPU tests show.
    clean = ("unwritten", "early", "fixed_bounds")
    where = hold_code(c, code, dtype, {c.queries, c.dim, c.v_dim}, count, clean=clean)
    # P is computed while dP is multiplied.
    assert all(loop.beside >= c.queries // 2 for loop in code.loops), where
    assert any("reduce" in copy or "bulk_group" in copy for copy in code.copies), where
    assert code.stack <= spilled, where
    assert c.smem_bytes - 1024 <= code.shared <= c.smem_bytes + 512, (
        f"smem_bytes says {c.smem_bytes}: {where}"
    )


@pytest.mark.parametrize(("c", "dtype"), list(dict.fromkeys(COMPILED)), ids=str)
def test_it_compiles(c: Config, dtype: str) -> None:
    # dK and dV take 128 registers at dim 128; what spills there lies outside the steps, or is an address.
    wide = c.dim + c.v_dim == 256
    check(c, dtype, compiled(c, dtype), SPILL_WIDE if wide else SPILL)


FULL_OR_RULED = [
    FULLEST[0],
    replace(FULLEST[0], softcap=True, alibi=True),
    Config(128, 128, (64, 64), 1, 2, interval=True, softcap=True),
    Config(64, 64, (128, 128), 2, 4, softcap=True, alibi=True, sums=0),
    Config(128, 128, (128, 128), 2, 2, interval=True, members=16),
    Config(128, 128, (128, 64), 1, 2, interval=True, members=16, member_ends=True, sums=0),
    Config(64, 64, (128, 128), 2, 2, interval=True, members=1, sums=2, queries=128),
    Config(128, 128, (128, 128), 2, 2, interval=True, members=16, parts=True),
    Config(128, 128, (64, 128), 2, 2, interval=True, members=16, parts=True),
    Config(128, 128, (64, 128), 2, 2, interval=True, members=16, parts=True, paired=True),
    Config(128, 128, (64, 128), 2, 2, interval=True, members=4, sums=0, softcap=True, paired=True),
    Config(128, 128, (128, 128), 2, 2, interval=True, sums=1, parts=True),
    Config(128, 128, (128, 64), 1, 2, interval=True, members=16, sums=0, parts=True),
    Config(64, 64, (128, 128), 2, 2, interval=True, members=4, sums=2, queries=128, parts=True),
]


@pytest.mark.parametrize("c", sampled(FULL_OR_RULED, 1), ids=str)
def test_the_fullest_changed_scores_and_members_compile(c: Config) -> None:
    code = compiled(c, "bf16")
    check(c, "bf16", code, SPILL_WIDE if c.dim + c.v_dim == 256 else SPILL)


def test_it_compiles_under_the_newest_triton() -> None:
    codes = newest.calls(compiled, [(c, dtype, False) for c, dtype in NEXT_CASES])
    for (c, dtype), code in zip(NEXT_CASES, codes, strict=True):
        check(c, dtype, code, 640)


def test_every_ring_fits_and_a_barrier_belongs_to_one_warpgroup_where_they_take_turns() -> None:
    for c in CONFIGS:
        assert c.smem_bytes <= H200.smem_bytes
        assert c.halves == 2 or c.barriers % 2 == 0
        assert c.barriers % c.stages == 0
        assert c.halves == 1 or c.dq_slots == 2
        assert c.queries == 64 or (c.halves == 2 and c.block[0] == 128 and max(c.dim, c.v_dim) <= 64)


def test_narrow_heads_take_128_queries_a_step_and_two_sums() -> None:
    narrow = KERNEL.default(problem(64, block=(128, 128)))
    assert (narrow.queries, narrow.sums) == (128, 2)
    assert KERNEL.default(problem(64, block=(128, 128), softcap=True)).queries == 64
    assert KERNEL.default(problem(128, block=(128, 128))).queries == 64
    assert narrow.order_price > KERNEL.default(problem(block=(128, 128))).order_price > 1
    assert KERNEL.default(problem(64, block=(128, 128), deterministic=False)).order_price == 1


def test_members_whose_rows_exceed_l2_are_cut_into_parts() -> None:
    """The plan names the workspace, which holds no more sums of keys than there are of queries."""
    sizes: dict[str, Any] = {
        "batch": 1,
        "q_heads": 4,
        "kv_heads": 4,
        "q_len": 16 * 8192,
        "kv_len": 8192,
        "mask_heads": 4,
    }
    p = problem(stored=4 * 1024 * 64, longest=64, members=16, by_interval=True, exact=False, **sizes)
    c = KERNEL.default(p)
    assert c.parts
    assert "tiles cut into parts" in c.texts
    assert any("8 parts" in note and "268.4 MB" in note for note in KERNEL.notes(p, c))
    assert not KERNEL.default(problem()).parts


def test_wide_gradients_of_keys_are_sums_of_one_part() -> None:
    wide = problem(wide=True)
    c = KERNEL.default(wide)
    assert c == replace(KERNEL.default(problem()), parts=True)
    assert any("key tiles have float32 sums" in note for note in KERNEL.notes(wide, c))


def test_members_of_a_tile_are_taken_by_half_tiles() -> None:
    """Not where a step has 128 queries, nor where queries see keys without a bit."""
    sizes: dict[str, Any] = {"q_heads": 64, "kv_heads": 4, "mask_heads": 4, "block": (8, 128), "members": 1}
    sizes["by_interval"] = True
    assert KERNEL.default(problem(**sizes)).block == (64, 128)
    assert KERNEL.default(problem(64, **sizes)).block == (128, 128)
    assert KERNEL.default(problem(member_ends=True, **sizes)).block == (128, 128)
    sizes["block"] = 8, 64  # in pairs, in order too
    c = KERNEL.default(problem(**sizes))
    assert (c.block, c.paired, c.halves) == ((64, 128), True, 2)
    assert KERNEL.why_not(problem(**sizes)) == []
    ends = problem(member_ends=True, deterministic=False, **sizes)
    assert KERNEL.default(ends).block == (128, 64)
    assert "is faster in order" in KERNEL.why_not(replace(ends, deterministic=True))[0]


@pytest.mark.parametrize(("bk", "dim"), [(128, 128), (128, 64), (64, 128)])
def test_no_more_heads_of_a_token_are_packed_than_a_step_has_rows(bk: int, dim: int) -> None:
    """A box of q has tokens, and a half tile has bits."""
    sizes: dict[str, Any] = {"q_heads": 128, "kv_heads": 1, "mask_heads": 1, "block": (1, bk), "members": 1}
    p = problem(dim, by_interval=True, deterministic=False, **sizes)
    c = KERNEL.default(p)
    assert KERNEL.why_not(p) == []
    assert (c.pack, c.block) == (64, (64, bk))
    assert c.queries // c.pack == c.words == 1


def test_time_follows_the_blocks_and_order_costs() -> None:
    sparse, dense = problem(), problem(stored=64 * 64)
    assert KERNEL.seconds(dense, KERNEL.default(dense)) > 5 * KERNEL.seconds(sparse, KERNEL.default(sparse))
    free = problem(stored=64 * 64, deterministic=False)  # of few blocks to set dQ to zero first costs as much
    assert KERNEL.seconds(free, KERNEL.default(free)) < KERNEL.seconds(dense, KERNEL.default(dense))
    assert any("fixed order" in note for note in KERNEL.notes(sparse, KERNEL.default(sparse)))
    assert not any("fixed order" in note for note in KERNEL.notes(free, KERNEL.default(free)))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_launch_allocates_once_and_fills_once(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory whose parts TMA can address, and which do not overlap."""
    ops: list[str] = []
    given: list[Any] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(delta, "launch", lambda kernel, grid, *args, **options: given.append(args))
    monkeypatch.setattr(hopper_bwd, "launch_on", lambda device, kernel, ctas, args, options: None)
    mask, (q, k, v, out, grad) = sk.BlockMask.causal(300, block=128), torch.randn(5, 2, 4, 300, 64).bfloat16()
    sizes: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 4, "q_len": 300, "kv_len": 300}
    p = problem(64, deterministic=deterministic, **sizes, **mask.sizes._asdict())
    c, (dq, dk, dv) = KERNEL.default(p), torch.empty(3, 2, 4, 300, 64).bfloat16()
    call = AttentionGradCall(q, k, v, mask, 0.125, out, torch.randn(2, 4, 300), grad, None, dq, dk, dv)
    work = KERNEL.prepare(p, c, mask)
    with Listening():
        KERNEL.launch(c, work, call)
    assert [name for name in ops if name in ("aten::new_empty", "aten::zero_")] == ops[:1] + ops[-1:]
    rows, acc, turns = given[0][4], *given[1][:2]
    assert rows.untyped_storage().data_ptr() == acc.untyped_storage().data_ptr()
    assert (rows.storage_offset(), acc.storage_offset()) == (0, rows.numel())
    assert acc.storage_offset() * 4 % 512 == 0
    if deterministic:
        assert (turns.dtype, turns.storage_offset()) == (torch.int32, rows.numel() + acc.numel())
    assert not bool((turns if deterministic else acc).any())
