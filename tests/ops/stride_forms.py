"""Every operation as a form for the stride zoo: which dense operands it has, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from sparsek.products.formats.quantized import Scale
from sparsek.products.reference.epilogue import Activation
from tests.ops.stride_walk import Form, Operands, Shapes, Sizes
from tests.ops.strides import StrideLayout

Call = Callable[[Any, Operands, str | None], Any]

E4M3 = torch.float8_e4m3fn
SIZES = (Sizes(), Sizes(n=1), Sizes(m=1), Sizes(k=1), Sizes(batch=1), Sizes(1, 1, 1, 1))


def _bsr(s: Sizes, dtype: torch.dtype, device: str, rows: str = "m", columns: str = "k") -> sk.BSR:
    sides = getattr(s, rows), getattr(s, columns)
    return sk.random_bsr(*sides, s.block, 0.6, dtype=dtype, device=device, seed=5)


def _bsr_view(s: Sizes, dtype: torch.dtype, device: str) -> sk.BSR:
    return _bsr(s, dtype, device, "k", "m").T


def _semi24(s: Sizes, dtype: torch.dtype, device: str) -> sk.Semi24:
    return sk.Semi24.from_dense(_bsr(s._replace(block=16), dtype, device).to_dense())


def _bsr24(s: Sizes, dtype: torch.dtype, device: str) -> sk.BSR24:
    return sk.BSR24.from_bsr(_bsr(s, dtype, device))


def _quantized(make: Callable[[Sizes, torch.dtype, str], Any], scale: Scale = "row") -> Any:
    return lambda s, dtype, device: sk.quantize(make(s, dtype, device), E4M3, scale)


def _two(s: Sizes, dtype: torch.dtype, device: str) -> tuple[sk.BSR, sk.BSR]:
    return _bsr(s, dtype, device), sk.random_bsr(s.m, s.k, s.block, 0.6, dtype=dtype, device=device, seed=6)


def _grown(s: Sizes, device: str = "cpu") -> sk.BlockPattern:
    """Where C = A @ A2.T is wanted."""
    return sk.random_bsr(s.m, s.m, s.block, 0.7, device=device, seed=7).pattern


def _grown_on(a: sk.BSR) -> sk.BlockPattern:
    return _grown(Sizes(m=a.shape[0], block=a.block[0]), str(a.device))


def _mask(s: Sizes, dtype: torch.dtype, device: str) -> sk.BlockMask:
    return sk.BlockMask.sliding_window(s.m, 70, block=64, device=device)


def _nothing(s: Sizes, dtype: torch.dtype, device: str) -> None:
    return None


def _out_may_be_refused(layout: StrideLayout, x: Tensor) -> bool:
    """`out` has contiguous rows and its own memory, or is refused."""
    return not layout.own or (x.stride(-1) != 1 and x.shape[-1] > 1)


def _into(A: Any, B: Any, o: Operands, kernel: str | None, beta: float = 0.0) -> Tensor:
    sk.spmm(A, B, out=o["out"], beta=beta, kernel=kernel)
    return o["out"]


def _linear(activation: Activation | None) -> Call:
    return lambda W, o, kernel: sk.linear(o["x"], W, o["bias"], activation, o["residual"], kernel=kernel)


def _shapes(operands: str) -> Callable[[Sizes], Shapes]:
    """Those of "B kn, dC 2mn": names with their dims, where b is the batch, D is 32 and digits are themselves."""
    named = [each.split() for each in operands.split(", ")]

    def shapes(s: Sizes) -> Shapes:
        sides = {"m": s.m, "k": s.k, "n": s.n, "b": s.batch, "D": 32}
        return {name: tuple(sides.get(dim) or int(dim) for dim in dims) for name, dims in named}

    return shapes


def _form(
    name: str, op: str, make: Any, operands: str | Callable[[Sizes], Shapes], call: Call, **more: Any
) -> Form:
    """Names that begin with d are gradients of what the call returns: the others learn then. It writes `out`."""
    shapes = _shapes(operands) if isinstance(operands, str) else operands
    names = tuple(shapes(Sizes()))
    grads = tuple(each for each in names if each.startswith("d"))
    if "out" in names:
        more |= {"written": "out", "refuses": {"out": _out_may_be_refused}}
    return Form(name, op, make, shapes, call, names[: -len(grads)] if grads else (), grads=grads, **more)


LAYER = "x bnk, bias m, residual bnm, dy bnm"
TOKENS = "x nk, bias m, residual nm, dy nm"


def _products(kind: str, make: Any, *, values: bool = False) -> tuple[Form, ...]:
    """spmm and linear with a matrix [m, k] of one kind, on either side. `values`: these learn too."""

    def learning(name: str, operands: str, call: Call, values: bool = values, **more: Any) -> Form:
        return _form(f"{kind} {name}", kind, make, operands, call, values=values, **more)

    def written(name: str, operands: str, call: Call) -> Form:
        return _form(f"{kind} {name}", kind, make, operands, call)

    return (
        learning("A @ B", "B kn, dC mn", lambda A, o, k: sk.spmm(A, o["B"], kernel=k)),
        learning("A @ B batch", "B bkn, dC bmn", lambda A, o, k: sk.spmm(A, o["B"], alpha=0.5, kernel=k)),
        learning("X @ A", "X nm, dC nk", lambda A, o, k: sk.spmm(o["X"], A, kernel=k)),
        learning("X @ A batch", "X bnm, dC bnk", lambda A, o, k: sk.spmm(o["X"], A, kernel=k)),
        written("A @ B + out", "B kn, out mn", lambda A, o, k: _into(A, o["B"], o, k, 0.5)),
        written("X @ A batch + out", "X bnm, out bnk", lambda A, o, k: _into(o["X"], A, o, k, 2.0)),
        learning("linear", LAYER, _linear(None)),
        learning("linear silu", TOKENS, _linear("silu")),
        learning("linear relu", TOKENS, _linear("relu"), steps=True),
        learning("swiglu", "x bnk, dy bnm", lambda W, o, k: sk.swiglu(o["x"], W, W, kernel=k), values=False),
    )


def _fp8(kind: str, op: str, make: Any) -> tuple[Form, ...]:
    """Products in FP8, of a tensor that is rounded and of one that was. No gradients."""

    def linear_of_quantized(W: Any, o: Operands, k: str | None) -> Tensor:
        x = sk.quantize(o["x"])
        return sk.linear(x, W, o["bias"], None, o["residual"], kernel=k, dtype=o["x"].dtype)

    calls: dict[str, tuple[str, Call]] = {
        "A @ B": ("B bkn", lambda A, o, k: sk.spmm(A, o["B"], kernel=k)),
        "A @ B + out": ("B kn, out mn", lambda A, o, k: _into(A, o["B"], o, k)),
        "linear": (LAYER.removesuffix(", dy bnm"), _linear("silu")),
        "linear of a quantized x": (TOKENS.removesuffix(", dy nm"), linear_of_quantized),
        "swiglu": ("x nk", lambda W, o, k: sk.swiglu(o["x"], W, W, kernel=k)),
    }
    return tuple(_form(f"{kind} {name}", op, make, *call, fp8=True) for name, call in calls.items())


def _attention(mask: Any, o: Operands, kernel: str | None) -> tuple[Tensor, Tensor]:
    return sk.attention(o["q"], o["k"], o["v"], mask, return_lse=True, kernel=kernel)


def _varlen(mask: Any, o: Operands, kernel: str | None) -> Tensor:
    length = o["q"].shape[0]
    ends = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cpu")
    return sk.attention_varlen(o["q"], o["k"], o["v"], ends, mask=sk.MaskPolicy())


def _merged(_: Any, o: Operands, kernel: str | None) -> tuple[Tensor, Tensor]:
    return sk.merge_attention(o["o1"], o["lse1"], o["o2"], o["lse2"])


def _sampled(A: sk.BSR, o: Operands, kernel: str | None) -> sk.BSR:
    return sk.sddmm(o["X"], o["Y"], A.pattern, kernel=kernel)


def _blocks(name: str, pattern: Callable[[Sizes], sk.BlockPattern]) -> Callable[[Sizes], Shapes]:
    return lambda s: {name: (pattern(s).nnzb, s.block, s.block)}


def _packed(pack: Callable[[Tensor], Any], *parts: str) -> Call:
    return lambda _, o, k: tuple(getattr(pack(o["w"]), part) for part in parts)


FORMS: tuple[Form, ...] = (
    *_products("bsr", _bsr, values=True),
    _form(
        "bsr A.T @ B",
        "bsr",
        _bsr_view,
        "B kn, dC mn",
        lambda A, o, k: sk.spmm(A, o["B"], kernel=k),
        values=True,
    ),
    _form(
        "bsr X @ A.T",
        "bsr",
        _bsr_view,
        "X nm, dC nk",
        lambda A, o, k: sk.spmm(o["X"], A, kernel=k),
        values=True,
    ),
    _form("sddmm", "sddmm", _bsr, "X mn, Y nk", _sampled),
    _form(
        "sddmm with gradients",
        "sddmm",
        _bsr,
        lambda s: {
            **_shapes("X mn, Y nk")(s),
            **_blocks("dS", lambda s: _bsr(s, torch.float32, "cpu").pattern)(s),
        },
        _sampled,
    ),
    _form(
        "spgemm to dense",
        "spgemm",
        _two,
        "dC mm",
        lambda two, o, k: sk.spgemm(two[0], two[1].T, kernel=k),
        values=True,
    ),
    _form(
        "spgemm at a pattern",
        "spgemm",
        _two,
        _blocks("dC", _grown),
        lambda two, o, k: sk.spgemm(two[0], two[1].T, out=_grown_on(two[0]), kernel=k),
        values=True,
    ),
    *_products("semi24", _semi24),
    *_products("bsr24", _bsr24),
    *_fp8("bsr fp8", "bsr_fp8", _quantized(_bsr)),
    *_fp8("bsr fp8 scaled by blocks", "bsr_fp8", _quantized(_bsr, "block")),
    *_fp8("semi24 fp8", "semi24_fp8", _quantized(_semi24)),
    *_fp8("bsr24 fp8", "bsr24_fp8", _quantized(_bsr24)),
    _form(
        "attention",
        "attention",
        _mask,
        "q b2mD, k b1mD, v b1mD, dout b2mD, dlse b2m",
        _attention,
        wide=("dlse",),
    ),
    _form("attention of packed documents", "", _nothing, "q m2D, k m1D, v m1D, dout m2D", _varlen),
    _form(
        "merge_attention",
        "",
        _nothing,
        "o1 bmn, lse1 bm, o2 bmn, lse2 bm, do bmn, dlse bm",
        _merged,
        wide=("lse1", "lse2", "dlse"),
    ),
    *(
        _form(f"dense to {name}", "", make, "w mk", call, exact=True)
        for name, make, call in (
            ("BSR", _nothing, lambda _, o, k: sk.BSR.from_dense(o["w"], 64, keep=0.5)),
            ("Semi24", _semi24, _packed(sk.Semi24.from_dense, "values", "meta")),
            ("FP8", _nothing, _packed(sk.quantize, "values", "scale")),
            (
                "FP8 with one scale",
                _nothing,
                _packed(partial(sk.quantize, scale="tensor"), "values", "scale"),
            ),
        )
    ),
)
