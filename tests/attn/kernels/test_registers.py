"""Kernels that schedule, count and prepare fit in registers, compiled for a card that is not there."""

from itertools import product
from typing import Any, NamedTuple

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import delta
from sparsek.attn.kernels.backward import schedule_bwd as bwd
from sparsek.attn.kernels.backward import transposed as lists
from sparsek.attn.kernels.forward import lengths, parts
from sparsek.attn.kernels.forward import schedule_fwd as fwd
from sparsek.attn.kernels.paged import padding, unions
from sparsek.attn.kernels.paged import schedule as paged
from sparsek.attn.plan import attention_grad_schedule as grad_plan
from sparsek.attn.plan.attention_schedule import FIELDS, MERGE_FIELDS
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import compiled
from tests.problems import A100


def ints(*names: str) -> dict[str, str]:
    """Pointers to int32; arguments that are not named are ints."""
    return dict.fromkeys(names, "*i32")


OF_LISTS = ints(*lists.MASK, *lists._SCRATCH, *bwd._SCRATCH, "lo", "hi", "out")
OF_ROWS = ints("p_starts", "p_counts", "f_starts", "f_counts", "table", "before", "tiles", "count", "merges")
OF_LENGTHS = ints("p_counts", "f_counts", "order", "merges")
OF_PAGES = ints("cu_seqlens", "seq_lens", "tiles", "count")
OF_UNIONS = ints("records", "count", "p_starts", "p_counts", "partial", "f_starts", "f_counts", "full")
OF_UNIONS |= ints("starts", "counts", "whole_starts", "whole_counts", "blocks", "words")
OF_DELTA = dict.fromkeys(("lse", "grad_lse", "made", "acc"), "*fp32") | {"scale": "fp32", "unit": "fp32"}
OF_DELTA |= dict.fromkeys(("out", "grad", "dq"), "*bf16")


class Case(NamedTuple):
    """A kernel, types of its arguments, its constants, its warps, the most registers. `stores`: 16 bytes at once."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    registers: int = 168
    stores: bool = False
    card: Any = H200


OF_MASK = {"ROWS": lists.ROWS, "ENTRIES": lists.ENTRIES}
LINE = OF_MASK | {"SINGLE": True, "TILE_TICKS": grad_plan.TILE_TICKS, "HEADS": bwd.HEADS}
VISIT: dict[str, Any] = {
    "BLOCK_K": 128, "TURNED": True, "TILES": bwd.TILES, "GOLDEN": grad_plan.GOLDEN, "BITS": grad_plan.GOLDEN_BITS,
    "TILE_FIELDS": grad_plan.TILE_FIELDS, "VISIT_FIELDS": grad_plan.VISIT_FIELDS, "FULL": grad_plan.FULL,
    "NO_TICKET": grad_plan.NO_TICKET, "ORDERED": True, "VISITS": bwd.VISITS,
}  # fmt: skip
CASES: dict[str, Case] = {
    "tally": Case(lists.tally, OF_LISTS, OF_MASK, bwd.WARPS),
    "measure": Case(bwd._measure, OF_LISTS, {"TILES": lists.LISTS, "LISTS": lists.LISTS}, bwd.WARPS),
    "line up": Case(
        bwd._line_up, OF_LISTS, LINE | {"ALIKE": False, "TILES": bwd.TILES, "STREAM": bwd.STREAM}, bwd.WARPS
    ),
    "line up, alike": Case(
        bwd._line_up,
        OF_LISTS,
        LINE | {"ALIKE": True, "TILES": bwd.ALIKE_TILES, "STREAM": bwd.ALIKE_STREAM},
        bwd.WARPS,
    ),
    "deal": Case(bwd._deal, OF_LISTS, {"LANES": 256, "LISTED": lists.LISTED}, bwd.DEAL_WARPS),
    "open": Case(lists._open, OF_LISTS, {"LISTS": lists.LISTS}, bwd.WARPS),
    "fill": Case(lists._fill, OF_LISTS, OF_MASK, bwd.WARPS),
    "order": Case(lists._order, OF_LISTS, {"LISTED": lists.LISTED}, bwd.WARPS),
    "pad": Case(bwd._pad, OF_LISTS, {"BOUNDS": bwd.BOUNDS}, bwd.WARPS),
    "visit": Case(bwd._visit, OF_LISTS, VISIT | {"BLOCK_Q": 64, "SHARED": False, "LONG": False}, bwd.WARPS),
    "visit, long": Case(
        bwd._visit, OF_LISTS, VISIT | {"BLOCK_Q": 128, "SHARED": True, "LONG": True}, bwd.WARPS
    ),
}
for cut in (False, True):
    ranks = {"CUT": cut, "LENGTHS": fwd.LENGTHS, "RANKED": fwd.RANKED, "ROWS": fwd.ROWS}
    CASES[f"ranks, {cut}"] = Case(fwd._count, OF_ROWS, ranks, fwd.WARPS, 128)
for cut, fields in ((False, 1), (False, parts.FIELDS), (True, parts.FIELDS)):
    line = {
        "CUT": cut, "TILES": lengths.CUT_TILES if cut else lengths.TILES, "PARTS": lengths.PARTS if cut else 1,
        "STREAM": lengths.STREAM, "FIELDS": fields,
    }  # fmt: skip
    CASES[f"lengths, {cut}, {fields}"] = Case(lengths._line_up, OF_LENGTHS, line, lengths.WARPS)
# And a record leaves in two stores of 16 bytes.
for (cut, sections), groups in product(((False, False), (False, True), (True, False)), (1, fwd.GROUPS)):
    place = {
        "CUT": cut, "SECTIONS": sections, "TILES": fwd.CUT_TILES if cut else fwd.TILES,
        "PARTS": fwd.PARTS if cut else 1, "UNUSED": fwd.UNUSED, "GROUPS": groups,
        "FIELDS": FIELDS, "MERGE_FIELDS": MERGE_FIELDS,
    }  # fmt: skip
    CASES[f"place, {cut}, {sections}, {groups}"] = Case(
        fwd._place, OF_ROWS, place, fwd.PLACE_WARPS, 128, stores=True
    )
for window, listed in ((True, 0), (False, 64)):
    place = {
        "POSITIONS": 32, "KEYS": 128, "CAUSAL": True, "WINDOW": window, "LIST": listed, "QUANTUM": paged.QUANTUM,
        "TILES": paged.TILES, "REQUESTS": paged.REQUESTS, "FIELDS": paged.FIELDS,
    }  # fmt: skip
    CASES[f"place of pages, {listed}"] = Case(paged._place, OF_PAGES, place, paged.WARPS, 128)
for queries, each in ((1, 1), (8, 16)):
    join = {"CAUSAL": True, "BK": 128, "QUERIES": queries, "EACH": each, "FIELDS": paged.FIELDS}
    warps = min(max(queries * each // 128, 1), 16)
    CASES[f"join, {queries} x {each}"] = Case(unions._join, OF_UNIONS, join, warps)
for low, lse in (("*bf16", True), ("*fp16", False)):
    types = {"out": low, "lse": "*fp32" if lse else low, "cu_seqlens_q": "*i32"}
    CASES[f"clear, {low}"] = Case(padding._clear, types, {"LSE": lse}, padding.WARPS, 64)
for dim, card, pack in (
    (*each, pack) for each in product((64, 96, 128, 256), (H200, A100)) for pack in (1, 16)
):
    rows = delta.ELEMENTS // (1 << (dim - 1).bit_length())
    strides = ("so_d", "sg_d", "sl_m", "sn_m") if pack == 1 else ("so_d", "sg_d")
    ones = dict.fromkeys(strides, 1) | {"PACK": pack}
    CASES[f"rows, {dim}, {card.name}, {pack}"] = Case(
        delta._prepare_rows, OF_DELTA, {"DV": dim, "ROWS": rows} | ones, delta.WARPS, 128, card=card
    )
    for turns, sums in ((None, 1), ("*i32", 1), ("*i32", 2)) if card is H200 else ():
        widths = {
            "D": dim,
            "WIDTH": delta.ELEMENTS // rows,
            "ROWS": rows,
            "sq_d": 1,
            "SUMS": sums,
            "PACK": pack,
        }
        kinds = OF_DELTA | ({"turns": turns} if turns else {})
        widths |= {} if turns else {"turns": None}
        CASES[f"cast, {dim}, {turns}, {sums}, {pack}"] = Case(
            delta._cast_quantized, kinds, widths, delta.WARPS, 128, stores=True
        )
for dim in (64, 128):
    types = {"parts": "*fp32", "lengths": "*i32", "dk": "*bf16", "dv": "*bf16", "scale": "fp32"}
    widths = {"D": dim, "DV": dim, "KEYS": 128, "WIDTH": 2 * dim, "FIRST": dim, "ROWS": delta.PART_ROWS}
    widths |= {"sk_d": 1, "sv_d": 1}
    CASES[f"add parts, {dim}"] = Case(delta._add_parts, types, widths, delta.WARPS, 128, stores=True)


@pytest.mark.parametrize("name", once(CASES, lambda name: [CASES[name].kernel, name.split(",")[0]]))
def test_it_fits_in_registers(name: str) -> None:
    """Each kernel, in one of its forms, drawn in every run."""
    case = CASES[name]
    stages = 3 if case.types.get("dq") else 1
    code = compiled(case.kernel, case.types, case.constants, case.card, case.warps, stages)
    assert code.stack == 0
    assert code.registers <= case.registers
    assert "v4.b32" in code.stores or not case.stores
    if case.kernel is delta._prepare_rows:
        assert code.ptx.count("ld.global.v4") >= 2 * delta.ELEMENTS // (128 * 8)
    if case.kernel is delta._cast_quantized:
        assert code.stores == {"v4.b32"}
