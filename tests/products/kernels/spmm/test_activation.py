"""The PTX of activations and slopes, run in numpy: held against the published formulas."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from sparsek.products.reference.epilogue import ACTIVATIONS, slope

pytest.importorskip("triton")

from sparsek.products.kernels.spmm.activation import activation_ptx, slope_ptx

F32 = np.float32
OPERATIONS: dict[str, Any] = {
    "mov": lambda x: x,
    "neg": lambda x: -x,
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "min": np.fmin,
    "max": np.fmax,
    "fma": lambda x, y, z: (x.astype(float) * y + z).astype(F32),
    "tanh": np.tanh,
    "ex2": np.exp2,
    "rcp": lambda x: F32(1) / x,
}
NAMES = ("gelu", "gelu_tanh", "silu")


def run(ptx: Any, z: np.ndarray, outputs: int) -> list[np.ndarray]:
    """The values of $0, $1, ... after PTX of float32 operations on z, its last operand."""
    known: dict[str, np.ndarray] = {f"${outputs}": z}
    for line in ptx.strip("{}").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, rest = line.split(maxsplit=1)
        to, *given = re.split(r",\s*", rest.strip())
        values = [known[x] if x in known else np.full_like(z, float(x)) for x in given]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            known[to] = OPERATIONS[name.split(".")[0]](*values).astype(F32)
    return [known[f"${at}"] for at in range(outputs)]


@pytest.mark.parametrize(("half", "of_y", "of_slope"), [(False, 2.8e-4, 8.8e-4), (True, 2.7e-5, 1.2e-4)])
@pytest.mark.parametrize("name", NAMES)
def test_activations_and_slopes_are_within_the_errors_of_their_fits(
    name: str, half: bool, of_y: float, of_slope: float
) -> None:
    z = np.linspace(-12, 12, 24001).astype(F32)
    exact = torch.from_numpy(z).double()
    (alone,) = run(activation_ptx(name, half), z, 1)
    y, found = run(slope_ptx(name, half), z, 2)
    right = ACTIVATIONS[name](exact).numpy()
    assert np.abs(alone - right).max() < of_y
    assert np.abs(y - right).max() < of_y
    assert np.abs(found - slope(name, exact).numpy()).max() < of_slope


@pytest.mark.parametrize(("half", "most"), [(False, 3e38), (True, 65504.0)])
@pytest.mark.parametrize("name", NAMES)
def test_large_numbers_have_slopes_0_and_1_and_nan_stays(name: str, half: bool, most: float) -> None:
    z = np.array([-most, -100, 100, most, np.nan], F32)
    y, found = run(slope_ptx(name, half), z, 2)
    assert np.abs(y[:2]).max() < 1e-6
    assert (y[2:4] == z[2:4]).all()
    assert np.abs(found[:4] - [0, 0, 1, 1]).max() < 1e-6
    assert np.isnan([y[4], found[4]]).all()
