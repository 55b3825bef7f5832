"""Rows that every rank sends to every other: one all_to_all_single with exact counts, and its adjoint.

Rows that stay on a rank are copied there, or taken as they are where all of them stay in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import failed

RUNS = 32  # copies of neighbouring rows, at most; more of them are copied by index
# Bytes of each of several copies, at least: smaller ones take the host longer than both copies by index.
LARGE = 1 << 20


@dataclass(frozen=True, eq=False)
class LocalRows:
    """Rows that stay on their rank.

    Attributes:
        rank: This rank.
        of: int64 [n], rows of its tensor, each once.
        to: int64 [n], the rows of the result where they are put.
        runs: The same as (row of the tensor, row of the result, rows), if these are few; else ().
    """

    rank: int
    of: Tensor
    to: Tensor
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def at(cls, rank: int, of: np.ndarray, to: np.ndarray, device: torch.device) -> LocalRows:
        ends = np.flatnonzero((np.diff(of) != 1) | (np.diff(to) != 1)) + 1
        first = np.concatenate(([0], ends)) if of.size else ends
        counts = np.diff(np.append(first, of.size))
        runs = zip(of[first].tolist(), to[first].tolist(), counts.tolist(), strict=True)
        of_rows, to_rows = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (of, to))
        return cls(rank, of_rows, to_rows, tuple(runs) if first.size <= RUNS else ())

    @property
    def reversed(self) -> LocalRows:
        return LocalRows(self.rank, self.to, self.of, tuple((to, of, count) for of, to, count in self.runs))

    def put(self, x: Tensor, out: Tensor) -> None:
        """Copy them from x to `out`."""
        large = len(self.of) * x.shape[1] * x.itemsize >= LARGE * len(self.runs)
        if self.runs and (large or len(self.runs) <= 2):
            for of, to, count in self.runs:
                out.narrow(0, to, count).copy_(x.narrow(0, of, count))
        elif len(self.of):
            out.index_copy_(0, self.to, x.index_select(0, self.of).to(out.dtype))


class Sums(NamedTuple):
    """Rows of a result that several ranks have parts of.

    Attributes:
        rows: int64 [n], ascending.
        parts: For each rank the rows of what it sent that are added, or None for all, and to which of `rows`.
    """

    rows: Tensor
    parts: list[tuple[Tensor | None, Tensor]]


@dataclass(frozen=True, eq=False)
class Exchange:
    """Which rows of a tensor [rows, E] go to which rank, and where those that arrive are put.

    Attributes:
        send: int64 [n], rows of this rank's tensor, those for rank 0 first. The rows for one rank are unique.
        send_counts: How many of them go to each rank.
        place: int64 [m], rows of the result, in the order of arrival. Those from one rank are unique.
        receive_counts: How many arrive from each rank.
        rows: Rows of the result; those that nothing is put in are 0.
        source_rows: Rows of this rank's tensor.
        group: The process group.
        what: What is exchanged, for messages.
        kept: The rows that stay here, which are not sent. None: this rank sends them to itself.
    """

    send: Tensor
    send_counts: tuple[int, ...]
    place: Tensor
    receive_counts: tuple[int, ...]
    rows: int
    source_rows: int
    group: Any
    what: str
    kept: LocalRows | None = None

    @classmethod
    def of(
        cls,
        rank: int,
        send: Sequence[np.ndarray],
        place: Sequence[np.ndarray],
        sizes: tuple[int, int],
        group: Any,
        device: torch.device,
        what: str,
    ) -> Exchange:
        """From the rows for each rank and the places of what comes from each; sizes: source rows, rows."""
        kept = LocalRows.at(rank, send[rank], place[rank], device)
        nothing = np.empty(0, np.int64)
        others = [[*each[:rank], nothing, *each[rank + 1 :]] for each in (send, place)]
        made = [torch.from_numpy(np.concatenate(each).astype(np.int64)).to(device) for each in others]
        counts = [tuple(int(part.size) for part in each) for each in others]
        return cls(made[0], counts[0], made[1], counts[1], sizes[1], sizes[0], group, what, kept)

    def start(self, *tensors: Tensor) -> Arriving:
        """Send rows of tensors [source_rows, E] of one dtype without waiting for them."""
        with torch.no_grad():
            rows = [x.index_select(0, self.send) for x in tensors]
            sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            arrived = sent.new_empty((sum(self.receive_counts), sent.shape[1]))
            work = self._all_to_all(arrived, sent, self.receive_counts, self.send_counts)
        return Arriving(self, tensors, sent, arrived, work)

    def start_back(self, *gradients: Tensor) -> Arriving:
        """Send the gradients [rows, E] of what was exchanged to where the rows came from, without waiting."""
        return self.reversed.start(*gradients)

    @cached_property
    def reversed(self) -> Exchange:
        """From the places to the source: the adjoint, where a row that went to several ranks arrives several times."""
        back = self.place, self.receive_counts, self.send, self.send_counts, self.source_rows, self.rows
        return Exchange(*back, self.group, self.what, self.kept and self.kept.reversed)

    @property
    def stays(self) -> bool:
        """Whether the result is the tensor itself."""
        whole = ((0, 0, self.rows),)
        return (
            self.kept is not None
            and self.kept.runs == whole
            and self.rows == self.source_rows
            and not len(self.place)
        )

    @cached_property
    def _sums(self) -> Sums | None:
        """The rows that several ranks send, or others send and this one keeps; None if there are none. It waits for the
        device once.
        """
        place, kept = self.place.numpy(force=True), self.kept
        assert kept is not None
        found, at = np.unique(place, return_inverse=True)
        own = kept.to.numpy(force=True)
        shared = np.flatnonzero(np.isin(own, found))
        if found.size == place.size and not shared.size:
            return None
        there = lambda x: torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(self.place.device)  # noqa: E731
        ends = np.cumsum(self.receive_counts)[:-1]
        parts: list[Any] = [(None, there(each)) for each in np.split(at, ends)]
        parts[kept.rank] = kept.of[there(shared)], there(np.searchsorted(found, own[shared]))
        return Sums(there(found), parts)

    def _empty(self, like: Tensor, filled: int, dtype: torch.dtype | None = None) -> Tensor:
        """A result [rows, E] for `filled` rows: 0 where there are others."""
        sizes, dtype = (self.rows, like.shape[1]), dtype or like.dtype
        if filled == self.rows:
            return like.new_empty(sizes, dtype=dtype)
        return like.new_zeros(sizes, dtype=dtype)

    def _all_to_all(self, out: Tensor, given: Tensor, to: tuple[int, ...], of: tuple[int, ...]) -> Any:
        both = out.view(torch.uint8), given.view(torch.uint8)  # backends know few dtypes
        try:
            return dist.all_to_all_single(*both, list(to), list(of), group=self.group, async_op=True)
        except RuntimeError as error:
            raise failed(f"the exchange of {self.what}", self.group, error) from error

    def wait(self, work: Any) -> None:
        """Wait for a collective: the stream on a GPU, the host on a CPU."""
        try:
            work.wait()
        except RuntimeError as error:
            raise failed(f"the exchange of {self.what}", self.group, error) from error


class Arriving(NamedTuple):
    """Rows under way, of `given` tensors. `sent` must live until they have arrived."""

    exchange: Exchange
    given: tuple[Tensor, ...]
    sent: Tensor
    arrived: Tensor
    work: Any

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(x.shape[1] for x in self.given)

    def placed(self) -> list[Tensor]:
        """The results [rows, E] of each tensor, once their rows have arrived; the tensors themselves, if all stay."""
        each = self.exchange
        each.wait(self.work)
        if each.stays:
            return list(self.given)
        kept = 0 if each.kept is None else len(each.kept.of)
        found = [each._empty(x, kept + len(each.place)) for x in self.given]
        for out, x, rows in zip(found, self.given, self.arrived.split(self.widths, 1), strict=True):
            out, x, rows = (_indexed(part) for part in (out, x, rows))
            if each.kept is not None:
                each.kept.put(x, out)
            out.index_copy_(0, each.place, rows)
        return found

    def returned(self, dtype: torch.dtype | None = None, own: bool = False) -> list[Tensor]:
        """The sums of each tensor's rows that arrived, in the order of ranks, in float32 at least, so the bits repeat.

        `dtype`: that of the results; by default that of the rows. `own`: the tensors are nobody else's, so results may
        be in their memory.
        """
        each, dtype = self.exchange, dtype or self.arrived.dtype
        if each.kept is None:
            total = self.added()
            return [x.to(dtype) for x in total.split(self.widths, 1)]
        sums = each._sums
        if sums is None:
            return [
                x.to(dtype) if own or x is not y else x.to(dtype, copy=True)
                for x, y in zip(self.placed(), self.given, strict=True)
            ]
        each.wait(self.work)
        shared, found = len(sums.parts[each.kept.rank][1]), []
        whole = each.kept.runs == ((0, 0, each.rows),) and each.rows == each.source_rows
        arrived = self.arrived.split(self.widths, 1)
        for x, rows in zip(self.given, arrived, strict=True):
            if whole:
                out = x.to(dtype, copy=not own)
            else:
                out = each._empty(x, len(each.kept.of) + len(sums.rows) - shared, dtype)
                each.kept.put(x, out)
            total = x.new_zeros((len(sums.rows), x.shape[1]), dtype=_wide(x))
            parts = list(rows.split(each.receive_counts))
            parts[each.kept.rank] = x
            for part, (of, to) in zip(parts, sums.parts, strict=True):
                part = part if of is None else part.index_select(0, of)
                total.index_add_(0, to, part.to(total.dtype))
            found.append(out.index_copy_(0, sums.rows, total.to(dtype)))
        return found

    def added(self, total: Tensor | None = None) -> Tensor:
        """The rows of all tensors beside each other, added to `total` in the order of ranks: float32 at least."""
        each, kept = self.exchange, self.exchange.kept
        each.wait(self.work)
        if total is None:
            total = self.arrived.new_zeros((each.rows, self.arrived.shape[1]), dtype=_wide(self.arrived))
        counts = each.receive_counts
        for rank, (at, rows) in enumerate(
            zip(each.place.split(counts), self.arrived.split(counts), strict=True)
        ):
            if kept is not None and rank == kept.rank:
                at, rows = kept.to, torch.cat([x.index_select(0, kept.of) for x in self.given], 1)
            total.index_add_(0, at, rows.to(total.dtype))
        return total


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _indexed(x: Tensor) -> Tensor:
    """x as what is copied by index, which FP8 is not."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


class Exchanged(torch.autograd.Function):
    """The rows of tensors after an exchange that was started, with gradients by its adjoint.

    Activation checkpointing runs a forward pass again once a saved tensor is read, up to the last of them. Each
    exchange saves one, so all ranks run the same exchanges again, whatever they compute between.
    """

    @staticmethod
    def forward(ctx: Any, arriving: Arriving, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = arriving.placed()
        if arriving.exchange.stays:  # a result of its own
            found = [x.clone() for x in found]
        ctx.exchange = arriving.exchange
        ctx.save_for_backward(arriving.sent.new_empty(0))  # may end the pass, so rows have arrived before
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        refuse_second_order()
        return None, *ctx.exchange.start_back(*gradients).returned()


def refuse_second_order() -> None:
    """InvalidInput in a backward pass that is to be differentiated."""
    if torch.is_grad_enabled():
        raise InvalidInput("sk.distributed has no gradients of gradients; leave create_graph=True out")


def exchanged(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows of tensors [source_rows, E] of one dtype after an exchange, with gradients."""
    return Exchanged.apply(exchange.start(*tensors), *tensors)


def rows_of(x: Tensor) -> Tensor:
    """[B, H, L, E] as rows [B * H * L, E]."""
    return x.reshape(x.shape[0] * x.shape[1] * x.shape[2], x.shape[3])
