"""Kernels whose compiled code is kept by dtypes alone: Triton specializes none of their parameters."""

import importlib
import re
from pathlib import Path

import pytest

import sparsek

ROOT = Path(sparsek.__file__).parents[1]
CALL = re.compile(r"launch_unspecialized\(\s*(\w+),")
OWN = re.compile(r"^    launch\((\w+), ", re.M)  # schedule_bwd.py launches through a function of its own


def kernels() -> list[tuple[str, str]]:
    found = []
    for path in (ROOT / "sparsek").glob("*/kernels/**/*.py"):
        text = path.read_text(encoding="utf-8")
        own = OWN.findall(text) if path.stem == "schedule_bwd" else []
        found += [(str(path.relative_to(ROOT)), name) for name in {*CALL.findall(text), *own} - {"kernel"}]
    return sorted(found)


KERNELS = kernels()
# Of spgemm/tiles.py: its own new tensors, always at a multiple of 16 bytes.
ALIGNED = {"_deal": {"tiles", "starts"}}


@pytest.mark.parametrize(("path", "name"), KERNELS, ids=lambda each: Path(each).stem)
def test_no_parameter_is_specialized(path: str, name: str) -> None:
    """An int that Triton folds in where it is 1 would be 1 in every later launch."""
    module = importlib.import_module(".".join(Path(path).with_suffix("").parts))
    left = [
        p.name
        for p in getattr(module, name).params
        if not (p.is_constexpr or p.do_not_specialize or p.do_not_specialize_on_alignment)
    ]
    assert set(left) <= ALIGNED.get(name, set()), f"{path}: {name} specializes {left}"


def test_kernels_are_found() -> None:
    assert len(KERNELS) > 25
    assert ("sparsek/attn/kernels/backward/schedule_bwd.py", "_visit") in KERNELS
