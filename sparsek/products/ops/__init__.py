"""The verbs of products. Importing one imports all: their gradients call each other, by name, in torch.ops.sparsek."""

from sparsek.products.ops import choose as choose
from sparsek.products.ops import linear as linear
from sparsek.products.ops import matmul as matmul
from sparsek.products.ops import packing as packing
from sparsek.products.ops import sddmm as sddmm
