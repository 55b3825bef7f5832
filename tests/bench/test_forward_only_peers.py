"""FlashAttention-3 and FlashInfer's block-sparse attention as peers, and the peers of attention in FP8."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention as reference
from sparsek_bench.engine.peer import UnavailableError, peers_named
from sparsek_bench.peers.attention import in_blocks_of
from sparsek_bench.peers.attention_fp8 import SAGE_KEYS, straight
from sparsek_bench.suites.attention import PEERS, AttentionCase
from sparsek_bench.suites.attention_fp8 import BENCH, PUBLISHED, AttentionFp8Case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3 = torch.float8_e4m3fn
SMALL = (1, 2, 2, 256, 256, 128, 128)
RANDOM, FP8 = (kind(*SMALL, "blocks:0.5") for kind in (AttentionCase, AttentionFp8Case))
BLOCKS = pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)


def peer(name: str) -> Any:
    return {each.name: each for each in (*PEERS, *BENCH.peers)}[name]


def ready(name: str, case: AttentionCase, sets: Any) -> Any:
    return peer(name).ready(case, sets, lambda text: None)


def relative(x: Tensor, right: Tensor) -> float:
    return float((x.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("fa3", {"mask": "window:64"}, "dense and causal masks, not window 64"),
        ("fa3", {"mask": "causal", "dtype": "fp16"}, "bf16, not fp16"),
        ("fa3_vllm", {"mask": "causal"}, "the same kernel as FlashAttention-3's"),
        ("fa3_vllm", {"mask": "window:64+sinks:8"}, "and windows, not window 64"),
        ("fa3_vllm", {"mask": "window:300"}, "later keys in windows over 256 that are no multiple of 128"),
        ("fa3_vllm", {"mask": "window:64", "batch": 2}, "one batch item"),
        ("fa3_vllm", {"mask": "window:64", "dtype": "fp32"}, "bf16 and fp16, not fp32"),
        ("flashinfer", {"mask": "causal"}, "lists of whole blocks, not causal"),
        ("flashinfer", {"dim": 64}, "heads of 128, not 64 and 128"),
        ("flashinfer", {"dtype": "fp16"}, "bf16, not fp16"),
        ("flashinfer", {"batch": 2}, "one batch item"),
        ("flashinfer", {"kv_heads": 1}, "heads of keys"),
        ("flashinfer", {"q_len": 250}, "whole blocks of 64"),
        ("fa3_fp8", {"mask": "full", "scale": "block"}, "a scale for each head, not for each block"),
        ("fa3_fp8", {"mask": "full", "kv_heads": 1}, "heads of keys"),
        ("fa3_fp8", {}, "dense and causal masks, not random 50 %"),
        ("cudnn_bsa_fp8", {"mask": "causal"}, "which causal has not"),
        ("cudnn_bsa_fp8", {"block": (64, 128)}, "square blocks, not 64x128"),
        ("cudnn_bsa_fp8", {"v_dim": 64}, "heads of 128, not 128 and 64"),
        ("cudnn_bsa_fp8", {"dtype": "fp16"}, "bf16, not fp16"),
        ("cudnn_bsa_fp8", {"kv_heads": 1}, "no shared heads, not 2 to 1"),
        ("flashinfer_fp8", {"mask": "full"}, "lists of whole blocks, not full"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name: str, changes: Any, said: str) -> None:
    case = replace(FP8 if "fp8" in name else RANDOM, **changes)
    assert said in "; ".join(peer(name).why_not(case, CUDA))


@pytest.mark.parametrize("keys", [200, 256, 384, 2048])
def test_windows_that_the_kernel_of_vllm_masks_right_are_taken(keys: int) -> None:
    case = replace(RANDOM, mask=f"window:{keys}")
    assert "later keys" not in "; ".join(peer("fa3_vllm").why_not(case, CUDA))


def test_every_published_row_in_fp8_has_its_peers() -> None:
    new = ["fa3_fp8", "cudnn_bsa_fp8", "flashinfer_fp8"]
    named = {
        row.case: [
            each.name for each in peers_named(BENCH.peers, new, CUDA) if not each.why_not(row.case, CUDA)
        ]
        for row in PUBLISHED
    }
    for case, names in named.items():
        lists = case.mask.startswith("blocks") and case.dim == 128
        dense = case.mask in {"full", "causal"} and case.scale == "head"
        assert names == (new[1:] if lists else new[:1] if dense else [])


def seen(kept: Tensor, block: int) -> BlockMask:
    return BlockMask.from_dense(kept.repeat_interleave(block, 1).repeat_interleave(block, 2), block)


@BLOCKS
def test_lists_of_larger_blocks_are_split(block: tuple[int, int]) -> None:
    (one, *_) = replace(RANDOM, block=block, mask="blocks:0.5").operands(CPU)
    kept = in_blocks_of(one, 64)
    assert kept.shape == (2, 4, 4)
    assert kept.is_contiguous()
    given, split = (mask.dense_rows(0, 256) for mask in (one.mask, seen(kept, 64)))
    assert torch.equal(split, given.expand(1, 2, -1, -1))


def test_partial_blocks_are_not_split() -> None:
    (one, *_) = replace(RANDOM, mask="causal").operands(CPU)
    with pytest.raises(UnavailableError, match="whole blocks"):
        in_blocks_of(one, 64)


class Flash3:
    """FlashAttention-3's function, by the reference on what its arguments describe."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong = wrong

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **scales: Tensor) -> Tensor:
        assert all(x.is_contiguous() and x.shape == (1, 256, 2, 128) for x in (q, k, v))
        mask, given = (BlockMask.causal(256) if causal else BlockMask.full(256)), (q, k, v)
        if scales:
            assert all(x.dtype == E4M3 for x in given)
            assert all(x.shape == (1, 2) for x in scales.values())
            names = ("q_descale", "k_descale", "v_descale")
            given = tuple(
                x.float() * scales[name][:, None, :, None] for x, name in zip(given, names, strict=True)
            )
        q, k, v = (x.transpose(1, 2).float() for x in given)
        out = reference(q, k, v, mask)[0]
        return self.wrong * out.transpose(1, 2).bfloat16()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["fa3", "fa3_fp8"])
def test_flash_attention_3_gets_its_layout_and_our_values_and_scales(
    installed: Any, name: str, mask: str
) -> None:
    case = replace(FP8 if name == "fa3_fp8" else RANDOM, mask=mask)
    sets = case.operands(CPU)
    installed("fa3_fwd_interface", flash_attn_func=Flash3())
    made = ready(name, case, sets)
    assert made.flops is None
    for call, one in zip(made.calls, sets, strict=True):
        assert one.judge(call().transpose(1, 2)).passed
    installed("fa3_fwd_interface", flash_attn_func=Flash3(wrong=2.0))
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready(name, case, sets)


@pytest.mark.parametrize(("mask", "dtype"), [("full", "fp16"), ("causal", "fp16"), ("window:100", "bf16")])
def test_flash_attention_3_of_vllm_gets_one_sequence_and_its_window(
    installed: Any, mask: str, dtype: str
) -> None:
    case = replace(RANDOM, mask=mask, dtype=dtype, q_len=128)
    sets, wrong = case.operands(CPU), [1.0]

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        ends = [options.pop(f"cu_seqlens_{side}") for side in "qk"]
        assert [x.tolist() for x in ends] == [[0, 128], [0, 256]]
        assert all(x.dtype == torch.int32 for x in ends)
        window = options.pop("window_size")
        assert window == ([99, 0] if mask == "window:100" else None)
        causal = mask != "full"
        assert options == {"max_seqlen_q": 128, "max_seqlen_k": 256, "causal": causal, "fa_version": 3}
        assert all(x.is_contiguous() and x.shape[1:] == (2, 128) for x in (q, k, v))
        far = torch.arange(256) - torch.arange(128)[:, None] - 128
        kept = (far <= 0) & (far >= -window[0] if window else far <= 0) if causal else far < 256
        given = (x.transpose(0, 1)[None].float() for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*given, attn_mask=kept)
        return wrong[0] * out[0].transpose(0, 1).to(q.dtype)

    installed("vllm.vllm_flash_attn", flash_attn_varlen_func=attend)
    for call, one in zip(ready("fa3_vllm", case, sets).calls, sets, strict=True):
        assert one.judge(call().transpose(1, 2)).passed
    wrong[0] = 2.0
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready("fa3_vllm", case, sets)


def test_turned_values_are_turned_back() -> None:
    (one, *_) = replace(FP8, q_len=250, kv_len=250, mask="full").operands(CPU)
    q, _, v = one.heads
    assert v.turned
    assert straight(q) is q.values
    for x in (q, v):
        assert torch.equal(straight(x).float() * x.scale[..., None, None], x.dequantize())


class FlashInfer:
    """FlashInfer's functions for Hopper, by the reference: its plan, and how it rounds."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.plans = wrong, 0

    def create_plan(
        self, device: Any, kept: Tensor, rows: Tensor, columns: Tensor, *sizes: int, **more: Any
    ) -> Any:
        assert sizes == (2, 2, 128)
        assert kept.shape == (2, 4, 4)
        assert (rows == 64).all()
        assert (columns == 64).all()
        self.plans += 1
        self.mask, self.given = seen(kept, 64), more
        return Planned(self, self.mask, more)

    def sage_fp8_quantize_sm90(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        groups = k.unflatten(1, (-1, SAGE_KEYS))
        scales = [x.float().abs().amax(dim) / 448 for x, dim in ((q, 2), (groups, (2, 3)), (v, 1))]
        wide = (
            scales[0][..., None],
            scales[1].repeat_interleave(SAGE_KEYS, 1)[..., None],
            scales[2][:, None],
        )
        values = [(x.float() / scale).to(E4M3) for x, scale in zip((q, k, v), wide, strict=True)]
        return *values, scales[0][None], scales[1][None], scales[2]


class Planned:
    def __init__(self, module: FlashInfer, mask: BlockMask, more: dict[str, Any]) -> None:
        self.module, self.mask, self.more = module, mask, more

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert all(x.shape == (2, 256, 128) and x.is_contiguous() for x in (q, k, v))
        given = [x.float() for x in (q, k, v)]
        if self.more:
            assert {x.dtype for x in (q, k, v)} == {self.more["q_data_type"]} == {E4M3}
            of_k = self.more["k_scale"][0].repeat_interleave(SAGE_KEYS, 1)[..., None]
            scales = (self.more["q_scale"][0][..., None], of_k, self.more["v_scale"][:, None])
            given = [x * scale for x, scale in zip(given, scales, strict=True)]
        wide_q, wide_k, wide_v = (x[None] for x in given)
        out = reference(wide_q, wide_k, wide_v, self.mask)[0]
        return self.module.wrong * out[0].bfloat16()


def installed_flashinfer(installed: Any, module: FlashInfer) -> None:
    names = {name: getattr(module, name) for name in ("create_plan", "sage_fp8_quantize_sm90")}
    installed("flashinfer.cake_vsa_sm90", **names)


@BLOCKS
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_fp8"])
def test_flashinfer_plans_the_blocks_and_rounds_before(
    installed: Any, name: str, block: tuple[int, int]
) -> None:
    case = replace(FP8 if name == "flashinfer_fp8" else RANDOM, block=block)
    sets, module = case.operands(CPU), FlashInfer()
    installed_flashinfer(installed, module)
    made = ready(name, case, sets)
    assert module.plans == (len(sets) if case is not RANDOM and "fp8" in name else 1)
    for call, one in zip(made.calls, sets, strict=True):
        right = reference(one.q, one.k, one.v, one.mask)[0]
        assert relative(call(), right) < (0.08 if "fp8" in name else 0.01)
    assert made.note == ("scales of a token of q, 16 keys, a column of v" if "fp8" in name else "")
    installed_flashinfer(installed, FlashInfer(wrong=1.5))
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready(name, case, sets)


class CudnnFp8:
    """The parts of cuDNN frontend's function: how it rounds, without the mean of all keys, and its kernels."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.rounded = wrong, 0

    def quantize(self, q: Tensor, k: Tensor, v: Tensor, *, v_layout: str) -> tuple[Tensor, ...]:
        assert v_layout == "bhds"
        self.rounded += 1
        centred = (k.float() - k.float().mean(2, keepdim=True))[0]
        q8, k8, v8, *scales = FlashInfer().sage_fp8_quantize_sm90(q[0], centred, v[0])
        return q8[None], k8[None], v8.mT.contiguous()[None], *scales

    def attend(self, block: int, *given: Any) -> tuple[Tensor, None]:
        q, k, v, of_q, of_k, of_v, index, count = given
        assert index.dtype == torch.int32
        assert index.shape == (1, 2, 256 // block, count)
        kept = torch.zeros(2, 256 // block, 256 // block, dtype=torch.bool).scatter_(2, index[0].long(), True)
        of_keys = of_k.repeat_interleave(SAGE_KEYS, 2)[..., None]
        wide_q, wide_k, wide_v = (
            q.float() * of_q[..., None],
            k.float() * of_keys,
            v.float().mT * of_v[:, None],
        )
        out = reference(wide_q, wide_k, wide_v, seen(kept, block))[0]
        return self.wrong * out.bfloat16(), None


def installed_cudnn(installed: Any, module: CudnnFp8) -> None:
    kernels = {
        f"_bsa_attn_fwd_sm90_fp8_blk{block}": lambda *given, block=block: module.attend(block, *given)
        for block in (64, 128)
    }
    installed("cudnn.block_sparse_attention._interface", **kernels)
    installed("cudnn.block_sparse_attention._fp8_quant", _quantize_sage_bhsd=module.quantize)


@BLOCKS
def test_cudnn_rounds_before_and_is_judged_by_what_it_rounded_to(
    installed: Any, block: tuple[int, int]
) -> None:
    case = replace(FP8, block=block)
    sets, module = case.operands(CPU), CudnnFp8()
    installed_cudnn(installed, module)
    made = ready("cudnn_bsa_fp8", case, sets)
    assert module.rounded == len(sets)
    for call, one in zip(made.calls, sets, strict=True):
        assert relative(call(), reference(one.q, one.k, one.v, one.mask)[0]) < 0.08
    assert module.rounded == len(sets)
    installed_cudnn(installed, CudnnFp8(wrong=1.5))
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready("cudnn_bsa_fp8", case, sets)
