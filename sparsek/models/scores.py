"""What a block, or a pair of four neighbours, is worth; moments of a layer's inputs; and the share that a layer keeps.

A layer is y = x @ W.T + b with W [M, K]. H = E[x.T x] is the second moment of its inputs. Of a dropped set of columns D
in rows w, the output error is w_D H_DD w_D. `wanda` keeps the diagonal of H only (arXiv:2306.11695), `exact` all of it.
`obs` lets the remaining weights compensate: the error is then w_D (inv(H)_DD)^-1 w_D (arXiv:2208.11580, 2301.00774).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.products.formats.convert import Rule, picked
from sparsek.products.formats.padding import tiles_of
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.two_four import GROUP, groups

METHODS = ("magnitude", "wanda", "exact", "obs")
BUDGETS = ("uniform", "sensitivity", "owl")
DAMPING = 0.01  # of the mean of H's diagonal, added to it
OUTLIER = 5.0  # times the mean score, arXiv:2310.05175
# The most by which a budget moves the kept share of a layer: of the same paper, and tried on MiniLM.
SPREADS = {"owl": 0.08, "sensitivity": 0.2}
ELEMENTS = 2**23  # of inputs that are in float32 at a time
WIDE = 4096  # columns up to which systems are solved in float64
DROPPED = tuple(combinations(range(GROUP), 2))  # the six pairs that 2:4 may drop


class Moments:
    """Second moments of the inputs of a layer, in float32 on their device, of a pruned model beside the dense one.

    Inputs are extended by a column of ones, so that means, and biases, are part of them. The wanted output of a layer
    in the pruned model is y + r - r': y is the output in the dense model, and r and r' are the residuals of both models
    that are added to it, where the layer has one.

    Attributes:
        h: E[x'.T x'] of the inputs x' in the pruned model, [K+1, K+1].
        g: E[x.T x'] with the inputs x in the dense model, [K+1, K+1].
        shift: E[(r - r').T x'] of each layer that has a residual, [M, K+1].
        energy: E[y^2] of each layer's outputs, [M].
        wanted: E[(y + r - r')^2] of each layer's outputs, [M].
        noise: E[(x'_8 - x')^2] of each column, [K], with x'_8 rounded to FP8 as products in FP8 do; None unless `fp8`.
    """

    def __init__(
        self, columns: int, layers: Sequence[str], device: torch.device, *, fp8: bool = False
    ) -> None:
        side = (columns + 1, columns + 1)
        self.h = torch.zeros(side, dtype=torch.float32, device=device)
        self.g = torch.zeros(side, dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        self.shift: dict[str, Tensor] = {}
        self.noise = torch.zeros(columns, dtype=torch.float32, device=device) if fp8 else None
        self.energy = dict.fromkeys(layers, self.count)
        self.wanted = dict.fromkeys(layers, self.count)

    def add(
        self,
        pruned: Tensor,
        dense: Tensor,
        rows: Tensor,
        weights: Mapping[str, tuple[Tensor, Tensor | None]],
        residuals: Mapping[str, Tensor],
    ) -> None:
        """Add inputs [n, K] of both models, and r - r' [n, M]; `rows` [n] is 1, or 0 for padding. No sync."""
        step = max(1, ELEMENTS // (pruned.shape[1] + 1))
        for at in range(0, len(pruned), step):
            own = slice(at, at + step)
            lost = {name: each[own] for name, each in residuals.items()}
            self._add(pruned[own], dense[own], rows[own], weights, lost)

    def _add(
        self,
        pruned: Tensor,
        dense: Tensor,
        rows: Tensor,
        weights: Mapping[str, tuple[Tensor, Tensor | None]],
        residuals: Mapping[str, Tensor],
    ) -> None:
        a, b = (functional.pad(x.float(), (0, 1), value=1.0) * rows[:, None] for x in (pruned, dense))
        self.h.addmm_(a.T, a)
        self.g.addmm_(b.T, a)
        self.count = self.count + rows.sum()
        if self.noise is not None:
            lost = quantize(pruned, check=False).dequantize() - pruned.float()
            self.noise = self.noise + (lost.square() * rows[:, None]).sum(0)
        for name, (weight, bias) in weights.items():
            y = functional.linear(dense.to(weight.dtype), weight, bias).float() * rows[:, None]
            self.energy[name] = self.energy[name] + y.square().sum(0)
            if name in residuals:
                lost = residuals[name].float() * rows[:, None]
                self.shift[name] = lost.T @ a + self.shift.get(name, 0.0)
                y = y + lost
            self.wanted[name] = self.wanted[name] + y.square().sum(0)

    def of_rows(self, name: str, weight: Tensor, bias: Tensor | None) -> Moments:
        """Return the moments, which are means of a dense model, for some rows [n, K] of a layer's weight."""
        last = weight.new_zeros(len(weight)) if bias is None else bias
        rows = torch.cat((weight, last[:, None]), 1).double()
        made = copy.copy(self)
        made.energy = made.wanted = {name: ((rows @ self.h.double()) * rows).sum(1)}
        made.shift = {}
        return made

    def mean(self) -> Moments:
        """Divide the moments by the number of inputs, once all of them are added, and return them."""
        self.count = self.count.clamp(min=1)
        self.h /= self.count
        self.g /= self.count
        self.noise = None if self.noise is None else self.noise / self.count
        self.shift, self.energy, self.wanted = (
            {name: each / self.count for name, each in parts.items()}
            for parts in (self.shift, self.energy, self.wanted)
        )
        return self


def solver_dtype(columns: int) -> torch.dtype:
    """The dtype in which systems of this many columns are solved."""
    return torch.float64 if columns <= WIDE else torch.float32


def damped(h: Tensor, moments: Tensor | None = None) -> Tensor:
    """H [K, K] with DAMPING of the mean of its diagonal added to that: it then has an inverse.

    `moments`: H before it was centred, in float32. Where inputs hardly vary, rounding is all that is left of it: each
    column then gets more, as a share of its own moment.
    """
    diagonal, whole = h.diagonal(), (h if moments is None else moments).diagonal()
    mean = diagonal.mean()
    added = torch.full_like(diagonal, 1.0) * torch.where(mean > 0, DAMPING * mean, 1.0)
    least = 8 * len(h) * torch.finfo(torch.float32).eps * whole
    for _ in range(20):
        if not torch.linalg.cholesky_ex(_raised(h, added / 2)).info:
            break
        added, least = added.maximum(least), 4 * least
    return _raised(h, added)


def _raised(h: Tensor, added: Tensor) -> Tensor:
    """H with more on its diagonal."""
    made = h.clone()
    made.diagonal().add_(added)
    return made


def inverse(h: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, or of many."""
    lower = torch.linalg.cholesky(h)
    if h.ndim == 2 or not h.is_cuda:
        return torch.cholesky_inverse(lower)
    # On a GPU that takes the matrices one by one.
    eye = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
    own = torch.linalg.solve_triangular(lower, eye, upper=False)
    return torch.linalg.solve_triangular(lower.mT, own, upper=True)  # no product: it might be one of TF32


def padded(h: Tensor, side: int) -> Tensor:
    """H [K, K] with the columns of a ragged side added: of 1 alone, so that H keeps an inverse."""
    more = -h.shape[0] % side
    if not more:
        return h
    extra = torch.ones(more, dtype=h.dtype, device=h.device)
    return torch.block_diag(h, torch.diag_embed(extra))


def diagonal_blocks(h: Tensor, side: int) -> Tensor:
    """The blocks [..., Kb, bk, bk] on the diagonal of [..., K, K], K a multiple of bk; a view."""
    count = h.shape[-1] // side
    split = h.unflatten(-1, (count, side)).unflatten(-3, (count, side))
    return split.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def quadratics(tiles: Tensor, matrices: Tensor) -> Tensor:
    """The sums over the rows w of each block of w @ matrix @ w. tiles [..., bm, Kb, bk], matrices [..., Kb, bk, bk]."""
    return torch.einsum("...rci,...cij,...rcj->...c", tiles, matrices, tiles)


def block_scores(w: Tensor, block: tuple[int, int], method: str, h: Tensor | None) -> Tensor:
    """The score [Mb, Kb] of each block of w [M, K]: its squared norm, or the output error without it, by `method`."""
    tiles = tiles_of(w, block)
    if method == "magnitude" or h is None:
        return tiles.square().sum((1, 3))
    if method == "wanda":
        weighed = tiles_of(w.square() * h.diagonal().to(w.dtype), block)
        return weighed.sum((1, 3))
    h = padded(h, block[1])
    if method == "obs":
        matrices = inverse(diagonal_blocks(inverse(h), block[1]))
    else:
        matrices = diagonal_blocks(h, block[1])
    return quadratics(tiles, matrices.to(w.dtype))


def choose_blocks(scores: Tensor, keep: float, scope: str) -> Tensor:
    """The blocks to store, bool [Mb, Kb]: those of the largest scores, of equal ones the first."""
    return picked(scores, Rule(None, None, keep, scope))


def pair_costs(w: Tensor, matrices: Tensor) -> Tensor:
    """The cost [M, G, 6] of dropping each pair of DROPPED: w_D @ matrix @ w_D, for matrices [G, 6, 2, 2]."""
    pairs = groups(w)[..., torch.tensor(DROPPED, device=w.device)]
    return torch.einsum("mgpi,gpij,mgpj->mgp", pairs, matrices, pairs)


def pair_blocks(h: Tensor) -> Tensor:
    """The parts [G, 6, 2, 2] of the groups' blocks [G, 4, 4] for each pair of DROPPED."""
    at = torch.tensor(DROPPED, device=h.device)
    return h[:, at[:, :, None], at[:, None, :]]


def pair_matrices(method: str, h: Tensor | None, like: Tensor) -> Tensor:
    """What `pair_costs` takes, by method, for w [M, K]; for "obs" that of a pair alone, without order."""
    count = like.shape[1] // GROUP
    if method == "magnitude" or h is None:
        eye = torch.eye(2, dtype=like.dtype, device=like.device)
        return eye.expand(count, len(DROPPED), 2, 2)
    if method == "wanda":
        h = torch.diag_embed(h.diagonal())
    if method == "obs":
        return inverse(pair_blocks(diagonal_blocks(inverse(h), GROUP))).to(like.dtype)
    return pair_blocks(diagonal_blocks(h, GROUP)).to(like.dtype)


def kept_of_pairs(costs: Tensor) -> Tensor:
    """The mask bool [M, K] of the elements that stay, from the costs [M, G, 6] of the pairs."""
    dropped = torch.ones((len(DROPPED), GROUP), dtype=torch.bool, device=costs.device)
    dropped.scatter_(1, torch.tensor(DROPPED, device=costs.device), False)
    return dropped[costs.argmin(-1)].flatten(-2)


def outlier_share(w: Tensor, h: Tensor) -> Tensor:
    """The share of the scores |w_ij| sqrt(H_jj) that are more than OUTLIER times their mean, arXiv:2310.05175."""
    scores = w.abs() * h.diagonal().clamp(min=0).sqrt().to(w.dtype)
    return (scores > OUTLIER * scores.mean()).to(torch.float32).mean()


def lost_share(w: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    """The output error |x (W - W mask)|^2 over |x W|^2: how sensitive a layer is to this mask."""
    h = h.to(w.dtype)
    lost = w.masked_fill(mask, 0)
    whole = ((w @ h) * w).sum()
    return ((lost @ h) * lost).sum() / whole.clamp(min=torch.finfo(w.dtype).tiny)


def budgets(
    keep: Sequence[float], worth: Sequence[float], sizes: Sequence[int], spread: float
) -> list[float]:
    """The kept share of each layer: more where `worth` is high, within `spread` of `keep`; all in all as many weights.

    Worth is mapped linearly, centred by size, and scaled so that the farthest layer moves by `spread`, or
    by less where a share would leave (0, 1]. The paper maps the range of worth alike and centres without sizes.
    """
    total = sum(sizes)
    if not total:
        return list(keep)
    centre = sum(size * each for size, each in zip(sizes, worth, strict=True)) / total
    moves = [each - centre for each in worth]
    farthest = max(map(abs, moves), default=0.0)
    if farthest <= 1e-12:
        return list(keep)
    step = spread / farthest
    for share, move in zip(keep, moves, strict=True):
        room = 1 - share if move > 0 else share / 2
        step = min(step, room / abs(move)) if move else step
    return [share + step * move for share, move in zip(keep, moves, strict=True)]
