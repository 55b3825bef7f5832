"""Compiles portable.attention_fwd and its merge for cards that are not there, and reads what came out. Any Triton."""

import re
from types import SimpleNamespace
from typing import Any

import torch

from sparsek.attn.kernels.forward import portable_fwd as portable
from sparsek.attn.kernels.forward.merge import FIELDS, ROWS, _merge
from sparsek.attn.kernels.forward.score_args import Sinks, Slopes
from sparsek.attn.mask.lists import Members
from tests.engine.launch import portable_code
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS

RULES = {
    "interval": ("rules", "bits"),
    "bits": ("lo", "hi"),
    "both": (),
    "none": ("lo", "hi", "rules", "bits"),
    "members": ("bits",),
}


def chained(code: Code, warps: int) -> bool:
    """Each warp owns whole rows of both products, so P stays in registers."""
    return all(
        int(rows) == warps for rows in re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), \d+\]", code.ttgir)
    )


def compiled(
    card: str,
    dim: int,
    v_dim: int,
    block: tuple[int, int],
    rules: str,
    c: portable.Config,
    dtype: str = "bf16",
    changed: bool = False,
) -> Code:
    """The kernel as `launch` specialises it for contiguous, 16-byte aligned tensors of 16 heads. `rules`: of RULES.

    `changed`: scores are capped and biased, and there are sinks.
    """
    q, v = (torch.empty(1, 16, 4096, d, dtype=torch.bfloat16, device="meta") for d in (dim, v_dim))
    members = Members(8, 9, 2) if rules == "members" else None
    mask: Any = SimpleNamespace(block=block, heads=16, members=members)
    constants = portable._constants(c, mask, q, q, v, v)
    constants |= dict.fromkeys(("sq_d", "sk_d", "sv_d", "so_d"), 1) | dict.fromkeys(RULES[rules])
    constants |= dict.fromkeys(() if changed else ("cap", *Slopes._fields, *Sinks._fields))
    constants |= dict.fromkeys(() if members else ("window", "opening"))
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | dict.fromkeys(portable._POINTERS, "*i32")
    types |= {"lse": "*fp32", "scale": "fp32", "cap": "fp32", "slopes": "*fp32", "sinks": "*bf16"}
    return portable_code.compiled(
        portable._attention, types, constants, CARDS[card], c.num_warps, c.num_stages
    )


def merged(card: str, v_dim: int) -> Code:
    """The merge of parts of the keys."""
    constants = {"SLOT": 128, "DV": v_dim, "GROUP": 1, "ROWS": ROWS, "FIELDS": FIELDS, "so_d": 1}
    constants |= dict.fromkeys(Sinks._fields)
    types = {"o_part": "*fp32", "lse_part": "*fp32", "table": "*i32", "out": "*bf16", "lse": "*fp32"}
    return portable_code.compiled(_merge, types, constants, CARDS[card], 4, 3)
