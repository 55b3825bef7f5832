"""The verbs of attention. Importing one imports all, as with products."""

from sparsek.attn.ops import attention_paged as attention_paged
from sparsek.attn.ops import attention_varlen as attention_varlen
from sparsek.attn.ops import mask_calls as mask_calls
from sparsek.attn.ops import mask_forms as mask_forms
