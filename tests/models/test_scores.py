"""Scores of blocks and pairs, OBS and least squares against brute force: explicit inverses, every choice tried."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from sparsek.models import obs, reconstruct, scores
from sparsek.models.layer import elements_of

F64 = torch.float64


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, and a second moment of correlated inputs that has an inverse."""
    draw = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(5 * columns, columns, generator=draw, dtype=F64)
    x = x @ torch.randn(columns, columns, generator=draw, dtype=F64)
    return torch.randn(rows, columns, generator=draw, dtype=F64), scores.damped(x.T @ x / len(x))


def cost_of(w: Tensor, h: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """The least error of rows w without the dropped columns, by the normal equations, and the weights that have it."""
    kept = ~dropped
    best = torch.zeros_like(w)
    if kept.any():
        best[:, kept] = (w @ h)[:, kept] @ torch.linalg.inv(h[kept][:, kept])
    return ((best - w) @ h * (best - w)).sum(), best


def columns_of(blocks: set[int], side: int, columns: int) -> Tensor:
    found = torch.zeros(columns, dtype=torch.bool)
    for each in blocks:
        found[each * side : (each + 1) * side] = True
    return found


@pytest.mark.parametrize("method", scores.METHODS)
def test_a_block_is_worth_the_error_without_it(method: str):
    w, h = problem(20, 28)
    got = scores.block_scores(w, (8, 4), method, h)
    assert got.shape == (3, 7)
    for row, column in ((0, 0), (1, 3), (2, 6)):
        part = w[row * 8 : (row + 1) * 8]
        dropped = columns_of({column}, 4, 28)
        lost = part * dropped
        want = {
            "magnitude": lost.square().sum(),
            "wanda": (lost.square() * h.diagonal()).sum(),
            "exact": (lost @ h * lost).sum(),
            "obs": cost_of(part, h, dropped)[0],
        }[method]
        torch.testing.assert_close(got[row, column], want)


def test_ragged_blocks_have_the_scores_of_what_they_hold():
    w, h = problem(10, 22)
    got = scores.block_scores(w, (8, 4), "obs", h)
    want, _ = cost_of(w[8:], h, columns_of({5}, 4, 22))
    torch.testing.assert_close(got[1, 5], want)
    torch.testing.assert_close(obs.removal_costs(w, h, (8, 4))[1].max(), (w[8:] @ h * w[8:]).sum())


def test_blocks_leave_a_row_in_the_order_of_a_greedy_search_with_explicit_inverses():
    w, h = problem(24, 24, seed=1)
    got = obs.removal_costs(w, h, (8, 4))
    for row in range(3):
        part = w[row * 8 : (row + 1) * 8]
        gone: set[int] = set()
        while len(gone) < 6:
            costs = {
                each: cost_of(part, h, columns_of(gone | {each}, 4, 24))[0] for each in set(range(6)) - gone
            }
            first = min(costs, key=lambda each: float(costs[each]))
            gone.add(first)
            torch.testing.assert_close(got[row, first], costs[first])


@pytest.mark.parametrize("scope", ["row", "global"])
def test_the_blocks_that_stay_are_those_that_a_greedy_search_leaves(scope: str):
    w, h = problem(24, 24, seed=2)
    w[:8] *= 3
    got = obs.choose_by_obs(w, h, (8, 4), 0.5, scope)
    costs = obs.removal_costs(w, h, (8, 4))
    assert int(got.sum()) == 9
    if scope == "row":
        assert got.sum(1).tolist() == [3, 3, 3]
        return
    gone = [0, 0, 0]
    orders, totals = costs.argsort(1), costs.sort(1).values
    for _ in range(9):  # always the cheapest next block of all rows
        step = [float(totals[r, gone[r]] - (totals[r, gone[r] - 1] if gone[r] else 0)) for r in range(3)]
        row = min(range(3), key=step.__getitem__)
        gone[row] += 1
    for row in range(3):
        assert set((~got[row]).nonzero()[:, 0].tolist()) == set(orders[row, : gone[row]].tolist())


def test_block_rows_that_do_not_come_out_even_keep_what_costs_most():
    w, h = problem(24, 24, seed=2)
    for keep, count in ((0.1, 2), (0.4, 7), (0.95, 17)):
        got = obs.choose_by_obs(w, h, (8, 4), keep, "row")
        costs = obs.removal_costs(w, h, (8, 4))
        each, more = divmod(count, 3)
        orders, totals = costs.argsort(1), costs.sort(1).values
        last = torch.diff(totals, prepend=totals.new_zeros(3, 1))[:, 5 - each]
        ahead = last.argsort(descending=True)[:more].tolist()
        for row in range(3):
            kept = orders[row, 6 - each - (row in ahead) :]
            assert sorted(kept.tolist()) == got[row].nonzero()[:, 0].tolist()


def test_one_block_is_dropped_as_well_as_by_an_exhaustive_search():
    w, h = problem(8, 24, seed=3)
    every = [cost_of(w, h, columns_of({each}, 4, 24))[0] for each in range(6)]
    kept = obs.choose_by_obs(w, h, (8, 4), 5 / 6, "row")
    assert int((~kept).nonzero()[0, 1]) == int(torch.stack(every).argmin())


def test_greedy_obs_is_near_the_best_of_all_sets_of_blocks():
    w, h = problem(8, 24, seed=4)
    every = [cost_of(w, h, columns_of(set(each), 4, 24))[0] for each in combinations(range(6), 3)]
    kept = obs.choose_by_obs(w, h, (8, 4), 0.5, "row")
    got, _ = cost_of(w, h, ~elements_of(kept, (8, 4), w.shape)[0])
    assert min(every) <= got * (1 + 1e-9) <= 1.3 * min(every)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "exact"])
def test_the_pair_that_2_4_drops_costs_least_of_all_six(method: str):
    w, h = problem(6, 16)
    mask = scores.kept_of_pairs(scores.pair_costs(w, scores.pair_matrices(method, h, w)))
    assert mask.unflatten(1, (4, 4)).sum(-1).eq(2).all()
    matrix = {"magnitude": torch.eye(16, dtype=F64), "wanda": torch.diag(h.diagonal()), "exact": h}[method]
    for row in range(6):
        for group in range(4):
            at = list(range(4 * group, 4 * group + 4))

            def lost(pair: tuple[int, ...]) -> float:
                part = w[row, list(pair)]  # noqa: B023
                return float(part @ matrix[list(pair)][:, list(pair)] @ part)

            best = min(combinations(at, 2), key=lost)
            assert [each for each in at if not mask[row, each]] == list(best)


def test_the_sweep_to_2_4_is_that_of_explicit_inverses_and_every_pair():
    w, h = problem(5, 16, seed=5)
    got, mask = obs.sweep_pairs(w, h)
    for row in range(5):
        now, frozen = w[row].clone(), 0
        for group in range(4):
            left = 4 * group
            part = h[left:, left:]  # columns before are fixed: they are no part of the problem

            def outcome(pair: tuple[int, ...]) -> tuple[Tensor, Tensor]:
                dropped = torch.zeros(16 - left, dtype=torch.bool)  # noqa: B023
                dropped[list(pair)] = True
                return cost_of(now[None, left:], part, dropped)  # noqa: B023

            best = min(combinations(range(4), 2), key=lambda pair: float(outcome(pair)[0]))
            now[left:] = outcome(best)[1][0]
            assert [each for each in range(4) if not mask[row, left + each]] == list(best)
            frozen += 4
        torch.testing.assert_close(got[row], now)


@pytest.mark.parametrize("rows", [8, 1])
def test_least_squares_on_a_mask_is_that_of_the_data(rows: int):
    draw = torch.Generator("cpu").manual_seed(6)
    x, w = torch.randn(200, 24, generator=draw, dtype=F64), torch.randn(20, 24, generator=draw, dtype=F64)
    mask = torch.rand(-(-20 // rows), 24, generator=draw) < 0.5
    mask[0] = False
    got = reconstruct.least_squares(w, x.T @ x, mask, rows)
    whole = mask.repeat_interleave(rows, 0)[:20]
    assert not got[~whole].any()
    for row in range(rows, 20):
        kept = whole[row]
        want = torch.linalg.lstsq(x[:, kept], (x @ w[row])[:, None]).solution[:, 0]
        torch.testing.assert_close(got[row, kept], want)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
def test_the_dense_target_and_the_bias_are_a_ridge_regression_on_the_data(bias: bool, shifted: bool):
    draw = torch.Generator("cpu").manual_seed(7)
    dense = torch.randn(300, 12, generator=draw, dtype=F64) + 1
    pruned = dense + 0.3 * torch.randn(300, 12, generator=draw, dtype=F64)
    w = torch.randn(5, 12, generator=draw, dtype=F64)
    b = torch.randn(5, generator=draw, dtype=F64) if bias else None
    lost = torch.randn(300, 5, generator=draw, dtype=F64) + pruned[:, :5]
    rows = torch.ones(300)
    rows[250:] = 0  # padding
    moments = scores.Moments(12, ["a"], torch.device("cpu"))
    for part in (slice(0, 100), slice(100, 300)):
        residuals = {"a": lost[part]} if shifted else {}
        moments.add(pruned[part], dense[part], rows[part], {"a": (w, b)}, residuals)
    moments = moments.mean()
    fit = reconstruct.quadratic(w, b, moments, "a", True)
    x, y = pruned[:250], torch.nn.functional.linear(dense, w, b)[:250]
    energy = y.square().sum()
    y = y + lost[:250] if shifted else y
    centred = x - x.mean(0) if bias else x
    ridge = scores.DAMPING * centred.square().mean() * 250
    eye = torch.eye(12, dtype=F64)
    right = centred.T @ (y - y.mean(0) if bias else y) + ridge * w.T
    want = torch.linalg.solve(centred.T @ centred + ridge * eye, right).T
    torch.testing.assert_close(fit.target, want, rtol=1e-4, atol=1e-5)
    new = fit.bias_for(fit.target)
    assert (new is None) == (b is None)
    if new is not None:
        torch.testing.assert_close(new, y.mean(0) - x.mean(0) @ want.T, rtol=1e-4, atol=1e-5)
    got = reconstruct.relative_error(fit.target, new, w, b, moments, "a")
    error = (torch.nn.functional.linear(x, fit.target, new) - y).square().sum()
    torch.testing.assert_close(got, (error / energy).sqrt(), rtol=1e-3, atol=1e-3)


def test_budgets_store_as_much_and_more_where_worth_is_high():
    keep, sizes = [0.5, 0.5, 0.9], [100, 300, 200]
    got = scores.budgets(keep, [0.1, 0.2, 0.7], sizes, 0.08)
    assert sum(a * b for a, b in zip(got, sizes, strict=True)) == pytest.approx(50 + 150 + 180)
    assert got[2] > 0.9
    assert got[2] <= 1
    assert got[0] < got[1] < 0.5
    assert max(abs(a - b) for a, b in zip(got, keep, strict=True)) <= 0.08 + 1e-9
    assert scores.budgets(keep, [0.3] * 3, sizes, 0.08) == keep
    assert scores.budgets([0.01, 0.5], [0.0, 1.0], [1, 1], 0.2)[0] > 0
    assert scores.budgets([], [], [], 0.2) == []


def test_outliers_and_lost_outputs_are_those_of_the_papers():
    w, h = problem(20, 16)
    score = w.abs() * h.diagonal().sqrt()
    assert float(scores.outlier_share(w, h)) == float((score > 5 * score.mean()).float().mean())
    mask = torch.rand(20, 16, generator=torch.Generator("cpu").manual_seed(0)) < 0.5
    lost = w * ~mask
    want = torch.einsum("ij,jk,ik->", lost, h, lost) / torch.einsum("ij,jk,ik->", w, h, w)
    torch.testing.assert_close(scores.lost_share(w, mask, h), want)
