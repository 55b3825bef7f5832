"""MaskPolicy: its masks are those of the builders, made once; what it refuses; what top-k chooses."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import sparsek as sk
from sparsek.attn.mask import cache as kept_masks
from sparsek.attn.mask.rule import block_scores
from sparsek.core.errors import InvalidInput
from tests.ops.tensors import qkv
from tests.refusals import refused

MASK = sk.BlockMask
BUILT = {
    "causal": (sk.MaskPolicy(block=64), MASK.causal),
    "full": (sk.MaskPolicy(causal=False, block=64), MASK.full),
    "window": (sk.MaskPolicy(window=70, block=64), lambda **f: MASK.sliding_window(window=70, **f)),
    "both ways": (
        sk.MaskPolicy(window=70, sinks=9, causal=False, block=64),
        lambda **f: MASK.sliding_window(window=70, sinks=9, causal=False, **f),
    ),
    "strided": (
        sk.MaskPolicy(stride=128, window=64, block=64),
        lambda **f: MASK.strided(stride=128, window=64, **f),
    ),
}


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("lengths", [(300, 300), (70, 300)])
def test_its_masks_are_those_of_the_builders(name: str, lengths: tuple[int, int]):
    policy, build = BUILT[name]
    expected = build(q_len=lengths[0], kv_len=lengths[1], block=64)
    assert torch.equal(policy.mask(*lengths).to_dense(), expected.to_dense())
    assert policy.mask(*lengths) is policy.mask(*lengths)
    q, k, _ = qkv(*lengths)
    assert policy.mask_for(q, k) is policy.mask(*lengths)


def test_equal_policies_share_masks_and_others_do_not():
    a = sk.MaskPolicy(window=70, sinks=3)
    assert a.mask(200) is sk.MaskPolicy(window=70, sinks=3).mask(200)
    assert a.mask(200) is not sk.MaskPolicy(window=70, sinks=4).mask(200)
    assert a.mask(200) is not a.mask(201)


def test_the_masks_that_were_used_last_are_kept():
    policy = sk.MaskPolicy(window=5)
    first, second = policy.mask(3000), policy.mask(3001)
    for length in range(1, kept_masks.LIMIT):
        policy.mask(length)
        assert policy.mask(3000) is first
    assert policy.mask(3001) is not second
    gc.collect()
    assert len(kept_masks._MASKS) <= kept_masks.LIMIT


def test_a_mask_made_in_inference_mode_serves_training():
    with torch.inference_mode():
        mask = sk.MaskPolicy(window=77).mask(130)
        packed = sk.MaskPolicy(window=77).packed(torch.tensor([0, 60, 130]))
        chosen = sk.MaskPolicy(topk=1, block=64).mask_for(*qkv(130)[:2])
    for each in (mask, packed, chosen):
        q, k, v = (x.requires_grad_() for x in qkv(130))
        sk.attention(q, k, v, each).sum().backward()
        assert q.grad is not None


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": sk.MaskPolicy(window=32)}], ids=str)
def test_a_fake_call_takes_no_mask_of_a_real_one(options: dict[str, Any]):
    q = torch.randn(1, 2, 72, 16)
    out = sk.attention(q, q, q, **options)
    with FakeTensorMode():
        fake = torch.randn(1, 2, 72, 16)
        found = sk.attention(fake, fake, fake, **options)
    assert isinstance(found, FakeTensor)
    assert found.shape == out.shape
    assert torch.equal(sk.attention(q, q, q, **options), out)


def test_a_mask_made_where_torch_func_transforms_serves_everyone():
    q, k, v = qkv(130)

    def loss(q: Tensor, policy: sk.MaskPolicy) -> Tensor:
        return sk.attention(q, k, v, policy.mask_for(q, k)).square().sum()

    for policy in (sk.MaskPolicy(window=79, sinks=3), sk.MaskPolicy(topk=1, block=64)):
        within = torch.func.grad(loss)(q, policy)
        leaf = q.clone().requires_grad_()
        loss(leaf, policy).backward()
        torch.testing.assert_close(within, leaf.grad)


def test_a_mask_of_fake_tensors_is_not_kept():
    policy = sk.MaskPolicy(window=81)
    with FakeTensorMode():
        assert isinstance(policy.mask(90).full.starts, FakeTensor)
    assert policy.mask(90).to_dense().sum() == 81 * 90 - 81 * 80 // 2


def test_the_scores_of_blocks_are_products_of_means():
    q, k, _ = qkv(150, 200, heads=(4, 2), dtype=torch.bfloat16)
    found = block_scores(q, k, (64, 128))
    assert found.shape == (2, 2, 3, 2)
    assert found.dtype == torch.float32
    tile = q[1, 2:4, 128:].float().mean((0, 1))
    torch.testing.assert_close(found[1, 1, 2, 0], tile @ k[1, 1, :128].float().mean(0))


def test_top_k_keeps_the_blocks_that_score_best_and_always_its_own():
    policy = sk.MaskPolicy(topk=3, sinks=1, block=64)
    q, k, v = qkv(640, heads=(2, 1), batch=1)
    wanted = 4  # the block whose keys all later queries look for
    k[:, :, wanted * 64 : wanted * 64 + 64] = q.mean((1, 2), keepdim=True) * 1e3
    q = q + q.mean((1, 2), keepdim=True) * 1e3
    mask = policy.mask_for(q, k)
    assert mask.heads == 1
    blocks = mask.to_dense()[0, 0].view(10, 64, 10, 64).any(3).any(1)
    assert torch.equal(blocks.sum(1), torch.arange(1, 11).clamp(max=3))
    assert blocks.diagonal().all()
    assert blocks[:, 0].all()
    assert blocks[5:, wanted].all()
    assert torch.equal(mask.to_dense(), mask.to_dense() & MASK.causal(640, block=64).to_dense())
    assert sk.attention(q, k, v, mask).isfinite().all()


def test_top_k_over_all_blocks_is_the_causal_mask():
    q, k, _ = qkv(300)
    mask = sk.MaskPolicy(topk=9, block=64).mask_for(q, k)
    assert torch.equal(mask.to_dense(), MASK.causal(300, block=64).to_dense().expand(2, 2, -1, -1))


REFUSED = {
    "window is 0": {"window": 0},
    "window is True": {"window": True},
    "topk is 0": {"topk": 0},
    "sinks is -1": {"window": 5, "sinks": -1},
    "sinks without a window": {"sinks": 5},
    "stride goes with a window": {"stride": 128},
    "neither with sinks": {"stride": 128, "window": 1, "sinks": 4},
    "stride is 100; it must be a multiple": {"stride": 100, "window": 1},
    "block is 32": {"block": 32},
    "causal is 1": {"causal": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_do_not_fit_are_refused(message: str):
    refused(message, sk.MaskPolicy, **REFUSED[message])


def test_top_k_has_no_mask_for_lengths():
    policy = sk.MaskPolicy(topk=3)
    refused(r"no mask for lengths alone; mask_for\(q, k\)", policy.mask, 100)
    refused("attention_varlen takes the policy", policy.packed, torch.tensor([0, 5]))


def test_lists_from_json_make_the_same_policy():
    assert sk.MaskPolicy(block=[64, 128]) == sk.MaskPolicy(block=(64, 128))  # type: ignore[arg-type]
    assert sk.MaskPolicy(block=64) == sk.MaskPolicy(block=(64, 64))


@pytest.mark.gpu
def test_on_a_gpu_kept_masks_wait_for_nothing(no_sync):
    policy, chosen = sk.MaskPolicy(window=70, sinks=3), sk.MaskPolicy(topk=2)
    q, k, _ = qkv(512, device="cuda", dtype=torch.bfloat16)
    for each in (policy, chosen):
        each.mask_for(q, k)
    side = torch.cuda.Stream()
    with no_sync(), torch.cuda.stream(side):
        mask, best = policy.mask_for(q, k), chosen.mask_for(q, k)
    torch.cuda.synchronize()
    assert mask is policy.mask(512, device="cuda")
    assert best.density < mask.density or best.stored_blocks


@pytest.mark.parametrize(
    "policy", [sk.MaskPolicy(topk=1), sk.MaskPolicy(topk=2, window=30, sinks=1, block=64)]
)
@pytest.mark.parametrize("length", [0, 1, 150])
def test_a_batch_without_items_has_a_mask_and_a_gradient(policy: sk.MaskPolicy, length: int):
    layer = sk.nn.SparseAttention(32, 2, policy, kv_heads=1)
    x = torch.randn(0, length, 32, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, length, 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("q", "k"), [((1, 0, 8, 4), (1, 1, 8, 4)), ((1, 3, 8, 4), (1, 2, 8, 4)), ((1, 2, 8, 4), (1, 0, 8, 4)),
                 ((1, 2, 8, 4), (1, 2, 8, 3)), ((2, 2, 8, 4), (1, 2, 8, 4))]
)  # fmt: skip
def test_heads_that_do_not_fit_have_no_scores(q: tuple[int, ...], k: tuple[int, ...]):
    with pytest.raises(InvalidInput, match=r"must have as many|positive multiple|must agree"):
        sk.MaskPolicy(topk=1).mask_for(torch.randn(q), torch.randn(k))
    if q[0] == k[0] == 1 and q[3] == k[3]:
        some, keys = (torch.randn(shape)[0].transpose(0, 1) for shape in (q, k))
        with pytest.raises(InvalidInput, match=r"heads|a top-k policy takes q"):
            sk.attention_varlen(some, keys, keys, torch.tensor([0, 8]), mask=sk.MaskPolicy(topk=1))
