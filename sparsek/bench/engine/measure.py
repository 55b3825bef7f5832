"""From the entry of a suite to the function that measures it."""

from collections.abc import Callable, Sequence

import torch

from sparsek.bench.engine.run import Outcome, run_case
from sparsek.bench.peers.peer import Peer
from sparsek.bench.suites import attention_run, host_run, planner_run
from sparsek.bench.suites.case import SuiteRow


def measure(
    entry: SuiteRow,
    *,
    peers: Sequence[Peer],
    rounds: int,
    device: torch.device,
    report: Callable[[str], None],
) -> Outcome:
    """The records of one entry. Only device times have peers. Raises GateError for a wrong result."""
    if entry.op == "planner":
        return planner_run.run_planner(entry.case, device=device, rounds=rounds, report=report)
    if entry.op == "host":
        return host_run.run_host_time(entry.case, device=device, rounds=rounds, report=report)
    if entry.op == entry.case.op:
        return run_case(
            entry.case, kernels=entry.kernels, peers=peers, rounds=rounds, device=device, report=report
        )
    report(entry.op.replace("_", " "))
    if entry.op == "mask_build":
        return attention_run.run_mask_build(entry.case, device=device, rounds=rounds)
    return attention_run.run_new_mask(entry.case, kernels=entry.kernels, device=device, rounds=rounds)
