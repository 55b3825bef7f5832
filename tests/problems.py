"""Problems of products from flat facts, the same with some facts changed, and the cards that tests plan for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparsek.core.device import H200, Card
from sparsek.products.formats.storage import BlockStats, Storage
from sparsek.products.plan.problems import DenseSpec, SpmmProblem

T4 = replace(H200, name="NVIDIA T4", capability=(7, 5))
A100 = replace(H200, name="NVIDIA A100", capability=(8, 0), sm_count=108, smem_bytes=166912)
RTX_4090 = replace(H200, name="NVIDIA RTX 4090", capability=(8, 9), sm_count=128, smem_bytes=101376)
B200 = replace(H200, name="NVIDIA B200", capability=(10, 0))
CARDS = {"sm_90": H200, "sm_80": A100, "sm_89": RTX_4090}
# Where a fact has its place in an SpmmProblem: the field, and the name there.
NESTED = {
    "transposed": ("a", "transposed"),
    "two_four": ("a", "two_four"),
    "a_scale": ("a", "scale"),
    "fast_accum": ("a", "fast_accum"),
    "b_dtype": ("b", "dtype"),
    "b_layout": ("b", "layout"),
    "b_scale": ("b", "scale"),
    "rounds": ("b", "rounds"),
    "out_dtype": ("c", "dtype"),
    "out_layout": ("c", "layout"),
}
OF_BLOCKS = ("block", "nnzb", "row_max", "touches_all_columns", "merged")
IN_FP8 = {"a_scale": "row", "b_scale": "column", "b_dtype": "e4m3", "out_dtype": "bf16", "b_layout": "col"}


def spmm_problem(
    m: int,
    k: int,
    n: int,
    block: tuple[int, int] | None = None,
    nnzb: int = 0,
    dtype: str = "bf16",
    card: Card | None = None,
    **facts: Any,
) -> SpmmProblem:
    """C [m, n] = A [m, k] @ B with these facts, those of NESTED by flat names. Without `block` all of A is stored."""
    assert card is not None
    blocks = None if block is None else BlockStats(block, nnzb)
    dense = DenseSpec(dtype)
    return changed(SpmmProblem(Storage(dtype, blocks), dense, dense, m, k, n, card), **facts)


def fp8_problem(**facts: Any) -> SpmmProblem:
    """The same of an E4M3 B with a scale for each column, A with one for each row, and C in bf16."""
    return spmm_problem(**{**IN_FP8, **facts})


def changed(p: Any, **facts: Any) -> Any:
    """`p`, of any operation, with other facts. `dtype` is that of all three matrices, in FP8 that of A."""
    if not isinstance(p, SpmmProblem):
        return replace(p, **facts)
    own = {name: value for name, value in facts.items() if name not in (*NESTED, *OF_BLOCKS, "dtype")}
    blocks = {name: value for name, value in facts.items() if name in OF_BLOCKS}
    parts: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
    if "dtype" in facts:
        for each in "a" if p.a.quantized or facts.get("a_scale") else "abc":
            parts[each]["dtype"] = facts["dtype"]
    if blocks:
        assert p.a.blocks is not None
        parts["a"]["blocks"] = replace(p.a.blocks, **blocks)
    for name, (part, inner) in NESTED.items():
        if name in facts:
            parts[part][inner] = facts[name]
    nested = {part: replace(getattr(p, part), **values) for part, values in parts.items() if values}
    return replace(p, **own, **nested)
