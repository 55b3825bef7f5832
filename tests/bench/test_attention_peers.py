"""Peers of attention: their limits, what they are told, and that their results are judged."""

import importlib
import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention as reference
from sparsek.core import dtypes
from sparsek_bench.engine.peer import UnavailableError, peers_named, setting_up
from sparsek_bench.peers.attention import even_lists, flex_tiles
from sparsek_bench.suites.attention import PEERS, AttentionCase, AttentionOperands

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SMALL = AttentionCase(1, 2, 2, 256, 256, 32, 32, "causal", (128, 128), "fp32")
LARGE = AttentionCase(1, 16, 16, 8192, 8192, 128, 128, "blocks:0.125")
BY_NAME: dict[str, Any] = {peer.name: peer for peer in PEERS}
GPU_PEERS = ["cudnn", "fa4", "flex", "cudnn_bsa"]


def ignore(text: str) -> None:
    """Hears progress and says nothing."""


def expected(one: AttentionOperands) -> Tensor:
    return reference(one.q, one.k, one.v, one.mask)[0]


def test_each_device_has_its_peers() -> None:
    assert [peer.name for peer in peers_named(PEERS, None, CUDA)] == GPU_PEERS
    assert [peer.name for peer in peers_named(PEERS, None, CPU)] == ["sdpa"]


@pytest.mark.parametrize(
    ("mask", "able"),
    [
        ("blocks:0.125", GPU_PEERS),
        ("topk:8", GPU_PEERS),
        ("full", ["cudnn", "fa4", "flex"]),
        ("causal", ["cudnn", "fa4", "flex"]),
        ("window:2048", ["cudnn", "fa4", "flex"]),
        ("window:2048+sinks:128", ["cudnn", "flex"]),
        ("bigbird:256:640:3", ["cudnn", "fa4", "flex"]),
    ],
)
def test_which_peers_take_which_masks(mask: str, able: list[str]) -> None:
    case = replace(LARGE, mask=mask)
    assert [peer.name for peer in PEERS if not peer.why_not(case, CUDA)] == able


@pytest.mark.parametrize(
    ("name", "changes", "device", "said"),
    [
        ("cudnn", {}, CPU, "runs on cuda"),
        ("sdpa", {}, CUDA, "runs on cpu"),
        ("cudnn", {"mask": "causal", "q_len": 1024}, CUDA, "lines up the first query with the first key"),
        ("fa4", {"block": (64, 64)}, CUDA, "blocks of 128, not 64"),
        ("fa4", {"mask": "window:64+sinks:8"}, CUDA, "no sinks"),
        ("fa4", {"dtype": "fp32"}, CUDA, "bf16 and fp16, not fp32"),
        ("cudnn_bsa", {"block": (64, 128)}, CUDA, "square blocks, not 64x128"),
        ("cudnn_bsa", {"mask": "causal"}, CUDA, "as many whole blocks in every row, which causal has not"),
        ("cudnn_bsa", {"kv_len": 8200}, CUDA, "as many whole blocks in every row"),
        ("cudnn_bsa", {"dim": 256}, CUDA, "not 256 and 128"),
        ("cudnn_bsa", {"dtype": "fp32"}, CUDA, "bf16 and fp16, not fp32"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name: str, changes: Any, device: torch.device, said: str) -> None:
    assert said in "; ".join(BY_NAME[name].why_not(replace(LARGE, **changes), device))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_dense_peer_computes_dense_masks_as_they_are(mask: str) -> None:
    case = replace(SMALL, mask=mask, kv_heads=1)
    sets = case.operands(CPU)[:2]
    ready = BY_NAME["sdpa"].ready(case, sets, ignore)
    assert len(ready.calls) == len(sets)
    assert ready.flops == sets[0].useful_flops
    for call, one in zip(ready.calls, sets, strict=True):
        torch.testing.assert_close(call(), expected(one))


@pytest.mark.parametrize(("mask", "causal"), [("window:64", True), ("blocks:0.5", False)])
def test_the_dense_peer_of_a_sparse_mask_counts_its_own_flops(mask: str, causal: bool) -> None:
    case = replace(SMALL, mask=mask)
    sets = case.operands(CPU)[:2]
    ready = BY_NAME["sdpa"].ready(case, sets, ignore)
    assert ready.flops == (case.causal_flops if causal else case.dense_flops)
    assert ready.note == ("causal" if causal else "every pair")
    dense = BlockMask.causal(256) if causal else BlockMask.full(256)
    one = replace(sets[0], mask=dense)
    torch.testing.assert_close(ready.calls[0](), expected(one))


def listed(count: Tensor, index: Tensor, one: AttentionOperands) -> BlockMask:
    """The mask of a peer's lists [1, H, Mb] and [1, H, Mb, n], all blocks full."""
    seen = torch.zeros(one.mask.heads, 256, 256, dtype=torch.bool)
    block = one.mask.block[0]
    for head in range(seen.shape[0]):
        for tile in range(count.shape[2]):
            for column in index[0, head, tile, : int(count[0, head, tile])].tolist():
                rows, columns = (
                    slice(tile * block, (tile + 1) * block),
                    slice(column * block, (column + 1) * block),
                )
                seen[head, rows, columns] = True
    return BlockMask.from_dense(seen, block)


class Flash:
    """FlashAttention-4's interface, computed by the reference. Keeps the options of its last call."""

    def __init__(self, one: AttentionOperands, wrong: bool = False) -> None:
        self.one, self.wrong, self.options = one, wrong, {}

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.options = options
        lists = options.get("block_sparse_tensors")
        if lists is not None:
            mask = listed(lists.full_block_cnt, lists.full_block_idx, self.one)
        elif "window_size" in options:
            mask = BlockMask.sliding_window(256, options["window_size"][0] + 1)
        else:
            mask = BlockMask.causal(256) if options.get("causal") else BlockMask.full(256)
        assert q.is_contiguous()
        out = reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)[0].transpose(1, 2)
        return (out * 2 if self.wrong else out), None


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("full", {}),
        ("causal", {"causal": True}),
        ("window:100", {"causal": True, "window_size": (99, 0)}),
        ("blocks:0.5", {"block_sparse_tensors"}),
    ],
)
def test_flash_attention_is_told_the_mask_in_its_own_words(installed: Any, mask: str, options: Any) -> None:
    case = replace(SMALL, mask=mask, dtype="bf16")
    sets = case.operands(CPU)[:2]
    flash = Flash(sets[0])
    installed("flash_attn.cute.interface", flash_attn_func=flash.flash_attn_func)
    installed("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=SimpleNamespace)
    ready = BY_NAME["fa4"].ready(case, sets, ignore)
    assert len(ready.calls) == len(sets)
    assert ready.flops is None
    if isinstance(options, dict):
        assert flash.options == options
    else:
        lists = flash.options["block_sparse_tensors"]
        assert set(flash.options) == options
        assert lists.block_size == (128, 128)
        assert not lists.mask_block_cnt.any()


def test_a_peer_that_is_wrong_gets_no_time(installed: Any) -> None:
    case = replace(SMALL, mask="full", dtype="bf16")
    sets = case.operands(CPU)[:2]
    installed("flash_attn.cute.interface", flash_attn_func=Flash(sets[0], wrong=True).flash_attn_func)
    with pytest.raises(UnavailableError, match="its result is wrong here: error 1"):
        BY_NAME["fa4"].ready(case, sets, ignore)


def test_flash_attention_has_no_words_for_partial_blocks_of_its_lists(installed: Any) -> None:
    case = replace(SMALL, mask="blocks:1", q_len=250, kv_len=250)
    installed("flash_attn.cute.interface", flash_attn_func=None)
    with pytest.raises(UnavailableError, match="partial blocks"):
        BY_NAME["fa4"].ready(case, case.operands(CPU), ignore)


@pytest.mark.parametrize(("name", "module"), [("fa4", "flash_attn"), ("cudnn_bsa", "cudnn")])
def test_a_peer_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnavailableError, match=rf"{module}\..* cannot be imported"):
        BY_NAME[name].ready(SMALL, SMALL.operands(CPU), ignore)


@pytest.mark.parametrize("block", [64, 128])
def test_the_lists_of_cudnn_hold_every_block(installed: Any, block: int) -> None:
    case = replace(SMALL, mask="blocks:0.5", block=(block, block))
    sets = case.operands(CPU)[:2]

    def forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, sparse_block_size: int) -> dict[str, Tensor]:
        assert sparse_block_size == block
        assert index.shape == (1, 2, 256 // block, 128 // block)
        assert index.dtype == torch.int32
        counts = torch.full(index.shape[:3], index.shape[3])
        return {"o_tensor": reference(q, k, v, listed(counts, index, sets[0]))[0]}

    installed("cudnn.block_sparse_attention", block_sparse_attention_forward=forward)
    ready = BY_NAME["cudnn_bsa"].ready(case, sets, ignore)
    torch.testing.assert_close(ready.calls[1](), expected(sets[1]))


def test_uneven_lists_are_not_for_cudnn() -> None:
    (one, *_) = replace(SMALL, mask="causal").operands(CPU)[:2]
    with pytest.raises(UnavailableError, match="as many whole blocks"):
        even_lists(one)


@pytest.mark.parametrize("mask", ["window:100", "blocks:0.5"])
def test_flex_attention_gets_the_same_mask(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = replace(SMALL, mask=mask, kv_heads=1)
    sets = case.operands(CPU)[:2]
    ready = BY_NAME["flex"].ready(case, sets, ignore)
    assert (ready.flops, ready.note) == (None, "")
    assert len(ready.calls) == len(sets)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("block", list(itertools.product((64, 128), repeat=2)), ids=str)
def test_flex_attention_has_a_tile_that_divides_the_blocks(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int], dim: int, dtype: str
) -> None:
    """By torch's own table of tiles for Hopper."""
    heuristics = importlib.import_module("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    case = replace(LARGE, block=block, dim=dim, v_dim=dim, dtype=dtype)
    asked = flex_tiles(case)
    for tile in heuristics.get_flex_attn_fwd_configs(dim, dtypes.parse(dtype)):
        assert block[0] % (asked.get("fwd_BLOCK_M") or tile.block_m) == 0
        assert block[1] % (asked.get("fwd_BLOCK_N") or tile.block_n) == 0
    assert (not asked) == (block == (128, 128) or dim > 128)
    assert BY_NAME["flex"].counted(case) == ("tiles of 64" if asked else "", None)


def test_flex_attention_is_given_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, block=(64, 64), dtype="bf16")
    (one, *_) = case.operands(CPU)[:2]
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert BY_NAME["flex"].attend(case, one).keywords["kernel_options"] == flex_tiles(case) != {}


def test_whatever_a_peer_raises_is_its_reason() -> None:
    with pytest.raises(UnavailableError, match="RuntimeError: no such kernel"), setting_up():
        raise RuntimeError("no such kernel\nand a long story")
