"""How tests are cut into parts, and the order inside a part."""

import random

import pytest

from tests.evidence import parts


def some_tests(seed: int) -> list[str]:
    """Ids of a tree of test files, in the order of collection."""
    draw = random.Random(seed)
    folders = ["bench", "cli", "formats", "kernels", "ops"]
    files = sorted({f"tests/{draw.choice(folders)}/test_{draw.randrange(1000)}.py" for _ in range(40)})
    return [
        f"{file}::test_{function}" + (f"[{case}-a::b]" if cases > 1 else "")
        for file in files
        for function in range(draw.randrange(1, 6))
        for cases in [draw.choice([1, 3, 40])]
        for case in range(cases)
    ]


def seconds_of(ids: list[str], known: parts.Known) -> dict[str, float]:
    files = sorted({parts.file_of(test) for test in ids})
    return {path: known.of_file(path, sum(parts.file_of(test) == path for test in ids)) for path in files}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("seed", range(3))
def test_every_test_is_in_one_part(seed: int, count: int) -> None:
    ids = some_tests(seed)
    seconds = seconds_of(ids, parts.Known())
    cuts = parts.cut(seconds, count)
    assert len(cuts) == count - 1
    found = [parts.files_of(number, cuts, seconds) for number in range(1, count + 1)]
    assert all(found)
    assert sorted(path for files in found for path in files) == sorted(seconds)
    # A file that is new since belongs to one part as well, wherever its name puts it.
    for new in ("tests/a/test_a.py", "tests/kernels/test_500.py", "tests/z/test_z.py"):
        held = [new in parts.files_of(number, cuts, [*seconds, new]) for number in range(1, count + 1)]
        assert sum(held) == 1


def test_the_parts_are_as_equal_as_files_allow() -> None:
    seconds = {
        f"tests/ops/test_{name}.py": took
        for name, took in zip("abcdef", (50, 10, 40, 45, 5, 50), strict=True)
    }
    assert parts.cut(seconds, 4) == [f"tests/ops/test_{name}.py" for name in "bdf"]
    draw = random.Random(0)
    many = {f"tests/ops/test_{number:03}.py": draw.uniform(1, 60) for number in range(70)}
    for count in (2, 3, 4, 6):
        cuts = parts.cut(many, count)
        sums = [sum(many[path] for path in parts.files_of(n, cuts, many)) for n in range(1, count + 1)]
        assert max(sums) <= sum(many.values()) / count + max(many.values()) / 2


def test_more_parts_than_files_are_refused() -> None:
    with pytest.raises(ValueError, match="2 files with tests cannot be cut into 3 parts"):
        parts.cut({"tests/test_a.py": 1.0, "tests/test_b.py": 1.0}, 3)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "1/0", "a/b", "1/3/5", ""])
def test_what_is_no_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="a part is n/m with 1 <= n <= m"):
        parts.numbers(part)


def test_seconds_come_from_the_newest_evidence() -> None:
    path, other = "tests/ops/test_a.py", "tests/ops/test_b.py"
    old = {
        "date": "2026-11-20",
        "files": {path: {"ran": 10, "seconds": 500.0}, other: {"ran": 2, "seconds": 4.0}},
        "slow": {f"{path}::test_x": 400.0, f"{path}::test_gone": 9.0},
    }
    new = {
        "date": "2026-11-21",
        "files": {path: {"ran": 5, "seconds": 60.0}, other: {"ran": 0, "seconds": 0.0}},
        "slow": {
            f"{path}::test_x": 40.0,
            "tests/ops/test_cut.py::test_z": 50.0,
        },  # of a file that did not run whole
    }
    known = parts.known([new, old])
    assert known.slow["tests/ops/test_cut.py::test_z"] == 50.0
    assert known.of_file(path, 10) == 120.0
    assert known.of_file(other, 3) == 6.0
    assert known.of_file("tests/ops/test_c.py", 3) == 3 * parts.UNKNOWN
    ids = [f"{path}::test_x", f"{path}::test_y", f"{other}::test_z", "tests/bench/test_d.py::test_d"]
    assert known.of_each(ids) == dict(
        zip(ids, (40.0, 5.0, 2.0, parts.UNKNOWN_IN["tests/bench/"]), strict=True)
    )


def test_a_case_that_was_not_drawn_before_takes_as_long_as_others_of_its_function() -> None:
    path = "tests/ops/test_a.py"
    known = parts.Known({path: (10, 60.0)}, {f"{path}::test_x[{case}]": 10.0 for case in range(4)})
    ids = [f"{path}::test_x[{case}]" for case in (0, 7, 8, 9)] + [
        f"{path}::test_y[{case}]" for case in range(9)
    ]
    found = list(known.of_each(ids).values())
    assert found == [10.0] * 4 + [pytest.approx(20 / 6)] * 9
    assert list(known.of_each([f"{path}::test_x[{case}]" for case in range(5, 13)]).values()) == [5.0] * 8


@pytest.mark.parametrize("seed", range(3))
def test_units_are_longest_first_and_hold_every_test_once(seed: int) -> None:
    ids = some_tests(seed)
    draw = random.Random(seed)
    known = parts.Known(slow={test: draw.choice([0.1, 1.0, 9.0, 30.0]) for test in ids})
    units = parts.units(ids, known)
    seconds = [sum(known.slow[test] for test in unit) for unit in units]
    assert seconds == sorted(seconds, reverse=True)
    assert sorted(test for unit in units for test in unit) == sorted(ids)
    for unit, took in zip(units, seconds, strict=True):
        assert len({parts.function_of(test) for test in unit}) == 1
        assert len(unit) == 1 or took <= parts.UNIT_SECONDS


def test_units_as_long_take_turns_by_function() -> None:
    """So that workers do not all begin by compiling the same kernel."""
    ids = [f"tests/ops/test_a.py::test_{name}[{case}]" for name in "xyz" for case in range(10)]
    units = parts.units(ids, parts.Known())
    assert [parts.function_of(unit[0])[-1] for unit in units] == list("xyzxyz")
