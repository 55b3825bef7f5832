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


class Attention(nn.Module):
    """Attention of 64 features with eight heads, each second one of no use, with what `kind` says."""

    slopes: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.shared = {"grouped": 2, "single": 8}.get(kind, 1)  # heads that share a key
        sizes = (64, 64 // self.shared, 64 // self.shared)
        if kind in ("fused", "neighbours"):
            self.fused = nn.Linear(64, 192)
        else:
            self.q, self.k, self.v = (nn.Linear(64, each) for each in sizes)
        self.o = nn.Linear(64, 64)
        of_head = self.o.weight.data.view(64, 8 // self.shared % 8 or 8, -1)
        of_head[:, ::2] = 0
        self.register_buffer("slopes", torch.linspace(0, 2, 8)[:, None, None])

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        if self.kind == "fused":
            q, k, v = self.fused(x).chunk(3, -1)
        elif self.kind == "neighbours":
            q, k, v = self.fused(x).unflatten(-1, (8, 3, 8)).unbind(3)
        else:
            q, k, v = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (-1, 8)) if y.ndim == 3 else y for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        far = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        bias = -self.slopes * (far[:, None] - far).abs() if self.kind == "slopes" else None
        y = functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=self.shared > 1)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["plain", "grouped", "fused", "neighbours", "crossed"])
@torch.no_grad()
def test_heads_without_use_leave_whole_blocks(kind: str):
    dense, x = Attention(kind).eval(), torch.randn(32, 12, 64)
    inputs = (x, torch.randn(32, 12, 64)) if kind == "crossed" else (x,)
    want = dense(*inputs)
    errors = []
    for permute in (True, False):
        model = copy.deepcopy(dense)
        config = sk.BlockSparse((16, 16), 0.5)
        report = sk.prune(model, config, calibration=[inputs], permute=permute)
        assert {row.kept for row in report.replaced} == {0.5}
        errors.append(float((model(*inputs) - want).norm() / want.norm()))
    assert errors[0] < 0.01
    assert errors[1] > 0.1


class Masked(Attention):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (8, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, attention_mask[:, None, None] != 0)
        return self.o(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_a_batch_with_one_token_that_counts_does_not_show_heads():
    dense, x = Masked("plain").eval(), torch.randn(2, 16, 12, 64)
    dense.o.weight[:, ::2] = 0  # half of each head, of those that are of use
    masks = torch.ones(2, 16, 12)
    masks[0, :, 1:] = 0
    batches = [{"x": a, "attention_mask": b} for a, b in zip(x, masks, strict=True)]
    want, model = dense(**batches[1]), copy.deepcopy(dense)
    sk.prune(model, sk.BlockSparse((16, 16), 0.5), calibration=batches)
    assert (model(**batches[1]) - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("kind", ["slopes", "one token"])
def test_heads_that_differ_stay_where_they_are(kind: str):
    dense, x = Attention(kind).eval(), torch.randn(32, 1 if kind == "one token" else 12, 64)
    both = [pruned(dense, x, permute=permute)[0].state_dict() for permute in (True, False)]
    for name, each in both[0].items():
        torch.testing.assert_close(each, both[1][name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["norm", "two", "returned"])
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


def test_groups_of_columns_leave_together():
    w, h = problem(6, 12, seed=6)
    costs = [float(cost_of(w, h, torch.arange(12) // 3 == each)[0]) for each in range(4)]
    kept = obs.choose_columns(w, h, 9, 3)
    assert kept.view(4, 3).all(1).tolist() == [each != min(costs) for each in costs]


def test_many_columns_leave_a_few_at_a_time():
    w, h = problem(4, 600)
    w[:, 1::2] *= 1e-3
    kept = obs.choose_columns(w, h, 300)
    assert int(kept.sum()) == 300
    assert int(kept[::2].sum()) > 290
