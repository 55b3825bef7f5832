"""The handshake before a call: every rank checks its own arguments, and all refuse if one of them does."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sparsek.core.errors import InvalidInput, MeshError, SparseKError
from sparsek.core.tracing import untransformed

READY, REFUSED, BROKEN = range(3)  # the first byte of a rank's row; then a checksum of its text, and the text
HEAD, ROOM = 5, 512
PLAIN = torch.empty(0, dtype=torch.uint8, device="cpu")


def agreed(what: str, groups: Sequence[Any], check: Callable[[], str]) -> None:
    """Raise on every rank if `check` raises on one of them, or returns different texts.

    One all_gather of 512 bytes a rank for each group, which the host waits for: on the CPU where the process group has
    a backend for it, so no GPU is waited for.

    Args:
        what: The public function, for messages.
        groups: The process groups that together connect all ranks: first down the columns of a mesh, then along rows.
        check: Checks this rank's call and returns it in words.

    Raises:
        InvalidInput: If the check of a rank raised one of SparseK's errors, or texts differ.
        MeshError: If a rank raised another error, ended, or made no call within the timeout of the process group.
    """
    mine, state, text = None, READY, ""
    try:
        text = check()
    except Exception as error:
        mine, state, text = error, REFUSED if isinstance(error, SparseKError) else BROKEN, str(error)
    rows = _gathered(_row(state, text), groups, what)
    if mine is not None:
        raise mine
    states = rows[:, 0]
    for rank in np.flatnonzero(states):
        text = _text(rows[rank])
        if states[rank] == REFUSED:
            raise InvalidInput(f"{what}: rank {rank} refused its call, so every rank does: {text}")
        raise MeshError(f"{what}: rank {rank} raised an error: {text}")
    others = np.flatnonzero((rows[:, :HEAD] != rows[0, :HEAD]).any(1))
    if others.size:
        raise InvalidInput(
            f"{what}: the calls of ranks {', '.join(map(str, others))} differ from that of rank 0; rank 0 has "
            f"{_text(rows[0])}; rank {others[0]} has {_text(rows[others[0]])}"
        )


def refuse_transforms(what: str) -> None:
    """InvalidInput inside torch.func."""
    if torch._C._are_functorch_transforms_active():
        raise InvalidInput(f"{what} does not go through torch.func")


def failed(what: str, group: Any, error: Exception) -> MeshError:
    """The error of a collective that did not end."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return MeshError(
        f"rank {rank} of {ranks}: {what} failed, because another rank ended, raised an error or made another call; "
        f"see its log: {error}"
    )


def _row(state: int, text: str) -> np.ndarray:
    code = text.encode(errors="replace")
    row = np.zeros(ROOM, np.uint8)
    row[0] = state
    row[1:HEAD] = np.frombuffer(zlib.crc32(code).to_bytes(4, "little"), np.uint8)
    code = code[: ROOM - HEAD]
    row[HEAD : HEAD + len(code)] = np.frombuffer(code, np.uint8)
    return row


def _text(row: np.ndarray) -> str:
    return bytes(row[HEAD:]).rstrip(b"\0").decode(errors="ignore")


def _gathered(row: np.ndarray, groups: Sequence[Any], what: str) -> np.ndarray:
    """The rows of all ranks, in order. Outside of torch.func and dispatch modes, which some rank may be in."""
    return untransformed(lambda: _exchanged(row, groups, what), PLAIN)


def _exchanged(row: np.ndarray, groups: Sequence[Any], what: str) -> np.ndarray:
    found = torch.from_numpy(row).to(_device(groups[0]))
    for group in groups:
        parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
        try:
            dist.all_gather(parts, found, group=group)
        except RuntimeError as error:
            raise failed(f"the check of {what}", group, error) from error
        found = torch.stack(parts, -2)
    return found.cpu().numpy().reshape(-1, ROOM)  # of two groups [ranks of a column, ranks of a row, ROOM]


def _device(group: Any) -> torch.device:
    """Where a collective of this group can run: the CPU if there is a backend for it."""
    if "cpu:" in dist.distributed_c10d.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
