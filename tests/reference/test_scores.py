"""Softcap, ALiBi slopes and learned sinks in the reference: against their definition, and by finite differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention, attention_backward
from sparsek.attn.reference.scores import Scores, sink_gradients
from tests.attn.kernels.forward.changes import CHANGES

SIZE = {"q_len": 70, "kv_len": 90, "block": 64, "device": "cpu"}
MASKS: dict[str, Callable[[], BlockMask]] = {
    "causal": lambda: BlockMask.causal(**SIZE),
    "the first see nothing": lambda: BlockMask.causal(**SIZE, q_offset=-30),
    "window": lambda: BlockMask.sliding_window(window=9, sinks=5, **SIZE),
}


def leaves() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 4, 70, 3), (2, 2, 90, 3), (2, 2, 90, 2)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def whole(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scores: Scores) -> tuple[Tensor, Tensor]:
    """(out, lse) by whole matrices, key by key: the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("bhid,bhjd->bhij", q, k) * 0.7
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.alibi_slopes is not None:
        i, j = torch.arange(70)[:, None], torch.arange(90)[None]
        s = s - scores.alibi_slopes.expand(2, 4)[:, :, None, None].double() * (i + 90 - 70 - j).abs()
    weights = s.exp() * mask.to_dense()
    total = weights.sum(-1)
    if scores.sink_logits is not None:
        total = total + scores.sink_logits.double().exp()[None, :, None]
    out = (weights @ v) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return out, total.log()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_scores_are_those_of_the_definition(name: str, mask: str) -> None:
    q, k, v = leaves()
    scores, of_mask = CHANGES[name](q), MASKS[mask]()
    with torch.no_grad():
        found = attention(q, k, v, of_mask, scale=0.7, scores=scores)
        torch.testing.assert_close(found, whole(q, k, v, of_mask, scores))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_are_those_of_finite_differences_and_of_the_formulas(name: str, mask: str) -> None:
    given, of_mask = leaves(), MASKS[mask]()
    scores = CHANGES[name](given[0])
    if scores.sink_logits is not None:
        given.append(torch.randn(4, dtype=torch.float64).requires_grad_())

    def run(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        changed = Scores(scores.softcap, scores.alibi_slopes, *sinks)
        out, lse = attention(q, k, v, of_mask, scale=0.7, scores=changed)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert gradcheck(run, given, fast_mode=True)
    out, lse = run(*given)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    right = torch.autograd.grad((out, lse), given, (grad, grad_lse))
    changed = Scores(scores.softcap, scores.alibi_slopes, *given[3:])
    with torch.no_grad():
        q, k, v = given[:3]
        out, lse = attention(q, k, v, of_mask, scale=0.7, scores=changed)
        found = list(
            attention_backward(q, k, v, of_mask, out, lse, grad, grad_lse, scale=0.7, scores=changed)
        )
        if changed.sink_logits is not None:
            found.append(sink_gradients(out, lse, grad, grad_lse, changed.sink_logits).sum(0))
    torch.testing.assert_close(found, right)


def test_a_query_that_sees_no_key_has_its_sink() -> None:
    q, k, v = (x.detach() for x in leaves())
    mask, sinks = MASKS["the first see nothing"](), torch.tensor([1.0, -2.0, 0.5, -torch.inf])
    out, lse = attention(q, k, v, mask, scores=Scores(sink_logits=sinks))
    assert not out[:, :, :30].any()
    assert torch.equal(lse[:, :, :30], sinks.double()[None, :, None].expand(2, 4, 30))
