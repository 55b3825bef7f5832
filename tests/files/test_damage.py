"""Files with every kind of object, damaged: cut, flipped, mixed up. They are refused, or hold what was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidFile
from sparsek.files import io
from sparsek.products.formats.quantized import Quantized, quantize
from sparsek.products.formats.random import random_bsr
from tests.files import test_io, test_mask_io
from tests.products.formats import fp8, two_four

SAVED: dict[str, dict[str, Any]] = {
    "matrices": {
        "w": test_io.small(),
        "t": test_io.small(5, torch.float32).T,
        "s": two_four.semi24(3, 24),
        "h": two_four.bsr24(70, 50),
    },
    "quantized": {
        "b": quantize(fp8.bsr(), scale="block").T,
        "s": quantize(fp8.semi24(3, 24), fp8.E5M2),
        "h": quantize(fp8.bsr24(70, 50), scale="tensor"),
    },
    "masks": {
        "bits": test_mask_io.small(),
        "causal": BlockMask.causal(300, block=64),
        "w": random_bsr(70, 50, (16, 32), 0.4),
    },
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        return fp8.same(a, b)
    return (test_mask_io if isinstance(a, BlockMask) else test_io).same(a, b)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """Of each kind where to write a damaged file, and the bytes of a right one."""
    folder, made = tmp_path_factory.mktemp("damage"), {}
    for kind, objects in SAVED.items():
        io.save(objects, path := folder / f"{kind}.safetensors")
        made[kind] = folder / f"damaged-{kind}.safetensors", path.read_bytes()
    return made


def is_refused(kind: str, path: Path, content: bytes) -> bool:
    """True if the file was refused, False if it still holds exactly what was saved."""
    path.write_bytes(content)
    try:
        loaded = io.load(path)
    except InvalidFile as error:
        assert str(path) in str(error)
        return True
    assert list(loaded) == list(SAVED[kind])
    assert all(same(SAVED[kind][name], loaded[name]) for name in loaded)
    return False


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, int, bytes]]:
    kinds = st.sampled_from(["flip", "cut", "extend", "insert", "remove", "copy"])
    one = st.tuples(kinds, st.integers(0, 2**32), st.binary(min_size=1, max_size=12))
    return draw(st.lists(one, min_size=1, max_size=4))


def damaged(content: bytes, steps: list[tuple[str, int, bytes]], head: int) -> bytes:
    """`content` after the steps; half of the positions fall into the first `head` bytes, where headers are."""
    for kind, at, extra in steps:
        room = max(len(content), 1)
        at = at // 2 % min(room, head) if at % 2 else at // 2 % room
        end = at + len(extra)
        if kind == "flip":
            content = (
                content[:at] + bytes(x ^ y for x, y in zip(content[at:], extra, strict=False)) + content[end:]
            )
        elif kind == "cut":
            content = content[:at]
        elif kind == "extend":
            content += extra
        elif kind == "insert":
            content = content[:at] + extra + content[at:]
        elif kind == "remove":
            content = content[:at] + content[end:]
        else:
            content = content[: at + 1] + content[at:]
    return content


@pytest.mark.parametrize("kind", SAVED)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=damages())
def test_a_damaged_file_is_refused_or_equal(
    files: Any, kind: str, steps: list[tuple[str, int, bytes]]
) -> None:
    path, content = files[kind]
    is_refused(kind, path, damaged(content, steps, 2000))


@pytest.mark.parametrize("kind", ["matrices", "quantized"])
def test_every_flipped_bit_of_the_header_is_found(files: Any, kind: str) -> None:
    path, content = files[kind]
    assert not is_refused(kind, path, content)
    end = 8 + int.from_bytes(content[:8], "little")
    for at in range(len(content[:end].rstrip())):
        flipped = bytes([content[at] ^ 1 << at % 8])
        assert is_refused(kind, path, content[:at] + flipped + content[at + 1 :]), at


@pytest.mark.parametrize("kind", SAVED)
def test_every_cut_is_found(files: Any, kind: str) -> None:
    path, content = files[kind]
    assert all(is_refused(kind, path, content[:end]) for end in range(0, len(content), len(content) // 200))
