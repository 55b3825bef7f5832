"""Biases as xFormers has them, drawn at random: of its own classes, and of stand-ins with the same names and fields."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import sys
from dataclasses import make_dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.house.tools import ROOT, python_beside

SEQUENCES = "q_seqinfo", "k_seqinfo"
PAGES = "block_tables", "page_size"
FIELDS: dict[str, tuple[str, ...]] = {
    "LowerTriangularMask": (),
    "LowerTriangularFromBottomRightMask": (),
    "LowerTriangularFromBottomRightLocalAttentionMask": ("_window_size",),
    "LocalAttentionFromBottomRightMask": ("window_left", "window_right"),
    "BlockDiagonalMask": SEQUENCES,
    "BlockDiagonalCausalMask": SEQUENCES,
    "BlockDiagonalCausalFromBottomRightMask": SEQUENCES,
    "BlockDiagonalCausalLocalAttentionMask": (*SEQUENCES, "_window_size"),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (*SEQUENCES, "_window_size"),
    "BlockDiagonalPaddedKeysMask": SEQUENCES,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": SEQUENCES,
    "BlockDiagonalLocalAttentionPaddedKeysMask": (*SEQUENCES, "window_left", "window_right"),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (*SEQUENCES, "_window_size"),
    "BlockDiagonalGappyKeysMask": SEQUENCES,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": SEQUENCES,
    "PagedBlockDiagonalPaddedKeysMask": (*SEQUENCES, *PAGES),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (*SEQUENCES, *PAGES),
    "PagedBlockDiagonalGappyKeysMask": (*SEQUENCES, *PAGES),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (*SEQUENCES, *PAGES),
}
LENGTHS = "seqstart", "max_seqlen", "min_seqlen", "seqstart_py"
INFOS = {
    "_SeqLenInfo": LENGTHS,
    "_PaddedSeqLenInfo": (*LENGTHS, "seqlen", "seqlen_py", "padding"),
    "_GappySeqInfo": (*LENGTHS, "seqlen", "seqlen_py"),
}


def stand_ins() -> Any:
    """Dataclasses of the same names and fields."""
    return SimpleNamespace(
        **{name: make_dataclass(name, fields) for name, fields in (FIELDS | INFOS).items()}
    )


def originals() -> Any:
    """xFormers' module attn_bias, which needs nothing else of it; skips where `make env` could not fetch it."""
    folders = [str(each) for each in ROOT.glob(".venv-xformers/lib/python3*/site-packages")]
    found = importlib.machinery.PathFinder.find_spec("xformers", [*folders, *sys.path])
    if found is None or found.origin is None:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            pytest.skip("xformers has wheels for Linux on x86-64 only")
        python_beside(".venv-xformers", "xformers")
        raise AssertionError(
            "xformers is missing in .venv-xformers; remove .venv/sparsek-env.json, then make env"
        )
    name = "attn_bias_of_xformers"
    if name not in sys.modules:
        path = Path(found.origin).parent / "ops" / "fmha" / "attn_bias.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Drawn(NamedTuple):
    """A bias, its lengths, the pairs bool [q_len, kv_len] that it admits by its documentation, and the keys bool
    [kv_len] that are some sequence's.
    """

    bias: Any
    q_len: int
    kv_len: int
    seen: Tensor
    held: Tensor


def ints(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def edges(lengths: list[int]) -> list[int]:
    made = [0]
    for each in lengths:
        made.append(made[-1] + each)
    return made


def near(ahead: Tensor, fields: dict[str, Any], causal: bool) -> Tensor:
    """Which keys are seen, by how far each stands after the query."""
    if "_window_size" in fields:
        return (ahead <= 0) & (ahead > -fields["_window_size"])
    if "window_left" in fields:
        return (ahead >= -fields["window_left"]) & (ahead <= fields["window_right"])
    return (ahead <= 0) | torch.tensor(not causal)


def place(keys: int, queries: int, first: bool) -> Tensor:
    """How far each key stands after each query, [queries, keys]."""
    shift = 0 if first else keys - queries
    return torch.arange(keys) - torch.arange(queries)[:, None] - shift


def draw(lib: Any, name: str, random: Random, device: str = "cpu", page: int | None = None) -> Drawn:
    """A bias of this class with 1 to 5 sequences, some of them empty, or of one sequence."""

    def length(most: int) -> int:
        return random.choice([0, 1, random.randint(0, most), random.randint(0, most), random.randint(0, 20)])

    def info(lengths: list[int]) -> Any:
        at = edges(lengths)
        return lib._SeqLenInfo(
            seqstart=ints(at, device), max_seqlen=max(lengths), min_seqlen=min(lengths), seqstart_py=at
        )

    fields: dict[str, Any] = {}
    if "_window_size" in FIELDS[name]:
        fields["_window_size"] = random.choice([1, 5, random.randint(1, 300)])
    if "window_left" in FIELDS[name]:
        same = random.randint(0, 200)
        fields |= random.choice(
            [
                {"window_left": same, "window_right": same},
                {"window_left": same, "window_right": random.randint(0, 9)},
            ]
        )
    first = name in (
        "LowerTriangularMask",
        "BlockDiagonalCausalMask",
        "BlockDiagonalCausalLocalAttentionMask",
    )
    causal = "Causal" in name or "LowerTriangular" in name
    if "BlockDiagonal" not in name:
        q_len, kv_len = random.randint(1, 300), random.randint(1, 300)
        bias = getattr(lib, name)(**fields)
        pairs = near(place(kv_len, q_len, first), fields, causal)
        return Drawn(bias, q_len, kv_len, pairs, torch.ones(kv_len, dtype=torch.bool))
    count = random.randint(1, 5)
    queries = [length(150) for _ in range(count)]
    keys = [length(200) for _ in range(count)]
    if "LocalAttentionMask" in name or "FromBottomRight" in name:  # xFormers refuses a query without a key
        keys = [max(q, k) for q, k in zip(queries, keys, strict=True)]
    total = sum(keys)
    begin = edges(keys)[:-1]
    lengths = {"max_seqlen": max(keys), "min_seqlen": min(keys)}
    rows = (
        [list(range(total))]
        if not keys
        else [list(range(b, b + n)) for b, n in zip(begin, keys, strict=True)]
    )
    at = info(keys)
    if "Paged" in name:
        page = page or random.choice([16, 32, 48, 256, 512])
        gappy = "Gappy" in name
        start = [random.choice([0, 16, random.randint(0, 70)]) if gappy else 0 for _ in keys]
        end = [s + n for s, n in zip(start, keys, strict=True)]
        width = -(-max(end) // page) + random.randint(0, 1) or 1
        pages = count * width + random.randint(0, 3)
        table = [random.sample(range(pages), width) for _ in keys]
        rows = [
            [table[r][j // page] * page + j % page for j in range(start[r], end[r])] for r in range(count)
        ]
        total = pages * page
        if gappy:
            behind = [*start, -1]
            at = lib._GappySeqInfo(
                seqstart=ints(behind, device),
                seqstart_py=behind,
                seqlen=ints(end, device),
                seqlen_py=end,
                **lengths,
            )
        else:
            steps = [width * page * r for r in range(count + 1)]
            at = lib._PaddedSeqLenInfo(
                seqstart=ints(steps, device), seqstart_py=steps, seqlen=ints(keys, device), seqlen_py=keys,
                padding=width * page, **lengths,
            )  # fmt: skip
        fields |= {"block_tables": torch.tensor(table, dtype=torch.int32).to(device), "page_size": page}
    elif "Padded" in name:
        padding = max(keys) + random.randint(0, 40)
        padding = -(-padding // 16) * 16 if random.random() < 0.5 else padding
        begin = [padding * r for r in range(count + 1)]
        at = lib._PaddedSeqLenInfo(
            seqstart=ints(begin, device), seqstart_py=begin, seqlen=ints(keys, device), seqlen_py=keys,
            padding=padding, **lengths,
        )  # fmt: skip
        rows, total = [list(range(b, b + n)) for b, n in zip(begin, keys, strict=False)], begin[-1]
    elif "Gappy" in name:  # in any order, some keys in several sequences
        total = max(sum(keys), 1) + random.randint(0, 50)
        begin = [random.randint(0, total - n) for n in keys]
        at = lib._GappySeqInfo(
            seqstart=ints([*begin, total], device), seqstart_py=[*begin, total], seqlen=ints(keys, device),
            seqlen_py=keys, **lengths,
        )  # fmt: skip
        rows = [list(range(b, b + n)) for b, n in zip(begin, keys, strict=True)]
    seen, held = torch.zeros(sum(queries), total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    for r, (here, q_start) in enumerate(zip(rows, edges(queries)[:-1], strict=True)):
        pairs = near(place(len(here), queries[r], first), fields, causal)
        seen[q_start : q_start + queries[r], here] = pairs
        held[here] = True
    bias = getattr(lib, name)(q_seqinfo=info(queries), k_seqinfo=at, **fields)
    return Drawn(bias, sum(queries), total, seen, held)
