"""BlockMask.from_mask_mod: the same pairs as FlexAttention's own create_mask, evaluated in chunks."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from sparsek.attn.mask.convert import evaluate
from sparsek.attn.mask.convert import flex as masks
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from tests.refusals import refused
from tests.sampling import sampled

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def of_tensors(draw: torch.Generator) -> MaskMod:
    """Documents, of which each batch item has its own, and a window and a pattern for each head."""
    ids = torch.randint(0, 4, (2, 400), generator=draw).sort().values
    widths = torch.randint(1, 300, (3,), generator=draw)
    step = int(torch.randint(2, 50, (), generator=draw))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (q - k).abs() < widths[h]
        return (ids[b, q] == ids[b, k]) & torch.where(h == 1, near | (k % step == 0), near)

    return mask_mod


MODS: dict[str, Callable[[torch.Generator], MaskMod]] = {
    "causal": lambda draw: lambda b, h, q, k: q >= k,
    "tensors": of_tensors,
    "joined": lambda draw: flex.and_masks(of_tensors(draw), lambda b, h, q, k: q >= k),
    "everything": lambda draw: flex.noop_mask,
    "nothing": lambda draw: lambda b, h, q, k: q + k < 0,
}


@pytest.mark.parametrize(
    ("name", "block", "chunk"),
    sampled(list(itertools.product(MODS, (64, (128, 64), (64, 128)), (1 << 22, 1 << 14, 1))), 23),
    ids=str,
)
def test_it_sees_what_flex_attention_sees(name: str, block: Any, chunk: int, monkeypatch: pytest.MonkeyPatch):
    seed = torch.Generator().seed() % 2**32
    mask_mod = MODS[name](torch.Generator().manual_seed(seed))
    seen = flex.create_mask(mask_mod, 2, 3, 390, 333, device="cpu")
    monkeypatch.setattr(masks, "CHUNK", chunk)
    mask = BlockMask.from_mask_mod(mask_mod, 2, 3, 390, 333, block=block, device="cpu")
    assert torch.equal(mask.to_dense(), seen), f"seed {seed}"
    same = BlockMask.from_dense(seen, block)
    assert (mask.sizes, mask.pure, mask.elements) == (same.sizes, same.pure, same.elements)
    assert mask.block == same.block


def test_lists_that_all_share_are_of_one_batch_item_and_one_head():
    for nothing in (None, 1):
        mask = BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, nothing, nothing, 200, 200, device="cpu")
        assert (mask.batch, mask.heads) == (1, 1)
        assert torch.equal(mask.to_dense(), BlockMask.causal(200, device="cpu").to_dense())


@pytest.mark.parametrize("lengths", [(0, 0), (0, 70), (70, 0), (1, 1)], ids=str)
def test_lengths_may_be_0(lengths: tuple[int, int]):
    mask = BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 1, 1, *lengths, device="cpu")
    assert (mask.q_len, mask.kv_len, mask.elements) == (*lengths, int(lengths == (1, 1)))


def test_it_is_evaluated_in_chunks_that_cover_every_pair_once():
    asked: list[tuple[int, int, int, int]] = []
    real = masks._values

    def counting(mod: Any, window: masks.QueryWindow, shape: tuple[int, int], *more: Any) -> Tensor:
        asked.append((int(window.query), int(window.key), *shape))
        return real(mod, window, shape, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_values", counting)
        patch.setattr(masks, "CHUNK", 1 << 15)
        BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 1, 2, 500, 1000, block=64, device="cpu")
    assert max(q * k for _, _, q, k in asked) <= 1 << 15
    covered = torch.zeros(512, 1024)
    for query, key, q, k in asked:
        covered[query : query + q, key : key + k] += 1
    assert (covered == 2).all()


def test_its_positions_are_int64_without_dimensions():
    seen: list[tuple[Any, ...]] = []

    def mask_mod(*given: Tensor) -> Tensor:
        seen.append(tuple((x.dtype, x.ndim) for x in given))
        return given[2] >= given[3]

    BlockMask.from_mask_mod(mask_mod, 1, 1, 70, 70, device="cpu")
    assert set(seen) == {((torch.int64, 0),) * 4}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a class": ({"mask_mod": int}, r"mask_mod is .*int.*; it must be a function \(b, h, q_idx, kv_idx\)"),
    "no function": ({"mask_mod": 3}, r"mask_mod is 3; it must be a function \(b, h, q_idx, kv_idx\)"),
    "score_mod": (
        {"mask_mod": lambda score, b, h, q, k: score},
        r"mask_mod takes \(score, b, h, q, k\); it must take \(b, h, q_idx, kv_idx\), and not a score",
    ),
    "a module": ({"mask_mod": torch.nn.LazyLinear(3)}, r"mask_mod takes \(input.*\).*; it must take \(b, h"),
    "numbers": (
        {"mask_mod": lambda b, h, q, k: q - k},
        r"mask_mod returns a torch.Tensor, torch.int64 \[\]; it must return one bool tensor without dimensions for a",
    ),
    "True": (
        {"mask_mod": lambda b, h, q, k: True},
        "mask_mod returns a bool; it must return one bool tensor",
    ),
    "None": ({"mask_mod": lambda b, h, q, k: None}, "mask_mod returns a NoneType; it must return one bool"),
    "a tuple": (
        {"mask_mod": lambda b, h, q, k: (q >= k,)},
        "mask_mod returns a tuple; it must return one bool",
    ),
    "a tensor of a shape": (
        {"mask_mod": lambda b, h, q, k: (q >= k)[None]},
        r"mask_mod returns a torch.Tensor, torch.bool \[1\]; it must return one bool tensor without dimensions",
    ),
    "an array": ({"mask_mod": lambda b, h, q, k: np.ones(70, bool)}, "mask_mod returns a ndarray; it must"),
    "q_len": (
        {"q_len": 70},
        "from_mask_mod has no argument q_len: it is called Q_LEN here, as in create_block",
    ),
    "kv_len": ({"kv_len": 70}, "from_mask_mod has no argument kv_len: it is called KV_LEN here"),
    "BLOCK_SIZE": ({"BLOCK_SIZE": 128}, "from_mask_mod has no argument BLOCK_SIZE: it is called block"),
    "_compile": ({"_compile": True}, "from_mask_mod has no argument _compile: it is called compiled"),
    "batch": ({"B": 0}, "B is 0; it must be an int of at least 1"),
    "heads": ({"H": 1.5}, "H is 1.5; it must be an int of at least 1"),
    "length": ({"Q_LEN": -1}, "q_len is -1"),
    "block": ({"block": 32}, "block is 32; masks have blocks of 64 or 128"),
    "device": ({"device": "cuda:99"}, "device cuda:99 is not on this machine"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str):
    change, text = WRONG[name]
    given = {
        "mask_mod": lambda b, h, q, k: q >= k,
        "B": 1,
        "H": 1,
        "Q_LEN": 70,
        "KV_LEN": 70,
        "device": "cpu",
    }
    refused(text, BlockMask.from_mask_mod, **{**given, **change})


NEEDS_A_VALUE: dict[str, MaskMod] = {
    "if": lambda b, h, q, k: q >= k if q > 5 else k == 0,
    "and": lambda b, h, q, k: q >= k and k > 5,
    "in": lambda b, h, q, k: torch.tensor(q in (1, 2)),
    "item": lambda b, h, q, k: torch.tensor(q.item() >= k.item()),
    "int": lambda b, h, q, k: torch.tensor(int(q) >= int(k)),
    "numpy": lambda b, h, q, k: torch.from_numpy(q.numpy() >= k.numpy()),
    "shapes of values": lambda b, h, q, k: torch.nonzero(q >= k),
}


@pytest.mark.parametrize("name", NEEDS_A_VALUE)
def test_a_function_that_needs_a_value_is_refused_with_torchs_error_as_the_cause(name: str):
    text = "mask_mod cannot run under torch.vmap; it must return one bool tensor .* by &, | and torch.where in place"
    with pytest.raises(InvalidInput, match=text) as raised:
        BlockMask.from_mask_mod(NEEDS_A_VALUE[name], 1, 1, 70, 70, device="cpu")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_missing_length_under_another_name_is_told_by_its_own():
    with pytest.raises(InvalidInput, match="it is called KV_LEN here"):
        BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 1, 1, 70, kv_len=70)  # type: ignore[call-arg]


def test_its_own_errors_are_raised_as_they_are():
    bounds = torch.arange(70)
    with pytest.raises(IndexError, match="out of bounds"):
        BlockMask.from_mask_mod(lambda b, h, q, k: bounds[k + 5] >= q, 1, 1, 70, 70, device="cpu")
    elsewhere = torch.tensor(3, device="meta")
    with pytest.raises(RuntimeError, match="not on the expected device"):
        BlockMask.from_mask_mod(lambda b, h, q, k: q >= elsewhere, 1, 1, 70, 70, device="cpu")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without inductor, which takes seconds for each function."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    masks._compiled.cache_clear()
    yield
    masks._compiled.cache_clear()


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("name", sampled(["causal", "tensors", "nothing"], 1))
def test_compiled_steps_make_the_same_mask(name: str):
    mask_mod = MODS[name](torch.Generator().manual_seed(1))
    for lengths in ((390, 333), (0, 5)):
        made, wanted = (
            BlockMask.from_mask_mod(mask_mod, 2, 3, *lengths, block=64, device="cpu", compiled=each)
            for each in (True, False)
        )
        assert torch.equal(made.to_dense(), wanted.to_dense())
        assert (made.sizes, made.pure, made.heavy_blocks) == (wanted.sizes, wanted.pure, wanted.heavy_blocks)


def test_a_wrong_function_is_refused_before_it_is_compiled():
    with pytest.raises(InvalidInput, match="it must return one bool tensor"):
        BlockMask.from_mask_mod(lambda b, h, q, k: q - k, 1, 1, 70, 70, device="cpu", compiled=True)


@pytest.mark.parametrize("bk", [64, 128])
def test_a_cpu_counts_words_and_finds_the_same_keys(bk: int):
    blocks = torch.rand(30, 5, bk) < torch.rand(30, 5, 1) ** 4
    blocks[3], blocks[4] = True, False
    start = torch.arange(5, dtype=torch.int32) * bk + 7 * bk
    for found, wanted in zip(
        evaluate.seen_on_cpu(blocks, start), evaluate.seen_in(blocks, start), strict=True
    ):
        assert torch.equal(found, wanted)


def test_rows_that_are_classified_apart_make_the_same_mask(monkeypatch: pytest.MonkeyPatch):
    mask_mod = MODS["tensors"](torch.Generator().manual_seed(2))
    wanted = BlockMask.from_mask_mod(mask_mod, 2, 3, 390, 333, block=64, device="cpu")
    monkeypatch.setattr(evaluate, "CELLS", 1)
    made = BlockMask.from_mask_mod(mask_mod, 2, 3, 390, 333, block=64, device="cpu")
    assert torch.equal(made.to_dense(), wanted.to_dense())
    assert made.sizes == wanted.sizes


def waits(told: list[str]) -> int:
    """How many of torch's warnings tell of a wait; the mode's own warning, once a process, is none."""
    return sum("called a synchronizing" in each for each in told)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings(
    "ignore:tl.where with a non-boolean condition"
)  # in code of torch 2.11's compiler
def test_the_host_waits_once(bits: bool, compiled: bool):
    document = torch.arange(3000, device="cuda") // 700

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (document[q] == document[k])
        return seen & ((q - k) % 3 == 0) if bits else seen

    def build(device: str, compiled: bool) -> BlockMask:
        return BlockMask.from_mask_mod(mask_mod, None, 2, 3000, 2900, device=device, compiled=compiled)

    build("cuda", compiled)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            made = build("cuda", compiled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    texts = [str(each.message) for each in told]
    assert 1 <= waits(texts) <= 1 + bits, texts
    document = document.cpu()
    wanted = build("cpu", False)
    assert made.sizes == wanted.sizes
    assert (made.pure, made.heavy_blocks) == (wanted.pure, wanted.heavy_blocks)
    assert torch.equal(made.to_dense().cpu(), wanted.to_dense())
