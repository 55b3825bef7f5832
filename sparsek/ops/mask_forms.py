"""Registers the GPU kernels that make masks of closed form. The first such mask on a GPU loads them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from sparsek.core.operations import KERNELS
from sparsek.ops import library_args


def _registered(module: str, function: str) -> Callable[..., Any]:
    """A function of kernels/mask. It returns None, for a fallback to numpy, without Triton or if calls are traced."""

    def make(*given: Any) -> Any:
        if library_args.traced():
            return None
        try:
            kernel = getattr(import_module(f"sparsek.kernels.mask.{module}"), function)
        except ImportError:
            return None
        return kernel(*given)

    return make


KERNELS.update(
    mask_of_blocks=_registered("forms", "blocks"),
    mask_of_band=_registered("forms", "band"),
    mask_of_bigbird=_registered("bigbird", "bigbird"),
    mask_of_documents=_registered("documents", "documents"),
)
