"""hopper.semi24_skinny without a GPU: machine code, the kernel's roles on the CPU, its choices.

The machine code needs NVRTC, which nvidia-cuda-nvrtc brings, and the roles g++.
"""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.products.reference.epilogue import PLAIN
from sparsek.testing.budget import check_spmm
from tests.problems import changed, spmm_problem
from tests.products.cases import Case
from tests.sampling import sampled

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import OPTIONS
from sparsek.engine.table import load, names_for
from sparsek.products.kernels.spmm import hopper_skinny_24 as skinny
from sparsek.products.kernels.spmm.hopper_skinny_24 import KERNEL, PROGRAM, Config
from tests.attn.kernels.planned import problem
from tests.engine.launch import sass
from tests.products.kernels.spmm import hopper_skinny_24_emulated as emulated
from tests.products.kernels.spmm.hopper_24_code import SPILLS, disassembled

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not here")
LAYER: dict[str, Any] = {"b_layout": "col", "out_layout": "col"}
DECODE = spmm_problem(two_four=True, m=8192, k=8192, n=16, dtype="bf16", card=H200, **LAYER)
PROBLEMS = [changed(DECODE, n=n) for n in (8, 16, 32)] + [changed(DECODE, m=4096, k=14336, dtype="fp16")]


def every_shape() -> list[Config]:
    """A config of every shape and both dtypes."""
    found: dict[Any, Config] = {}
    for p in PROBLEMS:
        for c in KERNEL.configs(p):
            found.setdefault((c.warps, c.ms, c.parts > 1, c.resident, c.tiles, c.half), c)
    return list(found.values())


COMPILED = every_shape()[::3]


@needs_nvrtc
@pytest.mark.parametrize("c", sampled(COMPILED, 2), ids=str)
def test_configs_compile_to_sparse_mma_and_wide_copies_without_spills(c: Config) -> None:
    text, log = disassembled(PROGRAM.source, PROGRAM.path.name, [*OPTIONS, *c.defines])
    opcodes = [each.opcode for each in sass.parsed(text).code]
    kind = "" if c.half else ".BF16"
    assert {each for each in opcodes if "MMA" in each} == {f"HMMA.SP.16832.F32{kind}"}
    assert {each for each in opcodes if "LDGSTS" in each} == {"LDGSTS.E.BYPASS.LTC256B.128"}
    assert {each for each in opcodes if "LDSM" in each} == {"LDSM.16.M88.4"}
    spills = SPILLS.search(log)
    assert spills is not None, log
    assert set(map(int, spills.groups())) == {0}, log
    assert "warning" not in log.lower(), log


def test_resident_ctas_fit_on_an_sm() -> None:
    for p in PROBLEMS:
        configs = list(KERNEL.configs(p))
        assert len(configs) >= 2
        for c in configs:
            assert c.resident * (c.smem + skinny.RESERVED) <= H200.smem_bytes + skinny.RESERVED
            assert c.smem <= H200.smem_bytes
            assert 32 * c.warps * c.resident <= 2048


COL = ("col", "col", "col")
RUNS: dict[str, tuple[Config, Case]] = {
    "one warp": (Config(1, 2, 1, 2, 1, 1), Case(32, 128, 8, None, "one", layouts=COL)),
    "layer": (
        Config(4, 2, 1, 2, 1, 2),
        Case(40, 1408, 13, None, "layer", alpha=0.5, bias=True, activation="gelu", layouts=COL),
    ),
    "four parts and a residual": (
        Config(2, 4, 4, 3, 1, 4, True),
        Case(150, 2048, 30, None, "four", activation="silu", combine="add", beta=-0.5),
    ),
    "a gate": (
        Config(4, 8, 2, 2, 1, 4),
        Case(
            160,
            1152,
            25,
            None,
            "gate",
            activation="gelu_tanh",
            combine="mul",
            layouts=("strided", "row", "row"),
        ),
    ),
    "warps without work": (
        Config(2, 2, 4, 1, 1, 1),
        Case(9, 384, 1, None, "short", activation="relu", layouts=COL),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", sampled(list(RUNS), 2))
def test_the_roles_multiply_whenever_copies_land(name: str) -> None:
    c, case = RUNS[name]
    for order in (emulated.EARLY, emulated.LATE):
        a, b, epilogue, out = case.make("cpu", torch.float16 if c.half else torch.bfloat16, order)
        assert isinstance(a, sk.Semi24)
        given = epilogue
        if "residual" in name and epilogue.other is not None:  # in place
            given = replace(epilogue, other=out.copy_(epilogue.other))
        assert emulated.multiply(c, a, b, out, given, order=order) == ""
        gate = check_spmm(a, b, out, epilogue)
        assert gate.passed, f"{c} {order}: {gate}"


@needs_compiler
def test_nan_in_rows_of_b_reaches_those_rows_of_c_that_name_it() -> None:
    mask = torch.zeros(32, 128, dtype=torch.bool)
    mask[::2, 0::4] = mask[::2, 1::4] = mask[1::2, 2::4] = mask[1::2, 3::4] = True
    a = sk.Semi24.from_dense(torch.randn(32, 128).bfloat16(), mask)
    b, out = torch.randn(8, 128).bfloat16().mT, torch.empty(8, 32).bfloat16().mT
    b[6] = torch.nan
    assert emulated.multiply(Config(1, 2, 1, 2, 1, 1), a, b, out) == ""
    assert out[1::2].isnan().all()
    assert not out[::2].isnan().any()


MISTAKES = {
    "copies that nobody waits for": ("wait_copies<DEPTH - 1>();", "wait_copies<DEPTH>();"),
    "rows that are not swizzled": ("(piece ^ row % 8) * 16", "piece * 16"),
    "metadata of the other block": ("% 2 * 2 + 1], h);", "% 2 * 2 + 1], 1 - h);"),
    "a slot too early": ("if (++slot == DEPTH) slot = 0;", "if (++slot >= DEPTH - 1) slot = 0;"),
    "sums that are still written": ("  cluster_sync();  // the sums", "  // the sums"),
}


@needs_compiler
@pytest.mark.parametrize("name", sampled(list(MISTAKES), 2))
def test_mistakes_in_the_roles_are_seen(name: str) -> None:
    source, (old, new) = PROGRAM.source, MISTAKES[name]
    assert source.count(old) == 1
    c, found = Config(2, 2, 2, 3, 1, 2), []
    a, b, epilogue, out = Case(64, 2048, 16, None, "small", layouts=COL).make("cpu", torch.bfloat16)
    assert isinstance(a, sk.Semi24)
    for order in (emulated.EARLY, emulated.LATE):
        said = emulated.multiply(c, a, b, out, epilogue, order=order, source=source.replace(old, new))
        found.append(said or not check_spmm(a, b, out, epilogue).passed)
    assert any(found)


def test_it_is_chosen_for_few_columns_alone() -> None:
    others = [load(name) for name in names_for("spmm", "semi24") if name != KERNEL.name]
    for n, wanted in ((1, True), (16, True), (32, True), (33, False), (4096, False)):
        p = changed(DECODE, n=n)
        able = [each for each in others if not each.why_not(p)]
        fastest = min(each.seconds(p, each.default(p)) for each in able)
        mine = not KERNEL.why_not(p) and KERNEL.seconds(p, KERNEL.default(p)) < fastest
        assert mine == wanted, n
    w, x = sk.Semi24.from_dense(torch.randn(512, 512).bfloat16()), torch.randn(512, 16).bfloat16()
    assert "hopper.semi24_skinny" in sk.plan_spmm(w, x, device="h200").explain()


def test_defaults_fill_the_card() -> None:
    for p in PROBLEMS:
        c = KERNEL.default(p)
        assert KERNEL.seconds(changed(p, m=8 * p.m), c) > 4 * KERNEL.seconds(p, c)
        assert 0.9 * H200.sm_count <= -(-p.m // c.tm) * c.parts


def test_one_token_and_odd_strides_are_told_as_they_are() -> None:
    w = sk.Semi24.from_dense(torch.randn(64, 128).bfloat16())
    wide = torch.empty(8, 136).bfloat16()
    for b, vectors in (
        (wide[:1, :128].mT, 1),
        (wide[:, :128].mT, 1),
        (wide[:, 1:129].mT, 0),
        (wide[:, 8:].T, 1),
    ):
        out = torch.empty(b.shape[1], 64, dtype=torch.bfloat16).mT
        p = skinny.launch_params(w, b, out, PLAIN)
        assert (p.wide, p.by_columns, p.other) == (vectors, 1, None)
        assert problem(w, b, out=out).n == b.shape[1]
