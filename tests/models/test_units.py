"""Hidden units that `prune` drops whole and sorts: which are found, which stay, and what the layers then store."""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from sparsek.models import obs
from tests.house.tools import need
from tests.models.test_scores import cost_of, problem

HALF = sk.BlockSparse(16, 0.5)


class Layered(nn.Module):
    """Layers of 32 inputs around 64 hidden units, every second of no use, with what `kind` says between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.up: Any = nn.Linear(32, 128 if kind == "halves" else 64)
        if kind == "conv1d":
            need("transformers")
            self.up = importlib.import_module("transformers.pytorch_utils").Conv1D(64, 32)
            nn.init.normal_(self.up.weight, std=0.3)
        self.gate = nn.Linear(32, 64) if kind == "gated" else None
        self.down, self.beside = nn.Linear(64, 32), nn.Linear(64, 32)
        self.down.weight.data[:, ::2] = 0
        self.norm = nn.LayerNorm(64)
        self.norm.weight.data = torch.rand(64)

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)
        if self.gate is not None:
            y = functional.silu(self.gate(x)) * y
        elif self.kind == "halves":
            a, b = y.chunk(2, -1)
            y = functional.gelu(a) * b
        elif self.kind == "heads":  # two heads of attention
            heads = y.unflatten(-1, (2, 32)).transpose(1, 2)
            y = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        elif self.kind == "norm":
            y = self.norm(y)
        else:
            y = functional.gelu(y)
        out = self.down(y)
        if self.kind == "two":
            out = out + self.beside(y.clone())
        return (out, y) if self.kind == "returned" else out


def pruned(dense: Any, x: Tensor, config: Any = HALF, **options: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(dense)
    return model, sk.prune(model, config, calibration=[x[:16], x[16:]], **options)


@pytest.mark.parametrize("of", [lambda each: each, sk.Float8], ids=["BSR", "FP8"])
@pytest.mark.parametrize("kind", ["plain", "gated", "halves", "conv1d"])
@torch.no_grad()
def test_units_without_use_leave_whole_blocks(kind: str, of: Any):
    dense = Layered(kind).eval()
    x = torch.randn(32, 12, 32)
    want, room = dense(x), 0.15 if of is sk.Float8 else 0.01
    model, report = pruned(dense, x, of(HALF))
    assert {row.kept for row in report.replaced} == {0.5}
    assert (model(x) - want).norm() < room * want.norm()
    assert all((row.error_after or 0) < room for row in report.replaced)
    model, _ = pruned(dense, x, of(HALF), permute=False)
    assert (model(x) - want).norm() > 0.2 * want.norm()


@pytest.mark.parametrize("kind", ["heads", "norm", "two", "returned"])
def test_units_whose_order_counts_stay_where_they_are(kind: str):
    dense, x = Layered(kind).eval(), torch.randn(32, 12, 32)
    both = [pruned(dense, x, permute=permute)[0].state_dict() for permute in (True, False)]
    for name, each in both[0].items():
        torch.testing.assert_close(each, both[1][name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (sk.BlockSparse((32, 16), 0.3), sk.BlockSparse((16, 16), 0.6, "global")),
        (sk.BlockSparse((16, 32), 0.7), sk.BlockSparse((16, 32), 0.2)),
        (sk.BlockSparse((48, 16), 0.4), sk.BlockSparse((16, 16), 0.3)),
        (sk.SemiSparse(), HALF),
        (HALF, None),
    ],
)
def test_each_layer_stores_as_much_as_without(up: Any, down: Any):
    dense, x = Layered("halves" if isinstance(up, sk.SemiSparse) else "plain").eval(), torch.randn(32, 12, 32)
    rules = {"up": up, "down": down, "*": None}
    _, with_units = pruned(dense, x, rules)
    _, without = pruned(dense, x, rules, permute=False)
    for one, other in zip(with_units.replaced, without.replaced, strict=True):
        assert (one.name, one.config) == (other.name, other.config)
        if (
            isinstance(up, sk.BlockSparse)
            and 64 % max(up.block if isinstance(up.block, tuple) else (1,)) == 0
        ):
            assert one.kept == other.kept


def test_columns_leave_in_the_order_of_a_greedy_search_with_explicit_inverses():
    w, h = problem(6, 12, seed=5)
    gone = torch.zeros(12, dtype=torch.bool)
    for count in range(11, 0, -1):
        costs = {}
        for each in (~gone).nonzero()[:, 0].tolist():
            costs[each] = float(cost_of(w, h, gone | (torch.arange(12) == each))[0])
        gone[min(costs, key=costs.__getitem__)] = True
        assert obs.choose_columns(w, h, count).tolist() == (~gone).tolist()


def test_many_columns_leave_a_few_at_a_time():
    w, h = problem(4, 600)
    w[:, 1::2] *= 1e-3
    kept = obs.choose_columns(w, h, 300)
    assert int(kept.sum()) == 300
    assert int(kept[::2].sum()) > 290
