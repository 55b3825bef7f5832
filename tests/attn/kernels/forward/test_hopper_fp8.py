"""hopper.attention_fp8: configs compiled for sm_90a, their texts, limits, reasons and predictions; scales on a GPU."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.attention_fp8 import AttendedFp8, AttentionFp8Problem
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.core.device import H200
from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import OPTIONS
from sparsek.engine.table import load
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from tests.attn.attention_cases import AttentionCase

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import hopper_fp8
from sparsek.attn.kernels.forward.hopper_fp8 import PROGRAM, Config
from sparsek.attn.kernels.forward.pipeline import fitted
from tests.attn.kernels.forward.problems import BLOCKS, SMEM_PER_SM, attention_problem
from tests.attn.kernels.forward.test_attention_fwd import LOW, causal
from tests.attn.kernels.planned import attend
from tests.engine.launch import sass
from tests.engine.launch.drawn import fresh
from tests.products.kernels.spmm.hopper_24_code import SPILLS, disassembled
from tests.sampling import sampled

gpu = pytest.mark.gpu
needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
KERNEL = load("hopper.attention_fp8")


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> Any:
    return attention_problem(AttentionFp8Problem, dim, v_dim, **({"dtype": "e4m3"} | more))


def config(*sides: Any, **more: Any) -> Config:
    """Dims, block, warpgroups and keys, with as many stages as fit."""
    dim, v_dim, block, groups, keys = sides
    return fitted(Config(dim, v_dim, block, groups, keys, 2, 2, **more), H200.smem_bytes)


ALL: dict[str, Any] = {"interval": True, "bits": True, "split": True, "lse": True}
# Plain, with every rule and output, with scales of blocks; each tile, heads that are narrow and wide, 64 rows.
CORE = [
    config(128, 128, (128, 128), 2, 128),
    config(128, 128, (128, 128), 2, 128, pack=8, half=True, **ALL),
    config(128, 128, (128, 128), 2, 128, interval=True, split=True, lse=True, by_block=True),
    config(128, 128, (128, 128), 2, 64, by_block=True, half=True, **ALL),
    config(256, 128, (128, 128), 2, 64, interval=True),
    config(64, 64, (64, 128), 1, 64, by_block=True, half=True, lse=True),
    config(128, 128, (64, 64), 1, 64, **ALL),
]
OTHERS = [
    config(dim, v_dim, block, groups, keys, by_block=by_block, **flags)
    for dim, v_dim, (block, groups, keys), by_block, flags in product(
        (32, 64, 128, 256),
        (32, 64, 128),
        (((128, 128), 2, 128), ((128, 64), 2, 64), ((64, 64), 1, 64)),
        (True, False),
        ({}, {"interval": True, "lse": True}, {"bits": True, "split": True, "pack": 4}),
    )
    if not (by_block and "bits" in flags and v_dim > 32 and keys == 128)  # no problem has such configs
]


@needs_nvrtc
@pytest.mark.parametrize("c", sampled([*CORE, *sampled(OTHERS, 5)], 1), ids=str)
def test_machine_code(c: Config) -> None:
    text, log = disassembled(PROGRAM.source, PROGRAM.path.name, [*OPTIONS, *c.defines])
    program = sass.parsed(text)
    opcodes = [each.opcode for each in program.code]
    widths = {c.keys, c.v_dim if c.v_dim <= c.keys else c.v_dim // 2}
    assert {each for each in opcodes if "MMA" in each} == {f"QGMMA.64x{n}x32.F32.E4M3.E4M3" for n in widths}
    spilled = SPILLS.search(log)
    assert spilled is not None, log
    assert spilled[0].startswith("0 bytes stack frame, 0 bytes spill stores, 0 bytes"), log
    assert not [each for each in opcodes if each.startswith(("LDL", "STL"))]
    assert "serialized" not in log, log
    assert sass.unwritten(program) == sass.mixed_descriptors(program) == []
    loops = [[program.code[at].opcode for at in sorted(body)] for body in innermost(program)]
    for loop in loops:
        hold_two_steps(c, loop)
    *without, ruled = sorted(loops, key=len)
    assert len(without) == (c.v_dim >= c.keys if c.groups == 2 else c.v_dim == c.keys)
    assert "FSEL" in ruled
    assert "R2P" in ruled or not (c.interval or c.bits), "a predicate for each score would be a test for each"
    assert not any("FSEL" in each for each in without)


def innermost(program: sass.Program) -> list[set[int]]:
    """The loops with products that hold no other such loop."""
    every = [
        body
        for body in sass.loops(program).values()
        if any(program.code[at].opcode.startswith("QGMMA") for at in body)
    ]
    return [body for body in every if not any(other < body for other in every)]


def hold_two_steps(c: Config, opcodes: list[str]) -> None:
    """The loop has two steps, and computes exp2 beside products: few between a wait and the next ones, as those of
    maxima that have moved, and half where the SM's other CTA has products.
    """
    halves = 1 if c.v_dim <= c.keys else 2
    assert sum(each.startswith("QGMMA") for each in opcodes) == 2 * (c.dim + halves * c.keys) // 32
    assert opcodes.count("MUFU.EX2") == 2 * (c.keys // 2 + 2)
    busy, alone = True, 0  # S of the step before the loop's first
    for each in opcodes:
        busy = each != "WARPGROUP.DEPBAR.LE" and (busy or each.startswith("QGMMA"))
        alone += each == "MUFU.EX2" and not busy
    assert alone <= c.keys // (8 if c.groups == 2 else 2)


def test_shared_memory_of_two_ctas_and_of_one() -> None:
    for c in (*CORE, *OTHERS):
        assert c.ctas_per_sm == (2 if c.groups == 1 else 1)
        assert c.ctas_per_sm * (c.smem + 1024) <= SMEM_PER_SM


@pytest.mark.parametrize("scale", ["head", "block"])
def test_a_launch_gives_the_kernel_its_maps_and_numbers(monkeypatch: pytest.MonkeyPatch, scale: Any) -> None:
    """Of packed heads of 80 columns, which tiles of 128 read and write by boxes of 128 bytes."""
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU
    monkeypatch.setattr(hopper_fp8.driver, "enter", lambda index: None)
    monkeypatch.setattr(hopper_fp8.nvrtc, "loaded", lambda program, c, index: None)
    monkeypatch.setattr(hopper_fp8, "launch_cuda", lambda *args: given.append(args))
    q, k, v = (
        torch.randn(2, heads, length, 80, dtype=torch.float16)
        for heads, length in ((8, 20), (2, 300), (2, 300))
    )
    heads, mask = sk.quantize_heads(q, k, v, scale, rows=192), BlockMask.causal(q_len=20, kv_len=300)
    p = AttendedFp8(*heads, mask, return_lse=True).problem(H200)
    c = next(c for c in KERNEL.configs(p) if c.pack == 4 and c.groups == 2 and not c.split)
    call = AttentionCall(
        *heads, mask, 1.0, torch.empty(2, 8, 20, 80, dtype=torch.float16), torch.empty(2, 8, 20)
    )
    KERNEL.launch(c, KERNEL.prepare(p, c, mask), call)
    ((_, _, threads, _, _, (of_q, of_k, of_v, of_o, params), owners),) = given
    assert threads == 384
    assert (of_q.size, of_q.box, of_q.stride, of_q.outer) == (
        (80, 4, 20, 2, 2), (128, 4, 16, 1, 1), 1600, (80, 6400, 12800),
    )  # fmt: skip
    assert (of_k.size, of_k.box) == ((80, 300, 2, 2), (128, c.keys, 1, 1))
    assert (of_v.size, of_v.box) == ((304, 80, 2, 2), (c.keys, 128, 1, 1))
    assert (of_o.dtype, of_o.box) == (torch.float16, (64, 4, 16, 1, 1))
    assert (params.group, params.kv_len) == (4, 300)
    assert params.of_k == (2 if scale == "block" else 1)
    rows = 192 if scale == "block" else hopper_fp8.WHOLE_HEAD
    for key in (0, 191, 192, 299, 2**29 - 1):
        assert key // 64 * params.per_k >> 40 == key // rows
    assert {x.data_ptr() for x in owners} >= {params.tiles, params.q_scale, params.lse, params.v_scale}


def test_operands_are_fewer_bytes_than_those_of_bf16() -> None:
    for dim, block in product((32, 64, 128), BLOCKS):
        p = problem(dim, block=block)
        assert p.compulsory_bytes < problem(dim, block=block, dtype="bf16").compulsory_bytes


def drawn(heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in bf16, of 128 columns."""
    q, k, v = torch.randn(3, 1, heads, length, 128, device="cuda", dtype=torch.bfloat16).unbind()
    return q, k, v


@gpu
@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("spread", [8, 60, 160])
def test_scales_of_values_that_lie_far_apart(rows: int, spread: int) -> None:
    """Up to 2^80 above and below their own: far enough that not every one can be the unit of a tile's sums."""
    torch.manual_seed(seed := fresh())
    heads, mask = sk.quantize_heads(*drawn(12, 3000), "block", rows=rows), causal("cuda")
    factor = torch.exp2((torch.rand_like(heads[2].scale) - 0.5) * spread)
    heads = (heads[0], heads[1], replace(heads[2], scale=heads[2].scale * factor))
    out, lse = attend(KERNEL, *heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse)
    assert gate.passed, f"seed {seed}: {gate}"


@gpu
def test_outputs_in_both_dtypes_in_one_process() -> None:
    seed = fresh()
    for dtype in (*LOW, *LOW):
        q, k, v, mask = AttentionCase("causal", causal, dims=(64, 64)).make("cuda", dtype, seed)
        heads = sk.quantize_heads(q, k, v, "block")
        out, lse = attend(KERNEL, *heads, mask)
        gate = check_attention_fp8(*heads, mask, out, lse)
        assert gate.passed, f"{dtype}, seed {seed}: {gate}"


@gpu
def test_sums_of_long_sequences_do_not_lose_bits() -> None:
    """Positive values over 32K keys: a sum that stayed in the tensor core would be wrong by percents."""
    torch.manual_seed(fresh())
    q, k, v = drawn(2, 32768)
    heads = sk.quantize_heads(q, k, v.abs())
    mask = BlockMask.full(q_len=32768, kv_len=32768, device="cuda")
    out, lse = attend(KERNEL, *heads, mask)
    gate = check_attention_fp8(*heads, mask, out, lse, rows=[0, 17, 255])
    assert gate.passed, gate
    assert gate.error < 5e-3, gate


@gpu
@pytest.mark.parametrize("scale", ["head", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantized_heads_have_the_bits_of_the_cpu(dtype: torch.dtype, scale: Any) -> None:
    torch.manual_seed(fresh())
    for length, dim in ((1, 16), (100, 48), (333, 128), (64, 320)):
        x = [torch.randn(2, length, 3, dim, device="cuda").to(dtype).transpose(1, 2) for _ in range(3)]
        x[0] = x[0] * torch.logspace(-8, 3, 3, device="cuda")[:, None, None].to(dtype)
        here = sk.quantize_heads(x[0], x[1], x[2], scale, rows=64)
        q, k, v = (each.cpu() for each in x)
        there = sk.quantize_heads(q, k, v, scale, rows=64)
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.scale.cpu(), b.scale)
            assert torch.equal(a.values.cpu().view(torch.uint8), b.values.view(torch.uint8))


@gpu
def test_calls_repeat_without_a_sync_and_in_a_graph(no_sync: Any) -> None:
    torch.manual_seed(fresh())
    heads = sk.quantize_heads(*drawn(4, 512))
    mask = BlockMask.causal(512, device="cuda")
    wanted = sk.attention(*heads, mask)
    torch.cuda.synchronize()
    with no_sync():
        repeated = [sk.attention(*heads, mask) for _ in range(5)]
    assert all(torch.equal(each, wanted) for each in repeated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(*heads, mask)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
