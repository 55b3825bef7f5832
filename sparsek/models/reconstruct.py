"""The weights that remain are computed anew: by least squares for a layer, by steps of Adam for a transformer block.

All quadratics are in one form. The error of rows w against the dense layer is, up to a constant,
(w - target) H (w - target).T with the damped H of the pruned model's inputs; `best_dense` gives the target. On a set S
of columns it is least at w_S = (target H)_S inv(H_SS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsek.core.errors import InvalidInput, first_line
from sparsek.models.scores import Moments, damped, solver_dtype

ELEMENTS = 2**23  # of the systems that are solved at a time
TILE = 1024  # rows of a weight, and columns, at a time where sums are in float64
STEPS = 100
RATE = 3e-4


class Quadratic(NamedTuple):
    """The error of a layer's rows: (w - target) h (w - target).T, and by the means the bias that goes with w."""

    target: Tensor
    h: Tensor
    mean: Tensor
    bias: Tensor | None

    def bias_for(self, w: Tensor) -> Tensor | None:
        """Return the best bias [M] for w [M, K]; None for a layer without one."""
        return None if self.bias is None else self.bias - w @ self.mean

    def part(self, rows: Tensor, columns: Tensor) -> Quadratic:
        """The error of some rows, with weights on some columns alone; by indices."""
        h, bias = self.h[:, columns], None if self.bias is None else self.bias[rows]
        target = self.target[rows]
        if len(columns) < len(self.h):
            target = best_dense(target @ h, h[columns])
        return Quadratic(target, h[columns], self.mean[columns], bias)


def quadratic(w: Tensor, bias: Tensor | None, moments: Moments, name: str, follow: bool) -> Quadratic:
    """The error of a layer of the dense weight w [M, K] and bias, in the dtype of the solver.

    `follow`: compare with its wanted outputs, else with the outputs of the dense layer on the pruned
    model's inputs. With a bias, which is refitted too, moments are centred.
    """
    dtype = solver_dtype(w.shape[1])
    w, h = w.to(dtype), moments.h.to(dtype)
    extended = _extended(w, None if bias is None else bias.to(dtype))
    cross = extended @ (moments.g.to(dtype) if follow else h)  # E[y.T x'], with a last column E[y]
    if follow and name in moments.shift:
        cross = cross + moments.shift[name].to(dtype)
    cross, best, whole, here = cross[:, :-1], cross[:, -1], h[:-1, :-1], h[-1, :-1]
    h = whole
    if bias is not None:
        h, cross = h - torch.outer(here, here), cross - torch.outer(best, here)
    h_damped = damped(h, whole)
    if follow:
        w = best_dense(cross + w @ (h_damped - h), h_damped)
    return Quadratic(w, h_damped, here, None if bias is None else best)


def best_dense(cross: Tensor, h: Tensor) -> Tensor:
    """The dense weight [M, K] of least squares: cross inv(h), for cross = E[y.T x]."""
    return torch.cholesky_solve(cross.mT, torch.linalg.cholesky(h)).mT


def least_squares(target: Tensor, h: Tensor, mask: Tensor, rows: int) -> Tensor:
    """The weights [M, K] on `mask` nearest to `target` under h, bool [Mb, K]: row i of it is that of `rows` weights.

    One system for each row of the mask.
    """
    sets, columns = mask.shape
    whole = target.new_zeros(sets * rows, columns)
    wanted = torch.zeros_like(whole)
    wanted[: target.shape[0]] = target @ h
    whole, wanted = whole.view(sets, rows, columns), wanted.view(sets, rows, columns)
    counts = mask.sum(1)
    for count in counts.unique().tolist():
        if not count:
            continue
        for part in (counts == count).nonzero()[:, 0].split(max(1, ELEMENTS // count**2)):
            at = mask[part].nonzero()[:, 1].view(len(part), count)
            system = h[at[:, :, None], at[:, None, :]]
            spread = at[:, None, :].expand(-1, rows, -1)
            right = wanted[part].gather(2, spread)
            solved = torch.cholesky_solve(right.mT, torch.linalg.cholesky(system)).mT
            whole[part] = right.new_zeros(len(part), rows, columns).scatter_(2, spread, solved)
    return whole.view(-1, columns)[: target.shape[0]]


def relative_error(
    w: Tensor,
    bias: Tensor | None,
    dense: Tensor,
    dense_bias: Tensor | None,
    moments: Moments,
    name: str,
    fp8: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """|y + r - r' - y'| / |y| over the calibration: the wanted outputs, and y' of w in the pruned model.

    `fp8`: its inputs are rounded too; these errors are taken as independent. `rows`: of these outputs alone, by index.
    """
    parts = []
    for own in (slice(top, top + TILE) for top in range(0, len(w), TILE)):
        some, others = (None if each is None else each[own] for each in (bias, dense_bias))
        parts.append(
            _lost(
                _extended(w[own].double(), some), _extended(dense[own].double(), others), moments, name, own
            )
        )
        if fp8 and moments.noise is not None:
            parts[-1] += w[own].double().square() @ moments.noise.double()
    lost = torch.cat(parts)
    energy = moments.energy[name].double()
    if rows is not None:
        lost, energy = lost[rows], energy[rows]
    return (lost.sum().clamp(min=0) / energy.sum().clamp(min=1e-300)).sqrt()


def _lost(a: Tensor, b: Tensor, moments: Moments, name: str, rows: slice) -> Tensor:
    """E[(y + r - r' - y')^2] of rows, with a of the pruned and b of the dense layer, both extended."""
    lost, shift = moments.wanted[name][rows].double(), moments.shift.get(name)
    for own in (slice(left, left + TILE) for left in range(0, a.shape[1], TILE)):
        change = a @ moments.h[:, own].double() - 2 * (b @ moments.g[:, own].double())
        change = change if shift is None else change - 2 * shift[rows, own].double()
        lost = lost + (change * a[:, own]).sum(1)
    return lost


def _extended(w: Tensor, bias: Tensor | None) -> Tensor:
    """[W, b], [M, K+1]: the weight for inputs with a column of ones."""
    last = w.new_zeros(len(w)) if bias is None else bias.to(w.dtype)
    return torch.cat((w, last[:, None]), 1)


def fit_block(
    name: str,
    layers: Sequence[tuple[nn.Parameter, Tensor]],
    biases: Sequence[nn.Parameter],
    loss: Callable[[int], Iterable[Tensor]],
    batches: int,
    finish: Callable[[], None],
    steps: int = STEPS,
) -> None:
    """Steps of Adam on the stored values of a block's layers, (weight, its mask), and on their biases.

    `loss(batch)` compares outputs of the block with the dense ones: terms of a sum, one for each piece of the batch.
    The best of the mean losses before and after decides: without a gain the weights return to what they were.
    `finish()` rounds the weights of layers in FP8. Raises InvalidInput with the name of a block whose outputs have no
    gradients.
    """
    parameters = [*(weight for weight, _ in layers), *biases]
    before = [each.detach().clone() for each in parameters]
    learned = [each.requires_grad for each in parameters]

    def measured() -> Tensor:
        with torch.no_grad():
            return torch.stack([torch.stack([*loss(batch)]).sum() for batch in range(batches)]).mean()

    first = measured()
    adam = torch.optim.Adam(parameters, lr=RATE, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    learns = False
    try:
        with torch.enable_grad():
            for each in parameters:
                each.requires_grad_()
            for step in range(steps):
                gradients = _gradients(name, loss(step % batches), step % batches, parameters)
                learns |= any(each is not None for each in gradients)
                if not learns and step + 1 == min(batches, steps):
                    raise InvalidInput(
                        f'{name}: reconstruct="block" needs gradients, and none of its outputs has them, as under '
                        'torch.no_grad or after detach(); reconstruct="layer" needs none'
                    )
                for each, gradient in zip(parameters, gradients, strict=True):
                    each.grad = gradient
                for weight, mask in layers:
                    weight.grad = None if weight.grad is None else weight.grad.masked_fill(~mask, 0)
                adam.step()
                schedule.step()
    finally:
        for each, needs in zip(parameters, learned, strict=True):
            each.grad = None
            each.requires_grad_(needs)
    finish()
    better = measured() < first
    for each, old in zip(parameters, before, strict=True):
        each.data.copy_(torch.where(better, each.data, old))


def _gradients(
    name: str, terms: Iterable[Tensor], batch: int, parameters: Sequence[nn.Parameter]
) -> Sequence[Tensor | None]:
    """Those of the loss of a batch, values whose sum it is; None for what it does not depend on."""
    found: list[Tensor | None] = [None] * len(parameters)
    wide = [torch.promote_types(each.dtype, torch.float32) for each in parameters]
    for value in terms:
        if not value.requires_grad:
            continue
        try:
            own = torch.autograd.grad(value, parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InvalidInput(
                f'{name}: reconstruct="block" needs gradients of calibration batch {batch}: {first_line(error)}; '
                'reconstruct="layer" needs none'
            ) from error
        for at, each in enumerate(own):
            before = found[at]
            if each is not None:
                found[at] = each if before is None else before.to(wide[at]) + each
    return [
        None if each is None else each.to(parameter.dtype)
        for each, parameter in zip(found, parameters, strict=True)
    ]
