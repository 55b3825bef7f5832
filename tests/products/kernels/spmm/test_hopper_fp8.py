"""hopper.spmm_fp8 without a GPU: configs compiled for sm_90a, its schedule walked in numpy, its launch and limits.

Machine code must show what no test of results does: that nothing is spilled, that no wgmma waits for the one before it,
and that every warpgroup sums FP8 in the tensor cores for one step only; with `fast_accum`, that one step runs behind
another.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsek as sk
from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.random import random_bsr
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import Epilogue
from tests.problems import changed, fp8_problem

pytest.importorskip("triton")

from sparsek.products.kernels.spmm import hopper_fp8 as spmm_fp8
from sparsek.products.kernels.spmm.hopper_fp8 import PROMOTED, Config
from tests.engine.launch.covering import once
from tests.engine.launch.hopper_code import compiled
from tests.products.kernels.common.hopper_code import (
    check_batches,
    check_code,
    check_code_of_next,
    check_limits,
    check_texts,
    fields_of,
    walked,
)

KERNEL = load("hopper.spmm_fp8")
BLOCKS = ((128, 128), (64, 64), (64, 128), (256, 64), (96, 96), (16, 32), (192, 160))
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "activation": "gelu"},
    {"combine": "mul", "activation": "silu"},
    {"combine": "add", "in_place": True, "has_alpha": True},
)


def problem(block: tuple[int, int], n: int, **more: object) -> SpmmProblem:
    """8192 x 8192, one block of eight stored."""
    stored = 8192 * 8192 // 8 // block[0] // block[1]
    fields = {"m": 8192, "k": 8192, "n": n, "block": block, "nnzb": stored, "dtype": "e4m3", "card": H200}
    return fp8_problem(**fields | {"row_max": 8192 // 8 // block[1]} | more)


def kept(p: SpmmProblem, c: Config) -> tuple[Config, str]:
    """`c`, and the types of A, B and C that it is compiled for."""
    return c, f"{p.dtype} {p.b.dtype} {p.c.dtype}"


def held(**more: object) -> tuple[Config, str]:
    """The largest tile that waits in registers."""
    p = problem((128, 128), 8192, **more)
    return kept(p, max(KERNEL.configs(p), key=lambda c: (c.held, c.cols)))


def staged(**more: object) -> tuple[Config, str]:
    """The largest tile that waits in shared memory."""
    p = problem((128, 128), 8192, **more)
    return kept(p, min(KERNEL.configs(p), key=lambda c: (c.held, -c.cols)))


def split(**more: object) -> tuple[Config, str]:
    """The largest tile of rows that are split."""
    p = problem((64, 64), 8192, row_max=2000, **more)
    return kept(p, max(KERNEL.configs(p), key=lambda c: (c.split, c.block_cols)))


def alone(**more: object) -> tuple[Config, str]:
    """A tile of one warpgroup."""
    p = problem((64, 128), 16, **more)
    return kept(p, next(c for c in KERNEL.configs(p) if c.wg_m * c.wg_n == 1))


def chosen(p: SpmmProblem) -> tuple[Config, str]:
    return kept(p, KERNEL.default(p))


TENSORS = {"a_scale": "tensor", "b_scale": "tensor"}
EVERYTHING = {"bias": True, "activation": "gelu", "out_dtype": "fp16", "out_layout": "col"}
COMPILED = [
    staged(),
    staged(a_scale="block", **EVERYTHING),
    staged(**TENSORS, out_layout="col"),
    staged(fast_accum=True, out_layout="col"),
    held(),
    held(a_scale="block", **EVERYTHING),
    held(**TENSORS, dtype="e5m2"),
    held(fast_accum=True),
    held(fast_accum=True, **TENSORS, **EVERYTHING),
    split(a_scale="block", dtype="e5m2"),
    chosen(problem((96, 96), 200, b_scale="tensor", out_dtype="fp32", out_layout="col")),
    alone(**TENSORS, b_dtype="e5m2", combine="mul", activation="silu"),
]


def test_the_configs_that_are_compiled_are_of_every_kind() -> None:
    configs = [c for c, _ in COMPILED]
    assert {c.chunks for c in configs} == {1, 4}
    assert {(c.promote == 0, c.chunk) for c in configs if c.cols == 256} == {(True, 256), (False, 64)}
    assert {(c.promote > 0, c.held > 0) for c in configs} == set(product((False, True), repeat=2))
    assert {c.wg_m * c.wg_n for c in configs} == {1, 2}
    assert {c.a_scale for c in configs} == {"tensor", "row", "block"}
    assert {c.b_scale for c in configs} == {"tensor", "column"}
    assert {types.split()[2] for _, types in COMPILED} == {"bf16", "fp16", "fp32"}
    assert any(c.split for c in configs)
    assert {c.c_col for c in configs} == {False, True}


def kinds(case: tuple[Config, str]) -> list[tuple[object, ...]]:
    c, types = case
    ways = ("promote", c.promote > 0), ("held", c.held > 0), ("split", c.split), ("column", c.c_col)
    return [*ways, ("chunks", c.chunks), ("scales", c.a_scale, c.b_scale), ("c", types.split()[2])]


@pytest.mark.parametrize(("c", "types"), once(COMPILED, kinds, most=3), ids=str)
def test_fp8_configs_compile_to_wgmma_and_tma_without_spills(c: Config, types: str) -> None:
    # One register is spilled outside the loops where float32 sums leave through bias and GELU.
    fullest = c.held and c.promote and c.bias
    check_code(c, types, compiled(c, types), *((8, 8) if fullest else (0, 0)))


def test_the_newest_triton_compiles_fp8_as_well() -> None:
    check_code_of_next(COMPILED[2:3])


FIELDS = fields_of(
    block=st.sampled_from(BLOCKS),
    width=st.sampled_from((32, 64, 128)),
    joined_rows=st.sampled_from((1, 2)),
    **dict.fromkeys(("slope", "preload"), st.just(False)),  # of hopper.spmm alone
    held=st.sampled_from((0, 32)),
    promote=st.sampled_from((0, 1, 2, 4)),
    a_scale=st.sampled_from(("tensor", "row", "block")),
    b_scale=st.sampled_from(("tensor", "column")),
    c_bytes=st.sampled_from((2, 4)),
)


@given(st.data())
def test_two_configs_never_share_a_text(data: st.DataObject) -> None:
    check_texts(Config, FIELDS, data)


@settings(max_examples=40)
@given(
    block=st.sampled_from(BLOCKS),
    n=st.one_of(st.integers(1, 40), st.integers(1, 2**17)).map(lambda n: 8 * n),
    out_layout=st.sampled_from(("row", "col")),
    a_scale=st.sampled_from(("tensor", "row", "block")),
    fast=st.booleans(),
    epilogue=st.sampled_from(EPILOGUES),
    out_dtype=st.sampled_from(("bf16", "fp32")),
    longest=st.sampled_from((0, 500)),
)
def test_every_config_fits_the_card(
    block, n, out_layout, a_scale, fast, epilogue, out_dtype, longest
) -> None:
    fast = fast and a_scale != "block"
    given = {"out_layout": out_layout, "a_scale": a_scale, "out_dtype": out_dtype, "row_max": longest}
    given |= {"fast_accum": fast}
    p = problem(block, n, **given, **epilogue)
    if KERNEL.why_not(p):
        assert out_dtype == "fp32"
        assert epilogue
        return
    assert KERNEL.default(p) in KERNEL.configs(p)
    for c in KERNEL.configs(p):
        check_limits(c, max(c.panel, c.cols))
        assert c.width * c.per_block == block[1], "a block is whole pieces"
        if fast:
            assert (c.promote, c.chunks) == (0, 1), "one sum of everything"
        else:
            assert c.pieces % c.promote == 0, c
            assert c.promote * c.width <= PROMOTED, "so much of K does a tensor core add up at most"
            assert a_scale != "block" or c.per_block % c.promote == 0, "no sum reaches over two blocks"
            assert c.cols % c.chunk == 0, c
            assert (c.cols + 2 * c.chunk) // 2 <= 192, (
                "sums of a tile and of two chunks are a thread's registers"
            )
        assert c.c_bytes * c.c_shape[1] <= 128, "a box of C is no wider than a swizzle"
        assert c.chunk % c.panel == 0, "a chunk is whole boxes"


def test_every_item_of_a_batch_is_predicted_as_a_launch() -> None:
    check_batches(KERNEL, changed(problem((128, 128), 512), m=1024, k=2048, nnzb=64))


def test_rows_of_one_length_are_not_split_and_one_long_row_is() -> None:
    even = problem((128, 128), 128)
    assert not any(c.split for c in KERNEL.configs(even))
    long = changed(even, nnzb=64 + 60, row_max=64)
    assert KERNEL.default(long).split
    assert any(not c.split for c in KERNEL.configs(long)), "the tuner may try both"


@settings(max_examples=30)
@given(
    block=st.sampled_from([*BLOCKS, (144, 32)]),
    sides=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    n=st.sampled_from((8, 16, 136, 304)),
    a_scale=st.sampled_from(("row", "block")),
    out_layout=st.sampled_from(("row", "col")),
    split=st.booleans(),
    data=st.data(),
)
def test_walking_the_schedule_as_the_kernel_does_gives_the_product(
    block, sides, cut, n, a_scale, out_layout, split, data
) -> None:
    """Some block rows are empty, the last ones reach over M and K."""
    m, k = sides[0] * block[0] - cut[0], (5 if split else 1) * sides[1] * block[1] - cut[1]
    a = random_bsr(m, k, block, 0.4, pattern="powerlaw", dtype=torch.float64, device="cpu", seed=n)
    stretch = torch.rand(a.nnzb, dtype=torch.float64) if a_scale == "block" else torch.ones(m)
    q = Quantized.unchecked(a, stretch, a_scale)
    p = problem(block, n, m=m, k=k, nnzb=a.nnzb, a_scale=a_scale, out_layout=out_layout)
    p = changed(p, card=replace(H200, sm_count=data.draw(st.sampled_from((1, 3, 132)))))
    c = data.draw(st.sampled_from(KERNEL.configs(p)))
    c = replace(c, split=split and not c.held)
    work = KERNEL.prepare(p, c, q)
    b = torch.randn(k, n, dtype=torch.float64).numpy()
    found = walked(c, a, b, m, n, work, stretch.numpy())
    expected = BSR(a.pattern, a.values * stretch[:, None, None]) if a_scale == "block" else a
    np.testing.assert_allclose(found, expected.to_dense().numpy() @ b, rtol=1e-9, atol=1e-9)
    assert work.ctas == len(work.starts) - 1 <= p.card.sm_count * c.ctas_per_sm


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("density", [0.5, 0.0])
def test_a_launch_hands_over_every_matrix_of_a_batch(
    monkeypatch: pytest.MonkeyPatch, by_columns: bool, density: float
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spmm_fp8, "launch_on", lambda *given: calls.append(given))
    wide = random_bsr(200, 128, (64, 64), density, dtype=torch.bfloat16, device="cpu")
    a = sk.quantize(wide, scale="row")
    x = sk.quantize(torch.randn(2, 24, 128), scale="row")
    out, other = torch.empty(2, 200, 24).bfloat16(), torch.randn(2, 200, 24).bfloat16()
    if by_columns:
        out, other = (each.mT.contiguous().mT for each in (out, other))
    epilogue = Epilogue(alpha=2.0, bias=torch.randn(200).bfloat16(), other=other, beta=0.5)
    layout = "col" if by_columns else "row"
    p = problem(
        (64, 64), 24, m=200, k=128, nnzb=wide.nnzb, out_layout=layout, bias=True, combine="add", batch=2
    )
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, a)
    KERNEL.launch(c, work, a, x.mT, out, epilogue)
    assert len(calls) == 2
    for item, (device, kernel, ctas, args, options) in enumerate(calls):
        found = dict(zip(kernel.arg_names, args, strict=True))
        assert (device, ctas, options) == (out.device, work.ctas, c.options)
        side = (200, 24)[:: -1 if by_columns else 1]
        assert found["c_desc"][:4] == (found["c_desc"].base, side, (side[1], 1), c.c_shape)
        assert found["c_desc"].base.data_ptr() == out[item].data_ptr()
        nnzb = max(1, wide.nnzb)
        assert found["a_desc"][1:4] == ((nnzb * 64, 64), (64, 1), (c.rows, c.width))
        if density:
            assert found["a_desc"].base is a.matrix.values
            assert found["b_desc"].base.data_ptr() == x.values[item].data_ptr()
            assert found["b_desc"][1:4] == ((24, 128), (128, 1), (c.cols, c.width))
        assert (found["no_col"], found["no_block"]) == (2, nnzb)
        assert found["a_scale"] is a.scale
        assert found["b_scale"].data_ptr() == x.scale[item].data_ptr()
        assert (found["alpha"], found["beta"], found["m"], found["n"]) == (2.0, 0.5, 200, 24)
        assert found["bias"] is epilogue.bias
        assert found["other"].data_ptr() == other[item].data_ptr()
        assert (found["lead8"], found["rows"], found["cols8"]) == (side[1] // 8, side[0], side[1] // 8)
        assert (found["T"], found["SOURCE"]) == (c, spmm_fp8.SOURCE)


def test_one_row_gets_a_stride_that_tma_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was cut out of a wider matrix is contiguous, whatever its stride says."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spmm_fp8, "launch_on", lambda *given: calls.append(given))
    a = sk.quantize(random_bsr(64, 64, (64, 64), 1.0, dtype=torch.bfloat16, device="cpu"), scale="row")
    wide = torch.randn(2, 100).to(torch.float8_e4m3fn)
    x = sk.QuantizedTensor(wide[:1, :64], torch.ones(1))
    p = problem((64, 64), 1, m=64, k=64, nnzb=1, out_layout="col")
    c = KERNEL.default(p)
    KERNEL.launch(c, KERNEL.prepare(p, c, a), a, x.mT, torch.empty(1, 64).bfloat16().mT)
    ((_, kernel, _, args, _),) = calls
    assert dict(zip(kernel.arg_names, args, strict=True))["b_desc"].strides == (64, 1)
