"""Sparse attention for the diffusion models of vllm-omni: a plugin function, and a backend class for release 0.30.

The plugin interface of its pull request 4493 takes one callable, which is `sparse_attention`.

Release 0.30 has a closed list of backends, and a plugin may replace one of them. With sparsek installed, this
environment variable lets `register` put SparseK in the place of FASTVIDEO_VSA, which is then selected as before:

    SPARSEK_VLLM_OMNI='{"replaces": "FASTVIDEO_VSA", "policy": "SubBlock", "options": {"density": 0.25},
                        "skip_first_steps": 10, "skip_layers": [0, 1], "min_tokens": 4096}'

This module needs vllm-omni for `register` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.ops.attention import attention
from sparsek.attn.plan.attention_operands import NO_TANGENT, checked_scale
from sparsek.attn.policies.policy import Policy
from sparsek.attn.policies.vsa import VSA, checked_gate
from sparsek.core import arguments, env
from sparsek.core.aliases import earlier_names
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_no_tangent
from sparsek.integrations.config import ints, number_in, policy_named, read, require_fit
from sparsek.integrations.cubes import cubes_of

try:
    abstract: Any = import_module("vllm_omni.diffusion.attention.backends.abstract")
except ImportError:  # the classes below have all that its base classes give
    abstract = SimpleNamespace(AttentionBackend=object, AttentionImpl=object, AttentionMetadata=object)

__getattr__ = earlier_names(__name__)
VARIABLE = "SPARSEK_VLLM_OMNI"
KEYS = ("replaces", "policy", "options", "skip_first_steps", "skip_layers", "min_tokens", "tile")
STEPS = ("denoising_step", "denoise_step_idx", "step_idx")  # what the drafts of the interface call the step
GRIDS = ("latent_grid", "vsa_dit_seq_shape")


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, params: Mapping[str, Any], is_causal: bool, softmax_scale: float | None
) -> Tensor:
    """Return attention over the blocks that a policy chooses: the one callable that a plugin of vllm-omni exposes.

    Cross-attention, causal attention, and the calls that `params` names are dense, by scaled_dot_product_attention.

    Args:
        q: [B, S, Hq, D].
        k: [B, T, Hkv, D].
        v: [B, T, Hkv, D].
        params: Static options, and the state of the forward pass. Unknown keys are not read.

            - policy: the name of a class of `sparsek.policies`, or a policy, which must not be causal. "SubBlock" by
              default.
            - options: the arguments of the class. `causal` is False without being named.
            - skip_first_steps: denoising steps that stay dense. The step is denoising_step, denoise_step_idx or
              step_idx, and 0 where none is given.
            - skip_layers: layers that stay dense, by layer_idx.
            - min_tokens: calls with fewer queries stay dense.
            - tile: (frames, height, width) of a cube of as many tokens as the policy's block. Tokens are then put in
              the order of cubes, where latent_grid or vsa_dit_seq_shape gives the video's (frames, height, width) in
              tokens.
            - gate_compress: the gate of the coarse branch, [B, S, Hq, D], for the policy VSA.
        is_causal: Whether a query sees no key after its own.
        softmax_scale: The factor of the scores; D**-0.5 for None.

    Returns:
        [B, S, Hq, D].

    Raises:
        InvalidInput: For options that are wrong, causal policies, and tensors that do not fit together.

    Example:
        >>> import torch
        >>> from sparsek.integrations.vllm_omni import sparse_attention
        >>> q, k, v = torch.randn(3, 1, 512, 4, 64).unbind()
        >>> sparse_attention(q, k, v, {"policy": "MeanTopK", "options": {"topk": 2}}, False, None).shape
        torch.Size([1, 512, 4, 64])
    """
    if not isinstance(params, Mapping):
        raise InvalidInput(f"params is {arguments.shown(params)}; it must be a dict")
    options, state = _Options.of(params), _State.of(params)
    is_causal = arguments.flag("is_causal", is_causal)
    q, k, v, scale = _checked(q, k, v, softmax_scale)
    gate, grid = state.gate, state.grid
    if gate is not None:
        gate = checked_gate(gate.transpose(1, 2), q[..., :1].expand(*q.shape[:3], v.shape[3]))
    if (
        is_causal
        or q.shape[2] != k.shape[2]
        or q.shape[2] < options.min_tokens
        or state.step < options.skip_first_steps
        or state.layer in options.skip_layers
    ):
        return _dense(q, k, v, None, is_causal, scale)
    if options.tile is not None and grid is not None:
        return _in_cubes(q, k, v, options, grid, gate, scale).transpose(1, 2)
    return _by_policy(q, k, v, options.policy, gate, scale).transpose(1, 2)


class _Options(NamedTuple):
    """The static options of `params`."""

    policy: Policy
    skip_first_steps: int
    skip_layers: frozenset[int]
    min_tokens: int
    tile: tuple[int, ...] | None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> _Options:
        policy, tile = params.get("policy", "SubBlock"), params.get("tile")
        if not isinstance(policy, Policy):
            policy = policy_named(policy, params.get("options", {}), causal=False)
        else:
            require_fit(policy, False, "a diffusion model")
        skipped = params.get("skip_layers")
        if tile is not None:
            tile = ints("tile", tile, 1)
            if len(tile) != 3 or policy.sides != (math.prod(tile),) * 2:
                raise InvalidInput(
                    f"tile is {tile}; it must have three sides, and the tokens of a block of {policy.sides}"
                )
        return cls(
            policy,
            arguments.integer("skip_first_steps", params.get("skip_first_steps", 0)),
            frozenset(() if skipped is None else ints("skip_layers", skipped)),
            arguments.integer("min_tokens", params.get("min_tokens", 0)),
            tile,
        )


class _State(NamedTuple):
    """What `params` holds of the forward pass, checked, whether or not a call reads it."""

    step: int
    layer: int | None
    grid: tuple[int, ...] | None
    gate: Tensor | None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> _State:
        step, grid = (
            next((params[name] for name in names if params.get(name) is not None), None)
            for names in (STEPS, GRIDS)
        )
        layer, gate = params.get("layer_idx"), params.get("gate_compress")
        return cls(
            0 if step is None else arguments.integer("the denoising step", step),
            None if layer is None else arguments.integer("layer_idx", layer),
            None if grid is None or params.get("tile") is None else ints("latent_grid", grid, 1),
            None if gate is None else arguments.tensor("gate_compress", gate, None, 4),
        )


def _checked(q: Any, k: Any, v: Any, scale: Any) -> tuple[Tensor, Tensor, Tensor, float]:
    """Operands [B, S, H, D] as [B, H, S, D], and the factor of the scores."""
    q, k, v = (
        arguments.tensor(name, x, None, 4).transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))
    )
    check_tensors(q, k, v)
    return q, k, v, checked_scale(scale, q.shape[3], "softmax_scale")


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """[B, S, H, D] of operands [B, H, S, D]."""
    check_no_tangent(NO_TANGENT, q, k, v)
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)


def _by_policy(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy, gate: Tensor | None, scale: float, lengths: Any = None
) -> Tensor:
    """Attention by a policy, for operands whose blocks have these lengths."""
    if isinstance(policy, VSA) and gate is not None:
        return policy.attention(q, k, v, gate, kv_lengths=lengths, q_lengths=lengths, scale=scale)
    return attention(q, k, v, policy.mask(q, k, scale=scale, kv_lengths=lengths), scale=scale)


def _in_cubes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: _Options,
    grid: tuple[int, ...],
    gate: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention by a policy that sees the tokens of a video in the order of cubes."""
    if len(grid) != 3 or math.prod(grid) != q.shape[2]:
        raise InvalidInput(
            f"latent_grid is {grid}; it must be (frames, height, width) of the {q.shape[2]} tokens"
        )
    order = cubes_of(grid, options.tile or (), q.device)
    q, k, v = (x.index_select(2, order.source) for x in (q, k, v))
    q = torch.where(order.there, q, 0)  # policies read all rows of a tile
    if gate is not None and gate.shape[2] != 1:
        gate = gate.index_select(2, order.source)
    out = _by_policy(q, k, v, options.policy, gate, scale, order.lengths)
    return out.index_select(2, order.target)


class OmniBackend(abstract.AttentionBackend):
    """The backend class of vllm-omni 0.30. `register` puts it in the place of one of its backends."""

    accept_output_buffer = True
    supports_piecewise_spans = False
    supports_paged_kv = False
    supports_prefix_kv_slicing = True
    supported_platforms = ("cuda",)

    @staticmethod
    def get_name() -> str:
        """The name in vllm-omni's messages."""
        return "SPARSEK"

    @staticmethod
    def get_impl_cls() -> type[OmniImpl]:
        """The class of a layer's attention."""
        return OmniImpl

    @staticmethod
    def get_metadata_cls() -> Any:
        """vllm-omni's own metadata."""
        return abstract.AttentionMetadata

    @staticmethod
    def get_builder_cls() -> Any:
        """None: there is nothing to build before a forward pass."""
        return None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Every multiple of 8 up to 256."""
        return list(range(8, 257, 8))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads have a size that kernels take."""
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """True: calls with a mask are dense."""
        return True

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        """True: padding behind the tokens is cut off."""
        return True

    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        """False: several packed documents are not kept apart."""
        return False

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """False: there is no paged cache."""
        return False

    @classmethod
    def validate_available(cls) -> None:
        """Raise InvalidInput if SPARSEK_VLLM_OMNI is wrong."""
        configured()


class OmniImpl(abstract.AttentionImpl):
    """The attention of one layer of vllm-omni 0.30, by the options in SPARSEK_VLLM_OMNI."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **extra_impl_args: Any,
    ) -> None:
        self.softmax_scale, self.causal = softmax_scale, causal
        self.params = {**configured(), "layer_idx": number_in(prefix)}

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None, platform_key: str) -> bool:
        """Whether keys and values may come in this dtype: only as they are."""
        return kv_cache_dtype is None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        """Return attention [B, S, Hq, D] of query [B, S, Hq, D], key and value [B, T, Hkv, D].

        With a mask it is dense. Padding behind the tokens, by `packed_padding` or `valid_kv_length`, is cut off, and
        rows of padded queries are 0.
        """
        extra = dict(getattr(attn_metadata, "extra", None) or {})
        mask = getattr(attn_metadata, "attn_mask", None)
        if mask is not None:
            q, k, v, scale = _checked(query, key, value, self.softmax_scale)
            mask = arguments.tensor("attn_mask", mask)
            wide = mask[:, None, None].bool() if mask.ndim == 2 else mask
            shape = (*q.shape[:3], k.shape[2])
            sides = zip(wide.shape[::-1], shape[::-1], strict=False)
            if (
                wide.dtype not in (torch.bool, q.dtype)
                or wide.ndim > 4
                or any(x not in (1, n) for x, n in sides)
            ):
                raise InvalidInput(
                    f"attn_mask is {mask.dtype} {list(mask.shape)}; it must be {[shape[0], shape[3]]}, or bool or "
                    f"{q.dtype} and broadcast to {list(shape)}"
                )
            if self.causal:
                raise InvalidInput(
                    "a causal layer takes no attn_mask; make the mask causal, and causal=False"
                )
            return _dense(q, k, v, wide, self.causal, scale)
        rows, columns = query.shape[1], key.shape[1]
        packed = getattr(attn_metadata, "packed_padding", None)
        if packed is not None:
            rows, columns = min(rows, packed.q_length), min(columns, packed.kv_length)
        elif extra.get("valid_kv_length") is not None:
            is_self, columns = rows == columns, min(columns, extra["valid_kv_length"])
            rows = columns if is_self else rows
        layout = getattr(attn_metadata, "video_layout", None)
        grid = getattr(layout, "latent_grid", None)
        state = {"denoise_step_idx": _step(), **self.params, **extra}
        if grid is not None and math.prod(grid) == rows:
            state["latent_grid"] = grid
        out = sparse_attention(
            query[:, :rows], key[:, :columns], value[:, :columns], state, self.causal, self.softmax_scale
        )
        return functional.pad(out, (0, 0, 0, 0, 0, query.shape[1] - rows))

    forward_cuda = forward


def _step() -> int | None:
    """The denoising step of vllm-omni's forward pass."""
    try:
        forward_context: Any = import_module("vllm_omni.diffusion.forward_context")
    except ImportError:
        return None
    if not forward_context.is_forward_context_available():
        return None
    return forward_context.get_forward_context().denoise_step_idx


def configured() -> dict[str, Any]:
    """The options in the environment variable SPARSEK_VLLM_OMNI, JSON; {} where it is not set.

    Raises:
        InvalidInput: For wrong options, and for keys that are none.
    """
    found = read(env.vllm_omni_options(), VARIABLE)
    for key in found:
        arguments.one_of(f"a key of {VARIABLE}", key, KEYS)
    _Options.of(found)
    return found


def register() -> None:
    """Put SparseK in the place of the backend that SPARSEK_VLLM_OMNI names, if it is set. vllm-omni calls this.

    Raises:
        InvalidInput: For wrong options, and where vllm-omni has no such backend, or lets plugins replace none.
    """
    replaces = configured().get("replaces")
    if replaces is None:
        return
    name = arguments.text("replaces", replaces)
    try:
        registry: Any = import_module("vllm_omni.diffusion.attention.backends.registry")
        members, put = registry.DiffusionAttentionBackendEnum.__members__, registry.register_diffusion_backend
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            f"{VARIABLE} replaces {name}, but this vllm-omni does not take SparseK's backend, which was made for "
            f"vllm-omni 0.30: {error}"
        ) from error
    put(members[arguments.one_of("replaces", name, members)], f"{__name__}.{OmniBackend.__name__}")
