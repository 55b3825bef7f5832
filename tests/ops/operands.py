"""One pair of operands, and what is expected of their product."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek.engine.table import names_for
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.storage import TITLES
from sparsek.products.ops import library_args
from sparsek.products.reference.epilogue import Combine, EpilogueActivation
from sparsek.testing.budget import check_spmm

BF16 = torch.bfloat16


def pair(
    m: int = 128, k: int = 96, n: int = 40, block: Any = 32, dtype: torch.dtype = BF16, device: str = "cpu"
) -> tuple[BSR, Tensor]:
    """A with block rows of uneven lengths, and an N(0, 1) matrix B [k, n]."""
    a = random_bsr(m, k, block, 0.5, pattern="powerlaw", dtype=dtype, device=device, seed=0)
    draw = torch.Generator(device).manual_seed(1)
    return a, torch.randn(k, n, generator=draw, dtype=dtype, device=device)


def names_of(storage: str) -> tuple[str, ...]:
    """Names of the kernels of products with such a matrix, or of another operation."""
    return names_for("spmm", storage) if storage in TITLES else names_for(storage)


def op_args(
    a: Any,
    b: Tensor,
    *,
    turned: bool = False,
    b_scale: Tensor | None = None,
    by_columns: bool = False,
    alpha: float = 1.0,
    bias: Any = None,
    act: EpilogueActivation = "",
    other: Any = None,
    combine: Combine = "add",
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> library_args.SpmmArgs:
    """Arguments of `sparsek::spmm` for act(alpha * a @ b + bias) joined with other."""
    how = by_columns, alpha, bias, act, other, combine, b.dtype if dtype is None else dtype, kernel
    return library_args.SpmmArgs(*library_args.parts(a, turned), b, b_scale, *how)


def check(a: BSR, b: Tensor, out: Tensor) -> None:
    assert out.shape == (*b.shape[:-2], a.shape[0], b.shape[-1])
    assert out.dtype == b.dtype
    gate = check_spmm(a, b, out)
    assert gate.passed, f"{a} times {tuple(b.shape)}, strides {b.stride()}: {gate}"


def calls(graph: Any) -> list[str]:
    """Names of the operations in a graph that torch.compile made."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


class Seen(TorchDispatchMode):
    """The names of the operations that run, and the largest tensor that one of them returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        if not func.is_view:
            self.largest = max([self.largest, *(x.numel() for x in made)])
        return out

    @property
    def of_sparsek(self) -> list[str]:
        return [name for name in self.names if name.startswith("sparsek.")]

    def count(self, op: str) -> int:
        return sum(name == f"sparsek.{op}.default" for name in self.names)
