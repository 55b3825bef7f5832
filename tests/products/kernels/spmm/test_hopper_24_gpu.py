"""hopper.semi24 and hopper.bsr24 on a GPU: right in every config, layout and epilogue; the same bits; graphs; no leaks.

Inputs are fresh in every run; a failure prints the seed.
"""

import random
import threading
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.linear import plan_layer
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear
from tests.attn.kernels.planned import default_and, hold, multiply, problem
from tests.engine.launch.covering import once
from tests.engine.launch.drawn import fresh, randn
from tests.products.cases import Case
from tests.sampling import dealt

pytest.importorskip("triton")

from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm import hopper_bsr24 as bsr24

pytestmark = pytest.mark.gpu
WHOLE, BLOCKS = semi24.KERNELS["hopper.semi24"], bsr24.KERNELS["hopper.bsr24"]
BF16, F16 = torch.bfloat16, torch.float16
COL, ROW_OF_COL, COL_OF_ROW = ("col", "col", "col"), ("row", "col", "row"), ("col", "row", "row")
LAYOUTS = [("row", "row", "row"), COL, ROW_OF_COL, COL_OF_ROW]
SEMI_SIZES = (
    (64, 64, 8),
    (8, 16, 8),
    (72, 48, 16),
    (128, 64, 256),
    (256, 1024, 256),
    (1000, 1008, 1000),
    (2056, 528, 776),
)
BSR_SIZES = (
    ((64, 64), 64, 64, 8, 1.0),
    ((64, 64), 320, 256, 72, 0.4),
    ((128, 128), 1000, 1000, 520, 0.3),
    ((128, 64), 384, 512, 256, 0.2),
    ((256, 128), 1024, 768, 264, 0.5),
    ((192, 64), 400, 512, 128, 0.5),
)
EPILOGUES: tuple[dict[str, Any], ...] = (
    {"bias": True},
    {"alpha": -0.5, "bias": True, "activation": "gelu"},
    {"activation": "gelu_tanh"},
    {"activation": "relu", "alpha": 2.0},
    {"bias": True, "activation": "silu"},
)
JOINED: tuple[dict[str, Any], ...] = (
    {"combine": "add"},
    {"combine": "mul", "bias": True},
    {"combine": "add", "beta": -1.5, "alpha": 0.5, "bias": True, "activation": "gelu"},
    {"combine": "mul", "activation": "silu"},
)


def configs(kernel: Any, case: Case, dtype: torch.dtype) -> list[Any]:
    a, b, epilogue, out = case.make("cuda", dtype)
    p = problem(a, b, out, epilogue)
    assert kernel.why_not(p) == []
    return default_and(2, kernel, p, of=(str(case), dtype))


@pytest.mark.parametrize(
    ("size", "layouts", "dtype"), once(product(SEMI_SIZES, LAYOUTS, (BF16, F16)), together=2), ids=str
)
def test_every_config_of_a_whole_matrix_is_within_budget(
    size: tuple[int, int, int], layouts: tuple[str, str, str], dtype: torch.dtype
) -> None:
    case = Case(*size, None, "whole", layouts=layouts)
    for c in configs(WHOLE, case, dtype):
        hold(WHOLE, case, dtype, "cuda", fresh(), c)


@pytest.mark.parametrize(
    ("size", "layouts", "dtype"), once(product(BSR_SIZES, LAYOUTS, (BF16, F16)), together=2), ids=str
)
def test_every_config_of_blocks_is_within_budget(
    size: tuple[tuple[int, int], int, int, int, float], layouts: tuple[str, str, str], dtype: torch.dtype
) -> None:
    block, rows, columns, n, density = size
    case = Case(rows, columns, n, block, "blocks", density, two_four=True, layouts=layouts)
    for c in configs(BLOCKS, case, dtype):
        hold(BLOCKS, case, dtype, "cuda", fresh(), c)


def in_one_dtype(cases: tuple[dict[str, Any], ...]) -> list[tuple[dict[str, Any], torch.dtype]]:
    """Each case in a dtype, in every run others: dtypes differ in conversions alone."""
    return [(case, dtype) for hand, case in enumerate(cases) for dtype in dealt((BF16, F16), 2, hand)]


@pytest.mark.parametrize(("epilogue", "dtype"), in_one_dtype(EPILOGUES), ids=str)
def test_epilogues_are_within_budget(epilogue: dict[str, Any], dtype: torch.dtype) -> None:
    for layouts in (("row", "row", "row"), COL):
        whole = Case(520, 528, 264, None, "whole", layouts=layouts, **epilogue)
        blocks = Case(520, 512, 264, (128, 64), "blocks", 0.4, two_four=True, layouts=layouts, **epilogue)
        for kernel, case in ((WHOLE, whole), (BLOCKS, blocks)):
            for c in configs(kernel, case, dtype):
                hold(kernel, case, dtype, "cuda", fresh(), c)


@pytest.mark.parametrize(("joined", "dtype"), in_one_dtype(JOINED), ids=str)
def test_another_matrix_is_joined_within_budget(joined: dict[str, Any], dtype: torch.dtype) -> None:
    """Beside C and in its place: what is read of it is read before C is written there."""
    for layouts in (("row", "row", "row"), COL):
        whole = Case(520, 528, 264, None, "whole", layouts=layouts, **joined)
        blocks = Case(520, 512, 264, (128, 64), "blocks", 0.2, two_four=True, layouts=layouts, **joined)
        for kernel, case in ((WHOLE, whole), (BLOCKS, blocks)):
            for c in configs(kernel, case, dtype):
                a, b, epilogue, out = case.make("cuda", dtype, seed := fresh())
                multiply(kernel, a, b, epilogue, out, config=c)
                assert (gate := check_spmm(a, b, out, epilogue)).passed, f"{c}, seed {seed}: {gate}"
                assert epilogue.other is not None
                beside = out.clone()
                out.copy_(epilogue.other)
                multiply(kernel, a, b, replace(epilogue, other=out), out, config=c)
                assert torch.equal(out, beside), f"{c} in place, seed {seed}"


@pytest.mark.parametrize("name", ["semi24", "bsr24"])
def test_layers_of_any_size_are_within_budget(name: str) -> None:
    draw = random.Random(seed := fresh())
    torch.manual_seed(seed)
    for _ in range(12):
        n, k, tokens = 8 * draw.randint(1, 80), 16 * draw.randint(1, 70), draw.randint(1, 700)
        if name == "semi24":
            gate_w, w = (Semi24.from_dense(randn(n, k)) for _ in range(2))
        else:
            side = draw.choice([64, 128, 192])
            made = (
                sk.random_bsr(n, k, (side, 64), 0.4, dtype=BF16, device="cuda", seed=seed + i) for i in (0, 1)
            )
            gate_w, w = map(BSR24.from_bsr, made)
        if not w.values.numel() or not gate_w.values.numel():
            continue
        x, bias, residual = randn(tokens, k), randn(n), randn(tokens, n)
        kernel, sizes = f"hopper.{name}", f"{tokens} x {k} to {n}, seed {seed}"
        y = sk.linear(x, w, bias, "gelu", residual, kernel=kernel)
        assert check_linear(x, w, y, bias, "gelu", residual).passed, sizes
        gate = sk.linear(x, gate_w, activation="silu", kernel=kernel)
        y = sk.swiglu(x, gate_w, w, kernel=kernel)
        assert check_spmm(w, x.mT, y.mT, Epilogue(other=gate.mT, combine="mul")).passed, sizes
        c = residual.mT.contiguous() if tokens % 8 == 0 else None
        if c is not None:
            before = c.clone()
            sk.spmm(w, x.mT, out=c, beta=-0.5, kernel=kernel)
            assert check_spmm(w, x.mT, c, Epilogue(other=before, beta=-0.5)).passed, sizes


@pytest.mark.parametrize("batch", [(3,), (2, 2)], ids=str)
def test_batches_are_within_budget(batch: tuple[int, ...]) -> None:
    for layouts, combine in ((("row", "row", "row"), "add"), (COL, "mul")):
        more: dict[str, Any] = {"layouts": layouts, "batch": batch, "combine": combine}
        hold(WHOLE, Case(136, 80, 72, None, "batch", **more), BF16, "cuda", fresh())
        hold(
            BLOCKS,
            Case(192, 128, 72, (64, 64), "batch", 0.6, two_four=True, **more),
            BF16,
            "cuda",
            fresh(),
        )
    hold(WHOLE, Case(136, 80, 72, None, "batch", batch=batch), BF16, "cuda", fresh())


def test_large_products_are_within_budget() -> None:
    torch.manual_seed(seed := fresh())
    w, x = Semi24.from_dense(randn(4096, 4096)), randn(4096, 4096)
    bias = randn(4096)
    y = sk.linear(x, w, bias, "gelu", kernel="hopper.semi24")
    assert check_linear(x, w, y, bias, "gelu").passed, f"seed {seed}"
    assert check_spmm(w, x, sk.spmm(w, x, kernel="hopper.semi24")).passed, f"seed {seed}"
    blocks = BSR24.from_bsr(
        sk.random_bsr(4096, 4096, 128, 0.2, pattern="powerlaw", dtype=BF16, device="cuda")
    )
    assert check_spmm(blocks, x, sk.spmm(blocks, x, kernel="hopper.bsr24")).passed, f"seed {seed}"
    y = sk.linear(x, blocks, bias, "silu", kernel="hopper.bsr24")
    assert check_linear(x, blocks, y, bias, "silu").passed, f"seed {seed}"


def test_a_graph_holds_a_product_whose_nibbles_were_never_ordered() -> None:
    b = randn(512, 512)
    sk.spmm(Semi24.from_dense(randn(512, 512)), b, kernel="hopper.semi24")
    a = Semi24.from_dense(randn(512, 512))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.spmm(a, b, kernel="hopper.semi24")
    for _ in range(2):
        b.copy_(randn(512, 512))
        out.fill_(torch.nan)
        graph.replay()
        assert check_spmm(a, b, out).passed


def test_metadata_that_was_written_is_read_again() -> None:
    a, other, b = Semi24.from_dense(randn(256, 256)), Semi24.from_dense(randn(256, 256)), randn(256, 256)
    plan = sk.plan_spmm(a, b, kernel="hopper.semi24")
    assert check_spmm(a, b, plan(a, b)).passed
    assert check_spmm(other, b, plan(other, b)).passed
    a.meta.copy_(other.meta)
    a.values.copy_(other.values)
    assert torch.equal(plan(a, b), plan(other, b))


def test_a_new_thread_and_another_stream_multiply_as_well() -> None:
    a, b = Semi24.from_dense(randn(512, 512)), randn(512, 512)
    first = sk.spmm(a, b, kernel="hopper.semi24")
    found: list[Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found.append(sk.spmm(a, b, kernel="hopper.semi24"))
        stream.synchronize()

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], first)


def test_a_launch_neither_syncs_nor_allocates(no_sync: Any) -> None:
    a, b = Semi24.from_dense(randn(512, 512)), randn(512, 512)
    p, out = problem(a, b), poisoned((512, 512), BF16, "cuda")
    c = WHOLE.default(p)
    work = WHOLE.prepare(p, c, a)
    WHOLE.launch(c, work, a, b, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        WHOLE.launch(c, work, a, b, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert check_spmm(a, b, out).passed


def test_automatic_choice_takes_it_for_large_layers() -> None:
    x, w = randn(2048, 4096), Semi24.from_dense(randn(4096, 4096))
    assert sk.plan_spmm(w, x.mT).kernel == "hopper.semi24"
    residual = randn(2048, 4096)
    assert plan_layer(x, w, epilogue=Epilogue(other=residual)).kernel == "hopper.semi24"
