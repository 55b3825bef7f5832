"""Runs one kernel of FP8 products without the planner: problem, config, work, the output it was given."""

from typing import Any

import torch
from torch import Tensor

from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.testing.budget_fp8 import CORE, check_quantized
from sparsek.testing.cases_fp8 import CaseFp8
from sparsek.testing.poison import poisoned
from tests.kernels.planned import posed


def problem(a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN) -> Any:
    """The problem that a @ b poses, C lying as `out` does."""
    return posed(a, b, out, epilogue)


def multiply(
    kernel: Any,
    a: Quantized,
    b: QuantizedTensor,
    epilogue: Epilogue = PLAIN,
    out: Tensor | None = None,
    *,
    config: Any = None,
) -> Tensor:
    """`out`, once `kernel` has written a @ b with the epilogue into it; a new one, in float32, starts full of NaN."""
    if out is None:
        out = poisoned((*b.shape[:-2], a.shape[0], b.shape[-1]), torch.float32, b.device)
    p = problem(a, b, out, epilogue)
    assert kernel.why_not(p) == []
    c = kernel.default(p) if config is None else config
    kernel.launch(c, kernel.prepare(p, c, a), a, b, out, epilogue)
    return out


def hold(
    kernel: Any,
    case: CaseFp8,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    config: Any = None,
    core: float = CORE,
) -> None:
    """The kernel's product is within the error budget."""
    a, b, epilogue, out = case.make(device, dtype, seed)
    before = out if epilogue.other is None else epilogue.other.clone()
    multiply(kernel, a, b, epilogue, out, config=config)
    assert epilogue.other is None or torch.equal(epilogue.other, before)
    gate = check_quantized(a, b, out, epilogue, core=core)
    assert gate.passed, f"{case}: {gate}"
