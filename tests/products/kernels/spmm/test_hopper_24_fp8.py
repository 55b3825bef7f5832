"""hopper.semi24_fp8 and hopper.bsr24_fp8: machine code and roles without a GPU; products on one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.testing.budget import check_spmm
from tests.attn.kernels.planned import default_and, hold, problem
from tests.engine.launch.drawn import fresh
from tests.problems import changed, fp8_problem
from tests.products.cases import COL, E4M3, E5M2, ROW, Case, ScaleScopes
from tests.sampling import sampled

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm import hopper_bsr24 as bsr24
from sparsek.products.kernels.spmm.hopper_24 import Config
from tests.products.kernels.spmm import hopper_24_emulated as emulated
from tests.products.kernels.spmm.test_hopper_24 import check_code, needs_compiler, needs_nvrtc

BIG: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "dtype": "e4m3", "card": H200}
LAYER: dict[str, Any] = {"out_layout": "col", "bias": True, "activation": "gelu"}
SEMI = fp8_problem(two_four=True, **BIG)
BSR = fp8_problem(two_four=True, **BIG, block=(128, 128), nnzb=512, row_max=8)
KERNELS = {
    "semi24_fp8": semi24.KERNELS["hopper.semi24_fp8"],
    "bsr24_fp8": bsr24.KERNELS["hopper.bsr24_fp8"],
}
COMPILED = [
    KERNELS["semi24_fp8"].default(changed(SEMI, **LAYER, out_dtype="fp16")),
    KERNELS["semi24_fp8"].default(changed(SEMI, m=512, n=512, dtype="e5m2")),
    KERNELS["bsr24_fp8"].default(changed(BSR, **LAYER, b_dtype="e5m2", combine="mul")),
    KERNELS["semi24_fp8"].default(changed(SEMI, **LAYER, fast_accum=True)),
    KERNELS["bsr24_fp8"].default(changed(BSR, fast_accum=True)),
]


@needs_nvrtc
@pytest.mark.parametrize("c", sampled(COMPILED, 3), ids=str)
def test_configs_compile_to_sparse_wgmma_without_spills(c: Config) -> None:
    check_code(c)


MORE: dict[str, Any] = {"layouts": COL, "bias": True, "activation": "gelu"}
RUNS = {
    "whole": (Case(168, 672, 200, None, "whole", scales=ScaleScopes("tensor", "row", E5M2)), 192, 2, 2),
    "blocks": (
        Case(248, 512, 136, (128, 128), "blocks", two_four=True, scales=ROW, combine="add", **MORE),
        128,
        1,
        3,
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", RUNS)
def test_the_roles_multiply_whatever_comes_first(name: str) -> None:
    case, columns, cluster, ctas = RUNS[name]
    kernel = KERNELS[case.op]
    for order in (emulated.MIXED, emulated.LATE):
        a, b, epilogue, out = case.make("cpu", torch.bfloat16, order)
        p = changed(problem(a, b, out, epilogue), card=replace(H200, sm_count=ctas))
        assert kernel.why_not(p) == []
        c = next(c for c in kernel.configs(p) if (c.tm, c.tn, c.cluster) == (128, columns, cluster))
        scales = semi24.Scales(a.scale if a.kind == "row" else a.scale.view(()), b.scale)
        work, matrix = kernel.prepare(p, c, a), a.matrix
        assert not isinstance(matrix, sk.BSR)
        said = emulated.run(c, work, matrix, b.values.mT, out, epilogue, scales, order=order)
        assert said == ""
        gate = check_spmm(a, b, out, epilogue)
        assert gate.passed, f"{c} {order}: {gate}"


def test_fast_accum_gives_tiles_as_wide_as_in_16_bits() -> None:
    for kernel, p in ((KERNELS["semi24_fp8"], SEMI), (KERNELS["bsr24_fp8"], BSR)):
        kept, fast = kernel.configs(p), kernel.configs(changed(p, fast_accum=True))
        assert {(c.promote, c.tn == 256) for c in kept} == {(4, False)}
        assert {(c.promote, c.tn == 256) for c in fast} == {(0, False), (0, True)}


def test_plans_for_an_h200_name_the_kernel() -> None:
    w = sk.quantize(sk.Semi24.from_dense(torch.randn(1024, 512)), E4M3)
    plan = sk.plan_spmm(w, sk.quantize(torch.randn(256, 512), E4M3).mT, device="h200")
    assert plan.kernel == "hopper.semi24_fp8"
    assert "FP8 .e4m3.e4m3" in plan.explain()


GPU_CASES = [
    Case(64, 32, 8, None, "small", scales=ROW),
    Case(200, 480, 264, None, "ragged", scales=ROW),
    Case(1000, 2080, 520, None, "tensor", scales=ScaleScopes("tensor", "tensor")),
    Case(296, 1056, 77, None, "layer", scales=ScaleScopes("row", "row", E5M2, E4M3), **MORE),
    Case(296, 1056, 77, None, "gate", scales=ROW, combine="mul", layouts=COL),
    Case(136, 8192, 256, None, "long", scales=ScaleScopes("row", "tensor", E4M3, E5M2)),
    Case(
        136,
        96,
        72,
        None,
        "batch",
        scales=ROW,
        alpha=0.5,
        bias=True,
        activation="silu",
        combine="add",
        batch=(2, 2),
    ),
    Case(1000, 8192, 520, None, "fast", scales=ScaleScopes(fast=True)),
    Case(296, 1056, 77, None, "fast layer", scales=ScaleScopes("tensor", "row", E5M2, fast=True), **MORE),
    Case(1000, 4096, 520, (128, 128), "fast", 0.3, two_four=True, scales=ScaleScopes(fast=True)),
    Case(128, 256, 72, (64, 128), "plain", two_four=True, scales=ROW),
    Case(1000, 1024, 520, (128, 128), "blocks", 0.3, two_four=True, scales=ScaleScopes("tensor", "row")),
    Case(
        504, 768, 261, (256, 128), "layer", 0.4, two_four=True, scales=ROW, combine="add", beta=-0.5, **MORE
    ),
    Case(
        384, 512, 64, (128, 256), "empty rows", 0.2, two_four=True, scales=ROW, bias=True, activation="relu"
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (case, dtype)
        for case in GPU_CASES
        for dtype in sampled((torch.bfloat16, torch.float16), 1, of=str(case))
    ],
    ids=str,
)
def test_every_config_is_within_budget(case: Case, dtype: torch.dtype) -> None:
    kernel = KERNELS[case.op]
    a, b, epilogue, out = case.make("cuda", dtype)
    p = problem(a, b, out, epilogue)
    assert kernel.why_not(p) == []
    for c in default_and(2, kernel, p, of=str(case)):
        hold(kernel, case, dtype, "cuda", fresh(), c)
