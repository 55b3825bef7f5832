"""Records keep counting where machine code is the one that was measured."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import same_code
from sparsek.engine.launch import nvrtc
from sparsek_bench.engine import records, sources
from sparsek_bench.suites.attention_grad import AttentionGradCase
from sparsek_bench.suites.spmm import SpmmCase

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
CASE = AttentionGradCase.square("causal", 8)
PTX = """//
.visible .entry kernel()
{
	.loc	1 20 30                         // a.py:20:30
	add.s32 	%r1, %r2, NUMBER;
$L__tmp3:
}
.section	.debug_str
"""


def test_lines_of_the_source_and_comments_are_no_code() -> None:
    first = same_code.code_hash(PTX.replace("NUMBER", "1"))
    assert first == same_code.code_hash(
        PTX.replace("NUMBER", "1").replace("20", "21").replace("tmp3", "tmp4")
    )
    assert first != same_code.code_hash(PTX.replace("NUMBER", "2"))


def test_a_record_whose_config_has_the_same_code_gets_todays_hash(
    monkeypatch: pytest.MonkeyPatch, make_record: Any, tmp_path: Path
) -> None:
    kernel = "hopper.attention_bwd"
    same, other = (
        make_record(CASE, kernel=kernel, config={"paired": paired}, source_hash="0" * 16)
        for paired in (False, True)
    )
    monkeypatch.setattr(same_code, "may_keep", lambda record, before: not records.is_fresh(record))

    def compiled(root: Path, jobs: list[str]) -> dict[str, same_code.Compiled]:
        codes = {job: f"{root if json.loads(job)[1]['paired'] else ''}" for job in jobs}
        return {job: same_code.Compiled("kernel", code, {}) for job, code in codes.items()}

    monkeypatch.setattr(same_code, "compiled", compiled)
    monkeypatch.setattr(same_code, "is_alone", lambda *_: True)
    assert same_code.keep([same, other], tmp_path) == 1
    assert records.is_fresh(same)
    assert other["source_hash"] == "0" * 16
    assert same_code.keep([same], tmp_path) == 0


def test_no_value_of_a_config_may_differ() -> None:
    first = same_code.Compiled("kernel", "code", {"rows": "128", "itemsize": "2", "texts": "a tile"})
    assert same_code.are_equal(first, first._replace(values=first.values | {"texts": "the tile"}))
    assert same_code.are_equal(first, first._replace(values={"rows": "128"}))
    assert not same_code.are_equal(first, first._replace(values={"rows": "64"}))
    assert not same_code.are_equal(first, first._replace(code="other"))


def test_a_step_has_the_code_of_both_passes(make_record: Any) -> None:
    config = {"forward": {"dim": 128}, "backward": {"dim": 64}}
    record = make_record(CASE, kernel="hopper.attention_bwd + hopper.attention_fwd", config=config)
    assert same_code.jobs_of(record) == [
        ("hopper.attention_bwd", {"dim": 64}, "bf16"),
        ("hopper.attention_fwd", {"dim": 128}, "bf16"),
    ]


def test_only_stale_records_of_unchanged_host_code_are_looked_at(make_record: Any, tmp_path: Path) -> None:
    record = make_record(CASE, kernel="hopper.attention_bwd")
    assert records.is_fresh(record)
    assert not same_code.may_keep(record, tmp_path)  # which has no sources, and is not read


@pytest.mark.parametrize(
    ("file", "old", "new", "kept"),
    [
        ("backward/bwd_steps.py", "UNROLLED", "UNROLLED_", True),  # of the kernel itself
        ("backward/delta.py", "tl.sum", "tl.sum_", False),  # of the launch before it
        ("backward/hopper_bwd.py", "class Config(", "class Config(Own, ", True),  # its own config
        ("forward/hopper_fwd.py", "class Config(", "class Config(Own, ", False),  # another of that name
    ],
)
def test_a_change_outside_of_the_compiled_kernel_is_not_looked_over(
    make_record: Any, tmp_path: Path, file: str, old: str, new: str, kept: bool
) -> None:
    shutil.copytree(sources.ROOT, tmp_path / "sparsek", ignore=shutil.ignore_patterns("__pycache__", "*.zip"))
    path = tmp_path / "sparsek" / "attn" / "kernels" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    then = sources.source_hash("hopper.attention_bwd", tmp_path / "sparsek")
    record = make_record(CASE, kernel="hopper.attention_bwd", source_hash=then)
    assert same_code.may_keep(record, tmp_path) == kept
    entry = "sparsek.attn.kernels.backward.hopper_bwd:attention_bwd_kernel"
    assert same_code.is_alone(json.dumps(["hopper.attention_bwd", {}, "bf16"]), entry, tmp_path) == kept


@needs_nvrtc
@pytest.mark.parametrize(
    ("changes", "kept", "same"),
    [
        (
            {"cu": ("<AHEAD - 1>", "<(AHEAD) - 1>"), "py": ('"STAGES": self', '"MORE": 3, "STAGES": self')},
            True,
            True,
        ),
        ({"cu": ("<AHEAD - 1>", "<AHEAD - 2>")}, True, False),
        ({"py": ("count=work.masks.shape[1]", "count=work.masks.shape[1] - 1")}, False, True),
    ],
    ids=["spelling", "instructions", "launch"],
)
def test_a_cuda_program_has_the_machine_code_of_both_states(
    make_record: Any, tmp_path: Path, changes: dict[str, tuple[str, str]], kept: bool, same: bool
) -> None:
    shutil.copytree(sources.ROOT, tmp_path / "sparsek", ignore=shutil.ignore_patterns("__pycache__", "*.zip"))
    (tmp_path / "tests").symlink_to(same_code.ROOT / "tests")
    for ending, (old, new) in changes.items():
        path = tmp_path / f"sparsek/products/kernels/spmm/hopper_mma.{ending}"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")
    then = sources.source_hash("hopper.spmm_mma", tmp_path / "sparsek")
    case, config = SpmmCase(256, 256, 256, (16, 16), 0.5), {"stages": 5, "b_row": False}
    record = make_record(case, kernel="hopper.spmm_mma", config=config, source_hash=then)
    assert same_code.may_keep(record, tmp_path) == kept
    if not kept:
        return
    (job,) = (json.dumps(each) for each in same_code.jobs_of(record))
    before, now = (same_code.compiled(root, [job])[job] for root in (tmp_path, same_code.ROOT))
    assert before.entry == now.entry == "sparsek.products.kernels.spmm.hopper_mma:mma_kernel"
    assert same_code.are_equal(before, now) == same
    assert same_code.is_alone(job, now.entry, tmp_path)
