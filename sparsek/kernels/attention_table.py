"""The kernels of attention in order of preference: operation, name, module of kernels, and no storage."""

KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("attention", "hopper.attention_fwd", "attention.hopper_fwd", ""),
    ("attention", "portable.attention_fwd", "attention.portable_fwd", ""),
    ("attention", "cpu.attention", "attention.cpu_fwd", ""),
    ("attention", "reference.attention", "attention.reference", ""),
    ("attention_fp8", "hopper.attention_fp8", "attention.hopper_fp8", ""),
    ("attention_fp8", "reference.attention_fp8", "attention.reference", ""),
    ("attention_backward", "hopper.attention_bwd", "attention.hopper_bwd", ""),
    ("attention_backward", "hopper.attention_bwd_wide", "attention.hopper_bwd_wide", ""),
    ("attention_backward", "portable.attention_bwd", "attention.portable_bwd", ""),
    ("attention_backward", "cpu.attention_bwd", "attention.cpu_bwd", ""),
    ("attention_backward", "reference.attention_bwd", "attention.reference", ""),
    ("attention_paged", "hopper.attention_paged", "paged.hopper", ""),
    ("attention_paged", "portable.attention_paged", "paged.portable", ""),
    ("attention_paged", "reference.attention_paged", "paged.reference", ""),
)

# Removed kernels, and the successor of each.
REMOVED = {"cpu.attention_paged": "reference.attention_paged"}
