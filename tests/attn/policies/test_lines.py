"""VerticalSlash and FlexPrefill against loops over tokens and blocks; MInference's file of patterns."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsek as sk
from sparsek.attn.reference import line_blocks, lines
from sparsek.attn.reference.line_blocks import Grid
from sparsek.core.errors import InvalidInput
from tests.attn.policies.drawn import chosen, lengths_of, normal, slow_scores, visible
from tests.refusals import refused

FlexPrefill, VerticalSlash = sk.policies.FlexPrefill, sk.policies.VerticalSlash


def probe(q: Tensor, k: Tensor, last: int, offset: int) -> list[tuple[int, int, float]]:
    """(position of the query, key, softmax) of one head's last queries, in float64."""
    found = []
    for row in range(max(0, q.shape[0] - last), q.shape[0]):
        position = row + offset
        seen = range(min(k.shape[0], max(0, position + 1)))
        if seen:
            scores = (k[: len(seen)].double() @ q[row].double()) / q.shape[1] ** 0.5
            found += [(position, key, share) for key, share in enumerate(scores.softmax(0).tolist())]
    return found


def spread(pairs: list[tuple[int, float]]) -> dict[int, float]:
    sums: dict[int, float] = {}
    for at, share in pairs:
        sums[at] = sums.get(at, 0.0) + share
    return sums


def highest(mass: dict[int, float], count: int) -> set[int]:
    return {at for at in sorted(mass, key=lambda at: -mass[at])[:count] if mass[at] >= 2**-30}


def reaching(mass: dict[int, float], share: float, least: int) -> set[int]:
    kept: set[int] = set()
    for at in sorted(mass, key=lambda at: -mass[at]):
        if sum(mass[x] for x in kept) >= share * sum(mass.values()) and len(kept) >= least:
            break
        kept.add(at)
    return kept


def tiles_of(
    q_len: int, kv_len: int, block: tuple[int, int], offset: int
) -> list[tuple[int, int, range, range]]:
    """Tile, block, positions of the tile and keys of the block, where visible."""
    found = []
    for i in range(-(-q_len // block[0])):
        positions = range(i * block[0] + offset, min((i + 1) * block[0], q_len) + offset)
        for j in range(-(-kv_len // block[1])):
            keys = range(j * block[1], min((j + 1) * block[1], kv_len))
            if visible(i, keys, block, q_len, offset):
                found.append((i, j, positions, keys))
    return found


@given(st.data())
@settings(max_examples=8)
def test_vertical_slash_keeps_the_blocks_that_lines_cross(data: st.DataObject):
    q_len, kv_len = (data.draw(st.integers(1, 330)) for _ in range(2))
    offset = data.draw(st.sampled_from((kv_len - q_len, 0, 200, -20)))
    block = data.draw(st.sampled_from(((64, 64), (128, 64))))
    keys_kept, distances_kept = data.draw(st.integers(30, 60)), data.draw(st.integers(50, 130))
    q, k = normal(1, 1, q_len, 8, seed=q_len) * 3, normal(1, 1, kv_len, 8, seed=1)
    kept = chosen(VerticalSlash(keys_kept, distances_kept, block).mask(q, k, q_offset=offset))[0, 0]
    pairs = probe(q[0, 0], k[0, 0], 64, offset)
    vertical = dict.fromkeys(range(min(30, kv_len)), 2.0**20)
    slash = dict.fromkeys(range(max(0, min(100, q_len + offset))), 2.0**20)
    vertical = {**spread([(key, share) for _, key, share in pairs]), **vertical}
    slash = {**spread([(position - key, share) for position, key, share in pairs]), **slash}
    columns, distances = highest(vertical, keys_kept), highest(slash, distances_kept)
    right = torch.zeros_like(kept)
    for i, j, positions, keys in tiles_of(q_len, kv_len, block, offset):
        near = range(positions.start - keys.stop + 1, positions.stop - keys.start)
        right[i, j] = bool(columns & set(keys)) or bool(distances & set(near))
    # Masses that are equal in 20 leading bits go together, so a few blocks more may be kept.
    assert not (right & ~kept).any()
    assert (kept & ~right).sum() <= 2


@given(st.data())
@settings(max_examples=8)
def test_flexprefill_keeps_the_share_of_each_head(data: st.DataObject):
    q_len, kv_len = (data.draw(st.integers(1, 500)) for _ in range(2))
    offset = data.draw(st.sampled_from((kv_len - q_len, 0, 100, -20)))
    block, gamma = data.draw(st.sampled_from(((64, 64), (64, 128)))), data.draw(st.sampled_from((0.3, 0.8)))
    aware, budget = data.draw(st.booleans()), data.draw(st.sampled_from((0, 200)))
    q, k = normal(1, 1, q_len, 8, seed=q_len) * 3, normal(1, 1, kv_len, 8, seed=1)
    policy = FlexPrefill(gamma, 1.0 if aware else 0.0, budget, block)
    kept = chosen(policy.mask(q, k, q_offset=offset))[0, 0]
    shown = tiles_of(q_len, kv_len, block, offset)
    least = min(-(-budget // block[1]), kept.shape[1])
    if aware:
        scores = slow_scores(q, k, block, (1, 1), None)[0, 0]
        weights = {(i, j): math.exp(float(scores[i, j])) for i, j, _, _ in shown}
        rows = spread([(i, weight) for (i, _), weight in weights.items()])
        cells = list(weights)
        mass = {at: weights[cell] / rows[cell[0]] for at, cell in enumerate(cells)}
        found = {cells[at] for at in reaching(mass, gamma, least * kept.shape[0])}
    else:
        pairs = probe(q[0, 0], k[0, 0], 128, offset)
        columns = reaching(spread([(key // block[1], share) for _, key, share in pairs]), gamma, least)
        slash = spread([(position // block[1] - key // block[1], share) for position, key, share in pairs])
        distances = reaching(slash, gamma, least)
        found = {
            (i, j)
            for i, j, positions, _ in shown
            if j in columns or any(position // block[1] - j in distances for position in positions)
        }
    right = torch.zeros_like(kept)
    for i, j, positions, _ in shown:
        right[i, j] = (i, j) in found or j == 0 or j >= positions.start // block[1]
    assert not (right & ~kept).any()
    assert (kept & ~right).sum() <= 2


def test_a_head_is_query_aware_if_means_predict_its_softmax():
    """Keys of a block are alike in the first head only; in the second single keys stand out of their blocks."""
    length, side = 1024, 64
    alike = normal(1, 1, length // side, 16, seed=1).repeat_interleave(side, 2)
    single = normal(1, 1, length, 16, seed=2)
    single[:, :, 5::64] *= 6
    q, k = normal(1, 2, length, 16, seed=3), torch.cat((alike, single), 1)
    q[:, 1, -128:] = 4 * single[0, 0, 69] / single[0, 0, 69].norm()
    grid = Grid(length, length, (side, side), 0)
    _, aware = line_blocks.flex_blocks(q, k, grid, last=128, gamma=0.9, tau=0.2, least=1)
    assert aware.tolist() == [[True, False]]
    _, none = line_blocks.flex_blocks(q, k, grid, last=128, gamma=0.9, tau=0.0, least=1)
    assert not none.any()


def test_divergence_is_that_of_jensen_and_shannon():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    m = [0.25, 0.375, 0.375]
    right = (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])) / 2
    right += (0.25 * math.log(0.25 / m[1]) + 0.75 * math.log(0.75 / m[2])) / 2
    assert line_blocks.divergence(p, q).item() == pytest.approx(right, rel=1e-5)
    assert line_blocks.divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == pytest.approx(
        math.log(2)
    )
    assert line_blocks.divergence(p, p).item() == 0


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.floats(0.0, 1.0), st.integers(0, 30))
@settings(max_examples=50)
def test_a_cut_keeps_enough_and_not_one_step_more(mass: list[float], share: float, least: int):
    given_ = torch.tensor(mass, dtype=torch.float32)
    kept, codes = lines.cut(given_, share, least), lines.codes(given_)
    assert not kept[codes == 0].any()
    quanta = torch.where(codes > 0, (given_ * 2**30), 0.0).long().double()
    need = quanta.sum() * torch.tensor(share, dtype=torch.float32).double()
    if not kept.any():
        assert not codes.any()
    elif quanta[kept].sum() < need or kept.sum() < least:
        assert torch.equal(kept, codes > 0)
    else:
        assert not (codes[~kept] >= codes[kept].min()).any()
        fewer = codes > codes[kept].min()
        assert quanta[fewer].sum() < need or fewer.sum() < least or not fewer.any()


def test_patterns_of_heads_come_from_minferences_file(tmp_path: Path):
    layers = [
        {"0": ["vertical_and_slash", 40, 120, 0.9]},
        {
            "0": ["stream_llm", 70, 200, 1],
            "1": ["block_sparse", 2, 5, 1],
            "2": ["vertical_and_slash", 10, 60, 1],
        },
    ]
    file = tmp_path / "patterns.json"
    file.write_text(json.dumps(layers), encoding="utf-8")
    policy = VerticalSlash.from_json(file, 1, block=64)
    assert policy == VerticalSlash.from_json(layers, 1, block=64) == VerticalSlash.from_json(str(file), 1, 64)
    assert hash(policy) == hash(VerticalSlash.from_json(layers, 1, block=64))
    q, k = normal(1, 3, 640, 16), normal(1, 1, 640, 16, seed=1)
    kept = chosen(policy.mask(q, k))
    position, key = torch.arange(640)[:, None], torch.arange(640)
    near = ((key < 70) | (position - key < 200)) & (key <= position)
    assert torch.equal(kept[0, 0], near.unflatten(1, (10, 64)).any(2).unflatten(0, (10, 64)).any(1))
    scored = sk.policies.MeanTopK(topk=2, block=64, always=(0, 0)).mask(q[:, 1:2], k)
    assert torch.equal(kept[:, 1], chosen(scored)[:, 0])
    # A file's fewer than 30 keys count as 30.
    assert torch.equal(kept[:, 2:], chosen(VerticalSlash(30, 60, 64).mask(q[:, 2:], k)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vertical": 5}, "vertical is 5; it must be an int from 30 to 2147483647"),
        ({"slash": 2**31}, "slash is 2147483648; it must be an int from 50 to 2147483647"),
        (
            {"heads": [("dense", 1, 2)]},
            r"heads\[0\]\[0\] is 'dense'; use one of vertical_and_slash, stream_llm",
        ),
        (
            {"heads": [("stream_llm", 1)]},
            r"heads\[0\] is \('stream_llm', 1\); it must be \(pattern, first number",
        ),
        ({"heads": [("stream_llm", -1, 2)]}, r"heads\[0\]\[1\] is -1"),
        ({"heads": "all"}, "heads is 'all'; give the pattern of each head"),
    ],
)
def test_wrong_options_of_vertical_slash_are_named(options: dict[str, Any], message: str):
    refused(message, VerticalSlash, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gamma": 0}, "gamma is 0"), ({"tau": 2}, "tau is 2"), ({"min_budget": -1}, "min_budget is -1")],
)
def test_wrong_options_of_flexprefill_are_named(options: dict[str, Any], message: str):
    refused(message, FlexPrefill, **options)


def test_what_prompts_do_not_have_is_refused(tmp_path: Path):
    q = normal(1, 2, 128, 8)
    for policy in (VerticalSlash(block=64), FlexPrefill(block=64)):
        refused("kv_lengths is given", policy.mask, q, q, kv_lengths=lengths_of(2, 64, 1, 0))
    refused("heads has 1 patterns, and q has 2 heads", VerticalSlash(heads=[("stream_llm", 1, 2)]).mask, q, q)
    refused("no readable JSON file", VerticalSlash.from_json, tmp_path / "none.json", 0)
    for text in ("[" * 100_000, "{", "\ud800"):
        (tmp_path / "odd.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        refused("no readable JSON file: not JSON", VerticalSlash.from_json, tmp_path / "odd.json", 0)
    os.mkfifo(tmp_path / "fifo.json")
    refused("is a FIFO", VerticalSlash.from_json, tmp_path / "fifo.json", 0)
    os.truncate(tmp_path / "odd.json", 2**40)  # no byte of it on disk
    refused("over the limit of 100000000", VerticalSlash.from_json, str(tmp_path / "odd.json"), 0)
    for heads in ([{"0": 5}], [{"0": "stream_llm"}], [{"0": {}}]):
        refused(r"heads\[0\] is", VerticalSlash.from_json, heads, 0)
    with pytest.raises(InvalidInput, match="must have heads"):
        VerticalSlash.from_json([{0: [], "1": []}], 0)  # pyright: ignore[reportArgumentType]
    refused("layer is 1; it must be an int from 0 to 0", VerticalSlash.from_json, [{}], 1)
    refused("must have heads '0' to 'H - 1'", VerticalSlash.from_json, [{"1": ["stream_llm", 1, 2]}], 0)


@pytest.mark.parametrize(
    "policy",
    [FlexPrefill(0.7, tau=0.0, min_budget=64, block=64), VerticalSlash(64, 128, 64)],
    ids=["flex", "lines"],
)
def test_lines_are_found(policy: Any):
    """All queries look for keys 640 to 671, and each for the key 300 tokens before it."""
    length, dim = 2048, 64
    needle, place = normal(dim, seed=1), 1.1 * normal(1, 1, length, dim, seed=2)
    needle *= 7.5 / needle.norm()
    q, k = (place.roll(300, 2) + needle).repeat(1, 2, 1, 1), place.clone()
    k[:, :, 640:672] += needle
    mask = policy.mask(q, k)
    share = mask.stored_blocks / (2 * 32 * 33 / 2)
    assert share < 0.5
    random = sk.BlockMask.topk(
        normal(1, 2, 32, 32, seed=6), round(20 * share), True, seq_len=length, block=64
    )
    assert random.stored_blocks >= 0.9 * mask.stored_blocks
    ours, theirs = (sk.policies.recall(each, q, k, samples=512).mean() for each in (mask, random))
    assert ours > theirs + 0.2
