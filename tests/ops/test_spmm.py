"""spmm: what it multiplies, eagerly and compiled, and what it refuses in which words."""

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.formats import BSR, BlockPattern, random_bsr
from sparsek.ops import spmm as ops
from sparsek.plan.cache import LIMIT, PlanCache
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned

BF16 = torch.bfloat16


def pair(
    m: int = 128, k: int = 96, n: int = 40, block: Any = 32, dtype: torch.dtype = BF16, device: str = "cpu"
) -> tuple[BSR, Tensor]:
    """A with block rows of uneven lengths, and an N(0, 1) matrix B [k, n]."""
    a = random_bsr(m, k, block, 0.5, pattern="powerlaw", dtype=dtype, device=device, seed=0)
    draw = torch.Generator(device).manual_seed(1)
    return a, torch.randn(k, n, generator=draw, dtype=dtype, device=device)


def check(a: BSR, b: Tensor, out: Tensor) -> None:
    assert out.shape == (*b.shape[:-2], a.shape[0], b.shape[-1])
    assert out.dtype == b.dtype
    gate = check_spmm(a, b, out)
    assert gate.passed, f"{a} times {tuple(b.shape)}, strides {b.stride()}: {gate}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_operator_multiplies(dtype: torch.dtype, device: str):
    a, b = pair(dtype=dtype, device=device)
    check(a, b, a @ b)
    assert torch.equal(sk.spmm(a, b), a @ b)
    assert torch.equal(torch.matmul(a, b), a @ b)  # pyright: ignore[reportArgumentType]


def test_a_transposed_view_multiplies(device: str):
    a, _ = pair(device=device)
    b = torch.randn(128, 40, device=device).to(BF16)
    check(a.T, b, a.T @ b)


@pytest.mark.parametrize(
    "shape", [(1, 96, 40), (3, 96, 40), (2, 3, 96, 8), (2, 0, 96, 8), (2, 1, 3, 96, 1)], ids=str
)
def test_batch_dims_of_b_come_back_in_c(shape: tuple[int, ...], device: str):
    a, _ = pair(device=device)
    b = torch.randn(shape, device=device).to(BF16)
    check(a, b, a @ b)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda b: b,
    "col": lambda b: b.T.contiguous().T,
    "slice of rows": lambda b: torch.cat((b, b, b), 1)[:, 40:80],
    "slice of a col": lambda b: torch.cat((b, b), 0).T.contiguous().T[: b.shape[0]],
    "every second column": lambda b: b.repeat_interleave(2, 1)[:, ::2],
    "every fourth row": lambda b: b.repeat_interleave(4, 0)[::4],
    "one column for all": lambda b: b[:, :1].expand(-1, 40),
    "one row for all": lambda b: b[:1].expand(96, -1),
    "one matrix for all": lambda b: b.expand(3, -1, -1),
    "swapped batches": lambda b: torch.stack((b, -b, b + 1, b * 2, b, b)).view(2, 3, 96, 40).transpose(0, 1),
    "batches of cols": lambda b: torch.stack((b.T, -b.T)).mT,
    "batch innermost": lambda b: torch.stack((b, -b), 2).permute(2, 0, 1),
    "one column": lambda b: b[:, 7:8],
    "seven columns": lambda b: b[:, :7],
    "odd start": lambda b: torch.cat((b.flatten()[:1], b.flatten()))[1:].view(96, 40),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_b_may_lie_in_memory_as_it_likes(name: str, device: str):
    a, whole = pair(device=device)
    b = LAYOUTS[name](whole)
    out = a @ b
    check(a, b, out)
    assert out.is_contiguous()


@pytest.mark.parametrize(("m", "k", "n"), [(0, 96, 40), (128, 0, 40), (128, 96, 0), (0, 0, 0)])
def test_zero_sized_sides_give_empty_or_zero_products(m: int, k: int, n: int, device: str):
    a = BSR.from_dense(torch.ones(m, k, dtype=BF16, device=device), 32)
    c = a @ torch.ones(k, n, dtype=BF16, device=device)
    assert c.shape == (m, n)
    assert not c.any()
    out = poisoned((m, n), BF16, device)
    assert sk.spmm(a, torch.ones(k, n, dtype=BF16, device=device), out=out) is out
    assert not out.any()


def test_nan_in_rows_of_b_that_no_block_touches_never_reaches_c(device: str):
    a, b = pair(k=160, device=device)
    a = BSR.from_dense(a.to_dense().index_fill(1, torch.arange(32, 64, device=device), 0), 32)
    assert 1 not in a.pattern.host.indices
    clean = a @ b
    b[32:64] = float("nan")
    assert torch.equal(a @ b, clean)


@pytest.mark.parametrize(
    "room",
    [
        lambda shape, device: poisoned(shape, BF16, device),
        lambda shape, device: poisoned((*shape[:-1], 64), BF16, device)[..., 8 : 8 + shape[-1]],
        lambda shape, device: poisoned((*shape[:-1], 43), BF16, device)[..., 3:],
        lambda shape, device: poisoned((shape[-2], 2, shape[-1]), BF16, device).transpose(0, 1),
    ],
    ids=["contiguous", "wider rows", "odd rows", "interleaved batch"],
)
def test_out_is_overwritten_and_returned(room: Any, device: str):
    a, b = pair(device=device)
    b = torch.stack((b, -b))
    out = room((2, 128, 40), device)
    assert sk.spmm(a, b, out=out) is out
    check(a, b, out)
    assert torch.equal(out, sk.spmm(a, b))


def test_out_writes_nothing_beside_itself(device: str):
    a, b = pair(m=120, k=90, n=33, device=device)
    room = torch.full((124, 48), 7.0, dtype=BF16, device=device)
    sk.spmm(a, b, out=room[2:122, 8:41])
    room[2:122, 8:41] = 7
    assert (room == 7).all()


def test_out_of_one_column_may_have_any_strides(device: str):
    a, b = pair(n=1, device=device)
    out = poisoned((1, 128), BF16, device).T
    check(a, b, sk.spmm(a, b, out=out))


def test_a_plan_gives_what_spmm_gives(device: str):
    a, b = pair(device=device)
    plan = sk.plan_spmm(a, b)
    out = poisoned((128, 40), BF16, device)
    expected = a @ b
    assert torch.equal(plan(a, b), expected)
    assert torch.equal(sk.spmm(a, b, plan=plan), expected)
    assert sk.spmm(a, b, plan=plan, kernel=plan.kernel, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", ["cpu.spmm", "reference.spmm", "vendor.dense"])
def test_a_named_kernel_runs(kernel: str):
    a, b = pair(k=64, dtype=torch.float32)
    assert sk.plan_spmm(a, b, kernel=kernel).kernel == kernel
    check(a, b, sk.spmm(a, b, kernel=kernel))


def test_a_named_kernel_that_cannot_run_says_why_and_which_can():
    a, b = pair()
    with pytest.raises(
        Unsupported, match=r"hopper.spmm cannot run this; .*cpu.spmm, reference.spmm can"
    ) as caught:
        sk.spmm(a, b, kernel="hopper.spmm")
    assert "needs a Hopper card" in caught.value.reasons["hopper.spmm"][0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["odd start", "seven columns", "every second column"])
def test_what_tma_cannot_read_goes_through_another_kernel(name: str):
    a, whole = pair(device="cuda")
    b = LAYOUTS[name](whole)
    with pytest.raises(Unsupported, match="TMA"):
        sk.spmm(a, b, kernel="hopper.spmm")
    plan = sk.plan_spmm(a, b)
    assert plan.kernel != "hopper.spmm"
    check(a, b, plan(a, b))


@pytest.mark.parametrize("name", ["odd start", "seven columns", "every second column"])
def test_misaligned_b_is_planned_for_another_kernel(name: str):
    a, whole = pair(1024, 96, 40, (128, 32))
    assert sk.plan_spmm(a, whole, kernel="hopper.spmm", device="h200").seconds > 0
    plan = sk.plan_spmm(a, LAYOUTS[name](whole), device="h200")
    assert plan.kernel == "portable.spmm"
    assert re.search(r"not +hopper.spmm: .*TMA", plan.explain())


def test_a_plan_for_an_h200_is_made_on_any_machine_and_predicts():
    a, b = pair(4096, 4096, 4096, 128)
    plan = sk.plan_spmm(a, b, device="h200")
    assert plan.problem.card.name == "NVIDIA H200"
    assert plan.bound_seconds < plan.seconds < 1e-2
    assert "on NVIDIA H200" in plan.explain()
    with pytest.raises(InvalidInput, match="prediction for NVIDIA H200"):
        plan(a, b)


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for which spmm has made a plan, one for each plan."""
    made: list[str] = []
    real = ops._make_plan

    def counted(*args: Any, **more: Any) -> Any:
        plan = real(*args, **more)
        made.append(plan.kernel)
        return plan

    monkeypatch.setattr(ops, "_make_plan", counted)
    return made


def test_a_second_call_makes_no_new_plan(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    first = a @ b
    again = BSR(a.pattern, a.values.clone()) @ b.clone()
    assert torch.equal(first, again)
    assert len(plans_made) == 1


def test_another_shape_layout_alignment_out_or_kernel_makes_another_plan(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    calls: list[Callable[[], Tensor]] = [
        lambda: a @ b,
        lambda: a @ b[:, :20],
        lambda: a @ b[None],
        lambda: a @ LAYOUTS["col"](b),
        lambda: a @ LAYOUTS["odd start"](b),
        lambda: sk.spmm(a, b, out=torch.empty(128, 43)[:, :40]),
        lambda: sk.spmm(a, b, kernel="reference.spmm"),
        lambda: a.T @ torch.randn(128, 40),
    ]
    for round_ in range(2):
        for count, call in enumerate(calls, start=1):
            call()
            assert len(plans_made) == (count if round_ == 0 else len(calls))


def test_a_pattern_keeps_no_more_plans_than_the_limit():
    a = pair(64, 64, 8, (32, 32), torch.float32)[0]
    for n in range(1, LIMIT + 20):
        sk.spmm(a, torch.randn(64, n))
    assert len(a.pattern.derived("plans", PlanCache)) == LIMIT


def test_a_plan_in_a_captured_graph_stays_however_many_follow():
    cache: Any = PlanCache()
    kept, made = object(), object()
    assert cache.get("graph", lambda: kept, pin=True) is kept
    for key in range(2 * LIMIT):
        cache.get(key, lambda: made, pin=False)
    assert cache.get("graph", pytest.fail, pin=False) is kept


def test_autocast_does_not_touch_the_operands():
    a, b = pair(128, 96, 40, (32, 32), torch.float32)
    alone = a @ b
    with torch.autocast("cpu", torch.bfloat16):
        for kernel in (None, "cpu.spmm", "reference.spmm", "vendor.dense"):
            check(a, b, sk.spmm(a, b, kernel=kernel))
        assert torch.equal(a @ b, alone)


def test_a_pattern_that_is_let_go_takes_its_plans_along():
    a, b = pair(dtype=torch.float32)
    plan = sk.plan_spmm(a, b)
    sk.spmm(a, b)
    del a
    assert plan.pattern() is None, "a plan keeps no pattern alive, not even in a cycle"


def test_the_newer_precision_settings_of_torch_do_not_break_planning():
    script = (
        "import torch, sparsek as sk; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "a = sk.random_bsr(64, 64, 32, 0.5, seed=0); b = torch.randn(64, 8)\n"
        "assert sk.plan_spmm(a, b).problem.tf32; a @ b\n"
    )
    run_alone(script)


def test_without_triton_the_other_kernels_run_and_say_why_it_does_not():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sparsek as sk\n"
        "a = sk.random_bsr(64, 64, 32, 0.5, seed=0); b = torch.randn(64, 8)\n"
        "torch.testing.assert_close(a @ b, a.to_dense() @ b)\n"
        "assert 'hopper.spmm: does not import here: ' in sk.plan_spmm(a, b).explain()\n"
    )
    run_alone(script)


def run_alone(script: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# torch.compile


@pytest.fixture
def recorder() -> Any:
    """A backend: aot_eager that keeps the graphs it is given."""
    torch._dynamo.reset()
    yield AotEagerAndRecordGraphs()
    torch._dynamo.reset()


def calls(graph: Any) -> list[str]:
    """Names of the operations in a graph."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


COMPILED: dict[str, tuple[Callable[[BSR, Tensor], Tensor], int]] = {
    "A @ B": (lambda a, b: a @ b, 96),
    "spmm(A, B)": (sk.spmm, 96),
    "A.T @ B": (lambda a, b: a.T @ b, 128),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_is_one_node_of_one_graph(name: str, recorder: Any):
    run, k = COMPILED[name]
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(k, 40)
    expected = run(a, b)
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    assert torch.equal(compiled(a, b), expected)
    assert torch.equal(compiled(a, 2 * b), run(a, 2 * b))
    assert [len(calls(graph)) for graph in recorder.fw_graphs] == [1]
    assert "sparsek.spmm" in calls(recorder.fw_graphs[0])[0]


def test_compiled_the_transposed_index_is_made_in_the_first_call_and_found_by_the_later_ones(recorder: Any):
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(128, 40)
    compiled = torch.compile(lambda a, b: a.T @ b, fullgraph=True, backend=recorder)
    for _ in range(4):
        torch.testing.assert_close(compiled(a, b), a.to_dense().T @ b)
    first, later = map(calls, recorder.fw_graphs)
    assert sum("sparsek.spmm" in call for call in first) == 1
    assert any("sort" in call for call in first)
    assert len(later) == 1


@pytest.mark.parametrize("shape", [(96, 40), (2, 96, 40)], ids=str)
def test_compiled_by_aot_eager_it_gives_the_same(shape: tuple[int, ...]):
    torch._dynamo.reset()
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(shape)
    assert torch.equal(torch.compile(lambda b: a @ b, fullgraph=True, backend="aot_eager")(b), a @ b)


def test_compiled_once_for_every_n(recorder: Any):
    a, _ = pair(dtype=torch.float32)
    compiled = torch.compile(lambda b: a @ b, fullgraph=True, backend=recorder)
    for n in (40, 56, 200):
        b = torch.randn(96, n)
        torch._dynamo.mark_dynamic(b, 1)
        torch.testing.assert_close(compiled(b), a @ b)
    assert len(recorder.fw_graphs) == 1


def test_the_op_plans_once_and_forgets_a_pattern_with_its_matrix(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    gc.collect()
    kept = len(ops._PATTERNS)
    args = (a.values, a.pattern.indptr, a.pattern.indices, None, b, list(a.shape), list(a.block), None)
    torch.ops.sparsek.spmm(*args)
    torch.ops.sparsek.spmm(*args)
    assert len(plans_made) == 1
    assert len(ops._PATTERNS) == kept + 1
    del a, args
    gc.collect()
    assert len(ops._PATTERNS) == kept


def test_one_index_list_may_serve_matrices_of_other_blocks():
    a, b = pair(64, 64, 8, 32, torch.float32)
    big = BlockPattern((128, 128), (64, 64), a.pattern.indptr, a.pattern.indices)
    wide = BSR(big, torch.randn(a.nnzb, 64, 64))
    for matrix, dense in ((a, b), (wide, torch.randn(128, 8)), (a, b)):
        p = matrix.pattern
        got = torch.ops.sparsek.spmm(
            matrix.values, p.indptr, p.indices, None, dense, list(matrix.shape), list(matrix.block), None
        )
        torch.testing.assert_close(got, matrix.to_dense() @ dense)


@pytest.mark.parametrize("view", [False, True], ids=["stored", "view"])
@pytest.mark.parametrize("shape", [(96, 40), (2, 96, 7), (96, 0)], ids=str)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], view: bool):
    a, _ = pair(dtype=torch.float32)
    a = pair(96, 128, dtype=torch.float32)[0].T if view else a
    p = a.pattern
    args = (a.values, p.indptr, p.indices, a.order, torch.randn(shape), list(a.shape), list(a.block), None)
    torch.library.opcheck(torch.ops.sparsek.spmm.default, args)


def fails_to_compile(run: Callable[[Tensor], Any], b: Tensor, text: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(run, fullgraph=True, backend="aot_eager")(b)


def test_compiled_a_product_that_could_be_either_side_asks_for_spmm():
    a, _ = pair(dtype=torch.float32)
    both = torch.randn(96, 128)
    fails_to_compile(
        lambda b: a @ b, both, r"does not tell A @ B from B @ A here; write sparsek.spmm\(A, B\)"
    )
    compiled = torch.compile(lambda b: sk.spmm(a, b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(both), a @ both)


def test_compiled_wrong_operands_are_told_as_eagerly():
    a, _ = pair(dtype=torch.float32)
    fails_to_compile(lambda b: a @ b, torch.randn(95, 40), r"B \[95, 40\]: B needs 96 rows")
    fails_to_compile(lambda b: a @ b, torch.randn(96), "for a vector use B.unsqueeze")
    fails_to_compile(lambda b: b @ a, torch.randn(40, 128), r"use \(A.T @ B.T\).T")
    fails_to_compile(
        lambda b: sk.spmm(a, b, out=torch.empty(128, 40)),
        torch.randn(96, 40),
        "do not go through torch.compile",
    )


# What is refused


def test_gradients_are_refused_with_a_hint():
    a, b = pair(dtype=torch.float32)
    hint = r"no gradient yet; call it under torch.no_grad\(\), or use sparsek.reference.spmm.spmm"
    plan = sk.plan_spmm(a, b)
    learning = BSR(a.pattern, a.values.clone().requires_grad_())
    for call in (sk.spmm, plan):
        with pytest.raises(InvalidInput, match=hint):
            call(a, b.clone().requires_grad_())
        with pytest.raises(InvalidInput, match=hint):
            call(learning, b)
    with torch.no_grad():
        assert torch.equal(learning @ b, a @ b)
    assert sk.plan_spmm(learning, b, device="h200").seconds > 0


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackwardFor_sparsek_spmm:UserWarning")
def test_compiled_gradients_are_refused_with_the_same_hint():
    a, b = pair(dtype=torch.float32)
    fails_to_compile(lambda b: a @ b, b.requires_grad_(), "spmm has no gradient yet")


def test_the_other_side_and_other_functions_refuse_a_bsr():
    a, b = pair(dtype=torch.float32)
    with pytest.raises(InvalidInput, match=r"use \(A.T @ B.T\).T"):
        torch.matmul(torch.randn(8, 128), a)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        torch.add(a, b)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        torch.matmul(a, b, out=torch.empty(128, 40))  # pyright: ignore[reportArgumentType]


BAD_OPERANDS: dict[str, tuple[Callable[[BSR, Tensor], Any], str]] = {
    "A dense": (
        lambda a, b: sk.spmm(a.to_dense(), b),  # pyright: ignore[reportArgumentType]
        "A must be a BSR, got Tensor; make one with BSR.from_dense",
    ),
    "B numpy": (lambda a, b: a @ np.zeros((96, 4)), "B must be a dense torch.Tensor, got ndarray"),
    "B a BSR": (lambda a, b: a @ a, "B must be a dense torch.Tensor, got BSR"),
    "B sparse": (lambda a, b: a @ b.to_sparse(), r"got layout torch.sparse_coo; call .to_dense\(\)"),
    "B 1-D": (lambda a, b: a @ b[:, 0], r"must be \[K, N\] or \[..., K, N\], got 1-D; .*B.unsqueeze\(-1\)"),
    "B shape": (lambda a, b: a @ b[:64], r"A is \[128, 96\] and B \[64, 40\]: B needs 96 rows"),
    "B dtype": (lambda a, b: a @ b.double(), "A is torch.float32 and B torch.float64; cast one"),
    "B device": (lambda a, b: a @ b.to("meta"), "A is on cpu and B on meta; move one"),
    "B negated": (
        lambda a, b: a @ torch._neg_view(b),
        r"memory has the other sign; call .resolve_neg\(\)",
    ),
    "out shape": (
        lambda a, b: sk.spmm(a, b, out=b.new_empty(128, 41)),
        r"out must be torch.float32 \[128, 40\] on cpu, got torch.float32 \[128, 41\] on cpu",
    ),
    "out dtype": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, dtype=BF16)),
        r"out must be torch.float32 .* got torch.bfloat16",
    ),
    "out device": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(128, 40, device="meta")),
        "out must be .* on cpu, got .* on meta",
    ),
    "out no tensor": (
        lambda a, b: sk.spmm(a, b, out=[]),  # pyright: ignore[reportArgumentType]
        r"out must be torch.float32 \[128, 40\] on cpu, got list",
    ),
    "out sparse": (
        lambda a, b: sk.spmm(a, b, out=torch.zeros(128, 40).to_sparse()),
        "got .* in layout torch.sparse_coo",
    ),
    "out by columns": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(40, 128).T),
        r"out must have contiguous rows, got strides \(1, 128\)",
    ),
    "out rows meet": (
        lambda a, b: sk.spmm(a, b, out=torch.empty(8000).as_strided((128, 40), (39, 1))),
        r"every element in its own place, got shape \[128, 40\], strides \(39, 1\)",
    ),
    "out batches meet": (
        lambda a, b: sk.spmm(a, b.expand(2, 96, 40), out=torch.empty(128, 40).expand(2, 128, 40)),
        r"every element in its own place, got shape \[2, 128, 40\], strides \(0, 40, 1\)",
    ),
    "out is B": (
        lambda a, b: sk.spmm(pair(96, 96, dtype=b.dtype)[0], b, out=b),
        "out overlaps the memory of B",
    ),
    "out meets values": (
        lambda a, b: sk.spmm(a, b, out=a.values.flatten()[-128 * 40 :].view(128, 40)),
        "out overlaps the memory of A's values",
    ),
    "kernel": (
        lambda a, b: sk.spmm(a, b, kernel="hopper"),
        "no kernel is called 'hopper'; known: hopper.spmm, portable.spmm, vendor.dense, cpu.spmm, reference.spmm",
    ),
    "kernel and plan": (
        lambda a, b: sk.spmm(a, b, plan=sk.plan_spmm(a, b, kernel="cpu.spmm"), kernel="vendor.dense"),
        "kernel='vendor.dense' contradicts plan, which uses cpu.spmm",
    ),
    "plan": (
        lambda a, b: sk.spmm(a, b, plan="fast"),  # pyright: ignore[reportArgumentType]
        "plan must come from plan_spmm, got str",
    ),
    "config": (
        lambda a, b: sk.plan_spmm(a, b, config=3),
        "config= belongs to one kernel; name it with kernel=",
    ),
    "config of another": (
        lambda a, b: sk.plan_spmm(a, b, kernel="cpu.spmm", config=3),
        "3 is no config of cpu.spmm for this problem; its default is steps of",
    ),
    "card": (
        lambda a, b: sk.plan_spmm(a, b, device="b200"),
        "no measured facts for a card named 'b200'; known: h200, cpu",
    ),
    "card as a device": (
        lambda a, b: sk.plan_spmm(a, b, device=torch.device("cuda")),  # pyright: ignore[reportArgumentType]
        "no measured facts for a card named 'cuda'",
    ),
}


@pytest.mark.parametrize("name", BAD_OPERANDS)
def test_bad_operands_are_told_what_where_and_what_would_be_right(name: str):
    call, text = BAD_OPERANDS[name]
    a, b = pair(dtype=torch.float32)
    with pytest.raises(InvalidInput, match=text):
        call(a, b)


def pattern(indptr: list[int], indices: list[int], shape: Any = (64, 96)) -> BlockPattern:
    """Blocks of 32."""
    return BlockPattern(
        shape, (32, 32), torch.tensor(indptr, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32)
    )


def values(*shape: int) -> Tensor:
    return torch.randn(shape)


BAD_MATRICES: dict[str, tuple[Callable[[], Any], str]] = {
    "falling indptr": (
        lambda: pattern([0, 2, 1], [0]),
        "falls from 2 to 1 at block row 1; it must never fall",
    ),
    "indptr start": (lambda: pattern([1, 2, 2], [0, 1]), r"indptr\[0\] is 1; it must be 0"),
    "indptr end": (
        lambda: pattern([0, 1, 2], [0]),
        r"indptr\[-1\] is 2; it must be the number of indices, 1",
    ),
    "indptr length": (lambda: pattern([0, 1], [0]), "has 2 entries; 64 rows in blocks of 32 .* need 3"),
    "unsorted": (
        lambda: pattern([0, 2, 2], [1, 0]),
        r"indices\[1\] is 0, entry 1 of block row 0, and is smaller",
    ),
    "duplicate": (
        lambda: pattern([0, 0, 2], [1, 1]),
        r"indices\[1\] is 1, entry 1 of block row 1, and repeats",
    ),
    "too large": (lambda: pattern([0, 1, 1], [3]), r"indices\[0\] is 3, .*; block columns are 0 to 2"),
    "negative": (lambda: pattern([0, 1, 1], [-1]), r"indices\[0\] is -1, .*; block columns are 0 to 2"),
    "negative side": (lambda: pattern([0], [], (-32, 96)), "M is negative"),
    "overflow": (lambda: pattern([0], [], (2**31, 96)), "M in whole blocks must fit int32"),
    "values shape": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(2, 32, 32)),
        r"values have shape \(2, 32, 32\); the pattern needs \(1, 32, 32\)",
    ),
    "values strides": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 64)[:, :, ::2]),
        r"must be a dense contiguous tensor; call .contiguous\(\)",
    ),
    "values start": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1025)[1:].view(1, 32, 32)),
        r"start 4 bytes past a multiple of 16 bytes.*; call .clone\(\)",
    ),
    "values dtype": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 32).int()),
        "dtype torch.int32 is not supported; use one of torch.bfloat16",
    ),
    "values device": (
        lambda: BSR(pattern([0, 1, 1], [0]), values(1, 32, 32).to("meta")),
        "values are on meta and the pattern on cpu; put both on one device",
    ),
}


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_bad_matrices_are_told_what_where_and_what_would_be_right(name: str):
    make, text = BAD_MATRICES[name]
    with pytest.raises(InvalidInput, match=text):
        make()
