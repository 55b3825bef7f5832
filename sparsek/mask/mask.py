"""BlockMask: the query-key pairs of attention, as lists of key blocks for each query tile.

Two lists per query tile, in compressed rows: *full* blocks are visited without a test, *partial* blocks have an element
rule. Memory and time do not grow with the blocks that are absent; rows that visit the same run of blocks share its
entries.

The methods come from modules that this one imports: `structured`, `documents`, `scored` and `listed` build masks,
`compose` combines them, `view` reads their elements, `check` has the checks of the constructor, `interop`, `flex` and
`xformers` convert.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.core import arguments
from sparsek.core.home import Home
from sparsek.core.record import Record, record
from sparsek.core.tracing import saveable, untransformed
from sparsek.mask import check, compose, lists, traced
from sparsek.mask import elements as view
from sparsek.mask.build import bigbird, scored, structured
from sparsek.mask.build import lists as listed
from sparsek.mask.convert import flex, interop, xformers
from sparsek.mask.layout import Leaf
from sparsek.mask.lists import BlockLists, Frame, HostMask, Sizes, TransposedLists
from sparsek.pictures import masks as pictures

UNKNOWN = Sizes(0, 0, 0, exact=False)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FullBlocks:
    """The two meanings of `full`: `mask.full` are the full blocks of a mask, `BlockMask.full(seq_len)` makes a mask."""

    def __init__(self, owner: type[BlockMask]) -> None:
        self.owner, self.lists = owner, Leaf("full")

    @overload
    def __get__(self, mask: None, owner: type[BlockMask]) -> FullBlocks: ...
    @overload
    def __get__(self, mask: BlockMask, owner: type[BlockMask]) -> BlockLists: ...
    def __get__(self, mask: BlockMask | None, owner: type[BlockMask]) -> Any:
        """The builder, for the class; the instance attribute `full` takes precedence over this descriptor."""
        return self if mask is None else self.lists.__get__(mask)

    def __call__(self, seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
        """Return the mask in which every query sees every key.

        Args:
            seq_len: Queries and keys, in tokens, where there are as many of both.
            **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

        Returns:
            A mask shared by all batch items and heads. Made without a host sync.

        Raises:
            InvalidInput: For lengths, blocks or devices that no mask has.

        Example:
            >>> import sparsek as sk
            >>> sk.BlockMask.full(q_len=100, kv_len=300)
            BlockMask(full, 100 x 300, block 128x128, batch 1, heads 1, 3 of 3 blocks, 100 %, 1 partial, cpu)
        """
        return structured.full(self.owner, seq_len, **frame)

    if TYPE_CHECKING:

        def __set__(self, mask: BlockMask, lists: BlockLists) -> None: ...


@record(leaves=("full", "partial", "lo", "hi", "rules", "bits"))
@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Home, Record):
    """Which keys each query sees, as the key blocks that each query tile visits.

    Builders make masks of known form (`causal`, `sliding_window`, `strided`, `dilated`, `bigbird`, `block_diagonal`,
    `documents`), of scores (`topk`, `cumulative`), of lists (`from_block_map`, `from_indices`, `from_blocks`,
    `from_pattern`), and of other forms (`from_dense`, `from_mask_mod`, `from_flex`, `from_transformers`,
    `from_xformers`). `a & b` and `a | b` combine masks; `per_head` and `per_batch` join them.

    The constructor takes the lists themselves. Row r = (b * heads + h) * Mb + i describes query tile i of head h of
    batch item b, with i < Mb = ceil(q_len / bq). A query sees every key of a full block, and of a partial block the
    keys that the block's rule admits. The constructor checks everything, with one wait for the device, and replaces
    `sizes` by the true ones. The tensors must not be written to afterwards.

    Attributes:
        q_len: Queries, in tokens.
        kv_len: Keys, in tokens.
        block: (bq, bk), in tokens, each 64 or 128.
        batch: Batch items with lists of their own; 1 if all share them.
        heads: Heads with lists of their own, those of q or of k; 1 if all share them.
        full: `BlockLists` of the full blocks. None of them reaches beyond kv_len.
        partial: `BlockLists` of the partial blocks.
        lo: int32 [1 or batch * heads, q_len] or None. By interval, query q sees key k if lo[q] <= k < hi[q].
        hi: Like `lo`; at most kv_len.
        rules: int32, parallel to `partial.indices`: BY_INTERVAL (-1), or r >= 0 for bits[r]. None: all are by interval.
        bits: int32 [n, bq, bk / 32] or None: bit c % 32 of word c // 32 of row q is key c of the block.
        sizes: Stored blocks, partial blocks, and the blocks of the longest row; upper bounds where `exact` is False.
        pure: Whether the interval explains every stored block: there are no bits, and full blocks lie inside. Without
            `lo` and `hi` the interval is every key.
        label: The mask in words.

    Raises:
        InvalidInput: For a fault in the lists, with its position.

    Example:
        >>> import sparsek as sk
        >>> mask = sk.BlockMask.sliding_window(320, window=128, block=64)
        >>> mask.stored_blocks, mask.grid, mask.density
        (12, (5, 5), 0.48)
        >>> print(mask.plot())
        ┌──────────┐
        │▒▒        │
        │██▒▒      │
        │▒▒██▒▒    │
        │  ▒▒██▒▒  │
        │    ▒▒██▒▒│
        └──────────┘
        BlockMask(sliding_window(128), 320 x 320, block 64x64, batch 1, heads 1, 12 of 25 blocks, 48 %, 8 partial, cpu)
        █ full, ▒ partial
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    full: FullBlocks
    partial: BlockLists
    lo: Tensor | None = None
    hi: Tensor | None = None
    rules: Tensor | None = None
    bits: Tensor | None = None
    sizes: Sizes = UNKNOWN
    pure: bool = False
    label: str = ""
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False)
    # Of a mask made inside torch.compile, the tensor that holds all others: see mask/traced.py.
    _base: Tensor | None = field(default_factory=lambda: None, init=False)

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in LISTS + TENSORS} | check.plain(self)
        for name, part in parts.items():
            object.__setattr__(self, name, _saveable(part))
        object.__setattr__(self, "sizes", check.check(self))

    @classmethod
    def unchecked(cls, **parts: Any) -> BlockMask:
        """Return a mask of fields that are known to be right, without a check or a sync. Internal."""
        return super().unchecked(**{name: _saveable(part) for name, part in parts.items()})

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks (Mb, Nb) of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def rows(self) -> int:
        """Rows of the lists, batch * heads * Mb."""
        return self.batch * self.heads * self.grid[0]

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.full.starts.device

    @property
    def stored_blocks(self) -> int:
        """Visited blocks, summed over batch * heads. Waits for the device once if `sizes` is not exact."""
        return self._counted[0]

    @property
    def heavy_blocks(self) -> int:
        """Blocks of rows more than twice as long as the mean, or an upper bound. Never waits for the device."""
        # By bounds as long as the sizes are bounds: a recorded call allocates by them for other masks too.
        if "heavy" not in self._memo and "host" in self._memo and self.sizes.exact:
            host = self.host
            self._memo["heavy"] = lists.heavy_blocks(host.full.counts, host.partial.counts)
        return self._memo.get("heavy", self.sizes.stored)

    @property
    def partial_blocks(self) -> int:
        """Stored blocks with an element rule. Waits for the device once if `sizes` is not exact."""
        return self._counted[1]

    @property
    def _counted(self) -> tuple[int, int]:
        return self.derived("counted", lambda: _count(self))

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 where there are none."""
        cells = self.rows * self.grid[1]
        return self.stored_blocks / cells if cells else 0.0

    @property
    def elements(self) -> int:
        """Query-key pairs that are seen, summed over batch * heads. Waits for the device once."""
        return self.derived("elements", lambda: view.elements(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the mask's tensors; a tensor that two lists share counts once."""
        parts = [part for part in _leaves(self) if part is not None]
        return sum({(part.data_ptr(), part.shape): part.nbytes for part in parts}.values())

    @property
    def host(self) -> HostMask:
        """The tensors as numpy arrays. Waits for the device once."""
        return self.derived("host", lambda: _to_host(self))

    @property
    def transposed(self) -> TransposedLists:
        """For every key block the query tiles that visit it. Built once, without a sync.

        Lists that are built while a CUDA graph is captured belong to the graph and are not kept.
        """
        in_graph = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if in_graph and "transposed" not in self._memo:
            return view.transposed(self)
        return self.derived("transposed", lambda: view.transposed(self))

    def verify(self, wait: bool = False) -> None:
        """Raise InvalidInput if the device found a fault in what the mask was made from, such as a NaN score.

        On a GPU builders of scores and lists check there. Every call with the mask verifies it, so this is for CUDA
        graphs and compiled functions, which do not. A mask with a fault causes no access out of bounds, but its result
        means nothing. Lists that `from_blocks` counted on the device have exact `sizes` from then on.

        Args:
            wait: Whether to wait for the device. Without it nothing is raised until the result has arrived.

        Raises:
            InvalidInput: With the position of the fault.

        Example:
            >>> import sparsek as sk
            >>> sk.BlockMask.causal(1000).verify(wait=True)
        """
        if wait is not True and wait is not False:
            arguments.flag("wait", wait)
        for each in self._memo.get("readbacks", ()):
            each.apply(self, wait)

    def to(self, device: str | torch.device) -> BlockMask:
        """Return the same mask on another device; this object if it is there already.

        Args:
            device: "cpu", "cuda", "cuda:0" or a torch.device.

        Raises:
            InvalidInput: For a device that this machine does not have.
        """
        target = arguments.device("device", device)
        if target == self.device:
            return self
        made = _pytree.tree_map_only(Tensor, lambda part: part.to(target), self)
        made._memo.update({key: self._memo[key] for key in KEPT if key in self._memo})
        return made

    element_mask = view.checked_element_mask
    dense_rows = view.dense_rows
    to_dense = view.to_dense

    # Builders. None waits for a CUDA device, and only `topk` reads blocks that it does not store. Inside torch.compile
    # they are constants or one node of the graph: see mask/traced.py.
    causal = classmethod(structured.causal)
    sliding_window = classmethod(structured.sliding_window)
    strided = classmethod(structured.strided)
    dilated = classmethod(structured.dilated)
    bigbird = classmethod(bigbird.bigbird)
    block_diagonal = classmethod(structured.block_diagonal)
    documents = classmethod(structured.documents)
    topk = classmethod(scored.topk)
    cumulative = classmethod(scored.cumulative)
    from_block_map = classmethod(listed.from_block_map)
    from_indices = classmethod(listed.from_indices)
    from_blocks = classmethod(listed.from_blocks)

    # Combinations. These wait for the device. Like conversions, they raise inside torch.compile with fullgraph=True,
    # and run between two graphs otherwise.
    __and__ = compose.both
    __or__ = compose.either
    __invert__ = compose.inverted
    per_head = classmethod(compose.per_head)
    per_batch = classmethod(compose.per_batch)

    # Other libraries. These may wait for the device.
    from_dense = classmethod(interop.from_dense)
    from_transformers = classmethod(interop.from_transformers)
    from_flex = classmethod(flex.from_flex)
    from_mask_mod = classmethod(flex.from_mask_mod)
    from_xformers = classmethod(xformers.from_xformers)
    from_pattern = classmethod(interop.from_pattern)
    to_flex = interop.to_flex
    to_fa4 = interop.to_fa4
    to_pattern = interop.to_pattern

    def drawn(self, head: int = 0, batch: int = 0) -> pictures.Head:
        """One head of one batch item, for pictures. Waits for the device."""
        first = interop.as_row(self, head, batch)
        self.verify(wait=True)
        rows = slice(first, first + self.grid[0])

        def read(lists: BlockLists) -> pictures.Rows:
            parts = lists.starts[rows], lists.counts[rows], lists.indices
            return pictures.Rows(*(part.cpu().numpy() for part in parts))

        full, partial = (untransformed(functools.partial(read, each)) for each in (self.full, self.partial))
        parts = (("head", head, self.heads), ("batch item", batch, self.batch))
        which = ", ".join(f"{name} {at} of 0 to {count - 1}" for name, at, count in parts if count > 1)
        shape, name = (self.q_len, self.kv_len), self.label or "block mask"
        return pictures.Head(shape, self.block, full, partial, name, repr(self), which)

    plot = pictures.plot

    def __repr__(self) -> str:
        """One line of facts. No sync."""
        self.verify()
        size = (
            f"{self.label or 'blocks'}, {self.q_len} x {self.kv_len}, block {self.block[0]}x{self.block[1]}"
        )
        shared = f"batch {self.batch}, heads {self.heads}"
        if type(self.full.starts) is not Tensor:
            return f"BlockMask({size}, {shared}, lists not concrete)"
        return f"BlockMask({size}, {shared}, {self.summary}, {self.device})"

    @property
    def summary(self) -> str:
        """The stored blocks in words: "528 of 1024 blocks, 51.6 %, 32 partial". No sync: "at most" for bounds."""
        cells = self.rows * self.grid[1]
        share = 100 * self.sizes.stored / cells if cells else 0.0
        most = "" if self.sizes.exact else "at most "
        return (
            f"{most}{self.sizes.stored} of {cells} blocks, {share:.3g} %, {most}{self.sizes.partial} partial"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self.verify(wait=True)
        return super().__reduce__()


KEPT = ("host", "counted", "elements", "readbacks", "heavy")
LISTS = ("full", "partial")
TENSORS = ("lo", "hi", "rules", "bits")
# After the dataclass is made, which would take the descriptors for defaults.
setattr(BlockMask, "full", FullBlocks(BlockMask))  # noqa: B010
for _name in ("partial", *TENSORS):
    setattr(BlockMask, _name, Leaf(_name))
traced.makes(BlockMask)


def _saveable(part: Any) -> Any:
    """A part of a mask, with tensors that a backward pass can save."""
    return BlockLists(*map(saveable, part)) if isinstance(part, BlockLists) else saveable(part)


def _leaves(mask: BlockMask) -> list[Any]:
    return [*mask.full, *mask.partial, *(getattr(mask, name) for name in TENSORS)]


def _count(mask: BlockMask) -> tuple[int, int]:
    if mask.sizes.exact:
        return mask.sizes.stored, mask.sizes.partial
    full, partial = torch.stack((mask.full.counts.sum(), mask.partial.counts.sum())).tolist()
    mask.verify()
    return full + partial, partial


def _to_host(mask: BlockMask) -> HostMask:
    """Copies of all tensors. Waits once, for the last one, on the same stream."""
    parts = [None if part is None else part.to("cpu", non_blocking=True) for part in _leaves(mask)]
    if mask.device.type == "cuda":
        torch.cuda.current_stream(mask.device).synchronize()
    arrays: list[Any] = [None if part is None else part.numpy() for part in parts]
    return HostMask(pictures.Rows(*arrays[:3]), pictures.Rows(*arrays[3:6]), *arrays[6:])
