"""Calls that are recorded: their operands drawn anew each time, the call, and what it is held to in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import sparsek as sk
from sparsek.products.formats.quantized_tensor import _rounded, quantize_dense
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.attention_budget import check_attention, check_attention_backward
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear, check_sddmm, check_swiglu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
M, K, N, BLOCK = 256, 320, 128, 64
LENGTH, HEADS, DIM, TILE = 512, (4, 2), 64, 128
Operands = tuple[Any, ...]


class Subject(NamedTuple):
    """A call of operands that `draw` makes, and the gates of its result.

    The first `fixed` operands are matrices or patterns. A recorded call is made of `repeats` recorded ones.
    """

    draw: Callable[[], Operands]
    call: Callable[..., Any]
    gates: Callable[..., list[Gate]]
    repeats: int = 1
    fixed: int = 1

    def check(self, given: Operands, out: Any) -> None:
        with torch.no_grad():
            gates = self.gates(out, *given)
        assert all(gate.passed for gate in gates), gates

    def turn(self) -> None:
        """One call with new operands."""
        given = self.draw()
        self.check(given, self.call(*given))


def randn(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def floats(given: Any) -> list[Tensor]:
    """The tensors of numbers in operands or results, without patterns and metadata."""
    return [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()]


def renew(old: Any, new: Any) -> None:
    """Writes the numbers of other operands into these."""
    with torch.no_grad():
        for into, x in zip(floats(old), floats(new), strict=True):
            into.copy_(x)


def cast(given: Operands, dtype: torch.dtype) -> Operands:
    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(one, given)


def weights(storage: str, rows: int, columns: int, device: str) -> Callable[[], Any]:
    """Draws matrices that share a pattern, or metadata, and differ in all numbers."""
    kind, _, fp8 = storage.partition("-")
    made: Any = sk.random_bsr(rows, columns, BLOCK, 0.5, dtype=BF16, device=device, seed=0)
    if kind == "bsr24":
        made = sk.BSR24.from_bsr(made)
    elif kind == "semi24":
        made = sk.Semi24.from_dense(randn(rows, columns, device=device))
    shape = tuple(made.values.shape)

    def draw() -> Any:
        drawn = made._each(lambda _: randn(*shape, device=device))
        return sk.quantize(drawn) if fp8 else drawn

    return draw


def times(device: str) -> Subject:
    """A @ B."""
    a = weights("bsr", M, K, device)
    return Subject(
        lambda: (a(), randn(K, N, device=device)),
        lambda a, b: a @ b,
        lambda out, a, b: [check_spmm(a, b, out)],
    )


def before(device: str) -> Subject:
    """x @ A, with leading dims and a factor."""
    a = weights("bsr", M, K, device)
    return Subject(
        lambda: (a(), randn(2, 64, M, device=device)),
        lambda a, x: sk.spmm(x, a, alpha=0.5),
        lambda out, a, x: [check_spmm(a.T, x.view(-1, M).mT, out.view(-1, K).mT, Epilogue(alpha=0.5))],
    )


def fp8_times(device: str) -> Subject:
    """A @ B of two operands in FP8, which one launch multiplies."""
    a = weights("bsr-fp8", M, K, device)
    return Subject(
        lambda: (a(), sk.quantize(randn(N, K, device=device)).mT),
        lambda a, b: a @ b,
        lambda out, a, b: [check_spmm(a, b, out)],
        fixed=2,
    )


def into(device: str) -> Subject:
    """spmm with out=, whose operands are checked each time."""
    a = weights("bsr", M, K, device)
    return Subject(
        lambda: (a(), randn(K, N, device=device), poisoned((M, N), BF16, device)),
        lambda a, b, out: sk.spmm(a, b, out=out),
        lambda result, a, b, out: [check_spmm(a, b, result)],
    )


def added(device: str) -> Subject:
    """x @ A added to what out holds, which is one operand though the product reads and writes it."""
    a = weights("bsr", M, K, device)

    def draw() -> Operands:
        out = randn(N, K, device=device)
        return a(), randn(N, M, device=device), out, out.clone()

    def gates(result: Tensor, a: sk.BSR, x: Tensor, out: Tensor, held: Tensor) -> list[Gate]:
        return [check_spmm(a.T, x.mT, result.mT, Epilogue(other=held.mT))]

    return Subject(draw, lambda a, x, out, held: sk.spmm(x, a, out=out, beta=1.0), gates)


def by_plan(device: str) -> Subject:
    """plan(A, B)."""
    a = weights("bsr", M, K, device)
    plan = sk.plan_spmm(a(), randn(K, N, device=device))
    return times(device)._replace(draw=lambda: (a(), randn(K, N, device=device)), call=plan)


def skinny(device: str) -> Subject:
    """A @ B of few columns and long rows, whose sums meet in a workspace of the stream."""
    a, kernel = weights("bsr", 128, 8192, device), "portable.spmm_skinny" if device == "cuda" else None
    return Subject(
        lambda: (a(), randn(8192, 8, device=device)),
        lambda a, b: sk.spmm(a, b, kernel=kernel),
        lambda out, a, b: [check_spmm(a, b, out)],
    )


def layer(storage: str) -> Callable[[str], Subject]:
    def make(device: str) -> Subject:
        """gelu(x @ W.T + bias) + residual."""
        w = weights(storage, M, K, device)

        def gates(out: Tensor, w: Any, x: Tensor, bias: Tensor, residual: Tensor) -> list[Gate]:
            if isinstance(w, sk.Quantized):
                x8 = quantize_dense(x, E4M3, "row", check=False)
                return [check_linear(x8, w, out, bias, "gelu", residual)]
            return [check_linear(x, w, out, bias, "gelu", residual)]

        return Subject(
            lambda: (w(), *(randn(*each, device=device) for each in ((2, 64, K), (M,), (2, 64, M)))),
            lambda w, x, bias, residual: sk.linear(x, w, bias, "gelu", residual),
            gates,
        )

    return make


def copied(device: str) -> Subject:
    """A layer whose bias and residual have gaps, and are copied before the launch."""

    def draw() -> Operands:
        bias, residual = randn(M, 2, device=device)[:, 0], randn(M, N, device=device).mT
        return w(), randn(N, K, device=device), bias, residual

    w = weights("bsr", M, K, device)
    return layer("bsr")(device)._replace(draw=draw)


def gated(device: str) -> Subject:
    """swiglu: two products."""
    gate, up = weights("bsr", M, K, device), weights("bsr", M, K, device)
    return Subject(
        lambda: (gate(), up(), randn(N, K, device=device)),
        lambda gate, up, x: sk.swiglu(x, gate, up),
        lambda out, gate, up, x: [check_swiglu(x, gate, up, out)],
        repeats=2,
        fixed=2,
    )


def rounded(device: str) -> Subject:
    """quantize of a dense tensor, without a look at its values."""

    def gates(found: sk.QuantizedTensor, x: Tensor) -> list[Gate]:
        pairs = zip((found.values, found.scale), _rounded(x, E4M3, by_row=True), strict=True)
        return [Gate(0.0, 0.0, torch.equal(out.float(), right.float())) for out, right in pairs]

    return Subject(
        lambda: (randn(N, K, device=device),), lambda x: sk.quantize(x, check=False), gates, fixed=0
    )


def sampled(device: str) -> Subject:
    """sddmm."""
    pattern = weights("bsr", M, N, device)().pattern
    return Subject(
        lambda: (pattern, randn(M, K, device=device), randn(K, N, device=device)),
        lambda pattern, x, y: sk.sddmm(x, y, pattern),
        lambda out, pattern, x, y: [check_sddmm(x, y, out)],
    )


def learned(device: str) -> Subject:
    """A @ B and both gradients."""
    a = weights("bsr", M, K, device)

    def call(a: sk.BSR, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = a.values.detach().requires_grad_(), b.detach().requires_grad_()
        out = sk.BSR.unchecked(a.pattern, leaves[0]) @ leaves[1]
        return out, *torch.autograd.grad(out, leaves, grad)

    def gates(found: tuple[Tensor, ...], a: sk.BSR, b: Tensor, grad: Tensor) -> list[Gate]:
        out, of_values, of_b = found
        of_a = sk.BSR.unchecked(a.pattern, of_values)
        return [check_spmm(a, b, out), check_sddmm(grad, b.mT, of_a), check_spmm(a.T, grad, of_b)]

    return Subject(lambda: (a(), *(randn(each, N, device=device) for each in (K, M))), call, gates, repeats=2)


def learned_layer(device: str) -> Subject:
    """x @ W.T + bias and its gradients."""
    w = weights("bsr", M, K, device)

    def call(w: sk.BSR, x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in (w.values, x, bias)]
        y = sk.linear(leaves[1], sk.BSR.unchecked(w.pattern, leaves[0]), leaves[2])
        return y, *torch.autograd.grad(y, leaves, grad)

    def gates(found: tuple[Tensor, ...], w: sk.BSR, x: Tensor, bias: Tensor, grad: Tensor) -> list[Gate]:
        y, of_values, of_x, of_bias = found
        assert torch.equal(of_bias, grad.sum(0))
        of_w = sk.BSR.unchecked(w.pattern, of_values)
        gate = check_linear(x, w, y, bias)
        return [gate, check_sddmm(grad.mT, x, of_w), check_spmm(w.T, grad.mT, of_x.mT)]

    shapes = (N, K), (M,), (N, M)
    return Subject(lambda: (w(), *(randn(*each, device=device) for each in shapes)), call, gates, repeats=2)


def mask_of(kind: str, device: str) -> sk.BlockMask | None:
    if kind == "window":
        return sk.BlockMask.sliding_window(LENGTH, 100, block=TILE, device=device)
    if kind == "bits":
        draw = torch.Generator(device).manual_seed(3)
        return sk.BlockMask.from_dense(torch.rand(LENGTH, LENGTH, generator=draw, device=device) > 0.4, TILE)
    if kind == "heads":
        scores = torch.rand(1, HEADS[0], LENGTH // TILE, LENGTH // TILE, device=device)
        return sk.BlockMask.topk(scores, 2, causal=True, seq_len=LENGTH, block=TILE)
    return None


def qkv(device: str, packed: bool = False) -> Operands:
    heads = (HEADS[0], HEADS[1], HEADS[1])
    if packed:  # as of one product: views of its rows
        rows = randn(2, LENGTH, sum(heads) * DIM, device=device).unflatten(2, (-1, DIM)).transpose(1, 2)
        return rows.split(heads, 1)
    return tuple(randn(2, each, LENGTH, DIM, device=device) for each in heads)


def attention(kind: str, packed: bool = False, lse: bool = False) -> Callable[[str], Subject]:
    def make(device: str) -> Subject:
        mask = mask_of(kind, device)
        seen = mask or sk.BlockMask.full(q_len=LENGTH, kv_len=LENGTH, device=device)

        def gates(found: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Gate]:
            return [check_attention(q, k, v, seen, *(found if lse else (found,)))]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return sk.attention(q, k, v, mask, return_lse=lse)

        return Subject(lambda: qkv(device, packed), call, gates, fixed=0)

    return make


def learned_attention(kind: str) -> Callable[[str], Subject]:
    """Attention and its gradients."""

    def make(device: str) -> Subject:
        mask = mask_of(kind, device)
        seen = mask or sk.BlockMask.full(q_len=LENGTH, kv_len=LENGTH, device=device)

        def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = sk.attention(leaves[0], leaves[1], leaves[2], mask)
            return out, *torch.autograd.grad(out, leaves, grad)

        def gates(found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Gate]:
            backward = check_attention_backward(q, k, v, seen, grad, found[1:])
            return [check_attention(q, k, v, seen, found[0]), backward]

        def draw() -> Operands:
            return *qkv(device), randn(2, HEADS[0], LENGTH, DIM, device=device)

        return Subject(draw, call, gates, repeats=2, fixed=0)

    return make


def strided24(storage: str) -> Callable[[str], Subject]:
    """A @ B of a 2:4 matrix, and x @ A, which another kernel does."""

    def make(device: str) -> Subject:
        a = weights(storage, M, K, device)
        return Subject(
            lambda: (a(), randn(K, N, device=device), randn(N, M, device=device)),
            lambda a, b, x: (a @ b, x @ a),
            lambda found, a, b, x: [
                check_spmm(a, b, found[0]),
                check_spmm(a, x.mT, found[1].mT, transposed=True),
            ],
            repeats=2,
        )

    return make


STORAGES = ("bsr", "semi24", "bsr24", "bsr-fp8", "semi24-fp8", "bsr24-fp8")
SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "A @ B": times,
    "x @ A": before,
    "FP8 @ FP8": fp8_times,
    "out=": into,
    "out= and beta": added,
    "plan(A, B)": by_plan,
    "A @ b": skinny,
    **{f"linear {storage}": layer(storage) for storage in STORAGES},
    "linear of copies": copied,
    "swiglu": gated,
    "quantize": rounded,
    "products semi24": strided24("semi24"),
    "sddmm": sampled,
    "A @ B, gradients": learned,
    "linear, gradients": learned_layer,
    **{f"attention {kind}": attention(kind) for kind in ("full", "window", "bits", "heads")},
    "attention packed": attention("window", packed=True),
    "attention lse": attention("window", lse=True),
    **{f"attention {kind}, gradients": learned_attention(kind) for kind in ("full", "window", "bits")},
}
