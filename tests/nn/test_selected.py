"""NativeSparseAttention and MoBA against the plain formulas of their papers, forward and backward, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from sparsek.attn.policies.token import compressed_mask
from sparsek.nn import MoBA, NativeSparseAttention
from tests.refusals import refused

NSA: Any = sk.policies.NSA(topk=4, block=16, span=8, stride=4)
GATE: Any = sk.policies.MoBAGate(topk=3, block=16)


def heads_of(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim)).transpose(0, 1)


def softmax_over(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of q [H, S, D] over the keys that `seen` admits; 0 where there are none."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).masked_fill(~seen, 0) @ v


def compressed(layer: NativeSparseAttention, x: Tensor, network: Any) -> Tensor:
    """[H, n, D]: each span of keys in one, alone."""
    policy: Any = layer.mask
    made = []
    for i in range(0, x.shape[1] - policy.span + 1, policy.stride):
        rows = x[:, i : i + policy.span]
        if network is None:
            made.append(rows.mean(1))
            continue
        flat = (rows + network.position).flatten(1)
        inner = functional.gelu(flat @ network.inner.weight.T + network.inner.bias)
        made.append(inner @ network.outer.weight.T + network.outer.bias)
    return torch.stack(made, 1) if made else x[:, :0]


def of_nsa(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """One document x [S, dim]: equation 5 with the three branches of equations 7 to 12."""
    policy: Any = layer.mask
    length, d, at = len(x), layer.head_dim, torch.arange(len(x))
    q, k, v = heads_of(layer.qkv(x), d).split((layer.heads, layer.kv_heads, layer.kv_heads))
    others = (k, v, k, v) if layer.other_kv is None else heads_of(layer.other_kv(x), d).chunk(4)
    k_c, v_c = (
        compressed(layer, each, net)
        for each, net in zip(others[:2], (layer.compress_k, layer.compress_v), strict=True)
    )
    ends = torch.arange(k_c.shape[1]) * policy.stride + policy.span - 1
    first = softmax_over(q, k_c, v_c, ends <= at[:, None])
    chosen = policy.lists(q[None], k[None], compressed=k_c[None].detach())
    seen = chosen.to_dense(length)[0].repeat_interleave(layer.heads // layer.kv_heads, 0)
    second = softmax_over(q, k, v, seen)
    window: Any = layer.window.window
    third = softmax_over(q, others[2], others[3], (at <= at[:, None]) & (at > at[:, None] - window))
    gates = layer.gate(x).sigmoid().unflatten(-1, (3, layer.heads)).permute(1, 2, 0)[..., None]
    return layer.out((gates[0] * first + gates[1] * second + gates[2] * third).transpose(0, 1).flatten(1))


def of_moba(layer: MoBA, x: Tensor) -> Tensor:
    """One document x [S, dim]: equations 2 to 6."""
    policy: Any = layer.mask
    length, d, at = len(x), layer.head_dim, torch.arange(len(x))
    q, k, v = heads_of(layer.qkv(x), d).split((layer.heads, layer.kv_heads, layer.kv_heads))
    blocks = range(0, length, policy.block)
    gates = (
        q.unflatten(0, (layer.kv_heads, -1)).sum(1)
        @ torch.stack([k[:, i : i + policy.block].mean(1) for i in blocks], 1).mT
    )
    own, block = at[:, None] // policy.block, torch.arange(len(blocks))
    gates = gates.masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    best = gates.topk(min(policy.topk, len(blocks)), -1)
    kept = torch.zeros_like(gates, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
    seen = kept.repeat_interleave(policy.block, -1)[..., :length] & (at <= at[:, None])
    return layer.out(
        softmax_over(q, k, v, seen.repeat_interleave(layer.heads // layer.kv_heads, 0))
        .transpose(0, 1)
        .flatten(1)
    )


LAYERS: "dict[str, tuple[Any, Any]]" = {
    "NSA": (lambda **made: NativeSparseAttention(24, 4, NSA, window=20, kv_heads=2, bias=True, **made), of_nsa),
    "NSA, shared": (lambda **made: NativeSparseAttention(24, 2, NSA, window=7, shared_kv=True, **made), of_nsa),
    "NSA, means": (
        lambda **made: NativeSparseAttention(24, 4, NSA, kv_heads=1, head_dim=8, learned=False, **made),
        of_nsa,
    ),
    "MoBA": (lambda **made: MoBA(24, 4, GATE, **made), of_moba),
    "MoBA, groups": (lambda **made: MoBA(24, 4, GATE, kv_heads=2, bias=True, **made), of_moba),
}  # fmt: skip
CU = torch.tensor([0, 5, 5, 70, 91, 150])


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "documents"])
@pytest.mark.parametrize("case", LAYERS)
def test_it_is_the_formula_of_its_paper_forward_and_backward(case: str, packed: bool) -> None:
    torch.manual_seed(0)
    make, formula = LAYERS[case]
    layer = make(dtype=torch.float64)
    for each in layer.parameters():
        torch.nn.init.normal_(each, std=0.3)
    if packed:
        x = torch.randn(150, 24, dtype=torch.float64, requires_grad=True)
        y = layer(x, cu_seqlens=CU)
        want = torch.cat([formula(layer, each) for each in x.split(CU.diff().tolist()) if len(each)])
    else:
        x = torch.randn(2, 101, 24, dtype=torch.float64, requires_grad=True)
        y, want = layer(x), torch.stack([formula(layer, each) for each in x])
    torch.testing.assert_close(y, want)
    got, right = (
        torch.autograd.grad(each.square().sum(), [x, *layer.parameters()], allow_unused=True)
        for each in (y, want)
    )
    assert all(each is not None for each in got)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("case", LAYERS)
def test_a_state_dict_has_all_parameters_and_loads(case: str) -> None:
    make = LAYERS[case][0]
    layer, twin, x = make(), make(), torch.randn(1, 70, 24)
    assert {*layer.state_dict()} == {name for name, _ in layer.named_parameters()}
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    half = make(dtype=torch.bfloat16, device="cpu")
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    meta = make(device="meta")
    assert all(each.is_meta for each in meta.parameters())
    meta.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(meta(x.double()), layer(x.double()))
    assert layer.mask.label in repr(layer)


@pytest.mark.parametrize("case", ["NSA", "MoBA"])
def test_a_layer_learns_and_shorter_inputs_than_a_span_work(case: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[case][0]()
    x, want = torch.randn(2, 2, 90, 24).unbind()
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    losses = []
    for _ in range(8):
        loss = (layer(x) - want).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] * 0.98
    for length in (0, 1, 5):
        assert layer(x[:, :length]).shape == (2, length, 24)
    assert layer(x[:0]).shape == (0, 90, 24)
    for ends in ([0], [0, 0], [0, 0, 7]):
        assert layer(x[0, : ends[-1]], cu_seqlens=torch.tensor(ends)).shape == (ends[-1], 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_compiled_it_is_one_graph_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer, x = LAYERS["NSA"][0](), torch.randn(2, 90, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, right = (
        (y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))) for y in (compiled(x), layer(x))
    )
    torch.testing.assert_close(found, right)


def test_compiled_documents_are_read_between_graphs_and_not_within_one() -> None:
    def seen(x: Tensor) -> Tensor:
        return compressed_mask(NSA.spans, 150, 150, x.device, CU).to_dense() & True

    assert torch.equal(torch.compile(seen, backend="eager")(CU), seen(CU))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.compile cannot read cu_seqlens"):
        torch.compile(seen, fullgraph=True, backend="eager")(CU)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MoBA(24, 4, NSA), "must be a sk.policies.MoBAGate"),
        (lambda: NativeSparseAttention(24, 4, GATE), "must be a sk.policies.NSA"),
        (lambda: NativeSparseAttention(24, 4, sk.policies.InfLLMv2()), "must be a sk.policies.NSA"),
        (lambda: NativeSparseAttention(24, 4, window=0), "window is 0"),
        (lambda: LAYERS["NSA"][0]()(torch.zeros(1, 9, 24), sk.MaskPolicy()), "chooses its own"),
        (lambda: LAYERS["NSA"][0]()(torch.zeros(9, 24)), r"x is \[9, 24\]; it must be \[B, S, 24\]"),
        (lambda: LAYERS["NSA"][0]()(torch.zeros(1, 9, 24).double()), "the parameters torch.float32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    refused(text, call)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "documents"])
@pytest.mark.parametrize("case", ["NSA", "MoBA"])
def test_on_a_gpu_in_bf16_it_is_the_layer_in_float64(case: str, packed: bool) -> None:
    torch.manual_seed(0)
    layer: Any = MoBA(256, 4, sk.policies.MoBAGate(topk=3, block=128), dtype=torch.bfloat16, device="cpu")
    if case == "NSA":
        made = {"window": 100, "kv_heads": 2, "dtype": torch.bfloat16, "device": "cpu"}
        layer = NativeSparseAttention(256, 4, sk.policies.NSA(topk=8), **made)
    x = torch.randn(1000, 256).bfloat16() if packed else torch.randn(2, 1000, 256).bfloat16()
    options = {"cu_seqlens": torch.tensor([0, 300, 300, 1000])} if packed else {}
    found = []
    for each, given in ((copy.deepcopy(layer).cuda(), x.cuda()), (layer.double(), x.double())):
        given = given.requires_grad_()
        y = each(given, **options)
        found.append([part.double().cpu() for part in (y, *torch.autograd.grad(y.square().sum(), given))])
    for got, want in zip(*found, strict=True):
        far = (got - want).norm(dim=-1) / want.norm(dim=-1)
        # A block whose score is near another's may be chosen in its place.
        assert far.median() < 0.02
        assert (far < 0.1).double().mean() > 0.95
