"""Every attention processor of diffusers that can take a policy, in tiny models of the real classes.

In text-to-image, text-to-video and image-to-video forms (`Given.frames`, `Given.image`), with and without padded text.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from tests.house.tools import need
from tests.refusals import refused
from tests.sampling import half, sampled

need("diffusers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers as real
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from sparsek.integrations import diffusers
from sparsek.integrations.diffusers_layers import FORMS

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
TEXT = 9


class Given(NamedTuple):
    """A form of call: frames of the video, whether text is padded, whether an image is given beside the text."""

    frames: int = 3
    padded: bool = False
    image: bool = False

    @property
    def there(self) -> Tensor:
        """int64 [2, TEXT]: padding at the end of one text, and in one place inside the other."""
        there = torch.ones(2, TEXT, dtype=torch.int64)
        if self.padded:
            there[0, 3:] = 0
            there[1, 4] = 0
        return there


class Case(NamedTuple):
    """A model, its arguments, the tokens of its video, and the text that its layers join to it: `text` at one end."""

    model: Any
    given: dict[str, Any]
    video: int
    text: int = 0
    first: bool = False


@functools.cache
def made(kind: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """A model with random weights, none of them 0: gates of new models are."""
    torch.manual_seed(0)
    model = getattr(real, kind)(num_attention_heads=2, **dict(options)).eval()
    for each in model.parameters():
        if not each.any():
            torch.nn.init.normal_(each, std=0.2)
    return model.requires_grad_(False)


def model_of(kind: str, **options: Any) -> Any:
    return made(kind, tuple(options.items()))


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


STEP = torch.tensor([500.0, 500.0])


def wan(kind: str, g: Given, **more: Any) -> Case:
    long = TEXT if kind != "SkyReelsV2Transformer3DModel" else 512
    model = model_of(
        kind, patch_size=(1, 2, 2), attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32, **({"image_dim": 8, "added_kv_proj_dim": 64} if g.image else {}),
        **more,
    )  # fmt: skip
    given: dict[str, Any] = {
        "hidden_states": states(2, 4, g.frames, 16, 20),
        "timestep": STEP,
        "encoder_hidden_states": states(2, 512 if g.image else long, 16),
    }
    if g.image:
        given["encoder_hidden_states_image"] = states(2, 5, 8)
    if kind == "WanVACETransformer3DModel":
        given["control_hidden_states"] = states(2, 4, g.frames, 16, 20)
    return Case(model, given, g.frames * 80)


def wan_animate(g: Given) -> Case:
    """A frame of the reference before the video; blocks of a face adapter, which stay dense, between those."""
    model = model_of(
        "WanAnimateTransformer3DModel", patch_size=(1, 2, 2), attention_head_dim=32, in_channels=12, latent_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32, image_dim=8,
        added_kv_proj_dim=64, motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=16,
        face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2,
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 12, g.frames + 1, 16, 20),
        "timestep": STEP,
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_hidden_states_image": states(2, 5, 8),
        "pose_hidden_states": states(2, 4, g.frames, 16, 20),
        "face_pixel_values": states(2, 3, 4 * g.frames - 3, 16, 16),
    }
    return Case(model, given, (g.frames + 1) * 80)


def hunyuan_video(g: Given) -> Case:
    kind = "token_replace" if g.image else None
    model = model_of(
        "HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, attention_head_dim=24, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=False,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(8, 8, 8), image_condition_type=kind,
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, g.frames, 16, 20),
        "timestep": STEP,
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
        "pooled_projections": states(2, 8),
    }
    return Case(model, given, g.frames * 80, TEXT)


def framepack(g: Given) -> Case:
    """Frames before the video are among its tokens."""
    model = model_of(
        "HunyuanVideoFramepackTransformer3DModel", in_channels=4, out_channels=4, attention_head_dim=24, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=False,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(8, 8, 8), has_image_proj=True, image_proj_dim=8,
        has_clean_x_embedder=True,
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, g.frames, 16, 16),
        "timestep": STEP,
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
        "pooled_projections": states(2, 8),
        "image_embeds": states(2, 4, 8),
        "indices_latents": torch.arange(1, g.frames + 1),
        "latents_clean": states(2, 4, 1, 16, 16),
        "indices_latents_clean": torch.zeros(1, dtype=torch.int64),
        "latents_history_2x": states(2, 4, 2, 16, 16),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": states(2, 4, 4, 16, 16),
        "indices_latents_history_4x": torch.arange(4),
    }
    return Case(model, given, (g.frames + 1) * 64 + 16 + 4, TEXT + 4)


def hunyuan_video15(g: Given) -> Case:
    model = model_of(
        "HunyuanVideo15Transformer3DModel", in_channels=4, out_channels=4, attention_head_dim=24, num_layers=2,
        num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(8, 8, 8),
        task_type="i2v" if g.image else "t2v",
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, g.frames, 8, 10),
        "timestep": STEP,
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
        "encoder_hidden_states_2": states(2, 6, 8),
        "encoder_attention_mask_2": g.there[:, :6],
        "image_embeds": states(2, 4, 8) * g.image,
    }
    return Case(model, given, g.frames * 80, TEXT + 6 + 4)


def hunyuan_image(g: Given) -> Case:
    model = model_of(
        "HunyuanImageTransformer2DModel", in_channels=4, out_channels=4, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=16,
        text_embed_2_dim=8 if g.image else None, rope_axes_dim=(8, 8),
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, 12, 20),
        "timestep": STEP,
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
    }
    if g.image:
        given |= {"encoder_hidden_states_2": states(2, 6, 8), "encoder_attention_mask_2": g.there[:, :6]}
    return Case(model, given, 240, TEXT + 6 * g.image)


def flux(kind: str, g: Given, singles: int = 1) -> Case:
    """With an image: its tokens are behind those of the picture, as in Kontext."""
    tokens, axes = 240 + 60 * g.image, 4 if kind.startswith("Flux2") else 3
    options: dict[str, Any] = {
        "in_channels": 8, "num_layers": 1, "num_single_layers": singles, "attention_head_dim": 8 * axes,
        "joint_attention_dim": 16, "axes_dims_rope": (8,) * axes,
    }  # fmt: skip
    given: dict[str, Any] = {
        "hidden_states": states(2, tokens, 8),
        "encoder_hidden_states": states(2, TEXT, 16),
        "timestep": STEP / 1000,
        "img_ids": torch.arange(tokens)[:, None].expand(-1, axes).float(),
        "txt_ids": torch.zeros(TEXT, axes),
    }
    if kind.startswith(("FluxT", "Bria")):
        options["pooled_projection_dim"], given["pooled_projections"] = 8, states(2, 8)
    elif kind.startswith("Flux2"):
        options |= {"timestep_guidance_channels": 16, "guidance_embeds": False}
    elif kind.startswith("Chroma"):
        options |= {
            "approximator_num_channels": 16,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        }
    return Case(model_of(kind, **options), given, tokens, TEXT, True)


def qwen(g: Given) -> Case:
    """With an image: its tokens are behind those of the picture, as in Qwen-Image-Edit."""
    model = model_of(
        "QwenImageTransformer2DModel", in_channels=8, out_channels=4, num_layers=2, attention_head_dim=24,
        joint_attention_dim=16, axes_dims_rope=(8, 8, 8),
    )  # fmt: skip
    shapes = [(1, 12, 20), *([(1, 6, 10)] * g.image)]
    given = {
        "hidden_states": states(2, 240 + 60 * g.image, 8),
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_hidden_states_mask": g.there if g.padded else None,
        "timestep": STEP / 1000,
        "img_shapes": [shapes, shapes],
    }
    return Case(model, given, 240 + 60 * g.image, TEXT, True)


def kandinsky(g: Given) -> Case:
    torch.manual_seed(0)
    model = real.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=48, ff_dim=64, num_text_blocks=1, num_visual_blocks=2, axes_dims=(8, 8, 8), visual_cond=g.image,
    )  # fmt: skip
    for each in model.parameters():
        if not each.any():
            torch.nn.init.normal_(each, std=0.5)
    given = {
        "hidden_states": states(1, g.frames, 16, 20, 9 if g.image else 4),
        "encoder_hidden_states": states(1, TEXT, 16),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": states(1, 8),
        "visual_rope_pos": [torch.arange(g.frames), torch.arange(8), torch.arange(10)],
        "text_rope_pos": torch.arange(TEXT),
    }
    return Case(model.eval().requires_grad_(False), given, g.frames * 80)


def ltx(g: Given) -> Case:
    """With an image: a time step for each token."""
    model = model_of(
        "LTXVideoTransformer3DModel", in_channels=4, out_channels=4, attention_head_dim=32, cross_attention_dim=64,
        num_layers=2, caption_channels=16,
    )  # fmt: skip
    tokens = g.frames * 80
    given = {
        "hidden_states": states(2, tokens, 4),
        "encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
        "timestep": STEP[:, None].expand(-1, tokens) if g.image else STEP,
        "num_frames": g.frames, "height": 8, "width": 10,
    }  # fmt: skip
    return Case(model, given, tokens)


def ltx2(perturbed: bool, g: Given) -> Case:
    """Beside the video there is sound, which stays dense."""
    sides: dict[str, Any] = {
        name: size
        for kind in ("", "audio_")
        for name, size in (
            (f"{kind}in_channels", 4), (f"{kind}out_channels", 4), (f"{kind}attention_head_dim", 16),
            (f"{kind}cross_attention_dim", 32),
        )
    }  # fmt: skip
    model = model_of(
        "LTX2VideoTransformer3DModel",
        audio_num_attention_heads=2,
        num_layers=2,
        caption_channels=16,
        perturbed_attn=perturbed,
        **sides,
    )
    tokens, sound = g.frames * 80, 11
    given = {
        "hidden_states": states(2, tokens, 4),
        "audio_hidden_states": states(2, sound, 4),
        "encoder_hidden_states": states(2, TEXT, 16),
        "audio_encoder_hidden_states": states(2, TEXT, 16),
        "encoder_attention_mask": g.there,
        "audio_encoder_attention_mask": g.there,
        "timestep": STEP[:, None].expand(-1, tokens) if g.image else STEP,
        "audio_timestep": STEP,
        "num_frames": g.frames, "height": 8, "width": 10, "audio_num_frames": sound,
    }  # fmt: skip
    return Case(model, given, tokens)


def cosmos(g: Given) -> Case:
    model = model_of(
        "CosmosTransformer3DModel", in_channels=5 if g.image else 4, out_channels=4, attention_head_dim=16,
        num_layers=2, text_embed_dim=16, adaln_lora_dim=8, max_size=(4, 16, 20), extra_pos_embed_type=None,
        concat_padding_mask=False,
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, g.frames, 16, 20),
        "timestep": STEP / 1000,
        "encoder_hidden_states": states(2, TEXT, 16),
        "attention_mask": g.there.bool() if g.padded else None,
        "condition_mask": torch.ones(2, 1, g.frames, 16, 20) if g.image else None,
    }
    return Case(model, given, g.frames * 80)


def cogvideox(g: Given) -> Case:
    model = model_of(
        "CogVideoXTransformer3DModel", attention_head_dim=16, in_channels=8 if g.image else 4, out_channels=4,
        time_embed_dim=16, text_embed_dim=16, num_layers=2, sample_width=20, sample_height=16, max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    tokens = g.frames * 80
    given = {
        "hidden_states": states(2, g.frames, 8 if g.image else 4, 16, 20),
        "encoder_hidden_states": states(2, TEXT, 16),
        "timestep": STEP,
        "image_rotary_emb": (states(tokens, 16).cos(), states(tokens, 16).sin()),
    }
    return Case(model, given, tokens, TEXT, True)


def cogview3(g: Given) -> Case:
    model = model_of(
        "CogView3PlusTransformer2DModel", in_channels=4, num_layers=2, attention_head_dim=16, out_channels=4,
        text_embed_dim=16, time_embed_dim=16, condition_dim=8, pos_embed_max_size=20, sample_size=16,
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, 24, 40),
        "encoder_hidden_states": states(2, TEXT, 16),
        "timestep": STEP,
        **{name: torch.zeros(2, 2) for name in ("original_size", "target_size", "crop_coords")},
    }
    return Case(model, given, 240, TEXT, True)


def sd3(g: Given) -> Case:
    """Its first block attends a second time, to the picture alone."""
    model = model_of(
        "SD3Transformer2DModel", sample_size=32, in_channels=4, num_layers=2, attention_head_dim=16,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=8, out_channels=4,
        pos_embed_max_size=32, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    given = {
        "hidden_states": states(2, 4, 24, 40),
        "encoder_hidden_states": states(2, TEXT, 16),
        "pooled_projections": states(2, 8),
        "timestep": STEP,
    }
    return Case(model, given, 240, TEXT)


VIDEO = [Given(1), Given(), Given(padded=True), Given(image=True), Given(2, True, True)]
PICTURE = [Given(1), Given(1, padded=True), Given(1, image=True), Given(1, True, True)]
# Models without a mask of the text: padding is nothing that they know.
PLAIN_VIDEO, PLAIN_PICTURE = [Given(1), Given(), Given(image=True)], [Given(1), Given(1, image=True)]
CASES: dict[str, tuple[Any, list[Given]]] = {
    "wan": (functools.partial(wan, "WanTransformer3DModel"), PLAIN_VIDEO),
    "vace": (
        functools.partial(wan, "WanVACETransformer3DModel", vace_layers=(0,), vace_in_channels=4),
        PLAIN_VIDEO,
    ),
    "wan_animate": (wan_animate, [Given(1, image=True)]),
    "chronoedit": (functools.partial(wan, "ChronoEditTransformer3DModel"), PLAIN_VIDEO),
    "skyreels": (functools.partial(wan, "SkyReelsV2Transformer3DModel"), PLAIN_VIDEO),
    "hunyuan_video": (hunyuan_video, VIDEO),
    "framepack": (framepack, [Given(), Given(padded=True)]),
    "hunyuan_video15": (hunyuan_video15, VIDEO),
    "hunyuan_image": (hunyuan_image, PICTURE),
    "flux": (functools.partial(flux, "FluxTransformer2DModel"), PLAIN_PICTURE),
    "chroma": (functools.partial(flux, "ChromaTransformer2DModel"), PLAIN_PICTURE),
    "longcat": (functools.partial(flux, "LongCatImageTransformer2DModel"), PLAIN_PICTURE),
    "ovis": (functools.partial(flux, "OvisImageTransformer2DModel"), PLAIN_PICTURE),
    "bria": (functools.partial(flux, "BriaTransformer2DModel"), PLAIN_PICTURE),
    "flux2": (functools.partial(flux, "Flux2Transformer2DModel"), PLAIN_PICTURE),
    "qwen": (qwen, PICTURE),
    "kandinsky": (kandinsky, PLAIN_VIDEO),
    "ltx": (ltx, VIDEO),
    "ltx2": (functools.partial(ltx2, False), VIDEO),
    "ltx2_perturbed": (functools.partial(ltx2, True), VIDEO[1:3]),
    "cosmos": (cosmos, VIDEO),
    "cogvideox": (cogvideox, PLAIN_VIDEO),
    "cogview3": (cogview3, PLAIN_PICTURE[:1]),
    "sd3": (sd3, PLAIN_PICTURE[:1]),
}
FORMS_OF_CALLS = [(name, given) for name, (_, each) in CASES.items() for given in each]


def run(case: Case) -> Tensor:
    with torch.no_grad():
        return case.model(**case.given, return_dict=False)[0]


def known_of(model: Any) -> set[str]:
    found = {type(each.processor) for each in model.modules() if hasattr(each, "set_processor")}
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in found} & {*FORMS}


def test_every_processor_has_a_case() -> None:
    found = set().union(*(known_of(make(gs[0]).model) for make, gs in CASES.values()))
    assert found == {*FORMS}


@pytest.mark.parametrize(("name", "given"), half(FORMS_OF_CALLS))
def test_a_policy_that_keeps_all_blocks_changes_nothing(name: str, given: Given) -> None:
    """The mask has the tokens of the video, so another number of them is an error."""
    case = CASES[name][0](given)
    right = run(case)
    assert right.isfinite().all()
    with diffusers.use(case.model, sk.BlockMask.full(case.video)) as sparse:
        found = run(case)
        assert sparse.layers
        assert not any("mask" in why for why in sparse.dense.values()), sparse.dense
        assert not {*sparse.layers} & {*sparse.dense}
    torch.testing.assert_close(found, right, rtol=1e-4, atol=2e-5 * float(right.abs().max()))
    assert torch.equal(run(case), right)


POLICY = sk.policies.MeanTopK(topk=1, block=64, causal=False)


@pytest.mark.parametrize("name", CASES)
def test_a_policy_chooses_among_the_video_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dense attention with the policy's mask for the video, in which all see the text and the text sees all."""
    make, forms = CASES[name]
    case = make(forms[-1])
    dense = run(case)
    with diffusers.use(case.model, POLICY) as sparse:
        found, layers = run(case), len(sparse.layers)
        modules = {
            type(case.model.get_submodule(each).processor).__mro__[2].__module__ for each in sparse.layers
        }
    assert not torch.allclose(found, dense, rtol=0, atol=1e-4 * float(dense.abs().max()))
    log = []
    plain = functional.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        joint = q.shape[2] - case.video
        if q.shape[2] == k.shape[2] and joint in (0, case.text):
            log.append(joint)
            at = slice(joint, None) if case.first else slice(case.video)
            seen = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
            seen[:, :, at, at] = POLICY.mask_for(q[:, :, at], k[:, :, at]).to_dense()
            attn_mask = seen if attn_mask is None else seen & attn_mask
        return plain(q, k, v, attn_mask)

    def dispatch(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(q, k, v, attn_mask).transpose(1, 2)

    for each in modules:
        if hasattr(sys.modules[each], "dispatch_attention_fn"):
            monkeypatch.setattr(sys.modules[each], "dispatch_attention_fn", dispatch)
        else:
            monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    right = run(case)
    monkeypatch.undo()
    assert len(log) == layers
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()))


class FluxAttnProcessorOfMine(FluxAttnProcessor):
    """A processor whose name begins as that of a known one, and whose tokens nobody has said."""


class FluxAttnProcessor2(FluxAttnProcessor):
    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *_: Any) -> Any:
        query, key, value, *text = (
            x(states).unflatten(-1, (2, -1))
            for states, parts in ((hidden_states, "to"), (encoder_hidden_states, "add"))
            for x in (getattr(attn, f"{parts}_{part}" + "_proj" * (parts == "add")) for part in "qkv")
        )
        query, key, value = (torch.cat(pair, 1) for pair in zip(text, (query, key, value), strict=True))
        out = dispatch_attention_fn(query, key, value).flatten(2)
        text_out, out = out.split([TEXT, out.shape[1] - TEXT], 1)
        return attn.to_out[0](out), attn.to_add_out(text_out)


def processors(model: Any, **others: Any) -> Any:
    """A copy of a model in which layers have these processors."""
    model = copy.deepcopy(model)
    for name, each in others.items():
        model.get_submodule(name.replace("__", ".")).set_processor(each)
    return model


def test_processors_are_known_by_their_class() -> None:
    case = flux("FluxTransformer2DModel", Given(1), 2)
    layers = ["transformer_blocks.0.attn", *(f"single_transformer_blocks.{at}.attn" for at in range(2))]
    model = processors(case.model, single_transformer_blocks__1__attn=FluxAttnProcessorOfMine())
    full = sk.BlockMask.full(case.video)
    with diffusers.use(model, full) as sparse:
        assert sparse.layers == layers[:2]
        assert sparse.dense == {layers[2]: "FluxAttnProcessorOfMine is not a processor that use() knows"}
        assert "in 2 layers; 1 dense: FluxAttnProcessorOfMine" in repr(sparse)
        torch.testing.assert_close(run(case._replace(model=model)), run(case), rtol=1e-4, atol=1e-4)
    model.set_attn_processor(FluxAttnProcessorOfMine())
    refused(r"processors are FluxAttnProcessorOfMine; those known are .*Wan", diffusers.use, model, full)
    model.set_attn_processor(FluxAttnProcessor())
    refused("FluxAttnProcessor has its text tokens first", diffusers.use, model, full, text="last")
    with diffusers.use(model, full, skip_layers=1) as sparse:
        assert sparse.dense == {layers[1]: "in skip_layers"}


def test_another_form_of_a_known_class_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    case = flux("FluxTransformer2DModel", Given(1))
    monkeypatch.setattr(FluxAttnProcessor, "__call__", lambda self, attn, hidden_states, text: None)
    refused("no attention layer that can take a policy", diffusers.use, case.model, POLICY)


def test_a_processor_of_ones_own_by_the_word_of_the_user() -> None:
    case = flux("FluxTransformer2DModel", Given(1))
    model = processors(case.model, transformer_blocks__0__attn=FluxAttnProcessor2())
    case, right = case._replace(model=model), run(case._replace(model=model))
    with diffusers.use(model, sk.BlockMask.full(case.video), text="first") as sparse:
        assert len(sparse.layers) == 2
        torch.testing.assert_close(run(case), right, rtol=1e-4, atol=1e-4)
    with diffusers.use(model, POLICY, text="first", skip_layers=1):
        assert not torch.allclose(run(case), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("there", ["all", "some"])
def test_a_mask_that_is_not_known_keeps_a_layer_dense(there: str) -> None:
    """Chroma's mask of pairs may hide tokens of the picture too."""
    case = flux("ChromaTransformer2DModel", Given(1))
    mask = torch.ones(2, TEXT + case.video, dtype=torch.bool)
    if there == "some":
        mask[0, 4:40] = mask[1, -9:] = False
    case.given["attention_mask"] = mask
    right = run(case)
    with diffusers.use(case.model, POLICY) as sparse:
        assert torch.equal(run(case), right)
        assert set(sparse.dense.values()) == {"called with a mask [2, 1, 249, 249]"}
        assert "2 dense: called with a mask" in repr(sparse)


def test_text_of_any_gaps_and_none() -> None:
    """A mask says which tokens exist, not how many."""
    case = qwen(Given(1, padded=True))
    for there in (torch.arange(TEXT) % 2 == 1, torch.arange(TEXT) > 5, torch.zeros(TEXT, dtype=torch.bool)):
        case.given["encoder_hidden_states_mask"] = torch.stack((there, ~there))
        right = run(case)
        with diffusers.use(case.model, sk.BlockMask.full(case.video)):
            torch.testing.assert_close(run(case), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sampled(["flux", "sd3", "wan", "hunyuan_video", "kandinsky"], 2))
def test_models_of_each_kind_compile(name: str) -> None:
    make, forms = CASES[name]
    case = make(forms[0])
    torch._dynamo.reset()
    with diffusers.use(case.model, POLICY):
        right = run(case)
        fast = torch.compile(case.model, backend="eager", fullgraph=True)
        torch.testing.assert_close(run(case._replace(model=fast)), right)
