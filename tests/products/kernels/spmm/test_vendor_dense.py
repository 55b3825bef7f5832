"""vendor.dense: right within the budget, follows the values, and says when a dense product would be wrong."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sparsek as sk
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm.vendor_dense import _COPIES, dense_copy
from sparsek.products.reference.epilogue import Epilogue
from sparsek.products.reference.spmm import spmm as reference
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.attn.kernels.planned import multiply, problem
from tests.problems import changed

KERNEL = load("vendor.dense")


@pytest.fixture
def matrix() -> BSR:
    return random_bsr(128, 96, (32, 32), 0.7, dtype=torch.float32, device="cpu", seed=3)


def test_one_addition_goes_along_with_the_product(matrix: BSR, monkeypatch: pytest.MonkeyPatch) -> None:
    b, bias, other = torch.randn(96, 16), torch.randn(128), torch.randn(128, 16)
    monkeypatch.setattr(torch, "matmul", lambda *_, **__: pytest.fail("product and addition made apart"))
    for epilogue in (Epilogue(alpha=2.0), Epilogue(2.0, bias), Epilogue(2.0, None, "", other, "add", 0.5)):
        out = multiply(KERNEL, matrix, b, epilogue, poisoned((128, 16), torch.float32))
        torch.testing.assert_close(out, reference(matrix, b, epilogue))


def test_a_matrix_and_its_view_have_a_copy_each(matrix: BSR) -> None:
    plain, flipped = dense_copy(matrix), dense_copy(matrix.T)
    assert torch.equal(plain.mT, flipped)
    assert dense_copy(matrix).data_ptr() == plain.data_ptr()
    assert dense_copy(matrix.T).data_ptr() == flipped.data_ptr()


def _twice(a: BSR, change) -> "tuple[torch.Tensor, torch.Tensor, BSR]":
    """Prepares for `a`, calls once, changes, and calls again for what `change` returned."""
    b = torch.randn(a.shape[1], 16)
    p = problem(a, b)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, a)
    out = poisoned((a.shape[0], 16), torch.float32)
    KERNEL.launch(c, work, a, b, out)
    changed = change(a)
    out = poisoned((a.shape[0], 16), torch.float32)
    KERNEL.launch(c, work, changed, b, out)
    return b, out, changed


def test_all_plans_share_one_copy_which_goes_with_the_values(matrix: BSR) -> None:
    where = dense_copy(matrix).data_ptr()
    for n in (8, 16, 24):
        sk.spmm(matrix, torch.randn(96, n), kernel="vendor.dense")
    assert dense_copy(matrix).data_ptr() == where
    other = BSR(matrix.pattern, torch.randn_like(matrix.values))
    assert dense_copy(other).data_ptr() != where
    gone = weakref.ref(_COPIES[other.values][0, False])
    del other
    gc.collect()
    assert gone() is None


def test_threads_on_one_pattern_do_not_mix_their_values(matrix: BSR) -> None:
    matrices = [BSR(matrix.pattern, torch.randn_like(matrix.values)) for _ in range(4)]
    b = torch.randn(96, 16)
    right = [reference(a, b) for a in matrices]

    def work(index: int) -> float:
        out = [sk.spmm(matrices[index], b, kernel="vendor.dense") for _ in range(50)]
        return max(float((one - right[index]).abs().max()) for one in out)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 1e-4


def test_nothing_is_densified_unasked() -> None:
    a = random_bsr(512, 512, (64, 64), 1.0, dtype=torch.float32, device="cpu", seed=3)
    plan = sk.plan_spmm(a, torch.randn(512, 512))
    assert plan.kernel != "vendor.dense"
    assert "only by name: it keeps a dense copy of A" in plan.explain()


def written(a: BSR) -> BSR:
    a.values.mul_(-2)
    return a


def written_at(a: BSR) -> BSR:
    a.values[2, 5, 7] += 100
    return a


def trained(a: BSR) -> BSR:
    with torch.no_grad():
        a.values.add_(torch.ones_like(a.values), alpha=-0.5)
    return a


def exchanged(a: BSR) -> BSR:
    return BSR(a.pattern, torch.randn_like(a.values))


@pytest.mark.parametrize("change", [written, written_at, trained, exchanged], ids=lambda f: f.__name__)
def test_the_copy_follows_the_values(matrix: BSR, change: Callable[[BSR], BSR]) -> None:
    matrix.values.requires_grad_(change is trained)
    b, out, changed = _twice(matrix, change)
    assert check_spmm(changed, b, out).passed


def test_memory_that_is_handed_to_new_values_is_not_taken_for_the_old_ones() -> None:
    pattern = random_bsr(128, 96, (32, 32), 0.7, dtype=torch.float32, device="cpu", seed=3).pattern
    b = torch.randn(96, 16)
    first = BSR(pattern, torch.randn(pattern.nnzb, 32, 32))
    p = problem(first, b)
    work = KERNEL.prepare(p, KERNEL.default(p), first)
    del first
    for _ in range(8):
        a = BSR(pattern, torch.randn(pattern.nnzb, 32, 32))
        out = poisoned((128, 16), torch.float32)
        KERNEL.launch(KERNEL.default(p), work, a, b, out)
        assert check_spmm(a, b, out).passed


def test_the_copy_follows_values_made_in_inference_mode() -> None:
    with torch.inference_mode():
        a = random_bsr(64, 64, (32, 32), 1.0, dtype=torch.float32, device="cpu", seed=3)
        b, out, changed = _twice(a, lambda a: BSR.unchecked(a.pattern, a.values.mul_(3)))
        assert check_spmm(changed, b, out).passed


def test_unchanged_values_are_copied_once(matrix: BSR, monkeypatch: pytest.MonkeyPatch) -> None:
    b = torch.randn(96, 16)
    p = problem(matrix, b)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, matrix)
    monkeypatch.setattr(BSR, "logical_values", lambda self: pytest.fail("copied again"))
    KERNEL.launch(c, work, matrix, b, torch.empty(128, 16))


def test_an_empty_block_column_is_refused_because_nan_would_leak() -> None:
    a = BSR.from_coo_blocks(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.ones(2, 16, 16), (32, 32))
    reasons = KERNEL.why_not(problem(a, torch.randn(32, 4)))
    assert reasons == [
        "a block column of A is empty: NaN or Inf in rows of B that no stored block touches would reach C"
    ]


def test_a_dense_copy_beyond_the_memory_is_refused(matrix: BSR) -> None:
    p = changed(problem(matrix, torch.randn(96, 16)), m=2**20, k=2**20)
    (reason,) = KERNEL.why_not(p)
    assert reason.startswith("the dense copy of A takes 4096.0 GiB")


def test_it_runs_everything_else(matrix: BSR) -> None:
    assert KERNEL.why_not(problem(matrix, torch.randn(96, 16))) == []


def test_the_prediction_does_not_depend_on_the_blocks(matrix: BSR) -> None:
    p = problem(matrix, torch.randn(96, 16))
    c = KERNEL.default(p)
    assert KERNEL.seconds(p, c) == KERNEL.seconds(changed(p, nnzb=1), c)
    assert KERNEL.seconds(changed(p, bias=True), c) == KERNEL.seconds(p, c)
    assert KERNEL.seconds(changed(p, activation="gelu"), c) > KERNEL.seconds(p, c)


@pytest.mark.gpu
def test_the_call_can_be_captured_in_a_cuda_graph() -> None:
    a = random_bsr(512, 512, (64, 64), 0.5, dtype=torch.bfloat16, device="cuda", seed=3)
    b = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    p = problem(a, b)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, a)
    out = poisoned((512, 128), torch.bfloat16, "cuda")
    KERNEL.launch(c, work, a, b, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        KERNEL.launch(c, work, a, b, out)
    out.fill_(torch.nan)
    graph.replay()
    assert check_spmm(a, b, out).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_copy_follows_values_that_are_replaced(matrix: BSR, dtype: torch.dtype) -> None:
    """`values.data = ...`, as torch.nn.Module.to and a swap of averaged weights assign it: torch counts no write."""
    sk.spmm(matrix, torch.randn(96, 16), kernel="vendor.dense")
    matrix.values.data = torch.randn_like(matrix.values, dtype=dtype)
    b = torch.randn(96, 16, dtype=dtype)
    assert check_spmm(matrix, b, sk.spmm(matrix, b, kernel="vendor.dense")).passed
