"""Peers: their arithmetic, their limits, and the tuning of torch.sparse."""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsek.core.clock import Times
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine.peer import UnavailableError, peers_named, rotating
from sparsek_bench.peers import cusparse, torch_sparse
from sparsek_bench.peers.torch_sparse import addmm_space, stage_space
from sparsek_bench.suites.product import ProductOperands
from sparsek_bench.suites.spmm import PEERS, SpmmCase

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SMALL = SpmmCase(64, 96, 32, (32, 32), 0.5, dtype="fp32")
BY_NAME = {peer.name: peer for peer in PEERS}


def operands(case: SpmmCase, count: int = 2) -> list[ProductOperands]:
    """Operand sets whose outputs hold NaN."""
    sets = []
    for seed in range(count):
        a, b = case.make(CPU, seed)
        sets.append(ProductOperands(a, b, torch.full((case.m, case.n), float("nan"), dtype=b.dtype)))
    return sets


def ignore(text: str) -> None:
    """Hears progress and says nothing."""


def test_torch_sparse_multiplies_every_set_and_counts_useful_flops() -> None:
    sets = operands(SMALL)
    ready = BY_NAME["torch_sparse"].ready(SMALL, sets, ignore)
    for call, one in zip(ready.calls, sets, strict=True):
        torch.testing.assert_close(call(), one.a.to_dense() @ one.b)
    assert ready.flops is None


def test_the_dense_peer_multiplies_other_full_data_and_counts_all_flops() -> None:
    sets = operands(SMALL)
    ready = BY_NAME["torch_dense"].ready(SMALL, sets, ignore)
    assert len(ready.calls) == len(sets)
    assert ready.flops == SMALL.dense_flops
    for call, one in zip(ready.calls, sets, strict=True):
        call()
        assert torch.isfinite(one.out).all()
        assert 0.5 < float(one.out.std()) < 2
        assert not torch.allclose(one.out, one.a.to_dense() @ one.b)


@pytest.mark.parametrize(
    ("name", "case", "device", "said"),
    [
        ("cublas", SMALL, CPU, "runs on cuda"),
        ("torch_dense", SMALL, CUDA, "runs on cpu"),
        ("torch_sparse", SpmmCase(65, 96, 32, (32, 32), 0.5), CPU, "multiples of the block 32"),
        ("torch_sparse", SpmmCase(96, 96, 32, (48, 96), 0.5), CUDA, "powers of 2, not 48x96"),
        ("torch_sparse", SpmmCase(64, 64, 24, (32, 32), 0.5), CUDA, "multiple of 16, not 24"),
        ("torch_sparse", replace(SMALL, form="B@A"), CPU, "multiplies A @ B, not B @ A"),
        ("cusparse", SMALL, CPU, "runs on cuda"),
        ("cusparse", replace(SMALL, form="A.T@B"), CPU, "multiplies A @ B, not A.T @ B"),
        ("cusparse", SpmmCase(64, 64, 32, (32, 64), 0.5), CUDA, "square, not 32x64"),
        ("cusparse", SpmmCase(64, 64, 32, (32, 32), 0.5, dtype="fp64"), CUDA, "not set up here for fp64"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name: str, case: SpmmCase, device: torch.device, said: str) -> None:
    assert said in "; ".join(BY_NAME[name].why_not(case, device))


def test_every_peer_but_the_dense_of_the_cpu_takes_the_main_case() -> None:
    main = SpmmCase(8192, 8192, 8192, (128, 128), 0.125)
    able = [peer.name for peer in peers_named(PEERS, None, CUDA) if not peer.why_not(main, CUDA)]
    assert able == ["cublas", "torch_sparse", "cusparse"]
    for form in ("A.T@B", "B@A", "B@A.T"):
        other = replace(main, form=form)
        able = [peer.name for peer in peers_named(PEERS, None, CUDA) if not peer.why_not(other, CUDA)]
        assert able == ["cublas"]
    assert [peer.name for peer in peers_named(PEERS, None, CPU)] == ["torch_sparse", "torch_dense"]


def test_the_stages_only_search_varies_num_stages_alone() -> None:
    space = stage_space(SpmmCase(8192, 8192, 8192, (128, 128), 0.125))
    assert space["SPLIT_N"] == (64,)
    assert [name for name, values in space.items() if len(values) > 1] == ["num_stages"]


def test_an_unknown_peer_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="'mkl'; known: cublas"):
        peers_named(PEERS, ["mkl"], CPU)


@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_blocked_ell_holds_the_same_matrix(layout: str) -> None:
    a, _ = SpmmCase(96, 160, 8, (32, 32), 0.4, "powerlaw", "fp32").make(CPU, seed=1)
    columns, values = cusparse.blocked_ell(a.pattern.indptr, a.pattern.indices, a.values, layout)
    width = columns.shape[1]
    assert width == int(a.pattern.row_lengths.max())
    if layout == "rows":
        values = values.view(3, 32, width, 32).transpose(1, 2)
    dense = torch.zeros(3, 5, 32, 32)
    for row in range(3):
        for slot in range(width):
            column = int(columns[row, slot])
            if column >= 0:
                dense[row, column] = values[row, slot]
            else:
                assert not values[row, slot].any()
    assert torch.equal(dense.transpose(1, 2).reshape(96, 160), a.to_dense())


@pytest.mark.parametrize("n", [16, 48, 8192, 8208])
def test_tuned_column_tiles_divide_n_and_are_powers_of_two(n: int) -> None:
    for split in addmm_space(SpmmCase(64, 64, n, (64, 64), 1.0))["SPLIT_N"]:
        assert n % split == 0
        assert n // split in (16, 32, 64, 128, 256)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, int]]:
    """Tunes with made-up times: `cost(meta)` in ms, `right(meta)` whether the product is."""

    def tune(
        cost: Callable[[dict[str, int]], float], right: Callable[[dict[str, int]], bool]
    ) -> dict[str, int]:
        chosen: list[dict[str, int]] = []

        def prepare(one: ProductOperands) -> Any:
            def call(meta: dict[str, int]) -> None:
                chosen.append(meta)
                one.out.copy_(one.a.to_dense() @ one.b if right(meta) else torch.zeros_like(one.out))

            return one.out, call

        def time_rounds(calls: Any, **options: Any) -> dict[str, Times]:
            calls["one"]()
            return {"one": Times(cost(chosen[-1]), 1.0, 1.0, 1)}

        monkeypatch.setattr(torch_sparse, "time_rounds", time_rounds)
        spaces = [stage_space(SMALL), addmm_space(SMALL)]
        peer = torch_sparse.Tuned("", "", spaces=lambda case: spaces, unless=lambda case: [], prepare=prepare)
        note = peer.ready(SMALL, operands(SMALL), ignore).note
        return {name: int(value) for name, value in (part.split("=") for part in note.split(", "))}

    return tune


def _cost(meta: dict[str, int]) -> float:
    """Best at 5 stages, 8 warps, group 8."""
    return 1 + abs(meta["num_stages"] - 5) + abs(meta["num_warps"] - 8) + abs(meta["GROUP_SIZE_ROW"] - 8)


def test_tuning_finds_the_fastest_parameters(pretend: Callable[..., dict[str, int]]) -> None:
    best = pretend(_cost, lambda meta: True)
    assert (best["num_stages"], best["num_warps"], best["GROUP_SIZE_ROW"]) == (5, 8, 8)


def test_tuning_passes_over_a_faster_but_wrong_choice(pretend: Callable[..., dict[str, int]]) -> None:
    best = pretend(_cost, lambda meta: meta["num_stages"] < 5)
    assert best["num_stages"] in (4, 3)


def test_tuning_passes_over_what_does_not_compile(pretend: Callable[..., dict[str, int]]) -> None:
    def cost(meta: dict[str, int]) -> float:
        if meta["num_stages"] > 2:
            raise RuntimeError("out of resource: shared memory")
        return _cost(meta)

    assert pretend(cost, lambda meta: True)["num_stages"] == 2


def test_tuning_that_finds_nothing_right_gives_no_time(pretend: Callable[..., dict[str, int]]) -> None:
    with pytest.raises(UnavailableError, match=r"none of .* ran and was right"):
        pretend(_cost, lambda meta: False)


def test_rotation_runs_each_call_in_turn() -> None:
    seen: list[int] = []
    call = rotating([lambda i=i: seen.append(i) for i in range(3)])
    for _ in range(6):
        call()
    assert sorted(seen[:3]) == sorted(seen[3:]) == [0, 1, 2]


class PretendCuSparse:
    """Counts what is made and destroyed; the call named `broken` fails."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.alive: dict[int, str] = {}
        self.made = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(first: Any, *others: Any) -> int:
            if name == self.broken:
                return 1
            if name.startswith("cusparseCreate"):
                self.made += 1
                first._obj.value = self.made
                self.alive[self.made] = name.removeprefix("cusparseCreate").replace("BlockedEll", "SpMat")
            elif name.startswith("cusparseDestroy"):
                assert self.alive.pop(first.value) == name.removeprefix("cusparseDestroy")
            return 0

        return call


def test_a_product_of_cusparse_destroys_what_it_made() -> None:
    library: Any = PretendCuSparse()
    call = cusparse.prepare(library, operands(SMALL)[0], "rows", "fp32")
    assert list(library.alive.values()) == ["", "SpMat", "DnMat", "DnMat"]
    assert isinstance(call.handle, ctypes.c_void_p)
    del call
    gc.collect()
    assert library.alive == {}


@pytest.mark.parametrize(
    "broken", ["cusparseCreateBlockedEll", "cusparseCreateDnMat", "cusparseSpMM_bufferSize"]
)
def test_a_product_of_cusparse_that_cannot_be_set_up_leaves_nothing_behind(broken: str) -> None:
    library: Any = PretendCuSparse(broken)
    with pytest.raises(UnavailableError, match=broken):
        cusparse.prepare(library, operands(SMALL)[0], "rows", "fp32")
    assert library.made
    assert library.alive == {}
