"""BlockMask: what its constructor refuses, what it derives, and how it travels."""

import copy
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from sparsek.attn.mask import check, elements
from sparsek.attn.mask.lists import BY_INTERVAL, BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from tests.attn.mask.masks import check_mask
from tests.refusals import refused


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parts(**changes: Any) -> dict[str, Any]:
    """Of a sound mask: 2 tiles of 64 queries, 3 blocks of 64 keys, the last one cut. Tile 0 sees all of block 1 and by
    interval some of block 0; tile 1 sees by bits the first key of blocks 0 and 2.
    """
    bits = torch.zeros(1, 64, 2, dtype=torch.int32)
    bits[:, :, 0] = 1
    sound = {
        "q_len": 100,
        "kv_len": 150,
        "block": (64, 64),
        "batch": 1,
        "heads": 1,
        "full": BlockLists(ints(0, 0), ints(1, 0), ints(1)),
        "partial": BlockLists(ints(0, 1), ints(1, 2), ints(0, 0, 2)),
        "lo": torch.full((1, 100), 5, dtype=torch.int32),
        "hi": torch.full((1, 100), 150, dtype=torch.int32),
        "rules": ints(BY_INTERVAL, 0, 0),
        "bits": bits,
    }
    assert set(changes) <= {*sound, "pure", "label"}
    return sound | changes


def test_a_mask_says_what_it_stores():
    mask = BlockMask(**parts(label="mine"))
    assert (mask.grid, mask.rows, mask.density) == ((2, 3), 2, 4 / 6)
    assert mask.sizes == (4, 3, 2, True)
    assert (mask.stored_blocks, mask.partial_blocks, mask.device.type) == (4, 3, "cpu")
    assert mask.elements == 64 * 64 + 64 * 59 + 36 * 2
    assert mask.nbytes == 4 * (5 + 7 + 200 + 3 + 128)
    assert repr(mask) == (
        "BlockMask(mine, 100 x 150, block 64x64, batch 1, heads 1, 4 of 6 blocks, 66.7 %, 3 partial, cpu)"
    )


def test_a_mask_of_hand_has_the_elements_its_rules_admit():
    seen = check_mask(BlockMask(**parts()))[0, 0]
    wanted = torch.zeros(100, 150, dtype=torch.bool)
    wanted[:64, 5:128] = True
    wanted[64:, [0, 128]] = True
    assert torch.equal(seen, wanted)


def test_full_is_a_builder_of_the_class_and_a_list_of_the_mask():
    mask = BlockMask.full(256, block=64)
    assert isinstance(mask.full, BlockLists)
    assert mask.full.counts.tolist() == [4] * 4
    assert BlockMask.full.__call__.__doc__


def test_rows_share_what_they_have_in_common():
    mask = BlockMask.causal(64 * 100, block=64)
    assert mask.full.indices is mask.partial.indices
    assert mask.full.indices.tolist() == list(range(100))
    assert mask.nbytes == 4 * (100 + 4 * 100 + 2 * 6400)


def test_sizes_that_are_bounds_are_called_so():
    mask = replace_unchecked(BlockMask.causal(256, block=64), sizes=(16, 4, 4, False))
    assert repr(mask).endswith("at most 16 of 16 blocks, 100 %, at most 4 partial, cpu)")
    assert (mask.stored_blocks, mask.partial_blocks, mask.density) == (10, 4, 10 / 16)
    check_mask(mask)


def replace_unchecked(mask: BlockMask, **changes: Any) -> BlockMask:
    sizes = type(mask.sizes)(*changes.pop("sizes", mask.sizes))
    held = {name: getattr(mask, name) for name in BlockMask._fields}
    return BlockMask.unchecked(**held | changes | {"sizes": sizes})


def test_replacing_a_field_checks_again():
    refused(r"hi\[0, 0\] is 150; keys are 0 to kv_len = 140", replace, BlockMask(**parts()), kv_len=140)


def test_unchecked_wants_every_part_and_no_other():
    with pytest.raises(TypeError, match="needs kv_len"):
        BlockMask.unchecked(q_len=5)
    with pytest.raises(TypeError, match="no field seq_len"):
        BlockMask.unchecked(**parts(), seq_len=5)


def lists(starts: Any, counts: Any, indices: Any) -> BlockLists:
    return BlockLists(ints(*starts), ints(*counts), ints(*indices))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q_len": ({"q_len": -1}, "q_len is -1"),
    "block": ({"block": (64, 32)}, r"block is \(64, 32\)"),
    "batch": ({"batch": 0}, "batch is 0; it must be an int of at least 1"),
    "heads": ({"heads": True}, "heads is True"),
    "rows": ({"heads": 2}, "full.starts has 2 entries; batch 1 x heads 2 x 2 query tiles are 4 rows"),
    "no tensor": ({"lo": [0]}, "lo must be a dense torch.Tensor, got list"),
    "dtype": ({"rules": torch.zeros(3)}, "dtype of rules is torch.float32; it must be torch.int32"),
    "strides": ({"rules": ints(0, 0, 0, 0, 0, 0)[::2]}, r"rules must be contiguous, got stride \(2,\)"),
    "device": ({"rules": torch.empty(3, dtype=torch.int32, device="meta")}, "rules is on meta"),
    "one end": ({"hi": None}, "lo or hi is missing"),
    "short lo": ({"lo": ints(5)[None], "hi": ints(5)[None]}, r"lo is \[1, 1\]; it must be 1 x 100"),
    "rules": ({"rules": ints(0)}, "rules has 1 entries and partial.indices 3; they are parallel"),
    "bits": (
        {"bits": torch.zeros(1, 64, 4, dtype=torch.int32)},
        r"bits is \[1, 64, 4\]; .* need \[n, 64, 2\]",
    ),
    "negative": (
        {"full": lists((0, 0), (1, -1), (1,))},
        r"full blocks of query tile 1 .* \(start and count -1\)",
    ),
    "start": ({"full": lists((-1, 0), (1, 0), (1,))}, "full blocks of query tile 0 are entries -1 to 0"),
    "end": (
        {"full": lists((0, 0), (2, 0), (1,))},
        "query tile 0 are entries 0 to 2 .* full.indices has 1",
    ),
    "column": (
        {"full": lists((0, 0), (1, 0), (3,))},
        "full blocks of query tile 0 are 3; key blocks are 0 to 2",
    ),
    "before": (
        {"full": lists((0, 0), (1, 0), (-1,))},
        "full blocks of query tile 0 are -1; key blocks are 0 to 2",
    ),
    "unsorted": (
        {"full": lists((0, 0), (0, 2), (1, 0))},
        "full blocks of query tile 1 are 1, 0; they must ascend",
    ),
    "repeated": ({"partial": lists((0, 1), (1, 2), (0, 2, 2))}, "partial blocks of query tile 1 are 2, 2"),
    "cut": ({"full": lists((0, 0), (1, 0), (2,))}, "full blocks of query tile 0 reach beyond kv_len 150"),
    "twice": ({"full": lists((0, 0), (2, 0), (0, 1))}, "key block 0 is full and partial in query tile 0"),
    "low rule": ({"rules": ints(-2, 0, 0)}, r"rules\[0\], query tile 0, is -2; -1 means by interval"),
    "high rule": ({"rules": ints(-1, 0, 1)}, r"rules\[2\], query tile 1, is 1; .* bits has 1 entries"),
    "no interval": ({"lo": None, "hi": None}, "query tile 0 is by interval; the mask has no lo and hi"),
    "lo": ({"lo": torch.full((1, 100), -1).int()}, r"lo\[0, 0\] is -1; keys are 0 to kv_len = 150"),
    "hi": ({"hi": torch.full((1, 100), 151).int()}, r"hi\[0, 0\] is 151; keys are 0 to kv_len = 150"),
    "beyond": (
        {"bits": torch.full((1, 64, 2), -1).int()},
        r"bits\[0\], query tile 1, admits keys beyond kv_len 150",
    ),
    "pure bits": ({"pure": True}, "pure is True, but some rules are bits; a pure mask has intervals only"),
    "pure full": (
        {"pure": True, "rules": None, "bits": None, "lo": torch.full((1, 100), 65).int()},
        "pure is True, but full blocks of query tile 0 lie outside lo and hi",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_mask_is_refused_with_where_and_what_would_be_right(name: str):
    changes, message = REFUSED[name]
    refused(message, BlockMask, **parts(**changes))


def test_a_fault_in_some_head_is_found_there():
    full = lists([0] * 12, [0] * 9 + [1, 0, 0], (9,))
    with pytest.raises(InvalidInput, match="full blocks of query tile 1 of head 1 of batch item 1 are 9"):
        BlockMask(**parts(batch=2, heads=3, full=full, partial=lists([0] * 12, [0] * 12, (0, 0, 2))))


def combs(rows: int, columns: int, **changes: Any) -> dict[str, Any]:
    """Parts of a mask whose rows share two lists: even columns are full, odd ones partial."""
    zero, half = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), columns // 2).int()
    full, partial = (BlockLists(zero, half, torch.arange(odd, columns, 2).int()) for odd in (0, 1))
    lo, hi = torch.zeros(1, rows * 64).int(), torch.full((1, rows * 64), columns * 64).int()
    made = {"q_len": rows * 64, "kv_len": columns * 64, "block": (64, 64), "batch": 1, "heads": 1}
    return made | {"full": full, "partial": partial, "lo": lo, "hi": hi} | changes


def test_rows_that_share_long_lists_are_checked_without_memory_for_each_of_them():
    known = combs(4096, 1 << 18)
    tracemalloc.start()
    mask = BlockMask(**known)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mask.sizes == (1 << 30, 1 << 29, 1 << 18, True)
    assert peak < 64 << 20, f"{peak >> 20} MB for lists of {mask.nbytes >> 20} MB"


def test_more_blocks_than_can_be_indexed_are_refused():
    with pytest.raises(InvalidInput, match=r"the mask has 2147483648 blocks; at most 2147483647 \(int32\)"):
        BlockMask(**combs(8192, 1 << 18))


@pytest.mark.parametrize("step", [1, 5, 12, 1000])
def test_a_block_that_is_twice_is_found_in_any_step(monkeypatch: pytest.MonkeyPatch, step: int):
    monkeypatch.setattr(check, "ENTRIES", step)
    starts, counts, columns = torch.arange(0, 45, 5).int(), ints(*[5] * 9), ints(*[0, 2, 4, 6, 8] * 9)
    BlockMask(**combs(9, 10, full=BlockLists(starts, counts, columns)))
    columns[-2] = 7
    with pytest.raises(InvalidInput, match="key block 7 is full and partial in query tile 8;"):
        BlockMask(**combs(9, 10, full=BlockLists(starts, counts, columns)))


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_elements_are_counted_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, step: int):
    monkeypatch.setattr(elements, "ENTRIES", step)
    mask = BlockMask.sliding_window(700, 150, sinks=70, block=64, device="cpu")
    assert mask.elements == int(mask.to_dense().sum())


def test_unused_entries_and_empty_rows_may_hold_anything():
    mask = BlockMask(**parts(full=lists((99, 1), (0, 1), (7, 1, -3))))
    assert mask.full.counts.tolist() == [0, 1]
    check_mask(mask)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.data())
def test_rows_of_the_dense_form(q_len: int, kv_len: int, window: int, data: st.DataObject):
    mask = BlockMask.sliding_window(q_len=q_len, kv_len=kv_len, window=window + 1, sinks=9, block=(64, 128))
    first = data.draw(st.integers(0, q_len))
    last = data.draw(st.integers(first, q_len))
    assert torch.equal(mask.dense_rows(first, last), mask.to_dense()[:, :, first:last])


@pytest.mark.parametrize("rows", [(-1, 5), (5, 4), (0, 101)])
def test_rows_that_are_not_there_are_refused(rows: tuple[int, int]):
    refused(r"(first|last) is .*; it must be an int from . to 100", BlockMask(**parts()).dense_rows, *rows)


def test_a_dense_form_that_is_too_large_is_refused():
    refused(r"at most 2147483648 are made at once\. Use dense_rows", BlockMask.causal(65536).to_dense)
    assert BlockMask.causal(65536).dense_rows(65535, 65536).all()


def test_element_masks_are_the_rules_of_entries():
    mask = BlockMask(**parts())
    seen = mask.element_mask(torch.tensor([1, 0, 1]), torch.tensor([2, 0, 1]))
    assert seen.shape == (3, 64, 64)
    assert seen[1, :, 5:].all()
    assert not seen[1, :, :5].any()
    assert seen[0].nonzero().tolist() == seen[2].nonzero().tolist() == [[q, 0] for q in range(36)]


def test_the_host_sees_the_same_numbers_once():
    mask = BlockMask(**parts())
    assert mask.host is mask.host
    assert mask.host.partial.indices.tolist() == [0, 0, 2]
    assert isinstance(mask.host.lo, np.ndarray)
    assert BlockMask.full(64, block=64).host.lo is None


def test_transposed_lists_are_made_once_and_without_reading():
    mask = BlockMask.sliding_window(1000, 200, block=64)
    assert mask.transposed is mask.transposed
    assert mask.transposed.full.starts.numel() == 16


def test_transposed_lists_where_sizes_are_bounds():
    mask = BlockMask.sliding_window(1000, 200, block=64)
    loose = replace_unchecked(mask, sizes=(200, 90, 16, False))
    for ours, theirs in zip(loose.transposed[:2], mask.transposed[:2], strict=True):
        assert torch.equal(ours.starts, theirs.starts)
        assert torch.equal(ours.counts, theirs.counts)
        assert torch.equal(ours.indices[: theirs.indices.numel()], theirs.indices)
    check_mask(loose)


def test_derived_builds_once():
    mask, built = BlockMask.full(64), []
    for _ in range(2):
        assert mask.derived("plan", lambda: built.append(1) or "made") == "made"
    assert built == [1]


def test_to_the_same_device_is_the_same_object():
    mask = BlockMask.full(64)
    assert mask.to("cpu") is mask
    refused("use a CUDA device or the CPU", mask.to, "meta")


def test_pickle_keeps_the_mask_and_checks_it_again():
    mask = BlockMask(**parts(label="mine"))
    again = pickle.loads(pickle.dumps(mask))  # noqa: S301
    assert repr(again) == repr(mask)
    assert torch.equal(again.to_dense(), mask.to_dense())
    wrong = pickle.dumps(replace_unchecked(mask, q_len=500))
    with pytest.raises(InvalidInput, match=r"full\.starts has 2 entries"):
        pickle.loads(wrong)  # noqa: S301


def test_copies_are_the_mask_itself():
    mask = BlockMask.full(64)
    assert copy.copy(mask) is mask
    assert copy.deepcopy(mask) is mask


MADE: dict[str, Callable[[], BlockMask]] = {
    "by hand": lambda: BlockMask(**parts()),
    "full": lambda: BlockMask.full(128),
    "causal": lambda: BlockMask.causal(300),
    "sinks": lambda: BlockMask.sliding_window(500, 100, sinks=10),
}


@pytest.mark.parametrize("name", MADE)
def test_pytree_leaves_are_the_tensors(name: str):
    mask = MADE[name]()
    leaves, spec = _pytree.tree_flatten(mask)
    assert leaves[:3] == list(mask.full)
    again = _pytree.tree_unflatten(leaves, spec)
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert (again.sizes, again.pure, again.label) == (mask.sizes, mask.pure, mask.label)
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(mask)[0]]
    assert paths[:4] == [".full.starts", ".full.counts", ".full.indices", ".partial.starts"]
    assert "lists not concrete" in repr(_pytree.tree_unflatten([None] * len(leaves), spec))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MADE)
def test_a_mask_on_a_gpu_and_back(name: str):
    mask = MADE[name]()
    there = mask.to("cuda")
    assert there.device.type == "cuda"
    check_mask(BlockMask(**{field: getattr(there, field) for field in parts()}).to("cpu"))
    assert torch.equal(there.to_dense().cpu(), mask.to_dense())
    assert there.elements == mask.elements
    assert all(map(np.array_equal, there.host.full, mask.host.full))


def test_heavy_blocks_are_those_of_rows_over_twice_the_mean():
    built = BlockMask.bigbird(4096, window=128, globals=128, random=0, device="cpu")
    lengths = built.full.counts + built.partial.counts
    heavy = int(lengths[lengths > 2 * lengths.float().mean()].sum())
    assert 0 < heavy < built.stored_blocks
    assert built.heavy_blocks == heavy
    loose = replace_unchecked(built)
    assert loose.heavy_blocks == built.stored_blocks  # nothing is known on the host
    assert BlockMask(4096, 4096, built.block, 1, 1, built.full, built.partial).heavy_blocks == heavy
