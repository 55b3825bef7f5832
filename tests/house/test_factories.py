"""Every tensor that SparseK makes says where it lies, and its dtype where torch's default would decide.

torch.set_default_device and torch.set_default_dtype are the user's, for the user's own tensors.
"""

import ast
from pathlib import Path

import pytest

from tests.house.tools import ROOT, tree

# They follow torch.set_default_device, except for a Generator, which is on the CPU by default.
OF_DEFAULT_DTYPE = {
    "empty", "empty_permuted", "empty_strided", "eye", "linspace", "logspace", "normal", "ones", "rand", "randn",
    "range", "scalar_tensor", "zeros", "bartlett_window", "blackman_window", "hamming_window", "hann_window",
    "kaiser_window",
}  # fmt: skip
# Their dtype is that of what they are given: torch's default one for Python floats.
OF_GIVEN_DTYPE = {"arange", "as_tensor", "asarray", "full", "tensor"}
PLAIN = {
    "Generator", "empty_quantized", "nested_tensor", "randint", "randperm", "sparse_bsc_tensor", "sparse_bsr_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tril_indices",
    "triu_indices",
}  # fmt: skip
FACTORIES = OF_DEFAULT_DTYPE | OF_GIVEN_DTYPE | PLAIN
# Functions that take a generator's device, or nothing else, as their first argument.
DEVICE_FIRST = {"Generator"}


def faults(source: str) -> list[str]:
    """What is wrong, with its line. A factory that is not called at once, or imported by its name, is wrong as well."""
    module = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(module) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [
                f"{node.lineno}: from torch import {each.name}; write torch.{each.name}"
                for each in node.names
                if each.name in FACTORIES
            ]
        if not (isinstance(node, ast.Attribute) and node.attr in FACTORIES and _is_torch(node.value)):
            continue
        call = calls.get(id(node))
        if call is None and node.attr in DEVICE_FIRST:  # a class, which annotations name
            continue
        if call is None:
            found.append(f"{node.lineno}: torch.{node.attr} is not called here, so nobody sees its device")
            continue
        given = {each.arg for each in call.keywords}
        if "device" not in given and not (node.attr in DEVICE_FIRST and call.args):
            found.append(f"{node.lineno}: torch.{node.attr} without device=")
        if "dtype" not in given and _needs_dtype(node.attr, call):
            found.append(f"{node.lineno}: torch.{node.attr} without dtype=")
    return found


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _needs_dtype(name: str, call: ast.Call) -> bool:
    if name in OF_GIVEN_DTYPE:
        parts = [*call.args, *(each.value for each in call.keywords)]
        return any(
            isinstance(part, ast.Constant) and isinstance(part.value, float)
            for each in parts
            for part in ast.walk(each)
        )
    return name in OF_DEFAULT_DTYPE


@pytest.mark.parametrize(
    "folder",
    [
        *sorted(f"sparsek/{each.name}" for each in (ROOT / "sparsek").iterdir() if each.is_dir()),
        "sparsek_bench",
    ],
)
def test_every_factory_call_says_device_and_dtype(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for path in tree(".py")
        if path.is_relative_to(ROOT / folder)
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_files_beside_the_folders_are_looked_at_too() -> None:
    for path in Path(ROOT / "sparsek").glob("*.py"):
        assert faults(path.read_text(encoding="utf-8")) == []


def test_torchs_own_list_of_factories_is_known() -> None:
    from torch.utils._device import _device_constructors

    # Without its cache: transformers replaces torch.linspace for a while, which the cached set may hold.
    names = {each.__name__ for each in _device_constructors.__wrapped__()}
    assert names - FACTORIES <= {"fft_fftfreq", "fft_rfftfreq"}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("torch.arange(4)", "torch.arange without device="),
        ("torch.zeros(4, device=x.device)", "torch.zeros without dtype="),
        ("torch.full((4,), 0.5, device=d)", "torch.full without dtype="),
        ("torch.tensor([1, 2.0], device=d)", "torch.tensor without dtype="),
        ("torch.empty(4, **more)", "torch.empty without device="),
        ("torch.Generator().manual_seed(0)", "torch.Generator without device="),
        ("make = torch.ones", "torch.ones is not called here"),
        ("from torch import zeros", "from torch import zeros"),
        ("torch.randint(4, (2,))", "torch.randint without device="),
    ],
)
def test_each_fault_is_seen(source: str, fault: str) -> None:
    assert fault in "\n".join(faults(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(4, dtype=torch.int32, device=x.device)",
        "torch.arange(4, device=d)",
        "torch.full((4,), 1, device=d)",
        "torch.Generator(d).manual_seed(0)",
        "torch.from_numpy(a)",
        "x.new_zeros(4)",
        "torch.zeros_like(x)",
        "np.zeros(4)",
    ],
)
def test_what_is_right_passes(source: str) -> None:
    assert faults(source) == []
