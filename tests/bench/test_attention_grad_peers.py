"""Peers of the gradients of attention: their limits, what they are told, and that their gradients are judged."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention as reference
from sparsek_bench.engine.peer import UnavailableError, peers_named
from sparsek_bench.peers.attention import LONGEST_DENSE_STEP, kept_graphs, transposed_lists
from sparsek_bench.suites.attention_grad import GRAD_PEERS, AttentionGradCase, AttentionTrainCase

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
SMALL = AttentionGradCase(1, 2, 2, 256, 256, 32, 32, "causal", (128, 128), "fp32")
STEP = AttentionTrainCase(1, 2, 2, 256, 256, 32, 32, "causal", (128, 128), "fp32")
LARGE = AttentionGradCase(1, 16, 16, 8192, 8192, 128, 128, "blocks:0.125")
LONG = AttentionTrainCase(1, 8, 8, 65536, 65536, 128, 128, "window:4096")
BY_NAME: dict[str, Any] = {peer.name: peer for peer in GRAD_PEERS}
GPU_PEERS = ["cudnn", "fa4", "flex", "cudnn_bsa", "fa4_ordered"]
BOTH = pytest.mark.parametrize("case", [SMALL, STEP], ids=["backward", "step"])


def ready(name: str, case: AttentionGradCase, sets: Any) -> Any:
    return BY_NAME[name].ready(case, sets, lambda text: None)


def able(case: AttentionGradCase) -> list[str]:
    return [peer.name for peer in peers_named(GRAD_PEERS, None, CUDA) if not peer.why_not(case, CUDA)]


def test_each_device_has_its_peers() -> None:
    assert [peer.name for peer in peers_named(GRAD_PEERS, None, CPU)] == ["sdpa"]
    assert [peer.name for peer in peers_named(GRAD_PEERS, None, CUDA)] == GPU_PEERS


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("blocks:0.125", ["cudnn", "fa4", "flex", "cudnn_bsa"]),
        ("full", ["cudnn", "fa4", "flex"]),
        ("causal", ["cudnn", "fa4", "flex"]),
        ("window:2048", ["cudnn", "fa4", "flex"]),
    ],
)
def test_which_peers_take_which_masks(mask: str, names: list[str]) -> None:
    assert able(replace(LARGE, mask=mask)) == [*names, "fa4_ordered"]
    assert able(replace(LARGE, mask=mask, deterministic=False)) == names


def test_a_long_step_has_no_dense_peer() -> None:
    assert able(LONG) == ["cudnn", "fa4", "flex", "fa4_ordered"]
    longer = replace(LONG, q_len=2 * LONGEST_DENSE_STEP, kv_len=2 * LONGEST_DENSE_STEP)
    assert able(longer) == ["fa4", "flex", "fa4_ordered"]
    assert BY_NAME["cudnn"].why_not(longer, CUDA) == [
        "takes time by the square of the length: not measured beyond 64K"
    ]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("block", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_flex_attention_goes_back_where_it_has_a_tile(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int], dim: int
) -> None:
    """By torch's own table of tiles for Hopper, all of which must divide the blocks."""
    heuristics = importlib.import_module("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    case = replace(LARGE, block=block, dim=dim, v_dim=dim)
    runs = [
        block[0] % tile.block_m1 == block[0] % tile.block_m2 == 0
        and block[1] % tile.block_n1 == block[1] % tile.block_n2 == 0
        for tile in heuristics.get_flex_attn_bwd_configs(dim, torch.bfloat16)
    ]
    assert any(runs) == (not BY_NAME["flex"].why_not(case, CUDA))


@pytest.mark.parametrize(
    ("name", "changes", "device", "said"),
    [
        ("cudnn", {}, CPU, "runs on cuda"),
        ("fa4", {"block": (64, 64)}, CUDA, "blocks of 128, not 64"),
        ("flex", {"block": (64, 64)}, CUDA, "needs blocks of 128, not 64"),
        ("flex", {"block": (128, 64), "dim": 64, "v_dim": 64}, CUDA, "needs blocks of 128, not 128x64"),
        ("cudnn_bsa", {"mask": "causal"}, CUDA, "as many whole blocks in every row, which causal has not"),
        ("cudnn_bsa", {"dim": 64, "v_dim": 64}, CUDA, "take heads of 128 on Hopper, not 64 and 64"),
        ("cudnn_bsa", {"dtype": "fp16"}, CUDA, "its gradients are bf16, not fp16"),
        ("cudnn_bsa", {"kv_heads": 4}, CUDA, "no shared heads, not 16 to 4"),
    ],
)
def test_a_peer_that_cannot_run_says_why(name: str, changes: Any, device: torch.device, said: str) -> None:
    assert said in "; ".join(BY_NAME[name].why_not(replace(LARGE, **changes), device))


def exact(one: Any, mask: BlockMask | None = None) -> list[Tensor]:
    """out, dq, dk and dv of a set by the reference's autograd, under its mask or another."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (one.q, one.k, one.v))
    out = reference(q, k, v, mask or one.mask)[0]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), one.grad)]


def agree(case: AttentionGradCase, call: Callable[[], Any], wanted: list[Tensor], swapped: bool) -> None:
    """Every call gives the wanted gradients, of a step the output too."""
    wanted = wanted if isinstance(case, AttentionTrainCase) else wanted[1:]
    for _ in range(2):
        got = call()
        assert len(got) == len(wanted)
        assert not any(x.requires_grad for x in got)
        for x, right in zip(got, wanted, strict=True):
            torch.testing.assert_close(x.transpose(1, 2) if swapped else x, right, rtol=1e-3, atol=2e-4)


@BOTH
@pytest.mark.parametrize("mask", ["full", "causal", "window:64"])
def test_the_dense_peer_differentiates_its_own_mask(case: AttentionGradCase, mask: str) -> None:
    case = replace(case, mask=mask, kv_heads=1)
    sets = case.operands(CPU)
    made = ready("sdpa", case, sets)
    assert made.flops == (case.dense_flops if mask == "full" else case.causal_flops)
    assert len(made.calls) == len(sets) == 2
    dense = BlockMask.full(256) if mask == "full" else BlockMask.causal(256)
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one, dense), swapped=False)


def seen(count: Tensor, index: Tensor, block: int) -> Tensor:
    """bool [H, rows, columns]: the blocks that lists [1, H, rows] and [1, H, rows, n] of 256 x 256 hold."""
    there = torch.zeros(count.shape[1], 256 // block, 256 // block, dtype=torch.bool)
    for head in range(count.shape[1]):
        for row in range(count.shape[2]):
            for column in index[0, head, row, : int(count[0, head, row])].tolist():
                there[head, row, column] = True
    return there


def of_blocks(there: Tensor, block: int) -> BlockMask:
    return BlockMask.from_dense(there.repeat_interleave(block, 1).repeat_interleave(block, 2), block)


class Flash:
    """FlashAttention-4's interface, computed by the reference. Keeps the options of its last call."""

    def __init__(self, wrong: float = 1.0) -> None:
        self.wrong, self.options, self.calls = wrong, {}, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.options = options
        self.calls += 1
        assert q.is_leaf
        assert all(x.is_contiguous() and x.shape == (1, 256, 2, 32) for x in (q, k, v))
        lists = options.get("block_sparse_tensors")
        if lists is not None:
            mask = of_blocks(seen(lists.full_block_cnt, lists.full_block_idx, 128), 128)
        elif "window_size" in options:
            mask = BlockMask.sliding_window(256, options["window_size"][0] + 1)
        else:
            mask = BlockMask.causal(256) if options.get("causal") else BlockMask.full(256)
        k = self.wrong * k + (1 - self.wrong) * k.detach()
        out = reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)[0]
        return out.transpose(1, 2), None


def turns(*lists: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention-4's function of its lists: stands for it by whether it got counts and lists of both directions."""
    forward, backward = lists[:4], lists[4:]
    rows, columns = (seen(one[2], one[3], 128) for one in (forward, backward))
    assert torch.equal(rows, columns.mT)
    return backward[1] + 1, backward[3] + 2


class Lists(NamedTuple):
    """FlashAttention-4's lists, as far as they are used here."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


@BOTH
@pytest.mark.parametrize("name", ["fa4", "fa4_ordered"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:100", "blocks:0.5"])
def test_flash_attention_gets_its_own_layout_and_lists_of_both_directions(
    installed: Any, case: AttentionGradCase, mask: str, name: str
) -> None:
    case = replace(case, mask=mask)
    sets = case.operands(CPU)
    flash = Flash()
    installed("flash_attn.cute.interface", flash_attn_func=flash)
    block_sparsity = {"BlockSparseTensorsTorch": Lists, "compute_dq_write_order": turns}
    installed("flash_attn.cute.block_sparsity", **block_sparsity)
    fa4 = BY_NAME[name]
    made = ready(name, case, sets)
    assert made.flops is None
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=True)
    if mask == "blocks:0.5":
        forward, backward = (flash.options[f"block_sparse_tensors{end}"] for end in ("", "_bwd"))
        rows = seen(forward.full_block_cnt, forward.full_block_idx, 128)
        columns = seen(backward.full_block_cnt, backward.full_block_idx, 128)
        assert torch.equal(rows, columns.mT)
        assert backward.block_size == (128, 128)
        assert backward.full_block_idx.dtype == torch.int32
        assert backward.spt is (False if fa4.ordered else None)
        assert (backward.dq_write_order_full is not None) == fa4.ordered
    else:
        assert "block_sparse_tensors_bwd" not in flash.options
    # A backward pass alone has run each forward pass once, a step one for every call.
    assert flash.calls == (len(sets) * (1 + 2) if isinstance(case, AttentionTrainCase) else len(sets))
    assert fa4.device == "cuda"
    assert flash.options.get("deterministic", False) == fa4.ordered


@BOTH
def test_a_peer_whose_gradient_is_wrong_gets_no_time(installed: Any, case: AttentionGradCase) -> None:
    sets = case.operands(CPU)
    installed("flash_attn.cute.interface", flash_attn_func=Flash(wrong=0.98))
    with pytest.raises(UnavailableError, match=r"its result is wrong here: error 2\.\d+e-02"):
        ready("fa4", case, sets)


@pytest.mark.parametrize("columns", [3, 8])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_lists_are_transposed(columns: int, share: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    kept = torch.rand(2, 3, 5, columns, generator=generator) < share
    kept[0, 0, :, 1] = False
    kept[0, 1, :, 1] = True
    dense = kept.repeat_interleave(128, 2).repeat_interleave(128, 3)
    counts, rows = transposed_lists(BlockMask.from_dense(dense, 128))
    assert counts.dtype == rows.dtype == torch.int32
    assert rows.shape == (2, 3, columns, max(1, int(counts.max())))
    assert ((rows >= 0) & (rows < 5)).all()
    for item in range(2):
        for head in range(3):
            for column in range(columns):
                listed = rows[item, head, column, : int(counts[item, head, column])].tolist()
                assert listed == kept[item, head, :, column].nonzero().flatten().tolist()


class Cudnn:
    """cuDNN frontend's two functions, computed by the reference."""

    def __init__(self, block: int, wrong: int | None = None) -> None:
        self.block, self.wrong, self.forwards = block, wrong, 0

    def mask(self, index: Tensor) -> BlockMask:
        assert index.dtype == torch.int32
        count = torch.full(index.shape[:3], index.shape[3])
        return of_blocks(seen(count, index, self.block), self.block)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, sparse_block_size: int) -> Any:
        assert sparse_block_size == self.block
        assert not any(x.requires_grad for x in (q, k, v))
        self.forwards += 1
        out, lse = reference(q, k, v, self.mask(index))
        return {"o_tensor": out, "lse_tensor": lse}

    def backward(self, grad: Tensor, *rest: Any, sparse_block_size: int) -> Any:
        q, k, v, out, lse, index = rest
        assert sparse_block_size == self.block
        right = exact(SimpleNamespace(q=q, k=k, v=v, grad=grad, mask=self.mask(index)))
        assert torch.equal(out, right[0])
        assert lse.shape == q.shape[:3]
        made = [x * 1.1 if place == self.wrong else x for place, x in enumerate(right)]
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), made[1:], strict=True))


@BOTH
@pytest.mark.parametrize("block", [64, 128])
def test_cudnn_runs_backward_from_its_own_forward_pass(
    installed: Any, case: AttentionGradCase, block: int
) -> None:
    case = replace(case, mask="blocks:0.5", block=(block, block))
    sets = case.operands(CPU)
    cudnn = Cudnn(block)
    names = {f"block_sparse_attention_{way}": getattr(cudnn, way) for way in ("forward", "backward")}
    installed("cudnn.block_sparse_attention", **names)
    made = ready("cudnn_bsa", case, sets)
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=False)
    assert cudnn.forwards == (2 * 3 if isinstance(case, AttentionTrainCase) else 2)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_each_gradient_of_cudnn_is_judged(installed: Any, place: int) -> None:
    case = replace(SMALL, mask="blocks:0.5")
    cudnn = Cudnn(128, wrong=place)
    names = {f"block_sparse_attention_{way}": getattr(cudnn, way) for way in ("forward", "backward")}
    installed("cudnn.block_sparse_attention", **names)
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready("cudnn_bsa", case, case.operands(CPU))


@BOTH
def test_flex_attention_is_compiled_and_gets_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, case: AttentionGradCase
) -> None:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    case = replace(case, mask="window:100", kv_heads=1)
    sets = case.operands(CPU)
    asked: list[Any] = []

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool, kernel_options: None
    ) -> Tensor:
        asked.append((tuple(block_mask.shape[-2:]), enable_gqa, donated()))
        return reference(q, k, v, sets[0].mask)[0]

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex, "flex_attention", attend)
    made = ready("flex", case, sets)
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=False)
    # A graph that is kept is compiled without donated buffers; a step may have them.
    assert set(asked) == {((256, 256), True, isinstance(case, AttentionTrainCase))}


def donated() -> bool:
    return importlib.import_module("torch._functorch.config").donated_buffer


class Here(torch.autograd.Function):
    """Passes on its gradient, and notes whether buffers may be donated where its backward pass runs."""

    noted: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Here.noted.append(donated())
        return grad


def test_a_kept_graph_runs_where_its_setting_holds() -> None:
    Here.noted = []
    x = torch.ones(2, requires_grad=True)
    y = Here.apply(x)
    before = donated()
    with kept_graphs():
        torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    assert donated() is before
    torch.autograd.grad(y, x, torch.ones(2))
    assert Here.noted == [False, before]


@pytest.mark.parametrize(("name", "module"), [("fa4", "flash_attn"), ("cudnn_bsa", "cudnn")])
def test_a_peer_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    case = replace(SMALL, mask="blocks:0.5")
    with pytest.raises(UnavailableError, match=rf"{module}\..* cannot be imported"):
        ready(name, case, case.operands(CPU))
