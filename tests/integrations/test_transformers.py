"""attn_implementation="sparsek" against eager attention: Llama, Qwen2 and BERT, tiny and with random weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsek as sk
from tests.fuzz.calls_distributed import one_process
from tests.house.tools import need
from tests.refusals import refused
from tests.sampling import sampled

need("transformers")

from sparsek.core.errors import InvalidInput
from sparsek.integrations import transformers_config, transformers_masks
from sparsek.integrations.transformers import sparsek_attention
from tests.integrations.models import (
    MODELS,
    REFERENCE,
    bert,
    check_alike,
    llama,
    no_pairs,
    padding,
    pair,
    states,
    tokens,
    transformers,
)

__all__ = ["no_pairs"]
POLICY = {"window": 20, "sinks": 3, "block": 64}
ALL = pytest.mark.parametrize("name", MODELS)


@ALL
@pytest.mark.parametrize("at", ["none", "left", "right", "both"])
@pytest.mark.usefixtures("no_pairs")
def test_models_say_what_they_say_with_eager_attention(name: str, at: str):
    check_alike(*pair(name), tokens(), padding(at))


@ALL
def test_padding_with_gaps_is_followed_too(name: str):
    check_alike(*pair(name), tokens(), padding("gaps"))
    check_alike(*pair(name, REFERENCE, sparsek=POLICY), tokens(), padding("gaps"))


@ALL
@pytest.mark.parametrize("at", ["none", "left", "right", "both"])
@pytest.mark.usefixtures("no_pairs")
def test_a_policy_of_the_config_hides_what_it_says(name: str, at: str):
    """Qwen2's second layer has a window of its own, which is wider."""
    other, own = pair(name, REFERENCE, sparsek=POLICY)
    check_alike(other, own, tokens(), padding(at))
    with torch.no_grad():
        plain = pair(name)[1]
        assert not torch.allclose(states(own, tokens()), states(plain, tokens()), atol=1e-3)


@pytest.mark.usefixtures("no_pairs")
def test_packed_documents_do_not_see_each_other():
    lengths = [70, 50, 30]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    cases: list[Any] = [("llama", {}), ("qwen2", {}), ("llama", {"sparsek": POLICY})]
    for name, options in cases:
        other, own = pair(name, **options)
        ids = tokens()
        with torch.no_grad():
            got = states(own, ids, position_ids=positions, use_cache=False)
            alone = [states(own, part, use_cache=False) for part in ids.split(lengths, 1)]
            torch.testing.assert_close(got, torch.cat(alone, 1), rtol=0, atol=2e-5)
        if not options:
            check_alike(other, own, ids, position_ids=positions, use_cache=False)


def test_packed_documents_may_differ_in_a_batch():
    rows = [[70, 50, 30], [150]]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    check_alike(*pair("qwen2"), tokens(), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks_of_four_dimensions_are_followed(dtype: torch.dtype, heads: int):
    draw = torch.Generator().manual_seed(0)
    seen = (torch.rand(2, heads, 150, 150, generator=draw) < 0.3) | torch.eye(150, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    other, own = pair("llama")
    with torch.no_grad():
        want = states(other, tokens(), attention_mask=additive)
        got = states(own, tokens(), attention_mask=seen if dtype == torch.bool else additive)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_a_mask_of_four_dimensions_is_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    made = []
    original = transformers_masks.BlockMask.from_transformers
    monkeypatch.setattr(
        transformers_masks.BlockMask, "from_transformers", lambda *a: made.append(0) or original(*a)
    )
    seen = torch.ones(1, 1, 150, 150, dtype=torch.bool).tril()
    own = pair("llama")[1]
    first = states(own, tokens(), attention_mask=seen)
    assert len(made) == 1
    seen[:, :, 100:, :50] = False
    assert not torch.equal(states(own, tokens(), attention_mask=seen), first)
    assert len(made) == 2


def test_layers_and_steps_share_one_mask(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    own = pair("llama", sparsek=POLICY)[1]
    for layer in own.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: given.append(kwargs["attention_mask"]), with_kwargs=True
        )
    states(own, tokens())
    states(own, tokens())
    assert len(given) == 4
    assert given[0] is given[1]
    assert len({id(each.visible.within) for each in given}) == 1


@ALL
@pytest.mark.parametrize("options", [{}, {"sparsek": POLICY}], ids=["plain", "policy"])
def test_training_has_the_gradients_of_eager_attention(name: str, options: dict[str, Any]):
    other, own = pair(name, REFERENCE if options else "eager", **options)
    for model in (other, own):
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        model.train()
        found = states(model, tokens(), attention_mask=padding("right"))
        found[padding("right") > 0].square().mean().backward()  # type: ignore[operator]
    for (label, a), b in zip(own.named_parameters(), other.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=label)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`:FutureWarning"
)  # newer ones have another name
def test_gradient_checkpointing_gives_the_same_gradients():
    own = pair("llama", sparsek=POLICY)[1].train()
    twin = copy.deepcopy(own)
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (own, twin):
        states(model, tokens(), use_cache=False).square().mean().backward()
    for a, b in zip(own.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_stride_and_top_k_follow_the_model_too():
    own = pair("llama", sparsek={"stride": 128, "window": 64, "block": 64})[1]
    hidden = pair("llama")[1]
    seen = transformers_masks.BlockMask.strided(300, 128, 64, block=64).to_dense()
    ids = tokens(length=300)
    with torch.no_grad():
        torch.testing.assert_close(states(own, ids), states(hidden, ids, attention_mask=seen))
        every = pair("llama", sparsek={"topk": 5, "block": 64})[1]
        for at in ("none", "left", "gaps"):
            check_alike(hidden, every, ids, padding(at, 300))
        some = pair("llama", sparsek={"topk": 2, "block": 64})[1]
        assert not torch.allclose(states(some, ids), states(every, ids), atol=1e-3)
        torch.testing.assert_close(states(some, ids)[:, :100], states(every, ids)[:, :100])


@pytest.mark.parametrize("cached", sampled([True, False], 1))
def test_a_compiled_model_gives_the_same(cached: bool):
    """With a cache in one graph. Without one transformers reads position_ids, to find packed documents."""
    torch._dynamo.reset()
    own = pair("llama", sparsek=POLICY)[1].model
    own.layers = own.layers[:1]
    compiled = torch.compile(own, backend="eager", fullgraph=cached)
    with torch.no_grad():
        want = states(own, tokens(), use_cache=cached)
        torch.testing.assert_close(states(compiled, tokens(), use_cache=cached), want)
    torch._dynamo.reset()


def test_a_compiled_model_finds_packed_documents_in_one_graph():
    torch._dynamo.reset()
    own = pair("llama")[1].model
    own.layers = own.layers[:1]
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    ids = tokens(batch=2, length=150)
    for edges in ((150, 150), (40, 40), (70, 149)):
        positions = torch.stack([torch.cat((torch.arange(at), torch.arange(150 - at))) for at in edges])
        options = {"use_cache": False, "position_ids": positions}
        out = compiled(ids, **options).last_hidden_state
        torch.testing.assert_close(out, own(ids, **options).last_hidden_state)
        out.sum().backward()
    torch._dynamo.reset()


def test_the_config_keeps_the_policy(tmp_path: Path):
    kind, config = llama(sparsek=POLICY)
    config.save_pretrained(tmp_path)
    assert transformers.LlamaConfig.from_pretrained(tmp_path).sparsek == POLICY
    kind(config).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, attn_implementation="sparsek")
    assert transformers_config.policy_of(loaded.config) == transformers_masks.MaskPolicy(
        **POLICY, causal=False
    )


def test_attention_can_be_changed_on_a_model():
    other = pair("llama")[0]
    want = states(other, tokens())
    other.set_attn_implementation("sparsek")
    torch.testing.assert_close(states(other, tokens()), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "option"), [("llama", "attention_dropout"), ("bert", "attention_probs_dropout_prob")]
)
def test_dropout_is_refused_in_training_only(name: str, option: str):
    own = pair(name, **{option: 0.1})[1]
    states(own, tokens())
    refused(r"attention dropout is 0\.1.*set config.attention_dropout", states, own.train(), tokens())


WRONG: dict[str, Any] = {
    "does not have head_mask": {"head_mask": torch.ones(4)},
    "a position bias": {"position_bias": torch.zeros(1, 4, 5, 5)},
    "the weights are never in memory": {"output_attentions": True},
    "cu_seq_lens are given": {"cu_seq_lens_q": torch.tensor([0, 5])},
    "a causal mask or a window is wanted": {"sliding_window": 3},
    "attention_mask is 2-D": {"attention_mask": torch.ones(1, 5)},
    "attention_mask is str": {"attention_mask": "causal"},
    r"attention_mask\[0, 0, 0, 0\] is -1": {"attention_mask": torch.full((1, 1, 5, 5), -1.0)},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_it_does_not_have_is_refused(message: str):
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    options = {"attention_mask": None, **WRONG[message]}
    refused(message, sparsek_attention, torch.nn.Identity(), q, k, k, **options)


@pytest.mark.parametrize("shape", [(2, 60, 60), (3, 60), (60,)], ids=str)
def test_padding_of_another_shape_is_told_what_is_expected(shape: tuple[int, ...]):
    own = pair("llama")[1]
    ids = torch.ones(2, 60, dtype=torch.int64)
    found = rf"attention_mask is {len(shape)}-D \[.*; a model takes padding, 2-D \[2, tokens\], or a 4-D mask \[2, "
    refused(found, own, ids, attention_mask=torch.ones(shape, dtype=torch.int64))


def test_without_a_mask_the_module_says_whether_it_is_causal():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    module = torch.nn.Identity()
    dense = torch.nn.functional.scaled_dot_product_attention
    for causal in (True, False):
        module.is_causal = causal  # type: ignore[assignment]
        want = dense(q, k, k, is_causal=causal, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(sparsek_attention(module, q, k, k, None)[0], want)
        torch.testing.assert_close(
            sparsek_attention(torch.nn.Identity(), q, k, k, None, is_causal=causal)[0], want
        )
    refused("for 3 queries and 5 keys", sparsek_attention, module, q[:, :, :3], k, k, None, is_causal=True)
    one = sparsek_attention(torch.nn.Identity(), q[:, :, :1], k, k, None)[0]
    torch.testing.assert_close(one, dense(q[:, :, :1], k, k, enable_gqa=True).transpose(1, 2))


@pytest.mark.parametrize(
    "options", [{"width": 3}, {"window": 3, "causal": True}, "window", {"window": 0}], ids=str
)
def test_policies_that_are_none_are_refused(options: Any):
    refused(r"config\.sparsek is|window is 0", lambda: states(pair("llama", sparsek=options)[1], tokens()))


def test_cross_attention_has_other_keys_than_queries():
    config = bert(is_decoder=True, add_cross_attention=True)[1]
    models: list[Any] = []
    for name in ("eager", "sparsek"):
        torch.manual_seed(0)
        models.append(
            transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        )
    encoded = torch.randn(2, 90, 32, generator=torch.Generator().manual_seed(0))
    there = torch.ones(2, 90, dtype=torch.int64)
    there[1, 60:] = 0
    check_alike(models[0], models[1], tokens(), encoder_hidden_states=encoded, encoder_attention_mask=there)


def test_a_causal_model_may_be_made_bidirectional():
    check_alike(*pair("llama", is_causal=False), tokens(), padding("right"))


@pytest.mark.gpu
def test_masks_go_to_other_devices_once():
    visible = transformers_masks.MaskPolicy(window=3).mask(20, device="cpu")
    mask = transformers_masks.ModelMask(transformers_masks.ResolvedRule(visible), (1, 1, 20, 20))
    moved = mask.to("cuda")
    assert moved is mask.to(torch.device("cuda", 0))
    assert moved.visible.within.device.type == "cuda"


def test_the_mask_of_a_model_says_what_it_is():
    visible = transformers_masks.ResolvedRule(transformers_masks.MaskPolicy(window=3).mask(20))
    mask = transformers_masks.ModelMask(visible, (1, 1, 20, 20))
    assert mask.to("cpu") is mask.contiguous() is mask
    assert repr(mask).startswith("ModelMask(BlockMask(sliding_window(3), 20 x 20")


def documents(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def test_packed_documents_under_a_cache_warn():
    """transformers looks for documents without a cache only; eager attention and sdpa do as SparseK."""
    own, ids, packed = pair("llama")[1], tokens(1), documents([70, 80])
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"position_ids restart, .*pass use_cache=False"):
            states(own, ids, position_ids=packed)
        states(own, ids, position_ids=packed.clone())  # once a model
        own = pair("llama")[1]
        cache = transformers.StaticCache(config=own.config, max_cache_len=400)
        with pytest.warns(UserWarning, match="position_ids restart"):
            states(own, ids, position_ids=packed.clone(), past_key_values=cache)
        own = pair("llama")[1]
        states(own, ids, position_ids=packed, use_cache=False)
        for there in (torch.ones(1, 150, dtype=torch.int64), None):  # positions of padding restart too
            states(own, ids, attention_mask=there, position_ids=None if there is None else packed)
        cache = transformers.DynamicCache(config=own.config)
        for part in ids.split(75, 1):
            states(own, part, past_key_values=cache)


def test_positions_that_never_go_back_are_no_documents():
    own, ids, place = pair("llama")[1], tokens(1), torch.arange(150)[None]
    with torch.no_grad():
        for positions in (
            place.clamp(max=100),
            place.clamp(min=10),
            place // 2 + 1,
        ):
            states(own, ids, position_ids=positions)
        with pytest.warns(UserWarning, match="position_ids restart"):
            states(own, ids, position_ids=place * 0)  # documents of one token


def test_positions_of_vmap_are_not_read():
    own, ids = pair("llama")[1], tokens(2)
    place = torch.arange(150).expand(2, -1)
    with torch.no_grad():
        batched = torch.func.vmap(lambda x, at: states(own, x[None], position_ids=at[None]))(ids, place)
        assert torch.allclose(batched[:, 0], states(own, ids), atol=1e-5)


def test_flash_attentions_lengths_go_with_positions_that_restart():
    own, lengths = pair("llama")[1], [70, 80]
    ends = torch.tensor([0, 70, 150], dtype=torch.int32)
    flat = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 80, "max_length_k": 80}
    ids = tokens(1)
    with torch.no_grad():
        packed = states(own, ids, position_ids=documents(lengths), use_cache=False, **flat)
        want = states(own, ids, position_ids=documents(lengths), use_cache=False)
    assert torch.equal(packed, want)
    with pytest.raises(InvalidInput, match=r"cu_seq_lens .* pass position_ids that restart, use_cache=False"):
        states(own, ids, position_ids=documents(lengths), **flat)


def test_an_attention_of_a_mesh_is_registered_as_the_page_shows():
    """In a mesh of one process; docs/how-to/distributed.md."""
    other, own = pair("llama")
    ids, called = tokens(), []

    def over_mesh(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        called.append(module)
        out = sk.distributed.attention(query, key, value, plan, scale=options["scaling"])
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("mesh", over_mesh)
    transformers.AttentionMaskInterface.register("mesh", lambda *args, **options: None)
    with one_process():
        plan = sk.distributed.plan(sk.MaskPolicy(block=64), dist.group.WORLD, length=150)
        own.set_attn_implementation("mesh")
        shard, at = sk.distributed.shard_sequence(ids, plan, dim=1), sk.distributed.positions(plan)
        found = states(own, shard, position_ids=at[None], use_cache=False)
        whole = sk.distributed.unshard_sequence(found, plan, dim=1)
    assert called
    torch.testing.assert_close(whole, states(other, ids), atol=1e-5, rtol=1e-4)
