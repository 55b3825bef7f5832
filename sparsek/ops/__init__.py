"""The verbs. Importing one imports all, because their gradients call each other, by name, in torch.ops.sparsek."""

from sparsek.ops import attention_paged as attention_paged
from sparsek.ops import attention_varlen as attention_varlen
from sparsek.ops import choose as choose
from sparsek.ops import linear as linear
from sparsek.ops import mask_calls as mask_calls
from sparsek.ops import mask_forms as mask_forms
from sparsek.ops import packing as packing
from sparsek.ops import sddmm as sddmm
from sparsek.ops import spgemm as spgemm
