"""What is taken from the words of racecheck."""

from pathlib import Path

from tests.kernels.sanitized import hazards

CONTROL = Path(__file__).with_name("racecheck_control.py")
SAID = """========= Error: Race reported between Read access at control_kernel+0x120 in racecheck_control.py:{read}
=========     and Write access at control_kernel+0x610 in racecheck_control.py:{write} [9 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""


def line(text: str) -> int:
    (found,) = [
        n for n, each in enumerate(CONTROL.read_text().splitlines(), 1) if each.strip().startswith(text)
    ]
    return found


def test_only_what_lies_where_workers_start_is_passed_over():
    started, kernel = line("gl.warp_specialize("), line("def control_kernel(")
    assert hazards(SAID.format(read=kernel, write=started), "control_kernel", CONTROL) == []
    inside = line("gl.store(out")
    (found,) = hazards(SAID.format(read=started, write=inside), "control_kernel", CONTROL)
    assert found == f"racecheck_control.py:{inside} {CONTROL.read_text().splitlines()[inside - 1].strip()}"
    (found,) = hazards("Read access at control_kernel+0x1 in gluon.py:3", "control_kernel", CONTROL)
    assert found == "gluon.py:3 "
