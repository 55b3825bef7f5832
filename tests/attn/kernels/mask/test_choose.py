"""attn/kernels/mask/choose.py: code for an H200 that is not there; on a GPU the tensors of the specification."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.build import selection_reference
from sparsek.attn.mask.build.selection import Selection, layout_of, written
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput
from sparsek.engine.launch.recorder import record
from tests.attn.mask.drawn_choices import DTYPES, KINDS, PLACES, drawn, same
from tests.sampling import EVERY

pytest.importorskip("triton")

from sparsek.attn.kernels.mask.choose import MOST_COLUMNS, _choose
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code, compiled
from tests.refusals import refused
from tests.sampling import sampled

INTS = (
    "full_counts",
    "cut_counts",
    "starts",
    "cut_starts",
    "indices",
    "lo",
    "hi",
    "rules",
    "bits",
    "lengths",
)


def code(kind: str, columns: int, given: str = "fp32", short: bool = False, **more: Any) -> Code:
    types = {"given": f"*{given}", "limit": "i64" if kind == "mass" else "i32", "fault": "*i64"}
    types |= dict.fromkeys(INTS, "*i32")
    absent = (
        ("numbers", "always", "held") if short else ("numbers", "always", "held", "lengths", "rules", "bits")
    )
    constants = dict.fromkeys(absent) | {
        "KIND": kind, "CAUSAL": True, "NEAR": "", "EVERY": False, "WIDE": given == "fp64", "BQ": 128, "BK": 128,
        "COLS": columns, "LISTED": 32 if kind == "indices" else 1, "UNIT": 1, "FQ": 1, "FK": 1,
    }  # fmt: skip
    return compiled(_choose, types, constants | more, H200, min(max(columns // 256, 1), 32), 3)


@pytest.mark.parametrize("kind", ["topk", "mass"])
def test_a_row_is_one_warp_that_adds_in_one_instruction_and_reads_16_bytes_at_once(kind: str):
    made = code(kind, 256, NEAR="window", UNIT=4)
    assert made.stack == 0
    assert made.registers <= 64, "32 rows share an SM"
    assert "redux.sync.add" in made.ptx
    assert "v4.b32" in made.ptx
    assert "atom" not in made.ptx


@pytest.mark.parametrize(
    ("kind", "columns"), once(product(("topk", "mass", "map", "indices"), (16, 4096)), most=2)
)
def test_every_kind_of_choice_compiles(kind: str, columns: int):
    given = {"map": "i1", "indices": "i64"}.get(kind, "fp64")
    assert code(kind, columns, given, True).registers <= 255


def test_the_longest_rows_fit():
    for kind in sampled(["topk", "mass", "map", "indices"], 1):
        given = {"map": "i1", "indices": "i32"}.get(kind, "bf16")
        assert code(kind, MOST_COLUMNS, given).shared <= 227 << 10


NoSync = Callable[[], AbstractContextManager[None]]

CANARY = 0x5EADBEE


def specified(c: Selection) -> BlockMask:
    """The specification's mask, on the GPU, whatever faults it has."""
    return selection_reference.specified(BlockMask, c)


def choose(c: Selection) -> Any:
    from sparsek.attn.kernels.mask.choose import choose_blocks

    return written(BlockMask, c, choose_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_the_tensors_of_the_specification(
    kind: str, hostile: bool, seed: int, poisoned_memory: None
):
    for step in range(20 if EVERY else len(PLACES)):  # every frame
        c = drawn(kind, step % len(PLACES), step % 3 > 0, seed + step, hostile, "cuda")
        same(choose(c), specified(c))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [16, 63, 64, 65, 256, 1000, 4096, 8192, 16384])
def test_rows_of_any_length(kind: str, columns: int, seed: int):
    place = Place.of(q_len=130, kv_len=columns * 64 - 3, block=64, device="cuda")
    for dtype in sampled(DTYPES, 2, of=(kind, columns)) if kind in ("topk", "mass") else (None,):
        if kind == "indices":
            given = torch.rand(1, 2, 3, columns, device="cuda").argsort(-1)[..., : min(columns, 99)]
        else:
            given = torch.rand(1, 2, 3, columns, device="cuda")
            given = given < 0.3 if dtype is None else given.to(dtype)
        limit: Any = {"topk": columns // 8 + 1, "mass": 0.9}.get(kind, 0)
        capacity = min(columns, 99) if kind == "indices" else columns
        names = {"room": "k", "indices": tuple(given.shape)}
        c = Selection(kind, place, True, given, None, capacity, "long", limit, 1, names=names)
        same(choose(c), specified(c))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_of_the_mask_is_written(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch):

    kept: list[Tensor] = []
    empty = torch.empty

    def guarded(size: Any, **options: Any) -> Tensor:
        if options.get("dtype") is not torch.int32:
            return empty(size, **options)
        kept.append(torch.full((size + 256,), CANARY, **options))
        return kept[-1][128:-128]

    for step in range(20 if EVERY else len(PLACES)):
        c = drawn(kind, step % len(PLACES), True, seed + step, True, "cuda")
        monkeypatch.setattr(torch, "empty", guarded)
        choose(c)
        monkeypatch.undo()
        assert (kept[-1][:128] == CANARY).all()
        assert (kept[-1][-128:] == CANARY).all()


BUILD: dict[str, Callable[[Tensor], BlockMask]] = {
    "topk": lambda x: BlockMask.topk(x, 5, True, (1, 2), 4096),
    "topk of heads": lambda x: BlockMask.topk(x, torch.arange(3, 7, device=x.device), seq_len=4000),
    "cumulative": lambda x: BlockMask.cumulative(x.abs(), 0.8, True, seq_len=4096, least=2),
    "map": lambda x: BlockMask.from_block_map(x > 0.5, 4096, causal=True),
    "indices": lambda x: BlockMask.from_indices(x.argsort(-1)[..., :7], seq_len=4096),
    "short": lambda x: BlockMask.topk(
        x, 5, True, None, 4096, kv_lengths=torch.arange(97, 129, device=x.device)
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILD)
def test_builders_use_it_without_a_sync_and_the_cpu_agrees(name: str, no_sync: NoSync, seed: int):
    scores = torch.randn(2, 4, 32, 32)
    here, build = scores.cuda(), BUILD[name]
    build(here)
    torch.cuda.synchronize()
    with no_sync():
        mask = build(here)
        mask.verify()
    assert mask._base is not None
    mask.verify(wait=True)
    wanted = build(scores)
    if name not in ("topk", "short"):  # a budget for all gives bounds, which stay
        assert mask.sizes == wanted.sizes
    assert torch.equal(mask.to_dense().cpu(), wanted.to_dense())
    BlockMask(*(getattr(mask, each) for each in BlockMask._fields))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILD)
def test_200_replays_of_a_graph_follow_the_scores(name: str, seed: int):
    scores, build = torch.randn(2, 4, 32, 32, device="cuda"), BUILD[name]
    build(scores)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = build(scores)
    for _ in range(200):
        scores.copy_(torch.randn(scores.shape, device="cuda"))
        graph.replay()
        wanted = build(scores)
        for a, b in zip((*mask.full, *mask.partial), (*wanted.full, *wanted.partial), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_recorded(kind: str, seed: int):
    c = drawn(kind, 0, True, seed, device="cuda")
    choose(c)
    operands = [x for x in (c.given, c.lengths, c.limit, c.always, c.counts) if isinstance(x, Tensor)]
    _, again = record(lambda: choose(c)._base, operands)
    assert again is not None
    same(BlockMask.of_layout(layout_of(c), again.repeat(operands)), specified(c))


@pytest.mark.gpu
def test_faults_are_reported_with_their_position():
    scores = torch.zeros(2, 3, 4, 4, device="cuda")
    scores[1, 2, 3, 0] = torch.nan
    mask = BlockMask.topk(scores, 2, seq_len=512)
    for _ in range(2):
        refused(r"scores\[1, 2, 3, 0\] is NaN", mask.verify, wait=True)
    scores[1, 2, 3, 0] = 0.0  # with two faults any may be told
    budgets = torch.tensor([2, 0, 2], device="cuda")
    refused(r"k\[1\] is below 1", lambda: BlockMask.topk(scores, budgets, seq_len=512).verify(wait=True))
    lists = torch.tensor([[0, 1], [2, 3], [3, 9], [1, 0]], device="cuda")
    with pytest.raises(InvalidInput, match=r"indices\[2, 1\] is out of range"):
        BlockMask.from_indices(lists, seq_len=512).verify(wait=True)
    lists[2, 1], lists[1, 1] = 0, 2
    with pytest.raises(InvalidInput, match=r"indices of tile \[0, 0, 1\] hold key block 2 more than once"):
        BlockMask.from_indices(lists, seq_len=512).verify(wait=True)
