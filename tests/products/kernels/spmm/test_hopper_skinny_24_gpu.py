"""hopper.semi24_skinny on a GPU: right in every config, layout and epilogue; the same bits; graphs; recorded calls.

Inputs are fresh in every run; a failure prints the seed.
"""

from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.linear import plan_layer
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.budget import check_spmm
from sparsek.testing.product_budget import check_linear
from tests.attn.kernels.planned import hold, multiply, problem
from tests.engine.launch.drawn import fresh, randn
from tests.products.cases import Case

pytest.importorskip("triton")

from sparsek.products.kernels.spmm.hopper_skinny_24 import KERNEL

pytestmark = pytest.mark.gpu
NAME = "hopper.semi24_skinny"
BF16, F16 = torch.bfloat16, torch.float16
COL = ("col", "col", "col")
LAYOUTS = [
    ("row", "row", "row"),
    COL,
    ("row", "col", "row"),
    ("strided", "row", "row"),
    ("col", "row", "row"),
]
SIZES = ((8, 128, 1), (64, 128, 8), (136, 384, 13), (520, 1152, 16), (264, 2176, 32), (1000, 4224, 25))
EPILOGUES: tuple[dict[str, Any], ...] = (
    {"bias": True, "alpha": -0.5, "activation": "gelu"},
    {"activation": "gelu_tanh", "combine": "mul"},
    {"activation": "relu", "combine": "add", "beta": -1.5},
    {"bias": True, "activation": "silu"},
)


def configs(case: Case, dtype: torch.dtype = BF16) -> list[Any]:
    a, b, epilogue, out = case.make("cuda", dtype)
    p = problem(a, b, out, epilogue)
    assert KERNEL.why_not(p) == []
    return list(dict.fromkeys([KERNEL.default(p), *KERNEL.configs(p)]))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_config_is_within_budget(size: tuple[int, int, int]) -> None:
    case = Case(*size, None, "whole", layouts=COL)
    for c in configs(case):
        hold(KERNEL, case, BF16, "cuda", fresh(), c)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda each: f"B_{each[0]}-C_{each[1]}")
def test_layouts_dtypes_and_epilogues_are_within_budget(
    layouts: tuple[str, str, str], dtype: torch.dtype
) -> None:
    for more in ({}, *EPILOGUES):
        for n in (1, 12, 30):
            case = Case(296, 1280, n, None, "whole", layouts=layouts, **more)
            hold(KERNEL, case, dtype, "cuda", fresh(), configs(case, dtype)[0])


def test_batches_and_another_matrix_in_place() -> None:
    hold(
        KERNEL,
        Case(136, 384, 16, None, "batch", combine="mul", layouts=COL, batch=(2, 2)),
        BF16,
        "cuda",
        fresh(),
    )
    a, b, _, out = Case(520, 1152, 16, None, "place", layouts=COL).make("cuda", BF16, seed := fresh())
    other = torch.randn_like(out)
    beside = multiply(KERNEL, a, b, Epilogue(other=other), out).clone()
    multiply(KERNEL, a, b, Epilogue(other=out.copy_(other)), out)
    assert torch.equal(out, beside), f"seed {seed}"


def test_layers_of_few_tokens_take_it_and_recorded_calls_repeat_it() -> None:
    torch.manual_seed(seed := fresh())
    w, bias = Semi24.from_dense(randn(8192, 8192)), randn(8192)
    assert plan_layer(randn(16, 8192), w).kernel == NAME
    for tokens in (1, 16):
        for _ in range(4):  # checked, recorded, repeated
            x, residual = randn(tokens, 8192), randn(tokens, 8192)
            y = sk.linear(x, w, bias, "gelu", residual, kernel=NAME)
            assert check_linear(x, w, y, bias, "gelu", residual).passed, f"seed {seed}"


def test_a_graph_holds_a_product_and_a_launch_does_not_sync(no_sync: Any) -> None:
    a, b = Semi24.from_dense(randn(512, 512)), randn(16, 512).mT
    sk.spmm(a, b, kernel=NAME)
    with no_sync():
        sk.spmm(a, b, kernel=NAME)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.spmm(a, b, kernel=NAME)
    for _ in range(2):
        b.copy_(randn(16, 512).mT)
        out.fill_(torch.nan)
        graph.replay()
        assert check_spmm(a, b, out).passed
