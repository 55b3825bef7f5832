"""Layers for torch.nn. Importing this touches no CUDA and loads no kernel, as `import sparsek` does."""

from sparsek.nn.attention import SparseAttention
from sparsek.nn.linear import BlockSparseLinear
from sparsek.nn.regrow import dense_gradients
from sparsek.nn.sparse import SparseLinear

__all__ = ["BlockSparseLinear", "SparseAttention", "SparseLinear", "dense_gradients"]
