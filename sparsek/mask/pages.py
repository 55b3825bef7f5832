"""PageLists: the key blocks that tiles of queries visit, in a ragged batch over paged keys."""

from __future__ import annotations

from dataclasses import dataclass

from sparsek.mask.lists import BlockLists


@dataclass(frozen=True, eq=False)
class PageLists:
    """The key blocks that each tile of queries visits, in a ragged batch over paged keys.

    Tile i of a request is its queries i * bq to (i + 1) * bq - 1, and block j its keys j * bk to (j + 1) * bk - 1: a
    block is logical, the block table says where its pages are. Row h * tiles + first + i describes tile i of a
    request for head h, where `first` is the number of tiles of all requests before: the sum of ceil(queries / bq). A
    query sees the keys of its tile's blocks that exist and, if the call is causal, do not stand behind it. Entries
    below 0 or beyond the keys are skipped; an entry that occurs twice counts twice.

    Attributes:
        full: Blocks that every query of the tile sees whole, `BlockLists` of heads * tiles rows. They need no test.
        partial: Further blocks, which are tested element by element.
        heads: Heads with lists of their own: 1, those of k, or those of q.
        tiles: Rows of one head; at least the tiles of all requests.
        block: (bq, bk), in tokens: bq 1, 64 or 128; bk a multiple of the page, or a divisor of it from 16 up.
        longest: At most this many blocks in a row.
    """

    full: BlockLists
    partial: BlockLists
    heads: int
    tiles: int
    block: tuple[int, int]
    longest: int
