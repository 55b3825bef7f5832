"""What transformers' mask functions become, against what they say of every pair."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.tools import need

need("transformers")

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.integrations.transformers import mesh_inputs, sparsek_mask
from sparsek.integrations.transformers_config import policy_of
from sparsek.integrations.transformers_masks import MaskRequest, ModelMask, Rules
from sparsek.integrations.transformers_mesh import MeshMask
from tests.integrations.models import masking_utils, transformers
from tests.refusals import refused

PACKED = torch.tensor([[0] * 30 + [1] * 100 + [2] * 20, [0] * 150])
POSITIONS = torch.tensor([[*range(30), *range(100), *range(20)], [*range(150)]])
LEFT = torch.tensor([40, 3])


def packed(function: Any) -> Any:
    """As this release of transformers joins a function with documents. Older ones leave its positions as they are."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(function, POSITIONS, PACKED)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(PACKED))


KNOWN: dict[str, Any] = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(20),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(20),
    "chunks": masking_utils.chunked_causal_mask_function(32, LEFT),
    "packed": packed(masking_utils.causal_mask_function),
    "packed window": packed(masking_utils.sliding_window_causal_mask_function(9)),
}
UNKNOWN: dict[str, Any] = {
    "a function of the model's": lambda b, h, q, k: (q + k) % 3 > 0,
    "or": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 20),
    "and one of the model's": masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: k != 7
    ),
    "packed chunks": packed(masking_utils.chunked_causal_mask_function(32, LEFT)),
}
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
    UNKNOWN["positions without documents"] = masking_utils.remap_positions_for_packed_sequence(
        masking_utils.causal_mask_function, POSITIONS
    )
if hasattr(masking_utils, "blockwise_overlay"):
    UNKNOWN["images"] = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay((PACKED == 1).long() - 1)
    )


def two_dims(name: str, length: int) -> "Tensor | None":
    there = torch.ones(2, length, dtype=torch.bool)
    if name == "none":
        return None
    if "left" in name:
        there[0, :40], there[1, :3] = False, False
    if "right" in name:
        there[0, 140:] = False
    if name == "nothing":
        there[1] = False
    if name == "gaps":
        there[0, 60:63] = False
    return there


def both(function: Any, **asked: Any) -> tuple[ModelMask, Tensor]:
    mask = sparsek_mask(2, mask_function=function, **asked)
    want: Any = masking_utils.sdpa_mask(2, mask_function=function, allow_is_causal_skip=False, **asked)
    return mask, want


def check(function: Any, **asked: Any) -> ModelMask:
    mask, want = both(function, **asked)
    seen = mask.visible.within.to_dense()
    assert torch.equal(seen.expand_as(want), want)
    assert mask.shape == tuple(want.shape)
    return mask


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("padding", ["none", "left", "left and right", "nothing"])
def test_known_functions_are_documents_and_windows(name: str, padding: str):
    rules = Rules.of(KNOWN[name])
    assert rules is not None
    check(KNOWN[name], q_length=150, kv_length=150, attention_mask=two_dims(padding, 150))


@pytest.mark.parametrize("name", [name for name in [*KNOWN, *UNKNOWN] if "packed" not in name])
@pytest.mark.parametrize("padding", ["none", "left and right", "gaps"])
def test_parts_of_a_sequence_stand_where_the_offsets_say(name: str, padding: str):
    """A cache that grows, one of fixed length, and one that has dropped what its window does not see; what is packed
    has no cache."""
    function = (KNOWN | UNKNOWN)[name]
    for q_length, kv_length, q_offset, kv_offset in ((1, 150, 149, 0), (30, 150, 20, 0), (9, 60, 141, 90)):
        if name in ("positions without documents", "images"):
            kv_length, kv_offset = 150, 0
        check(
            function, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            attention_mask=two_dims(padding, 150),
        )  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_functions_are_asked_about_every_pair(name: str):
    assert Rules.of(UNKNOWN[name]) is None
    check(UNKNOWN[name], q_length=150, kv_length=150, attention_mask=two_dims("left", 150))


def test_a_function_that_only_takes_single_pairs_is_vmapped():
    table = torch.rand(150, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = sparsek_mask(2, 150, 150, mask_function=lambda b, h, q, k: table[q][k], use_vmap=True)
    assert torch.equal(mask.visible.within.to_dense()[1, 0], table)


def test_a_two_dimensional_mask_shorter_than_a_static_cache_ends_with_padding():
    check(KNOWN["causal"], q_length=5, kv_length=200, q_offset=145, attention_mask=two_dims("left", 150))


def test_offsets_may_be_tensors():
    mask, want = both(KNOWN["causal"], q_length=5, kv_length=200, q_offset=torch.tensor(145))
    assert torch.equal(mask.visible.within.to_dense()[0, 0], want[0, 0])


def test_batch_items_that_are_alike_share_one_mask():
    assert check(KNOWN["causal"], q_length=150, kv_length=150).visible.within.batch == 1
    there = two_dims("left", 150)
    assert check(KNOWN["causal"], q_length=150, kv_length=150, attention_mask=there).visible.within.batch == 2


def test_a_mask_that_is_ready_is_given_back():
    mask = sparsek_mask(2, 150, 150)
    assert sparsek_mask(2, 150, 150, attention_mask=mask) is mask


def test_the_same_functions_of_another_make_are_not_taken_for_known():
    """A function that holds something else than its name says is asked."""

    def sliding_window_overlay(width: int) -> Any:
        def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k > q + width

        return inner_mask

    function = sliding_window_overlay(3)
    assert Rules.of(function) is None
    function.__module__ = masking_utils.__name__
    function.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    assert Rules.of(function) is None


@pytest.mark.parametrize("window", [5, 60])
@pytest.mark.parametrize("q_offset", [0, 141])
def test_sinks_and_windows_of_the_policy_and_of_the_model_are_both_kept(window: int, q_offset: int):
    """Sinks count from the first token that is there, also where a cache has dropped it."""
    config = transformers.LlamaConfig(sparsek={"window": 20, "sinks": 50, "block": 64})
    there = two_dims("left", 150)
    assert there is not None
    first = there.int().argmax(1)

    def admits(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k < 20) & (k - q < 20)) | (k - first[b] < 50)

    function = masking_utils.sliding_window_causal_mask_function(window)
    lengths: dict[str, Any] = {"q_length": 150, "kv_length": 150}
    if q_offset:
        lengths = {"q_length": 9, "kv_length": 8 + window, "q_offset": q_offset, "kv_offset": 142 - window}
    mask = sparsek_mask(2, mask_function=function, attention_mask=there, config=config, **lengths)
    both = masking_utils.and_masks(function, admits)
    want: Any = masking_utils.sdpa_mask(
        2, mask_function=both, attention_mask=there, allow_is_causal_skip=False, **lengths
    )
    assert torch.equal(mask.visible.within.to_dense(), want)


def test_sinks_of_chunks_are_those_of_the_sequence():
    config = transformers.LlamaConfig(sparsek={"window": 5, "sinks": 3})
    mask = sparsek_mask(2, 150, 150, mask_function=KNOWN["chunks"], config=config).visible.within.to_dense()
    assert mask[0, 0, 39, :3].tolist() == [False] * 3  # chunks of this item begin at 8
    assert mask[1, 0, 2, :3].tolist() == [True] * 3
    assert not mask[1, 0, 34:, :3].any()


def test_a_stride_needs_the_keys_from_the_first_on():
    config = transformers.LlamaConfig(sparsek={"stride": 128, "window": 64, "block": 64})
    sparsek_mask(1, 9, 150, q_offset=141, config=config)
    with pytest.raises(InvalidInput, match="a stride counts blocks from the first key"):
        sparsek_mask(1, 9, 60, q_offset=141, kv_offset=90, config=config)


def test_long_sequences_cost_what_their_blocks_cost():
    config = transformers.LlamaConfig(sparsek={"window": 1024, "sinks": 64})
    there = torch.ones(2, 131072, dtype=torch.bool)
    there[0, :1000] = False
    mask = sparsek_mask(2, 131072, 131072, attention_mask=there, config=config).visible.within
    assert mask.stored_blocks < 11 * mask.rows
    assert mask.nbytes < 20e6


@pytest.mark.parametrize(
    "options", [None, {}, {"window": 3}, {"topk": 4, "window": 9, "block": [64, 128]}], ids=str
)
def test_a_policy_of_a_config_has_the_causality_of_the_model(options: "dict[str, Any] | None"):
    policy = policy_of(transformers.LlamaConfig(sparsek=options))
    assert (policy is None) == (options is None)
    assert policy is None or not policy.causal


def test_padding_is_looked_at_as_far_as_the_keys_reach():
    for length, q_offset, kv_offset in itertools.product((20, 60), (0, 100), (0, 30)):
        there = two_dims("left", 150)
        found = MaskRequest(2, 5, length, q_offset, kv_offset, there, torch.device("cpu")).keys
        assert there is not None
        here = there[:, kv_offset : kv_offset + length]
        assert [(end - start) for start, end, _ in found[0].tolist()] == here.sum(1).tolist()
        assert found[1]


MESHED: dict[str, sk.BlockMask] = {
    "causal documents": sk.MaskPolicy(block=64).packed(torch.tensor([0, 70, 150])),
    "whole documents": sk.MaskPolicy(causal=False, block=64).packed(torch.tensor([0, 70, 150])),
    "bits": sk.BlockMask.from_dense(torch.rand(1, 1, 150, 150) < 0.5, block=64),
}


@pytest.mark.parametrize("mask", MESHED)
@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "window both ways"])
def test_layers_over_a_mesh_have_their_own_mask_too(name: str, mask: str) -> None:
    plan = sk.distributed.plan(MESHED[mask], 2)
    found = sparsek_mask(
        1, 70, 70, mask_function=KNOWN[name], attention_mask=MeshMask(plan, (1, 1, 70, 70), {})
    )
    assert isinstance(found, MeshMask)
    own = torch.ones(150, 150, dtype=torch.bool)
    if name != "bidirectional":
        at = torch.arange(150)
        own = KNOWN[name](0, 0, at[:, None], at)
    assert torch.equal(found.plan.mask.to_dense()[0, 0], MESHED[mask].to_dense()[0, 0] & own)
    assert (found.plan is plan) == (name == "bidirectional" or (name, mask) == ("causal", "causal documents"))


def test_what_a_model_over_a_mesh_refuses() -> None:
    plan, ids = sk.distributed.plan(MESHED["causal documents"], 2), torch.zeros(2, 150, dtype=torch.int64)
    refused("attention_mask does not go", mesh_inputs, plan, input_ids=ids, attention_mask=torch.ones(2, 150))
    refused(r"must be \[B, 150", mesh_inputs, plan, input_ids=ids[:, :70])
    refused("got none", mesh_inputs, plan)
    refused("without processes", mesh_inputs, plan, input_ids=ids)
    refused("plan is", mesh_inputs, plan.mask, input_ids=ids)
    mask = MeshMask(plan, (1, 1, 70, 70), {})
    refused("output_router_logits", mask.reshape, -1)
    for function in (KNOWN["chunks"], KNOWN["packed"], UNKNOWN["a function of the model's"]):
        with pytest.raises(InvalidInput, match="over a mesh layers are causal or not"):
            mask.of_layers(function, None)
    with pytest.raises(InvalidInput, match="plan with its mask"):
        mask.of_layers(KNOWN["causal"], transformers.LlamaConfig(sparsek={"window": 64}))
    mixed = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(InvalidInput, match="kinds linear_attention, which mix"):
        mask.of_layers(KNOWN["causal"], mixed)
