"""The schema of records, their file, and the hash that ties them to a source."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.testing.budget import Gate
from sparsek_bench.engine import records
from sparsek_bench.suites.host import HOST
from sparsek_bench.suites.mlp import MlpTrainCase
from sparsek_bench.suites.spgemm import SpgemmCase
from sparsek_bench.suites.spmm import SpmmCase
from tests.bench.conftest import GOOD_CASE, WINDOW_CASE

Make = Callable[..., records.Record]


def test_a_good_record_has_no_faults(record: records.Record) -> None:
    assert records.faults(record) == []


@pytest.mark.parametrize("name", records.FIELDS)
def test_a_missing_field_is_named(record: records.Record, name: str) -> None:
    del record[name]
    assert records.faults(record) == [f"field {name} is missing"]


def test_an_unknown_field_is_named(record: records.Record) -> None:
    assert records.faults(record | {"note": "x"}) == ["field note is not part of a record"]


OF_OP: dict[str, Any] = {
    "spmm": GOOD_CASE,
    "attention": WINDOW_CASE,
    "spgemm": SpgemmCase(64, 64, 64, (32, 32), (32, 32), 0.5),
}
WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("spmm", {"op": "gemm"}, "op 'gemm' is not one of spmm"),
    ("spmm", {"gate": {"error": 1.0, "budget": 0.5, "passed": False}}, "gate.passed is not true"),
    ("spmm", {"gate": {"passed": True}}, "gate has the fields ['passed']"),
    ("spmm", {"ms": {"median": 1.0, "min": 2.0, "max": 3.0, "rounds": 5}}, "0 < min <= median <= max"),
    ("spmm", {"ms": {"median": 2.0, "min": 1.0, "max": 3.0, "rounds": 0}}, "ms.rounds is not positive"),
    (
        "spmm",
        {"ms": {"median": float("nan"), "min": 1.0, "max": 3.0, "rounds": 5}},
        "ms.median is not a number",
    ),
    ("spmm", {"tflops": None}, "tflops is not an object"),
    ("spmm", {"gbps": "fast"}, "gbps is not a number"),
    ("spmm", {"ratio": {}}, "ratio has the fields [], expected ['cublas']"),
    ("spmm", {"ratio": {"cublas": 1.0, "fa4": 2.0}}, "ratio has the fields ['cublas', 'fa4']"),
    ("spmm", {"case": {"m": 1}}, "case has the fields ['m']"),
    ("spmm", {"env": {"gpu": "H200"}}, "env has the fields ['gpu']"),
    ("spmm", {"peers": []}, "peers is not an object"),
    ("spmm", {"source_hash": ""}, "source_hash is not a non-empty string"),
    ("spmm", {"date": "yesterday"}, "date 'yesterday' is not an ISO date"),
    ("attention", {"memory": "much"}, "memory is neither a number nor null"),
    (
        "attention",
        {"peers": {"cudnn": {"ms": {}, "tflops": 1.0, "memory": "much"}}},
        "peers.cudnn.memory is neither",
    ),
    ("attention", {"case": {"mask": "full"}}, "case has the fields ['mask']"),
    ("spgemm", {"symbolic_ms": "long"}, "symbolic_ms is neither a number nor null"),
    ("spgemm", {"symbolic_share": True}, "symbolic_share is neither a number nor null"),
    ("spgemm", {"case": {"m": 1}}, "case has the fields ['m']"),
)


@pytest.mark.parametrize(("op", "change", "said"), WRONG)
def test_a_wrong_field_is_said(make_record: Make, op: str, change: dict[str, Any], said: str) -> None:
    made = make_record(OF_OP[op])
    assert records.faults(made) == []
    assert said in "; ".join(records.faults(made | change))


def test_a_record_from_before_a_field_of_the_case_was_there_means_its_default(record: records.Record) -> None:
    before = {name: value for name, value in record["case"].items() if name != "form"}
    old = record | {"case": before}
    assert records.faults(old) == []
    assert records.case_of(old) == records.case_of(record)
    assert records.newest([old, record]) == [record]


def test_a_case_that_cannot_be_is_a_fault(record: records.Record) -> None:
    record["case"] = record["case"] | {"block": [24, 16]}
    assert "multiples of 16" in records.faults(record)[0]


def test_every_op_says_what_its_records_hold(attention_record: records.Record) -> None:
    assert records.faults(attention_record) == []
    assert records.faults(attention_record | {"memory": None}) == []
    assert records.faults({**attention_record, "op": "spmm"})[0] == "field memory is not part of a record"
    del attention_record["memory"]
    assert records.faults(attention_record) == ["field memory is missing"]
    fresh = {"op": "fresh", "case": attention_record["case"] | {"trains": True}}
    assert "peers.cudnn has the fields" in records.faults(attention_record | fresh)[0]
    alone = {"peers": {}, "ratio": {}}
    assert records.faults(attention_record | fresh | alone) == []
    unrated = {"tflops": None, "gbps": None, "roofline": None}
    assert records.faults(attention_record | {"op": "attention", "memory": 1.0} | alone | unrated)
    assert records.faults(attention_record | fresh | alone | unrated) == []


def test_a_record_of_spgemm_has_a_symbolic_phase_that_may_be_null(make_record: Make) -> None:
    made = make_record(OF_OP["spgemm"])
    assert records.faults(made | {"symbolic_ms": None}) == []
    del made["symbolic_ms"]
    assert records.faults(made) == ["field symbolic_ms is missing"]


def test_what_several_kernels_do_is_recorded_under_all_their_names(make_record: Make) -> None:
    made = make_record(MlpTrainCase(8, 32, 64, (32, 32), 0.5))
    assert records.faults(made) == []
    assert made["kernel"] == "cpu.spmm + reference.sddmm"
    assert records.is_fresh(made)
    assert not records.is_fresh(made | {"kernel": "cpu.spmm"})
    assert not records.is_fresh(made | {"kernel": "cpu.spmm + gone.sddmm"})


def test_the_configs_of_several_kernels_are_kept_by_name() -> None:
    assert records.config_of({"up": Gate(0.0, 1.0, True), "down": None}) == {
        "up": {"error": 0.0, "budget": 1.0, "passed": True},
        "down": {},
    }


def test_a_mask_that_is_not_known_is_a_fault(attention_record: records.Record) -> None:
    attention_record["case"] = attention_record["case"] | {"mask": "diagonal"}
    assert "no mask is written 'diagonal'" in records.faults(attention_record)[0]


@pytest.mark.parametrize("op", ["attention2", None, [], 3])
def test_an_op_that_is_not_known_is_the_only_fault(record: records.Record, op: Any) -> None:
    assert records.faults(record | {"op": op}) == [f"op {op!r} is not one of {', '.join(records.OPS)}"]


def test_only_records_that_are_not_rated_have_null_rates(make_record: Make) -> None:
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    assert records.faults(make_record(**nulls))
    assert records.faults(make_record(HOST[0].case, **nulls)) == []


@pytest.mark.parametrize("thing", [None, [], 3, "text"])
def test_what_is_no_object_is_no_record(thing: Any) -> None:
    assert "a record is a JSON object" in records.faults(thing)[0]


def test_records_come_back_from_the_file_and_later_ones_are_appended(
    tmp_path: Path, record: records.Record
) -> None:
    path = tmp_path / "h200" / "spmm.jsonl"
    records.append(path, [record])
    records.append(path, [record | {"gbps": 2.0}, record | {"gbps": 3.0}])
    assert [one["gbps"] for one in records.read(path)] == [1500.0, 2.0, 3.0]
    assert records.read(tmp_path) == records.read(path)


def test_a_malformed_record_is_not_appended(tmp_path: Path, record: records.Record) -> None:
    path = tmp_path / "spmm.jsonl"
    with pytest.raises(InvalidInput, match="not a record: gbps"):
        records.append(path, [record, record | {"gbps": None}])
    assert not path.exists()


@pytest.mark.parametrize("line", ["{", '{"op": "spmm"}', "[]", "NaN"])
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, record: records.Record, line: str) -> None:
    path = tmp_path / "spmm.jsonl"
    path.write_text(json.dumps(record) + "\n\n" + line + "\n")
    with pytest.raises(InvalidFile, match=r"spmm\.jsonl:3: "):
        records.read(path)


def test_the_newest_record_of_each_case_kernel_and_card_counts(record: records.Record) -> None:
    old = record | {"date": "2026-11-19T10:00:00+00:00", "gbps": 1.0}
    other_card = old | {"env": record["env"] | {"gpu": "NVIDIA H100"}}
    other_kernel = old | {"kernel": "vendor.dense"}
    other_case = old | {"case": SpmmCase(64, 64, 64, (16, 16), 0.5).as_record()}
    kept = records.newest([record, old, other_card, other_kernel, other_case])
    assert kept == [record, other_card, other_kernel, other_case]


def test_dates_of_other_time_zones_compare_as_moments(record: records.Record) -> None:
    earlier = record | {"date": "2026-11-20T11:30:00+02:00"}
    assert records.newest([record, earlier]) == [record]
