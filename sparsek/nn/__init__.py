"""Layers for torch.nn. Importing this touches no CUDA and loads no kernel, as `import sparsek` does."""

from sparsek.nn import savers  # noqa: F401  which watches for layers
from sparsek.nn.attention import SparseAttention
from sparsek.nn.distillation import distillation_loss
from sparsek.nn.linear import BlockSparseLinear
from sparsek.nn.regrow import dense_gradients
from sparsek.nn.schedule import PatternSchedule
from sparsek.nn.selected import MoBA, NativeSparseAttention
from sparsek.nn.sparse import SparseLinear

__all__ = [
    "BlockSparseLinear",
    "MoBA",
    "NativeSparseAttention",
    "PatternSchedule",
    "SparseAttention",
    "SparseLinear",
    "dense_gradients",
    "distillation_loss",
]
