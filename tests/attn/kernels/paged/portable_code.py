"""Compiles portable.attention_paged and the sum of its parts for cards that are not there. Any Triton."""

from typing import Any

import torch

from sparsek.attn.kernels.paged import portable, portable_parts
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.kernels import PagedCall
from sparsek.attn.plan.problems import PagedProblem
from tests.engine.launch import portable_code
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS


def meta_call(p: PagedProblem) -> PagedCall:
    """Tensors without memory for `p`, K and V in one cache."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    half = torch.bfloat16 if p.dtype == "bf16" else torch.float16
    kind = torch.float8_e4m3fn if p.kv_dtype == "e4m3" else half
    cache = empty(64, p.kv_heads, p.page, p.dim + p.v_dim, dtype=kind)
    scales = empty(p.kv_heads if p.scale_per == "head" else 1, dtype=torch.float32) if p.scale_per else None
    lists = None
    if p.list_heads:
        row = torch.zeros(p.list_heads * 8, dtype=torch.int32, device="cpu")  # lists are checked
        rows = BlockLists(row, row, row)
        lists = PageLists(rows, rows, p.list_heads, 8, p.list_block, p.listed)
    return PagedCall(
        empty(p.tokens, p.q_heads, p.dim, dtype=half), cache[..., : p.dim], cache[..., p.dim :],
        empty(p.requests, 64), empty(p.requests), empty(p.requests + 1), lists,
        empty(p.q_heads, dtype=torch.float32) if p.sink_logits else None, scales, scales, 0.1,
        30.0 if p.softcap else 0.0, empty(p.tokens, p.q_heads, p.v_dim, dtype=half),
        empty(p.q_heads, p.tokens, dtype=torch.float32),
    )  # fmt: skip


def compiled(card: str, p: PagedProblem, c: portable.Config) -> Code:
    """The kernel as `launch` specialises it."""
    call = meta_call(p)
    work = portable.KERNEL.prepare(p, c, torch.device("meta"))
    k, v = ((x.view(torch.int16) if p.kv_dtype == "e4m3" else x) for x in (call.k, call.v))
    constants = portable._constants(c, work, call, k, v)
    constants |= dict.fromkeys(("sq_d", "sk_d", "sv_d", "so_d"), 1)
    if call.lists is None:
        constants |= dict.fromkeys(
            f"{kind}_{part}" for kind in ("full", "partial") for part in BlockLists._fields
        )
        constants = {name.replace("indices", "columns"): value for name, value in constants.items()}
    given = {"sink_logits": call.sink_logits, "k_scale": call.k_scale, "v_scale": call.v_scale}
    constants |= {name: None for name, x in given.items() if x is None}
    if work.parts == 1:
        constants |= dict.fromkeys(("o_part", "lse_part", "counts"))
    pages = "i16" if p.kv_dtype == "e4m3" else p.dtype
    types = {
        "q": f"*{p.dtype}",
        "out": f"*{p.dtype}",
        "k": f"*{pages}",
        "v": f"*{pages}",
        "scale": "fp32",
        "cap": "fp32",
    }
    types |= dict.fromkeys(portable._INTS, "*i32") | dict.fromkeys((*portable._FLOATS, "o_part"), "*fp32")
    return portable_code.compiled(
        portable._attention, types, constants, CARDS[card], c.num_warps, c.num_stages
    )


def added(card: str, v_dim: int, parts: int, heads: int = 32) -> Code:
    """The sum of parts, with every option."""
    most, rows = portable_parts.shape(parts)
    constants = {
        "HEADS": heads, "GROUP": 4, "DV": v_dim, "V_SCALES": 8, "MOST": most, "ROWS": rows,
        "COLUMNS": portable_parts.COLUMNS, "so_d": 1,
    }  # fmt: skip
    names = ("o_part", "lse_part", "sink_logits", "v_scale", "lse")
    types = (
        dict.fromkeys(names, "*fp32") | dict.fromkeys(("counts", "cu_seqlens_q"), "*i32") | {"out": "*bf16"}
    )
    return portable_code.compiled(
        portable_parts.add_parts, types, constants, CARDS[card], portable_parts.WARPS, 3
    )
