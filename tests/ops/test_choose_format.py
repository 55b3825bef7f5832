"""Which way to store a weight the planner chooses, what it says of the others, and what it refuses."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.clock import Times
from sparsek.core.device import CPU, H200, Card
from sparsek.engine.plan.dense import BOOST, dense_seconds
from sparsek.products.ops import choose as choose_format
from sparsek.products.ops import weight_formats as linear_formats
from sparsek.products.ops.choose import Option, Requirement
from sparsek.products.ops.weight_formats import FORMATS, Format, WeightFormat

BF16 = torch.bfloat16
PLAIN = ("dense", "semi24", "bsr", "bsr24")


def operands(
    n: int = 256, k: int = 512, tokens: int = 64, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor]:
    return torch.randn(n, k).to(dtype), torch.randn(tokens, k).to(dtype)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, float]], None]:
    """`clock({place: seconds})`: rounds take these times, and every call is made once."""

    def set_times(seconds: Mapping[int, float]) -> None:
        def rounds(calls: Mapping[str, Callable[[], object]], **options: Any) -> dict[str, Times]:
            for call in calls.values():
                call()
            return {name: Times.of([seconds.get(int(name), 1.0) * 1e3]) for name in calls}

        monkeypatch.setattr(choose_format, "time_rounds", rounds)

    return set_times


def test_every_combination_is_considered_and_the_fastest_chosen() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, keep=(0.5, 0.25), block=[64, (64, 128)], formats=PLAIN, min_norm=0)
    names = [option.name for option in plan.options]
    assert names == [
        "dense", "2:4",
        "BSR 64 50 %", "BSR 64 25 %", "BSR 64x128 50 %", "BSR 64x128 25 %",
        "BSR24 64 50 %", "BSR24 64 25 %", "BSR24 64x128 50 %", "BSR24 64x128 25 %",
    ]  # fmt: skip
    assert plan.choice.seconds == min(option.seconds for option in plan.options)
    assert not plan.is_measured
    assert plan.card == H200
    assert [option.stored for option in plan.options[:4]] == [1.0, 0.5, 0.5, 0.25]
    assert len(plan.losers) == len(names) - 1


def test_without_a_bound_only_what_loses_nothing_is_chosen() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, keep=0.25, block=64)
    assert plan.choice.name == "dense"
    assert [option.name for option in plan.options if option.lossless] == ["dense"]
    lines = plan.explain().splitlines()
    assert lines[2] == (
        "  decided    by predicted time, of options that lose nothing: no max_error= and no min_norm= was given"
    )
    assert lines[4].startswith("* dense ")
    assert all(line.endswith("  LOSSY") for line in lines[5:])
    with pytest.raises(sk.Unsupported, match=r"no option runs and loses nothing; .* min_norm=0") as caught:
        sk.choose_format(x, w, keep=0.25, block=64, formats="bsr")
    assert caught.value.reasons == {"BSR 64 25 %": ["LOSSY"]}


def test_blocks_are_chosen_in_block_rows_unless_told_otherwise() -> None:
    w, x = operands()
    options = {"keep": 0.25, "block": 64, "formats": ("bsr", "bsr24"), "min_norm": 0.0}
    for given in ("row", "global"):
        plan = sk.choose_format(x, w, scope=given, **options)
        assert {option.form.scope for option in plan.options} == {given}
        kind = sk.BSR if plan.choice.form.base == "bsr" else sk.BSR24
        assert plan.weight.pattern.same_as(kind.from_dense(w, 64, keep=0.25, scope=given).pattern)
    default = sk.choose_format(x, w, **options)
    assert default.weight.pattern.same_as(sk.BSR24.from_dense(w, 64, keep=0.25).pattern)
    assert {option.form.scope for option in default.options} == {"row"}
    with pytest.raises(sk.InvalidInput, match="scope is 'column'; use one of global, row"):
        sk.choose_format(x, w, scope="column", **options)  # type: ignore[arg-type]


def test_zeros_that_are_not_stored_lose_nothing() -> None:
    w, x = operands()
    w[:, 64:] = 0
    plan = sk.choose_format(x, w, keep=(0.125, 0.0625), block=64, formats=PLAIN)
    lossless = {option.name for option in plan.options if option.lossless}
    assert lossless == {"dense", "BSR 64 12.5 %"}
    assert plan.choice.name in lossless
    assert torch.equal(plan.weight if isinstance(plan.weight, Tensor) else plan.weight.to_dense(), w)


def test_a_linear_layer_stands_for_its_weight() -> None:
    layer = torch.nn.Linear(512, 256, dtype=BF16)
    plan = sk.choose_format((64, 512), layer, formats=PLAIN)
    right = sk.choose_format((64, 512), layer.weight.detach(), formats=PLAIN)
    assert plan.options == right.options
    assert not plan.weight.requires_grad
    assert torch.equal(plan.weight, layer.weight)


def test_formats_are_those_that_have_kernels() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, keep=0.5, block=64)
    assert [option.form.format for option in plan.options] == list(FORMATS)
    assert all(option.kernel for option in plan.options if not option.why_not)


def test_norms_and_errors_are_those_of_the_stored_weight() -> None:
    w, x = operands(dtype=torch.float32)
    for option in sk.choose_format(x, w, keep=0.25, block=64).options:
        stored = option.form.convert(w)
        dense = stored if isinstance(stored, Tensor) else stored.to_dense()
        exact = x.double() @ w.double().T
        off = sk.linear(x, stored, kernel=option.form.kernel).double() - exact
        assert option.error == pytest.approx(float(off.norm() / exact.norm()), rel=1e-2, abs=1e-6)
        assert option.kept_norm == pytest.approx(float(dense.norm() / w.norm()), rel=1e-3)


def test_predictions_are_those_of_the_plans_of_each_format() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, keep=0.5, block=64, formats=PLAIN)
    dense, semi24, bsr, bsr24 = plan.options
    assert (dense.kernel, dense.predicted) == ("torch", dense_seconds(H200, "bf16", 64, 256, 512))
    expected = sk.plan_spmm(x, sk.BSR.from_dense(w, 64, keep=0.5).T, device="h200")
    assert (bsr.kernel, bsr.predicted) == (expected.kernel, expected.seconds)
    for option, stored in ((semi24, sk.Semi24.from_dense(w)), (bsr24, sk.BSR24.from_dense(w, 64, keep=0.5))):
        made = linear_formats.plan_of(x, stored, "h200")
        assert (option.kernel, option.predicted) == (made.kernel, made.seconds)


def test_a_bound_on_the_error_or_the_norm_decides_what_may_be_chosen() -> None:
    w, x = operands()
    free = sk.choose_format(x, w, keep=0.25, block=64, formats=PLAIN, min_norm=0)
    assert free.choice.form.keep == 0.25
    assert free.explain().splitlines()[1].endswith(" as fast as dense, LOSSY")
    by_error = sk.choose_format(x, w, keep=0.25, block=64, formats=PLAIN, max_error=0.5)
    assert by_error.choice.name in ("dense", "2:4")
    assert by_error.choice.error is not None
    assert by_error.choice.error <= 0.5
    by_norm = sk.choose_format(x, w, keep=0.25, block=64, formats=PLAIN, min_norm=0.99)
    assert by_norm.choice.name == "dense"


def test_a_bound_that_nothing_holds_says_what_each_option_lacks() -> None:
    w, x = operands()
    with pytest.raises(sk.Unsupported) as caught:
        sk.choose_format(x, w, keep=0.25, block=64, formats=PLAIN, max_error=1e-9)
    assert "no option has an error of at most 1e-09" in str(caught.value)
    assert set(caught.value.reasons) == {"dense", "2:4", "BSR 64 25 %", "BSR24 64 25 %"}
    assert re.match(r"error 0\.\d+ is not within 1e-09", caught.value.reasons["2:4"][0])


def test_measured_times_decide_over_predicted_ones(clock: Callable[..., None]) -> None:
    w, x = operands(dtype=torch.float32)
    clock({0: 3e-4, 1: 1e-4, 2: 2e-4})
    formats = ("dense", "semi24", "bsr")
    plan = sk.choose_format(x, w, keep=0.25, block=64, formats=formats, device="cpu", min_norm=0)
    assert plan.is_measured
    assert plan.card == CPU
    assert [option.measured for option in plan.options] == pytest.approx([3e-4, 1e-4, 2e-4])
    assert plan.choice.name == "2:4"
    assert isinstance(plan.weight, sk.Semi24)
    lines = plan.explain().splitlines()
    assert (
        lines[1] == "  choice     2:4 by reference.semi24: 100.0 us measured, 3.00x as fast as dense, LOSSY"
    )
    assert lines[2] == "  decided    by measured time, of options with at least 0 of the norm kept"


def test_on_a_cpu_times_are_really_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_format, "INNER_MS", 0.1)
    w, x = operands(dtype=torch.float32)
    plan = sk.choose_format(x, w, keep=0.25, block=64, formats=("dense", "bsr"), device="cpu", min_norm=0)
    times = [option.measured for option in plan.options]
    assert all(time is not None and 0 < time < 1 for time in times)
    assert plan.choice.measured == min(time for time in times if time is not None)


@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_multiplies_with_bias_activation_and_residual(form: Format) -> None:
    w, x = operands(dtype=torch.float32)
    plan = sk.choose_format(x, w, keep=0.5, block=64, formats=[form], device="cpu", min_norm=0)
    bias, rest = torch.randn(256), torch.randn(3, 7, 256)
    some = torch.randn(3, 7, 512)
    y = plan(some, bias, "relu", rest)
    assert torch.equal(y, sk.linear(some, plan.weight, bias, "relu", rest, kernel=plan.choice.form.kernel))
    stored = plan.weight if isinstance(plan.weight, Tensor) else plan.weight.to_dense()
    near = torch.relu(some @ stored.T + bias) + rest
    assert (y - near).norm() / near.norm() < (0.05 if form.endswith("fp8") else 1e-5)


def test_the_table_tells_what_each_option_takes_keeps_and_errs() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, keep=0.25, block=[64, 512], formats=PLAIN, max_error=0.5)
    lines = plan.explain().splitlines()
    assert lines[0] == "y = x @ W.T   x [64, 512], W [256, 512] bf16, on NVIDIA H200"
    assert lines[2] == "  decided    by predicted time, of options with an error of at most 0.5"
    assert lines[3].split() == ["option", "kernel", "predicted", "stored", "norm", "error", "why", "not"]
    assert sum(line.startswith("* ") for line in lines) == 1
    assert re.search(r"^  BSR 64 25 % .*  25 % .* error 0\.\d+ is not within 0\.5$", "\n".join(lines), re.M)
    assert "  not        BSR 512 25 %: W [256, 512] is smaller than a block" in lines


@pytest.mark.parametrize("make", ["bsr", "semi24", "bsr24", "bsr_fp8"])
def test_a_weight_that_is_stored_already_is_the_only_option(make: str) -> None:
    w, x = operands()
    stored = WeightFormat(make, 0 if make == "semi24" else 64, 0.5).convert(w)
    plan = sk.choose_format(x, stored)
    (option,) = plan.options
    assert plan.weight is stored
    assert (option.error, option.kept_norm, option.form.format) == (None, None, make)
    assert sk.choose_format((64, 512), stored).choice.predicted == option.predicted
    with pytest.raises(sk.Unsupported, match="an error of at most"):
        sk.choose_format(x, stored, max_error=0.5)


def test_a_shape_stands_for_x_and_takes_no_memory_to_predict() -> None:
    w, x = operands()
    plan = sk.choose_format((4, 16, 512), w, formats=PLAIN, keep=0.5, block=64)
    given = sk.choose_format(x, w, formats=PLAIN, keep=0.5, block=64)
    assert plan.tokens == given.tokens == 64
    assert [each.predicted for each in plan.options] == [each.predicted for each in given.options]
    assert sk.choose_format((2**30, 512), w, formats=["dense", "semi24"]).tokens == 2**30


def test_the_same_question_has_the_same_answer() -> None:
    w, _ = operands()
    first, second = (sk.choose_format((64, 512), w, keep=0.5, block=64) for _ in range(2))
    assert first.options == second.options
    assert first.choice == second.choice


def test_an_option_without_a_fast_kernel_says_why() -> None:
    w, x = operands(dtype=torch.float64)
    plan = sk.choose_format(x, w, keep=0.5, block=64, formats=PLAIN)
    why = {option.name: option.why_not for option in plan.options if option.why_not}
    assert plan.choice.name == "dense"
    assert "to specify, not to be fast" in " ".join(why["2:4"])


def test_a_block_sparse_layer_is_refused_by_the_name_of_its_weight() -> None:
    layer = sk.nn.BlockSparseLinear.from_dense(torch.nn.Linear(512, 256, dtype=BF16), block=64, keep=0.25)
    with pytest.raises(sk.InvalidInput, match=r"got BlockSparseLinear; pass layer.weight$"):
        sk.choose_format((64, 512), layer)  # type: ignore[arg-type]
    assert sk.choose_format((64, 512), layer.weight).choice.name == "BSR 64 25 %"
    with pytest.raises(sk.InvalidInput, match=r"got ReLU$"):
        sk.choose_format((64, 512), torch.nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"formats": ["csr"]}, "no format is called 'csr'; known: dense"),
        ({"x": torch.zeros(3, 4)}, "the last dim of x must be 512"),
        ({"x": torch.zeros(0, 512)}, "no side 0"),
        ({"x": torch.zeros(3, 512, dtype=torch.float32)}, "of one dtype on one device"),
        ({"x": ()}, "the last dim of x"),
        ({"x": 12}, r"or its shape, like \(4096, 512\); got 12"),
        ({"max_error": -0.1}, "max_error is -0.1; it must be a finite number, 0 or greater"),
        ({"max_error": math.nan}, "max_error is nan"),
        ({"min_norm": 93}, "min_norm is 93; it must be a finite number from 0 to 1"),
        ({"device": "b200"}, "'b200'; known: h200"),
        ({"W": torch.zeros(4)}, r"W must be \[N, K\]"),
        ({"W": torch.zeros(4, 512, dtype=torch.int8)}, "the dtype of W is torch.int8; use one of"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    w, x = operands()
    with pytest.raises(sk.InvalidInput, match=said):
        sk.choose_format(**{"W": w, "x": x, **change})


@pytest.mark.parametrize("formats", [None, "semi24"])
def test_columns_stand_under_one_another(formats: Format | None) -> None:
    """In fp32, for few tokens, a kernel with a long name runs."""
    x, w = torch.randn(8, 256), torch.randn(256, 256)
    plan = sk.choose_format(x, w, block=64, keep=0.5, formats=formats, min_norm=0)
    head, *rows = plan.explain().splitlines()[3:]
    for row, option in zip(rows, (each for each in plan.options if not each.why_not), strict=False):
        assert row[head.index("kernel") :].startswith(f"{option.kernel} ")
        assert row[: head.index("predicted") + len("predicted")].endswith(" us")


def test_one_format_needs_no_list_and_a_plan_is_told_in_a_line() -> None:
    w, x = operands()
    plan = sk.choose_format(x, w, formats="semi24", min_norm=0)
    assert [option.name for option in plan.options] == ["2:4"]
    assert repr(plan).startswith(f"FormatChoice(W [{w.shape[0]}, {w.shape[1]}] bf16, 2:4 by ")
    assert "predicted on NVIDIA H200, of 1 options)" in repr(plan)
    assert len(repr(plan)) < 160


def test_times_of_a_device_are_measured_where_w_is() -> None:
    w, x = operands()
    with pytest.raises(sk.InvalidInput, match=r"W\.to\('cuda'\)|no GPU|CUDA"):
        sk.choose_format(x, w, device="cuda")


def test_a_bound_holds_nothing_that_is_not_known() -> None:
    option = Option(WeightFormat("bsr", 64, 0.5))
    assert Requirement().faults(option) == ["LOSSY"]
    assert Requirement().faults(replace(option, lossless=True)) == []
    assert Requirement(0.1, 0.9).faults(option) == [
        "error unknown is not within 0.1",
        "it keeps unknown of the norm, not 0.9",
    ]


def dense(m: int, n: int, k: int, card: Card = H200) -> float:
    return dense_seconds(card, "bf16", m, n, k)


def test_the_dense_model_agrees_with_what_was_measured() -> None:
    """benchmarks/results/h200/spmm.jsonl: cuBLAS at these sizes, in ms."""
    for (m, n, k), ms in {
        (8192, 8192, 8192): 1.60,
        (16384, 16, 16384): 0.131,
        (5000, 3000, 7000): 0.321,
        (4096, 4096, 11008): 0.518,
    }.items():
        assert dense(m, n, k) * 1e3 == pytest.approx(ms, rel=0.1)


def test_dense_time_grows_with_every_side_and_never_falls_below_that_of_boost_clocks_or_memory() -> None:
    for m, n, k in ((16, 4096, 4096), (256, 2048, 8192), (4096, 4096, 4096)):
        assert dense(m, n, k) <= dense(2 * m, n, k)
        assert dense(m, n, k) <= dense(m, 2 * n, k)
        assert dense(m, n, k) < dense(m, n, 2 * k)
        arithmetic, memory = 2.0 * m * n * k / (690e12 * BOOST), 2.0 * (m * k + n * k + m * n) / 4.28e12
        assert dense(m, n, k) >= max(arithmetic, memory)
    assert dense(0, 16, 16) == H200.launch_seconds
    assert dense(16, 16, 16, CPU) > 0


@pytest.mark.gpu
def test_on_a_gpu_every_option_is_measured_and_the_choice_is_the_fastest() -> None:
    w = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    x = torch.randn(1024, 2048, device="cuda", dtype=BF16)
    plan = sk.choose_format(x, w, keep=0.125, block=128, min_norm=0)
    able = [option for option in plan.options if not option.why_not]
    assert {"dense", "semi24", "bsr", "bsr24"} <= {option.form.format for option in able}
    assert all(option.measured is not None and option.measured > 0 for option in able)
    assert plan.choice.measured == min(option.seconds for option in able)
    y, near = plan(x).double(), x.double() @ w.double().T
    assert float((y - near).norm() / near.norm()) == pytest.approx(plan.choice.error, rel=0.05)
