"""products/kernels/spgemm/match.py and spgemm_tiles.py without a GPU: their lists in Triton's interpreter, their code
by compiling for real cards, how they are launched, and when torch matches instead.
"""

import re
from itertools import product

import pytest
import torch
from triton import knobs

from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan import matches, spgemm_schedule

pytest.importorskip("triton")

from sparsek.engine.launch import driver, launch
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.kernels.spgemm import match as portable
from sparsek.products.kernels.spgemm import tiles
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import compiled
from tests.problems import CARDS
from tests.products.kernels.spgemm.matched import assert_same, drawn, full

TYPES = dict.fromkeys((*portable._LISTS, *portable._RESULTS), "*i32") | {"sums": "*i64"}


@pytest.mark.parametrize(
    ("card", "walk", "wanted"),
    once(product(("sm_90", "sm_80"), ("_count", "_fill"), (False, True)), lambda case: (case[:2], case[2])),
)
def test_walks_fit_nine_programs_on_an_sm_with_threads_along_the_columns(card, walk, wanted):
    constants = {"WIDTH": portable.WIDTH, "DEEP": portable.DEEP}
    constants |= {} if wanted else {"c_indptr": None, "c_indices": None}
    code = compiled(getattr(portable, walk), TYPES, constants, CARDS[card], portable.WARPS, 1)
    assert code.stack == 0
    assert code.registers <= 56
    assert code.shared <= 64, "only sums and scans of columns go from thread to thread"
    assert "atom" not in code.ptx
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?)\}>", code.ttgir))
    tile = f"{portable.WIDTH * portable.DEEP}x!tt.ptr<i32>"
    tiles = re.findall(rf"tt\.(?:load|store) .*tensor<{tile}, (#\w+)>", code.ttgir)
    assert len(tiles) == (4 if walk == "_count" else 6)
    for name in tiles:
        assert layouts[name].startswith("sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4]")


@pytest.mark.parametrize("card", ["sm_90", "sm_80"])
def test_the_sum_of_the_chunks_compiles_without_spills(card):
    constants = {"STEP": portable.SUM_STEP}
    code = compiled(portable._sum, TYPES, constants, CARDS[card], portable.SUM_WARPS, 1)
    assert code.stack == 0
    assert "atom" not in code.ptx


@pytest.mark.parametrize(
    ("card", "kind", "lanes"),
    once(
        product(("sm_90", "sm_80"), ("bsr", "swept", "dense"), (256, 512)), lambda case: (case[:2], case[2])
    ),
)
def test_tiles_are_dealt_in_registers_and_stored_16_bytes_at_once(card, kind, lanes):
    constants = {"LANES": lanes, "STEP": tiles.STEP}
    constants |= {} if kind == "dense" else {"c_indptr": None, "c_indices": None}
    constants |= {} if kind == "swept" else {"order": None}
    names = *tiles._LISTS, "tiles", "starts"
    types: dict[str, str] = dict.fromkeys(names, "*i32")
    code = compiled(tiles._deal, types, constants, CARDS[card], tiles.WARPS, 1)
    assert code.stack <= (16 if kind == "swept" else 0)
    assert code.registers <= 64 * lanes // 256 + 16, "32 warps on an SM for one CTA an SM, 20 for two"
    assert "v4.b32" in code.stores
    assert "atom" not in code.ptx


@pytest.mark.parametrize("card", ["sm_90", "sm_80"])
def test_runs_are_counted_and_listed_in_registers(card):
    lists = "c_indptr", "c_indices", "begins", "order"
    for kernel, constants, warps in (
        (tiles._count_runs, {"RUNS": tiles.RUNS}, tiles.WARPS),
        (tiles._list_runs, {"LISTED": tiles.LISTED}, 1),
    ):
        code = compiled(kernel, dict.fromkeys(lists, "*i32"), constants, CARDS[card], warps, 1)
        assert code.stack == 0
        assert code.registers <= 64
        assert "atom" not in code.ptx


class Launches:
    """Stands for a kernel, compiled or not: which programs and arguments it was launched with."""

    def __init__(self, becomes: "Compiled | Launches | None") -> None:
        self.fn, self.becomes = object(), becomes
        self.made: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*args: object, **options: int) -> "Compiled | Launches | None":
            self.made.append((grid, args, options))
            return self.becomes

        return run


class Compiled:
    """As Triton 3.6 has a compiled kernel: `run` is what its launcher calls in C."""

    function, packed_metadata = 11, (4, 1)

    def __init__(self) -> None:
        self.ran: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.ran.append(args)


@pytest.mark.parametrize("direct", [True, False])
def test_a_kernel_that_ran_before_is_launched_directly_under_triton_3_6(monkeypatch, direct):
    monkeypatch.setattr(driver, "is_tested", lambda: direct)
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 22, raising=False)
    ready = Compiled()
    kernel, cpu, some = Launches(ready), torch.device("cpu"), torch.zeros(1)
    options = {"num_warps": 4, "num_stages": 1}
    launch_unspecialized(kernel, cpu, 7, (some, 5), (16,), 4)
    assert kernel.made == [((7,), (some, 5, 16), options)]
    assert ready.ran == []
    launch_unspecialized(kernel, cpu, 8, (some, 6), (16,), 4)
    assert ready.ran == ([(8, 1, 1, 22, 11, (4, 1), None, None, None, some, 6, 16)] if direct else [])
    for args, constants in (((some, None), (16,)), ((some, 5), (32,)), ((some.half(), 5), (16,))):
        before = len(kernel.made)
        launch_unspecialized(kernel, cpu, 7, args, constants, 4)
        assert len(kernel.made) == before + 1, (
            "other constants are another kernel, and so are an argument not given and another dtype"
        )


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_where_a_profiler_listens_triton_launches_and_tells_it(monkeypatch, name):
    monkeypatch.setattr(driver, "is_tested", lambda: True)
    monkeypatch.setattr(launch, "_COMPILED", {})
    ready, hooks = Launches(None), getattr(knobs.runtime, name)
    kernel, cpu, some = Launches(ready), torch.device("cpu"), torch.zeros(1)
    launch_unspecialized(kernel, cpu, 7, (some, 5), (16,), 4)
    hooks.add(print)
    try:
        launch_unspecialized(kernel, cpu, 8, (some, 6), (16,), 4)
    finally:
        hooks.remove(print)
    assert ready.made == [((8, 1, 1), (some, 6, 16), {})]


def test_what_the_interpreter_ran_is_not_kept(monkeypatch):
    monkeypatch.setattr(driver, "is_tested", lambda: True)
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel = Launches(None)
    for _ in range(2):
        launch_unspecialized(kernel, torch.device("cpu"), 1, (), (), 4)
    assert len(kernel.made) == 2


def test_tiles_of_patterns_on_the_cpu_are_made_by_torch():
    found = matches.match(drawn((100, 100), 16, 0.4, 0), drawn((100, 100), 16, 0.4, 1))
    for dense in (True, False):
        for ours, theirs in zip(
            tiles.spgemm_tiles(found, dense, 64, 16, 5),
            spgemm_schedule.spgemm_tiles(found, dense, 64, 16, 5),
            strict=True,
        ):
            assert torch.equal(ours, theirs)


def test_patterns_on_the_cpu_are_matched_by_torch():
    a, b, c = (drawn((100, 100), 16, 0.4, seed) for seed in range(3))
    assert portable.why_not(a, b) == ["the patterns are on the CPU"]
    for wanted in (None, c):
        assert_same(portable.match(a, b, wanted), matches.match(a, b, wanted))


def test_grids_too_large_for_counts_are_named():
    def empty(rows: int, columns: int) -> BlockPattern:
        nothing = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        return BlockPattern.unchecked((16 * rows, 16 * columns), (16, 16), *nothing)

    assert portable.why_not(empty(8192, 4), empty(4, 8192)) == ["the patterns are on the CPU"]
    (_, why) = portable.why_not(empty(8192, 4), empty(4, 8193))
    assert why == "C has 8192 x 8193 blocks: counts of 68157440 cells are over 256 MB"
    # A chunk costs a program however few of its columns there are.
    (_, why) = portable.why_not(empty(2**19 + 1, 4), empty(4, 1))
    assert why == "C has 524289 x 1 blocks: counts of 67108992 cells are over 256 MB"
    (_, why) = portable.why_not(empty(0, 4), empty(4, 3))
    assert why == "C has 0 x 3 blocks: there is no cell to count"


def test_many_look_ups_that_find_little_are_named():
    a = full((9 * 16, 4096 * 16), 16)
    sparse, dense = (drawn((4096 * 16, 8192 * 16), 16, density, 0) for density in (1 / 128, 1 / 32))
    assert a.nnzb * 8192 > portable.LOOK_UPS
    assert portable.why_not(a, dense) == ["the patterns are on the CPU"]
    (_, why) = portable.why_not(a, sparse)
    assert why == "301989888 look-ups are over 268435456, and fewer than one in 64 finds a block of B"
    assert len(portable.why_not(full((8 * 16, 4096 * 16), 16), sparse)) == 1
