"""Builders of block masks, each against its definition written down densely; what they cost; what they refuse."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek.attn.mask import readback
from sparsek.attn.mask.build import lists as listed
from sparsek.attn.mask.build import selection_reference
from sparsek.attn.mask.lists import Sizes
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern
from tests.attn.mask.masks import check_mask
from tests.refusals import refused

SIDES = st.sampled_from((64, 128))
LONG = 512 * 1024


class Grid:
    """A drawn shape: lengths, block and offset, and the positions and blocks of a dense definition."""

    def __init__(self, q_len: int, kv_len: int, block: tuple[int, int], q_offset: int | None) -> None:
        self.keywords: dict[str, Any] = {
            "q_len": q_len,
            "kv_len": kv_len,
            "block": block,
            "q_offset": q_offset,
        }
        self.block, self.tiles, self.columns = block, -(-q_len // block[0]), -(-kv_len // block[1])
        self.position = torch.arange(q_len)[:, None] + (kv_len - q_len if q_offset is None else q_offset)
        self.key = torch.arange(kv_len)[None]

    def __repr__(self) -> str:
        return str(self.keywords)

    @property
    def causal(self) -> Tensor:
        return self.key <= self.position

    def of_blocks(self, kept: Callable[[int, int, int], bool]) -> Tensor:
        """Elements of the blocks j that `kept(p, last p, j)` keeps, where p are the key blocks a tile stands in."""
        seen = torch.zeros(self.position.shape[0], self.key.shape[1], dtype=torch.bool)
        (bq, bk), position = self.block, self.position[:, 0].tolist()
        for i in range(self.tiles):
            here = position[i * bq : (i + 1) * bq]
            for j in range(self.columns):
                seen[i * bq : (i + 1) * bq, j * bk : (j + 1) * bk] = kept(here[0] // bk, here[-1] // bk, j)
        return seen


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    kv_len = draw(st.integers(0, 420))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(0, 420)))
    offset = draw(st.one_of(st.none(), st.integers(-300, 300)))
    return Grid(q_len, kv_len, (draw(SIDES), draw(SIDES)), offset)


def agrees(mask: BlockMask, wanted: Tensor) -> None:
    """The mask is sound and holds just these elements."""
    seen = check_mask(mask)
    assert torch.equal(seen, wanted.expand_as(seen))


@given(grids())
def test_full_sees_everything(grid: Grid):
    mask = BlockMask.full(**grid.keywords)
    agrees(mask, torch.ones_like(grid.causal))
    assert mask.pure
    assert (mask.lo is None) == (mask.kv_len % mask.block[1] == 0)


@given(grids())
def test_causal_sees_what_is_not_later(grid: Grid):
    mask = BlockMask.causal(**grid.keywords)
    agrees(mask, grid.causal)
    assert mask.pure
    assert mask.sizes.exact


@given(grids(), st.integers(1, 300), st.one_of(st.just(0), st.just(128), st.integers(1, 300)), st.booleans())
def test_a_window_with_sinks(grid: Grid, window: int, sinks: int, causal: bool):
    mask = BlockMask.sliding_window(window=window, sinks=sinks, causal=causal, **grid.keywords)
    near = (grid.position - grid.key).abs() < window
    agrees(mask, ((near | (grid.key < sinks)) & grid.causal) if causal else (near | (grid.key < sinks)))
    assert mask.pure or sinks
    if mask.bits is not None:
        assert mask.bits.shape[0] <= 16  # only where window and sinks meet, however long the mask is


@given(grids(), st.integers(1, 4), st.integers(1, 300), st.booleans())
def test_strides_count_from_the_tile(grid: Grid, stride: int, window: int, causal: bool):
    bk = grid.block[1]
    mask = BlockMask.strided(stride=stride * bk, window=window, causal=causal, **grid.keywords)
    near = -(-window // bk)

    def kept(p: int, last: int, j: int) -> bool:
        strided = (j < p and (p - j) % stride == 0) or (j > last and (j - last) % stride == 0)
        return p - near < j < last + near or strided

    wanted = grid.of_blocks(kept)
    agrees(mask, wanted & grid.causal if causal else wanted)


@given(grids(), st.integers(1, 400), st.integers(1, 4), st.booleans())
def test_dilation_leaves_gaps_of_blocks(grid: Grid, window: int, dilation: int, causal: bool):
    mask = BlockMask.dilated(window=window, dilation=dilation, causal=causal, **grid.keywords)
    steps = range(1, -(-window // grid.block[1]))

    def kept(p: int, last: int, j: int) -> bool:
        return p <= j <= last or any(j in (p - t * dilation, last + t * dilation) for t in steps)

    wanted = grid.of_blocks(kept)
    agrees(mask, wanted & grid.causal if causal else wanted)


@given(
    grids(), st.integers(1, 200), st.integers(0, 200), st.integers(0, 3), st.integers(0, 99), st.booleans()
)
def test_bigbird_is_window_globals_and_as_many_random_blocks(
    grid: Grid, window: int, globals: int, random: int, seed: int, causal: bool
):
    mask = BlockMask.bigbird(
        window=window, globals=globals, random=random, seed=seed, causal=causal, heads=3, **grid.keywords
    )
    bk = grid.block[1]
    near, wide = -(-window // bk), -(-globals // bk)
    certain = grid.of_blocks(lambda p, last, j: j < wide or p - near < j < last + near)
    position, bq = grid.position[:, 0].tolist(), grid.block[0]
    for i in range(grid.tiles):
        if position[i * bq] < globals:
            certain[i * bq : (i + 1) * bq] = True
    visible = grid.causal if causal else torch.ones_like(grid.causal)
    seen = check_mask(mask)
    assert (seen | ~(certain & visible)).all()
    assert not (seen & ~visible).any()
    for head in seen[0]:
        for i in range(grid.tiles):
            rows = slice(i * bq, (i + 1) * bq)
            blocks = [(part[rows].split(bk, 1)) for part in (head, certain & visible, visible)]
            stored, sure, open_to = (sum(bool(each.any()) for each in part) for part in blocks)
            assert stored == min(sure + random, open_to)


def test_bigbird_draws_by_its_seed_other_blocks_for_each_head():
    first, again, other = (BlockMask.bigbird(4096, 128, 128, 3, seed, heads=4) for seed in (5, 5, 6))
    assert torch.equal(first.full.indices, again.full.indices)
    assert not torch.equal(first.full.indices, other.full.indices)
    heads = first.to_dense()[0]
    assert not torch.equal(heads[0], heads[1])


def test_bigbird_draws_every_block_about_as_often():
    mask = BlockMask.bigbird(64 * 40, 1, 0, 4, seed=1, block=64, heads=500)
    drawn = np.bincount(mask.host.full.indices, minlength=40) / (500 * 40)
    assert 0.09 < drawn.min() <= drawn.max() < 0.15  # 1 + 4 of 40


@st.composite
def documents(draw: st.DrawFn) -> list[list[int]]:
    """Rows of lengths that sum up to the same."""
    rows = draw(st.lists(st.lists(st.integers(0, 150), min_size=1, max_size=5), min_size=1, max_size=3))
    most = max(map(sum, rows))
    return [[*row, most - sum(row)] for row in rows]


@given(documents(), SIDES, SIDES, st.booleans(), st.booleans())
def test_documents_see_themselves(rows: list[list[int]], bq: int, bk: int, causal: bool, as_tensor: bool):
    lengths = [torch.tensor(row) for row in rows] if as_tensor else rows
    mask = BlockMask.block_diagonal(lengths[0] if len(rows) == 1 else lengths, causal, block=(bq, bk))
    owner = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    wanted = (owner[:, :, None] == owner[:, None, :])[:, None]
    agrees(mask, wanted.tril() if causal else wanted)
    assert (mask.batch, mask.pure) == (len(rows), True)


def test_topk_of_equal_scores_keeps_k_of_them_and_of_two_dimensions_one_head():
    mask = BlockMask.topk(torch.zeros(4, 8), 3, q_len=256, kv_len=512, block=64)
    assert (mask.batch, mask.heads, mask.stored_blocks) == (1, 1, 12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_topk_takes_every_float_and_no_gradient(dtype: torch.dtype):
    scores = torch.randn(1, 2, 4, 4, dtype=dtype, requires_grad=True)
    mask = BlockMask.topk(scores, 2, causal=True, always=(1, 1), seq_len=256, block=64)
    check_mask(mask)
    assert scores.grad_fn is None


@given(grids(), st.integers(0, 2**32), st.booleans())
def test_from_blocks_sees_all_of_the_blocks(grid: Grid, seed: int, as_tensor: bool):
    kept = torch.rand(2, 3, grid.tiles, grid.columns, generator=torch.Generator().manual_seed(seed)) < 0.4
    indptr = torch.nn.functional.pad(kept.sum(-1).flatten().cumsum(0), (1, 0))
    indices = kept.nonzero()[:, -1]
    lists = (indptr, indices) if as_tensor else (indptr.tolist(), indices.tolist())
    shape = (len(grid.position), grid.key.numel())
    mask = BlockMask.from_blocks(*lists, *shape, grid.block, batch=2, heads=3)
    wide = kept.repeat_interleave(grid.block[0], 2).repeat_interleave(grid.block[1], 3)
    agrees(mask, wide[:, :, : shape[0], : shape[1]])
    assert mask.pure


def test_what_the_caller_writes_into_lists_afterwards_does_not_matter():
    indptr, indices = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    mask = BlockMask.from_blocks(indptr, indices, 64, 128, 64)
    indices[0] = 9
    assert mask.full.indices.tolist() == [0]


# What masks cost.

LONG_MASKS: dict[str, tuple[Callable[..., BlockMask], float]] = {
    "full": (BlockMask.full, 1),
    "causal": (BlockMask.causal, 9),
    "window": (lambda s, **at: BlockMask.sliding_window(s, 4096, **at), 9),
    "sinks": (lambda s, **at: BlockMask.sliding_window(s, 4096, sinks=128, **at), 10),
    "cut sinks": (lambda s, **at: BlockMask.sliding_window(s, 4096, sinks=100, **at), 10),
    "strided": (lambda s, **at: BlockMask.strided(s, 16384, 4096, **at), 10),
    "dilated": (lambda s, **at: BlockMask.dilated(s, 4096, 4, **at), 10),
    "bigbird": (lambda s, **at: BlockMask.bigbird(s, 512, 512, 3, **at), 2),
    "documents": (lambda s, **at: BlockMask.block_diagonal([s // 64] * 64, **at), 10),
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_512k_tokens_cost_bytes_per_token_and_a_moment(name: str):
    build, bytes_per_token = LONG_MASKS[name]
    start = time.perf_counter()
    mask = build(LONG)
    assert time.perf_counter() - start < 1
    assert mask.nbytes <= bytes_per_token * LONG
    assert mask.sizes.exact


class NoReading(TorchDispatchMode):
    """Fails where a value or a size has to be known to the host, and counts what would be launched."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
    VIEWS = (
        "view", "slice", "select", "expand", "split", "unsqueeze", "detach", "alias", "lift_fresh", "transpose",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        asks_size = name == "repeat_interleave.Tensor" and kwargs.get("output_size") is None
        assert asks_size is False, name
        assert not any(name.startswith(read) for read in self.READS), name
        self.launches += not any(view in name for view in self.VIEWS)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", LONG_MASKS)
def test_builders_read_nothing_and_launch_little(name: str):
    with NoReading() as mode:
        LONG_MASKS[name][0](4096)
    assert mode.launches <= 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG_MASKS)
def test_512k_tokens_cost_a_gpu_few_launches_and_little_memory(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    """What its time depends on. The time itself is a row of `sparsek bench fresh`: mask_plan."""
    build, bytes_per_token = LONG_MASKS[name]
    build(4096, device="cuda")  # the first work of a process makes the context and its handles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_sync(), NoReading() as mode:
        mask = build(LONG, device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    assert mode.launches <= 42
    assert mask.nbytes <= bytes_per_token * LONG
    assert peak <= 64 * LONG  # half of what one int32 for every block would take


def test_topk_reads_nothing_and_launches_little(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection_reference, "with_readbacks", lambda mask, asked: mask)
    scores = torch.randn(1, 4, 32, 32)
    with NoReading() as mode:
        BlockMask.topk(scores, 4, causal=True, always=(1, 1), seq_len=4096)
    assert mode.launches <= 100


# What is refused.

NAN = torch.full((2, 2), torch.nan)
GOOD = torch.zeros(2, 2)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no length": (BlockMask.causal, "a length is missing; give seq_len"),
    "half a length": (lambda: BlockMask.causal(q_len=5), "a length is missing"),
    "all lengths": (lambda: BlockMask.causal(5, q_len=5, kv_len=5), "use seq_len alone"),
    "negative length": (lambda: BlockMask.full(-1), "seq_len is -1; it must be an int of at least 0"),
    "a float": (lambda: BlockMask.full(1.5), "seq_len is 1.5"),  # type: ignore[arg-type]
    "too long": (lambda: BlockMask.full(2**31 - 1), "must fit int32"),
    "far away": (lambda: BlockMask.causal(64, q_offset=2**31 - 2), "the positions of queries must fit int32"),
    "block": (lambda: BlockMask.full(64, block=32), "block is 32; masks have blocks of 64 or 128"),
    "block pair": (lambda: BlockMask.full(64, block=(64, 256)), "blocks of 64 or 128"),
    "block triple": (lambda: BlockMask.full(64, block=(64, 64, 64)), "blocks of 64 or 128"),  # type: ignore[arg-type]
    "device": (lambda: BlockMask.full(64, device="meta"), "use a CUDA device or the CPU"),
    "keyword": (lambda: BlockMask.full(64, blocks=64), "this mask has no option blocks; beside its own"),  # type: ignore[call-arg]
    "no window": (lambda: BlockMask.sliding_window(64), "window is None; it must be an int of at least 1"),
    "window of none": (
        lambda: BlockMask.sliding_window(64, 0),
        "window is 0; it must be an int of at least 1",
    ),
    "sinks": (lambda: BlockMask.sliding_window(64, 1, sinks=-1), "sinks is -1"),
    "stride": (
        lambda: BlockMask.strided(256, 100, 64),
        "stride is 100; it must be a multiple of the block's 128 keys",
    ),
    "dilation": (lambda: BlockMask.dilated(256, 64, 0), "dilation is 0"),
    "random": (lambda: BlockMask.bigbird(256, 64, 64, -1), "random is -1"),
    "seed": (lambda: BlockMask.bigbird(256, 64, 64, 1, seed=-1), "seed is -1"),
    "lengths": (
        lambda: BlockMask.block_diagonal([3, 4], seq_len=8),
        "lengths of batch item 0 sum up to 7; seq_len is 8",
    ),
    "uneven": (
        lambda: BlockMask.block_diagonal([[3, 4], [3]]),
        "batch item 1 sum up to 3; those of batch item 0 to 7",
    ),
    "below 0": (lambda: BlockMask.block_diagonal([3, -4]), "hold -4; a document has 0 to"),
    "halves": (lambda: BlockMask.block_diagonal([3.5]), "float64"),
    "no documents": (lambda: BlockMask.block_diagonal([]), r"lengths is \[\]; it must hold the length"),
    "a number": (lambda: BlockMask.block_diagonal(5), "lengths is 5; it must hold the length"),
    "NaN": (
        lambda: BlockMask.topk(torch.stack((GOOD, NAN))[None], 1, seq_len=256),
        r"scores\[0, 1, 0, 0\] is NaN",
    ),
    "ints": (
        lambda: BlockMask.topk(torch.zeros(2, 2).int(), 1, seq_len=256),
        "dtype of scores is torch.int32; use one of",
    ),
    "a list": (
        lambda: BlockMask.topk([[1.0]], 1, seq_len=128),  # type: ignore[arg-type]
        r"scores must be a dense torch.Tensor, got list",
    ),
    "scores": (
        lambda: BlockMask.topk(GOOD, 1, seq_len=300),
        r"scores are \[1, 1, 2, 2\]; .* need \[batch, heads, 3, 3\]",
    ),
    "k": (lambda: BlockMask.topk(GOOD, 0, seq_len=256), "k is 0; it must be an int of at least 1"),
    "always ints": (
        lambda: BlockMask.topk(GOOD, 1, always=(1, 1), seq_len=256),
        "keeps 2 blocks in query tile 1",
    ),
    "always three": (lambda: BlockMask.topk(GOOD, 1, always=(1, 1, 1), seq_len=256), "it must be two ints"),  # type: ignore[arg-type]
    "always dtype": (lambda: BlockMask.topk(GOOD, 1, always=GOOD, seq_len=256), "always is torch.float32"),
    "always shape": (
        lambda: BlockMask.topk(GOOD, 1, always=torch.ones(3, 2, 2).bool(), seq_len=256),
        r"always is \[3, 2, 2\]; scores of \[1, 1, 2, 2\] need \[2, 2\]",
    ),
    "always many": (
        lambda: BlockMask.topk(GOOD, 1, always=torch.tensor([[True, False], [True, True]]), seq_len=256),
        r"always\[0, 0, 1\] keeps more than k = 1 blocks",
    ),
    "rows": (
        lambda: BlockMask.from_blocks([0, 1], [0], 256, 256),
        "indptr has 2 entries; .* are 2 rows and need 3",
    ),
    "outside": (
        lambda: BlockMask.from_blocks([0, 1], [2], 128, 256),
        r"indices\[0\] is 2, .* block columns are 0 to 1",
    ),
    "repeated": (lambda: BlockMask.from_blocks([0, 2], [1, 1], 128, 256), "repeats the one before it"),
    "unsorted": (
        lambda: BlockMask.from_blocks([0, 2], [1, 0], 128, 256),
        "is smaller than the one before it",
    ),
    "falling": (lambda: BlockMask.from_blocks([0, 2, 1], [0, 1], 256, 256), "indptr falls from 2 to 1"),
    "many": (lambda: BlockMask.from_blocks([0, 3], [0, 1, 2], 128, 256), "1 rows of 2 blocks hold no more"),
    "far": (
        lambda: BlockMask.from_blocks([0, 1], [2**40], 128, 256),
        r"indices\[0\] is 1099511627776; it must fit int32",
    ),
    "half": (lambda: BlockMask.from_blocks([0, 1], [0.5], 128, 256), "indices is torch.float64"),
    "text": (lambda: BlockMask.from_blocks([0, 1], "0", 128, 256), "indices"),
    "heads": (lambda: BlockMask.from_blocks([0, 1], [0], 128, 256, heads=0), "heads is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_what_would_be_right(name: str):
    call, message = REFUSED[name]
    refused(message, call)


@given(st.integers(0, 2**32))
def test_the_check_on_the_device_finds_what_the_check_on_the_host_finds(seed: int):
    draw = np.random.default_rng(seed)
    columns = int(draw.integers(1, 4))
    indptr = torch.from_numpy(np.sort(draw.integers(0, 5, 4)) + draw.choice((0, 0, 0, -1, 9), 4))
    indices = torch.from_numpy(draw.integers(-1, columns + 1, int(draw.integers(0, 5))))
    with NoReading():
        found = listed._wrong(indptr, indices, columns)
    try:
        BlockPattern((3 * 64, columns * 64), (64, 64), indptr.int(), indices.int())
        assert not found
    except InvalidInput:
        assert found


# On a GPU.


class Inputs:
    """What builders read, on a device before they are called."""

    def __init__(self, device: str) -> None:
        self.device = device
        draw = torch.Generator().manual_seed(0)
        scores = torch.randperm(2 * 3 * 32 * 32, generator=draw).view(2, 3, 32, 32)
        self.scores, self.always = (scores / 2000).to(device), (scores[0] > 6000).to(device)
        self.indptr = torch.arange(0, 129, 4, dtype=torch.int32).to(device)
        self.indices = torch.arange(3, 32, 8).repeat(32).to(device)


ON_GPU: dict[str, Callable[[Inputs], BlockMask]] = {
    **{
        name: (lambda inputs, build=build: build(4096, device=inputs.device))
        for name, (build, _) in LONG_MASKS.items()
    },
    "bigbird of heads": lambda inputs: BlockMask.bigbird(4096, 128, 128, 3, heads=4, device=inputs.device),
    "topk": lambda inputs: BlockMask.topk(inputs.scores, 5, True, (1, 1), 4096 - 30),
    "topk of heads": lambda inputs: BlockMask.topk(inputs.scores, 9, False, inputs.always, 4096),
    "blocks": lambda inputs: BlockMask.from_blocks(inputs.indptr, inputs.indices, 4096, 4096 - 30),
    "blocks of the host": lambda inputs: BlockMask.from_blocks(
        [0, 2], [0, 1], 128, 200, device=inputs.device
    ),
    "per head": lambda inputs: BlockMask.per_head(
        [
            BlockMask.sliding_window(4096, 300, 100, device=inputs.device),
            BlockMask.full(4096, device=inputs.device),
        ]
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_makes_the_same_mask_and_nobody_waits_for_it(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    inputs, build = Inputs("cuda"), ON_GPU[name]
    build(inputs)
    torch.cuda.synchronize()
    with no_sync():
        mask = build(inputs)
        flipped = mask.transposed
        mask.verify()
    mask.verify(wait=True)
    assert all(part.data_ptr() % 16 == 0 for part in (*mask.full, *mask.partial))
    wanted = build(Inputs("cpu"))
    assert torch.equal(check_mask(mask.to("cpu")), wanted.to_dense())
    assert torch.equal(flipped.full.counts.cpu(), wanted.transposed.full.counts)
    assert torch.equal(build(inputs).to_dense(), mask.to_dense())


@pytest.mark.gpu
def test_a_gpu_tells_of_nan_scores_when_the_mask_is_used(no_sync: Callable[[], AbstractContextManager[None]]):
    scores = torch.zeros(1, 2, 4, 4, device="cuda")
    scores[0, 1, 2, 3] = torch.nan
    with no_sync():
        mask = BlockMask.topk(scores, 4, seq_len=512)
    refused(r"scores\[0, 1, 2, 3\] is NaN", mask.verify, wait=True)
    for use in (lambda: repr(mask), lambda: mask.stored_blocks, lambda: mask.elements):
        refused("is NaN", use)
    assert mask.full.counts.tolist() == [4] * 6 + [3, 4]


@pytest.mark.gpu
def test_wrong_lists_on_a_gpu_visit_nothing_and_are_told_of(
    no_sync: Callable[[], AbstractContextManager[None]],
):
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda")
    indices = torch.tensor([1, 7, 0], dtype=torch.int32, device="cuda")
    with no_sync():
        mask = BlockMask.from_blocks(indptr, indices, 256, 256)
    refused(r"indices\[1\] is 7, entry 1 of block row 0; block columns are 0 to 1", mask.verify, wait=True)
    assert not mask.full.counts.any()


def test_true_sizes_take_the_place_of_bounds():
    """As `from_blocks` does with lists on a GPU, once they have been counted there."""
    mask = BlockMask.bigbird(2048, window=128, globals=128, random=0, device="cpu")
    loose = BlockMask.unchecked(
        q_len=2048, kv_len=2048, block=mask.block, batch=1, heads=1, full=mask.full, partial=mask.partial, lo=mask.lo,
        hi=mask.hi, rules=mask.rules, bits=mask.bits, sizes=Sizes(999, 99, 16, exact=False), pure=mask.pure,
    )  # fmt: skip
    assert loose.heavy_blocks == 999
    late = readback.DeferredSizes()
    late.apply(loose, wait=False)
    assert not loose.sizes.exact
    late.apply(loose, wait=True)
    assert loose.sizes == mask.sizes
    assert loose.heavy_blocks == mask.heavy_blocks


@pytest.mark.gpu
def test_lists_on_a_gpu_are_counted_there(no_sync: Callable[[], AbstractContextManager[None]]):
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda")
    indices = torch.tensor([0, 1, 1], dtype=torch.int32, device="cuda")
    with no_sync():
        mask = BlockMask.from_blocks(indptr, indices, 256, 200)
        assert not mask.sizes.exact
    mask.verify(wait=True)
    assert mask.sizes == (3, 2, 2, True)
