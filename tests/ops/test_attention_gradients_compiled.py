"""Training with attention under torch.compile, torch.func and TorchDispatchModes, and the op of its gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import sparsek as sk
from sparsek.attn.ops import attention_args as library_args
from sparsek.attn.ops import attention_op
from tests.attn.mask.masks import in_one_buffer
from tests.ops.tensors import Qkv, qkv, window
from tests.refusals import refused
from tests.sampling import sampled
from tests.sums import alike

# torch._dynamo's tracer of custom ops warns of attributes that leaves do not have.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def calls(graph: Any) -> list[str]:
    """Names of SparseK's operations in a graph."""
    return [str(node.target) for node in graph.graph.nodes if "sparsek" in str(node.target)]


MASKS: dict[str, Callable[[], "sk.BlockMask | None"]] = {
    "none": lambda: None,
    "window": window,
    "one buffer": lambda: in_one_buffer(window()),
    "both": lambda: window() | sk.BlockMask.from_dense(torch.rand(192, 192) < 0.4, 64),
    "per head": lambda: sk.BlockMask.per_head([window(), window(width=9)]),
}


def loss(q: Tensor, k: Tensor, v: Tensor, mask: "sk.BlockMask | None", **more: Any) -> Tensor:
    return sk.attention(q, k, v, mask, scale=0.2, **more).square().sum()


def loss_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: "sk.BlockMask | None") -> Tensor:
    out, lse = sk.attention(q, k, v, mask, return_lse=True)
    return out.square().sum() + lse.sin().sum()


def grads(run: Callable[..., Tensor], tensors: Qkv, *more: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(run(*leaves, *more), leaves)


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "run"), [("none", loss), ("window", loss_with_lse), ("both", loss_with_lse), ("per head", loss)]
)
def test_compiled_training_is_one_node_forward_and_one_backward(name: str, run: Any, recorder: Any):
    tensors, mask = qkv(), MASKS[name]()
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    for factor in (1, 2):
        scaled = tensors[0] * factor, *tensors[1:]
        assert same(grads(compiled, scaled, mask), grads(run, scaled, mask))
    assert [calls(graph) for graph in recorder.fw_graphs] == [["sparsek.attention.default"]]
    assert [calls(graph) for graph in recorder.bw_graphs] == [["sparsek.attention_backward.default"]]


def test_compiled_steps_with_one_mask_plan_once(recorder: Any, plans_made: list[str]):
    tensors, mask = qkv(), window()
    compiled = torch.compile(loss, fullgraph=True, backend=recorder)
    for _ in range(3):
        grads(compiled, tensors, mask)
    assert plans_made == ["cpu.attention", "cpu.attention_bwd"]


def test_compiled_once_for_new_masks_of_the_same_sizes(recorder: Any):
    tensors = qkv()
    compiled = torch.compile(loss, fullgraph=True, backend=recorder)
    for each in torch.rand(3, 1, 1, 3, 3):
        mask = sk.BlockMask.topk(each, 2, seq_len=192, block=64)
        assert same(grads(compiled, tensors, mask), grads(loss, tensors, mask))
    assert len(recorder.fw_graphs) == 1


def test_compiled_for_lengths_that_change(recorder: Any):
    compiled = torch.compile(loss, fullgraph=True, backend=recorder, dynamic=True)
    for length in (100, 130, 170):
        found, expected = (grads(run, qkv(length), None) for run in (compiled, loss))
        torch.testing.assert_close(found, expected)
    assert len(recorder.fw_graphs) <= 2


def test_compiled_gradients_lie_in_memory_as_their_operands_do():
    torch._dynamo.reset()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    compiled = torch.compile(partial(loss, mask=window()), fullgraph=True, backend="aot_eager")
    found = grads(compiled, (q, k, v))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)
    assert same(found, grads(partial(loss, mask=window()), (q, k, v)))


def test_compiled_without_gradients_no_lse_is_made(recorder: Any):
    tensors = qkv()
    compiled = torch.compile(loss, fullgraph=True, backend=recorder)
    with torch.no_grad():
        q, k, v = (x.requires_grad_() for x in tensors)
        compiled(q, k, v, window())
    (node,) = [n for n in recorder.fw_graphs[0].graph.nodes if "sparsek" in str(n.target)]
    assert False in node.args


def test_compiled_with_a_named_kernel_and_any_order_of_sums(recorder: Any, plans_made: list[str]):
    run = partial(loss, kernel="reference.attention", deterministic=False)
    mask = window()
    grads(torch.compile(run, fullgraph=True, backend=recorder), qkv(), mask)
    assert plans_made == ["reference.attention", "reference.attention_bwd"]
    assert False in next(n for n in recorder.bw_graphs[0].graph.nodes if "sparsek" in str(n.target)).args


def test_compiled_checkpointing_computes_the_forward_pass_again(recorder: Any):
    tensors, mask = qkv(), window()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(loss, q, k, v, mask, use_reentrant=False)

    found = grads(torch.compile(run, fullgraph=True, backend=recorder), tensors)
    assert same(found, grads(run, tensors))
    assert calls(recorder.bw_graphs[0]) == ["sparsek.attention.default", "sparsek.attention_backward.default"]


def test_selective_checkpointing_may_keep_what_attention_gave(monkeypatch: pytest.MonkeyPatch):
    runs: list[Any] = []
    called = attention_op.call_of
    monkeypatch.setattr(attention_op, "call_of", lambda *given: (runs.append(given), called(*given))[1])

    def policy(context: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
        keep = op == torch.ops.sparsek.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(loss, q * 2, k, v, mask, use_reentrant=False, context_fn=contexts)

    tensors, mask = qkv(), window()
    found = grads(run, tensors)
    assert len(runs) == 1
    assert same(found, grads(lambda q, k, v: loss(q * 2, k, v, mask), tensors))


def test_make_fx_traces_a_training_step():
    tensors, mask = qkv(), window()
    traced = make_fx(lambda *t: grads(loss, t, mask))(*tensors)
    assert calls(traced) == ["sparsek.attention.default", "sparsek.attention_backward.default"]
    assert same(traced(*tensors), grads(loss, tensors, mask))


def backward_args(mask: "sk.BlockMask | None", with_lse: bool, changed: bool = False) -> tuple[Any, ...]:
    tensors = qkv()
    heads = tensors[0].shape[1]
    changes = (2.0, torch.rand(heads), torch.rand(heads)) if changed else (0.0, None, None)
    softcap, slopes, sinks = changes
    out, lse = sk.attention(
        *tensors, mask, return_lse=True, softcap=softcap, alibi_slopes=slopes, sink_logits=sinks
    )
    grad_lse = torch.randn_like(lse) if with_lse else None
    return (
        *tensors,
        out,
        lse,
        torch.randn_like(out),
        grad_lse,
        *library_args.flat_mask(mask),
        None,
        True,
        None,
        *changes,
    )


@pytest.mark.parametrize(
    ("name", "with_lse", "changed"),
    sampled(
        [
            ("none", True, True),
            ("window", False, False),
            ("window", True, True),
            ("both", True, False),
            ("per head", True, True),
        ],
        2,
    ),
)
def test_the_op_of_the_gradients_passes_torchs_own_checks(name: str, with_lse: bool, changed: bool):
    torch.library.opcheck(
        torch.ops.sparsek.attention_backward.default, backward_args(MASKS[name](), with_lse, changed)
    )


@pytest.mark.parametrize(
    ("name", "changed"),
    sampled([("none", True), ("window", False), ("window", True), ("both", False), ("per head", True)], 2),
)
def test_the_op_passes_torchs_own_checks_of_its_gradients(name: str, changed: bool):
    q, k, v = (x.requires_grad_() for x in qkv())
    slopes, sinks = torch.rand(2, q.shape[1])
    changes = (2.0, slopes, sinks.requires_grad_()) if changed else (0.0, None, None)
    args = q, k, v, *library_args.flat_mask(MASKS[name]()), 0.1, True, None, True, *changes
    torch.library.opcheck(torch.ops.sparsek.attention.default, args)


def test_the_op_without_lse_says_that_gradients_need_it():
    q, k, v = (x.requires_grad_() for x in qkv())
    args = q, k, v, *library_args.flat_mask(window()), None, False, None, True, 0.0, None, None
    out, _ = torch.ops.sparsek.attention(*args)
    refused(r"gradients need lse; call .* with return_lse=True", out.sum().backward)


def test_the_op_of_the_gradients_has_no_gradient():
    args = backward_args(window(), True)
    args[0].requires_grad_()
    of_q, *_ = torch.ops.sparsek.attention_backward(*args)
    refused("have no gradients themselves", of_q.sum().backward)


def test_torch_func_differentiates():
    tensors, mask = qkv(), window()
    expected = grads(loss_with_lse, tensors, mask)
    run = partial(loss_with_lse, mask=mask)
    assert same(torch.func.grad(run, argnums=(0, 1, 2))(*tensors), expected)
    value, back, *_ = torch.func.vjp(run, *tensors)
    assert same(back(torch.ones_like(value)), expected)


def test_torch_func_leaves_the_mask_of_a_call_without_one_as_it_is():
    tensors = qkv(61)
    run: Any = partial(loss, mask=None)
    found = torch.func.grad(run, argnums=(0, 1, 2))(*tensors)
    assert same(found, grads(run, tensors))
    assert torch.vmap(run)(*(x[None] for x in tensors)).shape == (1,)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 0, None), (None, 1, 4)])
def test_vmap_makes_one_batch_of_its_dim_and_the_items(in_dims: tuple[Any, ...], plans_made: list[str]):
    mask = window()
    stacked = [torch.stack((x, x.flip(2), 2 * x)) for x in qkv()]
    given = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(stacked, in_dims, strict=True)]
    each = [
        [x[0] if dim is None else x[i] for x, dim in zip(stacked, in_dims, strict=True)] for i in range(3)
    ]
    out, lse = torch.vmap(partial(sk.attention, mask=mask, return_lse=True), in_dims)(*given)
    of_one: Any = torch.func.grad(partial(loss, mask=mask), argnums=(0, 1, 2))
    of_all = torch.vmap(of_one, in_dims)(*given)
    assert len(plans_made) == 2
    for i, tensors in enumerate(each):
        q, k, v = tensors
        assert all(map(alike, (out[i], lse[i]), sk.attention(q, k, v, mask, return_lse=True)))
        for x, right in zip(of_all, grads(loss, (q, k, v), mask), strict=True):
            assert alike(x[i], right, terms=1 << 14)  # a chain, which magnifies


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "vmap with a mask for each item": (
        lambda run, *t: torch.vmap(partial(loss, mask=sk.BlockMask.per_batch([sk.BlockMask.full(3)] * 2)))(
            *(x.expand(2, 2, *x.shape[1:]) for x in t)
        ),
        r"vmap makes one batch of its own dim and the batch items, .* got a mask of 2 batch items",
    ),
    "jvp": (
        lambda run, *t: torch.func.jvp(run, t, t),
        r"attention has no forward-mode derivative .*sparsek.attn.reference.attention.attention has one",
    ),
    "jacfwd": (lambda run, *t: torch.func.jacfwd(run)(*t), "attention has no forward-mode derivative"),
    "hessian": (lambda run, *t: torch.func.hessian(run)(*t), "attention has no forward-mode derivative"),
    "jvp of grad": (
        lambda run, q, k, v: torch.func.jvp(lambda q: torch.func.grad(run)(q, k, v), (q,), (q,)),
        "attention has no forward-mode derivative",
    ),
    "top-k under vmap": (
        lambda run, q, k, v: torch.vmap(lambda q: sk.MaskPolicy(topk=1).mask_for(q, k).full.starts)(q[None]),
        "a top-k mask follows values, which torch.func.vmap maps over here; make it outside",
    ),
    "grad of grad": (
        lambda run, q, k, v: torch.func.grad(lambda q: torch.func.grad(run)(q, k, v).sum())(q),
        "have no gradients themselves",
    ),
    "plan": (
        lambda run, q, k, v: torch.func.grad(planned(q, k, v))(q),
        r"plans do not go through torch.compile and torch.func",
    ),
    "a plan from inside": (
        lambda run, q, k, v: torch.func.grad(lambda x: planned(x, k, v)(x))(q),
        r"plans are made outside of functions that torch.func transforms",
    ),
}


def test_a_mask_may_be_made_inside_of_what_torch_func_transforms():
    q, k, v = qkv(3, heads=(1, 1), dims=(2, 2), batch=1)
    inside = torch.func.grad(lambda q: loss(q, k, v, sk.BlockMask.causal(3)))(q)
    assert torch.equal(inside, torch.func.grad(partial(loss, mask=sk.BlockMask.causal(3)))(q, k, v))


def planned(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    plan = sk.plan_attention(q, k, v)
    return lambda x: sk.attention(x, k, v, plan=plan).sum()


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_func_cannot_do_is_told(name: str):
    call, text = REFUSED[name]
    refused(text, call, partial(loss, mask=None), *qkv(3, heads=(1, 1), dims=(2, 2), batch=1))


def test_forward_mode_is_refused_not_ignored():
    q, k, v = qkv()
    with forward_ad.dual_level():
        sk.attention(q, k, v, window())
        refused("no forward-mode derivative", sk.attention, forward_ad.make_dual(q, q), k, v, window())


def dual_in_a_mode(run: Any, q: Tensor) -> Any:
    with forward_ad.dual_level(), FlopCounterMode(display=False):
        return run(forward_ad.make_dual(q, q))


@pytest.mark.parametrize(
    ("how", "packed"),
    [
        *((how, packed) for how in ("linearize", "a dispatch mode") for packed in (False, True)),
        ("compiled jvp", False),  # masks of cu_seqlens are made outside of what torch.compile traces
    ],
)
def test_a_traced_call_does_not_take_a_tangent_for_0(how: str, packed: bool):
    q, k, v = qkv()
    ends = torch.tensor([0, q.shape[2]], dtype=torch.int32)

    def run(q: Tensor) -> Tensor:
        if packed:
            packs = [x[0].transpose(0, 1) for x in (q, k, v)]
            return sk.attention_varlen(packs[0], packs[1], packs[2], ends)
        return sk.attention(q, k, v)

    calls: dict[str, Callable[[], Any]] = {
        "linearize": lambda: torch.func.linearize(run, q[:1] if packed else q),
        "a dispatch mode": lambda: dual_in_a_mode(run, q[:1] if packed else q),
        "compiled jvp": lambda: torch.compile(lambda q: torch.func.jvp(run, (q,), (q,)), backend="eager")(q),
    }
    with pytest.raises(Exception, match="no forward-mode derivative"):
        calls[how]()


def test_sinks_are_looked_at_where_make_fx_records():
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -torch.inf]).repeat(q.shape[1])[: q.shape[1]]

    def run(q: Tensor, sinks: Tensor) -> Tensor:
        return sk.attention(q, k, v, sink_logits=sinks)

    assert same([make_fx(run)(q, sinks)(q, sinks)], [run(q, sinks)])
    refused(r"sink_logits\[0\] is nan", make_fx(run), q, sinks * torch.nan)


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_make_fx_records_no_mask_without_values(tracing_mode: Any):
    def run(q: Tensor, blocks: Tensor) -> Tensor:
        mask = sk.BlockMask.from_block_map(blocks, q_len=128, kv_len=128, block=64)
        return sk.attention(q, q, q, mask)

    given = torch.randn(1, 1, 128, 16), torch.eye(2, dtype=torch.bool)[None, None]
    refused("does not record how values choose", make_fx(run, tracing_mode=tracing_mode), *given)
    assert torch.equal(make_fx(run)(*given)(*given), run(*given))


def test_compiled_transforms_of_torch_func_run_uncompiled():
    (q, k, v), mask, vmap = qkv(), window(), torch.func.vmap
    grad = torch.func.grad(lambda q: loss(q, k, v, mask))
    calls = (grad, q), (vmap(grad), q[None]), (vmap(lambda q: sk.attention(q, k, v, mask)), q[None])
    for call, x in calls:
        assert alike(torch.compile(call, backend="aot_eager")(x), call(x))
