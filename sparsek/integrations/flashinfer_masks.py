"""The masks of FlashInfer's wrappers: blocks of any size, rows and columns of blocks of several sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention
from sparsek.attn.reference.scores import CAPS
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.integrations.foreign_options import (
    check_shape,
    check_values,
    cut_lengths,
    cut_map,
    cut_side,
    ints_on,
    readable,
)

LOG2_E = math.log2(math.e)


class WrapperSetting(NamedTuple):
    """What a wrapper keeps of `plan` beside the mask."""

    heads: tuple[int, int, int]  # of q, of k, and their dim
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of q, of k and v, of the result
    scores: dict[str, Any]  # how `attention` makes them

    @classmethod
    def of(cls, heads: tuple[Any, Any, Any], softcap: Any, scale: Any, types: Any) -> WrapperSetting:
        """From the arguments of `plan`, checked."""
        scores = scores_of(softcap, scale)
        names = "num_qo_heads", "num_kv_heads", "head_dim"
        q_heads, kv_heads, dim = (arguments.integer(*each, 1) for each in zip(names, heads, strict=True))
        if q_heads % kv_heads:
            raise InvalidInput(
                f"num_qo_heads is {q_heads}; it must be a multiple of num_kv_heads, {kv_heads}"
            )
        names = "q_data_type", "kv_data_type", "o_data_type"
        found = [
            as_dtype(*each) for each in zip(names, (types[0], types[1] or types[0], types[2]), strict=True)
        ]
        return cls((q_heads, kv_heads, dim), (found[0], found[1], found[2]), scores)

    def check(self, q: Tensor, k: Tensor, v: Tensor, heads_at: int) -> None:
        """InvalidInput unless these are the tensors that `plan` was for."""
        (q_heads, kv_heads, dim), (q_type, kv_type, _) = self.heads, self.dtypes
        of_q, of_k = (q_heads, q_type), (kv_heads, kv_type)
        for name, x, (heads, kind) in (("q", q, of_q), ("k", k, of_k), ("v", v, of_k)):
            if x.shape[heads_at] != heads or x.shape[2] != dim:
                raise InvalidInput(f"{name} is {list(x.shape)}; plan was for {heads} heads of dim {dim}")
            if x.dtype != kind:
                option = "q_data_type" if name == "q" else "kv_data_type"
                raise InvalidInput(f"{name} is {x.dtype}; plan was for {kind}: pass {option} to plan")
        keys, values = (x.shape[1 - heads_at] for x in (k, v))
        if keys != values:
            raise InvalidInput(f"k has {keys} keys and v {values} values; every key needs one value")

    def results(self, found: Tensor, sums: Tensor, out: Any, lse: Any, return_lse: Any) -> Any:
        """The result in its dtype, and the lse to base 2, in tensors of the caller where given."""
        found = found.to(self.dtypes[2])
        if out is not None:
            check_shape("out", arguments.tensor("out", out, (found.dtype,)), tuple(found.shape), "as q")
            _own_places("out", out)
            found = out.copy_(found)
        if not arguments.flag("return_lse", return_lse):
            return found
        sums = sums.float() * LOG2_E
        if lse is not None:
            check_shape(
                "lse", arguments.tensor("lse", lse, (torch.float32,)), tuple(sums.shape), "[tokens, heads]"
            )
            _own_places("lse", lse)
            sums = lse.copy_(sums)
        return found, sums


def _own_places(name: str, x: Tensor) -> None:
    """InvalidInput for a tensor of the caller that copy_ cannot write to, as an expanded one."""
    if any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise InvalidInput(f"{name} has strides {list(x.stride())}, so rows share memory; give it its own")


def scores_of(softcap: Any, scale: Any) -> dict[str, Any]:
    """The options of `attention` that make its scores."""
    cap = 0.0 if softcap is None else arguments.number("logits_soft_cap", softcap)
    return {
        "scale": None if scale is None else arguments.number("sm_scale", scale),
        "softcap": arguments.number("logits_soft_cap", cap, *CAPS) if cap else 0.0,
    }


def as_dtype(name: str, value: Any) -> torch.dtype:
    """A torch dtype, also by its name."""
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise InvalidInput(
            f'{name} is {arguments.shown(value)}; it must be a torch dtype or its name, "bfloat16"'
        )
    return found


@dataclass(frozen=True)
class BlockGrid:
    """M queries and N keys in blocks of R x C. A table [1 or H, rows, columns] has -1 where no block is stored."""

    M: int
    N: int
    R: int
    C: int
    device: torch.device

    def __post_init__(self) -> None:
        if self.N % self.C:
            raise InvalidInput(f"N is {self.N}; it must be a multiple of C, {self.C}")

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return -(-self.M // self.R)

    @property
    def columns(self) -> int:
        """Columns of blocks."""
        return self.N // self.C

    def of_rows(self, indptr: Any, indices: Any) -> Tensor:
        """The table of rows in compressed form, with the place of each block in `indices`."""
        starts, columns = (
            ints_on(*each, self.device, 1) for each in (("indptr", indptr), ("indices", indices))
        )
        check_shape("indptr", starts, (self.rows + 1,), "[ceil(M / R) + 1]")
        starts, columns = starts.long(), columns.long()
        place = torch.arange(columns.shape[0], device=self.device)
        if readable(starts):
            self._check_starts(starts, columns.shape[0])
        sorted_starts = starts.cummax(0).values
        row = torch.searchsorted(sorted_starts, place, right=True) - 1
        right = (row >= 0) & (row < self.rows) & (columns >= 0) & (columns < self.columns)
        right = right & (sorted_starts == starts).all() & (starts[0] == 0) & (starts[-1] == columns.shape[0])
        self._refuse(~right, "indices", "key blocks below N / C")
        cells = torch.where(right, row * self.columns + columns, self.rows * self.columns)
        return self._scattered((1, self.rows * self.columns), cells[None], place[None])

    def _check_starts(self, starts: Tensor, stored: int) -> None:
        """InvalidInput unless these go from 0 to `stored`, none below the one before it."""
        first, last, steps = int(starts[0]), int(starts[-1]), starts.diff()
        if first != 0:
            raise InvalidInput(f"indptr[0] is {first}; it must be 0")
        if bool((steps < 0).any()):
            row = int((steps < 0).nonzero()[0])
            raise InvalidInput(
                f"indptr[{row + 1}] is {int(starts[row + 1])}, below indptr[{row}], {int(starts[row])}; sort indptr"
            )
        if last != stored:
            raise InvalidInput(f"indptr[{self.rows}] is {last}; it must be {stored}, the length of indices")

    def of_lists(self, indices: Any, counts: Any, heads: tuple[int, int, int]) -> Tensor:
        """The table of lists for each head of q."""
        indices = ints_on("q2k_indices", indices, self.device, 3)
        check_shape(
            "q2k_indices", indices, (heads[0], self.rows, indices.shape[2]), "[num_qo_heads, ceil(M / R), n]"
        )
        columns = indices.long()
        place = torch.arange(indices.shape[2], device=self.device).expand_as(columns)
        right = (columns >= 0) & (columns < self.columns)
        if counts is not None:
            counts = ints_on("q2k_num", counts, self.device, 2)
            check_shape("q2k_num", counts, (heads[0], self.rows), "[num_qo_heads, ceil(M / R)]")
            check_range("q2k_num", counts, indices.shape[2], "the entries of a row")
            self._refuse(~right & (place < counts[..., None]), "q2k_indices", "key blocks below N / C")
            right = right & (place < counts[..., None])
        else:
            self._refuse(~right, "q2k_indices", "key blocks below N / C")
        first = torch.arange(self.rows, device=self.device)[:, None] * self.columns
        cells = torch.where(right, first + columns, self.rows * self.columns)
        return self._scattered((heads[0], self.rows * self.columns), cells.flatten(1), place.flatten(1))

    def of_map(self, block_map: Any, heads: tuple[int, int, int]) -> Tensor:
        """The table of a map for each head of q or of k."""
        arguments.tensor("block_mask", block_map, (torch.bool,), 3)
        arguments.one_device("block_mask is", block_map.device, "the workspace is", self.device)
        right = (heads[0] if block_map.shape[0] == heads[0] else heads[1], self.rows, self.columns)
        check_shape("block_mask", block_map, right, "[heads, ceil(M / R), N / C]")
        return block_map.long() - 1

    def lens(self, given: Any) -> Tensor | None:
        """The valid keys of each block; None for all."""
        if given is None:
            return None
        lens = ints_on("kv_block_lens", given, self.device, 1)
        check_shape("kv_block_lens", lens, (self.columns,), "[N / C]")
        check_range("kv_block_lens", lens, self.C, "the keys of a block")
        return lens

    def _refuse(self, wrong: Tensor, name: str, right: str) -> None:
        """InvalidInput for wrong entries of lists on the CPU; on a GPU they are left out."""
        if readable(wrong) and bool(wrong.any()):
            raise InvalidInput(
                f"{name} has entries outside of the {self.rows} x {self.columns} blocks; use {right}"
            )

    def _scattered(self, shape: tuple[int, int], cells: Tensor, place: Tensor) -> Tensor:
        table = torch.full((shape[0], shape[1] + 1), -1, dtype=torch.int64, device=self.device)
        return table.scatter_(1, cells, place)[:, :-1].unflatten(1, (self.rows, self.columns))

    def by_blocks(self, table: Tensor, causal: bool, lens: Tensor | None) -> BlockMask:
        """The mask of whole blocks: by tiles where 64 divides R and C, else by elements."""
        of_q, of_k = cut_side(self.R), cut_side(self.C)
        if of_q is None or of_k is None:
            return self.by_elements(table, causal, lens, None)
        (bq, q_parts), (bk, k_parts) = of_q, of_k
        seen = cut_map(table >= 0, (q_parts, k_parts))[None, :, : -(-self.M // bq)]
        return BlockMask.from_block_map(
            seen, q_len=self.M, kv_len=self.N, block=(bq, bk), device=self.device, causal=causal,
            kv_lengths=None if lens is None else cut_lengths(lens, bk, k_parts),
        )  # fmt: skip

    def by_elements(self, table: Tensor, causal: bool, lens: Tensor | None, mask: Tensor | None) -> BlockMask:
        """The mask of `mask[table[h, i, j]]`, evaluated at every query and key. Waits for the device."""

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            entry = table[h, q // self.R, k // self.C]
            seen = entry >= 0
            if mask is not None and mask.shape[0]:
                seen = seen & mask[entry.clamp(min=0), q % self.R, k % self.C]
            if lens is not None:
                seen = seen & (k % self.C < lens[k // self.C])
            return seen & (k <= q + self.N - self.M) if causal else seen

        return BlockMask.from_mask_mod(mask_mod, 1, table.shape[0], self.M, self.N, device=self.device)


def check_range(name: str, x: Tensor, most: int, what: str) -> None:
    """InvalidInput for values on the CPU that are below 0 or above `most`; of others nothing is known here."""
    if readable(x):
        check_values(name, x, (x < 0) | (x > most), f"{what} are 0 to {most}")


def check_sums(rows: Tensor, columns: Tensor, q_len: int, kv_len: int) -> None:
    """InvalidInput for sizes of blocks on the CPU that are not those of q and k."""
    for name, sizes, length in (("block_row_sz", rows, q_len), ("block_col_sz", columns, kv_len)):
        check_range(name, sizes, max(length, 0), f"sizes of blocks of {length} tokens")
        if readable(sizes) and bool((sizes.sum(1) != length).any()):
            raise InvalidInput(
                f"{name} has sums {sizes.sum(1).tolist()}; each head must sum to {length} tokens"
            )


def by_positions(blocks: Tensor, rows: Tensor, columns: Tensor, q_len: int, kv_len: int) -> BlockMask:
    """The causal mask of blocks of several sizes, evaluated at every query and key. Waits for the device."""
    of_q, of_k = (_block_of(ends(sizes), length) for sizes, length in ((rows, q_len), (columns, kv_len)))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return blocks[h, of_q[h, q], of_k[h, k]] & (k <= q + kv_len - q_len)

    return BlockMask.from_mask_mod(mask_mod, 1, blocks.shape[0], q_len, kv_len, device=blocks.device)


def ends(sizes: Tensor) -> Tensor:
    """Where each of these ends, int64, along the last dim."""
    return sizes.long().cumsum(-1)


def _block_of(end: Tensor, length: int) -> Tensor:
    """Which block holds each of the places 0 to length - 1, int64 [H, length], for block ends [H, n]."""
    place = torch.arange(length, device=end.device).expand(end.shape[0], -1).contiguous()
    return torch.searchsorted(end, place, right=True).clamp(max=end.shape[1] - 1)


class Side(NamedTuple):
    """Tokens [H, length] laid out in tiles of `tile` tokens, each of one block: tiles are a block's, padded."""

    tile: int
    block: Tensor  # int64 [H, tiles]: the block of each tile
    valid: Tensor  # int64 [H, tiles]: its tokens; 0 for tiles of no block
    source: Tensor  # int64 [H, tiles * tile]: the token at each place; any where there is none
    target: Tensor  # int64 [H, length]: the place of each token

    @classmethod
    def of(cls, sizes: Tensor, length: int) -> Side:
        """For blocks of these sizes [H, n]. Tiles are as many as any sizes of this sum need."""
        count = sizes.shape[1]
        tile = 128 if length >= 256 * count else 64
        sizes, tiles = sizes.long(), length // tile + count
        end, tile_end = ends(sizes), ends(-(-sizes // tile))
        start, tile_start = end - sizes, tile_end + (-sizes // tile)
        block = _block_of(tile_end, tiles)
        here = torch.arange(tiles, device=sizes.device)
        before = (here - tile_start.gather(1, block)) * tile
        left = (sizes.gather(1, block) - before).clamp(0, tile)
        valid = torch.where(here < tile_end[:, -1:], left, 0)
        first = start.gather(1, block) + before
        inside = torch.arange(tile, device=sizes.device)
        source = (first[..., None] + inside).flatten(1).clamp(0, max(length - 1, 0))
        mine = _block_of(end, length)
        token = torch.arange(length, device=sizes.device)
        target = tile_start.gather(1, mine) * tile + token - start.gather(1, mine)
        return cls(tile, block, valid, source, target.clamp(0, max(tiles * tile - 1, 0)))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [H, G, L, ...] at index [H, n]; zeros where L is 0."""
    index = index[:, None].expand(-1, x.shape[1], -1)
    if not x.shape[2]:  # every index is 0
        x = functional.pad(x, (0, 1) if x.ndim == 3 else (0, 0, 0, 1))
    return x.gather(2, index if x.ndim == 3 else index[..., None].expand(*index.shape, x.shape[3]))


class Padded(NamedTuple):
    """Blocks of several sizes in padded tiles. Heads of k are batch items, so that each has lengths of its own."""

    q: Side
    k: Side
    mask: BlockMask

    @classmethod
    def of(cls, blocks: Tensor, rows: Tensor, columns: Tensor, q_len: int, kv_len: int) -> Padded:
        """The layout and its mask, made on the device of the map."""
        q, k = Side.of(rows, q_len), Side.of(columns, kv_len)
        seen = blocks.gather(1, q.block[:, :, None].expand(-1, -1, blocks.shape[2]))
        seen = seen.gather(2, k.block[:, None].expand(-1, q.block.shape[1], -1)) & (q.valid > 0)[:, :, None]
        mask = BlockMask.from_block_map(
            seen[:, None], q_len=q.source.shape[1], kv_len=k.source.shape[1], block=(q.tile, k.tile),
            device=blocks.device, kv_lengths=k.valid.to(torch.int32),
        )  # fmt: skip
        return cls(q, k, mask)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scores: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """out [Hq, S, D] and lse [Hq, S] of tensors [H, tokens, D]."""
        heads = k.shape[0]
        tiles = gathered(q.unflatten(0, (heads, -1)), self.q.source)
        k, v = (gathered(x[:, None], self.k.source) for x in (k, v))
        found, sums = attention(tiles, k, v, self.mask, return_lse=True, **scores)
        found, sums = (gathered(x, self.q.target).flatten(0, 1) for x in (found, sums))
        return found, sums
