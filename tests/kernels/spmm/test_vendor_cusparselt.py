"""vendor.cusparselt: what it asks of the library, held against a stand-in of torch on the CPU; and itself on a GPU."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.clock import Times
from sparsek.core.device import CPU, H200
from sparsek.core.errors import Unsupported
from sparsek.kernels.lang import memo as kept
from sparsek.kernels.spmm import vendor_cusparselt as cusparselt
from sparsek.kernels.spmm.vendor_cusparselt import KERNEL, CusparseltConfig
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import planning
from sparsek.ops.linear import plan_layer
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear
from tests.kernels.planned import problem
from tests.problems import T4, changed, spmm_problem

GOOD: dict[str, Any] = {"m": 64, "k": 128, "n": 32, "dtype": "bf16", "card": H200}
BF16 = torch.bfloat16


class Library:
    """Stands in for the library: what it compresses is A itself. Counts calls and keeps what it was told.

    It has no algorithm 2, and 1 is the fastest.
    """

    def __init__(self) -> None:
        self.compressed = self.timed = 0
        self.told: list[dict[str, Any]] = []

    def compress(self, dense: Tensor) -> Tensor:
        assert dense.is_contiguous()
        self.compressed += 1
        return dense.clone()

    def multiply(self, packed: Tensor, b: Tensor, **how: Any) -> Tensor:
        assert b.is_contiguous() or b.mT.is_contiguous()
        if how["alg_id"] == 2:
            raise RuntimeError("CUDA error: invalid value when calling `cusparseLtMatmulAlgSetAttribute`")
        self.told.append(how)
        z = packed.float() @ b.float()
        if how["bias"] is not None:
            z = z + how["bias"].float()[:, None]
        return (z.mT if how["transpose_result"] else z).to(b.dtype).contiguous()

    def time(self, calls: dict[str, Callable[[], Tensor]], **options: Any) -> dict[str, Times]:
        assert options["settle_ms"] == 0
        assert all(call().isfinite().all() for call in calls.values())
        self.timed += 1
        return {name: Times.of([abs(int(name) - 1.0)]) for name in calls}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    planning._decided.cache_clear()
    monkeypatch.setattr(cusparselt, "missing", list)
    monkeypatch.setattr(torch, "_cslt_compress", made.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", made.multiply)
    monkeypatch.setattr(torch._C, "_cusparselt", None, raising=False)  # its search must not be called
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", None)
    monkeypatch.setattr(cusparselt, "time_rounds", made.time)
    monkeypatch.setattr(cusparselt, "TRIED", (0, 1, 2, 3))
    monkeypatch.setattr(cusparselt, "_ALGORITHMS", {})
    monkeypatch.setattr(
        cusparselt.VendorCusparselt, "why_not", lambda self, p: []
    )  # the operands of these tests are on the CPU
    yield made
    planning._decided.cache_clear()


def operands(n: int = 32, batch: tuple[int, ...] = ()) -> tuple[Semi24, Tensor]:
    return Semi24.from_dense(torch.randn(64, 128).to(BF16)), torch.randn(*batch, 128, n).to(BF16)


def test_it_says_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch):
    p = spmm_problem(two_four=True, **GOOD)
    lacks = []
    if not torch.cuda.is_available():
        lacks.append("torch sees no CUDA device here")
    if not torch.backends.cusparselt.is_available():
        lacks.append(f"torch {torch.__version__} was built without cuSPARSELt")
    assert KERNEL.why_not(p) == lacks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    assert KERNEL.why_not(p) == []


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({"card": CPU}, "runs on CUDA tensors only"),
    "old": ({"card": T4}, "no sparse tensor cores; they came with .* 8.0"),
    "fp32": ({"dtype": "fp32"}, "dtype must be bf16 or fp16, not fp32; it would round float32 to TF32"),
    "fp64": ({"dtype": "fp64"}, "dtype must be bf16 or fp16, not fp64$"),
    "transposed": ({"transposed": True}, "A stands transposed, and its pairs then lie along the rows of C"),
    "rows": ({"m": 72}, "A must have sides that are multiples of 16, not 72 x 128"),
    "columns": ({"k": 120}, "A must have sides that are multiples of 16, not 64 x 120"),
    "no rows": ({"m": 0}, "A must have sides that are multiples of 16, not 0 x 128"),
    "n": ({"n": 12}, "N must be a multiple of 8, not 12"),
    "gaps": ({"gapless": False}, "B must be contiguous, or the transpose view"),
    "unaligned": ({"aligned": False}, "multiples of 16 bytes"),
}


@pytest.mark.parametrize("name", REASONS)
def test_it_says_what_is_wrong_with_a_problem(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cusparselt, "missing", list)
    change, text = REASONS[name]
    (why,) = KERNEL.why_not(spmm_problem(two_four=True, **GOOD | change))
    assert re.search(text, why), why


def test_several_reasons_come_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cusparselt, "missing", list)
    assert (
        len(KERNEL.why_not(spmm_problem(two_four=True, **GOOD | {"n": 12, "k": 120, "dtype": "fp32"}))) == 3
    )


def test_it_runs_by_name_only_and_explain_says_so():
    a, b = operands()
    assert KERNEL.name not in sk.plan_spmm(a, b).explain().splitlines()[1]
    with pytest.raises(Unsupported, match=r"vendor\.cusparselt cannot run this") as caught:
        sk.spmm(a, b[:, :12], kernel="vendor.cusparselt")
    assert "N must be a multiple of 8, not 12" in caught.value.reasons["vendor.cusparselt"]
    choice = planning.choose(spmm_problem(two_four=True, **GOOD))
    assert choice.kernel.name != "vendor.cusparselt"


EPILOGUES: dict[str, Callable[[Tensor, Tensor], Epilogue]] = {
    "plain": lambda bias, other: PLAIN,
    "bias": lambda bias, other: Epilogue(bias=bias),
    "alpha": lambda bias, other: Epilogue(alpha=-0.5),
    "alpha and bias": lambda bias, other: Epilogue(alpha=2.0, bias=bias),
    "gelu of a bias": lambda bias, other: Epilogue(bias=bias, activation="gelu"),
    "added": lambda bias, other: Epilogue(bias=bias, activation="silu", other=other, beta=0.5),
    "gate": lambda bias, other: Epilogue(other=other, combine="mul"),
}


@pytest.mark.parametrize("by_columns", [False, True], ids=["row", "col"])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_epilogue_and_layout_is_within_budget(
    name: str, batch: tuple[int, ...], by_columns: bool, library: Library
):
    a, b = operands(batch=batch)
    shape = (*batch, 64, 32)
    other = torch.randn(*batch, 32, 64).to(BF16).mT if by_columns else torch.randn(shape).to(BF16)
    epilogue = EPILOGUES[name](torch.randn(64).to(BF16), other)
    out = poisoned((*batch, 32, 64), BF16).mT if by_columns else poisoned(shape, BF16)
    p = problem(a, b, out, epilogue)
    work = KERNEL.prepare(p, KERNEL.default(p), a)
    library.told.clear()
    KERNEL.launch(KERNEL.default(p), work, a, b, out, epilogue)
    gate = check_spmm(a, b, out, epilogue)
    assert gate.passed, gate
    assert len(library.told) == (6 if batch else 1)
    assert all(how["transpose_result"] is by_columns for how in library.told)
    along = name in ("bias", "gelu of a bias", "added")
    assert all((how["bias"] is not None) is along for how in library.told)
    assert all(how["alg_id"] == 1 for how in library.told)


def test_what_torch_makes_is_returned_where_nothing_is_left_to_do(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    a, b = operands()
    x, bias = torch.randn(3, 8, 128).to(BF16), torch.randn(64).to(BF16)
    real, seen = Tensor.copy_, []

    def counted(self: Tensor, *args: Any) -> Tensor:
        seen.append(args)
        return real(self, *args)

    monkeypatch.setattr(Tensor, "copy_", counted)
    sk.spmm(a, b, kernel=KERNEL.name)
    sk.linear(x, a, bias, kernel=KERNEL.name)
    assert len(seen) == 0
    sk.linear(x, a, bias, "gelu", kernel=KERNEL.name)
    assert len(seen) == 1
    assert check_spmm(a, b, sk.spmm(a, b, kernel=KERNEL.name)).passed
    y = sk.linear(x, a, bias, "gelu", kernel=KERNEL.name)
    assert y.is_contiguous()
    assert check_linear(x, a, y, bias, "gelu").passed
    plan = plan_layer(x, a, epilogue=Epilogue(bias=bias), kernel=KERNEL.name)
    assert torch.equal(plan(x, a, epilogue=Epilogue(bias=bias)), sk.linear(x, a, bias, kernel=KERNEL.name))


def test_a_matrix_is_compressed_once_and_a_problem_timed_once(library: Library):
    a, b = operands()
    first = sk.spmm(a, b, kernel=KERNEL.name)
    assert torch.equal(sk.spmm(a, b, kernel=KERNEL.name), first)
    assert (library.compressed, library.timed) == (1, 1)
    sk.spmm(a, b[:, :8].contiguous(), kernel=KERNEL.name)  # another problem of the same matrix
    assert (library.compressed, library.timed) == (1, 2)
    other, _ = operands()
    sk.spmm(other, b, kernel=KERNEL.name)  # the same problem of another matrix
    assert (library.compressed, library.timed) == (2, 2)


def test_values_that_were_written_to_are_compressed_anew(library: Library):
    a, b = operands()
    sk.spmm(a, b, kernel=KERNEL.name)
    a.values.mul_(-2)
    assert check_spmm(a, b, sk.spmm(a, b, kernel=KERNEL.name)).passed
    assert library.compressed == 2
    turned = Semi24.unchecked(a.values, a.meta.clone())
    turned.meta.copy_(torch.where(a.meta == 0x44, 0xEE, 0x44).to(torch.uint8))
    assert check_spmm(turned, b, sk.spmm(turned, b, kernel=KERNEL.name)).passed
    with torch.inference_mode():
        fresh = Semi24.from_dense(torch.randn(64, 128).to(BF16))
        for _ in range(2):
            assert check_spmm(fresh, b, sk.spmm(fresh, b, kernel=KERNEL.name)).passed
            fresh.values.mul_(-3)


def test_the_copy_goes_with_the_matrix(library: Library):
    a, b = operands()
    sk.spmm(a, b, kernel=KERNEL.name)
    before = len(cusparselt._COPIES)
    del a
    assert len(cusparselt._COPIES) == before - 1


def test_a_graph_keeps_what_it_saw_and_times_nothing(library: Library, monkeypatch: pytest.MonkeyPatch):
    a, b = operands()
    p = problem(a, b)
    work = KERNEL.prepare(p, KERNEL.default(p), a)
    packed = work.compressed.held
    for module in (cusparselt, kept):
        monkeypatch.setattr(module, "captured", lambda x: True)
    KERNEL.launch(KERNEL.default(p), work, a, b, poisoned((64, 32), BF16))
    KERNEL.launch(KERNEL.default(p), work, a, b, poisoned((64, 32), BF16))
    assert [each is packed for each in work.compressed.in_graphs] == [True]
    other, _ = operands()
    q = changed(p, n=2 * p.n)
    assert KERNEL.prepare(q, KERNEL.default(q), other).alg_id == 0
    assert library.timed == 1
    a.values.mul_(2)
    out = poisoned((64, 32), BF16)
    KERNEL.launch(KERNEL.default(p), work, a, b, out)
    assert check_spmm(a, b, out).passed
    assert work.compressed.held is packed  # what the graph made is its own


def test_the_algorithms_that_are_remembered_are_bounded(library: Library, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cusparselt, "REMEMBERED", 3)
    a, _ = operands()
    for n in range(8, 80, 8):
        sk.spmm(a, torch.randn(128, n).to(BF16), kernel=KERNEL.name)
    assert len(cusparselt._ALGORITHMS) == 3


def test_an_algorithm_may_be_named(library: Library):
    a, b = operands()
    c = CusparseltConfig(3)
    plan = sk.plan_spmm(a, b, kernel=KERNEL.name, config=c)
    assert "algorithm 3, a compressed copy" in plan.explain()
    assert check_spmm(a, b, plan(a, b)).passed
    assert [how["alg_id"] for how in library.told] == [3]
    assert library.timed == 0
    assert "the fastest of algorithms 0, 1, 2, 3" in sk.plan_spmm(a, b, kernel=KERNEL.name).explain()


@pytest.mark.parametrize(
    ("tried", "alg_id", "timed"), [((0,), 0, 0), ((2,), 2, 0), ((2, 3), 3, 1), ((2, 2), 2, 1)]
)
def test_algorithms_that_the_library_refuses_are_left_out(
    tried: tuple[int, ...], alg_id: int, timed: int, library: Library, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cusparselt, "TRIED", tried)
    a, b = operands()
    p = problem(a, b)
    assert KERNEL.prepare(p, KERNEL.default(p), a).alg_id == alg_id
    assert library.timed == timed


def test_gradients_of_the_dense_operand_come_from_another_kernel(library: Library):
    a, b = operands()
    c = sk.spmm(a, b.requires_grad_(), kernel=KERNEL.name)
    grad = torch.randn(64, 32).to(BF16)
    (found,) = torch.autograd.grad(c, b, grad)
    assert check_spmm(a, grad, found, transposed=True).passed


@pytest.mark.parametrize("n", [8, 4096])
def test_predictions_respect_the_roofline_and_grow_with_an_epilogue(n: int):
    p = changed(spmm_problem(two_four=True, **GOOD), m=4096, k=4096, n=n)
    c = KERNEL.default(p)
    assert KERNEL.seconds(p, c) > max(
        p.useful_flops / (H200.tflops["bf16"] * 1e12), p.compulsory_bytes / H200.bandwidth
    )
    assert KERNEL.seconds(changed(p, activation="gelu"), c) > KERNEL.seconds(p, c)
    assert KERNEL.seconds(changed(p, bias=True), c) == pytest.approx(KERNEL.seconds(p, c), rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 128, 32), (512, 1024, 512), (16, 16, 8), (144, 2048, 1000)], ids=str)
def test_products_on_a_gpu_are_within_budget(shape: tuple[int, int, int], dtype: torch.dtype):
    if not torch.backends.cusparselt.is_available():
        pytest.skip(f"torch {torch.__version__} was built without cuSPARSELt")
    m, k, n = shape
    a = Semi24.from_dense(torch.randn(m, k, device="cuda").to(dtype))
    b, bias = torch.randn(k, n, device="cuda").to(dtype), torch.randn(m, device="cuda").to(dtype)
    x, rest = torch.randn(n, k, device="cuda").to(dtype), torch.randn(n, m, device="cuda").to(dtype)
    for dense in (b, x.mT, b.expand(2, k, n)):
        out = sk.spmm(a, dense, kernel=KERNEL.name)
        assert out.is_contiguous()
        assert check_spmm(a, dense, out).passed
    calls: list[Any] = [(None, None, None), (bias, None, None), (bias, "gelu", rest)]
    for more in calls:
        y = sk.linear(x, a, *more, kernel=KERNEL.name)
        assert y.is_contiguous()
        assert check_linear(x, a, y, *more).passed
    out = poisoned((m, n), dtype, "cuda")
    assert sk.spmm(a, b, out=out, kernel=KERNEL.name) is out
    assert check_spmm(a, b, out).passed


@pytest.mark.gpu
def test_a_cuda_graph_replays_a_product():
    if not torch.backends.cusparselt.is_available():
        pytest.skip(f"torch {torch.__version__} was built without cuSPARSELt")
    a = Semi24.from_dense(torch.randn(256, 512, device="cuda").to(BF16))
    x, bias = torch.randn(64, 512, device="cuda").to(BF16), torch.randn(256, device="cuda").to(BF16)
    sk.linear(x, a, bias, kernel=KERNEL.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sk.linear(x, a, bias, kernel=KERNEL.name)
    x.copy_(torch.randn_like(x))
    y.fill_(torch.nan)
    graph.replay()
    assert check_linear(x, a, y, bias).passed
