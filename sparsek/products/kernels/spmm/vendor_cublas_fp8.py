"""vendor.cublas_fp8: an FP8 matrix written out dense, then torch._scaled_mm (cuBLAS on a GPU).

    A dense FP8 [M, K]                                       made once per tensor of values
    one scale for all of A and of B, or one a row and one a column     applied by torch._scaled_mm

Runs only by name, because it keeps a dense copy of A, one byte per element. All plans share the copy, which lives as
long as the values. It is renewed after a write to them (`Tensor._version`), and made anew in CUDA graph capture.

Sums are float32, unless A's `fast_accum` lets the tensor cores keep them (torch's use_fast_accum).

torch applies the scales if C is bf16, and the bias if C is column-major, as in `linear`. Everything else follows in
float32: scales, alpha, bias, activation, another matrix; then C is rounded once. The dense copy has zeros for missing
blocks, so a NaN in a row of B reaches every row of C.
"""

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core.streams import Contents, Ready, captured, wait_for
from sparsek.engine.plan.dense import dense_seconds
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Matrix, Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import FP8
from sparsek.products.kernels.spmm.vendor_dense import unless_fits
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.operands import is_readable, readable
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

UNIT = 16  # sides of the operands that torch requires


@dataclass(frozen=True)
class CublasConfig:
    """A config without choices: cuBLAS chooses. `fast`: the problem's `fast_accum`."""

    fast: bool = False

    def __repr__(self) -> str:
        return f"dense FP8 copy of A, torch._scaled_mm with {'fast sums' if self.fast else 'sums in float32'}"


class Dense:
    """One A as a dense FP8 matrix, and what its values held."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None
        self.of_matrix: Any = lambda: None
        self.held: Contents | None = None
        self.made: Ready | None = None

    def of(self, a: Matrix) -> Tensor:
        """The copy, made anew unless the values are known to be unchanged."""
        values = a.values
        capturing, held = captured(values), Contents.of(values)
        identity = a.meta if isinstance(a, Semi24) else a.pattern
        fresh = held is not None and held == self.held and self.of_matrix() is identity
        if self.copy is not None and fresh:
            if self.made is not None and not capturing:
                wait_for(self.made, (self.copy,))
            return self.copy
        copy = written_out(a)
        if not capturing:  # memory made in capture belongs to the graph
            self.copy, self.of_matrix = copy, weakref.ref(identity)
            self.held = held
            self.made = Ready.here(copy.device)
        return copy


_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # values -> {is a view: Dense}


def written_out(a: Matrix) -> Tensor:
    """The FP8 values of `a` as a dense [M, K], contiguous, without scales; by way of bf16, which is exact."""
    wide = a._each(lambda values: values.to(torch.bfloat16))
    return wide.to_dense().to(a.values.dtype).contiguous()


class VendorCublasFp8:
    """The dense product in FP8, as torch calls it."""

    name = "vendor.cublas_fp8"
    only_by_name = "it keeps a dense copy of A"

    def why_not(self, p: Any) -> list[str]:
        if foreign := p.a.unless(*FP8):
            return foreign
        why = []
        if not p.on_cpu and p.card.capability < (8, 9):
            why.append(f"FP8 tensor cores came with compute capability 8.9; {p.card.name} has none")
        if p.a.scale == "block":
            why.append("a scale per block of A lies inside the sums, where the library applies none")
        if (p.dtype, p.b.dtype) == ("e5m2", "e5m2"):
            why.append("the library multiplies no E5M2 with E5M2")
        if p.k % UNIT or p.c_row % UNIT or not p.k:
            side = "M" if p.c.layout == "col" else "N"
            why.append(f"K and {side} must be multiples of {UNIT}, not {p.k} and {p.c_row}")
        return why + unless_fits("the dense copy of A takes", p.m * p.k, p.card)

    def default(self, p: SpmmProblem) -> CublasConfig:
        return CublasConfig(p.a.fast_accum)

    def configs(self, p: SpmmProblem) -> Iterable[CublasConfig]:
        return [self.default(p)]

    def seconds(self, p: Any, c: CublasConfig) -> float:
        """The dense product (engine/plan/dense.py), and passes over C in float32 for what torch._scaled_mm leaves."""
        product = dense_seconds(p.card, "fp8", p.n * p.batch, p.m, p.k)
        along = p.c.dtype == "bf16" and not (p.has_alpha or p.activation or p.combine)
        along = along and (p.c.layout == "col" or not p.bias)
        parts = 0 if along else 3 + p.has_alpha + p.bias + bool(p.activation) + 2 * bool(p.combine)
        finished = 2 * 4 * parts * p.m * p.n * p.batch / p.card.bandwidth
        return product + finished + (p.batch - 1 + parts) * p.card.launch_seconds + rounding_seconds(p)

    def prepare(self, p: SpmmProblem, c: CublasConfig, a: Quantized) -> None:
        with torch.no_grad():
            _dense(a.matrix)

    def launch(
        self,
        c: CublasConfig,
        work: None,
        a: Quantized,
        b: QuantizedTensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad(), torch.cuda.device_of(out):
            dense = _dense(a.matrix)
            for at in np.ndindex(*out.shape[:-2]):
                other = None if epilogue.other is None else epilogue.other[at]
                scale = b.scale[at] if b.kind == "row" else b.scale
                one = QuantizedTensor.unchecked(b.values[at], scale, True)
                _multiply(dense, a.scale, one, out[at], replace(epilogue, other=other), c.fast)


def _dense(a: Matrix) -> Tensor:
    kept: Any = _COPIES.setdefault(a.values, {})
    view = isinstance(a, BSR) and a.order is not None
    return kept.setdefault(view, Dense()).of(a)


def _multiply(
    dense: Tensor, a_scale: Tensor, b: QuantizedTensor, out: Tensor, epilogue: Epilogue, fast: bool
) -> None:
    """Writes one product of dense [M, K] and B [K, N], with the epilogue."""
    by_columns = out.stride(-2) == 1 and out.stride(-1) != 1
    left, right, c = (b.values, dense.mT, out.mT) if by_columns else (dense, b.values.mT, out)
    along = readable(epilogue.bias) if by_columns and epilogue.bias is not None else None
    rest = replace(epilogue, bias=None) if by_columns and epilogue.alpha == 1 else epilogue
    of_left, of_right = (b.scale, a_scale) if by_columns else (a_scale, b.scale)
    by_rows = bool(a_scale.ndim or b.scale.ndim)
    if out.dtype == torch.bfloat16 and rest.is_plain and (not by_rows or _takes_rows(left, right)):
        if by_rows:
            of_left = of_left.expand(left.shape[0]).contiguous().unsqueeze(1)
            of_right = of_right.expand(right.shape[1]).contiguous().unsqueeze(0)
        how: dict[str, Any] = {"bias": along, "out_dtype": out.dtype, "use_fast_accum": fast}
        if is_readable(c) and c.stride(-2) >= c.shape[-1]:
            torch._scaled_mm(left, right, of_left, of_right, **how, out=c)
        else:
            c.copy_(torch._scaled_mm(left, right, of_left, of_right, **how))
        return
    one = torch.ones((), dtype=torch.float32, device=out.device)
    z = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    z = z * (of_left.unsqueeze(-1) if of_left.ndim else of_left) * of_right
    out.copy_(epilogue.apply(z.mT if by_columns else z))


def _takes_rows(left: Tensor, right: Tensor) -> bool:
    """Whether torch has a kernel with row scales for these operands."""
    if not left.dtype == right.dtype == torch.float8_e4m3fn:
        return False
    return torch.cuda.get_device_capability(left.device) >= (9, 0) if left.is_cuda else has_rows_on_a_cpu()


@functools.cache
def has_rows_on_a_cpu() -> bool:
    """Whether torch takes row scales on a CPU; torch 2.11 fails in an assertion of its own."""
    x = torch.zeros(UNIT, UNIT, dtype=torch.float8_e4m3fn, device="cpu")
    scale = torch.ones(UNIT, 1, dtype=torch.float32, device="cpu")
    try:
        torch._scaled_mm(x, x.mT, scale, scale.mT, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


KERNEL: SpmmKernel = VendorCublasFp8()
