"""Compiles portable.attention_bwd for cards that are not there, and reads what came out. Any Triton."""

from types import SimpleNamespace
from typing import Any

import torch

from sparsek.attn.kernels.backward import portable_bwd as portable
from sparsek.attn.kernels.forward import parts
from sparsek.attn.kernels.forward.score_args import Slopes
from sparsek.attn.mask.lists import Members
from tests.engine.launch import portable_code
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS

RULES = {
    "interval": ("rules", "bits", "part_entries"),
    "bits": ("lo", "hi"),
    "both": (),
    "none": ("lo", "hi", "rules", "bits", "part_entries"),
    "members": ("bits",),
}
# Which kernel, and what of its results is left out.
PASSES = {"keys": None, "keys for dk": "dv", "keys for dv": "dk", "queries": None}


def passes(c: portable.Config) -> dict[str, portable.Tile]:
    """The kernels that `c` stands for, and their tiles."""
    of_keys = ("keys for dk", "keys for dv") if c.apart else ("keys",)
    return dict.fromkeys(of_keys, c.keys) | {"queries": c.queries}


def compiled(
    card: str,
    dims: tuple[int, int],
    block: tuple[int, int],
    rules: str,
    which: str,
    tile: portable.Tile,
    dtype: str = "bf16",
    changed: bool = False,
) -> Code:
    """One kernel (of PASSES) as `launch` specialises it for contiguous, 16-byte aligned tensors of 16 heads, with room
    for parts. `rules`: of RULES. `changed`: scores are capped and biased.
    """
    q, v = (torch.empty(1, 16, 4096, d, dtype=torch.bfloat16, device="meta") for d in dims)
    members = Members(8, 9, 2) if rules == "members" else None
    mask: Any = SimpleNamespace(block=block, heads=16, members=members)
    of_keys = which != "queries"
    kernel, constants = (
        (portable._keys, portable._of_keys) if of_keys else (portable._queries, portable._of_queries)
    )
    names = set(kernel.arg_names)
    fixed = constants(portable.Config(tile, tile), mask, q, q, v, v)
    ones = {x for x in ("sq_d", "sk_d", "sv_d", "sg_d", "sdk_d", "sdv_d", "sdq_d") if x in names}
    gone = names & {*RULES[rules], PASSES[which]}
    gone |= set() if members else {"window", "opening"}
    gone |= set() if changed else {"cap", *Slopes._fields}
    types = dict.fromkeys(("q", "k", "v", "grad", "dq", "dk", "dv"), f"*{dtype}")
    types |= dict.fromkeys(portable._POINTERS, "*i32") | dict.fromkeys(("lse", "delta", "sums"), "*fp32")
    types |= {"factor": "fp32", "scale": "fp32", "cap": "fp32", "slopes": "*fp32"}
    return portable_code.compiled(
        kernel,
        types,
        fixed | dict.fromkeys(ones, 1) | dict.fromkeys(gone),
        CARDS[card],
        tile.num_warps,
        tile.num_stages,
    )


def added(card: str, width: int, columns: int) -> Code:
    """The sum of parts: `columns` of `width` float32 columns."""
    constants = {
        "WIDTH": width, "FIRST": width - columns, "COLS": columns, "BLOCK": 128, "ROWS": parts.ROWS,
        "FIELDS": parts.FIELDS, "so_d": 1,
    }  # fmt: skip
    types = {"parts": "*fp32", "merges": "*i32", "out": "*bf16", "scale": "fp32"}
    return portable_code.compiled(parts._add_parts, types, constants, CARDS[card], 4, 3)
