"""Decode steps over static caches: masks without a look at positions, one graph for all steps, in a CUDA graph too."""

import copy
import math
import random
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.tools import need
from tests.sampling import sampled

need("transformers")

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparsek.attn import policies
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.core.errors import InvalidInput
from sparsek.integrations import transformers as integration
from sparsek.integrations import transformers_steps
from sparsek.integrations.transformers import sparsek_attention, sparsek_mask
from sparsek.integrations.transformers_masks import Restarts
from sparsek.integrations.transformers_steps import MOST, StepMask, WindowKeys, near_of, step_mask
from tests.integrations.models import (
    REFERENCE,
    masking_utils,
    overlay,
    padding,
    pair,
    states,
    tokens,
    transformers,
)

POLICY = {"window": 20, "sinks": 3, "block": 64}
CAUSAL = masking_utils.causal_mask_function


def counting() -> tuple[list[int], Any]:
    """A list that grows by each graph, and the backend of torch.compile that runs graphs as they are."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any, **_: Any) -> Any:  # a function, because configs copy objects
        graphs.append(len(inputs))
        return graph

    return graphs, backend


def compiled(model: Any, at: str, length: int, new: int) -> tuple[Tensor, int]:
    """Tokens that a compiled model generates, with a graph for every forward pass, and the number of graphs."""
    torch._dynamo.reset()
    graphs, backend = counting()
    config = transformers.CompileConfig(fullgraph=True, backend=backend)
    config._compile_all_devices = True
    found = model.generate(
        tokens(length=length), attention_mask=padding(at, length), max_new_tokens=new, do_sample=False,
        cache_implementation="static", pad_token_id=0, eos_token_id=None, compile_config=config,
    )  # fmt: skip
    torch._dynamo.reset()
    return found, len(graphs)


@pytest.mark.parametrize("options", sampled([{}, {"sparsek": POLICY}], 1), ids=str)
def test_generate_compiles_one_graph_for_all_steps(options: dict[str, Any]):
    """Tokens 61 to 100 and T of 100: blocks of 64 and of 128, a ragged last one."""
    other, own = pair("llama", REFERENCE if options else "eager", **options)
    found, graphs = compiled(own, "left", 60, 40)
    want = other.generate(
        tokens(length=60),
        attention_mask=padding("left", 60),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(found, want)
    assert graphs == 1


def test_a_layer_with_a_window_compiles_as_often_as_with_eager_attention():
    """Its cache counts on the host, so transformers compiles once more for the number."""
    own_kind = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    other, own = pair("gpt_oss", **own_kind)
    want, often = compiled(other, "left", 55, 4)
    found, graphs = compiled(own, "left", 55, 4)
    assert torch.equal(found, want)
    assert graphs == often


def test_capped_scores_are_compiled_too():
    other, own = pair("gemma2", num_hidden_layers=1, layer_types=["full_attention"])
    found, graphs = compiled(own, "left", 55, 4)
    want = other.generate(
        tokens(length=55), attention_mask=padding("left", 55), max_new_tokens=4, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    assert torch.equal(found, want)
    assert graphs == 1


@pytest.mark.parametrize(("few", "at"), sampled([(1, "none"), (3, "left"), (1, "gaps")], 1))
def test_a_compiled_model_makes_the_masks_of_steps_in_its_graph(few: int, at: str):
    """As many tokens of padding as the cache has slots, so that shapes are equal."""
    torch._dynamo.reset()
    other, own = pair("llama", REFERENCE, sparsek=POLICY)
    for model in (other, own):
        model.model.layers = model.model.layers[:1]
    graphs, backend = counting()
    ids, there = tokens(length=84), padding(at, 84)
    fixed = None if there is None else torch.nn.functional.pad(there, (0, 6))
    step = torch.compile(own, backend=backend, fullgraph=True)
    with torch.no_grad():
        cache = transformers.StaticCache(config=own.config, max_cache_len=90)
        first, *rest = ids.split([75, *[few] * (9 // few)], 1)
        got = [own(first, attention_mask=fixed, past_key_values=cache).logits]
        got += [step(part, attention_mask=fixed, past_key_values=cache).logits for part in rest]
        want = other(ids, attention_mask=there, use_cache=False).logits
    real = slice(None) if there is None else there > 0
    torch.testing.assert_close(torch.cat(got, 1)[real], want[real], rtol=0, atol=2e-5)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_compiled_model_cuts_the_keys_of_a_dynamic_cache_in_its_graph():
    """One graph for the first length, and one for all others."""
    torch._dynamo.reset()
    other, own = pair("llama", REFERENCE, sparsek=POLICY, num_hidden_layers=1)
    graphs, backend = counting()
    step, ids = torch.compile(own, backend=backend, fullgraph=True), tokens(length=64)
    with torch.no_grad():
        first, *rest = ids.split([60, 1, 1, 1, 1], 1)
        cache = transformers.DynamicCache(config=own.config)
        got = [own(first, past_key_values=cache).logits]
        got += [step(part, past_key_values=cache).logits for part in rest]
        want = other(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=2e-5)
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [None, {}, POLICY], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_the_mask_of_a_step_reads_no_values(options: Any, queries: int):
    """Fake tensors have none."""
    config = transformers.LlamaConfig(sparsek=options)
    with FakeTensorMode():
        position = torch.tensor([17])
        there = torch.ones(2, 150, dtype=torch.bool)
        for padded in (None, there):
            made = sparsek_mask(
                2, queries, 200, position, mask_function=CAUSAL, attention_mask=padded, config=config
            )
            assert made.shape == (2, 1, queries, 200)


def test_masks_of_all_steps_have_one_form():
    forms = set()
    for position in (0, 63, 64, 130, 198):
        there = torch.ones(2, position + 1, dtype=torch.bool)
        there[0, : position // 2] = False
        within = sparsek_mask(2, 1, 200, torch.tensor(position), attention_mask=there).visible.within
        tensors: list[Any] = [*within.full, *within.partial, within.rules, within.bits]
        forms.add((within.sizes, within.pure, *(x.shape for x in tensors)))
        stored = (within.full.counts + within.partial.counts).tolist()
        assert stored[1] == position // 128 + 1, "blocks behind the position are visited"
    assert len(forms) == 1


def test_any_pairs_are_kept_by_blocks():
    draw = torch.Generator().manual_seed(4)
    for queries, keys, block in ((1, 1000, 128), (MOST, 130, 64), (7, 64, 64), (2, 5, 128)):
        blocks = torch.rand(3, 1, queries, -(-keys // block), generator=draw)
        seen = (
            torch.rand(3, 1, queries, keys, generator=draw) < blocks.repeat_interleave(block, 3)[..., :keys]
        )
        seen |= (blocks[:, :, :1] > 0.8).repeat_interleave(block, 3)[..., :keys]
        mask = step_mask(seen, block, -(-keys // block))
        assert torch.equal(mask.to_dense(), seen)
        mask.__post_init__()  # the checks of lists given by a user


@pytest.mark.parametrize("sinks", [0, 1, 70, 128])
@pytest.mark.parametrize("window", [1, 64, 65])
def test_the_bound_of_blocks_holds_for_every_position(window: int, sinks: int):
    there = torch.ones(1, 1000, dtype=torch.bool)
    for left, position, queries in ((0, 999 - MOST, MOST), (13, 700, 1), (130, 511, 2), (300, 301, 1)):
        there[:, :left] = False
        config = transformers.LlamaConfig(sparsek={"window": window, "sinks": sinks, "block": 64})
        asked: dict[str, Any] = {"q_length": queries, "kv_length": 1000, "q_offset": position}
        mask = sparsek_mask(1, attention_mask=there, config=config, **asked)

        def admits(b: Tensor, h: Tensor, q: Tensor, k: Tensor, left: int = left) -> Tensor:
            return ((q - k).abs() < window) | (k - left < sinks)

        want: Any = masking_utils.sdpa_mask(
            1, mask_function=masking_utils.and_masks(CAUSAL, admits), attention_mask=there,
            allow_is_causal_skip=False, **asked,
        )  # fmt: skip
        assert torch.equal(mask.visible.within.to_dense(), want)
        assert mask.visible.within.sizes.longest == WindowKeys(window, sinks, 64).most(queries, 1000)


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[B, S, H, D] in float64; a query without keys gives 0."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


def drawn(draw: random.Random) -> tuple[dict[str, Any], Any, Tensor]:
    """Arguments of a mask of few queries, its policy, and the pairs that it admits."""
    batch, queries = draw.choice([1, 2]), draw.choice([1, 1, 1, 2, 5])
    keys, kv_offset = queries + draw.randint(1, 40), draw.choice([0, 0, draw.randint(1, 9)])
    place = draw.choice([keys - queries, keys - queries, draw.randint(1, keys)])
    near = draw.randint(1, 30)
    function = draw.choice([
        CAUSAL, CAUSAL, masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(near),
        masking_utils.sliding_window_bidirectional_mask_function(near),
        masking_utils.chunked_causal_mask_function(near, torch.zeros(batch, dtype=torch.int64)),
        lambda b, h, q, k: (q * k) % 3 < 2,
    ])  # fmt: skip
    length = max(kv_offset + keys - draw.choice([0, 0, 0, 2]), 2)
    there = torch.ones(batch, length, dtype=torch.bool)
    kind = draw.choice(["none", "all", "all", "left", "gaps"])
    if kind == "left":
        there[-1, : draw.randint(1, length - 1)] = False
    elif kind == "gaps":
        there[0] = torch.rand(length, generator=torch.Generator().manual_seed(draw.randint(0, 99))) < 0.8
    padded = None if kind == "none" else there
    options = draw.choice([None, {"window": near + 3}, {"window": near, "sinks": draw.randint(1, 12)}])
    at = kv_offset + place
    asked: dict[str, Any] = {
        "batch_size": batch,
        "q_length": queries,
        "kv_length": keys,
        "kv_offset": kv_offset,
    }
    rule = function
    if options:
        first = (there if padded is not None else torch.ones(batch, 1)).int().argmax(1)
        rule = masking_utils.and_masks(function, overlay(options, first))
    seen = masking_utils.sdpa_mask(
        **asked, q_offset=at, mask_function=rule, attention_mask=padded, allow_is_causal_skip=False
    )
    asked |= {"q_offset": draw.choice([at, at, torch.tensor(at)]), "mask_function": function}
    asked |= {"attention_mask": padded, "allow_is_causal_skip": draw.choice([True, True, False])}
    assert seen is not None
    return asked, options, seen


@pytest.mark.parametrize("start", [0, 60, 120, 2160])
def test_few_queries_see_what_the_model_and_the_policy_admit(start: int):
    """With any kinds of masks, offsets and padding, over a part of the keys or all, without a mask and with one."""
    forms = set()
    for number in range(start, start + 60):
        asked, options, seen = drawn(random.Random(number))
        draw = torch.Generator().manual_seed(number)
        batch, queries, keys = seen.shape[0], *seen.shape[2:]
        q = torch.randn(batch, queries, 4, 8, generator=draw).transpose(1, 2)
        k, v = (torch.randn(batch, 2, keys, dim, generator=draw) for dim in (8, 6 + number % 3))
        mask = sparsek_mask(**asked, config=transformers.LlamaConfig(sparsek=options))
        assert isinstance(mask, StepMask)
        out = sparsek_attention(torch.nn.Identity(), q, k, v, mask)[0]
        want = reference(q, k, v, seen)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5, msg=f"draw {number}: {mask}")
        assert out.is_contiguous()
        forms.add((mask.seen is None, mask.span is None))
        if number % 6 == 0:
            assert torch.equal(mask.visible.within.to_dense().expand_as(seen), seen), number
            capped = sparsek_attention(torch.nn.Identity(), q, k, v, mask, softcap=1e3)[0]
            torch.testing.assert_close(capped.double(), want, rtol=0, atol=1e-4)
    assert len(forms) > 2


@pytest.mark.parametrize("options", [None, {"window": 20, "block": 64}, POLICY], ids=str)
@pytest.mark.parametrize(("cache", "at"), [("dynamic", "none"), ("dynamic", "left"), ("static", "none")])
def test_steps_of_generation_make_no_blocks_and_attend_to_what_a_window_leaves(
    monkeypatch: pytest.MonkeyPatch, options: Any, cache: str, at: str
):
    lengths: list[int] = []

    def attended(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths.append(key.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, key, *args, **kwargs)

    def refused(*_: Any) -> None:
        raise AssertionError("blocks are made")

    monkeypatch.setattr(transformers_steps, "scaled_dot_product_attention", attended)
    monkeypatch.setattr(transformers_steps, "step_mask", refused)
    own = pair("llama", sparsek=options)[1]
    own.generate(
        tokens(length=60), attention_mask=padding(at, 60), max_new_tokens=4, do_sample=False, pad_token_id=0,
        eos_token_id=None, cache_implementation=cache,
    )  # fmt: skip
    left = None
    if cache == "dynamic":
        left = 20 if options and "sinks" not in options else 23 if options and at == "none" else None
    every = [61, 62, 63] if cache == "dynamic" else [63, 63, 63]
    assert lengths == [length for each in every for length in [left or each] * 2]


LEAN = 16  # functions that a step without a mask enters, those of counting included


def calls_of(function: Any) -> int:
    """How many functions of Python and C a call enters."""
    found = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    function()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("at", ["none", "left"])
def test_the_host_does_no_more_for_a_layer_than_for_sdpa(at: str):
    layer: Any = torch.nn.Identity()
    layer.num_key_value_groups, layer.is_causal = 2, True
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 150, 8)
    asked: dict[str, Any] = {"batch_size": 2, "q_length": 1, "kv_length": 150, "q_offset": 149}
    there = padding(at)
    asked["attention_mask"] = None if there is None else there.bool()
    given: dict[str, Any] = {"dropout": 0.0, "scaling": 0.3, "position_ids": None, "use_cache": True}
    own, other = sparsek_mask(**asked, dtype=torch.float32), masking_utils.sdpa_mask(**asked)
    a = calls_of(lambda: sparsek_attention(layer, q, k, k, own, **given))
    b = calls_of(lambda: sdpa_attention_forward(layer, q, k, k, other, **given))
    assert a <= max(b, LEAN)  # without a mask sdpa of transformers 5.4 enters 13


def test_operands_that_do_not_fit_a_step_are_refused_as_ever():
    mask = sparsek_mask(2, 1, 40, 39)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 40, 8)
    layer = torch.nn.Identity()
    refusals: list[dict[str, Any]] = [
        {"dropout": 0.1}, {"position_bias": q}, {"output_attentions": True}, {"scaling": -1.0}
    ]  # fmt: skip
    jagged = torch.nested.nested_tensor([*k], layout=torch.jagged)
    shapes: list[tuple[Any, Any, Any]] = [
        (q, k[:, :, :30], k[:, :, :30]), (q, k, k[:, :, :30]), (q[:, :3], k, k), (q[:1], k, k), (q, k.double(), k),
        (q.int(), k.int(), k.int()), (q[0], k, k), (q[..., :4], k, k), (q.to("meta"), k.to("meta"), k.to("meta")),
        (q, k.to_sparse(), k), (q, k, k.to_mkldnn()), (q, k, jagged), (q, k, None),
    ]  # fmt: skip
    for wrong in shapes:
        for each in (mask, None):
            if each is not None or wrong[1].shape[2] == 40:
                with pytest.raises(InvalidInput):
                    sparsek_attention(layer, *wrong, each)
    for options in refusals:
        with pytest.raises(InvalidInput):
            sparsek_attention(layer, q, k, k, mask, **options)
    sinks = sparsek_attention(layer, q, k, k, mask, s_aux=torch.zeros(4))[0]
    assert not torch.allclose(sinks, sparsek_attention(layer, q, k, k, mask)[0])


def test_steps_learn_and_follow_autocast():
    q, k = torch.randn(2, 4, 1, 8, requires_grad=True), torch.randn(2, 2, 40, 8, requires_grad=True)
    for there in (None, padding("gaps", 40)):
        mask = sparsek_mask(2, 1, 40, 39, attention_mask=there)
        out = sparsek_attention(torch.nn.Identity(), q, k, k, mask)[0]
        seen = torch.ones(2, 1, 1, 40, dtype=torch.bool) if there is None else there[:, None, None].bool()
        want = torch.autograd.grad(reference(q, k, k, seen).sum(), (q, k))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k)), want)
        with torch.autocast("cpu"):
            near = sparsek_attention(torch.nn.Identity(), q, k, k, mask)[0]
        assert near.dtype == torch.bfloat16
        torch.testing.assert_close(near.float(), out, rtol=0, atol=0.05)


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_operands_of_several_dtypes_follow_autocast(queries: int):
    """Rotary embeddings leave queries and keys in float32, beside values in bf16."""
    q, k = torch.randn(2, 4, queries, 8).bfloat16().float(), torch.randn(2, 2, 40, 8).bfloat16().float()
    mask = sparsek_mask(2, queries, 40, 40 - queries, attention_mask=padding("gaps", 40), dtype=torch.float32)
    layer, low = torch.nn.Identity(), torch.bfloat16
    want = sparsek_attention(layer, q.to(low), k.to(low), k.to(low), mask)[0]
    for kinds in ((q, k, k.to(low)), (q.to(low), k, k.to(low)), (q, k.to(low), k.to(low))):
        with torch.autocast("cpu"):
            assert torch.equal(sparsek_attention(layer, *kinds, mask)[0], want)
        with pytest.raises(InvalidInput):
            sparsek_attention(layer, *kinds, mask)
    other, own = pair("llama", num_hidden_layers=1)
    with torch.autocast("cpu"):
        got, want = (states(model, tokens(length=queries), use_cache=False) for model in (own, other))
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)


def test_blocks_of_a_step_in_inference_mode_are_those_of_any_mode():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 40, 8)
    for there in (None, padding("gaps", 40)):
        with torch.inference_mode():
            mask = sparsek_mask(2, 1, 40, 39, attention_mask=there)
            out = sparsek_attention(torch.nn.Identity(), q, k, k, mask, softcap=2.0)[0]
        again = sparsek_attention(torch.nn.Identity(), q.requires_grad_(), k, k, mask, softcap=2.0)[0]
        torch.testing.assert_close(again, out)
        assert not any(x.is_inference() for x in mask.visible.within.full)


def test_a_mask_of_inference_mode_learns_later():
    for queries in (1, 3):
        q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 40, 8)
        for dtype in (torch.float32, torch.float64):  # that of the mask, and another
            with torch.inference_mode():
                mask = sparsek_mask(2, queries, 40, 40 - queries, attention_mask=padding("gaps", 40))
                want = sparsek_attention(torch.nn.Identity(), q.to(dtype), k.to(dtype), k.to(dtype), mask)[0]
            given = q.to(dtype).requires_grad_()
            out = sparsek_attention(torch.nn.Identity(), given, k.to(dtype), k.to(dtype), mask)[0]
            torch.testing.assert_close(out, want)
            assert torch.autograd.grad(out.sum(), given)[0].isfinite().all()


def test_a_query_without_a_mask_makes_no_blocks(monkeypatch: pytest.MonkeyPatch):
    """As in the cross-attention of Whisper."""
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 40, 8)
    want = reference(q, k, k, torch.ones(2, 1, 1, 40, dtype=torch.bool))
    with monkeypatch.context() as patch:
        patch.setattr(integration, "attention", None)
        out = sparsek_attention(torch.nn.Identity(), q, k, k, None)[0]
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6)
    layer = torch.nn.Identity()
    layer.config = transformers.LlamaConfig(sparsek={"window": 3, "block": 64})
    assert not torch.allclose(sparsek_attention(layer, q, k, k, None)[0], out)


def test_masks_over_many_keys_are_blocks():
    """Each of few programs of torch's kernels would walk them all."""
    for keys, fixed in ((4096, True), (16384, False)):
        for more in (0, 1):
            hidden = torch.ones(1, keys + more, dtype=torch.bool)
            hidden[:, :3] = False
            asked: dict[str, Any] = {"attention_mask": hidden, "allow_is_causal_skip": not fixed}
            mask = sparsek_mask(1, 1, keys + more, keys + more - 1, **asked)
            assert isinstance(mask, StepMask) == (not more)
    near = transformers.LlamaConfig(sparsek={"window": 100})
    mask = sparsek_mask(1, 3, 30000, 29997, config=near)
    assert "keys 29898 to 29999" in mask.explain()


def test_a_step_says_what_computes_it():
    near = transformers.LlamaConfig(sparsek=POLICY)
    assert sparsek_mask(1, 1, 40, 39).explain().endswith("attention over all 40 keys, with no mask")
    assert "keys 0 to 2 and 20 to 39 of 40, with no mask" in repr(sparsek_mask(1, 1, 40, 39, config=near))
    assert sparsek_mask(1, 40, 40).explain().startswith("sparsek.attention over the blocks of BlockMask(")
    xattention = transformers.LlamaConfig(sparsek=policies.XAttention())
    assert sparsek_mask(1, 40, 40, config=xattention).explain().endswith("in each layer")
    hidden = sparsek_mask(2, 1, 150, 149, attention_mask=padding("left"))
    assert hidden.explain().endswith("all 150 keys, with a mask that layers share")


def test_policies_that_need_lengths_on_the_host_are_told_apart():
    assert near_of(None) == WindowKeys(0, 0, 128)
    assert near_of(MaskPolicy(9, 2, block=(128, 64), causal=False)) == WindowKeys(9, 2, 64)
    for policy in (MaskPolicy(topk=3), MaskPolicy(64, stride=128), policies.MeanTopK(topk=2)):
        assert near_of(policy) is None


def on_gpu(name: str, **options: Any) -> tuple[Any, Any]:
    """Eager attention in float32 on the CPU, and SparseK's in bf16 on a GPU; heads of 64."""
    wide = {"hidden_size": 128, "head_dim": 64, "initializer_range": 0.1, **options}
    other, own = pair(name, **wide)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.bfloat16().float())
    own.load_state_dict(other.state_dict())
    return other, own.to("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice of torch's compiler
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generation_in_cuda_graphs_chooses_tokens_that_eager_attention_chooses(name: str):
    """Every chosen token is one of those that float32 scores highest, within the rounding of bf16."""
    sizes = {} if name == "llama" else {"sliding_window": 150}
    other, own = on_gpu(name, **sizes)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = transformers.CompileConfig(fullgraph=True, mode="reduce-overhead")
    there = padding("left", 140)
    assert there is not None
    found = own.generate(
        tokens(length=140).cuda(), attention_mask=there.cuda(), max_new_tokens=30, do_sample=False,
        cache_implementation="static", pad_token_id=0, eos_token_id=None, compile_config=config,
    ).cpu()  # fmt: skip
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"]
    assert not counted["inductor"]["cudagraph_skips"]
    if name == "llama":
        assert counted["stats"]["unique_graphs"] == 1
    every = torch.nn.functional.pad(there, (0, 30), value=1)
    with torch.no_grad():
        scores = other(found, attention_mask=every).logits[:, 139:-1]
    chosen = scores.gather(2, found[:, 140:, None])[..., 0]
    assert (scores.amax(2) - chosen).max() < 0.05 * scores.std()
    torch._dynamo.reset()


@pytest.mark.gpu
def test_steps_do_not_wait_for_the_device(no_sync: Any):
    config = transformers.LlamaConfig(sparsek=POLICY)
    there = torch.ones(2, 150, dtype=torch.bool, device="cuda")
    positions = torch.arange(150, 156, dtype=torch.int64, device="cuda")
    q, k = (torch.randn(2, heads, n, 64, device="cuda").bfloat16() for heads, n in ((4, 1), (2, 400)))
    for number, at in enumerate(positions.unbind()):
        with no_sync() if number > 2 else nullcontext():  # the first calls load kernels
            mask = sparsek_mask(2, 1, 400, at, attention_mask=there, config=config, device="cuda")
            sparsek_attention(torch.nn.Identity(), q, k, k, mask)
    assert isinstance(mask, StepMask)
    there = sparsek_attention(torch.nn.Identity(), q.cpu(), k.cpu(), k.cpu(), mask.to("cpu"))[0]
    torch.testing.assert_close(
        sparsek_attention(torch.nn.Identity(), q, k, k, mask)[0].cpu(), there, rtol=0, atol=0.02
    )


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
def test_a_query_without_keys_gives_zeros_on_a_gpu(queries: int):
    there = torch.ones(2, 200, dtype=torch.bool, device="cuda")
    there[1] = False
    q, k = (torch.randn(2, heads, n, 64, device="cuda").bfloat16() for heads, n in ((4, queries), (2, 200)))
    for heads in (q, q[:, :2]):
        mask = sparsek_mask(2, queries, 200, 200 - queries, attention_mask=there, device="cuda")
        out = sparsek_attention(torch.nn.Identity(), heads, k, k, mask)[0]
        assert out[0].isfinite().all()
        assert not out[1].any()


@pytest.mark.gpu
def test_packed_documents_under_a_cache_warn_without_a_sync(no_sync: Any):
    restarts, config = Restarts(most=2), transformers.LlamaConfig()
    plain = torch.arange(40, device="cuda")[None]
    packed = plain % 20
    restarts.look(config, plain, 40)
    torch.cuda.synchronize()
    with no_sync():
        restarts.look(config, packed, 40)
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="pass use_cache=False"), no_sync():
        restarts.look(config, packed, 40)
    for another in (config, transformers.LlamaConfig()):
        restarts.look(another, packed.clone(), 40)
        torch.cuda.synchronize()
        restarts.look(another, plain, 40)  # the two looks are spent


@pytest.mark.gpu
def test_a_step_on_a_gpu_says_what_the_whole_says():
    own = on_gpu("llama", sparsek=POLICY)[1]
    whole = copy.deepcopy(own)
    ids = tokens(length=300).cuda()
    with torch.no_grad():
        want = whole(ids, use_cache=False).logits[:, 290:]
        cache = transformers.StaticCache(config=own.config, max_cache_len=1000)
        own(ids[:, :290], past_key_values=cache)
        got = torch.cat(
            [own(part, past_key_values=cache).logits for part in ids[:, 290:].split([1, 4, 5], 1)], 1
        )
    assert (got - want).abs().max() < 0.05 * want.std()
