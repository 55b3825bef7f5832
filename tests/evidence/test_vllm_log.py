"""The log of vLLM's engine with SparseK's backend, which `make test-vllm` writes. A stale one is reported only."""

import json
import sys

import pytest

from tests.house.tools import ROOT, run

LOG = ROOT / "benchmarks" / "evidence" / "vllm.json"


@pytest.mark.skipif(not LOG.exists(), reason="make test-vllm has written no log")
def test_every_case_of_the_log_passed() -> None:
    log = json.loads(LOG.read_text())
    assert log["failed"] == []
    assert [line["case"] for line in log["cases"] if not line["passed"]] == []
    assert log["passed"]
    assert len(log["cases"]) > 10
    served = [line for line in log["cases"] if "requests" in line]
    assert all(sum(line["calls"].values()) > 0 and line["logprob_error"] <= 1e-3 for line in served)
    places = [line for line in served if "named" in line["case"]]
    assert len(places) == 3, (
        "in a spawned process: by attention_config, by attention_backend, by the server's option"
    )


def test_the_status_is_one_word() -> None:
    done = run(sys.executable, "scripts/vllm_engine.py", "status")
    assert done.stderr == ""
    word = done.stdout.split(": ")[1].split(",")[0].split(";")[0]
    assert word in ("fresh", "stale", "missing"), done.stdout
    assert (done.returncode == 0) == (word == "fresh")
