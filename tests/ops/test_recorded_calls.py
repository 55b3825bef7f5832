"""How a recorded call is found again, on a CPU that passes for a GPU: what is recorded runs the plan again."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import sparsek as sk
from sparsek.attn.ops import attention_autograd, attention_op, attention_plans
from sparsek.attn.ops.attention_op import through_op
from sparsek.attn.plan.attention import Attended
from sparsek.attn.reference.scores import Scores
from sparsek.core.errors import InvalidInput
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.plan.op import Operation
from sparsek.products.formats import quantized_tensor
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops import packing, recorded_products
from sparsek.products.ops.linear import LinearCall, plan_layer
from sparsek.products.plan import operands
from sparsek.products.plan import spmm as plan_spmm
from sparsek.products.reference.epilogue import Activation
from tests.ops.recorded_steps import CHANGES, NOW, VERBS, Again, Mode, Step, let_patterns_pass
from tests.sampling import half


def writes_slope(call: LinearCall) -> bool:
    """As with a kernel that is fast at gelu and its slope."""
    learns = call.activation == "gelu" and isinstance(call.w, sk.BSR) and call.w.values.requires_grad
    return learns and transforms.untraced(call.x, call.w.values, call.bias)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Again]]:
    """The calls that were recorded."""
    made: list[weakref.ref[Again]] = []
    modes: list[Mode] = []

    def record(run: Callable[[], Any], given: Any, kept: Any = None) -> tuple[Any, Again]:
        def within() -> Any:
            with Mode() as mode:
                modes.append(mode)
                try:
                    return run()
                finally:
                    modes.pop()

        again = Again(within, given)
        made.append(weakref.ref(again))
        return within(), again

    monkeypatch.setattr(transforms, "recorder", lambda: modes[-1] if modes else None)
    monkeypatch.setattr(recorded_calls, "record", record)
    monkeypatch.setattr(recorded_calls, "_device", lambda: NOW["device"])
    monkeypatch.setattr(recorded_calls, "_stream", lambda device: NOW["stream"])
    monkeypatch.setattr(recorded_calls, "_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(LinearCall, "writes_slope", writes_slope)
    monkeypatch.setitem(NOW, "device", 0)
    monkeypatch.setitem(NOW, "stream", 0)
    return made


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on a full key, and so a check of operands, fails the test."""

    def forbid() -> None:
        def key(*given: Any) -> tuple[None, bool]:
            assert torch._C._len_torch_dispatch_stack(), "the key was made"
            return None, False

        monkeypatch.setattr(recorded_calls, "_key", key)

    return forbid


def matrices() -> list[Any]:
    a = sk.random_bsr(128, 192, 64, 0.5, seed=0)
    return [a, a.T.T, sk.Semi24.from_dense(torch.randn(128, 192)), sk.BSR24.from_bsr(a), sk.quantize(a)]


def calls(n: int = 24) -> list[Callable[[], Any]]:
    x, y = torch.randn(192, n), torch.randn(n, 192)
    q, k, v = torch.randn(3, 1, 2, 64 + n, 16).unbind()
    mask, a, bias = sk.BlockMask.causal(64 + n), matrices()[0], torch.randn(128)
    b = sk.random_bsr(192, 64, 64, 0.7, seed=2)
    at, plan = (a @ b).pattern, sk.plan_spmm(a, x)
    return [
        *(lambda m=m: sk.spmm(m, x) for m in matrices()),
        *(lambda m=m: sk.linear(y, m, bias, "gelu") for m in matrices()),
        lambda: plan(a, x),
        lambda: sk.spmm(y, a.T, alpha=0.5),
        lambda: sk.spmm(a.T, torch.ones(128, 3)),
        lambda: sk.sddmm(torch.ones(128, 8), torch.ones(8, 192), a.pattern).values,
        lambda: sk.spgemm(a, b),
        lambda: (a @ b).values,
        lambda: sk.spgemm(a, b, at).values,
        lambda: sk.attention(q, k, v, mask),
        lambda: torch.stack(sk.attention(q, k, v, return_lse=True)[1:]),
        lambda: sk.attention(q, k, v, is_causal=True),
        lambda: a @ x,
    ]


@pytest.mark.parametrize("index", range(len(calls())))
def test_a_call_is_bound_after_it_was_recorded(index: int, recorded: list[Any], unchecked: Any):
    call = calls()[index]
    first = [call() for _ in range(4)]
    assert len(recorded) == 1
    unchecked()
    for found in (*first, call()):
        torch.testing.assert_close(found, first[0], rtol=0, atol=0, equal_nan=True)


def test_rounding_to_fp8_is_recorded_by_itself_and_not_inside_a_product(
    recorded: list[Any], unchecked: Any, monkeypatch: pytest.MonkeyPatch
):
    ran: list[bool] = []

    def kernel(x: torch.Tensor, dtype: torch.dtype, together: bool = False) -> Any:
        ran.append(together)
        return quantized_tensor._rounded(x, dtype, by_row=True)

    monkeypatch.setattr(packing, "function_of", lambda *given: kernel)
    xs, dtype = [torch.randn(4, 32) for _ in range(5)], torch.float8_e4m3fn
    for x in xs[:4]:
        packing._round_rows(x, dtype, False)
    assert len(recorded) == 1
    packing._round_rows(xs[0], dtype, True)
    assert (len(recorded), ran[-1]) == (1, True)
    unchecked()
    found: Any = packing._round_rows(xs[4], dtype, False)
    wanted = quantized_tensor._rounded(xs[4], dtype, by_row=True)
    assert all(map(torch.equal, map(torch.Tensor.float, found), map(torch.Tensor.float, wanted)))


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns pass on a CPU too, and kernels read only their work of them."""
    let_patterns_pass(monkeypatch)


@pytest.mark.usefixtures("passing")
@pytest.mark.parametrize("verb", VERBS[:8])
@pytest.mark.parametrize("learns", [(), (0, 1, 2)])
def test_new_patterns_of_one_size_share_recorded_calls_and_need_no_plan(
    verb: str, learns: tuple[int, ...], recorded: list[Any], monkeypatch: pytest.MonkeyPatch
):
    planned, plan, counts = [], Operation.plan, []
    monkeypatch.setattr(Operation, "plan", lambda *given: planned.append(0) or plan(*given))
    step = Step(verb, learns)

    def run(given: Sequence[torch.Tensor]) -> list[Any]:
        planned.clear()
        found = step.run(given)
        counts.append((len(planned), len(recorded)))
        return found

    for seed in range(6):
        a = sk.random_bsr(128, 192, 64, 0.5, seed=seed)
        p = a.pattern
        step.a = sk.BSR.unchecked(BlockPattern.unchecked(p.shape, p.block, p.indptr, p.indices), a.values)
        step.turn(run)
        step.turn(run) if seed == 5 else None
    found = counts[::2]  # then that of the same without recorded calls
    assert found[0][0] > 0
    assert [each for each, _ in found[3:]] == [0, 0, 0, 0]
    assert len({calls for _, calls in found[2:]}) == 1, "no other call is recorded for a later pattern"
    assert any(each().ran for each in recorded)


@pytest.mark.usefixtures("passing")
def test_a_call_whose_work_is_none_of_its_operands_is_not_shared(monkeypatch: pytest.MonkeyPatch):
    step = Step("A @ x", ())
    pattern = step.a.pattern
    made = SimpleNamespace(reason="")
    monkeypatch.setattr(recorded_products, "recorder", lambda: made)
    new = BlockPattern.unchecked(pattern.shape, pattern.block, pattern.indptr, pattern.indices)
    a = sk.BSR.unchecked(new, step.a.values)
    plan = plan_layer(torch.randn(24, 192).double(), a)
    recorded_products._learn(recorded_calls.Slot(recorded_products.PASSING, "key", (), None, False), plan)
    assert "none of its operands" in made.reason


def test_guards_find_no_call_where_something_else_looks_at_it():
    """`repeat` relies on it, and asks torch for nothing of this."""
    x = torch.randn(3, 4)
    sides: dict[str, Any] = {"dynamic_dims_sizes": [[3, 4]], "dynamic_dims_strides": [[4, 1]]}
    assert recorded_calls.GUARDS is not None
    like, found = recorded_calls.GUARDS(x, **sides).check, []

    def look(y: torch.Tensor) -> torch.Tensor:
        found.append((like(x), like(y)))
        return y.sum()

    assert like(x)
    with torch.autocast("cpu", torch.bfloat16):
        look(x)
    with Mode():
        look(x)
    with torch.inference_mode():
        look(torch.randn(3, 4))
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    torch.jit.trace(look, x, check_trace=False)
    assert found == [(False, False)] * 6


def test_alternating_shapes_keep_their_guards(recorded: list[Any], unchecked: Any):
    a = matrices()[0]
    xs = [torch.randn(192, n) for n in range(8, 8 + recorded_calls.SHAPES)]
    for _ in range(4):
        for x in xs:
            sk.spmm(a, x)
    assert len(recorded) == len(xs)
    unchecked()
    for x in (*xs, *xs[::-1]):
        torch.testing.assert_close(a @ x, a.to_dense() @ x)


def test_more_shapes_than_have_guards_are_recorded_once(recorded: list[Any], monkeypatch: pytest.MonkeyPatch):
    a = matrices()[0]
    xs = [torch.randn(192, n) for n in range(8, 10 + recorded_calls.SHAPES)]
    for _ in range(2):
        for x in xs:
            sk.spmm(a, x)
    monkeypatch.setattr(operands, "check_operands", lambda *given: pytest.fail("checked again"))
    for x in xs:
        torch.testing.assert_close(sk.spmm(a, x), a.to_dense() @ x)
    assert len(recorded) == len(xs)


def test_a_call_belongs_to_its_device_and_stream(recorded: list[Any]):
    a, x = matrices()[0], torch.randn(192, 8)
    for _ in range(3):
        sk.spmm(a, x)
    (again,) = (each() for each in recorded)
    assert again.ran == 1
    NOW["device"] = 1
    for _ in range(3):
        torch.testing.assert_close(sk.spmm(a, x), a.to_dense() @ x)
    assert (again.ran, len(recorded)) == (1, 1), (
        "its operands are not on the current device: nothing is recorded"
    )
    NOW.update(device=0, stream=7)
    for _ in range(3):
        sk.spmm(a, x)
    assert (again.ran, len(recorded)) == (1, 2)
    NOW["stream"] = 0
    sk.spmm(a, x)
    assert (again.ran, len(recorded)) == (2, 2)


def test_a_write_to_what_a_call_was_made_of_ends_it(recorded: list[Any]):
    a, x = matrices()[0], torch.randn(192, 8)
    for _ in range(3):
        sk.spmm(a, x)
    a.values.mul_(2)
    for _ in range(3):
        torch.testing.assert_close(sk.spmm(a, x), a.to_dense() @ x)
    gc.collect()
    assert [each() is None for each in recorded] == [True, False]


def test_a_call_that_is_pushed_out_is_let_go(recorded: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_calls, "LIMIT", 8)
    a = matrices()[0]
    for n in range(1, 20):
        for _ in range(2):
            sk.spmm(a, torch.randn(192, n), alpha=float(n))
    gc.collect()
    known = a.pattern.derived("calls", recorded_calls.Calls)
    assert len(known.known) == 8
    assert sum(each() is not None for each in recorded) <= 8
    assert sum(map(len, known.recent.values())) <= 8


def test_a_plan_that_is_let_go_takes_its_calls_along(recorded: list[Any]):
    a, x = matrices()[0], torch.randn(192, 8)
    plan = sk.plan_spmm(a, x)
    for _ in range(3):
        plan(a, x)
    recorded[0]().rerun = recorded[0]().operands = (
        None  # which has the plan, as what is really recorded has not
    )
    del plan
    gc.collect()
    assert recorded[0]() is None


def test_refused_operands_are_refused_again(recorded: list[Any]):
    a = matrices()[0]
    wrong = torch.randn(100, 8)
    for x in (wrong, wrong.requires_grad_()):
        for _ in range(3):
            with pytest.raises(InvalidInput, match="B needs 192 rows"):
                sk.spmm(a, x)
            with pytest.raises(InvalidInput, match="last dim of x must be 192"):
                sk.linear(x.mT, a)
            with pytest.raises(InvalidInput, match="they must agree"):
                sk.sddmm(x, torch.randn(8, 192), a.pattern)
    assert not recorded


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_residual_is_checked_where_a_gradient_is_wanted(activation: Activation | None, recorded: list[Any]):
    a, x = matrices()[0], torch.randn(24, 192, requires_grad=True)
    for residual in (torch.randn(128), torch.randn(1, 128), torch.randn(24, 128).double()):
        for _ in range(3):
            with pytest.raises(InvalidInput, match="residual"):
                sk.linear(x, a, None, activation, residual)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_second_derivative_reads_a_bias_with_gaps(activation: Activation, step: int):
    a, x, whole = matrices()[0], torch.randn(24, 192), torch.randn(255, requires_grad=True)
    w = sk.BSR.unchecked(a.pattern, a.values.clone().requires_grad_())
    bias, found = whole.as_strided((128,), (step,)), []
    for each in (bias, bias.contiguous()):
        dw, db = torch.autograd.grad(
            sk.linear(x, w, each, activation).square().sum(), (w.values, whole), create_graph=True
        )
        found.append((dw, db, *torch.autograd.grad(dw.square().sum() + db.sum(), (w.values, whole))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("what", ["x", "residual", "plan", "fp8"])
def test_what_is_copied_for_a_call_is_copied_inside_of_it(
    what: str, recorded: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """A recorded call reads its operands: of what was copied before it, it would read the old copy for good."""
    a, running = matrices()[0], []
    inside: list[torch.Tensor] = []
    plan = plan_layer(torch.randn(4, 6, 192), a)
    record, joined = recorded_calls.record, plan_spmm.tokens

    def recording(run: Callable[[], Any], *given: Any) -> Any:
        running.append(run)
        found = record(run, *given)
        running.pop()
        return found

    def tokens(x: torch.Tensor) -> torch.Tensor:
        if running:
            inside.append(x)
        return joined(x)

    monkeypatch.setattr(recorded_calls, "record", recording)
    monkeypatch.setattr(plan_spmm, "tokens", tokens)
    call = {
        "x": lambda x: sk.linear(x, a),
        "residual": lambda x: sk.linear(x.contiguous(), a, None, None, x[..., :128]),
        "plan": lambda x: plan(x, a),
        "fp8": lambda x: sk.linear(x, sk.quantize(a)),
    }[what]
    for count in (0, 1):
        call(torch.randn(4, 7, 192)[:, :6])
        assert bool(inside) == bool(count)
    assert len(recorded) == 1


def test_a_gradient_of_lse_may_come_after_calls_without_one(recorded: list[Any]):
    mask, (q, k, v) = sk.BlockMask.causal(64), torch.randn(3, 1, 2, 64, 16).requires_grad_().unbind()
    for through_lse in (False, False, False, True, True, False):
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
        (out.sum() + lse.sum() if through_lse else out.sum()).backward()


@pytest.mark.parametrize("learns", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("verb", [*VERBS, "sddmm"])
def test_gradients_of_recorded_calls(verb: str, learns: tuple[int, ...], recorded: list[Any]):
    step = Step(verb, learns)
    for _ in range(5):
        step.turn()
    assert recorded


@pytest.mark.parametrize("verb", VERBS)
def test_what_learns_may_take_turns(verb: str):
    step = Step(verb)
    for learns in [(0, 1, 2), (1,), (1, 2), (0,), ()] * 4:
        step.learns = learns
        step.turn()


def test_settings_of_one_matrix_may_take_turns():
    """Each has its own backward pass, of operands that look the same."""
    a = sk.random_bsr(128, 128, 64, 0.5, dtype=torch.float64, seed=0)
    calls: list[Callable[[sk.BSR, torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, x, bias: x @ a,
        lambda a, x, bias: x @ a.T,
        lambda a, x, bias: a @ x,
        lambda a, x, bias: a.T @ x,
        lambda a, x, bias: sk.spmm(x, a, alpha=0.5),
        lambda a, x, bias: sk.spmm(x, a, kernel="reference.spmm"),
        lambda a, x, bias: sk.linear(x, a),
        lambda a, x, bias: sk.linear(x, a, bias),
        lambda a, x, bias: sk.linear(x, a, bias, "relu"),
        lambda a, x, bias: sk.linear(x, a, bias.repeat_interleave(2)[::2]),
    ]
    step = Step("")
    for call in calls * 5:
        step.draw = lambda: [
            x.double().requires_grad_() for x in map(torch.randn, (a.values.shape, (128, 128), (128,)))
        ]
        step.forward = lambda one, two, three, call=call: call(sk.BSR.unchecked(a.pattern, one), two, three)
        step.turn()


@pytest.mark.parametrize("verb", ["linear", "linear relu", "linear gelu", "attention"])
def test_a_write_to_what_a_step_was_made_of_ends_it(verb: str, recorded: list[Any]):
    step = Step(verb)
    for _ in range(4):
        step.turn()
    for _ in range(2):
        count = len(recorded)
        for each in recorded:
            if (call := each()) is not None:
                call.version -= 1
        for _ in range(4):
            step.turn()
            kept = [*step.a.pattern._memo.values(), *step.mask._memo.values()]
            for calls in (each for each in kept if isinstance(each, recorded_calls.Calls)):
                assert all(x[-1] in calls.known.values() for xs in calls.recent.values() for x in xs)
        assert len(recorded) >= count + 2


def test_a_deterministic_backward_pass_may_take_turns(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def recorded(call: Any, verb: Any, *given: Any) -> Any:
        asked.append(verb[1])
        return attention_plans.recorded(call, verb, *given)

    monkeypatch.setattr(attention_autograd, "recorded", recorded)
    mask, (q, k, v) = sk.BlockMask.causal(64), torch.randn(3, 1, 2, 64, 16).requires_grad_().unbind()
    for deterministic in (True, False) * 5:
        asked.clear()
        sk.attention(q, k, v, mask, deterministic=deterministic).sum().backward()
        assert set(asked) == {deterministic}


OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": (0.5, 0.25),
    "return_lse": (True,),
    "kernel": ("reference.attention", "cpu.attention"),
    "deterministic": (False,),
    "softcap": (20.0, 30.0),
    "alibi_slopes": (torch.ones(2),),
    "sink_logits": (torch.ones(2),),
}
"""Other values of all options of attention than the usual ones."""


def test_every_option_of_attention_is_in_the_key_of_its_recorded_calls(monkeypatch: pytest.MonkeyPatch):
    """However the call gets there: itself, of other operands, through the op, or to its backward pass."""
    others = {"q", "k", "v", "mask", "plan", "once", "scores", "wide"}
    assert {each.name for each in fields(Attended)} - others | {*Scores._fields} == OPTIONS.keys()
    keys: list[Any] = []
    ran: list[Attended] = []

    def repeat(calls: Any, settings: Any, operands: Any, owner: Any = None) -> recorded_calls.Slot:
        keys.append((settings, len(operands)))
        return recorded_calls.UNBOUND

    def run(call: Attended) -> Any:
        ran.append(call)
        return call.q.clone(), None

    monkeypatch.setattr(recorded_calls, "repeat", repeat)
    monkeypatch.setattr(attention_op, "_run", run)
    monkeypatch.setattr(
        attention_autograd, "_attention", lambda q, k, v, call, output, sinks=None: call.of(q, k, v, sinks)
    )
    slot: Any = SimpleNamespace(learns=True, differentiate=lambda apply, call, run: apply(call, (q,), None))
    mask, (q, k, v), seen = sk.BlockMask.causal(64), torch.randn(3, 1, 2, 64, 16), set()
    for name, value in [("", None), *((name, each) for name, values in OPTIONS.items() for each in values)]:
        given: dict[str, Any] = {name: value} if name else {}
        given = {"scores": Scores(**given)} if name in Scores._fields else given
        call = Attended(q, k, v, mask, **given)
        through_op(call)
        learned = attention_autograd.differentiate(replace(call), slot)
        learned = learned if call.return_lse else learned[0]
        calls = call, call.of(q, k, v, call.scores.sink_logits), ran[-1], learned
        keys.clear()
        for each in calls:
            attention_plans.recorded(each, "attention", each.tensors)
        assert len(set(keys)) == 1, name
        assert not {*keys} & seen, f"{name} is left out"
        seen |= {*keys}


@pytest.mark.parametrize("mask", [None, sk.BlockMask.causal(64)], ids=["unmasked", "causal"])
def test_recorded_calls_keep_no_operand_alive(mask: sk.BlockMask | None, recorded: list[Any]):
    for _ in range(4):
        q, k, v = (x.clone().requires_grad_() for x in torch.randn(3, 1, 2, 64, 16))
        out = sk.attention(q, k, v, mask, sink_logits=torch.randn(2), alibi_slopes=torch.rand(2))
        out.sum().backward()
    for each in recorded:  # what is really recorded has neither
        each().rerun = each().operands = each().made_of = None
    held = [*map(weakref.ref, (q, k, v, out))]
    del q, k, v, out
    gc.collect()
    assert recorded
    assert [each() for each in held] == [None] * 4


@pytest.mark.parametrize("verb", VERBS)
def test_a_step_that_is_bound_is_found_without_a_key(verb: str, unchecked: Any):
    step = Step(verb)
    for _ in range(4):
        step.turn()
    unchecked()
    step.turn()


# Products are alike, and so are linear calls: half of each in a run.
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("verb", [*half(VERBS[:4]), *half(VERBS[4:9]), *VERBS[9:]])
def test_a_bound_step_follows_what_changes(verb: str, change: Callable[[Step], None]):
    step = Step(verb)
    for _ in range(4):
        step.turn()
    for _ in range(4):
        change(step)
    step.turn()


@pytest.mark.parametrize(
    ("index", "most"), [(0, 4), (5, 4), (10, 7), (13, 6), (14, 7), (17, 5), (19, 14), (20, 4)]
)
def test_a_bound_call_takes_few_calls_of_python(index: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """The verb, what it asks of its matrices, and `repeat`: everything else of a call is C, or the recorded call."""
    call = calls()[index]
    for _ in range(3):
        call()
    monkeypatch.setattr(Again, "repeat", lambda self, given: (None, None))
    ours = of_python(call)
    assert len(ours) <= most, ours


@pytest.mark.parametrize(("verb", "most"), [("linear", 20), ("layer", 21), ("attention", 16)])
def test_a_bound_step_takes_few_calls_of_python(verb: str, most: int):
    """A forward pass and its backward pass, without what torch calls itself."""
    x, dy = torch.randn(24, 192, requires_grad=True), torch.randn(24, 128)
    layer = sk.nn.BlockSparseLinear.from_bsr(matrices()[0], torch.randn(128))
    q, k, v = (each.clone().requires_grad_() for each in torch.randn(3, 1, 2, 64, 16))
    mask, wanted = sk.BlockMask.causal(64), (x, layer.values, layer.bias)

    def step() -> Any:
        if verb == "attention":
            return torch.autograd.grad(sk.attention(q, k, v, mask), (q, k, v), q.detach())
        out = layer(x) if verb == "layer" else sk.linear(x, layer.weight, layer.bias)
        return torch.autograd.grad(out, cast(Any, wanted), dy)

    kept: dict[int, Any] = {}
    again = Again.repeat

    def once(self: Again, given: Sequence[torch.Tensor]) -> Any:
        if id(self) not in kept:
            kept[id(self)] = again(self, given)
        return kept[id(self)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Again, "repeat", once)
        for _ in range(4):
            step()
        ours = of_python(step)
    assert len(ours) <= most, ours


def of_python(call: Callable[[], Any]) -> list[str]:
    """The functions of this library that a call calls."""
    seen: list[str] = []
    library = str(Path(sk.__file__).parent)

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(library):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name != "<lambda>"]
