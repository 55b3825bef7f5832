"""Every public function and method of matrices, masks and files, with valid arguments for the fuzz. See `engine.Call`.

To add one: its name as `engine.public_names` gives it, and a function of a `random.Random` that returns what is called
and its arguments by name. Objects made here are shared by all calls: what a call writes to is copied first.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import sparsek as sk
from sparsek.pictures import blocks as spy
from sparsek.pictures import masks
from sparsek.products.formats.quantized import Scale
from tests.fuzz.engine import Call
from tests.integrations.xformers_biases import stand_ins

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@lru_cache
def dense(rows: int = 128, columns: int = 192, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix without zeros."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=dtype) + 0.01


@lru_cache
def two_of_four(rows: int = 128, columns: int = 192, dtype: torch.dtype = torch.float32) -> Tensor:
    return sk.Semi24.from_dense(dense(rows, columns, dtype)).to_dense()


@lru_cache
def bsr(kind: str = "plain") -> sk.BSR:
    if kind == "view":
        return bsr().T
    if kind == "ragged":
        return sk.random_bsr(100, 70, 32, 0.5, seed=1)
    if kind == "empty":
        return sk.random_bsr(128, 192, 64, 0.0)
    if kind == "half":
        return sk.random_bsr(128, 192, 64, 0.5, dtype=torch.bfloat16)
    return sk.random_bsr(128, 192, 64, 0.5)


def any_bsr(random: Random) -> sk.BSR:
    return bsr(random.choice(("plain", "view", "ragged", "empty", "half")))


def any_24(random: Random) -> Any:
    """A Semi24 or BSR24."""
    dtype = random.choice((torch.float32, torch.bfloat16))
    return _24(random.choice((sk.Semi24, sk.BSR24)), dtype)


@lru_cache
def _24(kind: Any, dtype: torch.dtype) -> Any:
    w = dense(dtype=dtype)
    return kind.from_dense(w) if kind is sk.Semi24 else kind.from_dense(w, 64, keep=0.5)


@lru_cache
def scaled(kind: Scale = "row", of: str = "bsr") -> sk.Quantized:
    return sk.quantize(bsr() if of == "bsr" else _24(sk.Semi24, torch.float32), scale=kind)


@lru_cache
def scaled_tensor(turned: bool = False) -> sk.QuantizedTensor:
    made = sk.quantize(dense())
    return made.mT if turned else made


QKV = (torch.randn(1, 4, 100, 32).bfloat16(), torch.randn(1, 2, 130, 32).bfloat16())


@lru_cache
def heads(which: int = 0) -> sk.QuantizedHeads:
    """Queries (0), keys (1) or values (2) in FP8."""
    return sk.quantize_heads(QKV[0], QKV[1], QKV[1], "block", rows=64)[which]


@lru_cache
def mask(kind: str = "causal") -> sk.BlockMask:
    if kind == "window":
        return sk.BlockMask.sliding_window(300, 100, sinks=10, block=64)
    if kind == "heads":
        return sk.BlockMask.bigbird(300, 64, 64, 1, heads=2, block=64)
    if kind == "bits":
        return sk.BlockMask.from_dense(dense(300, 300) > 0, 64)
    if kind == "empty":
        return sk.BlockMask.causal(0, block=64)
    return sk.BlockMask.causal(300, block=64)


def any_mask(random: Random) -> sk.BlockMask:
    return mask(random.choice(("causal", "window", "heads", "bits", "empty")))


def frame(random: Random) -> dict[str, Any]:
    """What mask builders take: see `Frame`."""
    lengths: dict[str, Any] = {"seq_len": 300}
    if random.random() < 0.5:
        lengths = {"q_len": 200, "kv_len": 300, "q_offset": 50}
    return lengths | {"block": random.choice((64, (64, 128))), "device": "cpu"}


def method(name: str, of: Any, **arguments: Any) -> Any:
    """A call of a method of what `of` draws."""
    return lambda random: (getattr(of(random), name), dict(arguments))


def function(called: Any, **arguments: Any) -> Any:
    return lambda random: (called, dict(arguments))


def rule(random: Random) -> dict[str, Any]:
    """How blocks of a dense [128, 192] are chosen."""
    rules = (
        {"threshold": 0},
        {"keep": 0.5},
        {"keep": 0.5, "scope": "row"},
        {"threshold": 1.0},
        {"mask": dense(2, 3) > 0},
        {"mask": two_of_four() != 0},
    )
    return random.choice(rules)


def _state(random: Random) -> Any:
    state = any_bsr(random).state_dict()
    return lambda **parts: sk.BSR.from_state_dict(parts), state


def _bsr_parts(random: Random) -> Any:
    a = any_bsr(random)
    return sk.BSR, {"pattern": a.pattern, "values": a.values} | (
        {} if a.order is None else {"order": a.order}
    )


def _pattern_parts(random: Random) -> Any:
    p = any_bsr(random).pattern
    return sk.BlockPattern, {"shape": p.shape, "block": p.block, "indptr": p.indptr, "indices": p.indices}


def _mask_parts(random: Random) -> Any:
    """The constructor; what the two lists hold are arguments of their own."""
    m = any_mask(random)
    lists = {
        f"{kind}_{name}": part
        for kind in ("full", "partial")
        for name, part in getattr(m, kind)._asdict().items()
    }
    names = ("q_len", "kv_len", "block", "batch", "heads", "lo", "hi", "rules", "bits", "pure", "label")

    def made(**parts: Any) -> sk.BlockMask:
        both = {}
        for kind in ("full", "partial"):
            both[kind] = type(m.partial)(*(parts.pop(f"{kind}_{name}") for name in m.partial._fields))
        return sk.BlockMask(**parts, **both)

    return made, lists | {name: getattr(m, name) for name in names}


def _mask_lists(random: Random) -> Any:
    m = any_mask(random)
    names = ("q_len", "kv_len", "block", "batch", "heads", "full", "partial", "sizes", "label")
    return sk.BlockMask, {name: getattr(m, name) for name in names} | {"lo": m.lo, "hi": m.hi}


def _quantized(random: Random) -> Any:
    a = random.choice((any_bsr(random), any_24(random), dense(), dense(dtype=torch.bfloat16)[None]))
    options = {"dtype": random.choice((E4M3, E5M2)), "scale": random.choice(("row", "tensor")), "check": True}
    return sk.quantize, {"a": a, **options} | ({} if isinstance(a, Tensor) else {"fast_accum": False})


def _parts_of_heads(random: Random) -> Any:
    each = heads(random.choice((0, 2)))
    return sk.QuantizedHeads, {
        "values": each.values, "scale": each.scale, "rows": each.rows, "turned": each.turned, "length": each.length,
        "source_dtype": each.source_dtype,
    }  # fmt: skip


@lru_cache
def token_lists() -> sk.TokenLists:
    drawn = torch.randint(-1, 4, (1, 2, 100, 2), generator=torch.Generator().manual_seed(0))
    return sk.TokenLists(drawn.int(), 64)


def _token_lists(random: Random) -> Any:
    drawn = token_lists().indices.to(random.choice((torch.int32, torch.int64)))
    near = random.choice(({"causal": True, "window": 5}, {"causal": False, "window": 0}))
    return sk.TokenLists, {"indices": drawn, "block": 64, "counts": drawn[..., 0] + 2, "sinks": 3, **near}


def _scaled_parts(random: Random) -> Any:
    q = scaled(random.choice(("row", "tensor", "block")))
    return sk.Quantized, {"matrix": q.matrix, "scale": q.scale, "kind": q.kind, "fast_accum": False}


def any_scaled(random: Random) -> sk.Quantized:
    return random.choice((scaled(), scaled("tensor"), scaled("block"), scaled("row", "semi24")))


def ahead(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A mask_mod."""
    return k <= q + 10 * h


def _flex(random: Random) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=64)
    return sk.BlockMask.from_flex, {"bm": made}


def _topk(random: Random) -> Any:
    always = random.choice((None, (1, 1), torch.eye(5, dtype=torch.bool)))
    scores = random.choice((dense(5, 5), dense(20, 5).view(2, 2, 5, 5)))
    k = random.choice((3, torch.tensor([3])))
    return sk.BlockMask.topk, {"scores": scores, "k": k, "most": 4, "always": always, **_kept(random)}


def _kept(random: Random) -> dict[str, Any]:
    """The options that masks of chosen blocks share."""
    lengths = random.choice((None, torch.tensor([64, 10, 0, 64, 64])))
    return {"seq_len": 300, "block": 64, "causal": True, "kv_lengths": lengths}


def _cumulative(random: Random) -> Any:
    always = random.choice((None, (1, 1), torch.eye(5, dtype=torch.bool)))
    mass = random.choice((dense(5, 5), dense(20, 5).view(2, 2, 5, 5))).abs()
    share = random.choice((0.9, torch.tensor([0.5])))
    numbers = {"threshold": share, "least": 1, "most": 4, "always": always}
    return sk.BlockMask.cumulative, {"scores": mass, **numbers, **_kept(random)}


def _map(random: Random) -> Any:
    given = random.choice((dense(5, 5), dense(20, 5).view(2, 2, 5, 5))) > 0
    return sk.BlockMask.from_block_map, {"block_map": given, **_kept(random)}


def _indices(random: Random) -> Any:
    lists = torch.tensor([[0, 1, 2], [2, 0, 4], [3, 1, 0], [4, 3, 2], [0, 4, 1]])
    counts = random.choice((None, torch.tensor([0, 1, 2, 3, 3])))
    return sk.BlockMask.from_indices, {"indices": lists, "counts": counts, **_kept(random)}


def _blocks(random: Random) -> Any:
    p = sk.BlockMask.causal(300, block=64).to_pattern()
    lists: dict[str, Any] = {"indptr": p.indptr, "indices": p.indices}
    if random.random() < 0.5:
        lists = {name: part.tolist() for name, part in lists.items()}
    sizes = {"q_len": 300, "kv_len": 300, "block": 64, "batch": 1, "heads": 1, "device": "cpu"}
    return sk.BlockMask.from_blocks, lists | sizes


def _picture(made: Any, **more: Any) -> Any:
    return lambda random: (made, {"path": Path("picture.svg"), "max_pixels": 64, **more})


def _scipy(random: Random) -> Any:
    from scipy import sparse

    kind = random.choice((sparse.csr_array, sparse.coo_array, sparse.bsr_array))
    return sk.BSR.from_scipy, {"matrix": kind(two_of_four().numpy()), "block": 64}


def _saved(random: Random) -> Any:
    held = {"a": any_bsr(random), "m": any_mask(random), "q": scaled()}
    return sk.save, {"obj": random.choice((held, held["a"])), "path": Path("saved.safetensors")}


def _loaded(random: Random) -> Any:
    path = Path("loaded.safetensors")
    if not path.exists():
        sk.save({"a": bsr(), "m": mask()}, path)
    return sk.load, {"path": path, "name": "a", "device": "cpu", "kind": sk.BSR}


def _sizes(random: Random) -> Any:
    return sk.random_bsr, {
        "m": 128, "k": 192, "block": 64, "density": 0.5, "pattern": random.choice(("uniform", "banded", "powerlaw")),
        "dtype": torch.float32, "device": "cpu", "seed": 3,
    }  # fmt: skip


def alone(random: Random) -> sk.BSR:
    """One that no other call has: with values that are a leaf, that are computed, or of inference mode."""
    a = copy.deepcopy(any_bsr(random))
    kind = random.choice(("leaf", "computed", "inference"))
    if kind == "computed":
        return a.requires_grad_() * 2
    with torch.inference_mode(kind == "inference"):
        return sk.BSR.unchecked(a.pattern, a.values.clone(), a.order)


def builder(name: str, **own: Any) -> Any:
    return lambda random: (getattr(sk.BlockMask, name), {**own, **frame(random)})


def with_rule(made: Any, **more: Any) -> Any:
    return lambda random: (made, {"w": two_of_four(), "block": 64, **more, **rule(random)})


BLOCK = {"block": "int sequence"}
PLACE = {"device": "none text", "dtype": "none"}
FRAME = {**PLACE, **BLOCK, "q_len": "none", "kv_len": "none", "q_offset": "none", "seq_len": "none"}
RULE = {**BLOCK, "mask": "none", "threshold": "none int float", "keep": "none int float", "scope": "none"}
PATH = {"path": "none text", "title": "none text"}
HEADS = {"q_heads": "none"}
KEPT = {"kv_lengths": "none tensor", "seq_len": "none", "block": "sequence"}

CALLS: dict[str, Call] = {
    "BlockPattern": Call(_pattern_parts, BLOCK),
    "BlockPattern.to": Call(method("to", lambda random: any_bsr(random).pattern, device="cpu"), PLACE),
    "BlockPattern.same_as": Call(
        method("same_as", lambda random: any_bsr(random).pattern, other=bsr().pattern)
    ),
    "BlockPattern.spy": Call(
        method("spy", lambda random: any_bsr(random).pattern, path=None, max_pixels=64), PATH, 10, (OSError,)
    ),
    "BSR": Call(_bsr_parts, {"order": "none"}),
    "BSR.to": Call(method("to", any_bsr, device="cpu", dtype=torch.float64), PLACE),
    "BSR.cuda": Call(method("cuda", any_bsr, device="cpu"), {"device": "none int text"}),
    "BSR.size": Call(method("size", any_bsr, dim=1), {"dim": "none"}),
    "BSR.from_dense": Call(with_rule(sk.BSR.from_dense), RULE),
    "BSR.from_torch": Call(lambda random: (sk.BSR.from_torch, {"matrix": bsr().to_torch()})),
    "BSR.from_scipy": Call(_scipy, {**BLOCK, "block": "int none sequence"}),
    "BSR.from_coo_blocks": Call(
        function(
            sk.BSR.from_coo_blocks,
            rows=torch.tensor([0, 1, 1]),
            cols=torch.tensor([0, 2, 1]),
            blocks=dense(192, 64).view(3, 64, 64),
            shape=(128, 192),
        )
    ),
    "BSR.spy": Call(method("spy", any_bsr, path=None, max_pixels=64), PATH, 10, (OSError,)),
    "BSR.sum": Call(method("sum", any_bsr, dim=0, dtype=torch.float32), {"dim": "none", "dtype": "none"}),
    "BSR.norm": Call(method("norm", any_bsr, dtype=torch.float32), {"dtype": "none"}),
    "BSR.block_norms": Call(method("block_norms", any_bsr, dtype=torch.float32), {"dtype": "none"}),
    "BSR.block_row_slice": Call(method("block_row_slice", any_bsr, start=0, stop=1)),
    "BSR.requires_grad_": Call(method("requires_grad_", alone, requires_grad=True)),
    "BSR.from_state_dict": Call(_state),
    "BSR.from_state_dict (whole)": Call(
        lambda random: (sk.BSR.from_state_dict, {"state": any_bsr(random).state_dict()})
    ),
    "BSR.__mul__": Call(method("__mul__", any_bsr, factor=2.0), {"factor": "int tensor"}),
    "BSR.__rmul__": Call(method("__rmul__", any_bsr, factor=2), {"factor": "float tensor"}),
    "BSR.__truediv__": Call(method("__truediv__", any_bsr, divisor=2.0), {"divisor": "int tensor"}),
    "BSR.__add__": Call(method("__add__", any_bsr, other=bsr()), {"other": "int float"}),
    "BSR.__sub__": Call(method("__sub__", any_bsr, other=bsr()), {"other": "int float"}),
    "BSR.__rsub__": Call(method("__rsub__", any_bsr, other=bsr()), {"other": "int float"}),
    "Semi24": Call(lambda random: (sk.Semi24, _parts(_24(sk.Semi24, torch.float32)))),
    "Semi24.to": Call(method("to", any_24, device="cpu", dtype=torch.float64), PLACE),
    "Semi24.from_dense": Call(
        function(sk.Semi24.from_dense, w=two_of_four(), mask=two_of_four() != 0, exact=True), {"mask": "none"}
    ),
    "Semi24.from_torch": Call(function(sk.Semi24.from_torch, matrix=dense())),
    "Semi24.to_dense": Call(method("to_dense", any_24, dtype=torch.float64), {"dtype": "none"}),
    "Semi24.kept_norm": Call(method("kept_norm", any_24, w=dense())),
    "Semi24.requires_grad_": Call(method("requires_grad_", any_24, requires_grad=True)),
    "BSR24": Call(lambda random: (sk.BSR24, _parts(_24(sk.BSR24, torch.float32)))),
    "BSR24.from_bsr": Call(function(sk.BSR24.from_bsr, a=bsr(), exact=False)),
    "BSR24.from_dense": Call(with_rule(sk.BSR24.from_dense, exact=True), RULE),
    "Quantized": Call(_scaled_parts),
    "Quantized.to": Call(
        method("to", any_scaled, device="cpu", dtype=E4M3), {**PLACE, "device": "none text dtype"}
    ),
    "Quantized.with_fast_accum": Call(method("with_fast_accum", any_scaled, fast_accum=False)),
    "Quantized.dequantize": Call(method("dequantize", any_scaled, dtype=torch.float32)),
    "Quantized.to_dense": Call(method("to_dense", any_scaled, dtype=torch.float32)),
    "Quantized.error": Call(method("error", lambda random: scaled(), a=bsr())),
    "QuantizedTensor": Call(
        lambda random: (
            sk.QuantizedTensor,
            {"values": scaled_tensor().values, "scale": scaled_tensor().scale, "turned": False},
        )
    ),
    "QuantizedTensor.to": Call(method("to", lambda random: scaled_tensor(True), device="cpu"), PLACE),
    "QuantizedTensor.dequantize": Call(
        method("dequantize", lambda random: scaled_tensor(True), dtype=torch.float32)
    ),
    "QuantizedTensor.error": Call(method("error", lambda random: scaled_tensor(), x=dense())),
    "QuantizedHeads": Call(_parts_of_heads),
    "QuantizedHeads.to": Call(method("to", lambda random: heads(2), device="cpu"), PLACE),
    "QuantizedHeads.dequantize": Call(method("dequantize", lambda random: heads(2), dtype=torch.float32)),
    "QuantizedHeads.error": Call(method("error", lambda random: heads(), x=QKV[0])),
    "TokenLists": Call(_token_lists, {"counts": "none"}),
    "TokenLists.to": Call(method("to", lambda random: token_lists(), device="cpu"), PLACE),
    "TokenLists.to_dense": Call(
        method("to_dense", lambda random: token_lists(), kv_len=130), {"kv_len": "none"}
    ),
    "TokenLists.mask_for": Call(
        method("mask_for", lambda random: token_lists(), q=QKV[0], k=QKV[1], scale=0.5), {"scale": "any"}
    ),
    "quantize_heads": Call(
        function(sk.quantize_heads, q=QKV[0], k=QKV[1], v=QKV[1], scale="block", rows=64, check=True),
        {"scale": "none text"},
    ),
    "quantize": Call(_quantized, {"a": "tensor BSR Semi24"}),
    "random_bsr": Call(_sizes, {**BLOCK, **PLACE, "density": "int"}),
    "save": Call(_saved, {"path": "text", "obj": "dict BSR Semi24 Quantized BlockMask"}, errors=(OSError,)),
    "load": Call(
        _loaded,
        {"path": "text", "name": "none text", "device": "none text", "kind": "none"},
        errors=(OSError,),
    ),
    "BlockMask": Call(_mask_parts, {**BLOCK, "lo": "none", "hi": "none", "rules": "none", "bits": "none"}),
    "BlockMask (lists)": Call(_mask_lists, {**BLOCK, "lo": "none", "hi": "none", "sizes": "any"}),
    "BlockMask.full": Call(builder("full"), FRAME),
    "BlockMask.causal": Call(builder("causal"), FRAME),
    "BlockMask.sliding_window": Call(builder("sliding_window", window=100, sinks=10, causal=True), FRAME),
    "BlockMask.strided": Call(builder("strided", stride=128, window=64, causal=True), FRAME),
    "BlockMask.dilated": Call(builder("dilated", window=128, dilation=2, causal=False), FRAME),
    "BlockMask.bigbird": Call(
        builder("bigbird", window=64, globals=64, random=1, seed=3, causal=True, heads=2), FRAME
    ),
    "BlockMask.block_diagonal": Call(
        function(
            sk.BlockMask.block_diagonal,
            lengths=[100, 200],
            causal=True,
            seq_len=300,
            block=64,
            device="cpu",
        ),
        {**FRAME, "lengths": "sequence array tensor", "seq_len": "none"},
    ),
    "BlockMask.documents": Call(
        function(
            sk.BlockMask.documents,
            cu_seqlens=torch.tensor([0, 100, 300]),
            seq_len=320,
            window=50,
            causal=True,
            max_seqlen=200,
            block=64,
        ),
        {**BLOCK, "seq_len": "none", "window": "none", "max_seqlen": "none"},
    ),
    "BlockMask.topk": Call(
        _topk, {**KEPT, "most": "none", "always": "none sequence tensor", "k": "int tensor"}
    ),
    "BlockMask.cumulative": Call(
        _cumulative,
        {**KEPT, "most": "none", "always": "none sequence tensor", "threshold": "int float tensor"},
    ),
    "BlockMask.from_block_map": Call(_map, KEPT),
    "BlockMask.from_indices": Call(_indices, {**KEPT, "counts": "none tensor"}),
    "BlockMask.from_blocks": Call(
        _blocks, {**FRAME, "indptr": "sequence array tensor", "indices": "sequence array tensor"}
    ),
    "BlockMask.from_dense": Call(
        function(sk.BlockMask.from_dense, dense=dense(300, 300) > 0, block=64), BLOCK
    ),
    "BlockMask.from_transformers": Call(
        function(sk.BlockMask.from_transformers, mask=(dense(300, 300) > 0)[None, None], block=64), BLOCK
    ),
    "BlockMask.from_xformers": Call(
        function(
            sk.BlockMask.from_xformers,
            bias=stand_ins().LocalAttentionFromBottomRightMask(50, 9),
            q_len=70,
            kv_len=100,
            block=64,
            device="cpu",
        ),
        {"bias": "none", "device": "none", "block": "sequence"},
    ),
    "BlockMask.from_flex": Call(_flex, every=10),
    "BlockMask.from_mask_mod": Call(
        function(
            sk.BlockMask.from_mask_mod,
            mask_mod=ahead,
            B=1,
            H=2,
            Q_LEN=70,
            KV_LEN=100,
            block=64,
            device="cpu",
            compiled=False,
        ),
        BLOCK | PLACE | {"B": "none", "H": "none"},
        every=10,
    ),
    "BlockMask.from_pattern": Call(function(sk.BlockMask.from_pattern, pattern=bsr().pattern)),
    "BlockMask.per_head": Call(function(sk.BlockMask.per_head, masks=[mask(), mask("window")])),
    "BlockMask.per_batch": Call(function(sk.BlockMask.per_batch, masks=[mask(), mask("window")])),
    "BlockMask.__and__": Call(method("__and__", any_mask, other=mask("window"))),
    "BlockMask.__or__": Call(method("__or__", any_mask, other=mask("window"))),
    "BlockMask.verify": Call(method("verify", any_mask, wait=True)),
    "BlockMask.to": Call(method("to", any_mask, device="cpu"), PLACE),
    "BlockMask.element_mask": Call(
        method("element_mask", lambda random: mask(), rows=torch.tensor([0, 1]), entries=torch.tensor([0, 1]))
    ),
    "BlockMask.dense_rows": Call(method("dense_rows", any_mask, first=0, last=64)),
    "BlockMask.to_flex": Call(method("to_flex", any_mask, q_heads=2), HEADS, every=10),
    "BlockMask.to_fa4": Call(method("to_fa4", any_mask, q_heads=2), HEADS),
    "BlockMask.to_pattern": Call(method("to_pattern", any_mask, head=0, batch=0)),
    "BlockMask.plot": Call(method("plot", any_mask, path=None, head=0, batch=0), PATH, 5, (OSError,)),
    "masks.plot": Call(_picture(masks.plot, mask=mask(), head=0, batch=0, title="m"), PATH, 100, (OSError,)),
    "spy.spy_svg": Call(
        _picture(spy.spy_svg, obj=bsr(), title="m"), {**PATH, "obj": "BlockPattern"}, 100, (OSError,)
    ),
}


def _parts(a: Any) -> dict[str, Any]:
    """The fields of a matrix."""
    return {name: getattr(a, name) for name in a.__dataclass_fields__}


# What has no arguments to spoil, or says that it checks none.
REASONS = {
    **dict.fromkeys(("PageLists", "PageLists.from_indices", "PageLists.of_masks"), "drawn in calls_ops.py"),
    **dict.fromkeys(
        ("unchecked", "of_fields", "of_layout"), "says that it checks nothing: parts are known to be right"
    ),
    "from_host": "says that it checks nothing: the indices are known to be right",
    **dict.fromkeys(
        ("register_matmul", "register_linear"), "for the operations, once, when sparsek is imported"
    ),
    "signature": "takes no arguments",
    "derived": "for the operations: keeps what it is given",
    **dict.fromkeys(
        ("plan_owner", "parts", "storage"), "for the operations: its arguments say which form they want"
    ),
    "known": "a look-up by any key that can be hashed",
    "flip": "takes no arguments",
    "logical_values": "takes no arguments",
    "to_torch": "takes no arguments",
    "to_scipy": "takes no arguments",
    "zero_padding_": "takes no arguments",
    "detach": "takes no arguments",
    "state_dict": "takes no arguments",
    "to_bsr": "takes no arguments",
    "rows": "takes no arguments",
    **dict.fromkeys(
        ("bfloat16", "clone", "cpu", "dim", "double", "float", "half", "numel"), "takes no arguments"
    ),
    **dict.fromkeys(("cuda", "size"), "drawn under BSR.cuda and BSR.size"),
    "map": "runs the function that it is given",
    "BSR.drawn": "takes no arguments",
    "BlockPattern.drawn": "takes no arguments",
    "BlockMask.drawn": "drawn under BlockMask.plot",
    "InvalidInput": "an error",
    "MeshError": "an error",
    "InvalidFile": "an error",
    "SparseKError": "an error",
    "SparseKWarning": "a warning",
    "Unsupported": "an error",
    "BSR.to_dense": "takes no arguments",
    "BlockMask.to_dense": "takes no arguments",
    "BSR24.to": "drawn under Semi24.to",
    "BSR24.to_dense": "drawn under Semi24.to_dense",
    "BSR.kept_norm": "drawn under Semi24.kept_norm",
    "BSR24.kept_norm": "drawn under Semi24.kept_norm",
    "BSR24.requires_grad_": "drawn under Semi24.requires_grad_",
    "Quantized.requires_grad_": "drawn under Semi24.requires_grad_",
    "QuantizedTensor.requires_grad_": "drawn under Semi24.requires_grad_",
}


def here(module: str) -> bool:
    """Whether this file has the calls of a module; `calls_ops` has those of the others."""
    rooms = ("sparsek.products.formats.", "sparsek.attn.mask.", "sparsek.files.", "sparsek.core.")
    return module.startswith(rooms) and module != "sparsek.attn.mask.rule"
