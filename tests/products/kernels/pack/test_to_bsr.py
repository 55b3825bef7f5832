"""products/kernels/pack/to_bsr.py: in Triton's interpreter, compiled for cards that are not there, and on a GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.products.formats import convert
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Scope

pytest.importorskip("triton")

from sparsek.products.kernels.pack import to_bsr as portable
from tests.engine.launch import newest
from tests.engine.launch.covering import once
from tests.products.kernels.pack import to_bsr_code as offline
from tests.products.kernels.pack.to_bsr_cases import (
    LAYOUTS,
    NOTHING,
    by_blocks,
    chosen,
    equal,
    kept,
    masked,
    over,
    packed,
    same,
    tied,
)
from tests.sampling import dealt

WIDE = {"v4.b32", "v2.b64"}  # 16 bytes


@pytest.mark.parametrize(
    ("dtype", "block"), once(product(("bf16", "fp32", "fp64"), ((16, 16), (128, 128), (48, 96)))), ids=str
)
def test_values_are_read_and_written_16_bytes_at_once(dtype: str, block: tuple[int, int]):
    norms = offline.source_code("norms", "sm_90", dtype, block)
    assert norms.copies
    assert not offline.loads(norms.ptx)
    assert norms.stack <= 8
    assert norms.registers <= 144, "three programs of 128 threads share an SM"
    gather = offline.source_code("gather", "sm_90", dtype, block)
    assert offline.loads(gather.ptx) - WIDE == {"b32"}, "cells"
    assert gather.stores - WIDE == {"b32"}, "indices"
    assert gather.stack == 0
    assert gather.registers <= 64
    for code in (norms, gather):
        assert "atom" not in code.ptx


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_the_widest_blocks_fit_into_shared_memory(dtype: str):
    code = offline.source_code("norms", "sm_80", dtype, (16, 512))
    assert code.copies
    assert code.shared <= 99 * 1024, "cards with the least of it, from sm_80 on"


@pytest.mark.parametrize("kernel", ["norms", "gather"])
def test_ragged_sides_and_other_cards_read_16_bytes_at_once_too(kernel: str):
    for card, ragged in (("sm_90", True), ("sm_80", False)):
        code = offline.source_code(kernel, card, "fp16", (64, 64), ragged)
        assert offline.loads(code.ptx) == (set() if kernel == "norms" else {"v4.b32", "b32"})
        assert code.copies == (kernel == "norms")
        assert code.stack == 0
    assert offline.source_code("norms", "sm_90", "bf16", (64, 64), squares=False).copies


@pytest.mark.parametrize("wide", [False, True], ids=["fp32", "fp64"])
def test_the_choice_keeps_all_of_it_in_registers(wide: bool):
    for ranked in (True, False):
        code = offline.choice_code("sm_90", portable.MAX_CHUNK, ranked, wide)
        assert code.stack == 0
        assert "atom" not in code.ptx


def test_the_newest_triton_reads_and_writes_16_bytes_at_once_too():
    found = newest.call(offline.facts)
    for name, (loads, stores, stack) in found.items():
        assert stack <= (8 if name == "norms fp64" else 0), name
        if "norms" in name:
            assert not loads, "by asynchronous copies"
        if "gather" in name:
            assert WIDE & set(loads), name
            assert WIDE & set(stores), name
            assert set(loads + stores) <= WIDE | {"b32"}, name


def test_matrices_on_the_cpu_are_left_to_torch():
    assert portable.pack_bsr(torch.randn(32, 32), (16, 16), kept(0.5)) is None


SIZES = (
    ((1, 1), (16, 16)),
    ((300, 520), (32, 64)),
    ((515, 1000), (48, 80)),
    ((1024, 4096), (64, 64)),
    ((777, 1111), (16, 16)),
    ((2048, 1024), (256, 128)),
    ((1025, 1536), (512, 512)),
    ((640, 40), (32, 16)),
)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", offline.DTYPES.values(), ids=str)
def test_a_gpu_stores_the_blocks_of_torch(dtype: torch.dtype, layout: Callable[[Tensor], Tensor]):
    """Each dtype meets every size, each in one of the layouts: a size takes seconds to compile."""
    for shape, block in dealt(SIZES, len(LAYOUTS), LAYOUTS.index(layout), of=dtype):
        w = layout(torch.randn(shape, device="cuda").to(dtype))
        grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
        flags = torch.rand(shape, device="cuda") < 2 / (block[0] * block[1])
        some = torch.rand(grid, device="cuda") < 0.5
        for rule in (
            kept(float(torch.rand(()))),
            kept(float(torch.rand(())), "row"),
            kept(1.0),
            kept(0.0),
            over((block[0] * block[1]) ** 0.5),
            masked(some),
            masked(some.T.contiguous().T),
            masked(layout(flags.view(torch.int8)).view(torch.bool)),
        ):
            same(w, block, rule)
        same(layout(w * by_blocks(some, shape, block)), block, NOTHING)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", offline.DTYPES.values(), ids=str)
def test_a_gpu_stores_the_first_of_equal_norms(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    for grid, block in (((40, 70), (16, 32)), ((16, 16), (128, 128)), ((128, 250), (16, 16))):
        w = tied(grid, block, dtype).cuda()
        for rule in (kept(0.125), kept(0.95), kept(0.5, "row"), kept(1.0, "row"), over(0.0), NOTHING):
            made = portable.pack_bsr(w, block, rule)
            assert made is not None
            equal(made, packed(w, block, rule))
    zeros = torch.zeros(96, 96, dtype=dtype, device="cuda")
    assert BSR.from_dense(zeros, 16, keep=0.25, scope="global").pattern.indices.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        0,
        1,
        2,
    ]
    assert BSR.from_dense(zeros, 16, threshold=0).nnzb == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1000, 4096, 65536, 100_000, 262_143, 262_144])
def test_a_gpu_finds_the_largest_keys_of_any(count: int):
    infinity, cells = 0x7F80_0000, 262_144
    for keys in (
        torch.randint(0x2A80_0000, infinity, (1, cells)),
        0x4300_0000 + torch.randint(60_000, (1, cells)),
        torch.randint(3, (1, cells)) * 0x3F80_0000 // 2 + 0x3F80_0000,
    ):
        keys = keys.to(torch.int32).cuda()
        rule = kept(count / cells)
        indptr, where, unsure = chosen(keys, rule.count(cells))
        stored = convert.picked(keys.view(torch.float32), rule).view(-1).nonzero().view(-1)
        assert torch.equal(where, stored.to(torch.int32))
        assert indptr.tolist() == [0, count]
        assert not unsure


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", offline.DTYPES.values(), ids=str)
@pytest.mark.parametrize("scope", convert.SCOPES)
def test_a_gpu_refuses_nan_and_inf_and_ranks_what_is_tiny_and_huge(dtype: torch.dtype, scope: Scope):
    limits = torch.finfo(dtype)
    w = torch.randn(160, 330, device="cuda").to(dtype)
    for bad in (torch.nan, torch.inf, -torch.inf):
        other = w.clone()
        other[100, 200] = other[159, 329] = bad
        for share in (0.0, 0.3, 1.0):
            with pytest.raises(InvalidInput, match="2 elements that are NaN or Inf"):
                BSR.from_dense(other, (32, 48), keep=share, scope=scope)
        with pytest.raises(InvalidInput, match="2 elements that are NaN or Inf"):
            BSR.from_dense(other, (32, 48), threshold=3.0)
    tiny, huge = w.clone(), w.clone()
    tiny[32:64, 48:96] = limits.tiny
    tiny[64:96] = 0
    huge[32:64, 48:96] = limits.max
    for other in (tiny, huge):
        for share in (0.1, 0.5, 0.8, 0.9, 1.0):
            a, right = (BSR.from_dense(x, (32, 48), keep=share, scope=scope) for x in (other, other.cpu()))
            assert a.nnzb == right.nnzb
            stored = torch.zeros(a.grid, dtype=torch.bool)
            stored[a.pattern.block_rows.cpu(), a.pattern.indices.cpu()] = True
            # Which of two nearly equal norms is larger a GPU and a CPU may see differently.
            norms = torch.linalg.vector_norm(convert.tiles_of(other.cpu(), (32, 48)).double(), dim=(1, 3))
            for of_row, kept_of_row in (
                zip(norms, stored, strict=True) if scope == "row" else [(norms, stored)]
            ):
                if kept_of_row.any() and not kept_of_row.all():
                    assert of_row[kept_of_row].min() * (1 + 1e-5) >= of_row[~kept_of_row].max()
            elements = by_blocks(stored, (160, 330), (32, 48))
            assert torch.equal(a.to_dense().cpu(), other.cpu().masked_fill(~elements, 0))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
def test_a_repeated_call_stores_what_the_first_does(monkeypatch: pytest.MonkeyPatch):
    """On two streams, of other matrices each time, also where norms do not decide."""
    shape, block = (160, 330), (32, 48)
    rule: Any = {"keep": 0.3, "scope": "row"}
    ws = [torch.randn(shape, device="cuda") for _ in range(3)]
    right = [BSR.from_dense(w.cpu(), block, **rule) for w in ws]
    bad, tiny = ws[0].clone(), ws[1].clone()
    bad[159, 329] = torch.nan
    tiny[:32, :48] = torch.finfo(torch.float32).tiny
    of_tiny = BSR.from_dense(tiny.cpu(), block, **rule)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(3):
                BSR.from_dense(ws[0], block, **rule)
            with monkeypatch.context() as patch:
                patch.setattr(convert, "matrix_sides", lambda *given: pytest.fail("checked again"))
                for w, of_w in zip(ws * 2, right * 2, strict=True):
                    made = BSR.from_dense(w, block, **rule)
                    assert torch.equal(made.to_dense().cpu(), of_w.to_dense())
                    assert made.pattern.same_as(of_w.pattern)
            with pytest.raises(InvalidInput, match="1 elements that are NaN or Inf"):
                BSR.from_dense(bad, block, **rule)
            assert torch.equal(BSR.from_dense(tiny, block, **rule).to_dense().cpu(), of_tiny.to_dense())
    refusals: Any = ({"keep": True}, {"keep": 0.3, "scope": "column"}, {"keep": 0.3, "threshold": 1.0})
    for refused in refusals:
        with pytest.raises(InvalidInput):
            BSR.from_dense(ws[0], block, **refused)


@pytest.mark.gpu
def test_threads_repeat_calls_of_their_own():
    ws = [torch.randn(512, 512, device="cuda").half() for _ in range(4)]
    right = [BSR.from_dense(w, 64, keep=0.25).to_dense() for w in ws]

    def packed_often(at: int) -> bool:
        return all(
            torch.equal(BSR.from_dense(ws[at], 64, keep=0.25).to_dense(), right[at]) for _ in range(50)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(packed_often, range(4)))


@pytest.mark.gpu
def test_a_gpu_packs_what_lies_past_2_to_the_31():
    w = torch.zeros(65552, 32776, dtype=torch.bfloat16, device="cuda")
    w[-16:, -8:] = torch.randn(16, 8, device="cuda")
    w[:16, :16] = 1
    for threshold in (0, 1e-9):
        a = BSR.from_dense(w, 16, threshold=threshold)
        assert a.pattern.block_rows.tolist() == [0, 4096]
        assert a.pattern.indices.tolist() == [0, 2048]
        assert torch.equal(a.values[1, :, :8], w[-16:, -8:])
        assert not a.values[1, :, 8:].any()


@pytest.mark.gpu
def test_memory_is_that_of_the_result_and_one_number_for_every_block(monkeypatch: pytest.MonkeyPatch):
    w = torch.randn(4090, 4090, device="cuda").bfloat16()
    BSR.from_dense(w, 64, keep=0.125)
    monkeypatch.setattr(convert, "tiles_of", lambda *given: pytest.fail("torch packed"))

    def asked(when: str) -> int:
        """Bytes as they were asked for: what torch holds for them may be a part of its cache 1 MB too large."""
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])

    for rule in ({"keep": 0.125}, {"keep": 0.125, "scope": "global"}, {"threshold": 65.0}):
        torch.cuda.reset_peak_memory_stats()
        before = asked("current")
        a = BSR.from_dense(w, 64, **rule)  # type: ignore[arg-type]
        held = a.values.nbytes + a.pattern.indices.nbytes + a.pattern.indptr.nbytes
        assert asked("peak") - before <= held + 8 * 4096 + 5 * 512
        assert asked("current") - before <= held + 3 * 512
        del a


@pytest.mark.gpu
def test_new_thresholds_shares_and_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch):
    w = torch.randn(1000, 1200, device="cuda").bfloat16()
    kernels: tuple[Any, ...] = portable._norms, portable._choose, portable._gather

    def compiled() -> list[int]:
        return [sum(len(each[0]) for each in kernel.device_caches.values()) for kernel in kernels]

    for rule in ({"keep": 0.5, "scope": "global"}, {"threshold": 1.0}):
        BSR.from_dense(w, 32, **rule)  # type: ignore[arg-type]
    before = compiled()
    for share in (1 / 1024, 0.3, 1.0):
        BSR.from_dense(w, 32, keep=share, scope="global")
        BSR.from_dense(w[:, 8:], 32, keep=share, scope="global")
        BSR.from_dense(w, 32, threshold=40 * share)
    assert compiled() == before
