"""attention with a softcap, ALiBi slopes and learned sinks: values, gradients, plans, torch.func and refusals."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.reference.attention import attention as reference
from sparsek.attn.reference.scores import Scores
from sparsek.core.errors import InvalidInput
from tests.attn.kernels.forward.changes import CHANGES
from tests.refusals import refused

S, T, HEADS = 70, 90, 4
MASKS = {
    "causal": lambda: sk.BlockMask.causal(q_len=S, kv_len=T, block=64),
    "the first see nothing": lambda: sk.BlockMask.causal(q_len=S, kv_len=T, block=64, q_offset=-30),
    "a list per head": lambda: sk.BlockMask.per_head(
        [sk.BlockMask.sliding_window(q_len=S, kv_len=T, block=64, window=5 + 20 * h) for h in range(HEADS)]
    ),
}


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, HEADS, S, 16), (2, 2, T, 16), (2, 2, T, 8)
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def options(name: str, q: Tensor) -> dict[str, Any]:
    scores = CHANGES[name](q)
    return {
        "softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes, "sink_logits": scores.sink_logits,
    }  # fmt: skip


def step(found: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """out, lse and the gradients of a loss of both."""
    out, lse = found
    seen = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sum() + seen.square().sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kernel", ["cpu.attention", "reference.attention"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CHANGES)
def test_values_and_gradients_are_those_of_autograd_through_the_reference(
    name: str, mask: str, kernel: str
) -> None:
    q, k, v = qkv()
    changed, of_mask, leaves = options(name, q), MASKS[mask](), [q, k, v]
    if changed["sink_logits"] is not None:
        changed["sink_logits"] = changed["sink_logits"].contiguous().requires_grad_()
        leaves.append(changed["sink_logits"])
    mine = step(sk.attention(q, k, v, of_mask, return_lse=True, kernel=kernel, **changed), leaves)
    right = step(reference(q, k, v, of_mask, scores=Scores(*changed.values())), leaves)
    for a, b in zip(mine, right, strict=True):
        loose = a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5 if loose else 1e-7, atol=1e-4 if loose else 1e-7)


def test_sinks_alone_may_be_learned() -> None:
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.zeros(HEADS, requires_grad=True)
    sk.attention(q, k, v, sink_logits=sinks).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.shape == (HEADS,)
    assert sinks.grad.abs().min() > 0


@pytest.mark.parametrize("learned", [True, False])
def test_compiled_it_is_one_node_and_gives_the_same(learned: bool) -> None:
    torch._dynamo.reset()
    leaves, slopes = qkv(), torch.rand(2, HEADS)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=learned)
    leaves += [sinks] if learned else []
    mask = MASKS["causal"]()

    def run(slopes: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *more = given
        return sk.attention(
            q, k, v, mask, return_lse=True, softcap=3.0, alibi_slopes=slopes, sink_logits=(*more, sinks)[0]
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(compiled(slopes, *leaves), leaves), step(run(slopes, *leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_functions_of_torch_func_differentiate_and_map_it() -> None:
    q, k, v = (x.detach() for x in qkv())
    slopes, sinks, mask = torch.rand(2, HEADS), torch.randn(HEADS, dtype=torch.float64), MASKS["causal"]()

    def loss(q: Tensor, sinks: Tensor) -> Tensor:
        out = sk.attention(q, k, v, mask, softcap=2.0, alibi_slopes=slopes, sink_logits=sinks)
        return out.square().sum()

    both = torch.stack((q, 2 * q))
    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(both, sinks)
    for at in (0, 1):
        given = both[at].clone().requires_grad_(), sinks.clone().requires_grad_()
        for a, b in zip(torch.autograd.grad(loss(*given), given), found, strict=True):
            torch.testing.assert_close(a, b[at])
    refused("vmap does not map over sink_logits", torch.func.vmap(loss), both, torch.stack((sinks, sinks)))
    with pytest.raises(InvalidInput, match="alibi_slopes were made inside"):
        torch.func.vmap(lambda x: sk.attention(q, k, v, mask, alibi_slopes=x))(slopes)


def test_plans_are_for_calls_that_change_scores_alike() -> None:
    q, k, v = (x.detach() for x in qkv())
    mask, sinks, slopes = MASKS["causal"](), torch.randn(HEADS), torch.rand(HEADS)
    given: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": slopes, "sink_logits": sinks}
    plan = sk.plan_attention(q, k, v, mask, return_lse=True, **given)
    assert "scores     softcap, ALiBi, fp32 sinks" in str(plan.explain())
    out, lse = plan(q, k, v, mask, **given)
    assert torch.equal(out, sk.attention(q, k, v, mask, **given))
    assert torch.equal(out, sk.attention(q, k, v, mask, plan=plan, **given))
    others: list[dict[str, Any]] = [{}, given | {"softcap": 0.0}, given | {"sink_logits": sinks.double()}]
    for other in others:
        refused(r"this plan is for softcap, alibi_slopes, fp32 sink_logits and", plan, q, k, v, mask, **other)
    backward = sk.plan_attention_backward(q, k, v, mask, softcap=2.0, alibi_slopes=slopes)
    grad = torch.randn_like(out)
    found = backward(q, k, v, mask, out, lse, grad, softcap=2.0, alibi_slopes=slopes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(sk.attention(leaves[0], leaves[1], leaves[2], mask, **given), leaves, grad)
    torch.testing.assert_close(found, right)
    refused("give plan_attention_backward the softcap", backward, q, k, v, mask, out, lse, grad)


def test_predicted_plans_know_what_kernels_take() -> None:
    q = torch.empty(4, HEADS, 4096, 128, dtype=torch.bfloat16, device="meta")
    slopes, sinks = torch.ones(HEADS), torch.ones(HEADS, dtype=torch.bfloat16)
    plan = sk.plan_attention(
        q, q, q, device="h200", softcap=50.0, alibi_slopes=slopes, sink_logits=sinks, return_lse=True
    )
    assert plan.kernel == "hopper.attention_fwd"
    assert (plan.config.softcap, plan.config.alibi, plan.config.sinks) == (True, True, "bf16")
    backward = sk.plan_attention_backward(q, q, q, device="h200", softcap=50.0, alibi_slopes=slopes)
    assert backward.kernel == "hopper.attention_bwd"


def test_without_keys_lse_is_the_sink() -> None:
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.randn(HEADS, requires_grad=True)
    out, lse = sk.attention(q, k[:, :, :0], v[:, :, :0], sink_logits=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks.double()[None, :, None].expand(2, HEADS, S))
    (found,) = torch.autograd.grad(lse.sum(), sinks)
    assert torch.equal(found, torch.full((HEADS,), 2.0 * S))


def test_packed_documents_are_attention_of_each() -> None:
    ends, slopes, sinks = [0, 30, 31, 90], torch.rand(HEADS), torch.randn(HEADS)
    given: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": slopes, "sink_logits": sinks}
    q, k, v = (torch.randn(90, heads, 16) for heads in (HEADS, 2, 2))
    cu = torch.tensor(ends)
    out, lse = sk.attention_varlen(q, k, v, cu, mask=sk.MaskPolicy(), return_lse=True, **given)
    for first, last in pairwise(ends):
        one = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        right, sums = sk.attention(one[0], one[1], one[2], sk.MaskPolicy(), return_lse=True, **given)
        torch.testing.assert_close(out[first:last], right[0].transpose(0, 1))
        torch.testing.assert_close(lse[:, first:last], sums[0])
    with pytest.raises(InvalidInput, match="as many queries as keys, and cu_seqlens_k is given"):
        sk.attention_varlen(q, k, v, cu, cu.clone(), alibi_slopes=slopes)


def test_a_layer_has_a_softcap_and_learned_sinks() -> None:
    layer = sk.nn.SparseAttention(32, 4, softcap=5.0, sink_logits=True)
    assert "softcap=5.0, sink_logits=True" in repr(layer)
    assert sk.nn.SparseAttention(32, 4).sink_logits is None
    x = torch.randn(2, 50, 32)
    out = layer(x)
    q, k, v = layer.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split((4, 4, 4), 1)
    found = sk.attention(q, k, v, layer.mask, softcap=5.0, sink_logits=layer.sink_logits)
    assert torch.equal(out, layer.out(found.transpose(1, 2).flatten(2)))
    packed = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 50, 100]))
    torch.testing.assert_close(packed, out.flatten(0, 1))
    out.sum().backward()
    sinks: Any = layer.sink_logits
    assert sinks.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"softcap": -1.0}, "softcap is -1.0; it must be 0, for none, or from 0.001 to 1000"),
        ({"softcap": 1e-9}, "softcap is 1e-09; it must be 0, for none"),
        ({"softcap": "50"}, "softcap is '50'; it must be a finite number"),
        ({"alibi_slopes": torch.ones(3)}, r"float32 \[3\]; for q .* must be torch.float32 \[4\] or \[2, 4\]"),
        ({"alibi_slopes": torch.ones(4).double()}, r"alibi_slopes is torch.float64 \[4\]; .* torch.float32"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, r"pass alibi_slopes.detach\(\)"),
        ({"sink_logits": torch.ones(2, 4)}, r"must be torch.float32 or torch.float64 \[4\]"),
        ({"sink_logits": torch.ones(4).int()}, "sink_logits is torch.int32"),
        ({"sink_logits": [1.0] * 4}, "sink_logits must be a dense torch.Tensor, got list"),
        ({"sink_logits": torch.ones(4, device="meta")}, "sink_logits is on meta and q on cpu"),
        (
            {"sink_logits": torch.tensor([0, -torch.inf, torch.nan, 0])},
            r"sink_logits\[2\] is nan; a sink is a finite",
        ),
        (
            {"sink_logits": torch.tensor([0, torch.inf, 0, 0]).double()},
            r"sink_logits\[1\] is inf; .* or -inf for none",
        ),
        ({"sink_logits": torch.full((4,), torch.nan, requires_grad=True)}, r"sink_logits\[0\] is nan"),
        ({"s_aux": torch.ones(4)}, "it is called sink_logits here"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], text: str) -> None:
    q, k, v = qkv()
    refused(text, sk.attention, q, k, v, **given)
