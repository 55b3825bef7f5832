"""Every public function gives the same bits whatever torch's default device, dtype and algorithms are.

On a machine without a GPU "meta" stands for a device other than the tensors': what is made there by mistake has no
values. Recipes say device and dtype of what they make, so that only SparseK's own calls can fall back on the defaults.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import Unsupported
from tests.fuzz.calls_distributed import one_process
from tests.ops.operands import names_of


@contextmanager
def device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def dtype(value: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Then torch also fills memory with NaN that nobody has written to."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def device_and_dtype() -> Iterator[None]:
    with device(), dtype(torch.bfloat16):
        yield


@contextmanager
def dtype_and_deterministic() -> Iterator[None]:
    with dtype(torch.float64), deterministic():
        yield


# Two at once, for what is made by one default shows whatever the other is.
DEFAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "meta and bfloat16": device_and_dtype,
    "float64 and deterministic": dtype_and_deterministic,
}


def forget() -> None:
    """Clears what functions of SparseK keep from call to call, which an earlier call may have made."""
    modules = [module for name, module in sys.modules.items() if name.startswith("sparsek.")]
    for each in [part for module in modules for part in vars(module).values()]:
        if type(each) is functools._lru_cache_wrapper:
            each.cache_clear()


def dense(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(dtype)


def matrix(**more: Any) -> sk.BSR:
    """Ragged on both sides."""
    return sk.random_bsr(100, 80, (32, 16), 0.5, seed=3, **more)


def qkv(**more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        dense(2, 4, 200, 32, **more),
        dense(2, 2, 200, 32, seed=3, **more),
        dense(2, 2, 200, 32, seed=4, **more),
    )


def window() -> sk.BlockMask:
    return sk.BlockMask.sliding_window(200, 70, device="cpu", block=64)


def token_lists() -> sk.TokenLists:
    return sk.TokenLists(dense(1, 2, 200, 4).topk(2).indices, 64, window=5)


def elements() -> sk.BlockMask:
    return sk.BlockMask.from_dense(dense(200, 200) > 0, 64)


def learned(product: Callable[..., Any], *parts: Tensor) -> Any:
    """A product and its gradients."""
    parts = tuple(x.detach().requires_grad_() for x in parts)
    out = product(*parts)
    return out, torch.autograd.grad(out.square().sum(), parts)


def of_every_kernel(op: str, call: Callable[[str | None], Any]) -> list[Any]:
    """What each kernel of an operation gives on this machine, and the planner's own choice."""
    found = [call(None)]
    for name in names_of(op):
        try:
            found.append((name, call(name)))
        except Unsupported:
            continue
    assert len(found) > 1
    return found


def spmm() -> Any:
    def call(kernel: str | None) -> Any:
        a, bias = matrix(), dense(100)

        def weight(values: Tensor) -> sk.BSR:
            return sk.BSR(a.pattern, values)

        yes: dict[str, Any] = {"kernel": kernel}
        return (
            sk.spmm(a, dense(3, 80, 5), alpha=0.5, **yes),
            sk.spmm(dense(5, 100), a, out=dense(5, 80), beta=2.0, **yes),
            learned(lambda v, b: sk.spmm(weight(v), b, **yes), a.values, dense(80, 5)),
            learned(lambda v, x, c: sk.linear(x, weight(v), c, "gelu", **yes), a.values, dense(7, 80), bias),
            learned(lambda v, x: sk.swiglu(x, weight(v), weight(v.neg()), **yes), a.values, dense(7, 80)),
            learned(lambda v, x: sk.mlp(x, weight(v), weight(v).T, **yes), a.values, dense(7, 80)),
        )

    return of_every_kernel("bsr", call), matrix() @ dense(80, 5), dense(5, 80) @ matrix().T


def low() -> Any:
    """In bf16 and fp16, which every kernel sums in float32."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        a = matrix(dtype=dtype)
        found += of_every_kernel(
            "bsr",
            lambda kernel, a=a, dtype=dtype: sk.linear(
                dense(7, 80, dtype=dtype), a, dense(100, dtype=dtype), "silu", kernel=kernel
            ),
        )
        found += of_every_kernel(
            "attention",
            lambda kernel, dtype=dtype: sk.attention(*qkv(dtype=dtype), elements(), kernel=kernel),
        )
    return found


def sddmm() -> Any:
    def call(kernel: str | None) -> Any:
        pattern = matrix().pattern
        return learned(
            lambda x, y: sk.sddmm(x, y, pattern, kernel=kernel).values, dense(100, 40), dense(40, 80)
        )

    return of_every_kernel("sddmm", call)


def spgemm() -> Any:
    def call(kernel: str | None) -> Any:
        a = matrix()

        def both(values: Tensor) -> Tensor:
            w = sk.BSR(a.pattern, values)
            return sk.spgemm(w, w.T, kernel=kernel) + sk.spgemm(w, w.T, "bsr", kernel=kernel).to_dense()

        return learned(both, a.values)

    return of_every_kernel("spgemm", call), matrix() @ matrix().T


def two_four() -> Any:
    def call(w: Any) -> Callable[[str | None], Any]:
        def product(kernel: str | None) -> Any:
            x = dense(16, 128)
            turned = None if kernel is not None and kernel.startswith("vendor") else kernel
            return (
                learned(lambda x: sk.linear(x, w, dense(128), "relu", kernel=kernel), x),
                sk.spmm(x, w, kernel=turned),
            )

        return product

    semi24, bsr24 = sk.Semi24.from_dense(dense(128, 128)), sk.BSR24.from_dense(dense(128, 128), 64, keep=0.5)
    masked = sk.Semi24.from_dense(dense(8, 8), dense(8, 8).new_tensor([1, 0, 0, 1] * 16).view(8, 8) > 0)
    return (
        of_every_kernel("semi24", call(semi24)),
        of_every_kernel("bsr24", call(bsr24)),
        (semi24.to_dense(), semi24.kept_norm(dense(128, 128)), bsr24.to_bsr(), masked),
        learned(lambda w: sk.Semi24.from_dense(w).to_dense(), dense(16, 16)),
    )


def fp8() -> Any:
    found: list[Any] = []
    wide = {
        "bsr_fp8": matrix(),
        "semi24_fp8": sk.Semi24.from_dense(dense(128, 128)),
        "bsr24_fp8": sk.BSR24.from_dense(dense(128, 128), 64, keep=0.5),
    }
    for op, a in wide.items():
        for dtype in (torch.float32, torch.bfloat16):
            for scale in ("row", "tensor"):
                q = sk.quantize(a, scale=scale)
                found += of_every_kernel(
                    op,
                    lambda kernel, q=q, dtype=dtype: sk.linear(
                        dense(16, q.shape[1], dtype=dtype), q, kernel=kernel
                    ),
                )
        found += [q, q.to_dense(), q.error(a)]
    x = sk.quantize(dense(16, 80), torch.float8_e5m2, "tensor")
    return found, x, x.dequantize(), x.error(dense(16, 80)), sk.quantize(matrix(), scale="block")


def chosen_by() -> list[Any]:
    """Policies of every estimate."""
    return [
        sk.policies.MeanTopK(topk=2, block=64), sk.policies.SubBlock(density=0.5), sk.policies.Nabla(),
        sk.policies.XAttention(block=64), sk.policies.FlexPrefill(block=64), sk.policies.VerticalSlash(block=64),
        sk.policies.VSA(topk=2) | sk.policies.Streaming(window=64, block=64, causal=False),
        sk.policies.NSA(topk=3), sk.policies.InfLLMv2(topk=2, always=(1, 1)), sk.policies.MoBAGate(topk=2, block=32),
    ]  # fmt: skip


def attention() -> Any:
    masks = (
        None,
        window(),
        elements(),
        window() & elements(),
        sk.BlockMask.causal(200, device="cpu", block=64) | elements(),
    )

    def call(kernel: str | None) -> Any:
        return [learned(lambda q, k, v, m=m: sk.attention(q, k, v, m, kernel=kernel), *qkv()) for m in masks]

    q, k, v = qkv()
    halves = [
        sk.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(90), slice(90, 200))
    ]
    return (
        of_every_kernel("attention", call),
        [each.to_dense() for each in masks if each is not None],
        sk.attention(q, k, v, sk.MaskPolicy(topk=2, block=64).mask_for(q, k)),
        [sk.attention(q, k, v, policy) for policy in chosen_by()],
        sk.merge_attention(*halves[0], *halves[1]),
    )


def backward() -> Any:
    def call(kernel: str | None) -> Any:
        q, k, v = qkv()
        mask = elements()
        out, lse = sk.attention(q, k, v, mask, return_lse=True)
        plan = sk.plan_attention_backward(q, k, v, mask, kernel=kernel)
        return plan(q, k, v, mask, out, lse, dense(*out.shape, seed=8))

    return of_every_kernel("attention_backward", call)


def masks() -> Any:
    at: dict[str, Any] = {"device": "cpu", "block": 64}
    scores = dense(1, 2, 4, 4)
    made = (
        sk.BlockMask.full(200, **at), sk.BlockMask.strided(200, stride=64, window=30, **at),
        sk.BlockMask.dilated(200, dilation=2, window=128, **at),
        sk.BlockMask.bigbird(200, window=70, globals=1, random=1, **at),
        sk.BlockMask.topk(scores, 2, q_len=200, kv_len=200, block=64),
        sk.BlockMask.per_head([window(), elements()]), sk.BlockMask.per_batch([window(), elements()]),
        sk.BlockMask.from_pattern(matrix_of_tiles().pattern), sk.MaskPolicy(window=50, sinks=3).mask(200, device="cpu"),
        sk.MaskPolicy(stride=128, window=50).mask(200, device="cpu"),
        sk.MaskPolicy(window=50).packed(edges(), device="cpu"), token_lists().mask_for(*qkv()[:2]),
    )  # fmt: skip
    flex, fa4 = elements().to_flex(), elements().to_fa4()
    listed = flex.kv_num_blocks, flex.kv_indices, flex.full_kv_num_blocks, flex.full_kv_indices, *fa4
    made += (
        sk.BlockMask.from_flex(flex), sk.BlockMask.block_diagonal([30, 170], device="cpu"),
        sk.BlockMask.from_transformers(dense(1, 1, 200, 200) > 0), elements().to("cpu"),
    )  # fmt: skip
    return [(each.to_dense(), each.transposed, each.plot()) for each in made], elements().to_pattern(), listed


def matrix_of_tiles() -> sk.BSR:
    return sk.random_bsr(256, 256, 64, 0.5)


def edges() -> Tensor:
    return torch.tensor([0, 30, 30, 200], device="cpu")


def varlen() -> Any:
    q, k, v = dense(200, 4, 32), dense(200, 2, 32), dense(200, 2, 32, seed=5)
    policies = (
        None,
        token_lists(),
        sk.MaskPolicy(window=40),
        sk.MaskPolicy(topk=2, block=64),
        sk.MaskPolicy(causal=False),
    )
    return [
        learned(lambda q, k, v, p=p: sk.attention_varlen(q, k, v, edges(), mask=p), q, k, v) for p in policies
    ]


def paged() -> Any:
    q, cache = dense(6, 4, 32), dense(5, 2, 16, 64)
    table = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32, device="cpu")
    lengths, cu = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([20, 9], [0, 5, 6]))
    chosen = torch.tensor([[[0], [0], [1], [1], [0], [0]]], dtype=torch.int32, device="cpu")
    lists = sk.PageLists.from_indices(chosen, block=(1, 16))
    call = q, cache, table, lengths, cu
    plan = sk.plan_attention_paged(*call)
    return [
        plan(*call), plan.explain(), sk.attention_paged(*call, lists),
        sk.attention_paged(*call, sk.TokenLists(chosen[None], 16)),
        sk.attention_paged(*call, sk.MaskPolicy(window=4, sinks=2), return_lse=True),
    ]  # fmt: skip


def plans() -> Any:
    a, b, mask, (q, k, v) = matrix(), dense(80, 5), elements(), qkv()
    small = dense(128, 128)
    found = [
        sk.choose_format(dense(32, 128), small),
        sk.choose_format((32, 128), small, device="cpu", block=64, keep=0.5),
        sk.choose_format((32, 128), small.bfloat16()),
        sk.choose_format((32, 80), sk.quantize(matrix())),
    ]
    options = [(each.name, each.kept_norm, each.error) for plan in found[:1] for each in plan.options]
    spmm, spgemm = sk.plan_spmm(a, b), sk.plan_spgemm(a, a.T)
    sddmm, attend = sk.plan_sddmm(dense(100, 8), dense(8, 80), a.pattern), sk.plan_attention(q, k, v, mask)
    texts = [each.explain() for each in (spmm, spgemm, sddmm, attend, sk.plan_spmm(a, b, device="h200"))]
    followed = spmm.retarget(sk.random_bsr(100, 80, (32, 16), 0.4, seed=8))
    return (
        options, texts, spmm(a, b), spgemm(a, a.T), sddmm(dense(100, 8), dense(8, 80), a.pattern),
        attend(q, k, v, mask), followed.explain(),
        sk.choose_format(dense(32, 128), small, formats="dense_fp8", min_norm=0)(dense(32, 128)),
    )  # fmt: skip


def formats() -> Any:
    a = matrix()
    view, rows, pattern = a.T, a.pattern.block_rows, a.pattern
    twin = sk.BSR.from_dense(a.to_dense(), a.block, threshold=0)
    return (
        a, a.to_dense(), view, view.to_dense(), twin, twin.pattern.same_as(pattern), pattern.transposed,
        sk.BSR.from_dense(dense(100, 80), (32, 16), keep=0.3), sk.BSR.from_dense(dense(64, 64), 16, threshold=15.5),
        sk.BSR.from_coo_blocks(rows, pattern.indices, a.values, a.shape), a.block_row_slice(1, 3), a.spy(),
        sk.BSR.from_torch(sk.random_bsr(64, 64, 16, 0.5).to_torch()), a * 2.5, a / 3, a + a, a - a * 0.5, -a,
        a.sum(), a.sum(0), a.sum(1), a.norm(), a.block_norms(), view.sum(0), a.state_dict(),
        sk.BSR.from_state_dict(view.state_dict()), a.to(dtype=torch.float64),
        sk.random_bsr(64, 64, 16, 0.3, pattern="powerlaw"), learned(lambda v: sk.BSR(pattern, v).sum(0), a.values),
        sk.BlockPattern(a.shape, a.block, pattern.indptr, pattern.indices),
    )  # fmt: skip


def through_scipy() -> Any:
    pytest.importorskip("scipy")
    a = sk.random_bsr(64, 64, 16, 0.5)
    return sk.BSR.from_scipy(a.to_scipy()), sk.BSR.from_scipy(a.to_scipy().tocsr(), 16)


def layers() -> Any:
    at: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    torch.manual_seed(4)
    layer = sk.nn.BlockSparseLinear.random(80, 100, (32, 16), 0.5, **at)
    other = sk.nn.BlockSparseLinear(matrix().pattern, **at)
    pruned = sk.nn.BlockSparseLinear.from_dense(torch.nn.Linear(80, 100, **at), (32, 16), keep=0.5)
    attend = sk.nn.SparseAttention(64, 2, sk.MaskPolicy(topk=2), **at)
    selected = [
        sk.nn.MoBA(64, 2, sk.policies.MoBAGate(topk=2, block=64), **at),
        sk.nn.NativeSparseAttention(64, 2, sk.policies.NSA(topk=4, span=16), **at),
    ]
    outputs = [each(dense(7, 80)) for each in (layer, other, pruned)]
    outputs += [each(dense(2, 200, 64)) for each in selected]
    outputs += [attend(dense(2, 200, 64)), attend(dense(200, 64), cu_seqlens=edges())]
    torch.cat([each.flatten() for each in outputs]).sum().backward()
    parameters = [each for made in (layer, other, pruned, attend, *selected) for each in made.parameters()]
    other.load_state_dict(sk.nn.BlockSparseLinear.random(80, 100, (32, 16), 0.3, **at).state_dict())
    return outputs, [(each, each.grad) for each in parameters if each.grad is not None], other(dense(7, 80))


def models(tmp_path: Path) -> Any:
    at: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    torch.manual_seed(4)
    found: list[Any] = []

    def make() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(128, 192, **at), torch.nn.ReLU(), torch.nn.Linear(192, 128, **at)
        )

    for config in (
        sk.BlockSparse(16, 0.5),
        sk.SemiSparse(),
        sk.BlockSemiSparse(64, 0.5),
        sk.Float8(sk.SemiSparse()),
    ):
        model = make()
        sk.sparsify_(model, config)
        sk.save_model(model, tmp_path)
        found += [*sk.load_model(make, tmp_path).state_dict().values()]
        found += [model(dense(5, 128)), sk.densify_(model) and model[0].weight]
    sk.prune(model, sk.BlockSparse(16, 0.5), calibration=[dense(40, 128)], method="obs", reconstruct="layer")
    found += [model(dense(5, 128)), sk.densify_(model)]
    given: Any = {"calibration": [dense(40, 128)], "method": "wanda", "max_error": 0.9, "card": "h200"}
    sk.prune(model, {"0": sk.Float8(sk.BlockSparse(16, 0.5)), "2": "auto"}, tokens=65536, **given)
    found += [model(dense(5, 128)), sk.densify_(model)]
    sk.sparsify_(model, "auto", max_error=0.9, card="h200", tokens=65536)
    return found, model(dense(5, 128))


def attention_fp8() -> Any:
    q, k, v = dense(1, 2, 70, 32), dense(1, 1, 70, 32), dense(1, 1, 70, 32)
    heads = sk.quantize_heads(q, k, v, "block", rows=64)
    return heads, sk.attention(*heads, is_causal=True, return_lse=True)


def over_ranks() -> Any:
    """In a mesh of one process."""
    d, found = sk.distributed, []
    lists = token_lists()
    with one_process():
        for how, mask in (("gather", window()), ("heads", elements()), ("gather", None)):
            rule = sk.MaskPolicy(topk=2, block=64) if mask is None else mask
            plan = d.plan(rule, dist.group.WORLD, how, length=200 if mask is None else None)
            q, k, v = (d.shard_sequence(x, plan) for x in qkv())
            found.append(learned(lambda q, k, v, plan=plan: d.attention(q, k, v, plan, exact=True), q, k, v))
            found += [
                d.attention(q, k, v, lists, plan=d.plan(sk.MaskPolicy(), dist.group.WORLD, how, length=200))
            ]
            edges = torch.tensor([0, 90, 200], dtype=torch.int64, device="cpu")
            found += [d.attention(q[:1], k[:1], v[:1], lists, plan=plan, cu_seqlens=edges)]
            of_all = d.plan(window(), dist.group.WORLD, "heads", owner=edges.new_zeros(200))
            found += [d.ulysses(sk.attention, q, k, v, of_all)]
            found += [plan.received(2, 4, 2, 32).tolist(), d.positions(plan), d.unshard_sequence(q, plan)]
    return found, sk.distributed.simulate(window(), (1, 3), "heads")


def files(tmp_path: Path) -> Any:
    path = tmp_path / "all.safetensors"
    things = {
        "a": matrix(),
        "s": sk.Semi24.from_dense(dense(8, 16)),
        "q": sk.quantize(matrix()),
        "m": elements(),
    }
    sk.save(things, path)
    return sk.load(path)


RECIPES = (
    spmm, low, sddmm, spgemm, two_four, fp8, attention, attention_fp8, backward, masks, varlen, paged, plans, formats,
    through_scipy, layers, models, over_ranks, files,
)  # fmt: skip


def parts(x: Any) -> list[Any]:
    """The tensors, numbers and texts in a result."""
    if isinstance(x, sk.BSR | sk.BSR24):
        return [*parts(x.pattern), *parts(x.to_dense()), *parts(x.values)]
    if isinstance(x, sk.Semi24):
        return parts((x.values, x.meta))
    if isinstance(x, sk.Quantized):
        return parts((x.matrix.values.view(torch.uint8), x.scale))
    if isinstance(x, sk.QuantizedTensor | sk.QuantizedHeads):
        return parts((x.values.view(torch.uint8), x.scale))
    if isinstance(x, sk.BlockPattern):
        return parts((x.indptr, x.indices))
    if isinstance(x, sk.BlockMask):
        return parts(x.to_dense())
    if isinstance(x, dict):
        return parts(list(x.items()))
    if isinstance(x, tuple | list):
        return [each for part in x for each in parts(part)]
    if isinstance(x, Tensor):
        in_fp8 = x.is_floating_point() and x.itemsize == 1
        return [(x.dtype, x.device.type), x.view(torch.uint8) if in_fp8 else x.detach()]
    return [x]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_default_of_torch_changes_no_bit(recipe: Any, tmp_path: Path) -> None:
    given = (tmp_path,) if recipe in (files, models) else ()
    right = parts(recipe(*given))
    assert right
    for name, default in DEFAULTS.items():
        forget()
        with default():
            found = parts(recipe(*given))
        for got, wanted in zip(found, right, strict=True):
            if isinstance(wanted, Tensor):
                assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), name
            else:
                assert got == wanted, name


def test_every_public_function_has_a_recipe() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    made = {
        "FormatChoice": "choose_format",
        "Plan": "plan_spmm",
        "Quantized": "quantize",
        "QuantizedHeads": "quantize_heads",
        "QuantizedTensor": "quantize",
    }
    others = {"InvalidFile", "InvalidInput", "MeshError", "SparseKError", "SparseKWarning", "Unsupported"}
    names = {made.get(name, name) for name in sk.__all__} - others
    assert [name for name in sorted(names) if not re.search(rf"\bsk\.{name}[.(]", source)] == []
