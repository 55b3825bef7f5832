"""Decode steps over static caches: masks without a look at positions, one graph for all steps, in a CUDA graph too."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.tools import need

need("transformers")

from torch._subclasses.fake_tensor import FakeTensorMode

from sparsek.attn import policies
from sparsek.attn.mask.rule import MaskPolicy
from sparsek.integrations.transformers import sparsek_attention, sparsek_mask
from sparsek.integrations.transformers_masks import Restarts
from sparsek.integrations.transformers_steps import MOST, WindowKeys, near_of, step_mask
from tests.integrations.models import REFERENCE, masking_utils, padding, pair, tokens, transformers

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


@pytest.mark.parametrize("options", [{}, {"sparsek": POLICY}], ids=["plain", "policy"])
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


@pytest.mark.parametrize(("few", "at"), [(1, "none"), (3, "left"), (1, "gaps")])
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
