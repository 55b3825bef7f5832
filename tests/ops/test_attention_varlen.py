"""attention_varlen against torch's dense attention of one document at a time, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from sparsek.attn.mask import cache as kept_masks
from sparsek.core.errors import InvalidInput
from tests.refusals import refused

LENGTHS = {
    "one": [200],
    "several": [100, 64, 150, 3],
    "empty ones": [0, 100, 0, 0, 70, 0],
    "short ones": [1, 2, 3, 4, 5, 60, 1, 1, 1, 30],
    "none": [],
}
POLICIES: dict[str, "sk.MaskPolicy | None"] = {
    "every key": None,
    "causal": sk.MaskPolicy(),
    "window": sk.MaskPolicy(window=20, block=64),
    "window and sinks": sk.MaskPolicy(window=33, sinks=5, block=64),
    "both ways": sk.MaskPolicy(window=20, sinks=3, causal=False),
}


def cu(lengths: list[int], dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(
        [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device
    )


def packed(
    q_total: int, k_total: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (q_total, heads[0], 32), (k_total, heads[1], 32), (k_total, heads[1], 16)
    q, k, v = (torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


def each_by_itself(
    tensors: Any, q_lens: list[int], k_lens: list[int], policy: "sk.MaskPolicy | None"
) -> Tensor:
    """Dense attention of each document; queries that see nothing give 0, as flash-attention says."""
    q, k, v = tensors
    outs = []
    for a, b, c in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        seen = (policy or sk.MaskPolicy(causal=False)).mask(len(a), len(b)).to_dense()[0, 0]
        a, b, c = (x.transpose(0, 1) for x in (a, b, c))
        if not b.shape[1]:
            outs.append(a.new_zeros(a.shape[1], a.shape[0], c.shape[2]))
            continue
        open_rows = seen.any(1, keepdim=True)
        out = functional.scaled_dot_product_attention(
            a[None], b[None], c[None], attn_mask=seen | ~open_rows, enable_gqa=True
        )
        outs.append((out[0] * open_rows).transpose(0, 1))
    return torch.cat(outs) if outs else q.new_zeros(0, q.shape[1], v.shape[2])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LENGTHS)
def test_it_is_the_attention_of_each_document_by_itself(name: str, policy: str):
    lengths = LENGTHS[name]
    tensors = packed(sum(lengths), sum(lengths))
    out = sk.attention_varlen(*tensors, cu(lengths), mask=POLICIES[policy])
    expected = each_by_itself(tensors, lengths, lengths, POLICIES[policy])
    assert out.shape == (sum(lengths), 4, 16)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    if lengths:
        weights = torch.randn_like(out)
        got, want = (torch.autograd.grad((x * weights).sum(), tensors) for x in (out, expected))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "lengths", [([100, 0, 30, 7], [130, 40, 0, 300]), ([64, 1, 1], [10, 200, 64])], ids=str
)
def test_queries_and_keys_may_have_other_lengths_and_end_together(
    lengths: tuple[list[int], list[int]], policy: str
):
    tensors = packed(sum(lengths[0]), sum(lengths[1]))
    ends = cu(lengths[0]), cu(lengths[1], torch.int64)
    out, lse = sk.attention_varlen(*tensors, *ends, POLICIES[policy], scale=0.3, return_lse=True)
    q, k, v = tensors
    scaled = (q * 0.3 * 32**0.5, k, v)
    expected = each_by_itself(scaled, *lengths, POLICIES[policy])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert lse.shape == (4, sum(lengths[0]))
    assert torch.equal(lse.isinf(), (out == 0).all(2).T)


def test_grouped_and_single_heads_of_keys_serve_the_heads_of_queries():
    lengths = LENGTHS["several"]
    for heads in ((4, 1), (4, 4)):
        tensors = packed(sum(lengths), sum(lengths), heads)
        out = sk.attention_varlen(*tensors, cu(lengths), mask=sk.MaskPolicy())
        torch.testing.assert_close(out, each_by_itself(tensors, lengths, lengths, sk.MaskPolicy()))


def test_a_packed_block_mask_is_taken_as_it_is():
    lengths = LENGTHS["several"]
    tensors, total = packed(sum(lengths), sum(lengths)), sum(lengths)
    documents = sk.BlockMask.block_diagonal(lengths, block=64)
    near = documents & sk.BlockMask.sliding_window(total, 20, block=64)
    out = sk.attention_varlen(*tensors, cu(lengths), mask=near)
    torch.testing.assert_close(out, each_by_itself(tensors, lengths, lengths, POLICIES["window"]))


def test_strided_blocks_are_those_of_the_packed_sequence():
    lengths, policy = [300, 340], sk.MaskPolicy(stride=128, window=64, block=64)
    tensors = packed(640, 640)
    mask = sk.BlockMask.block_diagonal(lengths, block=64) & sk.BlockMask.strided(640, 128, 64, block=64)
    assert torch.equal(policy.packed(cu(lengths)).to_dense(), mask.to_dense())
    out = sk.attention_varlen(*tensors, cu(lengths), mask=policy)
    torch.testing.assert_close(out, sk.attention_varlen(*tensors, cu(lengths), mask=mask))
    refused("as many queries as keys", sk.attention_varlen, *tensors, cu([320, 320]), cu(lengths), policy)


def test_top_k_chooses_among_the_blocks_of_the_document():
    lengths = [320, 320]
    tensors = packed(640, 640)
    every = sk.attention_varlen(*tensors, cu(lengths), mask=sk.MaskPolicy(topk=9, block=64))
    torch.testing.assert_close(every, each_by_itself(tensors, lengths, lengths, sk.MaskPolicy()))
    some = sk.attention_varlen(*tensors, cu(lengths), mask=sk.MaskPolicy(topk=2, block=64))
    q, k, v = tensors
    alone = sk.MaskPolicy(topk=2, block=64)
    parts = [
        sk.attention_varlen(q[at], k[at], v[at], cu([320]), mask=alone)
        for at in (slice(320), slice(320, 640))
    ]
    torch.testing.assert_close(some, torch.cat(parts))


def test_masks_are_made_once_for_the_same_documents(monkeypatch: pytest.MonkeyPatch):
    tensors, ends = packed(333, 333), cu([100, 233])
    policy = sk.MaskPolicy(window=50, sinks=7)
    sk.attention_varlen(*tensors, ends, mask=policy)
    mask = policy.packed(ends)
    assert policy.packed(ends.clone()) is mask
    assert policy.packed(cu([101, 232])) is not mask

    def refuse(*_: Any) -> None:
        raise AssertionError("a mask is made again")

    monkeypatch.setattr("sparsek.attn.mask.rule.documents_mask", refuse)
    sk.attention_varlen(*tensors, ends, mask=policy)


@pytest.mark.parametrize("policy", [None, sk.MaskPolicy(window=20, sinks=3), sk.MaskPolicy(topk=2, block=64)])
def test_torch_func_differentiates_it(policy: "sk.MaskPolicy | None"):
    """Also where cu_seqlens and what a top-k mask follows are wrapped by it."""
    ends = cu([100, 233])
    q, k, v = packed(333, 333)

    def loss(q: Tensor, ends: Tensor = ends) -> Tensor:
        return sk.attention_varlen(q, k.detach(), v.detach(), ends, mask=policy).square().sum()

    (expected,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), expected)
    torch.testing.assert_close(torch.func.grad(lambda q: loss(q, cu([100, 233])))(q.detach()), expected)
    torch.testing.assert_close(torch.func.grad(lambda q: loss(q, ends * 1))(q.detach()), expected)


def test_vmap_shares_cu_seqlens_and_says_where_it_cannot():
    ends = cu([100, 233])
    q, k, v = (x.detach() for x in packed(333, 333))

    def run(q: Tensor, ends: Tensor = ends, policy: "sk.MaskPolicy | None" = None) -> Tensor:
        return sk.attention_varlen(q, k, v, ends, mask=policy)

    both = torch.vmap(run)(torch.stack((q, q.flip(0))))
    torch.testing.assert_close(both, torch.stack((run(q), run(q.flip(0)))))
    with pytest.raises(InvalidInput, match=r"values of cu_seqlens_q, which .*vmap maps over.* outside"):
        torch.vmap(run, (None, 0))(q, torch.stack((ends, ends)))
    with pytest.raises(InvalidInput, match=r"values of q, which .*vmap maps over.* make the mask outside"):
        torch.vmap(lambda q: run(q, policy=sk.MaskPolicy(topk=1)))(q[None])


WRONG: dict[str, tuple[Any, ...]] = {
    "q must be .* of packed documents, got 2-D": (torch.zeros(5, 8), None, cu([5])),
    "cu_seqlens_q must be a dense torch.Tensor, got list": (None, None, [0, 5]),
    "cu_seqlens_q is torch.float32": (None, None, torch.tensor([0.0, 5])),
    r"cu_seqlens_q is \[1, 2\]": (None, None, cu([5])[None]),
    r"cu_seqlens_q is \[0\]": (None, None, cu([])[:0]),
    "cu_seqlens_q starts with 1": (None, None, torch.tensor([1, 5])),
    "falls from 6 to 5 at document 1": (None, None, torch.tensor([0, 6, 5])),
    "cu_seqlens_q ends at 4; there are 5 tokens": (None, None, cu([4])),
    "cu_seqlens_k ends at 4; there are 5 tokens": (None, None, cu([5]), cu([4])),
    "is for 1 documents and cu_seqlens_k for 2": (None, None, cu([5]), cu([4, 1])),
    "5 queries and 6 keys need a cu_seqlens_k": (None, torch.zeros(6, 2, 8), cu([5])),
    "mask is a builtins.str; it must be a sparsek BlockMask, a MaskPo": (None, None, cu([5]), None, "causal"),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_said(message: str):
    q, k, *rest = WRONG[message]
    q = torch.zeros(5, 2, 8) if q is None else q
    k = torch.zeros(5, 2, 8) if k is None else k
    refused(message, sk.attention_varlen, q, k, k, *rest)


def test_compiled_with_a_mask_it_is_one_graph_and_without_one_it_says_what_to_do():
    torch._dynamo.reset()
    lengths = LENGTHS["several"]
    q, k, v = packed(sum(lengths), sum(lengths))
    tensors, ends = (q.detach(), k.detach(), v.detach()), cu(lengths)
    run: Any = torch.compile(sk.attention_varlen, fullgraph=True, backend="aot_eager")
    mask = sk.MaskPolicy().packed(ends)
    assert torch.equal(
        run(*tensors, ends, mask=mask), sk.attention_varlen(*tensors, ends, mask=sk.MaskPolicy())
    )
    with pytest.raises(Exception, match="make the mask outside"):
        run(*tensors, ends)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_on_a_gpu_lengths_are_read_once_and_again_when_written_to(no_sync):
    lengths = LENGTHS["several"]
    q, k, v = (x.detach().to("cuda", torch.bfloat16) for x in packed(sum(lengths), sum(lengths)))
    ends = cu(lengths, device="cuda")
    first = sk.attention_varlen(q, k, v, ends, mask=sk.MaskPolicy())
    with no_sync():
        again = sk.attention_varlen(q, k, v, ends, mask=sk.MaskPolicy())
    assert torch.equal(first, again)
    ends[1] += 5
    expected = sk.attention_varlen(q, k, v, ends.clone(), mask=sk.MaskPolicy())
    assert torch.equal(sk.attention_varlen(q, k, v, ends, mask=sk.MaskPolicy()), expected)
    assert not torch.equal(expected, first)
    assert len(kept_masks._EDGES) >= 1


def test_nan_of_a_document_stays_out_of_blocks_that_it_does_not_share() -> None:
    """Within a block it may reach others, as the docstring has it."""
    q, k, v = (torch.randn(384, 2, 32) for _ in range(3))
    cu = torch.tensor([0, 100, 128, 256, 384], dtype=torch.int32)
    want = sk.attention_varlen(q, k, v, cu, mask=sk.MaskPolicy())
    v[110] = torch.nan
    found = sk.attention_varlen(q, k, v, cu, mask=sk.MaskPolicy())
    assert found[110:128].isnan().all()
    assert torch.equal(found[128:], want[128:])
    assert "finite" in (sk.attention_varlen.__doc__ or "")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's, of what it does not trace
def test_torch_compile_takes_no_tangent_for_0(packed: bool, backend: str) -> None:
    q, ends = torch.randn(64, 2, 16), torch.tensor([0, 20, 64])
    mask = sk.MaskPolicy().packed(ends) if packed else None
    call = torch.compile(lambda q: sk.attention_varlen(q, q, q, ends, mask=mask), backend=backend)
    refused("no forward-mode derivative", torch.func.jvp, call, (q,), (q,))
