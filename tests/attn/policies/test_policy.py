"""What all policies share: attention takes them, | and &, labels, empty inputs; and Nabla against loops."""

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsek as sk
from sparsek.attn.mask import recorded
from sparsek.core.errors import InvalidInput
from tests.attn.policies.drawn import chosen, lengths_of, normal, slow_scores
from tests.refusals import refused

policies = sk.policies
TILES = policies.SlidingTile((2, 16, 16), (1, 3, 3), (1, 8, 8), clamped=False)
ALL: list[Any] = [
    policies.MeanTopK(topk=2, block=64),
    policies.SubBlock(density=0.3, always=(1, 1)),
    policies.Nabla(0.6),
    policies.Nabla(0.3, tiles=TILES),
    policies.Nabla(0.5, block=128, causal=True),
    policies.VSA(topk=2),
    TILES,
    policies.Radial(8, 64, block=64),
    policies.Streaming(window=128, sinks=64, block=64),
    policies.MeanTopK(topk=1, block=64) | policies.Streaming(window=64, sinks=64, block=64),
    policies.SubBlock() & TILES,
    policies.XAttention(threshold=0.5, block=64),
    policies.FlexPrefill(gamma=0.4, min_budget=64, block=64),
    policies.VerticalSlash(30, 50, block=64),
]


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
def test_attention_takes_a_policy_as_its_mask(policy: Any) -> None:
    q, k, v = normal(2, 4, 512, 16), normal(2, 2, 512, 16, seed=1), normal(2, 2, 512, 8, seed=2)
    mask = policy.mask(q, k)
    assert torch.equal(sk.attention(q, k, v, policy), sk.attention(q, k, v, mask))
    assert 0 < mask.density < 1
    assert torch.equal(chosen(policy.mask_for(q, k)), chosen(mask))
    if policy.causal:
        assert not mask.to_dense().triu(1).any()


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
def test_a_policy_is_a_value(policy: Any) -> None:
    assert policy == copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy))  # noqa: S301
    assert len({policy, copy.copy(policy)}) == 1
    assert type(policy).__name__ in repr(policy)
    with pytest.raises(AttributeError):
        policy.block = 128


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
def test_no_batch_items_give_an_empty_result(policy: Any) -> None:
    q = normal(0, 2, 512, 16)
    assert sk.attention(q, q, q, policy).shape == (0, 2, 512, 16)


def test_labels_name_what_is_not_default() -> None:
    assert [each.label for each in ALL[:5]] == [
        "MeanTopK(topk=2, block=64)",
        "SubBlock(density=0.3, always=(1, 1))",
        "Nabla(threshold=0.6)",
        "Nabla(threshold=0.3, tiles=SlidingTile(shape=(2, 16, 16), window=(1, 3, 3), tile=(1, 8, 8), clamped=False))",
        "Nabla(threshold=0.5, block=128, causal=True)",
    ]
    both = policies.VSA() | policies.VSA(topk=2) & policies.VSA(topk=3)
    assert both.label == "VSA() | (VSA(topk=2) & VSA(topk=3))"


@pytest.mark.parametrize("lengths", [None, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_either_and_both(lengths: int | None, causal: bool) -> None:
    q, k = normal(2, 4, 500, 16), normal(2, 2, 600, 16, seed=1)
    held = None if lengths is None else lengths_of(10, 64, lengths, 3)
    a = policies.MeanTopK(topk=3, block=64, causal=causal, always=(0, 0))
    b = policies.Streaming(window=128, sinks=64, block=64, causal=causal)
    first, second = (each.mask(q, k, q_offset=60, kv_lengths=held).to_dense() for each in (a, b))
    union, both = ((each.mask(q, k, q_offset=60, kv_lengths=held)) for each in (a | b, a & b))
    assert torch.equal(union.to_dense(), first | second)
    assert torch.equal(both.to_dense(), first & second)


def test_policies_of_other_blocks_do_not_combine() -> None:
    with pytest.raises(InvalidInput, match=r"block is \(64, 64\) and \(128, 128\); it must be the same"):
        _ = policies.VSA() | policies.MeanTopK(causal=False)
    with pytest.raises(InvalidInput, match="causal is False and True"):
        _ = policies.VSA() & policies.MeanTopK(block=64)
    with pytest.raises(TypeError):
        _ = policies.VSA() | 3  # type: ignore[operator]


def test_a_layer_takes_a_policy() -> None:
    layer = sk.nn.SparseAttention(32, heads=2, mask=policies.MeanTopK(topk=2, block=64))
    x = normal(1, 300, 32)
    assert layer(x).shape == x.shape
    assert "mask=MeanTopK(topk=2, block=64)" in repr(layer)


def test_packed_documents_refuse_a_policy() -> None:
    q, cu = normal(300, 2, 16), torch.tensor([0, 100, 300])
    with pytest.raises(InvalidInput, match="keeps no documents apart; call attention for each document"):
        sk.attention_varlen(q, q, q, cu, mask=policies.VSA())


def test_a_prediction_on_the_meta_device_refuses_a_policy() -> None:
    q = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(InvalidInput, match="q is on the meta device; pass a BlockMask"):
        sk.plan_attention(q, q, q, policies.VSA(), device="h200")


def test_the_choice_has_no_gradient_and_attention_has() -> None:
    q = normal(1, 2, 256, 16).requires_grad_()
    sk.attention(q, q, q, policies.MeanTopK(topk=1, block=64)).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(1, 400))
    q, k = normal(1, 2, q_len, 8, seed=draw(st.integers(0, 99))), normal(1, 1, kv_len, 8, seed=100)
    lengths = lengths_of(-(-kv_len // 64), 64, 1, 5) if draw(st.booleans()) else None
    return 3 * q, k, draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])), lengths, draw(st.booleans())


@given(cases())
@settings(max_examples=25)
def test_nabla_keeps_the_fewest_blocks_that_reach_the_threshold(case: tuple[Any, ...]) -> None:
    q, k, threshold, lengths, causal = case
    q_len, offset = q.shape[2], k.shape[2] - q.shape[2]
    found = chosen(policies.Nabla(threshold, causal=causal).mask(q, k, kv_lengths=lengths))
    scores = slow_scores(q, k, (64, 64), (1, 1), lengths)
    if causal:
        for i in range(scores.shape[2]):
            scores[:, :, i, max(0, (min(64 * i + 64, q_len) - 1 + offset) // 64 + 1) :] = -torch.inf
    mass = scores.exp() / scores.exp().sum(-1, keepdim=True).clamp(min=1e-30)
    ranked = mass.sort(-1, descending=True)
    before = ranked.values.cumsum(-1) - ranked.values
    for near in (1e-5, -1e-5):  # rounding may decide at the threshold itself
        kept = (before < threshold - near) & (ranked.values > 0)
        wanted = torch.zeros_like(kept).scatter(-1, ranked.indices, kept)
        assert (found >= wanted).all() if near > 0 else (found <= wanted).all()


def test_nabla_keeps_its_tiles_too() -> None:
    q = normal(1, 2, 512, 16)
    found = chosen(policies.Nabla(0.3, tiles=TILES).mask(q, q))
    assert torch.equal(found, chosen(policies.Nabla(0.3).mask(q, q)) | chosen(TILES.mask(q, q)))


WRONG: dict[str, Any] = {
    "threshold is 0; it must be a share": {"threshold": 0.0},
    "threshold is 1.5": {"threshold": 1.5},
    "most is 0": {"most": 0},
    r"tiles is 3; it must be a SlidingTile": {"tiles": 3},
    r"tiles has blocks of \(64, 64\) and is not causal; block is \(128, 128\)": {
        "tiles": TILES,
        "block": 128,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_options_of_nabla_that_do_not_fit_are_refused(message: str) -> None:
    refused(message, policies.Nabla, **WRONG[message])


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.label)
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 512), (512, 0), (0, 0)])
def test_no_queries_or_no_keys_give_zeros(policy: Any, q_len: int, kv_len: int) -> None:
    q, k = normal(1, 4, q_len, 16), normal(1, 2, kv_len, 16)
    try:
        mask = policy.mask(q, k)
    except InvalidInput as error:  # of a video, which has a length
        assert "is for as many queries as keys" in str(error) or "q and k have 0" in str(error)
        return
    assert mask.stored_blocks == 0
    assert not sk.attention(q, k, k, policy).any()


class Own(policies.Policy):
    def choose(self, given: Any) -> Any:
        return given.topk(torch.ones(1, 1, *given.place.grid), 1, self.causal)


class Wrong(policies.Policy):
    def choose(self, given: Any) -> Any:
        return given.q


class Short(policies.Policy):
    def choose(self, given: Any) -> Any:
        return sk.BlockMask.full(128)


def test_a_policy_of_a_user_needs_no_block_and_returns_a_mask() -> None:
    q = normal(1, 2, 256, 16)
    assert Own().mask(q, q).block == (128, 128)
    assert Own().label == "Own()"
    assert sk.attention(q, q, q, Own()).shape == q.shape
    refused(r"Wrong.choose returned .*; it must return a BlockMask", Wrong().mask, q, q)
    refused(
        r"Short\.choose returned a mask of 128 queries and 128 keys; q and k have 256", Short().mask, q, q
    )
    refused(r"Policy has no method choose", policies.Policy().mask, q, q)


class Changing(policies.Policy):
    def __init__(self, topk: int) -> None:
        self.topk = topk

    def choose(self, given: Any) -> Any:
        scores = torch.ones(1, 1, *given.place.grid, device=given.q.device)
        return given.topk(scores, self.topk, self.causal)


class Hiding(policies.XAttention):
    def __init__(self, more: int) -> None:
        super().__init__()
        object.__setattr__(self, "more", more)


@dataclass(frozen=True)
class Unequal(policies.Policy):
    topk: int = field(default=1, compare=False)


@pytest.mark.parametrize(
    "policy",
    [
        Changing(1),
        Hiding(1),
        Unequal(),
        Changing(1) | Own(),
        policies.XAttention() & (policies.XAttention() | Hiding(1)),
    ],
    ids=["changing", "hiding", "unequal", "one of two", "one inside another"],
)
def test_calls_of_a_policy_that_may_be_another_one_are_not_repeated(policy: Any) -> None:
    """Recorded calls are found again by == of the options."""
    assert not recorded.is_determined(policy)
    assert recorded._key((policy, torch.zeros(1)), {}, []) is None


@pytest.mark.parametrize(
    "policy", [Own(), policies.VSA(), policies.VSA() | policies.VSA(topk=3)], ids=["own", "VSA", "two"]
)
def test_calls_of_a_policy_of_fixed_fields_are_repeated(policy: Any) -> None:
    assert recorded.is_determined(policy)
    assert recorded._key((policy, torch.zeros(1)), {}, []) is not None


def test_masks_of_a_static_policy_that_changes_are_not_kept() -> None:
    class Wider(policies.Streaming):
        def pairs(self, place: Any) -> Any:
            return super().pairs(place) | getattr(self, "every", False)

    q, policy = normal(1, 2, 2048, 16), Wider(window=128, sinks=128)
    few = policy.mask(q, q).density
    object.__setattr__(policy, "every", True)
    assert policy.mask(q, q).density > few


@pytest.mark.gpu
def test_a_policy_that_changes_is_asked_in_every_call() -> None:
    q, policy = normal(1, 2, 512, 64).cuda(), Changing(1)
    for topk in (1, 1, 1, 1, 3, 3, 2):
        policy.topk = topk
        assert policy.mask(q, q).density == topk / 4


@pytest.mark.parametrize("sign", ["|", "&"])
def test_a_policy_and_a_mask_do_not_combine_and_the_cure_does(sign: str) -> None:
    q, policy, mask = normal(1, 2, 256, 16), policies.VSA(topk=1), sk.BlockMask.causal(256, block=64)
    both: Any = (lambda a, b: a | b) if sign == "|" else (lambda a, b: a & b)
    cure = rf"write policy.mask\(q, k\) \{sign} "
    for other in (mask, sk.MaskPolicy()):
        for a, b in ((policy, other), (other, policy)):
            refused(cure, both, a, b)
    assert both(policy.mask(q, q), mask).grid == (4, 4)


def test_lengths_of_blocks_may_be_int64() -> None:
    q, lengths = normal(2, 2, 256, 16), lengths_of(4, 64, 2, 3)
    for policy in (policies.SubBlock(), policies.XAttention(block=64), policies.Nabla(0.5)):
        a, b = (policy.mask(q, q, kv_lengths=each) for each in (lengths, lengths.long()))
        assert torch.equal(a.to_dense(), b.to_dense())
        refused("out of range", policy.mask, q, q, kv_lengths=lengths.long() + 2**32)


def test_a_nan_in_q_or_k_is_told() -> None:
    q = normal(1, 1, 256, 16)
    q[0, 0, 3, 2] = torch.nan
    for policy in (policies.SubBlock(), policies.XAttention(block=64)):
        refused("NaN where q or k are", policy.mask, q, q)


@pytest.mark.parametrize("name", ["q_offset", "kv_lengths", "policy", "attention_mask"])
def test_attention_names_the_cure_for_arguments_of_a_policy(name: str) -> None:
    attend: Any = sk.attention
    q = normal(1, 2, 256, 16)
    refused(f"attention has no argument {name}: (write|pass)", attend, q, q, q, policies.VSA(), **{name: 3})
