"""Right results of sums in several orders, and planted faults, for every operation's error budget.

`python -m tests.reference.planted 1000` counts over so many seeds which right results fail and which faults pass. Names
of operations after it are those that are looked at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.attention_budget import check_attention, check_attention_backward
from sparsek.testing.budget import CORE, check_spmm
from sparsek.testing.product_budget import check_sddmm, check_spgemm, stored

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = BF16, FP16, F32
LOWER = {BF16: (torch.float8_e4m3fn,), FP16: (BF16,), F32: (BF16, FP16)}

# [..., M, K] @ [..., K, N] in float32, in some order of K.
Add = Callable[[Tensor, Tensor], Tensor]


def _terms(left: Tensor, right: Tensor) -> Tensor:
    """Every product in float32: [K, ..., M, N]."""
    return (left.unsqueeze(-1) * right.unsqueeze(-3)).movedim(-2, 0)


def sequential(left: Tensor, right: Tensor) -> Tensor:
    total = torch.zeros(())
    for term in _terms(left, right):
        total = total + term
    return total


def reverse(left: Tensor, right: Tensor) -> Tensor:
    return sequential(left.flip(-1), right.flip(-2))


def pairwise(left: Tensor, right: Tensor) -> Tensor:
    terms = _terms(left, right)
    while len(terms) > 1:
        half = len(terms) // 2
        terms = torch.cat((terms[:half] + terms[half : 2 * half], terms[2 * half :]))
    return terms[0]


def blocked(left: Tensor, right: Tensor, step: int = 16) -> Tensor:
    parts = zip(left.split(step, -1), right.split(step, -2), strict=True)
    total = torch.zeros(())
    for each in parts:
        total = total + sequential(*each)
    return total


def fused(left: Tensor, right: Tensor, dtype: torch.dtype = F32) -> Tensor:
    """One rounding, to `dtype`, for every product and addition together."""
    total = torch.zeros((), dtype=dtype)
    for term in _terms(left.double(), right.double()):
        total = (total.double() + term).to(dtype)
    return total.float()


ORDERS: dict[str, Add] = {
    "sequential": sequential,
    "reversed": reverse,
    "pairwise": pairwise,
    "blocked": blocked,
    "fused": fused,
}


class Trial(NamedTuple):
    """One draw of an operation.

    `compute(add, fault)` gives its results in float32, with a block "left out" or at a "wrong index". "in steps" is no
    fault: an epilogue whose every step is rounded to the dtype. `judge` takes results as they are stored.
    """

    compute: Callable[[Add, str], list[Tensor]]
    judge: Callable[[list[Tensor]], bool]
    narrow: bool = False  # kernels may round what is summed to the dtype


def _matrix(seed: int, dtype: torch.dtype, shape: tuple[int, int] = (64, 96), block: int = 16) -> BSR:
    """Half of its blocks are stored."""
    return random_bsr(*shape, block, 0.5, dtype=dtype, device="cpu", seed=seed)


def _damaged(a: BSR, fault: str) -> Tensor:
    """A in float32, dense. The last block at a wrong index swaps places with the block in the next column."""
    dense = a.to_dense().float()
    row, column = int(a.pattern.block_rows[-1]), int(a.pattern.indices[-1])
    strip = dense.view(*a.grid[:1], a.block[0], *a.grid[1:], a.block[1])[row]
    if fault == "left out":
        strip[:, column] = 0
    elif fault == "wrong index":
        other = (column + 1) % a.grid[1]
        strip[:, [column, other]] = strip[:, [other, column]]
    return dense


def _normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spmm(seed: int, dtype: torch.dtype) -> Trial:
    a, b = _matrix(seed, dtype), _normal(seed, 96, 24, dtype=dtype)
    return Trial(
        lambda add, fault: [add(_damaged(a, fault), b.float())], lambda out: check_spmm(a, b, out[0]).passed
    )


def layer(seed: int, dtype: torch.dtype) -> Trial:
    a, b = _matrix(seed, dtype, (64, 384)), _normal(seed, 384, 24, dtype=dtype)
    bias, rest = _normal(seed + 1, 64, dtype=dtype), _normal(seed + 2, 64, 24, dtype=dtype)
    epilogue = Epilogue(alpha=0.7, bias=bias, activation="gelu", other=rest)
    wide = replace(epilogue, bias=bias.float(), other=rest.float())

    def compute(add: Add, fault: str) -> list[Tensor]:
        z = add(_damaged(a, fault), b.float())
        return [epilogue.apply(z.to(dtype)) if fault == "in steps" else wide.apply(z)]

    return Trial(compute, lambda out: check_spmm(a, b, out[0], epilogue).passed)


def sddmm(seed: int, dtype: torch.dtype) -> Trial:
    pattern = _matrix(seed, dtype, (64, 48)).pattern
    x, y = _normal(seed, 64, 96, dtype=dtype), _normal(seed + 1, 96, 48, dtype=dtype)

    def compute(add: Add, fault: str) -> list[Tensor]:
        values = stored(add(x.float(), y.float()), pattern)
        if fault == "left out":
            values[-1] = 0
        elif fault == "wrong index":
            row, column = 16 * int(pattern.block_rows[-1]), 16 * ((int(pattern.indices[-1]) + 1) % 3)
            values[-1] = add(x[row : row + 16].float(), y[:, column : column + 16].float())
        return [values]

    return Trial(compute, lambda out: check_sddmm(x, y, BSR.unchecked(pattern, out[0])).passed)


def spgemm(seed: int, dtype: torch.dtype) -> Trial:
    a, b = _matrix(seed, dtype), random_bsr(96, 48, 16, 1.0, dtype=dtype, device="cpu", seed=seed)
    return Trial(
        lambda add, fault: [add(_damaged(a, fault), b.to_dense().float())],
        lambda out: check_spgemm(a, b, out[0]).passed,
    )


def semi24(seed: int, dtype: torch.dtype) -> Trial:
    a = Semi24.from_dense(_normal(seed, 64, 96, dtype=dtype))
    b = _normal(seed + 1, 96, 24, dtype=dtype)

    def damaged(fault: str) -> Tensor:
        dense = a.to_dense().float()
        if fault == "left out":
            dense[-16:, -16:] = 0
        elif fault == "wrong index":  # of one value: its place in its group of four
            dense[-1, -4:] = dense[-1, -4:].roll(1)
        return dense

    return Trial(
        lambda add, fault: [add(damaged(fault), b.float())], lambda out: check_spmm(a, b, out[0]).passed
    )


def bsr24(seed: int, dtype: torch.dtype) -> Trial:
    packed = BSR24.from_bsr(_matrix(seed, dtype, (128, 256), 64))
    plain, b = packed.to_bsr(), _normal(seed + 1, 256, 24, dtype=dtype)
    return Trial(
        lambda add, fault: [add(_damaged(plain, fault), b.float())],
        lambda out: check_spmm(packed, b, out[0]).passed,
    )


def fp8(seed: int, dtype: torch.dtype, core: float = CORE) -> Trial:
    a = quantize(_matrix(seed, F32, (64, 384)))
    b = quantize(_normal(seed + 1, 24, 384, dtype=F32)).mT
    wide = a.dequantize(F32)
    assert isinstance(wide, BSR)
    return Trial(
        lambda add, fault: [add(_damaged(wide, fault), b.dequantize(F32))],
        lambda out: check_spmm(a, b, out[0], core=core).passed,
    )


class _Attention(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: BlockMask

    def weights(self, add: Add, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of what is seen, and lse, in float32."""
        scores = add(self.q.float(), self.k.float().mT) * self.q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp(), lse

    def seen(self, fault: str) -> Tensor:
        """Of blocks (0, 0), (0, 2), (1, 1) and (1, 2) the last may be left out, or be (1, 0)."""
        seen = self.mask.to_dense().clone()
        if fault in ("left out", "wrong index"):
            seen[..., 64:, 128:] = False
        if fault == "wrong index":
            seen[..., 64:, :64] = True
        return seen


def _attention(seed: int, dtype: torch.dtype) -> _Attention:
    shapes = (1, 1, 128, 16), (1, 1, 192, 16), (1, 1, 192, 24), (1, 1, 128, 24)
    q, k, v, grad = (_normal(seed + at, *shape, dtype=dtype) for at, shape in enumerate(shapes))
    mask = BlockMask.from_blocks([0, 2, 4], [0, 2, 1, 2], 128, 192, 64, device="cpu")
    return _Attention(q, k, v, grad, mask)


def attention(seed: int, dtype: torch.dtype) -> Trial:
    of = _attention(seed, dtype)

    def compute(add: Add, fault: str) -> list[Tensor]:
        weights, _ = of.weights(torch.matmul if add in BAD.values() else add, of.seen(fault))
        return [add(weights, of.v.float())]

    return Trial(compute, lambda out: check_attention(of.q, of.k, of.v, of.mask, out[0]).passed, narrow=True)


def attention_backward(seed: int, dtype: torch.dtype) -> Trial:
    of = _attention(seed, dtype)
    q, k, v, grad = (x.float() for x in of[:4])

    def compute(add: Add, fault: str) -> list[Tensor]:
        inner = torch.matmul if add in BAD.values() else add
        right, lse = of.weights(inner, of.seen(""))
        delta = (grad * inner(right, v).to(dtype).float()).sum(-1, keepdim=True)
        scores = inner(q, k.mT) * q.shape[-1] ** -0.5
        weights = (scores - lse).masked_fill(~of.seen(fault), -torch.inf).exp()
        of_scores = weights * (inner(grad, v.mT) - delta) * q.shape[-1] ** -0.5
        return [add(of_scores, k), add(of_scores.mT, q), add(weights.mT, grad)]

    return Trial(
        compute,
        lambda out: check_attention_backward(of.q, of.k, of.v, of.mask, of.grad, out).passed,
        narrow=True,
    )


TRIALS: dict[str, Callable[[int, torch.dtype], Trial]] = {
    "spmm": spmm,
    "layer": layer,
    "sddmm": sddmm,
    "spgemm": spgemm,
    "semi24": semi24,
    "bsr24": bsr24,
    "fp8": fp8,
    "fp8 in float32": partial(fp8, core=0.0),
    "attention": attention,
    "attention backward": attention_backward,
}
BAD: dict[str, Add] = {
    "sums in bf16": partial(fused, dtype=BF16),
    "sums in fp16": partial(fused, dtype=FP16),
}


def right(trial: Trial, dtype: torch.dtype) -> dict[str, bool]:
    """Whether right results pass: sums in each order, and as kernels may also have it."""

    def narrow(left: Tensor, right: Tensor) -> Tensor:
        """Weights of attention, and their gradients, are rounded for tensor cores."""
        return blocked(left.to(dtype).float(), right.to(dtype).float())

    made = {name: trial.compute(add, "") for name, add in ORDERS.items()}
    made["in steps"] = trial.compute(sequential, "in steps")
    if trial.narrow:
        made["operands rounded"] = trial.compute(narrow, "")
    return {name: trial.judge([x.to(dtype) for x in out]) for name, out in made.items()}


def faults(trial: Trial, seed: int, dtype: torch.dtype) -> dict[str, bool]:
    """Whether each faulty result passes."""
    found = {name: trial.judge([x.to(dtype) for x in trial.compute(add, "")]) for name, add in BAD.items()}
    for fault in ("left out", "wrong index"):
        found[fault] = trial.judge([x.to(dtype) for x in trial.compute(torch.matmul, fault)])
    exact = trial.compute(torch.matmul, "")
    for lower in LOWER[dtype]:
        found[f"rounded to {str(lower).removeprefix('torch.')} before"] = trial.judge(
            [x.to(lower).to(dtype) for x in exact]
        )
    for at in range(len(exact)):
        spoiled = [x.clone() for x in exact]
        rows = spoiled[at].view(-1, exact[at].shape[-1])
        # The largest of a row: of one that is nearly 0 no 2 % can be seen.
        row = rows[seed % len(rows)]
        row[row.abs().argmax()] *= 1.02
        found[f"one element off by 2 % ({at})"] = trial.judge([x.to(dtype) for x in spoiled])
    return found


def main(seeds: int, operations: list[str]) -> None:
    """Counts what is judged wrongly, the dtypes in turn."""
    wrong: Counter[str] = Counter()
    for name in operations or TRIALS:
        for seed in range(seeds):
            dtype = DTYPES[seed % len(DTYPES)]
            trial = TRIALS[name](seed, dtype)
            told = f"{name} {str(dtype).removeprefix('torch.')}"
            wrong.update(
                f"right, refused: {told} {k}" for k, passed in right(trial, dtype).items() if not passed
            )
            wrong.update(
                f"wrong, passed: {told} {k}" for k, passed in faults(trial, seed, dtype).items() if passed
            )
        print(name, "done", flush=True)
    for what, times in sorted(wrong.items()):
        print(f"{times:5d}  {what}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2:])
