"""XAttention: keeps the blocks whose antidiagonals have the most softmax mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.estimates import KERNEL_DTYPES
from sparsek.attn.policies.maps import kernels
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.attn.reference import antidiagonals as reference
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

STRIDES = (8, 16)


@dataclass(frozen=True)
class XAttention(Policy):
    """Keeps, for each tile of queries, the fewest blocks that hold a share of the estimated softmax mass.

    Queries and keys are taken in groups of `stride` neighbours, and a pair of groups is scored by the sum of one of its
    antidiagonals. The first block of keys and the block at the diagonal are kept first. On a GPU the estimate takes
    two launches: one reads q and k once, the other multiplies their groups, 1 / stride of the work of dense scores,
    and writes float32 [B, Hq, Mb, Nb]. Between them are q and k in groups, in FP8 one byte for each element, and
    float32 [128, Nb] for each SM.

    Args:
        threshold: The share, over 0 and at most 1.
        stride: Tokens of a group: 8 or 16.
        block: The block in tokens: 64, 128, or a pair (queries, keys).
        causal: Whether a query sees no keys after its own.
        precision: "fp8" rounds q and k to e4m3, with a scale for each group; "full" multiplies in the dtype of q
            (float32 as TF32). GPUs older than sm_89 have no FP8 and use "full".

    Raises:
        InvalidInput: For other values.

    Source: Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, arXiv:2503.16428.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
        >>> sk.policies.XAttention(threshold=0.8).mask(q, k).grid
        (4, 4)
    """

    threshold: float = 0.9
    stride: int = 16
    block: int | tuple[int, int] = 128
    causal: bool = True
    precision: str = "fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        share = arguments.number("threshold", self.threshold, 0, 1)
        if share == 0:
            raise InvalidInput("threshold is 0; it must be over 0, and 1 keeps all mass")
        object.__setattr__(self, "threshold", share)
        object.__setattr__(self, "stride", arguments.integer("stride", self.stride, 1))
        if self.stride not in STRIDES:
            raise InvalidInput(f"stride is {self.stride}; use 8 or 16")
        arguments.one_of("precision", self.precision, ("fp8", "full"))

    def choose(self, given: PolicyInputs) -> BlockMask:
        """The mask, of checked arguments."""
        q, place = given.q, given.place
        fp8 = self.precision == "fp8"
        if q.is_cuda:
            fp8 &= torch.cuda.get_device_capability(q.device) >= (8, 9)
        found = kernels("antidiagonals", q, given.k) if q.dtype in KERNEL_DTYPES else None
        mass = (found or reference).block_mass(
            q, given.k, stride=self.stride, block=place.block, causal=self.causal, q_offset=place.q_offset,
            kv_lengths=given.kv_lengths, fp8=fp8, scale=given.scale,
        )  # fmt: skip
        return given.cumulative(mass, self.threshold, self.causal, (1, 1))
