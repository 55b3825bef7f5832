"""The kernels of attention in order of preference: operation, name, module of kernels, and no storage."""

KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("attention", "hopper.attention_fwd", "forward.hopper_fwd", ""),
    ("attention", "portable.attention_fwd", "forward.portable_fwd", ""),
    ("attention", "cpu.attention", "forward.cpu_fwd", ""),
    ("attention", "reference.attention", "forward.reference", ""),
    ("attention_fp8", "hopper.attention_fp8", "forward.hopper_fp8", ""),
    ("attention_fp8", "reference.attention_fp8", "forward.reference", ""),
    ("attention_backward", "hopper.attention_bwd", "backward.hopper_bwd", ""),
    ("attention_backward", "hopper.attention_bwd_wide", "backward.hopper_bwd_wide", ""),
    ("attention_backward", "portable.attention_bwd", "backward.portable_bwd", ""),
    ("attention_backward", "cpu.attention_bwd", "backward.cpu_bwd", ""),
    ("attention_backward", "reference.attention_bwd", "forward.reference", ""),
    ("attention_paged", "hopper.attention_paged", "paged.hopper", ""),
    ("attention_paged", "portable.attention_paged", "paged.portable", ""),
    ("attention_paged", "reference.attention_paged", "paged.reference", ""),
)

# Removed kernels, and the successor of each.
REMOVED = {"cpu.attention_paged": "reference.attention_paged"}
