"""What a mask costs: a new one for every call of attention, and building one. Host time counts in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparsek.bench.engine import records
from sparsek.bench.engine.peer import rotating
from sparsek.bench.engine.run import Outcome, PeerResult, facts, in_order, passed, rated, reasons
from sparsek.bench.engine.sensors import Sensors
from sparsek.bench.engine.several import Named
from sparsek.bench.engine.wall import wait, wall_rounds
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.mask.mask import BlockMask
from sparsek.testing.budget import Gate

if TYPE_CHECKING:
    from sparsek.bench.suites.attention import AttentionCase, AttentionOperands

ALONE = "kernel_alone"
CHECKED_TILES = 16


def run_new_mask(
    case: AttentionCase,
    *,
    kernels: Sequence[str] = ("auto",),
    device: torch.device,
    rounds: int = 7,
    report: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Calls that build a mask, plan and run, back to back on the stream, next to calls of ready plans.

    Every call's mask comes from scores of its own set. Both are timed by the clock on the wall, from an idle GPU to an
    idle GPU, so that whatever the host does not hide is there. The ready plans are the record's peer "kernel_alone".
    """
    report("masks of their own")
    sets = [_with_own_mask(case, one, index, device) for index, one in enumerate(case.operands(device))]
    made: list[records.Record] = []
    unavailable: dict[str, list[str]] = {}
    for name in kernels:
        try:
            plans = [one.plan(None if name == "auto" else name) for one in sets]
        except Unsupported as error:
            unavailable[name] = reasons(error, name)
            continue
        plan = plans[0]
        gate = passed(case, plan.kernel, sets[0].judge(sets[0].anew(plan.kernel)()))
        calls = {
            "new": rotating([one.anew(plan.kernel) for one in sets]),
            ALONE: rotating([one.planned(each) for one, each in zip(sets, plans, strict=True)]),
        }
        seen = Sensors(device)
        times = wall_rounds(calls, device, rounds, on_sample=seen.sample)
        alone = PeerResult(times[ALONE], sets[0].useful_flops / times[ALONE].median / 1e9, {})
        record = facts("attention_new_mask", case, plan, times["new"], gate, device, seen)
        made.append(in_order(rated(record, case, sets[0], plan, {ALONE: alone})))
    return Outcome(case, tuple(made), unavailable, {})


def _with_own_mask(
    case: AttentionCase, one: AttentionOperands, index: int, device: torch.device
) -> AttentionOperands:
    make = case.mask_maker(device, seed=index)
    return replace(one, mask=make(), make=make)


# The source of the masks, in the place of a kernel.
BUILDER = Named("mask.structured")


def run_mask_build(case: AttentionCase, *, device: torch.device, rounds: int = 7, **_: Any) -> Outcome:
    """Times building the mask of a case, each time until the GPU is idle again. Its gate compares query tiles with the
    rule that the mask is named after: not one pair may be wrong.

    Raises InvalidInput for a mask that is drawn at random, GateError for a wrong mask.
    """
    make = case.mask_maker(device)
    gate = passed(case, BUILDER.kernel, check_mask(case, make()))

    def build() -> None:
        make()
        wait(device)

    seen = Sensors(device)
    times = wall_rounds({"build": build}, device, rounds, on_sample=seen.sample)["build"]
    return Outcome(case, (in_order(facts("mask_build", case, BUILDER, times, gate, device, seen)),), {}, {})


def check_mask(case: AttentionCase, mask: BlockMask) -> Gate:
    """Compares up to 16 query tiles, the first and the last among them, element by element with the rule of positions.

    The error is the fraction of wrong pairs, and the budget 0.
    """
    tiles, side = mask.grid[0], mask.block[0]
    keys = torch.arange(mask.kv_len, device=mask.device)
    wrong = pairs = 0
    for tile in sorted({round(i * (tiles - 1) / max(1, CHECKED_TILES - 1)) for i in range(CHECKED_TILES)}):
        first, last = tile * side, min((tile + 1) * side, mask.q_len)
        stands_at = torch.arange(first, last, device=mask.device) + mask.kv_len - mask.q_len
        right = case.mask_text.sees(stands_at, keys)
        if right is None:
            raise InvalidInput(
                f"{case.mask!r} is no rule of positions, which a mask's build can be checked by"
            )
        wrong += int((mask.dense_rows(first, last) != right).sum())
        pairs += right.numel()
    return Gate(wrong / pairs, 0.0, wrong == 0)
