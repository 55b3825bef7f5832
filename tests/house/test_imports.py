"""What `import sparsek` does not do. Each fact is read in a fresh interpreter."""

import json
from pathlib import Path

import pytest

from tests.house.tools import ROOT, python

LOADED = """
import json, sys
import torch
before = set(sys.modules)
import sparsek
print(json.dumps({"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""
HERE = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder: Path = tmp_path_factory.mktemp("elsewhere")
    return json.loads(python(LOADED, cwd=folder, env=HERE))


def test_importing_sparsek_touches_no_cuda(loaded: dict) -> None:
    assert loaded["cuda"] is False


def test_importing_sparsek_loads_no_kernel_module(loaded: dict) -> None:
    assert [name for name in loaded["new"] if name.startswith("sparsek.kernels.")] == []


@pytest.mark.parametrize(
    "package", ["triton", "matplotlib", "scipy", "typer", "rich", "hypothesis", "pytest", "transformers"]
)
def test_importing_sparsek_loads_nothing_that_it_can_do_without(loaded: dict, package: str) -> None:
    assert [name for name in loaded["new"] if name.split(".")[0] == package] == []


def test_making_and_checking_a_mask_loads_no_dynamo(tmp_path: Path) -> None:
    code = """
import sys, sparsek
sparsek.BlockMask.causal(1000, device="cpu") & sparsek.BlockMask.sliding_window(1000, 300, device="cpu")
print("torch._dynamo" in sys.modules)
"""
    assert python(code, cwd=tmp_path, env=HERE) == "False"


def test_the_command_line_starts_without_cuda_and_without_kernels(tmp_path: Path) -> None:
    code = LOADED.replace("import sparsek\n", "import sparsek.cli.__main__\n")
    found = json.loads(python(code, cwd=tmp_path, env=HERE))
    assert found["cuda"] is False
    assert [name for name in found["new"] if name.startswith(("triton", "sparsek.kernels."))] == []


def test_every_module_outside_the_kernels_imports_by_itself(tmp_path: Path) -> None:
    code = """
import importlib, importlib.util, pkgutil, sparsek
left_out = ["sparsek.kernels."]
if importlib.util.find_spec("transformers") is None:
    left_out.append("sparsek.integrations.transformers")
for found in pkgutil.walk_packages(sparsek.__path__, "sparsek."):
    if not found.name.startswith(tuple(left_out)) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print("all")
"""
    assert python(code, cwd=tmp_path, env=HERE) == "all"
