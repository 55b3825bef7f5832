"""VerticalSlash: keys and distances that a prompt's last queries look at, by MInference's patterns for each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.estimates import blocks_of_lines
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.attn.reference.line_blocks import BLOCKS, LINES, NEAR, Head
from sparsek.core import arguments, files
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.parsing import json_value

LAST, LEAST_KEYS, LEAST_DISTANCES, JSON_BLOCK = 64, 30, 50, 64
PATTERNS = {"vertical_and_slash": LINES, "stream_llm": NEAR, "block_sparse": BLOCKS}


@dataclass(frozen=True)
class VerticalSlash(Policy):
    """Keeps the blocks that vertical and slash lines cross, for prompts; other patterns for single heads. Causal.

    The last 64 queries attend to all keys. A vertical line is a key, a slash line a distance from query to key. Those
    with the highest softmax mass are kept, among them always the first 30 keys and the distances up to 99; lines of
    less than 2^-30 are not. A block is kept, whole, if a kept line crosses it.

    Args:
        vertical: Keys that are kept, 30 or more.
        slash: Distances that are kept, 50 or more.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        heads: The pattern of each head of q, as MInference's JSON has them: ("vertical_and_slash", vertical, slash),
            ("stream_llm", sinks, window) in tokens, or ("block_sparse", topk, 0) with topk blocks of 64 keys for each
            tile, chosen by means. None: `vertical` and `slash` for all heads.

    Raises:
        InvalidInput: For options that are out of range. By `mask`: for q of another number of heads, and `kv_lengths`.

    Source: MInference, Jiang et al., arXiv:2407.02490.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 2, 4096, 64), torch.randn(1, 1, 4096, 64)
        >>> heads = [("vertical_and_slash", 64, 256), ("stream_llm", 64, 512)]
        >>> policy = sk.policies.VerticalSlash(heads=heads)
        >>> policy.mask(q, k).heads
        2
    """

    vertical: int = 1000
    slash: int = 6096
    block: int | tuple[int, int] = 128
    heads: Sequence[tuple[str, int, int]] | None = None
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "vertical", arguments.integer("vertical", self.vertical, LEAST_KEYS, INT32_MAX)
        )
        object.__setattr__(self, "slash", arguments.integer("slash", self.slash, LEAST_DISTANCES, INT32_MAX))
        if self.heads is not None:
            if not isinstance(self.heads, Sequence) or isinstance(self.heads, str):
                raise InvalidInput(f"heads is {arguments.shown(self.heads)}; give the pattern of each head")
            object.__setattr__(
                self, "heads", tuple(_pattern(f"heads[{h}]", each) for h, each in enumerate(self.heads))
            )

    @classmethod
    def from_json(
        cls, source: str | Path | Sequence[Mapping[str, Any]], layer: int, block: int | tuple[int, int] = 128
    ) -> VerticalSlash:
        """Return the policy of one layer from MInference's file of patterns.

        Args:
            source: The file, or what it holds: a list with a dict for each layer, from the number of a head to
                [pattern, first number, second number, ...]. More numbers are ignored.
            layer: Which of them, from 0.
            block: The block in tokens.

        Raises:
            InvalidInput: For a missing file, layer or head, and unknown patterns.

        Example:
            >>> import sparsek as sk
            >>> patterns = [{"0": ["vertical_and_slash", 500, 1500, 0.9], "1": ["stream_llm", 100, 800, 0.8]}]
            >>> sk.policies.VerticalSlash.from_json(patterns, layer=0).heads
            (('vertical_and_slash', 500, 1500), ('stream_llm', 100, 800))
        """
        layers: Any = source
        if isinstance(source, (str, Path)):
            said = f"source is {arguments.shown(str(source))}, which is no readable JSON file"
            try:
                layers = json_value(files.content(files.as_path("source", source)), said, InvalidInput)
            except (OSError, InvalidFile) as error:
                raise InvalidInput(f"{said}: {error}") from error
        if not isinstance(layers, Sequence):
            raise InvalidInput(
                f"source is {arguments.shown(layers)}; it must be a list with a dict for each layer"
            )
        found = layers[arguments.integer("layer", layer, 0, len(layers) - 1)]
        if not isinstance(found, Mapping) or set(found) != set(map(str, range(len(found)))):
            raise InvalidInput(
                f"layer {layer} of source must have heads '0' to 'H - 1'; got {arguments.shown(found)}"
            )
        heads = [found[str(h)] for h in range(len(found))]
        return cls(
            block=block,
            heads=[tuple(each[:3]) if isinstance(each, (list, tuple)) else each for each in heads],
        )

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        q, k, _, _, scale = given
        if self.heads is not None and len(self.heads) != q.shape[1]:
            raise InvalidInput(f"heads has {len(self.heads)} patterns, and q has {q.shape[1]} heads")
        heads = self._patterns(q.shape[1])
        return blocks_of_lines(
            self, given, lambda module, grid: module.vertical_slash_blocks(q, k, grid, heads, LAST, scale)
        )

    def _patterns(self, heads: int) -> tuple[Head, ...]:
        """The pattern of each head, as the kernels take them."""
        given = self.heads or [("vertical_and_slash", self.vertical, self.slash)] * heads
        found = []
        for name, first, second in given:
            pattern = PATTERNS[name]
            if pattern == LINES:
                first, second = max(first, LEAST_KEYS), max(second, LEAST_DISTANCES)
            elif pattern == BLOCKS:
                first = max(1, -(-first * JSON_BLOCK // self.sides[1]))
            found.append(Head(pattern, first, second))
        return tuple(found)


def _pattern(name: str, given: Any) -> tuple[str, int, int]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 3:
        raise InvalidInput(
            f"{name} is {arguments.shown(given)}; it must be (pattern, first number, second number)"
        )
    pattern = arguments.one_of(f"{name}[0]", given[0], PATTERNS)
    return pattern, *(arguments.integer(f"{name}[{i}]", given[i], most=2**31 - 1) for i in (1, 2))  # type: ignore[return-value]
