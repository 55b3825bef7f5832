"""Values and gradients of attention as a user gets them: for which inputs, by which kernels, and what is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.attn.kernels.backward import cpu_bwd as cpu_attention_bwd
from sparsek.attn.kernels.forward import cpu_fwd as cpu_attention
from sparsek.core.errors import InvalidInput
from sparsek.products.ops.gradients import same_family
from sparsek.testing.attention_budget import check_attention_backward
from tests.ops.operands import Seen
from tests.ops.tensors import LAYOUTS, Qkv, check, qkv, window
from tests.refusals import refused

FAMILIES = ["cpu.attention", "reference.attention"]
ON_GPU = ["hopper.attention_fwd", "portable.attention_fwd", "reference.attention"]


def leaves(tensors: Qkv) -> Qkv:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    return q, k, v


def hold(
    tensors: Qkv,
    mask: sk.BlockMask | None,
    *,
    of_lse: bool = False,
    make_grad: Callable[[Tensor], Tensor] = torch.randn_like,
    values: bool = True,
    **call: Any,
) -> tuple[Tensor, ...]:
    """The gradients, after they were held to the error budget, and first the `values` of inputs that need none."""
    (s, t), device = (tensors[0].shape[2], tensors[1].shape[2]), tensors[0].device
    whole = sk.BlockMask.full(q_len=s, kv_len=t, device=device) if mask is None else mask
    if values:
        check(tensors, whole, *sk.attention(*tensors, mask, return_lse=True, **call), call.get("scale"))
    q, k, v = leaves(tensors)
    out, lse = sk.attention(q, k, v, mask, return_lse=True, **call)
    torch.manual_seed(3)
    grad = make_grad(out.detach())
    grad_lse = torch.randn_like(lse) if of_lse else None
    outputs, grads = ([out, lse], [grad, grad_lse]) if of_lse else ([out], [grad])
    found = torch.autograd.grad(outputs, (q, k, v), grads)
    gate = check_attention_backward(*tensors, whole, grad, found, grad_lse, scale=call.get("scale"))
    assert gate.passed, gate
    for x, of_x in zip(tensors, found, strict=True):
        assert of_x.dtype == x.dtype
        assert of_x.is_contiguous() or of_x.transpose(1, 2).is_contiguous()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "out and lse"])
def test_attention_has_values_and_gradients(dtype: torch.dtype, of_lse: bool, device: str):
    tensors, mask = qkv(dtype=dtype, dims=(64, 64), device=device), window(device=device)
    hold(tensors, mask, of_lse=of_lse)
    assert of_lse or torch.equal(
        sk.attention(*tensors, mask), sk.attention(*tensors, mask, return_lse=True)[0]
    )


@pytest.mark.parametrize("kernel", FAMILIES)
def test_every_family_has_gradients(kernel: str, plans_made: list[str]):
    hold(qkv(), window(), of_lse=True, kernel=kernel, scale=0.3)
    assert plans_made == [kernel, same_family(kernel, "attention_backward")]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ON_GPU)
@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "out and lse"])
def test_every_family_on_a_gpu_has_gradients(kernel: str, of_lse: bool, plans_made: list[str]):
    tensors = qkv(300, dims=(64, 128), dtype=torch.bfloat16, device="cuda")
    mask = sk.BlockMask.sliding_window(300, 70, block=128, device="cuda")
    hold(tensors, mask, of_lse=of_lse, values=False, kernel=kernel)
    assert plans_made == [kernel, same_family(kernel, "attention_backward")]


def test_a_named_kernel_without_a_backward_pass_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, plans_made: list[str]
):
    """As hopper.attention_fwd with a head dim of 256."""
    backward, forward = cpu_attention_bwd.KERNEL, cpu_attention.KERNEL
    monkeypatch.setattr(type(backward), "why_not", lambda self, p: ["its registers are full"])
    tensors, mask = qkv(67), window(67)
    name = forward.name
    sk.attention(*tensors, mask, kernel=name)

    def refuse(*_: Any) -> None:
        raise AssertionError("the forward pass runs")

    monkeypatch.setattr(type(forward), "launch", refuse)

    def loss(q: Tensor, kernel: str | None = name) -> Tensor:
        return sk.attention(q, *tensors[1:], mask, kernel=kernel).sum()

    q, _, _ = leaves(tensors)
    stacked = torch.stack((q.detach(), q.detach()))
    for call in (
        lambda: loss(q),
        lambda: torch.func.grad(loss)(q.detach()),
        lambda: torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(stacked),
        lambda: torch.vmap(torch.func.grad(loss))(stacked),
    ):
        with pytest.raises(sk.Unsupported, match=r"cpu.attention_bwd cannot run this; reference") as raised:
            call()
        assert raised.value.reasons["cpu.attention_bwd"] == ["its registers are full"]
    monkeypatch.undo()
    torch.vmap(loss)(stacked)
    loss(q).backward()


def test_without_a_mask_too(device: str):
    hold(qkv(100, 150, dims=(64, 64), dtype=torch.float16, device=device), None)


@pytest.mark.parametrize(
    ("join", "count"), [("per_head", 1), ("per_head", 2), ("per_head", 4), ("per_batch", 2)]
)
def test_a_mask_may_be_for_all_heads_each_of_k_each_of_q_or_each_batch_item(join: str, count: int):
    masks = [window(width=30 * (place + 1)) for place in range(count)]
    hold(qkv(heads=(4, 2)), getattr(sk.BlockMask, join)(masks), of_lse=True)


def test_queries_that_see_nothing_get_nothing():
    dq, *_ = hold(qkv(192, 64), sk.BlockMask.causal(q_len=192, kv_len=64, block=64), of_lse=True)
    assert not dq[:, :, :128].any()


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 64, 64), (2, 0, 64), (2, 64, 0), (2, 0, 0)])
def test_without_queries_keys_or_batch_items_gradients_are_0(batch: int, q_len: int, kv_len: int):
    tensors = leaves(qkv(q_len, kv_len, batch=batch))
    out, lse = sk.attention(*tensors, return_lse=True)
    found = torch.autograd.grad((out, lse), tensors, (torch.ones_like(out), torch.ones_like(lse)))
    for x, of_x in zip(tensors, found, strict=True):
        assert of_x.shape == x.shape
        assert not of_x.any()


@pytest.mark.parametrize("kernel", FAMILIES)
def test_gradients_are_those_of_finite_differences(kernel: str):
    mask = sk.BlockMask.sliding_window(70, 20, sinks=3, block=64)
    tensors = leaves(qkv(70, dims=(3, 2), dtype=torch.float64))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return sk.attention(q, k, v, mask, kernel=kernel, return_lse=True)

    assert gradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_q_k_and_v_may_lie_in_memory_as_they_like(name: str, device: str):
    q, k, v = qkv(dtype=torch.float16, dims=(64, 64), device=device)
    hold((LAYOUTS[name](q), LAYOUTS[name](k), LAYOUTS[name](v)), window(device=device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_so_may_the_gradient_of_out(name: str, device: str):
    tensors = qkv(dtype=torch.float16, dims=(64, 64), device=device)
    hold(tensors, window(device=device), make_grad=lambda out: LAYOUTS[name](torch.randn_like(out)))


def test_a_sum_gives_an_expanded_gradient(device: str):
    tensors = qkv(dtype=torch.float16, dims=(64, 64), device=device)
    hold(tensors, window(device=device), make_grad=lambda out: out.new_ones(()).expand(out.shape))


def test_gradients_lie_in_memory_as_their_operands_do():
    q, k, v = qkv(dims=(32, 48))
    found = hold((LAYOUTS["bshd"](q), k, LAYOUTS["sbhd"](v)), window())
    for of_x, by_positions in zip(found, (True, False, True), strict=True):
        assert (of_x.transpose(1, 2) if by_positions else of_x).is_contiguous()


@pytest.mark.parametrize("place", range(3))
def test_only_the_gradients_that_are_wanted_are_given(place: int):
    tensors = qkv()
    expected = hold(tensors, window(), make_grad=torch.ones_like)[place]
    q, k, v = (x.clone().requires_grad_(at == place) for at, x in enumerate(tensors))
    sk.attention(q, k, v, window()).backward(torch.ones(2, 4, 192, 64))
    assert [x.grad is not None for x in (q, k, v)] == [at == place for at in range(3)]
    assert torch.equal((q, k, v)[place].grad, expected)  # type: ignore[arg-type]


def test_lse_alone_has_gradients():
    q, k, v = leaves(qkv())
    mask = window()
    _, lse = sk.attention(q, k, v, mask, return_lse=True)
    of_q, of_k, of_v = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).mT * 32**-0.5).masked_fill(~mask.to_dense(), -torch.inf)
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close((of_q, of_k), expected)
    assert not of_v.any()


def test_merged_parts_are_attention_over_all_keys_and_have_its_gradients():
    """Queries 0 to 129 stand at keys 62 to 191. The last 128 keys are behind some of them."""
    q, k, v = leaves(qkv(130, 192, dtype=torch.float64))
    early = sk.BlockMask.causal(q_len=130, kv_len=64, block=64, q_offset=62)
    late = sk.BlockMask.causal(q_len=130, kv_len=128, block=64, q_offset=-2)
    first = sk.attention(q, k[:, :, :64], v[:, :, :64], early, return_lse=True)
    second = sk.attention(q, k[:, :, 64:], v[:, :, 64:], late, return_lse=True)
    assert (second[1] == -torch.inf).any()
    whole = sk.BlockMask.causal(q_len=130, kv_len=192, block=64)
    out, lse = sk.attention(q, k, v, whole, return_lse=True)
    expected = torch.autograd.grad(out.sin().sum(), (q, k, v))
    for parts in ((*first, *second), (*second, *first)):
        merged, total = sk.merge_attention(*parts)
        torch.testing.assert_close((merged, total), (out, lse))
        found = torch.autograd.grad(merged.sin().sum(), (q, k, v), retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_deterministic_reaches_the_plan(monkeypatch: pytest.MonkeyPatch):
    tensors, mask = leaves(qkv()), window()
    asked: list[bool] = []
    kernel: Any = sk.plan_attention_backward(*tensors, mask).implementation
    prepare = type(kernel).prepare
    monkeypatch.setattr(
        type(kernel), "prepare", lambda self, p, c, m: asked.append(p.deterministic) or prepare(self, p, c, m)
    )
    for choice in (True, False):
        sk.attention(*tensors, mask, deterministic=choice).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        sk.attention(*tensors, window(), deterministic=False).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [True, False, True]


def test_a_plan_with_lse_takes_inputs_with_gradients():
    tensors, mask = leaves(qkv()), window()
    plan = sk.plan_attention(*tensors, mask, return_lse=True)
    cotangent = torch.randn(2, 4, 192, 64)
    expected = torch.autograd.grad(sk.attention(*tensors, mask), tensors, cotangent)
    out = sk.attention(*tensors, mask, plan=plan)
    both, lse = sk.attention(*tensors, mask, plan=plan, return_lse=True)
    assert torch.equal(out, both)
    assert lse.requires_grad
    for planned in (out, both):
        found = torch.autograd.grad(planned, tensors, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_backward_plan_gives_what_backward_gives():
    tensors, mask = leaves(qkv()), window()
    out, lse = sk.attention(*tensors, mask, return_lse=True, scale=0.3)
    grads = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), tensors, grads)
    plan = sk.plan_attention_backward(*tensors, mask)
    found = plan(*tensors, mask, out, lse, *grads, scale=0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(x.requires_grad for x in found)


def test_a_second_step_makes_no_new_plan(plans_made: list[str]):
    mask = window()
    for _ in range(3):
        sk.attention(*leaves(qkv()), mask).sum().backward()
    assert plans_made == ["cpu.attention", "cpu.attention_bwd"]


def test_the_transposed_lists_are_built_once_and_only_for_kernels_that_read_them(
    monkeypatch: pytest.MonkeyPatch,
):
    from sparsek.attn.mask import elements

    built, real = [], elements.transposed
    monkeypatch.setattr(elements, "transposed", lambda mask: built.append(mask) or real(mask))
    mask = window()
    sk.attention(*leaves(qkv()), mask).sum().backward()
    assert not built
    kernel: Any = sk.plan_attention_backward(*qkv(), mask).implementation
    prepare = type(kernel).prepare

    def reading(self: Any, p: Any, c: Any, of: sk.BlockMask) -> Any:
        assert of.transposed.full.indices is not None
        return prepare(self, p, c, of)

    monkeypatch.setattr(type(kernel), "prepare", reading)
    for batch in (1, 3):
        sk.attention(*leaves(qkv(batch=batch)), mask).sum().backward()
    assert built == [mask]


def test_a_forward_pass_without_a_gradient_keeps_nothing(plans_made: list[str]):
    q, k, v = qkv()
    mask = window()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("kept"), lambda t: t):
        out = sk.attention(q, k, v, mask)
        with torch.no_grad():
            sk.attention(*leaves((q, k, v)), mask)
    assert out.grad_fn is None
    assert len(plans_made) == 1


def test_what_is_kept_are_the_operands_out_and_lse():
    q, k, v = leaves(qkv())
    mask, kept = window(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = sk.attention(q, k, v, mask)
    assert kept == [q.shape, k.shape, v.shape, out.shape, out.shape[:3]]


def test_a_training_step_makes_nothing_as_large_as_the_scores():
    length = 4096
    q, k, v = leaves(qkv(length, heads=(1, 1), dims=(8, 8), batch=1))
    mask = sk.BlockMask.sliding_window(length, 64, sinks=16, block=64)
    plan = sk.plan_attention_backward(q, k, v, mask)
    with torch.no_grad(), Seen() as seen:
        out, lse = sk.plan_attention(q, k, v, mask, return_lse=True)(q, k, v, mask)
        plan(q, k, v, mask, out, lse, torch.randn_like(out))
    assert 0 < seen.largest <= max(mask.stored_blocks * 64 * 64, 1 << 19) < length * length / 8


@pytest.mark.parametrize("what", ["q", "k", "v", "out"])
def test_a_tensor_that_was_written_to_is_told(what: str):
    q, k, v = (x * 1 for x in leaves(qkv()))
    out = sk.attention(q, k, v, window())
    loss = out.sum()
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "out": out}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_outlive_the_mask():
    tensors = leaves(qkv())
    cotangent = torch.randn(2, 4, 192, 64)
    mask = window()
    expected = torch.autograd.grad(sk.attention(*tensors, mask), tensors, cotangent)
    out = sk.attention(*tensors, window())
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, tensors, cotangent), expected, strict=True)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool):
    mask, cotangent = window(), torch.randn(2, 4, 192, 64)
    alone, again = leaves(qkv()), leaves(qkv())
    sk.attention(*alone, mask).backward(cotangent)
    out: Any = checkpoint(lambda q, k, v: sk.attention(q, k, v, mask), *again, use_reentrant=reentrant)
    out.backward(cotangent)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(alone, again, strict=True))  # type: ignore[arg-type]


def test_autocast_casts_the_operands_of_a_training_step_and_no_gradient():
    tensors, mask = leaves(qkv()), window()
    q, k, v = (x.bfloat16() for x in tensors)
    expected = torch.autograd.grad(sk.attention(q, k, v, mask).sum(), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(sk.attention(*tensors, mask).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_second_derivative_is_refused_in_words():
    q, k, v = leaves(qkv())
    (of_q,) = torch.autograd.grad(sk.attention(q, k, v, window()).sum(), q, create_graph=True)
    (expected,) = torch.autograd.grad(sk.attention(q, k, v, window()).sum(), q)
    assert torch.equal(of_q, expected)
    refused(
        r"gradients of attention have no gradients themselves; sparsek.attn.reference", of_q.sum().backward
    )


def test_a_graph_may_be_made_where_nothing_asks_for_the_second_derivative():
    """As gradient penalties do for other parts of a model."""
    q, k, v = leaves(qkv())
    factor = torch.ones((), requires_grad=True)
    loss = (factor**3 * sk.attention(q, k, v, window()).detach().sum()) + sk.attention(
        q, k, v, window()
    ).sum()
    of_factor, _ = torch.autograd.grad(loss, (factor, q), create_graph=True)
    assert torch.autograd.grad(of_factor, factor)[0].isfinite()


GRADS: dict[str, tuple[Callable[..., Any], str]] = {
    "out": (lambda out, lse, grad: (out[..., 1:], lse, grad), r"out must be torch.float32 \[2, 4, 192, 64\]"),
    "lse": (lambda out, lse, grad: (out, lse.double(), grad), r"lse must be torch.float32 \[2, 4, 192\]"),
    "grad": (lambda out, lse, grad: (out, lse, grad.half()), r"grad must be .* got torch.float16"),
    "no grad": (lambda out, lse, grad: (out, lse, None), "grad must be a dense torch.Tensor"),
    "grad_lse": (
        lambda out, lse, grad: (out, lse, grad, lse[:1]),
        r"grad_lse must be .* got .*\[1, 4, 192\]",
    ),
    "gaps": (
        lambda out, lse, grad: (torch.cat((out, out), 3)[..., :64], lse, grad),
        "out and lse must have the memory layout that attention gave them",
    ),
}


@pytest.mark.parametrize("name", GRADS)
def test_a_backward_plan_refuses_other_operands(name: str):
    tensors, mask = qkv(), window()
    plan = sk.plan_attention_backward(*tensors, mask)
    out, lse = sk.attention(*tensors, mask, return_lse=True)
    change, text = GRADS[name]
    refused(text, plan, *tensors, mask, *change(out, lse, torch.ones_like(out)))


def test_a_backward_plan_refuses_another_mask_and_kernels_of_the_forward_pass():
    tensors, mask = qkv(), window()
    plan = sk.plan_attention_backward(*tensors, mask)
    out, lse = sk.attention(*tensors, mask, return_lse=True)
    refused("another mask", plan, *tensors, window(), out, lse, out)
    words = (
        "no kernel of attention_backward is called 'cpu.attention', .* of its family is 'cpu.attention_bwd'"
    )
    refused(words, sk.plan_attention_backward, *tensors, mask, kernel="cpu.attention")


def test_a_dispatch_mode_sees_the_op_inside_and_around_torch_func():
    q, k, v, mask = *(torch.randn(1, 2, 64, 16) for _ in "qkv"), sk.BlockMask.causal(64, block=64)

    def run(q: torch.Tensor) -> torch.Tensor:
        return sk.attention(q, k, v, mask, softcap=5.0, sink_logits=k[0, :, 0, 0])

    def inside(q: torch.Tensor) -> torch.Tensor:
        with Seen():
            return run(q)

    right, back, *_ = torch.func.vjp(run, q)
    (wanted,) = back(right)
    seen = Seen()
    for around in (FlopCounterMode(display=False), seen):
        with around:
            out, back, *_ = torch.func.vjp(run, q)
            (grad,) = back(right)
            torch.testing.assert_close(torch.vmap(run)(q[None])[0], right)
            torch.testing.assert_close(torch.func.grad(lambda q: (run(q) * right.detach()).sum())(q), wanted)
        torch.testing.assert_close((out, grad), (right, wanted))
    assert {"sparsek.attention.default", "sparsek.attention_backward.default"} == set(seen.of_sparsek)
    torch.testing.assert_close(torch.vmap(inside)(q[None])[0], right)
    torch.testing.assert_close(torch.func.vjp(inside, q)[1](right)[0], wanted)


@pytest.mark.parametrize("kernel", ["reference.attention", "cpu.attention"])
def test_a_dispatch_mode_around_the_backward_pass_keeps_the_family_of_a_kernel(kernel: str):
    """(2026-11-28: the op was called with the kernel of the forward pass, and refused it.)"""
    q, k, v = leaves = [torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    out = sk.attention(q, k, v, sk.BlockMask.causal(64), kernel=kernel)
    right = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with Seen() as seen:
        found = torch.autograd.grad(out.sum(), leaves)
    assert seen.count("attention_backward")
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), Seen])
def test_arguments_are_checked_before_a_dispatch_mode_sees_the_op(mode: Any):
    q = torch.randn(1, 2, 64, 16)
    call: Any = sk.attention
    odd: list[tuple[Any, Any]] = [(q, True), (q.tolist(), q), (q, q.numpy()), (q[0], q), (q.to_sparse(), q)]
    with mode():
        for x, v in odd:
            with pytest.raises(InvalidInput):
                call(x, q, v)
        for options in ({"scale": 1j}, {"softcap": "5"}, {"mask": sk.BlockMask.causal(65, block=64)}):
            with pytest.raises(InvalidInput):
                call(q, q, q, **options)


def test_slopes_that_change_before_the_backward_pass_are_noticed() -> None:
    x, slopes = torch.randn(1, 2, 128, 16, requires_grad=True), torch.tensor([0.1, 0.2])
    out = sk.attention(x, x, x, sk.BlockMask.causal(128, block=64), alibi_slopes=slopes)
    slopes.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
