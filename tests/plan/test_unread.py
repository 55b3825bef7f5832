"""Products with patterns that no host has read: their schedule is made where the pattern is."""

from dataclasses import replace

import torch

from sparsek.core.device import H200
from sparsek.engine.planning import choose
from sparsek.engine.table import load
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.formats.storage import BlockStats, unread_stats
from tests.problems import spmm_problem


def test_rows_that_nobody_has_read_are_neither_joined_nor_split() -> None:
    a = random_bsr(1024, 1024, 32, 0.2, dtype=torch.bfloat16, pattern="powerlaw")
    known = spmm_problem(1024, 1024, 512, (32, 32), a.nnzb, "bf16", H200, row_max=32, merged=((2, a.nnzb),))
    unread = replace(known, a=replace(known.a, blocks=unread_stats(a.pattern)))
    kinds = [{(c.joined_rows, c.split) for c in load("hopper.spmm").configs(p)} for p in (known, unread)]
    assert {(2, False), (1, True)} <= kinds[0]
    assert kinds[1] == {(1, False)}
    even = replace(known, a=replace(known.a, blocks=BlockStats((32, 32), a.nnzb, 6)))
    assert load("hopper.spmm").default(unread) == load("hopper.spmm").default(even)
    large = spmm_problem(8192, 8192, 8192, (64, 64), 2048, "bf16", H200, row_max=16)
    stats = replace(large.stats, row_max=128, unread=True)
    assert choose(large).kernel.name == "hopper.spmm_paired"
    assert choose(replace(large, a=replace(large.a, blocks=stats))).kernel.name == "hopper.spmm"


def test_on_a_cpu_no_pattern_passes() -> None:
    known = random_bsr(256, 256, 64, 0.5).pattern
    pattern = BlockPattern.unchecked(known.shape, known.block, known.indptr, known.indices)
    assert not pattern.passing
