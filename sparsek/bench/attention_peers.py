"""What a user would pick instead of `sk.attention`. One line per peer in PEERS, at the end."""

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek.bench.attention import AttentionCase, AttentionOperands
from sparsek.bench.case import block_name
from sparsek.bench.peer import Peer, Ready, UnavailableError, elsewhere, first_line

# Masks that a dense peer computes as they are.
DENSE_MASKS = ("full", "causal")
LOW = ("bf16", "fp16")


@contextmanager
def _setting_up() -> Iterator[None]:
    """Peers warn, compile and refuse in many ways: what they raise becomes the reason why they are not measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except UnavailableError:
            raise
        except Exception as error:
            raise UnavailableError(f"{type(error).__name__}: {first_line(error)}") from None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported: {first_line(error)}") from None


def _tried(calls: Sequence[Callable[[], Any]]) -> Any:
    """The first call's result. Every call runs once, so that what fails, fails in the set-up."""
    first, *_ = [call() for call in calls]
    return first


def _gated(one: AttentionOperands, out: Tensor) -> None:
    gate = one.judge(out)
    if not gate.passed:
        raise UnavailableError(f"its result is wrong here: error {gate.error:.2e}, budget {gate.budget:.2e}")


@dataclass(frozen=True)
class DenseAttention:
    """torch's scaled_dot_product_attention on the same q, k and v: causal if the mask is, else every pair.

    `backend` is one of torch's, by name; "" leaves the choice to torch.
    """

    name: str
    title: str
    device: str
    backend: str = ""

    def why_not(self, case: AttentionCase, device: torch.device) -> list[str]:
        reasons = elsewhere(self, device)
        if case.mask_text.kind.causal and case.q_len != case.kv_len:
            reasons.append(
                "torch's is_causal lines up the first query with the first key, not the last with the last"
            )
        return reasons

    def ready(
        self, case: AttentionCase, sets: Sequence[AttentionOperands], tried: Callable[[str], None]
    ) -> Ready:
        causal = case.mask_text.kind.causal
        calls = tuple(self._call(one, causal) for one in sets)
        with _setting_up():
            out = _tried(calls)
            if case.mask in DENSE_MASKS:
                _gated(sets[0], out)
        return Ready(
            calls, "causal" if causal else "every pair", case.causal_flops if causal else case.dense_flops
        )

    def _call(self, one: AttentionOperands, causal: bool) -> Callable[[], Tensor]:
        grouped = one.q.shape[1] != one.k.shape[1]

        def call() -> Tensor:
            return functional.scaled_dot_product_attention(
                one.q, one.k, one.v, is_causal=causal, enable_gqa=grouped
            )

        if not self.backend:
            return call
        backend = getattr(SDPBackend, self.backend)

        def chosen() -> Tensor:
            with sdpa_kernel(backend):
                return call()

        return chosen


@dataclass(frozen=True)
class Flex:
    """torch.compile of FlexAttention with its default options, and the mask as its own BlockMask."""

    name: str = "flex"
    title: str = "FlexAttention"
    device: str = "cuda"

    def why_not(self, case: AttentionCase, device: torch.device) -> list[str]:
        return elsewhere(self, device)

    def ready(
        self, case: AttentionCase, sets: Sequence[AttentionOperands], tried: Callable[[str], None]
    ) -> Ready:
        from torch.nn.attention.flex_attention import flex_attention

        with _setting_up():
            torch.compiler.reset()  # a compiled function stops compiling after 8 kinds of masks
            compiled = torch.compile(flex_attention, dynamic=False)
            mask = sets[0].mask.to_flex()
            grouped = case.heads != case.kv_heads
            calls = tuple(
                lambda one=one: compiled(one.q, one.k, one.v, block_mask=mask, enable_gqa=grouped)
                for one in sets
            )
            _gated(sets[0], _tried(calls))
        return Ready(calls)


@dataclass(frozen=True)
class Flash4:
    """FlashAttention-4 (flash_attn.cute) on [B, S, H, D]: its causal and window arguments, or its lists of blocks."""

    name: str = "fa4"
    title: str = "FlashAttention-4"
    device: str = "cuda"

    def why_not(self, case: AttentionCase, device: torch.device) -> list[str]:
        reasons = elsewhere(self, device)
        form = case.mask_text.kind.form
        if case.dtype not in LOW:
            reasons.append(f"takes {' and '.join(LOW)}, not {case.dtype}")
        if "sinks" in form:
            reasons.append("its window has no sinks without a mask_mod of its own language")
        elif _by_lists(case) and case.block != (128, 128):
            reasons.append(f"its lists hold blocks of 128, not {block_name(case.block)}")
        return reasons

    def ready(
        self, case: AttentionCase, sets: Sequence[AttentionOperands], tried: Callable[[str], None]
    ) -> Ready:
        with _setting_up():
            attend = _imported("flash_attn.cute.interface").flash_attn_func
            options = self._options(case, sets[0])
            calls = tuple(_flash_call(attend, one, options) for one in sets)
            _gated(sets[0], _tried(calls).transpose(1, 2))
        return Ready(calls)

    def _options(self, case: AttentionCase, one: AttentionOperands) -> dict[str, Any]:
        if not _by_lists(case):
            causal = {"causal": True} if case.mask_text.kind.causal else {}
            # Its window counts the keys before the query, ours the query too.
            window = [(int(number) - 1, 0) for number in case.mask_text.numbers]
            return causal | ({"window_size": window[0]} if window else {})
        if one.mask.partial_blocks:
            raise UnavailableError("partial blocks of its lists need a mask_mod of its own language")
        lists = one.mask.to_fa4()
        no_partial = torch.zeros_like(lists.full_block_idx)
        tensors = _imported("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(lists.full_block_cnt),
            mask_block_idx=no_partial,
            full_block_cnt=lists.full_block_cnt,
            full_block_idx=lists.full_block_idx,
            block_size=case.block,
        )
        return {"block_sparse_tensors": tensors}


def _by_lists(case: AttentionCase) -> bool:
    """Whether FlashAttention-4 needs lists of blocks for the mask; else its own arguments say it."""
    return case.mask not in DENSE_MASKS and not case.mask_text.kind.causal


def _flash_call(
    attend: Callable[..., Any], one: AttentionOperands, options: dict[str, Any]
) -> Callable[[], Tensor]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (one.q, one.k, one.v))

    def call() -> Tensor:
        out = attend(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


@dataclass(frozen=True)
class CudnnBlocks:
    """Block-sparse attention of NVIDIA's cuDNN frontend: as many whole blocks in every row, no causal masks."""

    name: str = "cudnn_bsa"
    title: str = "cuDNN frontend block-sparse"
    device: str = "cuda"

    def why_not(self, case: AttentionCase, device: torch.device) -> list[str]:
        reasons = elsewhere(self, device)
        bq, bk = case.block
        if not case.mask_text.kind.uniform or case.q_len % bq or case.kv_len % bk:
            reasons.append(f"takes as many whole blocks in every row, which {case.mask_text.words} has not")
        if bq != bk:
            reasons.append(f"takes square blocks, not {block_name(case.block)}")
        if case.dim != case.v_dim or case.dim not in (64, 96, 128):
            reasons.append(f"takes head sizes of 64, 96 and 128, not {case.dim} and {case.v_dim}")
        if case.dtype not in LOW:
            reasons.append(f"takes {' and '.join(LOW)}, not {case.dtype}")
        return reasons

    def ready(
        self, case: AttentionCase, sets: Sequence[AttentionOperands], tried: Callable[[str], None]
    ) -> Ready:
        with _setting_up():
            forward = _imported("cudnn.block_sparse_attention").block_sparse_attention_forward
            index = even_lists(sets[0])
            calls = tuple(
                lambda one=one: forward(one.q, one.k, one.v, index, sparse_block_size=case.block[0])[
                    "o_tensor"
                ]
                for one in sets
            )
            _gated(sets[0], _tried(calls))
        return Ready(calls)


def even_lists(one: AttentionOperands) -> Tensor:
    """int32 [B, Hq, Mb, n]: the key blocks of every query tile. Raises UnavailableError for uneven or partial ones."""
    mask = one.mask
    starts, counts, indices = mask.full
    longest = int(counts.max())
    if mask.partial_blocks or int(counts.min()) != longest:
        raise UnavailableError("takes as many whole blocks in every row")
    slots = starts[:, None] + torch.arange(longest, device=mask.device)
    lists = indices[slots].view(mask.batch, mask.heads, mask.grid[0], longest)
    return lists.expand(*one.q.shape[:2], -1, -1).contiguous()


PEERS: tuple[Peer, ...] = (
    DenseAttention("cudnn", "cuDNN dense", "cuda", "CUDNN_ATTENTION"),
    Flex(),
    Flash4(),
    CudnnBlocks(),
    DenseAttention("sdpa", "torch SDPA dense", "cpu"),
)
