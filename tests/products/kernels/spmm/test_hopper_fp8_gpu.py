"""hopper.spmm_fp8 on a GPU: right for every kind of scale, form, epilogue and config; long K; the same bits.

Inputs are fresh in every run.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import dtypes
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized, Scale
from sparsek.products.formats.quantized_tensor import DenseScale, QuantizedTensor
from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.products.reference.epilogue import PLAIN, Combine, Epilogue, EpilogueActivation
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.engine.launch.drawn import fresh
from tests.sampling import dealt, sampled

pytestmark = pytest.mark.gpu
NAME = "hopper.spmm_fp8"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(
    m: int,
    k: int,
    n: int,
    block: tuple[int, int],
    density: float = 0.4,
    a_scale: Scale = "row",
    b_scale: DenseScale = "row",
    types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    batch: tuple[int, ...] = (),
    fast: bool = False,
) -> tuple[Quantized, QuantizedTensor]:
    """A in which blocks differ in size by a factor of 40, and B = x.mT with rows of x that do. Some rows are empty."""
    a = random_bsr(
        m, k, block, density, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=fresh()
    )
    sizes = 0.1 + 4 * torch.rand(a.nnzb, 1, 1, device="cuda").bfloat16()
    x = torch.randn(*batch, n, k, device="cuda") * (0.1 + 4 * torch.rand(*batch, n, 1, device="cuda"))
    a8 = sk.quantize(BSR(a.pattern, a.values * sizes), types[0], a_scale, fast_accum=fast)
    return a8, sk.quantize(x, types[1], b_scale).mT


def check(a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
    gate = check_spmm(a, b, out, epilogue)
    assert gate.passed, gate


def planned(
    a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN, config: Any = None
) -> SpmmPlan:
    return sk.plan_spmm(a, b, out=out, epilogue=epilogue, kernel=NAME, config=config)


@pytest.mark.parametrize(
    "case",
    [
        {
            "m": 128,
            "k": 128,
            "n": 256,
            "block": (128, 128),
            "density": 1.0,
            "a_scale": "tensor",
            "b_scale": "tensor",
        },
        {"m": 1000, "k": 1008, "n": 264, "block": (64, 64)},
        {"m": 1024, "k": 1024, "n": 1024, "block": (64, 64), "a_scale": "block"},
        {"m": 200, "k": 336, "n": 72, "block": (128, 64), "a_scale": "block", "b_scale": "tensor"},
        {"m": 520, "k": 2048, "n": 16, "block": (128, 128), "a_scale": "tensor"},
        {"m": 520, "k": 2048, "n": 8, "block": (64, 128), "types": (E5M2, E5M2)},
        {"m": 768, "k": 512, "n": 136, "block": (256, 128), "types": (E5M2, E4M3)},
        {"m": 768, "k": 512, "n": 136, "block": (96, 96), "types": (E4M3, E5M2), "a_scale": "block"},
        {"m": 640, "k": 640, "n": 520, "block": (32, 32)},
        {"m": 384, "k": 480, "n": 520, "block": (192, 160)},
        {"m": 2048, "k": 1024, "n": 512, "block": (128, 128), "density": 0.02, "a_scale": "block"},
        {"m": 256, "k": 256, "n": 256, "block": (64, 64), "density": 0.0},
        {"m": 256, "k": 384, "n": 264, "block": (128, 128), "batch": (2, 3)},
        {"m": 1000, "k": 4112, "n": 520, "block": (128, 128), "fast": True, "a_scale": "tensor"},
        {"m": 768, "k": 960, "n": 136, "block": (96, 96), "fast": True, "types": (E5M2, E4M3)},
        {"m": 256, "k": 256, "n": 256, "block": (64, 64), "density": 0.0, "fast": True},
    ],
    ids=str,
)
def test_it_is_right(case: dict[str, Any]) -> None:
    a, b = operands(**case)
    for kind in (*sampled(("bf16", "fp16"), 1, of=case), "fp32"):
        out = poisoned((*b.shape[:-2], a.shape[0], b.shape[-1]), dtypes.parse(kind), "cuda")
        planned(a, b, out)(a, b, out=out)
        check(a, b, out)


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_layer_is_right(kind: str) -> None:
    """x @ W.T: C is written by columns."""
    w, b = operands(776, 1040, 520, (64, 64), a_scale="block")
    bias = torch.randn(776, device="cuda", dtype=dtypes.parse(kind))
    y = sk.linear(b.mT, w, bias, "relu", kernel=NAME, dtype=dtypes.parse(kind))
    check(w, b, y.mT, Epilogue(bias=bias, activation="relu"))


@pytest.mark.parametrize("activation", ["", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("combine", ["", "add", "mul"])
def test_epilogues_are_right(activation: EpilogueActivation, combine: Combine | Literal[""]) -> None:
    a, b = operands(384, 512, 264, (128, 128))
    bias, other = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((384,), (384, 264)))
    epilogue = Epilogue(0.7, bias, activation, other if combine else None, combine or "add", 0.5)
    out = poisoned((384, 264), torch.bfloat16, "cuda")
    planned(a, b, out, epilogue)(a, b, out=out, epilogue=epilogue)
    check(a, b, out, epilogue)


SUMS = (("row", False), ("block", False), ("row", True))


@pytest.mark.parametrize("n", [512, 48, 8])
@pytest.mark.parametrize("block", [(128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize(("a_scale", "fast"), SUMS)
def test_every_config_is_right_and_repeats_its_bits(
    block: tuple[int, int], n: int, a_scale: Scale, fast: bool
) -> None:
    a, b = operands(1024, 4096, n, block, a_scale=a_scale, fast=fast)
    out = poisoned((1024, n), torch.bfloat16, "cuda")
    kernel, p = load(NAME), planned(a, b, out).problem
    configs = kernel.configs(p)
    configs += [replace(c, split=True) for c in configs if not c.split and not c.held]
    for c in dealt(configs, 3, SUMS.index((a_scale, fast)), of=(block, n)):
        plan = planned(a, b, out, config=c)
        plan(a, b, out=out.fill_(torch.nan))
        check(a, b, out)
        first = out.clone()
        for _ in range(10):
            plan(a, b, out=out.fill_(torch.nan))
            assert torch.equal(out, first), c


def test_a_long_sum_keeps_its_accuracy() -> None:
    """All products are positive, so what the tensor cores cut off of a sum adds up: over 32768 it would be percents."""
    fresh()
    a = random_bsr(256, 32768, (128, 128), 1.0, dtype=torch.bfloat16, device="cuda")
    q = sk.quantize(BSR(a.pattern, a.values.abs()), scale="row")
    b = sk.quantize(torch.rand(256, 32768, device="cuda"), scale="row").mT
    out = poisoned((256, 256), torch.float32, "cuda")
    planned(q, b, out)(q, b, out=out)
    check(q, b, out)


def test_with_fast_accum_a_long_sum_stays_in_the_tensor_cores() -> None:
    """It loses what the model of their cut says, and more than without."""
    a, b = operands(256, 32768, 256, (128, 128), density=1.0, fast=True)
    out = poisoned((256, 256), torch.float32, "cuda")
    planned(a, b, out)(a, b, out=out)
    check(a, b, out)
    assert not check_spmm(a.with_fast_accum(False), b, out).passed


def test_what_a_tile_reads_beside_its_rows_never_reaches_c() -> None:
    """NaN behind the last column of B's neighbours in memory, and in rows of A above and below, stay where they are."""
    a, b = operands(256, 256, 136, (64, 64), density=1.0)
    values = a.matrix.values.clone()
    values.view(torch.uint8)[0] = 0x7F  # NaN in E4M3, in the first block of the first block row
    assert isinstance(a.matrix, BSR)
    spoiled = Quantized.unchecked(BSR.unchecked(a.matrix.pattern, values), a.scale, a.kind)
    out = poisoned((256, 136), torch.bfloat16, "cuda")
    planned(spoiled, b, out)(spoiled, b, out=out)
    assert bool(out[:64].isnan().all())
    clean = sk.spmm(a, b, kernel=NAME)
    assert torch.equal(out[64:], clean[64:])


def test_a_scale_of_nan_stays_in_the_rows_of_its_block() -> None:
    """The last stage of a row has room for blocks of the next row."""
    a, b = operands(2048, 512, 136, (64, 32), a_scale="block")
    assert isinstance(a.matrix, BSR)
    rows = a.matrix.pattern.block_rows.long()
    counts = rows.bincount(minlength=32).view(16, 2)
    assert bool(((counts[:, 0] % 4 > 0) & (counts[:, 1] > 0)).any())
    spoiled = Quantized.unchecked(a.matrix, a.scale.masked_fill(rows % 2 == 1, torch.nan), a.kind)
    out = poisoned((2048, 136), torch.bfloat16, "cuda")
    p = planned(a, b, out).problem
    c = next(c for c in load(NAME).configs(p) if c.pieces == 4 and not c.split)
    clean = planned(a, b, out, config=c)(a, b, out=out).clone()
    planned(spoiled, b, out, config=c)(spoiled, b, out=out.fill_(torch.nan))
    found, wanted = (x.view(16, 2, 64, 136) for x in (out, clean))
    assert torch.equal(found[:, 0], wanted[:, 0])
    assert bool(found[:, 1][counts[:, 1] > 0].isnan().all())


def test_tiles_that_wait_in_registers_leave_while_their_cta_multiplies_the_next() -> None:
    """With sums in the tensor cores. Every CTA has several tiles."""
    a, b = operands(4096, 1024, 2048, (128, 128), fast=True)
    out = poisoned((4096, 2048), torch.bfloat16, "cuda")
    configs = [c for c in load(NAME).configs(planned(a, b, out).problem) if c.held]
    assert configs
    for c in configs:
        planned(a, b, out, config=c)(a, b, out=out.fill_(torch.nan))
        check(a, b, out)


def test_a_thousand_launches_give_the_stored_answer() -> None:
    a, b = operands(4096, 4096, 4096, (128, 128), density=0.2)
    out = poisoned((4096, 4096), torch.bfloat16, "cuda")
    plan = planned(a, b, out)
    answer = plan(a, b, out=out).clone()
    check(a, b, answer)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        plan(a, b, out=out.fill_(torch.nan))
        different += (out != answer).any()
    assert int(different) == 0
