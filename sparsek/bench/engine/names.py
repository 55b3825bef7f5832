"""Names of shapes and blocks, of which names of cases are made."""


def block_name(block: tuple[int, int]) -> str:
    """ "128" for square blocks, "512x112" for others."""
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def shape_name(m: int, k: int, n: int) -> str:
    """ "8192³" for a cube, "16384²×16" for a square first matrix, "m×k×n" otherwise."""
    if m == k == n:
        return f"{m}³"
    return f"{m}²×{n}" if m == k else f"{m}×{k}×{n}"


def stored_name(block: str, density: float, *words: str) -> str:
    """ "block 128 12.5 % powerlaw bf16"; empty words are left out."""
    return " ".join(filter(None, (f"block {block}", f"{density * 100:.4g} %", *words)))
