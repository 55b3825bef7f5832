"""A policy in tiny models of diffusers' own classes, beside dense attention with the same mask."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import sparsek as sk
from tests.house.tools import need
from tests.integrations.test_diffusers_forms import Given, hunyuan_video
from tests.refusals import refused
from tests.sampling import sampled

need("diffusers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, WanTransformer3DModel

from sparsek.integrations import diffusers
from sparsek.integrations.diffusers_layers import joint_attention

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
POLICY = sk.policies.MeanTopK(topk=2, block=64, causal=False)
TEXT = 7


def wan(layers: int = 3) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=layers, rope_max_seq_len=32,
    )  # fmt: skip
    given = {
        "hidden_states": torch.randn(2, 4, 3, 20, 22),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, TEXT, 16),
    }
    return model.eval(), given


def run(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**given).sample


def test_first_steps_are_dense_by_calls_and_by_the_scheduler() -> None:
    model, given = wan()
    dense = run(model, given)
    with diffusers.use(model, POLICY, skip_first_steps=2) as sparse:
        found = [torch.equal(run(model, given), dense) for _ in range(3)]
        assert found == [True, True, False]
        sparse.reset()
        assert torch.equal(run(model, given), dense)
    pipe = SimpleNamespace(transformer=model, transformer_2=None, scheduler=SimpleNamespace(step_index=None))
    with diffusers.use(pipe, POLICY, skip_first_steps=2):
        for step, is_dense in ((None, True), (1, True), (1, True), (2, False)):
            pipe.scheduler.step_index = step
            assert torch.equal(run(model, given), dense) is is_dense
    assert torch.equal(run(model, given), dense)


def test_few_tokens_stay_dense() -> None:
    model, given = wan()
    dense = run(model, given)
    tokens = 3 * 10 * 11
    with diffusers.use(model, POLICY, min_tokens=tokens + 1):
        assert torch.equal(run(model, given), dense)
    with diffusers.use(model, POLICY, min_tokens=tokens):
        assert not torch.equal(run(model, given), dense)


def test_any_mask_rule_and_a_mask() -> None:
    model, given = wan()
    full = sk.BlockMask.full(3 * 10 * 11)
    with diffusers.use(model, full):
        torch.testing.assert_close(
            run(model, given), (dense := run_without(model, given)), rtol=1e-4, atol=1e-5
        )
    with diffusers.use(model, sk.MaskPolicy(window=40, causal=False)):
        assert not torch.allclose(run(model, given), dense, atol=1e-4)


def run_without(model: Any, given: dict[str, Any]) -> Tensor:
    """The result of a copy of the model that has the processors of its class."""
    fresh = type(model).from_config(model.config)
    fresh.load_state_dict(model.state_dict())
    return run(fresh.eval(), given)


@pytest.mark.parametrize("skipped", [(), (0,), (0, 1), (0, 1, 2)])
def test_layers_that_are_skipped_stay_dense(skipped: tuple[int, ...]) -> None:
    model, given = wan()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, out: seen.append(out))
    run(model, given)
    with diffusers.use(model, POLICY, skip_layers=skipped):
        run(model, given)
    like_dense = [torch.allclose(seen[at], seen[3 + at], rtol=0, atol=1e-4) for at in range(3)]
    assert like_dense == [at < len(skipped) for at in range(3)]


def test_which_layers_are_sparse() -> None:
    for model, right in (
        (wan()[0], [f"blocks.{at}.attn1" for at in range(3)]),
        (hunyuan_video(Given()).model, ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]),
    ):
        with diffusers.use(model, POLICY) as sparse:
            assert sparse.layers == right
        with diffusers.use(model, POLICY, skip_layers=0) as sparse:
            assert sparse.layers == right[1:]


def compiled(model: Any) -> tuple[Any, CompileCounter]:
    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(model, backend=counter, fullgraph=True), counter


POLICIES = (
    (sk.policies.VSA(topk=2), {}),
    (sk.MaskPolicy(window=40, causal=False), {"skip_layers": 1}),
    (sk.BlockMask.full(3 * 10 * 11), {}),
    (POLICY, {"min_tokens": 10**6}),
)


@pytest.mark.parametrize(("policy", "options"), sampled(POLICIES, 2))
def test_any_policy_compiles(policy: Any, options: dict[str, Any]) -> None:
    model, given = wan(2 if "skip_layers" in options else 1)
    fast, counter = compiled(model)
    with diffusers.use(model, policy, **options):
        torch.testing.assert_close(run(fast, given), run(model, given))
    assert counter.frame_count == 1


@pytest.mark.parametrize("blocks", sampled([False, True], 1))
def test_steps_compile_once_dense_and_once_sparse(blocks: bool) -> None:
    model, given = wan(2 if blocks else 1)
    dense, (fast, counter) = run(model, given), compiled(model)
    with diffusers.use(model, POLICY, skip_first_steps=3) as sparse:
        eager = [run(model, given) for _ in range(6)]
        sparse.reset()
        if blocks:
            model.compile_repeated_blocks(backend=counter, fullgraph=True)
            fast = model
        for at, right in enumerate(eager):
            assert torch.equal(right, dense) is (at < 3)
            torch.testing.assert_close(run(fast, given), right)
    assert counter.frame_count == 2


def test_a_model_compiled_before_use_is_its_own_again_after_undo() -> None:
    model, given = wan(1)
    fast, counter = compiled(model)
    dense = run(fast, given)
    sparse = diffusers.use(fast, POLICY)
    assert sparse.layers == ["blocks.0.attn1"]
    torch.testing.assert_close(run(fast, given), run(model, given))
    assert not torch.allclose(run(fast, given), dense, atol=1e-4)
    sparse.undo()
    assert torch.equal(run(fast, given), dense)
    assert counter.frame_count == 2


def test_a_compiled_model_follows_the_scheduler(tmp_path: Path) -> None:
    model, given = wan(1)
    dense, (fast, counter) = run(model, given), compiled(model)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    pipe, found = SimpleNamespace(transformer=fast, scheduler=scheduler), []
    with (
        diffusers.use(pipe, POLICY, skip_first_steps=2),
        diffusers.use(wan()[0], POLICY, scheduler=scheduler),
    ):
        for _ in range(2):
            scheduler.set_timesteps(4)
            for time in scheduler.timesteps:
                found.append(torch.allclose(run(fast, given), dense, atol=1e-5))
                copy.deepcopy(scheduler).set_timesteps(3)
                scheduler.step(given["hidden_states"], time, given["hidden_states"])
        scheduler.save_pretrained(tmp_path)
    assert found == [True, True, False, False] * 2
    assert counter.frame_count == 2
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler
    assert type(FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path)) is type(scheduler)


def test_a_model_with_a_policy_is_saved_and_copied(tmp_path: Path) -> None:
    model, given = wan()
    with diffusers.use(model, POLICY):
        model.save_pretrained(tmp_path)
        assert torch.equal(run(copy.deepcopy(model), given), run(model, given))
    assert "WanTransformer3DModel" in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_copies_of_a_model_and_a_scheduler_with_a_policy_are_whole(copied: Any) -> None:
    (model, given), scheduler = wan(1), cast(Any, FlowMatchEulerDiscreteScheduler())
    scheduler.set_timesteps(4)
    dense = run(model, given)
    with diffusers.use(model, POLICY, skip_first_steps=2, scheduler=scheduler):
        scheduler.step(given["hidden_states"], scheduler.timesteps[0], given["hidden_states"])
        alone = copied(scheduler)
        other, steps = copied([model, scheduler])
        assert type(alone) is FlowMatchEulerDiscreteScheduler
        assert vars(alone).keys() == vars(scheduler).keys()
        for time, skipped in zip(scheduler.timesteps[1:], (True, False, False), strict=True):
            assert torch.allclose(run(other, given), dense, atol=1e-5) is skipped
            steps.step(given["hidden_states"], time, given["hidden_states"])
        assert torch.equal(run(model, given), dense)  # its own scheduler is where it was
        (around,) = {hook.__self__ for hook in other._forward_pre_hooks.values()}
        around.sparse.undo()
        assert torch.equal(run(other, given), dense)
        assert type(steps) is type(alone)
    assert type(scheduler) is type(alone)
    assert b"sparsek" not in pickle.dumps([model, other, scheduler, steps])


def test_copies_count_on_from_the_calls_before() -> None:
    model, given = wan(1)
    dense = run(model, given)
    with diffusers.use(model, POLICY, skip_first_steps=1000):  # a chain that would be too deep to pickle
        run(model, given)
        (hook,) = pickle.loads(pickle.dumps(model))._forward_pre_hooks.values()  # noqa: S301
        sparse = hook.__self__.sparse
        assert sparse.step == 0
        sparse.count()
        assert sparse.step == 1
        sparse.reset()
        sparse.count()
        assert sparse.step == 0
    assert torch.equal(run(model, given), dense)


def test_what_is_refused() -> None:
    model, _ = wan()
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, "nabla", {}, "policy is"),
        (torch.nn.Linear(1, 1), POLICY, {}, "a transformer of diffusers"),
        (model, POLICY, {"skip_layers": (3,)}, "skip_layers"),
        (model, POLICY, {"skip_layers": None}, "skip_layers"),
        (model, POLICY, {"skip_first_steps": -1}, "skip_first_steps"),
        (model, POLICY, {"text": "middle"}, "text is"),
        (model, sk.policies.XAttention(), {}, r"XAttention\(\) is causal; give it causal=False"),
        (model, sk.MaskPolicy(window=40), {}, r"MaskPolicy\(window=40\) is causal; give it causal=False"),
        (model, sk.MaskPolicy(), {}, r"MaskPolicy\(\) is causal"),
        (model, sk.policies.VerticalSlash(), {}, r"no other form: .* XAttention\(causal=False\)"),
    ]
    for each, policy, options, message in wrong:
        refused(message, diffusers.use, each, policy, **options)
    with diffusers.use(model, POLICY), pytest.raises(sk.InvalidInput, match="already has a policy"):
        diffusers.use(model, POLICY)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True])
def test_text_with_gaps_on_a_gpu_without_a_sync(first: bool, no_sync: Any) -> None:
    video, text = 320, 40
    q, k, v = torch.randn(3, 2, 4, video + text, 64, device="cuda").bfloat16().unbind()
    there = torch.rand(2, text, device="cuda") < 0.5
    at = slice(text, None) if first else slice(video)
    seen = torch.ones(2, 1, 1, video + text, dtype=torch.bool, device="cuda")
    (seen[..., :text] if first else seen[..., video:]).copy_(there[:, None, None])
    policy = sk.policies.MeanTopK(topk=2, block=64, causal=False)
    for number in range(4):
        with no_sync() if number == 3 else nullcontext():  # the first calls load kernels
            found = joint_attention(q, k, v, policy, text, first, there, None)
    chosen = policy.mask(q[:, :, at], k[:, :, at]).to_dense().to("cuda")
    pairs = seen.expand(2, 4, video + text, -1).clone()
    pairs[:, :, at, at] &= chosen
    right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), pairs)
    torch.testing.assert_close(found.float(), right, rtol=0, atol=0.02)


def flux() -> Any:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


@pytest.mark.parametrize("make", [lambda: wan(1)[0], flux], ids=["wan", "flux"])
def test_sparse_layers_are_loaded_by_sparsek_only(make: Callable[[], Any], tmp_path: Path) -> None:
    """Whoever saves them: diffusers' own loader would draw what it misses at random."""
    torch.manual_seed(0)
    model = make()
    sk.sparsify_(model, sk.BlockSparse(block=16, keep=0.5))
    right, kind = model.state_dict(), type(model)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    sk.save_model(model, tmp_path / "own")
    assert "quantization_config" not in model.config
    assert "sk.load_model" in (tmp_path / "shards" / "README.md").read_text()
    for folder in (tmp_path / "whole", tmp_path / "shards", tmp_path / "own"):
        back = sk.load_model(make, folder).state_dict()
        assert back.keys() == right.keys()
        assert all(torch.equal(part, back[name]) for name, part in right.items())
    model.save_config(tmp_path / "own")
    (tmp_path / "own" / "model.safetensors").rename(tmp_path / "own" / "diffusion_pytorch_model.safetensors")
    for folder in ("whole", "shards", "own"):
        with pytest.raises(ValueError, match=r"sparsek|\.weight expected shape"):
            kind.from_pretrained(tmp_path / folder)
    refused("safetensors", model.save_pretrained, tmp_path / "pickled", safe_serialization=False)
