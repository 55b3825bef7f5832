"""Products of unpacked 2:4 matrices: which kernel multiplies, predictions, `explain()`; cases on a GPU."""

import dataclasses
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from tests.ops.storages import TWO_FOUR, matrix
from tests.problems import A100, changed, fp8_problem, spmm_problem

pytest.importorskip("triton")

from sparsek.engine.planning import choose
from sparsek.products.kernels.spmm import unpacked
from sparsek.products.plan.problems import SpmmProblem

BIG: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "card": H200, "two_four": True}
BLOCKS: dict[str, Any] = {"block": (128, 128), "nnzb": 512, "row_max": 8}
IN_FP8 = BIG | {"dtype": "e4m3"}
SEMI24 = spmm_problem(**BIG)
BSR24 = spmm_problem(**BIG, **BLOCKS)
ALL = [SEMI24, BSR24, fp8_problem(**IN_FP8), fp8_problem(**IN_FP8, **BLOCKS)]


def of(p: SpmmProblem) -> Any:
    return unpacked.KERNELS[f"unpacked.{p.a.kind}"]


@pytest.mark.parametrize("p", ALL, ids=lambda p: p.a.kind)
def test_hopper_multiplies_where_it_can_and_portable_kernels_elsewhere(p: SpmmProblem):
    suffix = "_fp8" if p.a.quantized else ""
    assert of(p).default(p).kernel == f"hopper.spmm{suffix}"
    if not p.a.quantized:
        assert (
            of(p).default(changed(p, transposed=True, out_layout="col", b_layout="col")).kernel
            == "hopper.spmm"
        )
        assert of(p).default(changed(p, dtype="fp32")).kernel == "portable.spmm"
        assert of(p).default(changed(p, card=A100)).kernel == "portable.spmm"
        assert of(p).default(changed(p, n=1, aligned=False)).kernel == "portable.spmm_skinny"
    assert of(p).default(changed(p, n=8191, aligned=False)).kernel == f"portable.spmm{suffix}"


def test_a_semi24_is_multiplied_as_all_blocks_of_its_shape():
    q = unpacked.whole(changed(SEMI24, m=200, k=136, n=8))
    assert (q.a.kind, q.block, q.nnzb, q.row_max, q.grid) == ("bsr", (128, 128), 4, 2, (2, 2))
    assert unpacked.whole(BSR24).stats == BSR24.stats


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("p", ALL[:2], ids=lambda p: p.a.kind)
def test_a_problem_with_slopes_has_configs_though_the_planner_chooses_no_such_kernel(
    p: SpmmProblem, dtype: str
):
    q = changed(p, activation="gelu", slope=True, dtype=dtype)
    assert of(p).why_not(q) == []
    assert of(p).default(q) == of(p).default(dataclasses.replace(q, slope=False))
    assert of(p).default(q) in list(of(p).configs(q))
    with pytest.raises(sk.Unsupported, match="the slope of the activation is a second one"):
        choose(q, of(p).name)


def test_predictions_grow_with_work_and_have_the_time_to_unpack():
    for p in ALL:
        for c in [of(p).default(p), *list(of(p).configs(p))[-2:]]:
            seconds, q = of(p).seconds(p, c), unpacked.whole(p)
            inner = unpacked.KERNELS_OF_BSR[c.kernel].seconds(q, c.config)
            moved = (1.5 * q.stored * (1 if p.a.quantized else 2) + p.stored / 4) / H200.bandwidth
            assert moved < seconds - inner < (2.4 if p.a.quantized else 1.2) * moved + 5e-6
            assert of(p).seconds(changed(p, n=2 * p.n), c) > 1.7 * seconds
            assert seconds > p.useful_flops / (H200.tflops[p.rate_name] * 1e12)


def test_the_gradient_of_a_layer_is_predicted_near_a_dense_product():
    p = changed(SEMI24, transposed=True, out_layout="col", b_layout="col")
    assert of(p).seconds(p, of(p).default(p)) < 1.15 * p.dense_flops / (H200.sustained("bf16") * 1e12)


def test_explain_names_the_workspace_its_time_and_the_kernel_that_multiplies():
    w = sk.Semi24.from_dense(torch.randn(1024, 2048).bfloat16())
    plan = sk.plan_spmm(torch.empty(512, 1024, dtype=torch.bfloat16, device="meta"), w, device="h200")
    assert plan.kernel == "unpacked.semi24"
    text = plan.explain()
    assert "A unpacked, then " in text
    assert "unpacks A in each call, into a workspace of 4.194 MB: " in text
    assert "a NaN or Inf in a row of B reaches every row of C" in text


def test_a_config_of_any_of_the_kernels_can_be_named():
    w = sk.Semi24.from_dense(torch.randn(1024, 2048).bfloat16())
    x = torch.empty(512, 1024, dtype=torch.bfloat16, device="meta")
    plan = sk.plan_spmm(x, w, device="h200")
    for c in {each.kernel: each for each in plan.implementation.configs(plan.problem)}.values():
        assert sk.plan_spmm(x, w, device="h200", kernel=plan.kernel, config=c).config == c
    wrong = dataclasses.replace(plan.config, kernel="portable.spmm_skinny")
    with pytest.raises(sk.InvalidInput, match=r"is no config of unpacked\.semi24"):
        sk.plan_spmm(x, w, device="h200", kernel=plan.kernel, config=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_calls_repeat_their_bits_without_a_sync_and_a_graph_reads_the_values_of_its_replay(
    kind: str, no_sync: Any
):
    a, x = matrix(kind, device="cuda", m=256, k=384), torch.randn(64, 256, device="cuda").bfloat16()
    name = f"unpacked.{kind}"
    first = sk.spmm(x, a, kernel=name)
    with no_sync():
        again = [sk.spmm(x, a, kernel=name) for _ in range(3)]
    assert all(torch.equal(each, first) for each in again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sk.spmm(x, a, kernel=name)
    a.values.mul_(-2)
    graph.replay()
    assert torch.equal(captured, -2 * first)
    assert torch.equal(sk.spmm(x, a, kernel=name), -2 * first)
