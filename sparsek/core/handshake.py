"""The handshake before a call: every rank checks its own arguments, and all refuse if one of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist

from sparsek.core.errors import InvalidInput, MeshError, SparseKError
from sparsek.core.tracing import untransformed

PLAIN = torch.empty(0, dtype=torch.uint8, device="cpu")
Facts: TypeAlias = Mapping[str, tuple[str, str]]  # by name a checksum, and in words


def agreed(what: str, groups: Sequence[Any], check: Callable[[], str | Facts], cure: str = "") -> None:
    """Raise on every rank if `check` raises on one of them, or returns different facts.

    One all_gather of 8 bytes a rank for each group, which the host waits for: on the CPU where the process group has a
    backend for it, so no GPU is waited for. Where ranks differ, a second one of their texts.

    Args:
        what: The call, which all ranks make.
        groups: The process groups that together connect all ranks: first down the columns of a mesh, then along rows.
        check: Checks this rank's call and returns what must be equal: in words, or by the names of its parts.
        cure: What to do where facts differ.

    Raises:
        InvalidInput: If the check of a rank raised one of SparseK's errors, or facts differ.
        MeshError: If a rank raised another error, ended, or made no call within the timeout of the process group.
    """
    mine: Exception | None = None
    facts: Facts = {}
    try:
        found = check()
        facts = {"": (found, found)} if isinstance(found, str) else found
    except Exception as error:  # the other ranks must not wait
        mine = error
    why = "" if mine is None else str(mine) or type(mine).__name__
    told = dist.get_rank(), what, isinstance(mine, SparseKError), why, facts
    own = crc32(repr(told[1:]).encode(errors="replace"))
    if set(_gathered([own], groups, what, _numbers)) == {own}:
        if mine is not None:
            raise mine
        return
    ranks = sorted(_gathered([told], groups, what, _objects))  # by rank
    if mine is not None and not isinstance(mine, InvalidInput):
        raise mine
    refused = [each for each in ranks if each[3]]
    if mine is not None and len(refused) == len(ranks):
        raise mine
    for rank, _, ours, text, _ in refused:
        if not ours:
            raise MeshError(f"{what}: rank {rank} raised an error: {text}")
        also = "" if len(refused) == 1 else f" (and {len(refused) - 1} other ranks)"
        raise InvalidInput(f"{what} on rank {rank}{also}: {text}") from mine
    raise InvalidInput(_difference(ranks, cure))


def _gathered(own: list[Any], groups: Sequence[Any], what: str, gather: Callable[..., list[Any]]) -> Any:
    """What all ranks have. Outside of torch.func and dispatch modes, which some rank may be in."""

    def exchange() -> list[Any]:
        found = own
        for group in groups:
            try:
                found = gather(found, group)
            except RuntimeError as error:
                raise failed(f"the check of {what}", group, error) from error
        return found

    return untransformed(exchange, PLAIN)


def _numbers(own: list[int], group: Any) -> list[int]:
    given = torch.tensor(own, device=_device(group))
    parts = given.new_empty((dist.get_world_size(group), len(own)))
    dist.all_gather([*parts], given, group=group)
    return parts.flatten().tolist()


def _objects(own: list[Any], group: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    return [each for part in parts for each in part]


def _difference(ranks: list[Any], cure: str) -> str:
    """What differs between ranks whose checks all passed."""
    first, what, *_, known = ranks[0]
    others = [each for each in ranks if each[1:] != ranks[0][1:]]
    rank, call, *_, other = others[0]
    if call != what:
        return f"rank {first} calls {what}, and rank {rank} {call}; all must call the same"
    names = [name for name in {**known, **other} if known.get(name) != other.get(name)]
    here, there = (each.get(names[0], ("", "no such layer"))[1] for each in (known, other))
    more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
    subject = f"{names[0]!r}{more} differ between ranks:"
    if not names[0]:
        subject = f"the calls of ranks {', '.join(str(each[0]) for each in others)} differ from that of rank {first};"
    same = ", of another pattern" if here == there else ""
    return f"{what}: {subject} rank {first} has {here}; rank {rank} has {there}{same}{cure and f'; {cure}'}"


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


def _device(group: Any) -> torch.device:
    """Where a collective of this group can run: the CPU if there is a backend for it.

    Read from the group itself: one that was split from another may lack backends that its config names.
    """
    given = dist.distributed_c10d._get_default_group() if group is None else group
    if torch.device("cpu") in given._device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
