"""pack/to_bsr.py in Triton's interpreter."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.operations import KERNELS
from sparsek.engine.call import recorded_calls
from sparsek.engine.launch.recorder import Recorded
from sparsek.products.formats import convert
from sparsek.products.formats.convert import Rule
from sparsek.products.kernels.pack import to_bsr as portable
from sparsek.products.ops import packing as ops
from tests.products.kernels.pack.to_bsr_cases import (
    LAYOUTS,
    NOTHING,
    by_blocks,
    chosen,
    equal,
    kept,
    masked,
    over,
    packed,
    same,
    tied,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Sums of bf16 are wrong in the interpreter; what only moves bits is right.
DTYPES = (torch.float16, torch.float32, torch.float64)
SMALL = {"GATHER_BYTES": 2048, "MIN_CHUNK": 16, "MAX_CHUNK": 16}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles and chunks so small that little matrices need several."""
    for name, size in SMALL.items():
        monkeypatch.setattr(portable, name, size)
    portable._view.cache_clear()
    yield
    portable._view.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_rule_stores_the_blocks_of_torch(dtype: torch.dtype):
    shape, block = (83, 150), (32, 48)
    w = torch.randn(shape).to(dtype)
    same(w, block, kept(float(torch.rand(()))))
    same(w, block, kept(float(torch.rand(())), "row"))
    same(w, block, kept(0.4, "row"))  # five blocks of three rows
    same(w, block, over((block[0] * block[1]) ** 0.5))
    same(w, block, masked(torch.rand(3, 4) < 0.5))
    same(w, block, masked(torch.rand(shape) < 2 / (block[0] * block[1])))
    same(w * by_blocks(torch.rand(3, 4) < 0.5, shape, block), block, NOTHING)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_rows_without_gaps_are_read(layout: Callable[[Tensor], Tensor]):
    for shape, block in (((32, 64), (16, 32)), ((50, 168), (48, 80))):
        w = layout(torch.randn(shape).half())
        assert w.shape == shape
        same(w, block, kept(0.6))
    flags = torch.rand(shape) < 2 / (block[0] * block[1])
    same(w, block, masked(layout(flags.view(torch.int8)).view(torch.bool)))


@pytest.mark.parametrize("scope", convert.SCOPES)
def test_of_equal_norms_the_first_are_stored_and_blocks_of_zeros_last(
    scope: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(portable, "MIN_CHUNK", 16)
    monkeypatch.setattr(portable, "MAX_CHUNK", 16)
    grid = (4, 9)
    w = tied(grid, (16, 16), torch.float32)
    for share in (0.0, 1e-9, float(torch.rand(())), 1.0):
        rule = kept(share, scope)
        made = same(w, (16, 16), rule)
        equal(made, packed(w, (16, 16), rule))
    assert made.pattern.indices.tolist() == [*range(9)] * 4
    same(w, (16, 16), over(0.0))


def test_tiles_of_full_size():
    w = torch.randn(130, 1100).half()
    same(w[:128, :256], (128, 128), kept(0.5))
    same(w, (64, 64), kept(0.1))
    same(w[:32], (16, 16), kept(0.1))


@pytest.mark.parametrize("count", [1, 16, 99, 150])
def test_the_largest_keys_of_any_are_found(count: int, monkeypatch: pytest.MonkeyPatch):
    """Keys that are crowded, spread over all floats, or take few values, some of them no norm at all."""
    monkeypatch.setattr(portable, "MAX_CHUNK", 64)
    monkeypatch.setattr(portable, "MIN_CHUNK", 64)
    infinity, cells = 0x7F80_0000, 150
    for keys in (
        torch.randint(1, infinity, (1, cells)),
        0x4300_0000 + torch.randint(600, (1, cells)),
        torch.randint(infinity - 3, infinity, (1, cells)),
        torch.randint(3, (1, cells)) * 0x3F80_0000 // 2 + 0x3F80_0000,
        torch.full((1, cells), 0x3F80_0000),
    ):
        keys = keys.to(torch.int32)
        rule = kept(count / cells)
        indptr, where, unsure = chosen(keys, rule.count(cells))
        sure = convert.least_sure(torch.float32)
        stored = convert.picked(keys.view(torch.float32).clamp(min=sure), rule)
        assert where.tolist() == stored.view(-1).nonzero().view(-1).tolist()
        assert indptr.tolist() == [0, count]
        assert unsure == (stored & (keys.view(torch.float32) < sure)).any()


def doubtful(dtype: torch.dtype) -> list[tuple[float, Rule]]:
    """Elements that make a norm unsure, and rules that mind."""
    limits = torch.finfo(dtype)
    rules = (kept(0.5), kept(0.0), kept(0.5, "row"), over(1.0))
    bad = [(each, rule) for each in (torch.nan, torch.inf, -torch.inf) for rule in rules]
    if dtype != torch.float16:
        bad += [(limits.max, rule) for rule in rules]
        bad += [(limits.tiny, rule) for rule in (kept(1.0), kept(1.0, "row"), over(0.0))]
    return bad


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_norms_cannot_tell_is_left_to_torch(dtype: torch.dtype):
    w = torch.randn(30, 64).to(dtype)
    for bad, rule in doubtful(dtype):
        other = w.clone()
        other[16:32, 32:48] = bad
        assert portable.pack_bsr(other, (16, 16), rule) is None, (bad, rule)
    # What is small and not stored changes nothing; without a rule nothing is ranked.
    w[16:32, 32:48] = torch.finfo(dtype).tiny if dtype != torch.float16 else 0
    same(w, (16, 16), kept(0.75))
    same(w, (16, 16), over(1e-3))
    w[0, 0], w[17, 33] = torch.nan, torch.finfo(dtype).tiny / 2
    equal(same(w, (16, 16), NOTHING), packed(w, (16, 16), NOTHING))


def test_thresholds_of_any_size_are_rounded_as_by_torch():
    w = torch.randn(32, 32)
    norm = float(torch.linalg.vector_norm(w[:16, :16]))
    for threshold in (1e-300, 1e-9, norm * (1 - 1e-6), norm * (1 + 1e-6), 1e30, 1e300):
        same(w, (16, 16), over(threshold))
        same(w.double(), (16, 16), over(threshold))


def test_nothing_behind_a_matrix_is_read(last_page: Tensor):
    for rows, columns in ((1, 1), (17, 33), (16, 48), (31, 40)):
        part = last_page[-2 * rows * columns :].view(torch.float16).view(rows, columns)
        part.copy_(torch.randn(rows, columns))
        same(part, (16, 32), kept(1.0))
        mask = last_page[-rows * columns :].view(torch.bool).view(rows, columns)
        mask.view(torch.int8).copy_(torch.rand(rows, columns) < 0.5)
        same(torch.randn(rows, columns), (16, 32), masked(mask))


def test_bits_of_bf16_and_of_nan_are_moved_as_they_are():
    bits = torch.randint(-(2**15), 2**15, (70, 100), dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        same(bits.view(dtype), (32, 48), masked(torch.rand(3, 3) < 0.7))
        same(bits.view(dtype), (32, 48), NOTHING)


def test_what_the_kernels_do_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    w = torch.randn(32, 64)
    assert portable.pack_bsr(w.T, (16, 16), NOTHING) is None
    assert portable.pack_bsr(w[:, ::2], (16, 16), NOTHING) is None
    assert portable.pack_bsr(w[:0], (16, 16), kept(0.5)) is None
    assert portable.pack_bsr(torch._neg_view(w), (16, 16), kept(0.5)) is None
    assert portable.pack_bsr(w, (16, 16), masked(torch.ones(64, 32, dtype=torch.bool).T)) is None
    monkeypatch.setattr(portable, "CELLS", 7)
    assert portable.pack_bsr(w, (16, 16), kept(0.5)) is None
    same(w, (16, 16), kept(0.5, "row"))
    same(w, (16, 16), over(16.0))


class Again(Recorded):
    """A recorded call that runs the recorded function."""

    __slots__ = ("ran", "run")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.ran, self.device, self.stream = run, 0, 0, 0

    def repeat(self, operands: Sequence[Tensor]) -> Any:
        self.ran += 1
        return self.run()

    def is_fresh(self) -> bool:
        return True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """The calls that are recorded, on a CPU that passes for a GPU: each runs again when it is found."""
    made: list[Again] = []

    def record(run: Callable[[], Any], given: Any) -> tuple[Any, Again]:
        made.append(Again(run))
        return run(), made[-1]

    monkeypatch.setattr(recorded_calls, "record", record)
    monkeypatch.setattr(recorded_calls, "_device", lambda: 0)
    monkeypatch.setattr(recorded_calls, "_stream", lambda device: 0)
    monkeypatch.setattr(recorded_calls, "_capturing", lambda: False)
    monkeypatch.setattr(Tensor, "get_device", lambda x: 0)
    monkeypatch.setattr(ops, "_calls", recorded_calls.Calls())
    return made


def test_a_third_call_with_the_same_options_is_repeated(recorded: list[Again]):
    pack, again = KERNELS["pack_bsr"], KERNELS["pack_bsr_again"]
    w, rule = torch.randn(32, 64), kept(0.5, "row")
    assert again(w, 16, 0.5, "row") is None
    right = pack(w, (16, 16), rule)
    assert again(w, 16, 0.5, "row") is None
    equal(pack(w, (16, 16), rule), right)
    assert len(recorded) == 1
    for block in (16, (16, 16)):
        equal(again(w, block, 0.5, "row"), right)
    assert recorded[0].ran == 2
    # Options that differ, are not what was checked, or are no options at all; and another matrix.
    for options in (
        (32, 0.5, "row"), (16, 0.25, "row"), (16, 0.5, "global"), (16, 0.5, ["row"]), (16, None, "row"),
        (16.0, 0.5, "row"), ([16, 16], 0.5, "row"), ((16.0, 16), 0.5, "row"), (None, 0.5, "row"),
    ):  # fmt: skip
        assert again(w, *options) is None, options
    assert again([w], 16, 0.5, "row") is None
    assert again(w.double(), 16, 0.5, "row") is None
    assert again(torch.randn(64, 64), 16, 0.5, "row") is None
    for same_as_one in (1, True):
        for _ in range(2):
            pack(w, (16, 16), kept(1.0))
        assert again(w, 16, 1.0, "global") is not None
        assert again(w, 16, same_as_one, "global") is None, same_as_one
    # A norm that does not decide is not overlooked, and the word for it is used again.
    w[20, 40] = torch.nan
    assert again(w, 16, 0.5, "row") is None
    assert pack(w, (16, 16), rule) is None
    w[20, 40] = 0
    assert again(w, 16, 0.5, "row") is not None


def test_the_operations_have_registered_it_and_leave_alone_what_is_looked_at_op_by_op():
    registered = KERNELS["pack_bsr"]
    assert registered is ops._pack_bsr
    w = torch.randn(32, 64)
    made = registered(w, (16, 16), kept(0.5))
    assert made is not None
    equal(made, same(w, (16, 16), kept(0.5)))

    class Other(Tensor):
        pass

    assert registered(w.as_subclass(Other), (16, 16), NOTHING) is None
    seen = []
    torch.func.vmap(lambda x: (seen.append(registered(x, (16, 16), NOTHING)), x)[1])(w[None])
    assert seen == [None]
