"""Rows that every rank sends to every other: one all_to_all_single with exact counts, and its adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import failed


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
    """

    send: Tensor
    send_counts: tuple[int, ...]
    place: Tensor
    receive_counts: tuple[int, ...]
    rows: int
    source_rows: int
    group: Any
    what: str

    @classmethod
    def of(
        cls,
        send: Sequence[np.ndarray],
        place: Sequence[np.ndarray],
        sizes: tuple[int, int],
        group: Any,
        device: torch.device,
        what: str,
    ) -> Exchange:
        """From the rows for each rank and the places of what comes from each; sizes: source rows, rows."""
        made = [torch.from_numpy(np.concatenate(each).astype(np.int64)).to(device) for each in (send, place)]
        counts = [tuple(int(part.size) for part in each) for each in (send, place)]
        return cls(made[0], counts[0], made[1], counts[1], sizes[1], sizes[0], group, what)

    def start(self, *tensors: Tensor) -> Arriving:
        """Send rows of tensors [source_rows, E] of one dtype without waiting for them."""
        with torch.no_grad():
            rows = [x.index_select(0, self.send) for x in tensors]
            sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            arrived = sent.new_empty((sum(self.receive_counts), sent.shape[1]))
            work = self._all_to_all(arrived, sent, self.receive_counts, self.send_counts)
        return Arriving(self, sent, arrived, work, tuple(x.shape[1] for x in tensors))

    def start_back(self, *gradients: Tensor) -> Arriving:
        """Send the gradients [rows, E] of what was exchanged to where the rows came from, without waiting."""
        return self.reversed.start(*gradients)

    @property
    def reversed(self) -> Exchange:
        """From the places to the source: the adjoint, where a row that went to several ranks arrives several times."""
        back = self.place, self.receive_counts, self.send, self.send_counts, self.source_rows, self.rows
        return Exchange(*back, self.group, self.what)

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
    """Rows under way. `sent` must live until they have arrived."""

    exchange: Exchange
    sent: Tensor
    arrived: Tensor
    work: Any
    widths: tuple[int, ...]

    def placed(self) -> list[Tensor]:
        """The results [rows, E] of each tensor, once their rows have arrived."""
        each = self.exchange
        each.wait(self.work)
        found = self.arrived.new_zeros((each.rows, self.arrived.shape[1]))
        kind = torch.uint8 if found.itemsize == 1 else found.dtype  # FP8 is not copied by index
        found.view(kind).index_copy_(0, each.place, self.arrived.view(kind))
        return list(found.split(self.widths, 1))

    def added(self, total: Tensor | None = None) -> Tensor:
        """The rows that arrived, added to `total` in the order of ranks: float32 at least, so the bits repeat."""
        each = self.exchange
        each.wait(self.work)
        if total is None:
            wide = torch.promote_types(self.arrived.dtype, torch.float32)
            total = self.arrived.new_zeros((each.rows, self.arrived.shape[1]), dtype=wide)
        counts = each.receive_counts
        for at, rows in zip(each.place.split(counts), self.arrived.split(counts), strict=True):
            total.index_add_(0, at, rows.to(total.dtype))
        return total


class Exchanged(torch.autograd.Function):
    """The rows of tensors after an exchange that was started, with gradients by its adjoint.

    Activation checkpointing runs a forward pass again once a saved tensor is read, up to the last of them. Each
    exchange saves one, so all ranks run the same exchanges again, whatever they compute between.
    """

    @staticmethod
    def forward(ctx: Any, arriving: Arriving, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, found = arriving.exchange, tuple(x.contiguous() for x in arriving.placed())
        ctx.save_for_backward(arriving.sent.new_empty(0))  # may end the pass, so rows have arrived before
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        refuse_second_order()
        arriving = ctx.exchange.start_back(*gradients)
        total = arriving.added().to(gradients[0].dtype)
        return None, *total.split(arriving.widths, 1)


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
