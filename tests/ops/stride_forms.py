"""Every operation as a form for the stride zoo: which dense operands it has, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from sparsek.products.formats.quantized import Scale
from sparsek.products.reference.epilogue import Activation
from sparsek.testing.strides import StrideLayout
from tests.ops.stride_walk import Form, Operands, Shapes, Sizes

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


def _into(A: Any, B: Any, o: Operands, kernel: str | None, **more: Any) -> Tensor:
    sk.spmm(A, B, out=o["out"], kernel=kernel, **more)
    return o["out"]


def _left(s: Sizes) -> Shapes:
    return {"B": (s.k, s.n), "dC": (s.m, s.n)}


def _left_batch(s: Sizes) -> Shapes:
    return {"B": (s.batch, s.k, s.n), "dC": (s.batch, s.m, s.n)}


def _right(s: Sizes) -> Shapes:
    return {"X": (s.n, s.m), "dC": (s.n, s.k)}


def _right_batch(s: Sizes) -> Shapes:
    return {"X": (s.batch, s.n, s.m), "dC": (s.batch, s.n, s.k)}


def _layer(s: Sizes) -> Shapes:
    return {
        "x": (s.batch, s.n, s.k),
        "bias": (s.m,),
        "residual": (s.batch, s.n, s.m),
        "dy": (s.batch, s.n, s.m),
    }


def _tokens(s: Sizes) -> Shapes:
    return {"x": (s.n, s.k), "bias": (s.m,), "residual": (s.n, s.m), "dy": (s.n, s.m)}


def _without(shapes: Callable[[Sizes], Shapes], *names: str) -> Callable[[Sizes], Shapes]:
    return lambda s: {name: shape for name, shape in shapes(s).items() if name not in names}


def _with_out(shapes: Callable[[Sizes], Shapes]) -> Callable[[Sizes], Shapes]:
    return lambda s: {("out" if name == "dC" else name): shape for name, shape in shapes(s).items()}


def _linear(activation: Activation | None) -> Callable[[Any, Operands, str | None], Tensor]:
    return lambda W, o, kernel: sk.linear(o["x"], W, o["bias"], activation, o["residual"], kernel=kernel)


BSR_LEARNS: dict[str, Any] = {"values": True}
OUT: dict[str, Any] = {"written": "out", "refuses": {"out": _out_may_be_refused}}


def _products(kind: str, op: str, make: Any, view: Any, learn: bool) -> tuple[Form, ...]:
    """spmm and linear with a matrix of one kind. `view`: X @ A by a matrix [m, k] too."""
    values: dict[str, Any] = {"values": learn}
    return (
        Form(
            f"{kind} A @ B",
            op,
            make,
            _left,
            lambda A, o, k: sk.spmm(A, o["B"], kernel=k),
            ("B",),
            grads=("dC",),
            **values,
        ),
        Form(
            f"{kind} A @ B batch",
            op,
            make,
            _left_batch,
            lambda A, o, k: sk.spmm(A, o["B"], alpha=0.5, kernel=k),
            ("B",),
            grads=("dC",),
            **values,
        ),
        Form(
            f"{kind} X @ A",
            op,
            view,
            _right,
            lambda A, o, k: sk.spmm(o["X"], A, kernel=k),
            ("X",),
            grads=("dC",),
            **values,
        ),
        Form(
            f"{kind} X @ A batch",
            op,
            view,
            _right_batch,
            lambda A, o, k: sk.spmm(o["X"], A, kernel=k),
            ("X",),
            grads=("dC",),
            **values,
        ),
        Form(
            f"{kind} A @ B + out",
            op,
            make,
            _with_out(_left),
            lambda A, o, k: _into(A, o["B"], o, k, beta=0.5),
            **OUT,
        ),
        Form(
            f"{kind} X @ A batch + out",
            op,
            view,
            _with_out(_right_batch),
            lambda A, o, k: _into(o["X"], A, o, k, beta=2.0),
            **OUT,
        ),
        Form(
            f"{kind} linear",
            op,
            make,
            _layer,
            _linear(None),
            ("x", "bias", "residual"),
            grads=("dy",),
            **values,
        ),
        Form(
            f"{kind} linear silu",
            op,
            make,
            _tokens,
            _linear("silu"),
            ("x", "bias", "residual"),
            grads=("dy",),
            **values,
        ),
        Form(
            f"{kind} linear relu",
            op,
            make,
            _tokens,
            _linear("relu"),
            ("x", "bias", "residual"),
            grads=("dy",),
            steps=True,
            **values,
        ),
        Form(
            f"{kind} swiglu",
            op,
            make,
            _without(_layer, "bias", "residual"),
            lambda W, o, k: sk.swiglu(o["x"], W, W, kernel=k),
            ("x",),
            grads=("dy",),
        ),
    )


def _fp8(kind: str, op: str, make: Any) -> tuple[Form, ...]:
    """Products in FP8, of a tensor that is rounded and of one that was. No gradients."""
    return (
        Form(
            f"{kind} A @ B",
            op,
            make,
            _without(_left_batch, "dC"),
            lambda A, o, k: sk.spmm(A, o["B"], kernel=k),
            fp8=True,
        ),
        Form(
            f"{kind} A @ B + out",
            op,
            make,
            _with_out(_left),
            lambda A, o, k: _into(A, o["B"], o, k),
            fp8=True,
            **OUT,
        ),
        Form(f"{kind} linear", op, make, _without(_layer, "dy"), _linear("silu"), fp8=True),
        Form(
            f"{kind} linear of a quantized x",
            op,
            make,
            _without(_tokens, "dy"),
            lambda W, o, k: sk.linear(
                sk.quantize(o["x"]), W, o["bias"], None, o["residual"], kernel=k, dtype=o["x"].dtype
            ),
            fp8=True,
        ),
        Form(
            f"{kind} swiglu",
            op,
            make,
            _without(_tokens, "bias", "residual", "dy"),
            lambda W, o, k: sk.swiglu(o["x"], W, W, kernel=k),
            fp8=True,
        ),
    )


def _qkv(s: Sizes) -> Shapes:
    heads = (s.batch, 1, s.m, 32)
    return {
        "q": (s.batch, 2, s.m, 32),
        "k": heads,
        "v": heads,
        "dout": (s.batch, 2, s.m, 32),
        "dlse": (s.batch, 2, s.m),
    }


def _packed_qkv(s: Sizes) -> Shapes:
    heads = (s.m, 1, 32)
    return {"q": (s.m, 2, 32), "k": heads, "v": heads, "dout": (s.m, 2, 32)}


def _attention(mask: Any, o: Operands, kernel: str | None) -> tuple[Tensor, Tensor]:
    return sk.attention(o["q"], o["k"], o["v"], mask, return_lse=True, kernel=kernel)


def _varlen(mask: Any, o: Operands, kernel: str | None) -> Tensor:
    length = o["q"].shape[0]
    ends = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cpu")
    return sk.attention_varlen(o["q"], o["k"], o["v"], ends, mask=sk.MaskPolicy())


def _parts(s: Sizes) -> Shapes:
    o, lse = (s.batch, s.m, s.n), (s.batch, s.m)
    return {"o1": o, "lse1": lse, "o2": o, "lse2": lse, "do": o, "dlse": lse}


def _weight(s: Sizes) -> Shapes:
    return {"w": (s.m, s.k)}


FORMS: tuple[Form, ...] = (
    *_products("bsr", "bsr", _bsr, _bsr, True),
    Form(
        "bsr A.T @ B",
        "bsr",
        _bsr_view,
        _left,
        lambda A, o, k: sk.spmm(A, o["B"], kernel=k),
        ("B",),
        True,
        ("dC",),
    ),
    Form(
        "bsr X @ A.T",
        "bsr",
        _bsr_view,
        _right,
        lambda A, o, k: sk.spmm(o["X"], A, kernel=k),
        ("X",),
        True,
        ("dC",),
    ),
    Form(
        "sddmm",
        "sddmm",
        _bsr,
        lambda s: {"X": (s.m, s.n), "Y": (s.n, s.k)},
        lambda A, o, k: sk.sddmm(o["X"], o["Y"], A.pattern, kernel=k),
    ),
    Form(
        "sddmm with gradients",
        "sddmm",
        _bsr,
        lambda s: {
            "X": (s.m, s.n),
            "Y": (s.n, s.k),
            "dS": (_bsr(s, torch.float32, "cpu").nnzb, s.block, s.block),
        },
        lambda A, o, k: sk.sddmm(o["X"], o["Y"], A.pattern, kernel=k),
        ("X", "Y"),
        False,
        ("dS",),
    ),
    Form(
        "spgemm to dense",
        "spgemm",
        _two,
        lambda s: {"dC": (s.m, s.m)},
        lambda two, o, k: sk.spgemm(two[0], two[1].T, kernel=k),
        (),
        True,
        ("dC",),
    ),
    Form(
        "spgemm at a pattern",
        "spgemm",
        _two,
        lambda s: {"dC": (_grown(s).nnzb, s.block, s.block)},
        lambda two, o, k: sk.spgemm(two[0], two[1].T, out=_grown_on(two[0]), kernel=k),
        (),
        True,
        ("dC",),
    ),
    *_products("semi24", "semi24", _semi24, _semi24, False),
    *_products("bsr24", "bsr24", _bsr24, _bsr24, False),
    *_fp8("bsr fp8", "bsr_fp8", _quantized(_bsr)),
    *_fp8("bsr fp8 scaled by blocks", "bsr_fp8", _quantized(_bsr, "block")),
    *_fp8("semi24 fp8", "semi24_fp8", _quantized(_semi24)),
    *_fp8("bsr24 fp8", "bsr24_fp8", _quantized(_bsr24)),
    Form(
        "attention",
        "attention",
        _mask,
        _qkv,
        _attention,
        ("q", "k", "v"),
        False,
        ("dout", "dlse"),
        wide=("dlse",),
    ),
    Form(
        "attention of packed documents", "", _nothing, _packed_qkv, _varlen, ("q", "k", "v"), False, ("dout",)
    ),
    Form(
        "merge_attention",
        "",
        _nothing,
        _parts,
        lambda _, o, k: sk.merge_attention(o["o1"], o["lse1"], o["o2"], o["lse2"]),
        ("o1", "lse1", "o2", "lse2"),
        False,
        ("do", "dlse"),
        wide=("lse1", "lse2", "dlse"),
    ),
    Form(
        "dense to BSR",
        "",
        _nothing,
        _weight,
        lambda _, o, k: sk.BSR.from_dense(o["w"], 64, keep=0.5),
        exact=True,
    ),
    Form(
        "dense to Semi24",
        "",
        _semi24,
        _weight,
        lambda _, o, k: (sk.Semi24.from_dense(o["w"]), sk.Semi24.from_dense(o["w"]).meta),
        exact=True,
    ),
    Form(
        "dense to FP8",
        "",
        _nothing,
        _weight,
        lambda _, o, k: (sk.quantize(o["w"]).values, sk.quantize(o["w"]).scale),
        exact=True,
    ),
    Form(
        "dense to FP8 with one scale",
        "",
        _nothing,
        _weight,
        lambda _, o, k: (
            sk.quantize(o["w"], scale="tensor").values,
            sk.quantize(o["w"], scale="tensor").scale,
        ),
        exact=True,
    ),
)
