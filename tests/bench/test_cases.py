"""What holds for the cases of every benchmark: names, records, operand sets, gates, and a measurement on a CPU."""

import json
from typing import Any

import pytest
import torch

from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.testing.budget import Gate
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import case as case_module
from sparsek_bench.engine import run
from sparsek_bench.engine.data import tensors
from tests.bench.runs import CPU, SMALL, SmallCase, measured

EACH = pytest.mark.parametrize("small", SMALL, ids=str)


@pytest.mark.parametrize("name", BENCHES)
def test_every_row_survives_a_record_and_has_a_name_of_its_own(name: str) -> None:
    cases = [row.case for row in BENCHES[name].rows]
    assert [type(case).from_record(json.loads(json.dumps(case.as_record()))) for case in cases] == cases
    assert len({(case.op, case.name) for case in cases}) == len(cases)


@EACH
def test_every_small_case_survives_a_record(small: SmallCase) -> None:
    case = small.case
    assert type(case).from_record(json.loads(json.dumps(case.as_record()))) == case


@EACH
def test_operand_sets_share_their_structure_and_no_memory(small: SmallCase) -> None:
    first, second = small.case.operands(CPU)

    def floats(one: Any) -> list[torch.Tensor]:
        return [x for x in tensors(list(vars(one).values())) if x.is_floating_point()]

    places = [{x.data_ptr() for x in floats(one)} for one in (first, second)]
    assert len(places[0]) == len(places[1]) >= 1
    assert places[0].isdisjoint(places[1])
    again = small.case.operands(CPU)[0]
    ragged: set[int] = set()  # whose blocks stay where they are
    for name, value in vars(first).items():
        if isinstance(value, BSR | BSR24):
            assert value.pattern is getattr(second, name).pattern
            ragged |= {value.values.data_ptr()} if value.pattern.is_ragged else set()
        if name == "mask":
            assert value is second.mask
    for one, other, same in zip(floats(first), floats(second), floats(again), strict=True):
        poison = bool(one.isnan().all())
        assert poison or torch.equal(one.float(), same.float())
        assert poison or one.data_ptr() in ragged or not torch.equal(one.float(), other.float())


@EACH
def test_a_case_is_measured_with_its_peers(small: SmallCase) -> None:
    (record,) = measured(small.case, small.kernel).records
    assert (record["op"], record["kernel"]) == (small.case.op, small.recorded or small.kernel)
    assert set(record["peers"]) == small.peers
    assert (record["tflops"] is None) == (not small.case.rated)
    one, ms = small.case.operands(CPU)[0], record["ms"]["median"]
    if small.case.rated:
        assert record["tflops"]["useful"] == pytest.approx(one.useful_flops / ms / 1e9, rel=0.02, abs=2e-6)
        equivalent = record["tflops"]["dense_equivalent"]
        assert equivalent == pytest.approx(small.case.dense_flops / ms / 1e9, rel=0.02, abs=2e-6)
        for name, peer in record["peers"].items():
            ratio = record["tflops"]["useful"] / peer["tflops"]
            assert record["ratio"][name] == pytest.approx(ratio, rel=0.02, abs=2e-4)
    extra = {name for name in (*small.case.extra, *small.case.peer_extra) if name in ("memory", "peak_gb")}
    assert all(each[name] is None for name in extra for each in (record, *record["peers"].values()))


@EACH
def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch, small: SmallCase) -> None:
    (one, *_) = small.case.operands(CPU)
    monkeypatch.setattr(type(one), "gate", lambda self, plan: Gate(1.0, 0.5, False))
    monkeypatch.setattr(run, "time_rounds", lambda *args, **options: pytest.fail("timed a wrong kernel"))
    with pytest.raises(run.GateError, match="exceeds the budget"):
        measured(small.case, small.kernel)


@EACH
def test_results_begin_as_nan(monkeypatch: pytest.MonkeyPatch, small: SmallCase) -> None:
    """A run right before the judged one leaves NaN in memory of every result's size."""
    (one, *_) = small.case.operands(CPU)
    spoilt: list[Any] = []
    real = case_module.spoil
    monkeypatch.setattr(case_module, "spoil", lambda results: (real(results), spoilt.append(results)))
    plan = one.plan(None if small.kernel == "auto" else small.kernel)
    assert one.gate(plan).passed
    (before,) = (tensors(each) for each in spoilt)
    after = tensors(one.planned(plan)())
    assert [x.shape for x in before] == [x.shape for x in after]
    spoilt_floats = [x for x in before if x.is_floating_point() and all(x is not y for y in after)]
    assert all(x.isnan().all() for x in spoilt_floats)
