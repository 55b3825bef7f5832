"""Blocks of keys that each query has, in models of transformers: `block_indices` of MiniMax-M3."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from sparsek.attn.policies import MeanTopK
from sparsek.integrations.transformers import sparsek_attention, sparsek_mask
from tests.integrations.dense import dense
from tests.integrations.models import padding, transformers
from tests.refusals import refused


def m3(attention: str) -> Any:
    """MiniMax-M3 with a layer of full attention and one whose indexer chooses blocks of 16 keys for each query."""
    kinds = pytest.importorskip("transformers.models.minimax_m3_vl")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8}
    index = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 3}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "dense_intermediate_size"), 32)
    config = kinds.MiniMaxM3VLTextConfig(
        vocab_size=64, num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense"] * 2, bos_token_id=None, eos_token_id=None, **sizes, **heads, **index,
    )  # fmt: skip
    torch.manual_seed(0)
    model = kinds.MiniMaxM3VLTextModel._from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_minimax_m3_chooses_blocks_for_each_query() -> None:
    """Their gradients too, and at every place of a cache."""
    other, own = m3("eager"), m3("sparsek")
    ids = torch.randint(1, 64, (2, 100), generator=torch.Generator().manual_seed(0))
    padded = torch.ones(2, 100, dtype=torch.int64)
    padded[1, 80:] = 0
    for mask in (None, padded):
        there = padded.bool() if mask is padded else padded.bool() | True
        found, wanted = (
            model(ids, attention_mask=mask, use_cache=False).last_hidden_state[there]
            for model in (own, other)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
        weight = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
        ours, theirs = (
            torch.autograd.grad((out * weight).sum(), list(model.layers[1].self_attn.k_proj.parameters()))
            for out, model in ((found, own), (wanted, other))
        )
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-4)
    whole = other(ids, use_cache=False).last_hidden_state
    for cache in (
        transformers.DynamicCache(config=own.config),
        transformers.StaticCache(config=own.config, max_cache_len=128),
    ):
        with torch.no_grad():
            parts = [
                own(part, past_key_values=cache, use_cache=True).last_hidden_state
                for part in ids.split([80, 1, 14, 5], 1)
            ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("at", ["none", "left", "right", "gaps", "packed", "tensor"])
def test_blocks_of_each_query_beside_a_models_mask(at: str) -> None:
    """A query sees the keys that its blocks and the mask admit."""
    length, config = 150, SimpleNamespace(_attn_implementation="sparsek", sparsek=None)
    layer: Any = SimpleNamespace(config=config, is_causal=True, indexer=SimpleNamespace(block_size=16))
    random = torch.Generator().manual_seed(0)
    q, k, v = leaves = [torch.randn(2, h, length, 16, generator=random).requires_grad_() for h in (4, 2, 2)]
    blocks = torch.rand(2, 2, length, 10, generator=random).argsort(-1)[..., :4]
    blocks[..., 3] = torch.where(blocks[..., 3] > 5, -1, blocks[..., 3])
    there = torch.ones(2, length, dtype=torch.bool)
    documents = torch.zeros(2, length)
    function: Any = causal_mask_function
    if at == "packed":
        documents = (torch.arange(length) > 60).expand(2, -1).int()
        function = and_masks(function, packed_sequence_mask_function(documents))
    elif at in ("left", "right", "gaps"):
        there = padding(at).bool()  # type: ignore[union-attr]
    seen = (documents[:, :, None] == documents[:, None]) & there[:, None]
    seen = (seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    mask: Any = seen
    if at != "tensor":
        mask = sparsek_mask(2, length, length, mask_function=function, attention_mask=there, config=config)
        assert mask.causal == (at in ("none", "right"))
    out, _ = sparsek_attention(layer, q, k, v, mask, block_indices=blocks)
    listed = (torch.arange(length)[:, None] // 16 == blocks[..., None, :]).any(-1)
    admitted = (listed & seen).repeat_interleave(2, 1)
    wanted = dense(q.double(), k.double(), v.double(), admitted)[0].transpose(1, 2)
    real = there if at == "right" else there | True  # queries of padding at the end may see it
    torch.testing.assert_close(out[real].double(), wanted[real], rtol=0, atol=1e-5)
    ours, theirs = (torch.autograd.grad(x[real].square().sum(), leaves) for x in (out, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_blocks_of_queries_need_their_size_and_no_other_choice() -> None:
    q = torch.randn(1, 2, 40, 16)
    blocks = torch.zeros(1, 2, 40, 1, dtype=torch.int64)
    layer: Any = SimpleNamespace(config=SimpleNamespace(sparsek=None), is_causal=True)
    refused("indexer.block_size", sparsek_attention, layer, q, q, q, None, block_indices=blocks)
    layer.config = SimpleNamespace(sparsek=MeanTopK(topk=1), index_block_size=16)
    refused("leave one out", sparsek_attention, layer, q, q, q, None, block_indices=blocks)
    layer.config.sparsek = None
    found = sparsek_attention(layer, q, q, q, None, block_indices=blocks)[0]
    assert found[:, 16:].isfinite().all()


@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_over_a_static_cache_is_in_one_graph(queries: int) -> None:
    config = SimpleNamespace(_attn_implementation="sparsek", sparsek=None)
    layer: Any = SimpleNamespace(config=config, is_causal=True, indexer=SimpleNamespace(block_size=16))
    q, k, v = (torch.randn(2, heads, n, 16) for heads, n in ((4, queries), (2, 96), (2, 96)))
    blocks = torch.tensor([[0, 3, -1], [3, 5, 1]])[None, :, None].expand(2, 2, queries, 3)

    def step(first: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"allow_is_causal_skip": False, "config": config}
        mask = sparsek_mask(2, queries, 96, first, **options)
        return sparsek_attention(layer, q, k, v, mask, block_indices=blocks)[0]

    first = torch.tensor(60)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    key, own = torch.arange(96), (torch.arange(queries) + 60)[:, None]
    listed = (key[:, None] // 16 == blocks[..., None, :]).any(-1) & (key <= own)
    wanted = dense(q.double(), k.double(), v.double(), listed.repeat_interleave(2, 1))[0].transpose(1, 2)
    for made in (step, compiled):
        torch.testing.assert_close(made(first, blocks).double(), wanted, rtol=0, atol=1e-5)
    refused("block_indices is .*1 or 2 heads", step, first, blocks.repeat(1, 2, 1, 1))
    torch._dynamo.reset()
