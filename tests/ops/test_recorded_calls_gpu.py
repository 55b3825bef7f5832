"""Recorded calls (engine/call/recorded_calls.py): from its third time on a call repeats its launches, and whatever is
different between two calls is followed or ends that. On a CPU nothing is recorded, and the same calls are right.
"""

import copy
import gc
import pickle
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask import layout
from sparsek.attn.ops import mask_calls
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.attn.plan.attention_grad import AttentionGradPlan
from sparsek.core.errors import InvalidInput
from sparsek.engine.call import recorded_calls
from sparsek.engine.launch.recorder import MISS, Recorded
from sparsek.products.plan.sddmm import SddmmPlan
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.budget import check_spmm, using_tf32
from sparsek.testing.product_budget import check_linear
from tests.ops.recorded_between import DISTURBANCES, MAIN, ON_A_CPU, ON_A_GPU_ONLY, Runs, bind, replayed, turn
from tests.ops.recorded_subjects import (
    DIM,
    LENGTH,
    SUBJECTS,
    TILE,
    K,
    M,
    N,
    Operands,
    Subject,
    qkv,
    randn,
    weights,
)

GPU = pytest.mark.gpu


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    layout.known_layout.cache_clear()  # a mask that is the first of its layout keeps its plan
    found, repeat, record = Runs(), Recorded.repeat, recorded_calls.record

    def repeated(self: Recorded, operands: Sequence[Tensor]) -> Any:
        made = repeat(self, operands)
        if made is not MISS:
            found.repeated.append(1)
        return made

    def recorded(*given: Any) -> Any:
        found.recorded.append(1)
        return record(*given)

    monkeypatch.setattr(Recorded, "repeat", repeated)
    monkeypatch.setattr(recorded_calls, "record", recorded)
    for kind in (SpmmPlan, SddmmPlan, AttentionPlan, AttentionGradPlan):
        monkeypatch.setattr(kind, "run", _counted(kind.run, found.planned))
    return found


def _counted(real: Any, calls: list[int]) -> Any:
    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    return counted


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(name, "cuda", marks=GPU) for name in SUBJECTS] + [(name, "cpu") for name in ON_A_CPU],
)
def test_from_the_third_time_on_a_call_is_repeated_and_right(name: str, device: str, runs: Runs) -> None:
    subject = SUBJECTS[name](device)
    bind(subject, runs, device)
    for _ in range(2):
        turn(subject, runs, device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("disturb", "name", "where"),
    [
        pytest.param(each, name, where, marks=[GPU] if where == "cuda" else [])
        for each, names in DISTURBANCES.items()
        for name in names
        for where in ("cpu", "cuda")
        if where == "cuda" or (each not in ON_A_GPU_ONLY and name in ON_A_CPU)
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_bound_call_follows_what_changes_between_calls(
    disturb: Callable[[Subject, Runs, str], None], name: str, where: str, runs: Runs
) -> None:
    subject = SUBJECTS[name](where)
    bind(subject, runs, where)
    disturb(subject, runs, where)
    subject.turn()  # the call before was another thread's, or of another shape
    for _ in range(2):
        turn(subject, runs, where)


@GPU
@pytest.mark.parametrize(
    ("name", "before"),
    [("attention window", 0), ("attention window, gradients", 0), *((name, 1) for name in MAIN)],
)
def test_a_call_may_be_captured_before_it_is_bound(name: str, before: int, runs: Runs) -> None:
    SUBJECTS[name]("cuda").turn()
    mask_calls._templates.clear()
    layout.known_layout.cache_clear()  # the next mask is the first of its layout
    subject = SUBJECTS[name]("cuda")
    for _ in range(before):
        subject.turn()
    replayed(subject, runs)
    bind(subject, runs, "cuda")


def test_torch_func_differentiates_a_bound_call(device: str, runs: Runs) -> None:
    subject = SUBJECTS["A @ B"](device)
    bind(subject, runs, device)
    for _ in range(2):
        (a, b), weight = subject.draw(), randn(M, N, device=device)
        found = torch.func.grad(lambda b, a=a, weight=weight: ((a @ b) * weight).sum())(b)
        assert check_spmm(a.T, weight, found).passed
        turn(subject, runs, device)


def test_the_switch_of_tf32_is_followed(device: str, runs: Runs) -> None:
    make = weights("bsr", M, K, device)
    subject = SUBJECTS["A @ B"](device)
    for tf32 in (False, True, False, True):
        with using_tf32(tf32):
            for at in range(4):
                a, b = make().float(), torch.randn(K, N, device=device)
                runs.clear()
                out = a @ b
                if at == 3:
                    runs.expect(subject, device)
                assert check_spmm(a, b, out, tf32=tf32).passed, (tf32, at)


def _aliases(device: str) -> dict[str, tuple[Callable[[bool], Operands], Callable[..., Any], Any]]:
    """By name: operands, at one address or not, the call, and its gates."""
    a, w = weights("bsr", M, K, device), weights("bsr", M, M, device)

    def product(same: bool) -> Operands:
        made = a()
        return made, made.values.flatten()[: K * 64].view(K, 64) if same else randn(K, 64, device=device)

    def layer(same: bool) -> Operands:
        x = randn(N, M, device=device)
        return w(), x, x.view_as(x) if same else randn(N, M, device=device)

    def heads(same: bool) -> Operands:
        q, *others = (randn(1, 2, LENGTH, DIM, device=device) for _ in range(3))
        return (q, q, q.view_as(q)) if same else (q, *others)

    attention = SUBJECTS["attention window"](device)
    return {
        "A @ B": (product, lambda a, b: a @ b, lambda out, a, b: [check_spmm(a, b, out)]),
        "linear": (
            layer,
            lambda w, x, residual: sk.linear(x, w, None, None, residual),
            lambda y, w, x, residual: [check_linear(x, w, y, residual=residual)],
        ),
        "attention": (heads, attention.call, attention.gates),
    }


@pytest.mark.parametrize("first", [False, True], ids=["apart first", "same first"])
@pytest.mark.parametrize("name", ["A @ B", "linear", "attention"])
def test_operands_may_begin_at_one_address(name: str, first: bool, device: str) -> None:
    draw, call, gates = _aliases(device)[name]
    subject = Subject(lambda: draw(first), call, gates)
    other = subject._replace(draw=lambda: draw(not first))
    for each in (subject, other, subject):
        for _ in range(4):
            each.turn()


REFUSED: dict[str, Callable[[sk.BSR, Tensor], Any]] = {
    "activation is 'swish'": lambda w, x: sk.linear(x, w, activation=cast(Any, "swish")),
    "dtype= is for products of FP8 matrices": lambda w, x: sk.linear(x, w, dtype=torch.float16),
    "dtype= is for products of FP8": lambda w, x: sk.spmm(x, w.T, dtype=torch.float16),
    "": lambda w, x: sk.spmm(w, sk.quantize(x.detach()).mT),
    "columns|rows|K": lambda w, x: w @ x,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_is_refused_again(text: str, device: str) -> None:
    """Where gradients are wanted, whose calls are checked once for each key."""
    w, x = weights("bsr", M, K, device)().requires_grad_(), randn(N, K, device=device).requires_grad_()
    for _ in range(3):
        with pytest.raises(InvalidInput) as caught:
            REFUSED[text](w, x)
        assert re.search(text, str(caught.value)), caught.value


@pytest.mark.parametrize("storage", ["semi24", "bsr24", "semi24-fp8", "bsr24-fp8"])
def test_new_metadata_is_followed(storage: str, device: str, runs: Runs) -> None:
    """Written into the matrix, or of another matrix of the same shape and pattern."""
    subject = SUBJECTS[f"linear {storage}"](device)
    bind(subject, runs, device)
    given = subject.draw()
    for _ in range(2):
        one: Any = given[0].matrix if isinstance(given[0], sk.Quantized) else given[0]
        one.meta.copy_(_other_meta(one.meta))
        for _ in range(3):
            subject.check(given, subject.call(*given))
        if device == "cuda":
            runs.clear()
            subject.call(*given)
            runs.expect(subject, device)
    alike = one.unchecked(**{**one._parts(), "meta": _other_meta(one.meta)})
    other = given[0].unchecked(**{**given[0]._parts(), "matrix": alike}) if one is not given[0] else alike
    for _ in range(4):
        for matrix in (given[0], other):
            subject.check((matrix, *given[1:]), subject.call(matrix, *given[1:]))


def _other_meta(meta: Tensor) -> Tensor:
    """Metadata [..., K/8] that keeps other columns."""
    dense = randn(meta[..., 0].numel(), 8 * meta.shape[-1], device=str(meta.device))
    return sk.Semi24.from_dense(dense).meta.view(meta.shape)


@pytest.mark.parametrize("name", ["A @ B", "linear semi24", "linear bsr24", "linear bsr24-fp8"])
def test_copies_of_a_bound_matrix_are_right(name: str, device: str, runs: Runs) -> None:
    subject = SUBJECTS[name](device)
    bind(subject, runs, device)
    copies: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]
    if name in ("linear semi24", "linear bsr24"):
        copies += [lambda x: x.clone(), lambda x: pickle.loads(pickle.dumps(x))]  # noqa: S301
    for make in copies:
        for _ in range(3):
            matrix, *rest = subject.draw()
            given = make(matrix), *rest
            subject.check(given, subject.call(*given))
        matrix.values.view(torch.uint8).zero_()
        subject.check(given, subject.call(*given))
    turn(subject, runs, device)


@pytest.mark.parametrize("name", ["A @ B", "linear semi24", "linear bsr24", "sddmm", "attention bits"])
def test_new_matrices_in_the_memory_of_old_ones_are_right(name: str, device: str) -> None:
    for seed in range(2 if device == "cpu" else 5):
        torch.manual_seed(seed)
        subject = SUBJECTS[name](device)
        for _ in range(3):
            subject.turn()
        del subject


def test_no_more_than_LIMIT_calls_are_kept(  # noqa: N802
    device: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_calls, "LIMIT", 6)
    draw = weights("bsr", M, K, device)
    calls = draw().pattern.derived("calls", recorded_calls.Calls)
    for learns in (False, True):
        for n in (72, 80, 88, 96, 104, 112, 120, 128, 72):
            for _ in range(3):
                a, b = draw(), randn(K, n, device=device).requires_grad_(learns)
                assert check_spmm(a, b.detach(), (a @ b).detach()).passed
            assert len(calls.known) <= 6
            assert len(calls.recent) <= 6
    subject = SUBJECTS["A @ B"](device)._replace(draw=lambda: (draw(), randn(K, N, device=device)))
    bind(subject, runs, device)


@GPU
@pytest.mark.parametrize("name", [*MAIN, "linear bsr24", "linear bsr24-fp8", "A @ b", "plan(A, B)"])
def test_what_is_dropped_frees_its_memory(name: str, runs: Runs) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def bound_and_dropped() -> None:
        subject = SUBJECTS[name]("cuda")
        for _ in range(4):
            subject.call(*subject.draw())

    def settled() -> int:
        """The least that is used in a tenth of a second: torch's backward threads let go a moment after a call."""
        end = time.monotonic() + 0.1
        least = used()
        while time.monotonic() < end:
            least = min(least, used())
        return least

    bound_and_dropped()
    before = settled()
    bound_and_dropped()
    end = time.monotonic() + 5
    while (after := settled()) > before and time.monotonic() < end:
        pass
    assert after <= before


@GPU
def test_a_pattern_does_not_collect_what_was_made_of_metadata(runs: Runs) -> None:
    """As training does that prunes the blocks of one pattern anew in every step."""
    draw = weights("bsr", M, K, "cuda")
    x, sizes = randn(N, K, device="cuda"), []
    for _ in range(12):
        w = sk.BSR24.from_bsr(draw())
        for _ in range(3):
            sk.linear(x, w)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] <= sizes[3], sizes


@GPU
def test_masks_of_other_contents_have_calls_of_their_own() -> None:
    for width in (64, 100, 300):
        mask = sk.BlockMask.sliding_window(LENGTH, width, block=TILE, device="cuda")
        for at in range(6):
            q, k, v = qkv("cuda")
            if at == 3:  # what bounds said of its lists gives way to their counts
                mask.verify(wait=True)
            out = sk.attention(q, k, v, mask)
            assert check_attention(q, k, v, mask, out).passed


@GPU
def test_a_transposed_view_and_its_matrix_have_calls_of_their_own(runs: Runs) -> None:
    draw = weights("bsr", M, M, "cuda")
    for _ in range(5):
        a, b = draw(), randn(M, N, device="cuda")
        assert check_spmm(a, b, a @ b).passed
        assert check_spmm(a.T, b, a.T @ b).passed
