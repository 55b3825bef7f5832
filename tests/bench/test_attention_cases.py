"""Cases of attention, the texts of their masks, and their suites."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.token_lists.__main__ import write
from sparsek.core.errors import InvalidInput
from sparsek.testing.attention_budget import ExpectedAttention
from sparsek_bench.suites import attention
from sparsek_bench.suites.attention import BENCH, AttentionCase, length_name, parse_lengths, parse_pair
from sparsek_bench.suites.attention_masks import (
    MASK_FORMS,
    RECORDED,
    RECORDED_BLOCK,
    RECORDED_SHAPE,
    parse_mask,
    read_recorded,
)
from tests.refusals import refused

CPU = torch.device("cpu")
SMALL = AttentionCase(1, 2, 1, 256, 256, 32, 32, "causal", (64, 64), "fp32")
TEXTS = (
    "full",
    "causal",
    "window:100",
    "window:64+sinks:3",
    "blocks:0.5",
    "topk:2",
    "documents:100",
    "tokens:2:15",
    "tokens:recorded",
    "bigbird:64:64:1",
    "uniform-like-bigbird:64:64:1",
)


def with_mask(mask: str, **changes: Any) -> AttentionCase:
    return replace(SMALL, mask=mask, **changes)


def test_names_are_short_and_tell_cases_apart() -> None:
    assert SMALL.name == "256 causal, block 64, 2:1 heads, D 32, fp32"
    other = AttentionCase(2, 16, 16, 1024, 32768, 192, 128, "blocks:0.125", (64, 128))
    assert other.name == "1Kx32K random 12.5 %, block 64x128, batch 2, 16 heads, D 192:128, bf16"


def test_the_lines_of_pictures_have_their_points() -> None:
    def lengths(mask: str) -> list[int]:
        cases = {
            entry.case for entry in BENCH.rows if entry.case.mask == mask and entry.case.op == "attention"
        }
        alike = {c for c in cases if (c.block, c.dim, c.dtype) == ((128, 128), 128, "bf16")}
        return sorted(case.q_len // 1024 for case in alike)

    assert lengths("causal") == lengths(attention.EIGHTH) == [2, 8, 32, 128]
    assert lengths(attention.LONG) == [8, 32, 128, 256, 512]
    shares = {entry.case.mask for entry in BENCH.suites["density"]}
    assert shares == {"blocks:0.5", "blocks:0.25", "blocks:0.125", "blocks:0.0625"}


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_is_what_its_text_says(text: str) -> None:
    case = with_mask(text)
    mask = case.mask_maker(CPU)()
    assert (mask.q_len, mask.kv_len, mask.block, mask.batch) == (256, 256, (64, 64), 1)
    dense = mask.to_dense()
    rule = parse_mask(text)
    at = torch.arange(256)
    said = rule.sees(at, at)
    assert (said is None) == (text.split(":")[0] not in ("full", "causal", "window"))
    if said is not None:
        assert torch.equal(dense[0, 0], said)
    if rule.causal:
        assert not dense.triu(1).any()
    if rule.uniform:
        assert mask.heads == 2
        assert (mask.full.counts == 2).all()
        assert not mask.partial_blocks
        assert not torch.equal(dense[0, 0], dense[0, 1])


def test_every_kind_of_mask_is_tried_here() -> None:
    assert {parse_mask(text).form for text in TEXTS} == {each.form for each in MASK_FORMS}


def test_recorded_lists_are_read_as_they_were_written(tmp_path: Path) -> None:
    lists = torch.randint(-1, 128, (2, 300, 5), dtype=torch.int32)
    write(tmp_path / "lists.xz", lists)
    assert torch.equal(read_recorded(tmp_path / "lists.xz", (2, 300, 5)), lists.sort(-1).values)


def test_recorded_lists_are_sixteen_blocks_up_to_the_own_one() -> None:
    lists = read_recorded(RECORDED, RECORDED_SHAPE)
    own = torch.arange(RECORDED_SHAPE[1])[:, None] // RECORDED_BLOCK
    assert ((lists >= -1) & (lists <= own)).all()
    assert (lists[:, 16 * RECORDED_BLOCK :] >= 0).all()
    assert (lists == own).any(-1).all()
    with pytest.raises(InvalidInput, match="blocks of 64"):
        with_mask("tokens:recorded", block=(128, 128)).mask_maker(CPU)


def test_a_random_mask_may_be_drawn_from_other_seeds() -> None:
    case = with_mask("blocks:0.5")
    first, again, other = (case.mask_maker(CPU, seed)().to_dense() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_uniform_mask_has_as_many_blocks_as_its_bigbird(heads: int) -> None:
    shape: dict[str, Any] = {"q_len": 704, "kv_len": 704, "heads": heads, "kv_heads": heads}
    big = with_mask("bigbird:64:64:1", **shape).mask_maker(CPU)()
    even = with_mask("uniform-like-bigbird:64:64:1", **shape).mask_maker(CPU)()
    assert even.stored_blocks == big.stored_blocks
    assert int(even.full.counts.max()) - int(even.full.counts.min()) <= 1
    assert int(big.full.counts.max()) > int(even.full.counts.max())


def test_bigbird_of_the_suite_has_2_percent_global_rows() -> None:
    case = next(entry.case for entry in BENCH.suites["published"] if entry.case.mask.startswith("bigbird"))
    counts = replace(case, heads=1, kv_heads=1).mask_maker(CPU)().full.counts
    assert int((counts == 256).sum()) == round(0.02 * 256)
    assert set(counts[counts < 256].tolist()) <= {10, 11}


@pytest.mark.parametrize(
    ("mask", "pairs"), [("full", 256 * 256), ("causal", 257 * 128), ("window:1", 256), ("blocks:0.5", 2**15)]
)
def test_useful_flops_count_the_pairs_that_the_mask_admits(mask: str, pairs: int) -> None:
    case = with_mask(mask, batch=3, v_dim=16)
    assert case.operands(CPU)[0].useful_flops == 2 * (32 + 16) * 3 * 2 * pairs
    assert case.dense_flops == 2 * (32 + 16) * 3 * 2 * 256 * 256


@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 256), (64, 256), (100, 30), (30, 100)])
def test_causal_flops_are_those_of_the_causal_mask(q_len: int, kv_len: int) -> None:
    case = with_mask("causal", q_len=q_len, kv_len=kv_len)
    assert case.causal_flops == case.operands(CPU)[0].useful_flops


def test_long_sequences_are_gated_by_a_sample_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = attention.expected_attention

    def check(*args: Any, rows: Any) -> ExpectedAttention:
        seen.append(rows)
        return real(*args, rows=rows)

    monkeypatch.setattr(attention, "expected_attention", check)
    monkeypatch.setattr(attention, "GATED_WHOLE", 2**20)
    for length in (256, 2048):
        (one, *_) = replace(SMALL, q_len=length, kv_len=length).operands(CPU)
        assert one.gate(one.plan("cpu.attention")).passed
        assert one.gate(one.plan("reference.attention")).passed
    assert len(seen) == 2  # the reference is computed once, whoever is judged by it
    assert seen[0] is None
    assert len(seen[1]) == len(set(seen[1])) == attention.GATED_TILES
    assert (seen[1][0], seen[1][-1]) == (0, 31)


@pytest.mark.parametrize(
    "text", ["diagonal", "window", "window:", "window:x", "window:3+sinks", "full:1", ""]
)
def test_other_masks_are_refused_with_the_forms(text: str) -> None:
    refused(r"no mask is written .*full, causal, window:W, window:W\+sinks:S", parse_mask, text)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("8192", (8192, 8192)), ("8K", (8192, 8192)), ("1kx100", (1024, 100)), ("3x4K", (3, 4096))],
)
def test_lengths_are_read_as_people_write_them(text: str, lengths: tuple[int, int]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "K", "8M", "-1", "1x2x3", "1.5K"])
def test_other_lengths_are_refused(text: str) -> None:
    refused("a length is written as", parse_lengths, text)


def test_pairs_and_lengths_have_short_names() -> None:
    assert parse_pair("16") == (16, 16)
    assert parse_pair("32:4") == (32, 4)
    assert [length_name(length) for length in (1000, 1024, 2**19)] == ["1000", "1K", "512K"]
