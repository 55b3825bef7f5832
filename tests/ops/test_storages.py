"""spmm and linear of a matrix in every storage: what they multiply eagerly, in how many plans, and by which kernel."""

import gc
import re
import weakref
from itertools import product
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine import table
from sparsek.products.ops.linear import plan_layer
from sparsek.products.reference.epilogue import ACTIVATION_NAMES, Activation, Epilogue
from sparsek.testing.poison import poisoned
from tests.engine.launch.covering import once
from tests.ops.paged import MIXED, attend
from tests.ops.storages import (
    BF16,
    DTYPES,
    F32,
    IN_FP8,
    KERNELS,
    LAYOUTS,
    ON_RIGHT,
    STORAGES,
    SUMS_IN_FLOAT32,
    WIDE,
    judged,
    judged_layer,
    judged_right,
    matrix,
    twin,
)

BATCHES = [(), (1,), (3,), (2, 3), (2, 0), (2, 1, 3)]


# A on the left, and on the right where it may stand there.
SIDES = [*((storage, False) for storage in STORAGES), *((storage, True) for storage in ON_RIGHT)]
SIDED = {False: "A @ B", True: "X @ A"}


def sided(
    storage: str, right: bool, dtype: torch.dtype, device: str, *lead: int, n: int = 40
) -> tuple[Any, Any, Any]:
    """Left and right operand, and how their product is judged."""
    a = matrix(storage, dtype, device)
    if right:
        x = torch.randn(*lead, n, 128, device=device).to(dtype)
        return x, a, judged_right
    return a, torch.randn(*lead, 192, n, device=device).to(dtype), judged


@pytest.mark.parametrize(
    ("storage", "right", "dtype"),
    [(*side, dtype) for side in SIDES for dtype in DTYPES[side[0].split()[0]]],
    ids=lambda x: SIDED.get(x, str(x)),
)
def test_the_operator_multiplies(storage: str, right: bool, dtype: torch.dtype, device: str):
    x, y, judge = sided(storage, right, dtype, device)
    c = x @ y
    assert (c.dtype, c.is_contiguous()) == (dtype, True)
    assert judge(x, y, c).passed
    assert torch.equal(sk.spmm(x, y), c)
    assert torch.equal(torch.matmul(x, y), c)


@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize(("storage", "right"), SIDES, ids=lambda x: SIDED.get(x, str(x)))
def test_batches_of_the_dense_operand_multiply(
    storage: str, right: bool, shape: tuple[int, ...], device: str
):
    x, y, judge = sided(storage, right, BF16, device, *shape, n=8 if right else 16)
    c = x @ y
    assert c.is_contiguous()
    assert judge(x, y, c).passed


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_dense_operand_may_lie_in_memory_as_it_likes(storage: str, name: str, device: str):
    a = matrix(storage, device=device)
    b = LAYOUTS[name](torch.randn(192, 40, device=device).to(BF16))
    c, y = a @ b, sk.linear(b.mT, a)
    assert c.is_contiguous()
    assert y.is_contiguous()
    assert judged(a, b, c).passed
    assert judged_layer(b.mT, a, y).passed


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.0), (1.0, 1.0), (-0.5, 0.25), (0.0, 2.0)])
@pytest.mark.parametrize(
    ("storage", "right", "kernel"),
    [
        (*side, kernel)
        for side in SIDES
        for kernel in KERNELS[side[0].split()[0]]
        if kernel in SUMS_IN_FLOAT32
    ],
    ids=lambda x: SIDED.get(x, str(x)),
)
def test_alpha_beta_and_out(storage: str, right: bool, kernel: str, alpha: float, beta: float):
    x, y, judge = sided(storage, right, BF16, "cpu", 2, n=24)
    dtype, shape = F32 if storage in IN_FP8 else BF16, (2, 24, 192) if right else (2, 128, 24)
    start = torch.randn(shape).to(dtype) if beta else poisoned(shape, dtype)
    out = start.clone()
    assert sk.spmm(x, y, alpha=alpha, beta=beta, out=out, kernel=kernel) is out
    other = None if not beta else start.mT if right else start
    gate = judge(x, y, out, Epilogue(alpha=alpha, other=other, beta=beta), core=0.0)
    assert gate.passed, gate


@pytest.mark.parametrize(
    ("storage", "right"), [*product(ON_RIGHT, (False, True))], ids=lambda x: SIDED.get(x, str(x))
)
def test_out_may_be_part_of_a_larger_matrix(storage: str, right: bool, device: str):
    x, y, judge = sided(storage, right, BF16, device, *([2] if right else []), n=8 if right else 40)
    shape = (2, 8, 192) if right else (128, 40)
    room = poisoned((*shape[:-1], shape[-1] + 11), BF16, device)
    out = room[..., 3 : shape[-1] + 3]
    assert sk.spmm(x, y, out=out) is out
    assert judge(x, y, out).passed
    assert room[..., :3].isnan().all()
    assert room[..., shape[-1] + 3 :].isnan().all()


PARTS = ("", "bias", "residual", "bias and residual")


@pytest.mark.parametrize(
    ("storage", "parts", "act"), once(product(STORAGES, PARTS, (None, *ACTIVATION_NAMES)), together=2)
)
def test_a_layer_is_one_plan_within_the_error_budget(
    storage: str, parts: str, act: Activation | None, device: str, plans_made: list[str]
):
    w = matrix(storage, device=device)
    x, bias, rest = (torch.randn(s, device=device).to(BF16) for s in ((2, 20, 192), (128,), (2, 20, 128)))
    more = bias if "bias" in parts else None, act, rest if "residual" in parts else None
    y = sk.linear(x, w, *more)
    assert (y.dtype, y.is_contiguous()) == (BF16, True)
    gate = judged_layer(x, w, y, *more)
    assert gate.passed, gate
    assert torch.equal(sk.linear(x.clone(), w, *more), y)
    assert len(plans_made) == 1


@pytest.mark.parametrize(
    "shape", [(192,), (1, 192), (64, 192), (2, 3, 4, 192), (0, 192), (2, 0, 192)], ids=str
)
@pytest.mark.parametrize("storage", STORAGES)
def test_any_leading_dims_are_tokens(storage: str, shape: tuple[int, ...], device: str):
    w, x = matrix(storage, device=device), torch.randn(shape, device=device).to(BF16)
    bias, rest = (
        torch.randn(128, device=device).to(BF16),
        torch.randn(*shape[:-1], 128, device=device).to(BF16),
    )
    assert judged_layer(x, w, sk.linear(x, w, bias, "silu", rest), bias, "silu", rest).passed


@pytest.mark.parametrize("storage", STORAGES)
def test_a_named_kernel_runs_or_says_why_not(storage: str):
    a, b = matrix(storage, F32), torch.randn(192, 16)
    assert sk.plan_spmm(a, b).kernel == KERNELS[storage][0]
    for name in KERNELS[storage]:
        assert sk.plan_spmm(a, b, kernel=name).kernel == name
        assert judged(a, b, sk.spmm(a, b, kernel=name)).passed
    op = storage.replace("bsr_", "spmm_") if storage != "bsr" else "spmm"
    able = re.escape(KERNELS[storage][0])
    name = f"{'unpacked' if '24' in storage else 'portable'}.{op}"
    with pytest.raises(Unsupported, match=rf"{re.escape(name)} cannot run this; .*{able}") as caught:
        sk.spmm(a, b, kernel=name)
    assert caught.value.reasons[name]
    with pytest.raises(InvalidInput, match=rf"no kernel of spmm is called 'cpu.other'; known: hopper\.{op}"):
        sk.linear(b.mT, a, kernel="cpu.other")
    if storage != "bsr":
        with pytest.raises(
            Unsupported, match=r"cpu.spmm cannot run this; (.|\n)*cpu.spmm: multiplies BSR, not "
        ):
            sk.linear(b.mT, a, kernel="cpu.spmm")


def test_removed_kernels_name_their_successors():
    known = {row.name for row in table.rows()}
    for name, successor in table.removed().items():
        assert name not in known
        assert successor in known
        with pytest.raises(Unsupported, match=f"{name} was removed: name {successor}, or no kernel"):
            table.load(name)


@pytest.mark.parametrize("verb", [*STORAGES, "sddmm", "spgemm", "attention", "attention_paged"])
def test_a_removed_kernel_s_cure_is_a_kernel_of_the_same_call(verb: str):
    x, y, a = torch.randn(128, 8), torch.randn(8, 192), matrix("bsr", F32)
    q, of_pages = torch.randn(1, 2, 64, 16), MIXED.make()
    runs: dict[str, Any] = {
        "sddmm": lambda name: sk.sddmm(x, y, a.pattern, kernel=name),
        "spgemm": lambda name: sk.spgemm(a, a.T, kernel=name),
        "attention": lambda name: sk.attention(q, q, q, kernel=name),
        "attention_paged": lambda name: attend(of_pages, kernel=name),
    }
    run = runs.get(verb) or (lambda name: sk.spmm(matrix(verb, F32), torch.randn(192, 16), kernel=name))
    op, storage = (verb, None) if verb in runs else ("spmm", verb)
    for name in table.removed():
        with pytest.raises(Unsupported, match=f"{name} was removed: name ") as caught:
            run(name)
        advised = re.findall(r"\w+\.\w+", str(caught.value).partition(": ")[2])
        assert set(advised) <= set(table.names_for(op, storage)), advised


@pytest.mark.parametrize("storage", STORAGES)
def test_a_plan_of_a_layer_is_that_of_linear(storage: str):
    w = matrix(storage)
    x, bias, rest = (torch.randn(s).to(BF16) for s in ((2, 5, 192), (128,), (2, 5, 128)))
    epilogue = Epilogue(bias=bias, activation="gelu", other=rest)
    plan = plan_layer(x, w, epilogue=epilogue)
    told = plan.explain()
    dtype = "e4m3, a scale per row" if storage in IN_FP8 else "bf16, "
    assert told.startswith(f"C = gelu(B @ A.T + bias) + beta * other   A [128, 192] {dtype}")
    assert ("2:4" in told.split("\n")[0]) == ("24" in storage)
    assert torch.equal(plan(x, w, epilogue=epilogue), sk.linear(x, w, bias, "gelu", rest))
    with pytest.raises(InvalidInput, match=r"made for C = gelu\(A @ B \+ bias\) .*; got A @ B\."):
        plan(x, w)
    with pytest.raises(InvalidInput, match="allocates its output; omit out="):
        plan(x, w, rest, epilogue=epilogue)
    with pytest.raises(InvalidInput, match="W must be a BSR, Semi24, BSR24 or Quantized, got Tensor"):
        plan(x, w.to_dense())


STORED = {
    "bsr": "{a.nnzb} blocks of 64x64 ({share:.3g} % stored)",
    "semi24": "2:4",
    "bsr24": "2:4 in {a.nnzb} blocks of 64x64 ({share:.3g} % stored)",
}


@pytest.mark.parametrize("right", [False, True], ids=["A @ B", "X @ A"])
@pytest.mark.parametrize("storage", WIDE)
def test_a_plan_explains_itself_and_serves_new_values_in_the_same_places(storage: str, right: bool):
    a, dense = matrix(storage), torch.randn((2, 40, 128) if right else (192, 40)).to(BF16)

    def given(a: Any) -> tuple[Any, Any]:
        return (dense, a) if right else (a, dense)

    plan, expected = sk.plan_spmm(*given(a)), sk.spmm(*given(a))
    stored = STORED[storage].format(a=a, share=100 * getattr(a, "density", 1.0))
    of_a = f"A [128, 192] bf16, {stored}, B [{'80, 128' if right else '192, 40'}] row-major, on cpu"
    assert plan.explain().startswith(
        f"C = {'B @ A' if right else 'A @ B'}   {of_a}\n  kernel     {plan.kernel}"
    )
    assert (plan.on_right, plan.kernel) == (right, KERNELS[storage][0])
    assert torch.equal(plan(*given(a)), expected)
    assert torch.equal(plan(*given(twin(a))), -expected)
    out = poisoned(tuple(expected.shape), BF16)
    assert sk.spmm(*given(a), plan=plan, kernel=plan.kernel, out=out) is out
    assert torch.equal(out, expected)
    if storage == "semi24":
        assert torch.equal(plan(*given(other := matrix(storage))), sk.spmm(*given(other)))
    else:
        with pytest.raises(InvalidInput, match=r"made for another pattern of blocks; call plan_spmm.*got BS"):
            plan(*given(matrix(storage)))


@pytest.mark.parametrize("storage", STORAGES)
def test_plans_for_a_card_that_is_not_there_predict(storage: str):
    a, b = matrix(storage), torch.randn(192, 64).to(BF16)
    plan = sk.plan_spmm(a, b, device="h200")
    assert plan.kernel.split(".")[0] in ("hopper", "portable", "unpacked")
    assert plan.seconds > plan.bound_seconds > 0
    assert "on NVIDIA H200" in plan.explain()
    with pytest.raises(InvalidInput, match="this plan is a prediction for NVIDIA H200"):
        plan(a, b)


@pytest.mark.parametrize("storage", STORAGES)
def test_plans_are_made_once_and_go_with_the_matrix(storage: str, plans_made: list[str]):
    a, b = matrix(storage), torch.randn(192, 40).to(BF16)
    for _ in range(3):
        sk.spmm(a, b)
        sk.spmm(twin(a), b.clone())
    assert len(plans_made) == 1
    sk.spmm(a, b[:, :16])
    assert len(plans_made) == 2
    stored: Any = a.matrix if storage in IN_FP8 else a
    kept = weakref.ref(stored.meta if "semi24" in storage else stored.pattern)
    del a, stored
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("storage", "kernel"), [(storage, kernel) for storage in STORAGES for kernel in (None, *KERNELS[storage])]
)
def test_an_alpha_of_0_takes_nan_and_inf_out_as_addmm_does(storage: str, kernel: str | None, device: str):
    a, b = matrix(storage, device=device), torch.randn(192, 48, device=device).to(BF16)
    b[3, 4], b[70] = torch.nan, torch.inf
    kernel = None if device != "cpu" and kernel is not None and kernel.startswith("cpu.") else kernel
    if storage not in IN_FP8:
        a = type(a).unchecked(
            *[x for x in (getattr(a, "pattern", None),) if x],
            torch.full_like(a.values, torch.nan),
            *[x for x in (getattr(a, "meta", None),) if x is not None],
        )
    for alpha in (0, -0.0):
        assert torch.equal(sk.spmm(a, b, alpha=alpha, kernel=kernel), torch.zeros_like(b[:1]).expand(128, -1))
        out = poisoned((128, 48), BF16, device)
        sk.spmm(a, b, alpha=alpha, out=out, kernel=kernel)
        assert not out.any()
        before = torch.randn(128, 48, device=device).to(BF16)
        sk.spmm(a, b, alpha=alpha, beta=2.0, out=out.copy_(before), kernel=kernel)
        assert torch.equal(out, 2 * before)
    if storage in WIDE and kernel is None:
        x = torch.full((3, 2, 128), torch.nan, dtype=BF16, device=device)
        assert torch.equal(sk.spmm(x, a, alpha=0), torch.zeros(3, 2, 192, dtype=BF16, device=device))


def test_a_plan_follows_an_alpha_and_a_beta_of_0(device: str):
    a, b, bias = (
        matrix("bsr", F32, device),
        torch.randn(192, 40, device=device),
        torch.randn(128, device=device),
    )
    other = poisoned((128, 40), F32, device)
    for kernel in (None, "reference.spmm"):
        act = Epilogue(alpha=0.0, bias=bias, activation="gelu", other=other, beta=0.0)
        c = sk.plan_spmm(a, b, epilogue=act, kernel=kernel)(a, b * torch.nan, epilogue=act)
        torch.testing.assert_close(c, torch.nn.functional.gelu(bias)[:, None].expand(-1, 40))
        add = Epilogue(other=other, beta=0.0)
        assert judged(a, b, sk.plan_spmm(a, b, epilogue=add, kernel=kernel)(a, b, epilogue=add)).passed
        out = poisoned((128, 40), F32, device)
        same = Epilogue(other=out, beta=0.0)
        sk.plan_spmm(a, b, out=out, epilogue=same, kernel=kernel)(a, b, out, same)
        assert judged(a, b, out).passed


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_a_product_does_not_sync_and_a_graph_replays(storage: str, no_sync: Any):
    a = matrix(storage, device="cuda", m=512, k=512)
    x, bias = torch.randn(256, 512, device="cuda").to(BF16), torch.randn(512, device="cuda").to(BF16)
    runs = [lambda: a @ x.mT, lambda: sk.linear(x, a, bias, "gelu")]
    for run in [*runs, *([lambda: x @ a] if storage in ON_RIGHT else [])]:
        run()
        with no_sync():
            assert run() is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        out.fill_(torch.nan)
        x.copy_(-x)
        first = run()
        graph.replay()
        assert torch.equal(out, first)
