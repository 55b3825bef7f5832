"""Policies that choose blocks for each query against the formulas of their papers, in float64, one row at a time."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparsek as sk
from sparsek.attn.policies import token
from sparsek.core.errors import InvalidInput
from sparsek.integrations.config import misfit
from tests.refusals import refused

policies = sk.policies
BLOCK, SPAN, STRIDE = 16, 8, 4
INDEX_LOSS: Any = policies.index_loss


def best(scores: "list[float]", own: int, topk: int, always: "tuple[int, int]") -> "list[int]":
    """The blocks of one query: those of `always`, then the highest scores, of equal ones the first; ascending."""
    blocks = range(own + 1)
    first = [j for j in blocks if j < always[0] or j > own - always[1]]
    rest = sorted((j for j in blocks if j not in first), key=lambda j: (-scores[j], j))
    return sorted((first + rest)[:topk])


def by_weights(policy: Any, q: Tensor, k: Tensor, t: int, scale: float) -> "list[float]":
    """NSA, equations 7 to 10, and the pooling of InfLLM-v2: q [G, D] of one query at position t, k [T, D].

    Equation 9 counts compressed keys i, blocks j and positions from 1.
    """
    seen = max((t + 1 - policy.span) // policy.stride + 1, 0)
    keys = [k[i * policy.stride : i * policy.stride + policy.span].mean(0) for i in range(seen)]
    weights = (scale * q @ torch.stack(keys).T).softmax(-1).sum(0).tolist() if keys else []
    p = {i + 1: weight for i, weight in enumerate(weights)}
    parts, covers = policy.block // policy.stride, policy.span // policy.stride
    found = []
    for j in range(1, t // policy.block + 2):
        each = [p.get(parts * j - m - n, 0.0) for m in range(parts) for n in range(covers)]
        found.append(max(each) if isinstance(policy, policies.InfLLMv2) else sum(each))
    return found


def by_gate(policy: Any, q: Tensor, k: Tensor, t: int, scale: float) -> "list[float]":
    """MoBA, equations 5 and 6, with the gates of a group summed."""
    own = t // policy.block
    means = [k[j * policy.block : (j + 1) * policy.block].mean(0) for j in range(own + 1)]
    return (q @ torch.stack(means).T).sum(0).tolist()


def by_index(policy: Any, q: Tensor, k: Tensor, t: int, scale: float) -> "list[float]":
    """MSA: the largest product of a block among the keys up to the query."""
    products = (q @ k[: t + 1].T)[0]
    return [
        float(products[j * policy.block : (j + 1) * policy.block].max()) for j in range(t // policy.block + 1)
    ]


def plain(
    policy: Any, score: Callable[..., "list[float]"], q: Tensor, k: Tensor, scale: float, edges: "list[int]"
) -> "list[list[int]]":
    """The blocks of every batch item, head of k and query; queries of one document stand at its last keys."""
    heads = q.shape[1] if isinstance(policy, policies.IndexHead) else k.shape[1]
    group = q.shape[1] // heads
    found = []
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(heads)):
        keys = k[b, h % k.shape[1]]
        for start, end in pairwise(edges):
            document = keys[start:end] if len(edges) > 2 else keys
            rows = range(start, end) if len(edges) > 2 else range(q.shape[2])
            for i in rows:
                t = i - rows[0] + len(document) - len(rows)
                if t < 0:
                    found.append([])
                    continue
                scores = score(policy, q[b, h * group : (h + 1) * group, i], document, t, scale)
                found.append(best(scores, t // policy.block, policy.topk, policy.always))
    return found


def listed(lists: Any) -> "list[list[int]]":
    rows = lists.indices.flatten(0, 2).tolist()
    assert all(row == sorted(row, key=lambda j: (j < 0, j)) for row in rows)
    return [[j for j in row if j >= 0] for row in rows]


CASES: "dict[str, tuple[Any, Callable[..., list[float]]]]" = {
    "NSA": (policies.NSA(topk=5, block=BLOCK, span=SPAN, stride=STRIDE), by_weights),
    "NSA, none always": (policies.NSA(topk=3, block=BLOCK, always=(0, 0), span=12, stride=4), by_weights),
    "NSA, one length": (policies.NSA(topk=4, block=8, span=8, stride=8), by_weights),
    "InfLLM-v2": (policies.InfLLMv2(topk=5, block=BLOCK, always=(1, 2), span=SPAN, stride=STRIDE), by_weights),
    "MoBA": (policies.MoBAGate(topk=3, block=BLOCK), by_gate),
    "M3": (policies.IndexHead(topk=4, block=BLOCK), by_index),
    "M3, sinks": (policies.IndexHead(topk=4, block=BLOCK, always=(1, 2)), by_index),
}  # fmt: skip
LENGTHS = {"prompt": (150, 150, [0, 150]), "chunk": (37, 150, [0, 37]), "before the keys": (60, 41, [0, 60]),
           "short": (5, 5, [0, 5]), "documents": (150, 150, [0, 3, 3, 52, 116, 150])}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_they_are_the_formulas_of_their_papers(
    case: str, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    (policy, score), (queries, keys, edges) = CASES[case], LENGTHS[lengths]
    batch, of_index = 1 if len(edges) > 2 else 2, case.startswith("M3")
    q = torch.randn(batch, 2 if of_index else 4, queries, 8, dtype=torch.float64)
    k = torch.randn(batch, 1 if of_index else 2, keys, 8, dtype=torch.float64)
    monkeypatch.setattr(token, "SCORES", 4000)
    options = {"cu_seqlens": torch.tensor(edges)} if len(edges) > 2 else {}
    assert listed(policy.lists(q, k, scale=0.5, **options)) == plain(policy, score, q, k, 0.5, edges)


def test_larger_blocks_are_lists_of_their_parts() -> None:
    torch.manual_seed(0)
    policy = policies.MoBAGate(topk=2, block=256)
    q, k = torch.randn(2, 1, 2, 700, 8, dtype=torch.float64).unbind()
    found = policy.lists(q, k)
    wanted = [
        [part for j in row for part in (2 * j, 2 * j + 1) if part <= i % 700 // 128]
        for i, row in enumerate(plain(policy, by_gate, q, k, 1.0, [0, 700]))
    ]
    assert found.block == 128
    assert listed(found) == wanted


@pytest.mark.parametrize("case", ["NSA", "MoBA", "InfLLM-v2"])
def test_equal_scores_keep_the_first_blocks(case: str) -> None:
    policy = CASES[case][0]
    q, k = torch.zeros(1, 2, 100, 4), torch.ones(1, 2, 100, 4)
    own = 99 // BLOCK
    local = [j for j in range(own + 1) if j > own - policy.always[1]]
    rest = [j for j in range(own) if j not in local][: policy.topk - len(local)]
    # Block 0 has one compressed key less that reaches into it.
    first = [*rest, *local] if case != "NSA" else [0, 1, 2, *local]
    assert listed(policy.lists(q, k))[99] == first


def test_blocks_within_the_same_compressed_keys_have_equal_scores() -> None:
    torch.manual_seed(0)
    policy = policies.NSA(topk=5, block=4, always=(1, 2), span=32, stride=4)
    q, k = torch.randn(1, 2, 70, 8, dtype=torch.float64), torch.randn(1, 1, 70, 8, dtype=torch.float64)
    assert listed(policy.lists(q, k, scale=0.5)) == plain(policy, by_weights, q, k, 0.5, [0, 70])


@pytest.mark.parametrize("case", CASES)
def test_keys_behind_a_query_do_not_matter_and_dtypes_agree(case: str) -> None:
    torch.manual_seed(0)
    policy = CASES[case][0]
    q, k = torch.randn(2, 1, 2, 100, 8, dtype=torch.bfloat16).unbind()
    before = policy.lists(q, k).indices
    if case.startswith("M"):  # others round means to the dtype of k
        assert torch.equal(before, policy.lists(q.float(), k.float()).indices)
    k[:, :, 60:] = torch.nan
    after = policy.lists(q, k).indices
    assert torch.equal(before[:, :, :60], after[:, :, :60])
    assert int(after.amax()) <= 99 // policy.block


@pytest.mark.parametrize("case", CASES)
def test_no_table_of_queries_and_blocks_is_made(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **kwargs or {})
            for each in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(each, Tensor) and not func.is_view:
                    self.most = max(self.most, each.numel())
            return made

    policy = CASES[case][0]
    q, k = torch.randn(2, 1, 1, 2048, 4).unbind()
    monkeypatch.setattr(token, "SCORES", 1 << 15)
    monkeypatch.setattr("sparsek.attn.policies.selected.SCORES", 1 << 15)
    with Largest() as largest:
        policy.lists(q, k)
    assert largest.most <= max(4 * (1 << 15), q.numel() * 5)


def test_attention_takes_them_and_its_gradient_is_that_of_their_lists() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 150, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    for case in ("NSA", "MoBA", "InfLLM-v2"):
        policy = CASES[case][0]
        lists = policy.lists(q, k, scale=0.7)
        assert not lists.indices.requires_grad
        out = sk.attention(q, k, v, policy, scale=0.7)
        seen = lists.to_dense().repeat_interleave(2, 1)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.7, enable_gqa=True)
        torch.testing.assert_close(out, dense)
        got, want = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, dense))
        torch.testing.assert_close(got, want)


def test_other_compressed_keys_take_the_place_of_means() -> None:
    torch.manual_seed(0)
    policy = CASES["NSA"][0]
    q, k = torch.randn(2, 1, 2, 100, 8, dtype=torch.float64).unbind()
    means = torch.stack([k[:, :, i : i + SPAN].mean(2) for i in range(0, 100 - SPAN + 1, STRIDE)], 2)
    usual = policy.lists(q, k).indices
    assert torch.equal(policy.lists(q, k * torch.nan, compressed=means).indices, usual)
    assert not torch.equal(policy.lists(q, k, compressed=means.flip(2)).indices, usual)
    with pytest.raises(InvalidInput, match=r"compressed is \[1, 2, 23, 8\]; k .* needs \[1, 2, 24, 8\]"):
        policy.lists(q, k, compressed=means[:, :, 1:])


@pytest.mark.parametrize(
    ("queries", "keys", "edges"),
    [
        (600, 600, None), (600, 2500, None), (300, 70, None), (3, 40, None), (0, 9, None), (9, 0, None),
        (2000, 2000, [0, 2, 2, 900, 1028, 2000]),
    ],
)  # fmt: skip
def test_a_query_sees_compressed_keys_from_their_last_key_on(
    queries: int, keys: int, edges: "list[int] | None"
) -> None:
    cu_seqlens = None if edges is None else torch.tensor(edges)
    mask = token.compressed_mask((BLOCK, SPAN, STRIDE), queries, keys, torch.device("cpu"), cu_seqlens)
    q, k = torch.empty(1, 1, queries, 1), torch.empty(1, 1, keys, 1)
    grid = token.TokenGrid.of(q, k, BLOCK, cu_seqlens)
    begin = torch.arange(mask.kv_len) * STRIDE
    position, first = grid.position[:, None], grid.first[:, None] * BLOCK
    assert mask.kv_len == max((grid.aligned(k).shape[2] - SPAN) // STRIDE + 1, 0)
    assert torch.equal(mask.to_dense()[0, 0], (first <= begin) & (begin + SPAN - 1 <= position))
    fields = {name: getattr(mask, name) for name in ("q_len", "kv_len", "block", "batch", "heads")}
    checked = sk.BlockMask(**fields, full=mask.full, partial=mask.partial, lo=mask.lo, hi=mask.hi, pure=True)
    assert checked.sizes == mask.sizes
    if queries and keys:
        dense = sk.BlockMask.from_dense(mask.to_dense())
        assert mask.stored_blocks - mask.partial_blocks == dense.stored_blocks - dense.partial_blocks


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: policies.NSA(topk=2), "3 blocks, which count among the topk"),
        (lambda: policies.NSA(stride=12), "span is 32 and stride 12, which must divide it"),
        (lambda: policies.NSA(span=24), "span is 24 and stride 16"),
        (lambda: policies.NSA(block=48), "power of two"),
        (lambda: policies.MoBAGate(always=(1, 0)), "sees its own block"),
        (lambda: policies.IndexHead(topk=0), "topk is 0"),
        (lambda: policies.IndexHead().lists(torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8)), "k needs 1 or 4"),
        (lambda: policies.IndexHead().lists(*torch.zeros(2, 0, 1, 9, 8)), "lists need a batch item"),
        (lambda: policies.InfLLMv2().mask_for(*torch.zeros(2, 0, 1, 9, 8), scale="row"), "scale is 'row'"),  # type: ignore[arg-type]
        (lambda: INDEX_LOSS(*torch.zeros(3, 1, 2, 9, 8), torch.zeros(1, 1, 9, 8)), r"index_q \[1, 1, 9, 'E'\]"),
        (lambda: INDEX_LOSS(*torch.zeros(4, 1, 2, 9, 8), ()), r"lists must be sk.TokenLists or None, got \(\)"),
        (
            lambda: INDEX_LOSS(
                *torch.zeros(4, 1, 2, 9, 8), sk.TokenLists(torch.zeros(1, 2, 9, 1).int(), 8, causal=False)
            ),
            "must be causal, of batch 1",
        ),
        (
            lambda: policies.NSA().lists(*torch.zeros(2, 2, 1, 9, 8), cu_seqlens=torch.tensor([0, 9])),
            r"packed documents \[1, heads, total, D\]",
        ),
        (
            lambda: policies.MoBAGate().lists(*torch.zeros(2, 1, 1, 9, 8), cu_seqlens=torch.tensor([0, 8])),
            "cu_seqlens ends at 8; there are 9 tokens",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: "Callable[[], Any]", text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        make()


def test_labels_name_what_is_not_default() -> None:
    assert policies.NSA().label == "NSA()"
    assert policies.InfLLMv2(topk=40, block=32).label == "InfLLMv2(topk=40, block=32)"
    assert hash(policies.MoBAGate(topk=4)) == hash(policies.MoBAGate(topk=4))
    assert misfit(policies.NSA(), True) is None
    assert "every token, and the policy NSA() is causal; it has no other form" in str(
        misfit(policies.NSA(), False)
    )


def plain_loss(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """MSA: KL(mean over a group's heads of the attention || index head), in mean over queries with keys and heads."""
    group = q.shape[1] // k.shape[1]
    found = []
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in index_q.shape[:3])).tolist():
        at = seen[b % len(seen), h % seen.shape[1], i].nonzero()[:, 0]
        if len(at):
            p = (0.3 * q[b, h * group : (h + 1) * group, i] @ k[b, h, at].T).softmax(-1).mean(0).detach()
            r = (0.7 * index_k[b, h % index_k.shape[1], at] @ index_q[b, h, i]).softmax(-1)
            found.append((p * (p / r).log()).sum())
    return torch.stack(found).mean()


@pytest.mark.parametrize("case", ["lists", "own keys, chunk", "all keys", "documents", "before the keys"])
def test_the_loss_of_an_index_head_is_that_of_its_paper(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys = {"own keys, chunk": (5, 23), "before the keys": (9, 6)}.get(case, (23, 23))
    shared = case != "own keys, chunk"
    index_q, index_k, q, k = (
        torch.randn(1 if case == "documents" else 2, heads, n, dim, dtype=torch.float64, requires_grad=True)
        for heads, n, dim in ((2, queries, 5), (1 if shared else 2, keys, 5), (4, queries, 6), (2, keys, 6))
    )
    monkeypatch.setattr("sparsek.attn.policies.selected.SCORES", 700)
    edges = [0, 4, 4, 17, 23] if case == "documents" else [0, keys]
    options: dict[str, Any] = {"cu_seqlens": torch.tensor(edges)} if case == "documents" else {}
    lists = policies.IndexHead(topk=2, block=4).lists(index_q, index_k, **options)
    if case == "lists":
        lists = sk.TokenLists(
            lists.indices[:1, 1:], 4, counts=lists.indices[:1, 1:].ge(0).sum(-1), window=3, sinks=1
        )
    seen = torch.ones(keys, keys, dtype=torch.bool).tril()[None, None, keys - queries :]
    if case == "before the keys":
        seen = torch.cat((torch.zeros(3, 6, dtype=torch.bool), torch.ones(6, 6).tril().bool()))[None, None]
    if case == "documents":
        seen = torch.zeros(1, 2, keys, keys, dtype=torch.bool)
        for a, b in pairwise(edges):
            seen[:, :, a:b, a:b] = sk.TokenLists(lists.indices[:, :, a:b], 4).to_dense()
    elif case != "all keys":
        seen = lists.to_dense(keys)
    given = None if case == "all keys" else lists
    got = policies.index_loss(index_q, index_k, q, k, given, scale=0.3, index_scale=0.7, **options)
    want = plain_loss(index_q, index_k, q, k, seen)
    torch.testing.assert_close(got, want)
    found, wanted = (torch.autograd.grad(3 * each, (index_q, index_k)) for each in (got, want))
    torch.testing.assert_close(found, wanted)
    assert not policies.index_loss(index_q.detach(), index_k.detach(), q, k, given, **options).requires_grad


def test_the_loss_of_an_index_head_has_a_gradient_in_torch_func_and_no_second_one() -> None:
    torch.manual_seed(0)
    index_q, index_k, q, k = (torch.randn(1, heads, 9, 4, dtype=torch.float64) for heads in (2, 1, 4, 2))
    learns = index_q.clone().requires_grad_(), index_k.clone().requires_grad_()

    def loss(index_q: Tensor, index_k: Tensor) -> Tensor:
        chosen = (index_q @ index_k.mT).unflatten(3, (-1, 3)).amax(-1).topk(2).indices
        return policies.index_loss(index_q, index_k, q, k, sk.TokenLists(chosen, 4, window=1))

    wanted = torch.autograd.grad(loss(*learns), learns)
    assert all(each.abs().max() > 1e-3 for each in wanted)
    for transform in (torch.func.grad, torch.func.jacrev):
        torch.testing.assert_close(transform(loss, (0, 1))(index_q, index_k), wanted)
    back = torch.func.vjp(loss, index_q, index_k)[1]
    torch.testing.assert_close(back(torch.ones((), dtype=torch.float64)), wanted)
    refused("no forward-mode derivative", torch.func.jvp, loss, (index_q, index_k), (index_q, index_k))
    refused("no gradients themselves", torch.func.jacrev(torch.func.grad(loss)), index_q, index_k)
    (first,) = torch.autograd.grad(loss(*learns), learns[:1], create_graph=True)
    refused("no gradients themselves", first.sum().backward)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_chooses_alike_without_a_wait_and_in_a_graph(
    case: str, dtype: torch.dtype, no_sync: Any
) -> None:
    torch.manual_seed(0)
    policy, of_index = CASES[case][0], case.startswith("M3")
    q, k = torch.randn(2, 4, 700, 64).to(dtype), torch.randn(2, 1 if of_index else 2, 700, 64).to(dtype)
    there, keys = q.cuda(), k.cuda()
    policy.lists(there, keys)
    with no_sync():
        found = policy.lists(there, keys).indices
    same = (found.cpu() == policy.lists(q, k).indices).all(-1)
    assert same.float().mean() > 0.99  # scores that differ by rounding alone may change places
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = policy.lists(there, keys).indices
    graph.replay()
    assert torch.equal(captured, found)
