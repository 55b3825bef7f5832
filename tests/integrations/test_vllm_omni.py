"""The plugin of vllm-omni, called as vllm-omni does, with objects that have the attributes of its own."""

from __future__ import annotations

import json
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.policies import Policy
from sparsek.integrations import vllm_omni
from sparsek.integrations.vllm_omni import OmniBackend, OmniImpl, register, sparse_attention
from tests.integrations.dense import dense, randn, same, same_gradients
from tests.refusals import refused

VARIABLE = "SPARSEK_VLLM_OMNI"
MEANS = {"policy": "MeanTopK", "options": {"topk": 2, "block": 64}}
POLICY = sk.policies.MeanTopK(topk=2, block=64, causal=False)
LENGTH = 4 * 64 + 10


def operands(length: int = LENGTH, kv_length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    kv = kv_length or length
    return randn(2, length, 4, 16), randn(2, kv, 2, 16, seed=1), randn(2, kv, 2, 16, seed=2)


def right(q: Tensor, k: Tensor, v: Tensor, policy: Policy | None, scale: float = 0.3) -> Tensor:
    """Dense attention of tensors [B, S, H, D] with the mask of a policy."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = policy.mask(q, k).to_dense() if policy else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return dense(q, k, v, seen, scale)[0].transpose(1, 2)


def test_the_callable() -> None:
    given = operands()
    same(sparse_attention(*given, MEANS, False, 0.3), right(*given, POLICY))
    same(sparse_attention(*given, {"policy": POLICY, "unknown": object()}, False, 0.3), right(*given, POLICY))


@pytest.mark.parametrize(
    ("params", "policy"),
    [
        ({"skip_first_steps": 3, "denoising_step": 2}, None),
        ({"skip_first_steps": 3, "step_idx": 3}, POLICY),
        ({"skip_first_steps": 1}, None),
        ({"skip_layers": [0, 5], "layer_idx": 5}, None),
        ({"skip_layers": [0], "layer_idx": 5}, POLICY),
        ({"min_tokens": LENGTH + 1}, None),
        ({"min_tokens": LENGTH}, POLICY),
    ],
)
def test_calls_that_stay_dense_and_those_that_do_not(params: dict[str, Any], policy: Any) -> None:
    given = operands()
    same(sparse_attention(*given, {**MEANS, **params}, False, 0.3), right(*given, policy))


SAID_WRONG: list[tuple[dict[str, Any], str]] = [
    ({**MEANS, "tile": (4, 4, 4), "latent_grid": 5}, "latent_grid is 5; it must be a list of ints"),
    ({**MEANS, "tile": (4, 4, 4), "latent_grid": (1, "a", 3)}, "latent_grid"),
    ({**MEANS, "layer_idx": [3]}, "layer_idx"),
    ({**MEANS, "denoising_step": "first"}, "the denoising step"),
    ({**MEANS, "gate_compress": [1.0]}, "gate_compress must be a dense"),
    ({**MEANS, "gate_compress": torch.ones(1, LENGTH - 1, 1, 1)}, "gate is .* it must be"),
    ({**MEANS, "gate_compress": torch.ones(1, 1, 1, 1, dtype=torch.int32)}, "gate is torch.int32"),
]


@pytest.mark.parametrize(("params", "message"), SAID_WRONG)
def test_dense_calls_refuse_what_sparse_ones_do(params: dict[str, Any], message: str) -> None:
    given = operands()
    for other in ({"min_tokens": LENGTH + 1}, {"skip_first_steps": 1}):
        refused(message, sparse_attention, *given, {**params, **other}, False, None)
    refused(message, sparse_attention, *given, params, True, None)


@pytest.mark.parametrize(
    "scale", ["0.3", float("nan"), float("inf"), -0.3, 0.0, 10**400, torch.ones(2), [0.3]]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_scales_are_checked_before_a_call_is_dense(scale: Any, is_causal: bool) -> None:
    for params in (MEANS, {**MEANS, "min_tokens": LENGTH + 1}):
        refused("softmax_scale", sparse_attention, *operands(), params, is_causal, scale)


def test_cross_attention_is_dense() -> None:
    given = operands(LENGTH, 77)
    same(sparse_attention(*given, MEANS, False, 0.3), right(*given, None))


def cubes(grid: tuple[int, ...], tile: tuple[int, ...]) -> list[list[int]]:
    """The tokens of each cube, cube by cube."""
    counts = [-(-side // part) for side, part in zip(grid, tile, strict=True)]
    found: list[list[int]] = [[] for _ in range(counts[0] * counts[1] * counts[2])]
    for token in range(grid[0] * grid[1] * grid[2]):
        place = token // (grid[1] * grid[2]), token // grid[2] % grid[1], token % grid[2]
        t, h, w = (at // part for at, part in zip(place, tile, strict=True))
        found[(t * counts[1] + h) * counts[2] + w].append(token)
    return found


@pytest.mark.parametrize("gated", [False, True])
def test_a_policy_sees_cubes_of_the_video(gated: bool) -> None:
    grid, tile, policy = (5, 9, 6), (4, 4, 4), sk.policies.VSA(topk=3, block=64)
    q, k, v = operands(5 * 9 * 6)
    params: dict[str, Any] = {"policy": policy, "tile": tile, "vsa_dit_seq_shape": grid}
    if gated:
        params["gate_compress"] = randn(*q.shape, seed=5)
    found = sparse_attention(q, k, v, params, False, 0.3)
    parts = cubes(grid, tile)
    means_q, means_k, means_v = (
        torch.stack([x[:, part].mean(1) for part in parts], 2)
        for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    )
    scores = means_q @ means_k.mT * 0.3
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, scores.topk(3).indices, True)
    cube = torch.empty(5 * 9 * 6, dtype=torch.long)
    for at, part in enumerate(parts):
        cube[part] = at
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    wanted = dense(q, k, v, best[:, :, cube][:, :, :, cube], 0.3)[0]
    if gated:
        wanted = wanted + params["gate_compress"].transpose(1, 2) * (scores.softmax(-1) @ means_v)[:, :, cube]
    same(found, wanted.transpose(1, 2))


@pytest.mark.parametrize(
    "change", [{"v": 269}, {"v": 271}, {"k": 269, "v": 271}, {"gate_compress": 269}, {"gate_compress": 271}]
)
@pytest.mark.parametrize("tile", [(4, 4, 4), None])
def test_lengths_that_do_not_fit(change: dict[str, int], tile: Any) -> None:
    lengths = {"q": 270, "k": 270, "v": 270, "gate_compress": 270, **change}
    q, k, v, gate = (randn(1, n, 2, 16) for n in lengths.values())
    params = {"policy": sk.policies.VSA(topk=3, block=64), "latent_grid": (5, 9, 6), "gate_compress": gate}
    with pytest.raises(sk.InvalidInput, match=r"every key needs one value|it must have as many|gate is"):
        sparse_attention(q, k, v, {**params, "tile": tile}, False, None)


def test_gradients_of_cubes_that_are_not_whole() -> None:
    grid, policy = (5, 9, 6), sk.policies.VSA(topk=100, block=64)
    q, k, v, gate = (randn(1, 270, 2, 16, seed=at).requires_grad_() for at in range(4))
    params: dict[str, Any] = {
        "policy": policy,
        "tile": (4, 4, 4),
        "latent_grid": grid,
        "gate_compress": gate * 0,
    }
    found = sparse_attention(q, k, v, params, False, 0.3)
    wanted = right(q, k, v, None)
    same(found, wanted)
    same_gradients(found, wanted, (q, k, v))
    one = sparse_attention(q, k, v, {**params, "gate_compress": randn(1, 1, 2, 1)}, False, 0.3)
    assert one.shape == wanted.shape


def metadata(**fields: Any) -> SimpleNamespace:
    """An AttentionMetadata of vllm-omni 0.30."""
    return SimpleNamespace(
        **{"attn_mask": None, "extra": {}, "packed_padding": None, "video_layout": None, **fields}
    )


def layer(monkeypatch: pytest.MonkeyPatch, **options: Any) -> OmniImpl:
    monkeypatch.setenv(VARIABLE, json.dumps({**MEANS, **options}))
    OmniBackend.validate_available()
    return OmniBackend.get_impl_cls()(
        num_heads=4, head_size=16, softmax_scale=0.3, causal=False, num_kv_heads=2, prefix="blocks.3.attn1",
        qkv_layout=None, backend_kwargs={"topk": 64}, role="self", backend_explicit=True,
    )  # fmt: skip


def test_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    given, attend = operands(), layer(monkeypatch)
    same(attend.forward(*given), right(*given, POLICY))
    same(attend.forward_cuda(*given, metadata()), right(*given, POLICY))
    same(layer(monkeypatch, skip_layers=[3]).forward(*given, metadata()), right(*given, None))
    mask = torch.rand(2, LENGTH) < 0.7
    q, k, v = (x.transpose(1, 2) for x in given)
    same(
        attend.forward(*given, metadata(attn_mask=mask)),
        dense(q, k, v, mask[:, None, None], 0.3)[0].transpose(1, 2),
    )


def test_calls_with_a_mask_check_it_and_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), attend = operands(), layer(monkeypatch)
    batch, length = q.shape[:2]
    for mask in ([True], torch.ones(batch, length + 1), torch.ones(batch, 1, 1, length).long()):
        refused("attn_mask", attend.forward, q, k, v, metadata(attn_mask=mask))
    seen = torch.ones(batch, length)
    refused(r"q is .* and v torch.float16", attend.forward, q, k, v.half(), metadata(attn_mask=seen))
    attend.softmax_scale = float("nan")
    refused("softmax_scale", attend.forward, q, k, v, metadata(attn_mask=seen))
    attend.softmax_scale, attend.causal = 0.3, True
    refused("a causal layer takes no attn_mask", attend.forward, q, k, v, metadata(attn_mask=seen))


@pytest.mark.parametrize("kind", ["packed", "prefix"])
def test_padding_behind_the_tokens_is_cut_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, length = operands(), 200
    packed = SimpleNamespace(q_length=length, kv_length=length)
    told = (
        metadata(packed_padding=packed) if kind == "packed" else metadata(extra={"valid_kv_length": length})
    )
    out = layer(monkeypatch).forward(*given, told)
    q, k, v = (x[:, :length] for x in given)
    same(out[:, :length], right(q, k, v, POLICY))
    assert not out[:, length:].any()


def test_the_step_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(denoise_step_idx=1)
    module = ModuleType("vllm_omni.diffusion.forward_context")
    module.__dict__.update(is_forward_context_available=lambda: True, get_forward_context=lambda: context)
    for name in ("vllm_omni", "vllm_omni.diffusion"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    given, attend = operands(), layer(monkeypatch, skip_first_steps=2)
    same(attend.forward(*given, metadata()), right(*given, None))
    context.denoise_step_idx = 2
    same(attend.forward(*given, metadata()), right(*given, POLICY))


def test_register_replaces_the_named_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[Any, str] = {}
    registry = ModuleType("vllm_omni.diffusion.attention.backends.registry")
    members = Enum("DiffusionAttentionBackendEnum", "FLASH_ATTN FASTVIDEO_VSA")
    registry.__dict__.update(
        DiffusionAttentionBackendEnum=members, register_diffusion_backend=made.__setitem__
    )
    parents = "vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.attention"
    for name in (*parents, "vllm_omni.diffusion.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    assert made == {}
    monkeypatch.setenv(VARIABLE, '{"replaces": "FASTVIDEO_VSA"}')
    register()
    (member, path), *_ = made.items()
    monkeypatch.setenv(VARIABLE, '{"replaces": "FASTVIDEO_VSB"}')
    refused("replaces is 'FASTVIDEO_VSB'; use one of FLASH_ATTN, FASTVIDEO_VSA", register)
    monkeypatch.setenv(VARIABLE, '{"replaces": "FLASH_ATTN"}')
    del registry.__dict__["register_diffusion_backend"]
    refused(r"replaces FLASH_ATTN, but .* vllm-omni 0\.30", register)
    assert member is members["FASTVIDEO_VSA"]
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is OmniBackend


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    wrong: list[tuple[Any, str]] = [
        (None, "params is"),
        ({"policy": "Best"}, "policy is"),
        (
            {"policy": "Quest"},
            "use one of MeanTopK, Nabla, Radial, SlidingTile, Streaming, SubBlock, VSA, XAttention$",
        ),
        ({"policy": "MeanTopK", "options": {"tops": 3}}, "options of MeanTopK"),
        ({"policy": "MeanTopK", "options": {"causal": True}}, "sees every token, .* give it causal=False"),
        ({"policy": sk.policies.XAttention()}, r"policy XAttention\(\) is causal; give it causal=False"),
        (
            {"policy": "FlexPrefill"},
            r"no other form: use another policy, for instance XAttention\(causal=False\)",
        ),
        ({**MEANS, "tile": (4, 4, 5)}, "tile is"),
        ({**MEANS, "tile": 64}, "tile is 64; it must be a list"),
        ({**MEANS, "skip_layers": ["a"]}, "skip_layers"),
        ({**MEANS, "skip_layers": 3}, "skip_layers is 3; it must be a list"),
        ({**MEANS, "tile": (4, 4, 4), "latent_grid": (1, 2, 3)}, "latent_grid is"),
        *SAID_WRONG,
    ]
    for params, message in wrong:
        refused(message, sparse_attention, *given, params, False, None)
    for text in ("[]", "{", "[" * 100_000, '{"policy": ' + "[" * 100_000, '{"polcy": "VSA"}'):
        monkeypatch.setenv(VARIABLE, text)
        refused(VARIABLE, vllm_omni.configured)
