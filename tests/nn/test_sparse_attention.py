"""SparseAttention against torch's own modules; state dicts, packed documents, compilation; learning by its sinks."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import SparseAttention
from tests.refusals import refused

WINDOW = sk.MaskPolicy(window=30, sinks=4, block=64)


def dense(layer: SparseAttention, x: Tensor, seen: Tensor) -> Tensor:
    """The same in plain torch."""
    d, heads, kv = layer.head_dim, layer.heads, layer.kv_heads
    q, k, v = (
        part.unflatten(2, (-1, d)).transpose(1, 2)
        for part in functional.linear(x, layer.qkv.weight, layer.qkv.bias).split(
            [heads * d, kv * d, kv * d], 2
        )
    )
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return layer.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize(
    "policy", [None, WINDOW, sk.MaskPolicy(causal=False)], ids=["causal", "window", "full"]
)
def test_it_is_dense_attention_under_its_mask(kv_heads: "int | None", policy: "sk.MaskPolicy | None"):
    torch.manual_seed(0)
    layer = SparseAttention(48, 4, policy, kv_heads=kv_heads, head_dim=16, bias=True, dtype=torch.float64)
    x = torch.randn(2, 150, 48, dtype=torch.float64)
    assert isinstance(layer.mask, sk.MaskPolicy)
    y = layer(x)
    torch.testing.assert_close(y, dense(layer, x, layer.mask.mask(150).to_dense()))
    assert y.shape == x.shape
    got, want = (
        torch.autograd.grad(each.square().sum(), list(layer.parameters()))
        for each in (y, dense(layer, x, layer.mask.mask(150).to_dense()))
    )
    torch.testing.assert_close(got, want)


def test_with_every_key_it_is_torchs_multihead_attention():
    torch.manual_seed(0)
    other = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    layer = SparseAttention(32, 4, sk.MaskPolicy(causal=False), bias=True)
    with torch.no_grad():
        nn.init.normal_(other.in_proj_bias)
        layer.load_state_dict(
            {
                "qkv.weight": other.in_proj_weight,
                "qkv.bias": other.in_proj_bias,
                "out.weight": other.out_proj.weight,
                "out.bias": other.out_proj.bias,
            }
        )
        x = torch.randn(2, 100, 32)
        torch.testing.assert_close(layer(x), other(x, x, x, need_weights=False)[0])


def test_a_state_dict_holds_the_projections_and_nothing_else():
    layer = SparseAttention(32, 4, WINDOW, kv_heads=2)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {"qkv.weight": (64, 32), "out.weight": (32, 32)}
    twin = SparseAttention(32, 4, WINDOW, kv_heads=2)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(1, 70, 32)
    assert torch.equal(twin(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert repr(layer).splitlines()[0] == "SparseAttention("
    assert "kv_heads=2, head_dim=8, mask=window=30, sinks=4" in repr(layer)


def test_a_mask_for_one_call_takes_the_place_of_the_policys():
    layer, x = SparseAttention(32, 4), torch.randn(2, 100, 32)
    mask = sk.BlockMask.sliding_window(100, 7)
    torch.testing.assert_close(layer(x, mask), dense(layer, x, mask.to_dense()))


def test_packed_documents_are_those_of_a_batch():
    layer = SparseAttention(32, 4, WINDOW, kv_heads=2, dtype=torch.float64)
    documents = [torch.randn(length, 32, dtype=torch.float64) for length in (100, 3, 64)]
    ends = torch.tensor([0, 100, 103, 167], dtype=torch.int32)
    packed = layer(torch.cat(documents), cu_seqlens=ends)
    torch.testing.assert_close(packed, torch.cat([layer(each[None])[0] for each in documents]))
    mask = WINDOW.packed(ends)
    assert torch.equal(layer(torch.cat(documents), mask, cu_seqlens=ends), packed)


def test_top_k_runs_and_has_gradients():
    layer = SparseAttention(32, 4, sk.MaskPolicy(topk=2, block=64))
    x = torch.randn(2, 300, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_compiled_it_is_one_graph_with_the_same_gradients():
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = SparseAttention(32, 4, WINDOW, kv_heads=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (100, 130):
        x = torch.randn(2, length, 32)
        got, want = (
            (y := run(x), *torch.autograd.grad(y.square().sum(), list(layer.parameters())))
            for run in (compiled, layer)
        )
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()


WRONG = {
    "dim is 0": {"dim": 0, "heads": 1},
    "heads must divide it": {"dim": 30, "heads": 4},
    "multiple of kv_heads": {"dim": 32, "heads": 4, "kv_heads": 3},
    r"for one length: pass it to each call, layer\(x, mask\), and here a MaskPolicy": {
        "dim": 32,
        "heads": 4,
        "mask": sk.BlockMask.causal(5),
    },
    "mask is a builtins.str; it must be a MaskPolicy or a policy of": {
        "dim": 32,
        "heads": 4,
        "mask": "causal",
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_sizes_that_do_not_fit_are_refused(message: str):
    refused(message, SparseAttention, **WRONG[message])


@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 31), (2, 2, 5, 32)])
def test_inputs_that_do_not_fit_are_refused(shape: tuple[int, ...]):
    refused(r"x is .*; it must be \[B, S, 32\]", SparseAttention(32, 4), torch.zeros(shape))


@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export")
def test_what_cannot_take_the_layer_says_what_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, x = nn.Sequential(SparseAttention(32, 2)), torch.randn(1, 64, 32)
    refused(r"torch\.jit\.trace cannot take a SparseAttention", torch.jit.trace, made, x)
    refused(r"torch\.jit\.script cannot take a SparseAttention", torch.jit.script, made)
    with pytest.raises(InvalidInput, match="ONNX has no block-sparse attention"):
        torch.onnx.export(made, (x,), tmp_path / "a.onnx", dynamo=False)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)  # the other exporter needs onnxscript
    refused("ONNX has no block-sparse attention", torch.export.export, made, (x,), strict=False)


class Recall(nn.Module):
    """Two layers that see tokens and, through their sinks and window, what stood at the start."""

    def __init__(self, words: int, length: int, policy: sk.MaskPolicy) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, 32), nn.Parameter(torch.randn(length, 32) * 0.3)
        self.layers = nn.ModuleList(SparseAttention(32, 2, policy) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.head = nn.Linear(32, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x[:, -1])


def test_without_sinks_it_cannot_see_the_first_token():
    """A window of 16 in two layers does not reach back 100 tokens."""
    tokens = torch.randint(0, 8, (16, 100))
    changed = torch.cat((7 - tokens[:, :1], tokens[:, 1:]), 1)
    for sinks in (0, 4):
        torch.manual_seed(0)
        model = Recall(8, 100, sk.MaskPolicy(window=16, sinks=sinks, block=64))
        assert torch.equal(model(tokens), model(changed)) == (sinks == 0)


def test_with_sinks_it_learns_to_recall_the_first_token():
    """Chance is 1 in 8."""
    torch.manual_seed(0)
    model = Recall(8, 100, sk.MaskPolicy(window=16, sinks=4, block=64))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        tokens = torch.randint(0, 8, (16, 100))
        loss = functional.cross_entropy(model(tokens), tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = torch.randint(0, 8, (256, 100))
    right = (model(tokens).argmax(1) == tokens[:, 0]).float().mean()
    assert right > 0.95
