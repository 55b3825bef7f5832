"""Every operation's budget lets right sums pass in any order, and refuses planted faults: see `planted.py`."""

from collections.abc import Iterable

import pytest
import torch

from sparsek.testing.budget import Bound, product_rounding
from tests.reference.planted import DTYPES, TRIALS, faults, right, sequential

BF16, FP16, F32 = DTYPES
# What no budget that lets right results pass can see: sums of 16 bits more exact than what is stored, sums of FP8 that
# are as good as a tensor core's, and 2 % where several roundings to bf16 explain as much.
UNSEEN = {
    *((name, BF16, "sums in fp16") for name in TRIALS),
    ("fp8", F32, "rounded to float16 before"),
    ("layer", BF16, "one element off by 2 % (0)"),
    ("attention backward", BF16, "one element off by 2 % (0)"),
    ("attention backward", BF16, "one element off by 2 % (1)"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TRIALS)
def test_right_results_pass_and_planted_faults_do_not(name: str, dtype: torch.dtype) -> None:
    seed = 10**4
    trial = TRIALS[name](seed, dtype)
    assert [order for order, passed in right(trial, dtype).items() if not passed] == []
    unseen = [fault for fault, passed in faults(trial, seed, dtype).items() if passed]
    assert {(name, dtype, fault) for fault in unseen} <= UNSEEN


@pytest.mark.parametrize(("shape", "seeds"), [((128, 128), range(4)), ((1, 1), (725, 2010, 5852))])
def test_right_sums_pass_where_the_dense_product_is_exact(
    shape: tuple[int, int], seeds: Iterable[int]
) -> None:
    """Partial sums may go far before they cancel: the worst of many errors is beyond a Gaussian's."""
    rows, columns = shape
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        left, right = torch.randn(rows, 96, generator=draw), torch.randn(96, columns, generator=draw)
        exact = left.double() @ right.double()
        bound = Bound(exact, product_rounding(left, right, F32), [exact.float()])
        assert bound.judge(sequential(left, right)).passed, seed
        spoiled = exact.float()
        spoiled[-1, -1] += 1e-4
        assert not bound.judge(spoiled).passed
