"""The choice of a kernel, what the planner says about it, and what a plan refuses."""

import json
import re
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import CPU, H200
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine import table as kernels
from sparsek.engine.plan.plan import Plan, bound_seconds
from sparsek.engine.plan.select import config_fields, given_config, select
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.kernels.spmm.cpu import CpuConfig
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.spmm import SpmmPlan
from tests.problems import changed, spmm_problem

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Choice:
    """A config of a stub."""

    width: int = 8


@dataclass
class Stub:
    """A kernel that answers what it is told."""

    name: str
    time: float = 1.0
    why: tuple[str, ...] = ()

    def why_not(self, p: SpmmProblem) -> list[str]:
        return list(self.why)

    def default(self, p: SpmmProblem) -> Choice:
        return Choice()

    def configs(self, p: SpmmProblem) -> Iterable[Choice]:
        return [Choice(8), Choice(16)]

    def seconds(self, p: SpmmProblem, c: Choice) -> float:
        return self.time / c.width * 8

    def prepare(self, p: SpmmProblem, c: Choice, a: BSR) -> None:
        raise AssertionError("select prepares nothing")

    def launch(self, c: Choice, work: Any, a: BSR, b: torch.Tensor, out: torch.Tensor) -> None:
        out.fill_(c.width)


SQUARE = spmm_problem(8192, 8192, 8192, (128, 128), 512, "bf16", H200, row_max=8)


def stubbed(p: SpmmProblem, table: Iterable[Stub], **more: Any) -> Plan:
    return SpmmPlan(p, select(p, table, **more), ready=False, pattern=lambda: None)


def test_the_smallest_prediction_wins():
    chosen, config, _ = select(SQUARE, [Stub("slow", 3.0), Stub("fast", 1.0), Stub("middle", 2.0)])
    assert (chosen.name, config) == ("fast", Choice(8))


def test_the_order_of_the_table_breaks_ties():
    for names in (("one", "two"), ("two", "one")):
        assert select(SQUARE, [Stub("slow", 2.0), *map(Stub, names)])[0].name == names[0]


def test_a_kernel_that_cannot_run_is_passed_over_however_fast():
    plan = stubbed(SQUARE, [Stub("fast", 0.1, ("not here",)), Stub("slow", 2.0)])
    assert plan.kernel == "slow"
    assert [(c.name, c.why_not) for c in plan.losers] == [("fast", ("not here",))]


def test_a_named_kernel_is_taken_though_others_are_faster():
    assert select(SQUARE, [Stub("fast", 0.1), Stub("slow", 2.0)], only="slow")[0].name == "slow"


def test_a_named_kernel_never_falls_back_and_says_its_own_reasons():
    table = [Stub("able"), Stub("unable", 0.1, ("too wide", "too old")), Stub("other", why=("too new",))]
    with pytest.raises(Unsupported) as caught:
        select(SQUARE, table, only="unable")
    assert caught.value.reasons == {"unable": ["too wide", "too old"]}
    assert str(caught.value) == "unable cannot run this; able can\n  unable: too wide; too old"


def test_if_no_kernel_can_run_every_reason_of_every_kernel_is_told():
    table = [Stub("one", why=("too wide",)), Stub("two", why=("too old", "too new"))]
    with pytest.raises(Unsupported) as caught:
        select(SQUARE, table)
    assert caught.value.reasons == {"one": ["too wide"], "two": ["too old", "too new"]}
    assert str(caught.value).splitlines() == [
        "no kernel can run this spmm on NVIDIA H200",
        "  one: too wide",
        "  two: too old; too new",
    ]


def test_a_config_goes_to_the_named_kernel_and_is_predicted_with():
    plan = stubbed(SQUARE, [Stub("one", 2.0), Stub("two", 2.0)], only="two", config=Choice(16))
    assert (plan.kernel, plan.config, plan.seconds) == ("two", Choice(16), 1.0)


@pytest.mark.parametrize("config", [Choice(32), CpuConfig(), "wide"], ids=str)
def test_a_config_that_the_kernel_does_not_have_is_refused(config: Any):
    with pytest.raises(
        InvalidInput, match=r"is no config of one for this problem; its default is Choice\(width=8\)"
    ):
        select(SQUARE, [Stub("one")], only="one", config=config)


def test_a_config_is_named_by_its_text_or_by_its_fields():
    for config in ("Choice(width=16)", {"width": 16}, Choice(16)):
        assert select(SQUARE, [Stub("one")], only="one", config=config).config == Choice(16)
    assert select(SQUARE, [Stub("one")], only="one", config={}).config == Choice(8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"width": 32}, "width is 32; in configs of one for this problem it is 8 or 16"),
        ({"width": torch.ones(2)}, "width is a torch.Tensor, .*; in configs of one"),
        ({"depth": 3}, "one has no field 'depth'; its configs have width"),
        ({3: 3}, "one has no field 3; its configs have width"),
        (
            "width 8",
            "is no config of one .*; give a text that `sparsek tune` prints, or some of its fields by name: width",
        ),
    ],
)
def test_a_config_that_is_not_there_names_what_is(config: Any, said: str):
    with pytest.raises(InvalidInput, match=said):
        select(SQUARE, [Stub("one")], only="one", config=config)


def every_config() -> Iterable[tuple[Any, Any, Any]]:
    """Kernels, problems, and all configs: of products, attention and its gradients on an H200, and of a CPU."""
    a = random_bsr(2048, 2048, 128, 0.25, dtype=BF16)
    b, q = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((2048, 512), (1, 4, 1024, 128)))
    mask = sk.BlockMask.causal(1024)
    plans: list[Plan] = [
        sk.plan_spmm(a, b, device="h200"),
        sk.plan_spmm(
            sk.Semi24.from_dense(torch.randn(256, 256, dtype=BF16)), torch.empty(256, 64, dtype=BF16)
        ),
        sk.plan_sddmm(b, b.T, a.pattern, device="h200"),
        sk.plan_spgemm(a, a, device="h200"),
        sk.plan_attention(q, q, q, mask, device="h200"),
        sk.plan_attention_backward(q, q, q, mask, device="h200"),
    ]
    for plan in plans:
        for one in plan.candidates:
            if not one.why_not:
                kernel = kernels.load(one.name)
                yield from (
                    (kernel, plan.problem, each) for each in (one.config, *kernel.configs(plan.problem))
                )


def test_the_text_and_the_json_of_every_config_name_it():
    count = 0
    for kernel, p, config in every_config():
        for given in (config, str(config), json.loads(json.dumps(config_fields(config)))):
            assert given_config(kernel, p, given) == config, (kernel.name, given)
        count += 1
    assert count > 50


def test_fields_that_are_left_out_are_the_kernels_own_or_the_fastest():
    p = sk.plan_spmm(
        random_bsr(2048, 2048, 128, 0.25, dtype=BF16), torch.empty(2048, 512, dtype=BF16, device="meta"),
        device="h200",
    ).problem  # fmt: skip
    kernel = kernels.load("hopper.spmm")
    default = kernel.default(p)
    assert given_config(kernel, p, {"cols": default.cols}) == default
    cols = next(each.cols for each in kernel.configs(p) if each.cols != default.cols)
    found = given_config(kernel, p, {"cols": cols})
    alike = [each for each in kernel.configs(p) if each.cols == cols]
    assert found in alike
    assert kernel.seconds(p, found) == min(kernel.seconds(p, each) for each in alike)
    with pytest.raises(
        InvalidInput, match=f"stages is 99; in configs of hopper.spmm .* with cols {cols} it is "
    ):
        given_config(kernel, p, {"cols": cols, "stages": 99})


def test_explain_tells_choice_roofline_and_why_the_others_lost():
    table = [Stub("fast", 250e-6), Stub("slow", 1.5e-3), Stub("elsewhere", why=("needs sm_100", "needs fp4"))]
    assert stubbed(SQUARE, table).explain().splitlines() == [
        (
            "C = A @ B   A [8192, 8192] bf16, 512 blocks of 128x128 (12.5 % stored), B [8192, 8192] row-major, "
            "on NVIDIA H200"
        ),
        "  kernel     fast: Choice(width=8)",
        "  predicted  250.0 us, 550 TFLOPS useful, 4398 TFLOPS dense-equivalent",
        "  roofline   199.2 us, bound by arithmetic: 137.4 GFLOP in 199.2 us, 285.2 MB in 66.6 us",
        "  not        slow: 1.50 ms, 6.00x the time",
        "  not        elsewhere: needs sm_100; needs fp4",
    ]


def test_explain_of_the_real_table_planned_for_an_h200():
    a = random_bsr(4096, 4096, 128, 0.25, dtype=BF16, seed=0)
    plan = sk.plan_spmm(a, torch.empty(2, 4096, 16, dtype=BF16), device="h200")
    first, kernel, predicted, roofline, *losers = plan.explain().splitlines()
    assert first == (
        "C = A @ B   A [4096, 4096] bf16, 256 blocks of 128x128 (25 % stored), B 2 x [4096, 16] row-major, "
        "on NVIDIA H200"
    )
    assert kernel == f"  kernel     {plan.kernel}: {plan.config}"
    assert re.fullmatch(
        r"  predicted  [\d.]+ us, [\d.]+ TFLOPS useful, [\d.e+]+ TFLOPS dense-equivalent", predicted
    )
    assert roofline == ("  roofline   2.1 us, bound by memory: 0.2684 GFLOP in 0.4 us, 8.914 MB in 2.1 us")
    told = [re.fullmatch(r"  not        ([a-z._]+): (.+)", line) for line in losers]
    names = [match[1] for match in told if match]
    assert sorted([*names, plan.kernel]) == sorted(
        [
            "hopper.spmm",
            "hopper.spmm_paired",
            "hopper.spmm_mma",
            "portable.spmm",
            "portable.spmm_skinny",
            "vendor.dense",
            "cpu.spmm",
            "reference.spmm",
        ]
    )
    assert "  not        cpu.spmm: runs on CPU tensors only" in losers
    assert all(
        match and re.search(r"x the time$|only$|copy of A$|panels of 64, not 16$|not 128x128$", match[2])
        for match in told
    )


def test_the_roofline_of_arithmetic_is_useful_flops_over_the_dense_rate():
    flops = 2 * 512 * 128 * 128 * 8192
    assert SQUARE.useful_flops == flops
    assert SQUARE.dense_flops == 2 * 8192**3 == 8 * flops
    assert bound_seconds(SQUARE) == pytest.approx(flops / 690e12)
    assert bound_seconds(changed(SQUARE, batch=3)) == pytest.approx(3 * flops / 690e12)


def test_the_roofline_of_memory_is_every_byte_once_over_the_copy_bandwidth():
    p = spmm_problem(16384, 16384, 16, (64, 64), 16384, "bf16", H200)
    moved = 16384 * 64 * 64 * 2 + 16 * 2 * 16384 * 2 + 4 * (16384 + 256 + 1)
    assert p.compulsory_bytes == moved
    assert bound_seconds(p) == pytest.approx(moved / 4.28e12)


def test_float32_is_held_to_the_tf32_rate_only_where_tf32_is_allowed():
    p = changed(SQUARE, dtype="fp32")
    assert bound_seconds(p) == pytest.approx(p.useful_flops / 50e12)
    assert bound_seconds(changed(p, tf32=True)) == pytest.approx(p.useful_flops / 350e12)


def test_ragged_sides_count_whole_blocks_in_the_grid_and_true_sides_in_b_and_c():
    p = spmm_problem(100, 70, 10, (64, 32), 3, "fp32", CPU)
    assert p.grid == (2, 3)
    assert p.density == 0.5
    assert p.compulsory_bytes == 3 * 64 * 32 * 4 + 10 * 170 * 4 + 4 * (3 + 3)


def operands(n: int = 40) -> tuple[BSR, torch.Tensor]:
    return random_bsr(128, 96, 32, 0.5, seed=0), torch.randn(96, n)


def test_a_plan_is_frozen():
    plan = sk.plan_spmm(*operands())
    with pytest.raises(FrozenInstanceError):
        plan.kernel = "other"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda a, b: (random_bsr(128, 96, 32, 0.5, seed=1), b), "another pattern of blocks; call plan_spmm"),
        (lambda a, b: (BSR(a.pattern.T, a.values).T, b), "another pattern of blocks"),
        (lambda a, b: (a.T, torch.randn(128, 40)), "another pattern of blocks"),
        (lambda a, b: (a, b[:, :39]), r"fp32 B of 1 x \[96, 40\], row-major; got fp32 B of 1 x \[96, 39\]"),
        (lambda a, b: (a, b[None].expand(2, 96, 40)), r"fp32 B of 1 x .* got fp32 B of 2 x \[96, 40\]"),
        (lambda a, b: (a, torch.randn(40, 96).T), "row-major; got .* col-major"),
        (lambda a, b: (a, torch.randn(96, 80)[:, ::2]), "row-major; got .* strided-major"),
        (lambda a, b: (a.to(dtype=BF16), b.to(BF16)), "multiplies fp32 B .* got bf16"),
        (lambda a, b: (a, torch.randn(96 * 40 + 1)[1:].view(96, 40)), "multiples of 16 bytes"),
        (lambda a, b: (a, torch.randn(96, 43)[:, :40]), "multiples of 16 bytes"),
        (lambda a, b: (a, b[:95]), "B needs 96 rows"),
        (lambda a, b: (a.to_dense(), b), "A or B must be a BSR, .* got Tensor and Tensor"),
    ],
    ids=[
        "pattern",
        "view",
        "transpose",
        "n",
        "batch",
        "col",
        "strided",
        "dtype",
        "start",
        "lead",
        "k",
        "dense",
    ],
)
def test_a_plan_refuses_other_operands(other: Any, text: str):
    a, b = operands()
    plan = sk.plan_spmm(a, b)
    assert plan.problem.aligned
    with pytest.raises(InvalidInput, match=text):
        plan(*other(a, b))


def test_a_plan_refuses_an_out_that_does_not_fit():
    a, b = operands()
    plan = sk.plan_spmm(a, b)
    with pytest.raises(
        InvalidInput, match=r"out must be torch.float32 \[128, 40\] on cpu, got .* \[128, 39\]"
    ):
        plan(a, b, torch.empty(128, 39))
    with pytest.raises(InvalidInput, match="out overlaps the memory of A's values"):
        plan(a, b, a.values.view(-1)[: 128 * 40].view(128, 40))
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        plan(a, b, torch.empty(128, 43)[:, :40])


def operand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


DOUBLES = random_bsr(256, 256, 64, 0.5, dtype=torch.float64)
WIDE = sk.BSR.from_dense(torch.ones(2048, 2048), block=128, keep=0.25)
SLOW: dict[str, tuple[Any, str]] = {
    "attention fp32": (
        lambda: sk.plan_attention(*[operand(torch.float32, 1, 8, 4096, 128)] * 3, device="h200"),
        "reference.attention.* takes fp32: cast to bf16 or fp16 for hopper.attention_fwd",
    ),
    "attention fp64": (
        lambda: sk.plan_attention(*[operand(torch.float64, 1, 8, 4096, 128)] * 3, device="h200"),
        "takes fp64: cast to bf16 or fp16",
    ),
    "attention of odd heads": (
        lambda: sk.plan_attention(*[operand(BF16, 1, 8, 512, 20)] * 3, device="h200"),
        "takes this call; the lines of the others say what each lacks",
    ),
    "spmm": (
        lambda: sk.plan_spmm(DOUBLES, torch.ones(256, 8).double(), device="h200"),
        "reference.spmm.* takes fp64: cast to bf16, fp16 or fp32 for portable",
    ),
    "spmm fp32": (
        lambda: sk.plan_spmm(WIDE, operand(torch.float32, 2048, 4096), device="h200"),
        "portable.spmm is predicted to take longer in fp32: cast to bf16 or fp16 for hopper.spmm",
    ),
    "spgemm": (
        lambda: sk.plan_spgemm(DOUBLES, DOUBLES, device="h200"),
        "to bf16 or fp16 for hopper.spgemm, to fp32 for portable.spgemm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_the_first_line_says_that_a_reference_runs_on_a_gpu_and_what_to_do(case: tuple[Any, str]):
    plan, said = case[0](), case[1]
    first = plan.explain().splitlines()[0]
    assert plan.kernel.startswith("reference.")
    assert first.startswith("slow: ")
    assert re.search(said, first)
    assert "slow" not in repr(plan)


def test_a_reference_that_is_named_or_runs_on_a_cpu_is_not_called_slow():
    b = torch.ones(256, 8).double()
    for device in ("h200", None):
        assert "slow" not in sk.plan_spmm(DOUBLES, b, kernel="reference.spmm", device=device).explain()
