"""Tables of tuned configs: what they are keyed by, how files are read and written, and what plans make of them."""

import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import CPU, H200
from sparsek.core.errors import InvalidFile
from sparsek.kernels import table as kernels
from sparsek.ops import planning
from sparsek.plan import table
from sparsek.plan.select import select
from sparsek.plan.table import Entry
from tests.problems import changed, spmm_problem

PROBLEM = spmm_problem(4096, 4096, 4096, (128, 128), 128, "bf16", H200, b_layout="col", row_max=8)


@dataclass(frozen=True)
class Wide:
    """A config of a stub: `side` is a choice, `depth` follows the problem, `flag` is no choice."""

    side: int = 64
    depth: int = 3
    flag: bool = True


class Stub:
    """A kernel that prefers its narrowest config, under the name of a source file that is there."""

    name = "cpu.spmm"

    def why_not(self, p: Any) -> list[str]:
        return []

    def default(self, p: Any) -> Wide:
        return Wide(64)

    def configs(self, p: Any) -> list[Wide]:
        return [Wide(64), Wide(128), Wide(256)]

    def seconds(self, p: Any, c: Wide) -> float:
        return c.side * 1e-6


def entry(side: int = 128, **changes: Any) -> Entry:
    """An entry for PROBLEM and the stub."""
    made = Entry(
        "NVIDIA H200",
        "cpu.spmm",
        table._hash_of("cpu.spmm"),
        table.key_of(PROBLEM),
        asdict(Wide(side)),
        8e-5,
        1e-4,
        6.4e-5,
        "2026-11-22T04:00:00+00:00",
    )
    return replace(made, **changes)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's file, not there yet, and a shipped table without entries."""
    shipped = tmp_path / "shipped.json"
    table.write(shipped, [])
    monkeypatch.setattr(table, "SHIPPED", shipped)
    path = tmp_path / "folder" / "tuning.json"
    monkeypatch.setenv("SPARSEK_TUNING", str(path))
    table.forget()
    yield path
    table.forget()


def chosen(p: Any = PROBLEM) -> Any:
    """The candidate that `select` makes of the stub."""
    return select(p, [Stub()]).candidates[0]


def test_the_table_that_ships_is_well_formed() -> None:
    for each in table.read(table.SHIPPED).values():
        assert each.card == "NVIDIA H200"
        assert each.seconds <= each.default_seconds


def test_sizes_are_rounded_and_blocks_and_small_numbers_are_not() -> None:
    key = table.key_of(PROBLEM)
    assert key == (
        "spmm a.dtype=bf16 a.block=128x128 a.nnzb=128 b.dtype=bf16 b.layout=col c.dtype=bf16 m=4096 k=4096 n=4096"
    )
    assert table.key_of(changed(PROBLEM, m=4500, n=3700, nnzb=120, row_max=9)) == key
    assert table.key_of(changed(PROBLEM, n=3000)).endswith(" n=2896")
    assert table.key_of(changed(PROBLEM, n=13)).endswith(" n=13")
    assert "block=112x128" in table.key_of(changed(PROBLEM, block=(112, 128)))
    assert table.key_of(changed(PROBLEM, card=CPU)) == key
    assert table.key_of(changed(PROBLEM, row_max=24)) == f"{key} uneven"
    assert table.key_of(changed(PROBLEM, merged=((2, 100), (4, 64)))) == key.replace(
        "nnzb=128", "nnzb=128 a.merged=2x91x4x64"
    )
    of_24 = table.key_of(
        spmm_problem(two_four=True, m=4096, k=4096, n=64, dtype="fp16", card=H200, bias=True)
    )
    assert of_24 == (
        "spmm a.dtype=fp16 a.two_four=True b.dtype=fp16 c.dtype=fp16 m=4096 k=4096 n=64 bias=True"
    )


def test_an_entry_wins_over_the_kernel_and_gains_what_was_measured(own: Path) -> None:
    assert chosen().config == Wide(64)
    assert chosen().origin == ""
    table.add(own, [entry()])
    found = chosen()
    assert found.config == Wide(128)
    assert found.seconds == pytest.approx(64e-6 * 0.8)
    assert found.origin == f"tuned: {own}, 2026-11-22: 0.80x the time of the kernel's own choice"
    # The same sizes, nearly.
    assert chosen(changed(PROBLEM, m=4200)).config == Wide(128)


@pytest.mark.parametrize(
    "change",
    [
        {"card": "NVIDIA H100"},
        {"kernel": "portable.spmm"},
        {"source": "0123456789abcdef"},
        {"problem": table.key_of(changed(PROBLEM, n=1024))},
        {"config": asdict(Wide(512))},
        {"config": {"other": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_entries_of_anything_else_are_not_taken(own: Path, change: dict[str, Any]) -> None:
    table.add(own, [entry(**change)])
    assert chosen().config == Wide(64)
    assert chosen().origin == ""


def test_the_users_table_wins_over_the_one_that_ships(own: Path) -> None:
    table.write(table.SHIPPED, [entry(256)])
    assert chosen().config == Wide(256)
    assert chosen().origin.startswith("tuned: the table that ships, 2026-11-22")
    table.add(own, [entry(128)])
    assert chosen().config == Wide(128)


def test_a_config_that_is_named_is_taken_whatever_the_tables_say(own: Path) -> None:
    table.add(own, [entry()])
    choice = select(PROBLEM, [Stub()], only="cpu.spmm", config=Wide(256))
    assert choice.config == Wide(256)
    assert choice.candidates[0].origin == ""


def test_off_consults_no_table(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table.write(table.SHIPPED, [entry(256)])
    table.add(own, [entry(128)])
    monkeypatch.setenv("SPARSEK_TUNING", "off")
    assert chosen().config == Wide(64)


def test_a_field_that_the_kernel_paces_may_follow_the_problem() -> None:
    configs = [Wide(64, 4), Wide(128, 4), Wide(128, 5)]
    assert table.matching(configs, asdict(Wide(128, 5)), ["depth"]) == Wide(128, 5)
    assert table.matching(configs, asdict(Wide(128, 3)), ["depth"]) == Wide(128, 4)
    assert table.matching(configs, asdict(Wide(128, 3))) is None
    assert table.matching(configs, asdict(Wide(256, 4)), ["depth"]) is None
    assert table.matching([], asdict(Wide())) is None


def test_a_tuned_tile_of_hopper_spmm_serves_sizes_at_which_its_boxes_go_at_another_pace(own: Path) -> None:
    tuned_at = changed(PROBLEM, activation="gelu", bias=True)
    kernel = kernels.load("hopper.spmm")
    configs = {replace(each, every=0): each for each in kernel.configs(tuned_at)}
    near = changed(tuned_at, nnzb=150, row_max=10)
    moved = next(
        each
        for each in kernel.configs(near)
        if each not in configs.values() and replace(each, every=0) in configs
    )
    wanted = configs[replace(moved, every=0)]
    source = table._hash_of(kernel.name)
    made = entry(kernel=kernel.name, source=source, problem=table.key_of(tuned_at))
    table.add(own, [replace(made, config=table.as_json(wanted))])
    found = table.tuned(near, kernel, kernel.default(near))
    assert found is not None
    assert replace(found.config, every=0) == replace(wanted, every=0)
    assert found.config in kernel.configs(near)


def test_plans_explain_where_a_config_is_from_and_hear_of_new_tables(own: Path) -> None:
    a = sk.random_bsr(1024, 1024, 128, 0.25, dtype=torch.bfloat16)
    b = torch.empty(1024, 512, dtype=torch.bfloat16)

    def plan() -> Any:
        return sk.plan_spmm(a, b, kernel="hopper.spmm", device="h200")

    before = plan()
    assert "tuned:" not in before.explain()
    kernel, p = before.implementation, before.problem
    other = next(each for each in kernel.configs(p) if each != before.config)
    made = entry(kernel="hopper.spmm", source=table._hash_of("hopper.spmm"), problem=table.key_of(p))
    table.add(own, [replace(made, config=table.as_json(other))])
    after = plan()
    assert after.config == other
    lines = after.explain().splitlines()
    assert f"  config     tuned: {own}, 2026-11-22: 0.80x the time of the kernel's own choice" in lines
    assert after.seconds == pytest.approx(before.seconds * 0.8)


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    listed = [entry(), entry(problem="spmm m=16"), entry(kernel="cpu.semi24")]
    table.write(path, listed)
    assert table.read(path) == {each.key: each for each in listed}
    assert [each.name for each in path.parent.iterdir()] == ["b.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_is_added_replaces_entries_of_the_same_key_and_no_others(own: Path) -> None:
    table.add(own, [entry(128), entry(problem="spmm m=16")])
    table.add(own, [entry(256)])
    found = table.read(own)
    assert len(found) == 2
    assert found[entry().key].config["side"] == 256


def test_a_write_that_fails_leaves_the_old_table_and_nothing_beside_it(own: Path, monkeypatch) -> None:
    table.add(own, [entry(128)])

    def fail(handle: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        table.add(own, [entry(256)])
    assert table.read(own) == {entry().key: entry(128)}
    assert [each.name for each in own.parent.iterdir()] == ["tuning.json"]


GOOD = {"format": table.FORMAT, "version": table.VERSION, "entries": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON: its lists or objects are nested too deeply"),
        ("\xff\xfe", "is not a sparsek tuning table"),
        ("[]", "is not a sparsek tuning table"),
        ('{"autotune": 1}', "is not a sparsek tuning table"),
        (json.dumps({**GOOD, "version": 2}), "is of version 2, this is 1; tune again"),
        (json.dumps({**GOOD, "entries": {}}), "its entries are not a list"),
        (json.dumps({**GOOD, "entries": [1]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [{**asdict(entry()), "more": 1}]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [asdict(entry(seconds=-1.0))]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [asdict(entry(seconds=float("nan")))]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [asdict(entry(seconds=10**400))]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [asdict(entry(card=""))]}), "entry 0 is malformed"),
        (json.dumps({**GOOD, "entries": [{**asdict(entry()), "config": "x"}]}), "entry 0 is malformed"),
    ],
)
def test_a_file_that_is_no_table_is_ignored_with_one_warning_that_names_it(
    own: Path, text: str, said: str
) -> None:
    own.parent.mkdir()
    own.write_text(text if said != "is not a sparsek tuning table" or text[0] in "[{" else "null")
    with pytest.raises(InvalidFile, match=said):
        table.read(own)
    with pytest.warns(UserWarning, match="tuned configs are ignored: .*tuning.json") as caught:
        assert chosen().config == Wide(64)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen().config == Wide(64)


def test_a_table_of_bytes_that_are_no_text_is_ignored(own: Path) -> None:
    own.parent.mkdir()
    own.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match=r"tuning\.json: not JSON"):
        assert chosen().config == Wide(64)


@pytest.mark.parametrize(
    "text", ["{", '{"my": "notes"}', json.dumps({**GOOD, "version": 2})], ids=["broken", "other", "version"]
)
def test_a_file_that_is_no_table_is_not_overwritten(own: Path, text: str) -> None:
    own.parent.mkdir()
    own.write_text(text)
    with pytest.raises(InvalidFile, match="it is not overwritten: remove it, or name another file"):
        table.add(own, [entry()])
    assert own.read_text() == text


def test_threads_that_add_to_one_table_lose_nothing(own: Path) -> None:
    """As processes do: each opens the folder for itself."""
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(table.add, own, [entry(problem=f"spmm m={each}")]) for each in range(40)]:
            done.result()
    assert len(table.read(own)) == 40


def test_choices_are_remembered_until_the_tables_change(own: Path) -> None:
    p = changed(PROBLEM, card=CPU, dtype="fp32")
    first = planning.choose(p)
    assert planning.choose(p) is first
    table.add(own, [entry()])
    assert planning.choose(p) is not first
