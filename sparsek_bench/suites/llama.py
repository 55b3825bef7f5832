"""A model of Llama's shapes in plain torch, with random weights: what whole models are measured on."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.testing.budget import Gate

THETA = 500000.0


class Sizes(NamedTuple):
    """`layers` blocks: attention of `heads` query heads over `kv_heads`, and a gated MLP of `hidden` features."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def dim(self) -> int:
        """Of a head."""
        return self.width // self.heads


class KeyCache(NamedTuple):
    """Keys and values of a sequence, [sequences, kv_heads, length, dim]; the last place is that of the next token."""

    k: Tensor
    v: Tensor


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dim, kv_width = sizes.dim, sizes.kv_heads * sizes.dim
        self.q, self.o = (nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(sizes.width, kv_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], kept: KeyCache | None) -> Tensor:
        return self.o(self.attended(self.q(x), self.k(x), self.v(x), turn, kept))

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, Tensor], kept: KeyCache | None
    ) -> Tensor:
        """What the heads make of projected tokens, [sequences, tokens, heads * dim]."""
        q, k, v = (x.unflatten(-1, (-1, self.dim)).transpose(1, 2) for x in (q, k, v))
        q, k = (turned(each, *turn) for each in (q, k))
        if kept is not None:
            kept.k[:, :, -1:].copy_(k)
            kept.v[:, :, -1:].copy_(v)
            k, v = kept
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=kept is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys turned by their positions."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)
        self.before, self.between = (nn.RMSNorm(sizes.width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], kept: KeyCache | None) -> Tensor:
        x = x + self.attention(self.before(x), turn, kept)
        return x + self.mlp(self.between(x))


class Llama(nn.Module):
    """`forward(input_ids)` gives the logits of every token; `last`: of the last one. With `kept` keys of each block it
    is a step of decoding: one token of each sequence.
    """

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        where = self.embedding.weight
        rates = THETA ** -(torch.arange(0, sizes.dim, 2, device=where.device) / sizes.dim)
        angles = torch.outer(torch.arange(length, device=where.device), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(where.dtype))
        self.register_buffer("sin", angles.sin().to(where.dtype))

    def forward(self, input_ids: Tensor, kept: list[KeyCache] | None = None, last: bool = False) -> Tensor:
        at = slice(-1, None) if kept else slice(input_ids.shape[1])
        x, turn = self.embedding(input_ids), (self.get_buffer("cos")[at], self.get_buffer("sin")[at])
        for index, block in enumerate(self.blocks):
            x = block(x, turn, kept[index] if kept else None)
        return self.head(self.norm(x[:, -1:] if last else x))


def llama(sizes: Sizes, length: int, dtype: torch.dtype, device: torch.device) -> Llama:
    """A model with weights of a seed. `length`: of its longest sequence."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with device:
            return Llama(sizes, length)
    finally:
        torch.set_default_dtype(before)


def near(found: Tensor, same: Tensor, exact: Tensor) -> Gate:
    """Whether a result is as near the exact one as another way in the same dtype, twice over, with a few roundings.
    Errors are relative, of the whole result.
    """
    of = lambda x: float((x.double() - exact.double()).norm() / exact.double().norm())  # noqa: E731
    error, budget = of(found), 2 * of(same) + 4 * torch.finfo(same.dtype).eps
    return Gate(error, budget, error <= budget)
