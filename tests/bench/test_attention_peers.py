"""Peers of attention and of its gradients: their limits, their arguments, and that their results are judged."""

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.reference.attention import attention as reference
from sparsek.core import dtypes
from sparsek.testing.budget import Gate
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine.bench import BY_OP
from sparsek_bench.engine.peer import UnavailableError, accepted, peers_named, setting_up
from sparsek_bench.peers.attention import (
    LONGEST_DENSE_STEP,
    LOOSE,
    ends_of,
    even_lists,
    flex_tiles,
    kept_graphs,
    transposed_lists,
)
from sparsek_bench.suites.attention import PEERS, AttentionCase
from sparsek_bench.suites.attention_grad import GRAD_PEERS, AttentionGradCase, AttentionTrainCase
from tests.sampling import half

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FORWARD, BACKWARD, STEP = CASES = tuple(
    kind(1, 2, 2, 256, 256, 32, 32, "causal", (128, 128), "fp32")
    for kind in (AttentionCase, AttentionGradCase, AttentionTrainCase)
)
LARGE, LARGE_BACKWARD = (
    kind(1, 16, 16, 8192, 8192, 128, 128, "blocks:0.125") for kind in (AttentionCase, AttentionGradCase)
)
LONG = AttentionTrainCase(1, 8, 8, 65536, 65536, 128, 128, "window:4096")
BY_LISTS = ["cudnn", "fa4", "flex", "cudnn_bsa"]
BY_RULE = ["cudnn", "fa4", "flex", "cudnn_flex"]
ONLY_FORWARD = ["fa3", "fa3_vllm", "flashinfer"]
EACH = pytest.mark.parametrize("case", CASES, ids=["forward", "backward", "step"])


def peer(name: str, case: AttentionCase) -> Any:
    """The peer of that name for such a case."""
    table = GRAD_PEERS if isinstance(case, AttentionGradCase) else PEERS
    return {each.name: each for each in table}[name]


def ready(name: str, case: AttentionCase, sets: Any) -> Any:
    return peer(name, case).ready(case, sets, lambda text: None)


def able(case: AttentionCase) -> list[str]:
    table = GRAD_PEERS if isinstance(case, AttentionGradCase) else PEERS
    return [each.name for each in peers_named(table, None, CUDA) if not each.why_not(case, CUDA)]


def test_each_device_has_its_peers() -> None:
    for table, more in ((PEERS, []), (GRAD_PEERS, ["fa4_ordered"])):
        assert [each.name for each in peers_named(table, None, CPU)] == ["sdpa"]
        assert [each.name for each in peers_named(table, None, CUDA)] == [
            *BY_LISTS,
            "cudnn_flex",
            *ONLY_FORWARD,
            *more,
        ]


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("blocks:0.125", [*BY_LISTS, "flashinfer"]),
        ("topk:8", [*BY_LISTS, "flashinfer"]),
        ("full", [*BY_RULE, "fa3"]),
        ("causal", [*BY_RULE, "fa3"]),
        ("window:2048", [*BY_RULE, "fa3_vllm"]),
        ("window:2048+sinks:128", ["cudnn", "flex", "cudnn_flex"]),
        ("bigbird:256:640:3", ["cudnn", "fa4", "flex"]),
    ],
)
def test_which_peers_take_which_masks(mask: str, names: list[str]) -> None:
    assert able(replace(LARGE, mask=mask)) == names
    names = [name for name in names if name not in ONLY_FORWARD]
    case = replace(LARGE_BACKWARD, mask=mask)
    ordered = "fa4" in names and not mask.startswith(("blocks", "topk", "bigbird"))  # not by lists
    assert able(case) == [*names, *(["fa4_ordered"] if ordered else [])]
    assert able(replace(case, deterministic=False)) == names


def test_a_long_step_has_no_dense_peer() -> None:
    assert able(LONG) == [*BY_RULE, "fa4_ordered"]
    longer = replace(LONG, q_len=2 * LONGEST_DENSE_STEP, kv_len=2 * LONGEST_DENSE_STEP)
    assert able(longer) == [*BY_RULE[1:], "fa4_ordered"]
    assert peer("cudnn", longer).why_not(longer, CUDA) == [
        "takes time by the square of the length: not measured beyond 64K"
    ]


@pytest.mark.parametrize(
    ("block", "dim"),
    half(itertools.product(((64, 64), (64, 128), (128, 64), (128, 128)), (32, 64, 96, 128, 192, 256))),
    ids=str,
)
def test_flex_attention_goes_back_where_it_has_a_tile(
    monkeypatch: pytest.MonkeyPatch, block: tuple[int, int], dim: int
) -> None:
    """By torch's own table of tiles for Hopper, all of which must divide the blocks."""
    heuristics = importlib.import_module("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    case = replace(LARGE_BACKWARD, block=block, dim=dim, v_dim=dim)
    runs = [
        block[0] % tile.block_m1 == block[0] % tile.block_m2 == 0
        and block[1] % tile.block_n1 == block[1] % tile.block_n2 == 0
        for tile in heuristics.get_flex_attn_bwd_configs(dim, torch.bfloat16)
    ]
    assert any(runs) == (not peer("flex", case).why_not(case, CUDA))


@pytest.mark.parametrize(
    ("case", "name", "changes", "device", "said"),
    [
        (LARGE, "cudnn", {}, CPU, "runs on cuda"),
        (LARGE, "sdpa", {}, CUDA, "runs on cpu"),
        (
            LARGE,
            "cudnn",
            {"mask": "causal", "q_len": 1024},
            CUDA,
            "lines up the first query with the first key",
        ),
        (LARGE, "fa4", {"block": (64, 64)}, CUDA, "blocks of 128, not 64"),
        (LARGE, "fa4", {"mask": "window:64+sinks:8"}, CUDA, "no sinks"),
        (LARGE, "fa4", {"dtype": "fp32"}, CUDA, "bf16 and fp16, not fp32"),
        (LARGE, "cudnn_bsa", {"block": (64, 128)}, CUDA, "square blocks, not 64x128"),
        (
            LARGE,
            "cudnn_bsa",
            {"mask": "causal"},
            CUDA,
            "as many whole blocks in every row, which causal has not",
        ),
        (LARGE, "cudnn_bsa", {"kv_len": 8200}, CUDA, "as many whole blocks in every row"),
        (LARGE, "cudnn_bsa", {"dim": 256}, CUDA, "not 256 and 128"),
        (LARGE, "cudnn_bsa", {"dtype": "fp32"}, CUDA, "bf16 and fp16, not fp32"),
        (LARGE_BACKWARD, "cudnn", {}, CPU, "runs on cuda"),
        (LARGE_BACKWARD, "fa4", {"block": (64, 64)}, CUDA, "blocks of 128, not 64"),
        (LARGE_BACKWARD, "flex", {"block": (64, 64)}, CUDA, "needs blocks of 128, not 64"),
        (LARGE_BACKWARD, "flex", {"block": (128, 64), "dim": 64, "v_dim": 64}, CUDA, "of 128, not 128x64"),
        (
            LARGE_BACKWARD,
            "cudnn_bsa",
            {"mask": "causal"},
            CUDA,
            "as many whole blocks in every row, which causal",
        ),
        (
            LARGE_BACKWARD,
            "cudnn_bsa",
            {"dim": 64, "v_dim": 64},
            CUDA,
            "heads of 128 on Hopper, not 64 and 64",
        ),
        (LARGE_BACKWARD, "cudnn_bsa", {"dtype": "fp16"}, CUDA, "its gradients are bf16, not fp16"),
        (LARGE_BACKWARD, "cudnn_bsa", {"kv_heads": 4}, CUDA, "no shared heads, not 16 to 4"),
    ],
)
def test_a_peer_that_cannot_run_says_why(
    case: AttentionCase, name: str, changes: Any, device: torch.device, said: str
) -> None:
    assert said in "; ".join(peer(name, case).why_not(replace(case, **changes), device))


def exact(one: Any, mask: BlockMask | None = None) -> list[Tensor]:
    """out of a set by the reference, under its mask or another, and dq, dk and dv by autograd where it has dO."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (one.q, one.k, one.v))
    out = reference(q, k, v, mask or one.mask)[0]
    gradients = torch.autograd.grad(out, (q, k, v), one.grad) if hasattr(one, "grad") else ()
    return [out.detach(), *gradients]


def agree(case: AttentionCase, call: Callable[[], Any], wanted: list[Tensor], swapped: bool) -> None:
    """Every call gives what the case measures: the output, the gradients, or of a step both."""
    wanted = wanted[1:] if case.op == BACKWARD.op else wanted
    for _ in range(2):
        got = call()
        got = [got] if isinstance(got, Tensor) else got
        assert len(got) == len(wanted)
        assert not any(x.requires_grad for x in got)
        for x, right in zip(got, wanted, strict=True):
            torch.testing.assert_close(x.transpose(1, 2) if swapped else x, right, rtol=1e-3, atol=2e-4)


@EACH
@pytest.mark.parametrize("mask", ["full", "causal", "window:64", "blocks:0.5"])
def test_the_dense_peer_computes_its_own_mask(case: AttentionCase, mask: str) -> None:
    case = replace(case, mask=mask, kv_heads=1)
    sets = case.operands(CPU)
    made, causal = ready("sdpa", case, sets), mask in ("causal", "window:64")
    assert made.flops == (case.causal_flops if causal else case.dense_flops)
    assert made.note == ("causal" if causal else "every pair")
    assert len(made.calls) == len(sets) == 2
    dense = BlockMask.causal(256) if causal else BlockMask.full(256)
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

    def __init__(self, wrong: float = 1.0, scale: float = 1.0) -> None:
        self.wrong, self.scale, self.options, self.calls = wrong, scale, {}, 0

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
        return self.scale * out.transpose(1, 2), None


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


TOLD = {
    "full": {},
    "causal": {"causal": True},
    "window:100": {"causal": True, "window_size": (99, 0)},
    "blocks:0.5": {},
}


@pytest.mark.parametrize(
    ("case", "name"),
    [(FORWARD, "fa4"), *((case, name) for case in CASES[1:] for name in ("fa4", "fa4_ordered"))],
)
@pytest.mark.parametrize("mask", TOLD)
def test_flash_attention_gets_its_own_layout_and_words_and_lists(
    installed: Any, case: AttentionCase, mask: str, name: str
) -> None:
    case = replace(case, mask=mask)
    sets = case.operands(CPU)
    flash = Flash()
    installed("flash_attn.cute.interface", flash_attn_func=flash)
    block_sparsity = {"BlockSparseTensorsTorch": Lists, "compute_dq_write_order": turns}
    installed("flash_attn.cute.block_sparsity", **block_sparsity)
    made, ordered = ready(name, case, sets), name == "fa4_ordered"
    assert made.flops is None
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=True)
    ends = () if mask != "blocks:0.5" else ("",) if case.op == FORWARD.op else ("", "_bwd")
    lists = [flash.options.pop(f"block_sparse_tensors{end}") for end in ends]
    assert flash.options.pop("deterministic", False) == ordered
    assert flash.options == TOLD[mask]
    assert all(each.block_size == (128, 128) and not each.mask_block_cnt.any() for each in lists)
    if len(lists) == 2:
        rows, columns = (seen(each.full_block_cnt, each.full_block_idx, 128) for each in lists)
        assert torch.equal(rows, columns.mT)
        backward = lists[1]
        assert backward.full_block_idx.dtype == torch.int32
        assert backward.spt is (False if ordered else None)
        assert (backward.dq_write_order_full is not None) == ordered
    # A backward pass alone has run each forward pass once, others one for every call.
    assert flash.calls == len(sets) * (1 if case.op == BACKWARD.op else 1 + 2)


@EACH
def test_a_peer_whose_result_is_wrong_gets_no_time(installed: Any, case: AttentionCase) -> None:
    flash, error = (Flash(scale=2.0), "1") if case is FORWARD else (Flash(wrong=0.98), r"2\.\d+e-02")
    installed("flash_attn.cute.interface", flash_attn_func=flash)
    with pytest.raises(UnavailableError, match=rf"its result is wrong here: error {error}"):
        ready("fa4", case, case.operands(CPU))


def test_a_peer_that_rounds_a_little_more_says_so() -> None:
    judged = [Gate(error, 1e-3, False) for error in (1.04e-3, 1.3e-3, float("nan"), 1e-4)]
    assert accepted(Gate(1e-4, 1e-3, True), "its result", LOOSE) == ""
    assert accepted(judged[0], "its result", LOOSE) == "its error is 1.04 of our budget"
    for each in judged[1:]:
        with pytest.raises(UnavailableError, match="is wrong here"):
            accepted(each, "its result", LOOSE)
    with pytest.raises(UnavailableError, match="is wrong here"):
        accepted(judged[0], "its result")


def test_flash_attention_has_no_words_for_partial_blocks_of_its_lists(installed: Any) -> None:
    case = replace(FORWARD, mask="blocks:1", q_len=250, kv_len=250)
    installed("flash_attn.cute.interface", flash_attn_func=None)
    with pytest.raises(UnavailableError, match="partial blocks"):
        ready("fa4", case, case.operands(CPU))


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
        assert index.shape == (1, 2, 256 // self.block, 128 // self.block)
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


def install(installed: Any, cudnn: Cudnn) -> None:
    names = {f"block_sparse_attention_{way}": getattr(cudnn, way) for way in ("forward", "backward")}
    installed("cudnn.block_sparse_attention", **names)


@EACH
@pytest.mark.parametrize("block", [64, 128])
def test_cudnn_gets_every_block_and_runs_backward_from_its_own_forward_pass(
    installed: Any, case: AttentionCase, block: int
) -> None:
    case = replace(case, mask="blocks:0.5", block=(block, block))
    sets = case.operands(CPU)
    cudnn = Cudnn(block)
    install(installed, cudnn)
    made = ready("cudnn_bsa", case, sets)
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=False)
    assert cudnn.forwards == 2 * (1 if case.op == BACKWARD.op else 1 + 2)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_each_gradient_of_cudnn_is_judged(installed: Any, place: int) -> None:
    case = replace(BACKWARD, mask="blocks:0.5")
    install(installed, Cudnn(128, wrong=place))
    with pytest.raises(UnavailableError, match="its result is wrong here"):
        ready("cudnn_bsa", case, case.operands(CPU))


@EACH
@pytest.mark.parametrize("mask", ["causal", "full", "window:100", "window:50+sinks:40"])
def test_cudnn_gets_the_intervals_of_a_rule(installed: Any, case: AttentionCase, mask: str) -> None:
    case = replace(case, mask=mask)
    sets = case.operands(CPU)

    def plan(ends: Tensor, *given: Tensor, build_backward: bool) -> Tensor:
        assert ends.dtype == torch.int32
        assert ends.shape == (1, 1 if mask in {"causal", "full"} else 3, 256)
        assert all(x.shape == (1, 256, 2, 32) and x.is_contiguous() for x in given)
        assert build_backward == (case.op != FORWARD.op)
        return ends[0]

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: Tensor) -> Tensor:
        keys, (first, *rest) = torch.arange(256), mask_plan[:, :, None]
        seen = keys < first
        if rest:
            seen |= (keys >= rest[0]) & (keys < rest[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    installed("cudnn.flex_attention", create_mask_plan=plan, flex_attn_func=attend)
    for call, one in zip(ready("cudnn_flex", case, sets).calls, sets, strict=True):
        agree(case, call, exact(one), swapped=True)


def test_other_masks_are_no_intervals() -> None:
    for each in ("bigbird:64:64:1", "blocks:0.5"):
        (one, *_) = replace(FORWARD, mask=each, block=(64, 64)).operands(CPU)
        with pytest.raises(UnavailableError, match="two intervals"):
            ends_of(one.mask)


def test_uneven_lists_are_not_for_cudnn() -> None:
    (one, *_) = FORWARD.operands(CPU)
    with pytest.raises(UnavailableError, match="as many whole blocks"):
        even_lists(one)


@EACH
@pytest.mark.parametrize("mask", ["window:100", "blocks:0.5"])
def test_flex_attention_is_compiled_and_gets_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, case: AttentionCase, mask: str
) -> None:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    case = replace(case, mask=mask, kv_heads=1)
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
    assert (made.flops, made.note) == (None, "")
    for call, one in zip(made.calls, sets, strict=True):
        agree(case, call, exact(one), swapped=False)
    # A graph that is kept is compiled without donated buffers; others may have them.
    assert set(asked) == {((256, 256), True, case.op != BACKWARD.op)}


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


@pytest.mark.parametrize("case", CASES[:2], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "module"), [("fa4", "flash_attn"), ("cudnn_bsa", "cudnn")])
def test_a_peer_that_is_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, case: AttentionCase
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    case = replace(case, mask="blocks:0.5")
    with pytest.raises(UnavailableError, match=rf"{module}\..* cannot be imported"):
        ready(name, case, case.operands(CPU))


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
    assert peer("flex", case).counted(case) == ("tiles of 64" if asked else "", None)


def test_flex_attention_is_given_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FORWARD, block=(64, 64), dtype="bf16")
    (one, *_) = case.operands(CPU)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert peer("flex", case).attend(case, one).keywords["kernel_options"] == flex_tiles(case) != {}


def test_whatever_a_peer_raises_is_its_reason() -> None:
    with pytest.raises(UnavailableError, match="RuntimeError: no such kernel"), setting_up():
        raise RuntimeError("no such kernel\nand a long story")


@pytest.mark.parametrize("name", ["attention", "attention-backward", "tokens"])
def test_peers_say_of_every_published_row_whether_they_run_it(name: str) -> None:
    told = [
        reason
        for row in BENCHES[name].rows
        for peer in BY_OP[row.case.op].peers
        for reason in peer.why_not(row.case, CUDA)
    ]
    assert all(isinstance(reason, str) and reason for reason in told)
