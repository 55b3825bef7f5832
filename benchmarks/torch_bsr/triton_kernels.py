"""Documented failures of the Triton kernels behind torch.sparse's BSR: tuning, parameters, rate."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from benchmarks.torch_bsr.attempts import Answer, Case, Measured, Operands
from sparsek.core.clock import time_rounds
from sparsek.core.device import CARDS, card_of

TRITON = "torch runs its Triton kernels there only"


def _triton_ops() -> Any:
    from torch.sparse import _triton_ops  # needs Triton, so it is imported on a GPU only

    return _triton_ops


class TuningTable(Case):
    """tuned parameters for the cards of today"""

    name = "tuning-table"
    where = "PR #112737"

    def theirs(self, o: Operands) -> Any:
        from torch.sparse import _triton_ops_meta as meta

        cards = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"]
        key = (4096, 4096, "*", 128, 128, True, False, True)
        found = {card: meta.get_meta("bsr_dense_addmm", key, device_name=card) for card in cards}
        tuned = [card for card, parameters in found.items() if parameters]
        text = f"blocks of 128 in fp16 are tuned for {', '.join(tuned) or 'none'} of {len(cards)} cards"
        return Answer("works" if len(tuned) == len(cards) else "warns", text)

    def ours(self, o: Operands) -> Any:
        a, x = sk.random_bsr(4096, 4096, 128, 0.25, dtype=torch.float16), o.x.new_empty(4096, 4096).half()
        plans = [
            sk.plan_spmm(a.to(x.device), x, device=name) for name, card in CARDS.items() if card.measured
        ]
        each = "; ".join(f"{plan.problem.card.name}: {plan.config}" for plan in plans)
        return Answer("works", f"the planner predicts for any card, from rates measured on {each}")


class TuningWarning(Case):
    """a @ x on this card, without a warning"""

    name = "tuning-warning"
    where = "PR #132646"
    needs_gpu = TRITON
    sizes = (1280, 1024, 1536)  # torch warns once per shape, so no other entry has this one
    block = (64, 64)

    def theirs(self, o: Operands) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = o.a @ o.x
        about = [str(each.message) for each in caught if "non-optimal" in str(each.message)]
        return Measured(result, f"warns: {about[0][:80]}" if about else "", "warns" if about else None)

    def ours(self, o: Operands) -> Any:
        plan = sk.plan_spmm(o.a, o.x)
        return Measured(plan(o.a, o.x), f"{plan.kernel} on {card_of(o.x.device).name}")

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class NumStages(Case):
    """a @ x with num_stages of 1 to 4"""

    name = "num-stages"
    where = "#113587"
    needs_gpu = TRITON
    sizes = (256, 256, 256)
    block = (16, 16)

    def theirs(self, o: Operands) -> Any:
        multiply, results = _triton_ops().bsr_dense_addmm, []
        for stages in (1, 2, 3, 4):
            meta = {"SPLIT_N": 4, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": 4}
            out = torch.full_like(o.dy, float("nan"))
            results.append(multiply(out, o.a, o.x, alpha=1, beta=0, out=out, meta=meta))
        return torch.stack(results)

    def ours(self, o: Operands) -> Any:
        plan = sk.plan_spmm(o.a, o.x)
        configs = list(plan.implementation.configs(plan.problem))
        some = configs[:: max(1, len(configs) // 4)][:4]
        plans = [sk.plan_spmm(o.a, o.x, kernel=plan.kernel, config=config) for config in some]
        results = [each(o.a, o.x) for each in plans]
        return torch.stack((results * 4)[:4])

    def dense(self, o: Operands) -> Tensor:
        return (o.a @ o.x).expand(4, -1, -1)


class TuningIgnored(Case):
    """parameters that the caller hands to bsr_dense_mm"""

    name = "tuning-ignored"
    where = "_triton_ops.py"
    needs_gpu = TRITON
    block = (32, 32)

    def theirs(self, o: Operands) -> Any:
        unknown = "no_such_parameter"
        try:
            result = _triton_ops().bsr_dense_mm(o.a, o.x, meta={unknown: 1})
        except Exception as refusal:
            if unknown not in str(refusal):
                raise
            return Answer("works", f"meta= is read: {str(refusal)[:80]}")
        return Measured(result, "meta= is accepted and never read", "warns")

    def ours(self, o: Operands) -> Any:
        plan = sk.plan_spmm(o.a, o.x)
        again = sk.plan_spmm(o.a, o.x, kernel=plan.kernel, config=plan.config)
        return Measured(again(o.a, o.x), f"config= is used as given: {again.config}")

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class OutTransposed(Case):
    """a @ x written to a column-major out"""

    name = "out-transposed"
    where = "#113754"
    needs_gpu = TRITON

    def theirs(self, o: Operands) -> Any:
        out = torch.full_like(o.left, float("nan")).mT
        _triton_ops().bsr_dense_mm(o.a, o.x, out=out)
        return out

    def ours(self, o: Operands) -> Any:
        out = torch.full_like(o.left, float("nan")).mT
        sk.spmm(o.a, o.x, out=out)
        return out

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class SampledStages(Case):
    """the rate of (x @ y) sampled at blocks"""

    name = "sddmm-stages"
    where = "_triton_ops.py"
    needs_gpu = TRITON
    sizes = (4096, 4096, 4096)
    block = (64, 64)

    def theirs(self, o: Operands) -> Any:
        ops = _triton_ops()
        fixed = "num_stages=1" in inspect.getsource(ops._run_sampled_addmm_kernel)
        y, empty = o.x.mT.contiguous(), o.a * 0
        result, note = _rate(lambda: ops.sampled_addmm(empty, o.dy, y, beta=0.0), o, 0.25)
        return Measured(
            result, f"{note}{', num_stages is always 1' if fixed else ''}", "costly" if fixed else None
        )

    def ours(self, o: Operands) -> Any:
        y = o.x.mT.contiguous()
        return Measured(*_rate(lambda: sk.sddmm(o.dy, y, o.a.pattern), o, 0.25))

    def dense(self, o: Operands) -> Tensor:
        return (o.dy @ o.x.mT) * o.stored


class SampledFp32(SampledStages):
    """the rate of (x @ y) sampled at blocks, in fp32"""

    name = "sddmm-fp32"
    sizes = (2048, 2048, 2048)
    dtype = torch.float32

    def theirs(self, o: Operands) -> Any:
        ops = _triton_ops()
        wide = "acc_dtype = tl.float64" in inspect.getsource(ops._run_sampled_addmm_kernel)
        y, empty = o.x.mT.contiguous(), o.a * 0
        result, note = _rate(lambda: ops.sampled_addmm(empty, o.dy, y, beta=0.0), o, 0.25)
        return Measured(result, f"{note}{', summed in fp64' if wide else ''}", "costly" if wide else None)


def _rate(call: Callable[[], Any], o: Operands, share: float) -> tuple[Any, str]:
    """The result, and its useful rate next to that of the dense product, timed in interleaved rounds."""
    y = o.x.mT.contiguous()
    calls = {"sampled": call, "dense": lambda: o.dy @ y}
    times = time_rounds(calls, device=o.x.device, rounds=5, inner_ms=5.0, heat="dense")
    useful = share * times["dense"].median / times["sampled"].median
    return call(), f"{times['sampled'].median:.3f} ms, {useful:.2f} of the dense product's rate"


TRITON_KERNELS: tuple[Case, ...] = (
    TuningTable(),
    TuningWarning(),
    NumStages(),
    TuningIgnored(),
    OutTransposed(),
    SampledStages(),
    SampledFp32(),
)
