"""What `import sparsek` does not do. Each fact is read in a fresh interpreter."""

import ast
import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import sparsek
from sparsek.core.terminal import Deferred
from sparsek.tools.cli import __main__ as command_line
from sparsek_bench.benches import BENCHES
from sparsek_bench.commands import bench
from tests.house.tools import ROOT, python, pythons
from tests.sampling import sampled

LOADED = """
import json, sys, torch
before = set(sys.modules)
import sparsek
from sparsek import *
print(json.dumps({"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""
HERE = {"PYTHONPATH": str(ROOT)}


OF_LAYERS = LOADED.replace("import sparsek\nfrom sparsek import *\n", "import sparsek.nn\n")
OF_COMMANDS = LOADED.replace("import sparsek\nfrom sparsek import *\n", "import sparsek.tools.cli.__main__\n")
GRADIENTS_OFF = """
import torch
torch.set_grad_enabled(False)
import sparsek as sk
layer, mask = sk.nn.BlockSparseLinear.random(32, 32, 16, 1.0), sk.BlockMask.causal(64)
assert not layer(torch.ones(2, 32)).requires_grad
torch.set_grad_enabled(True)
q = torch.randn(1, 1, 64, 32, requires_grad=True)
(layer(torch.ones(2, 32)).sum() + sk.attention(q, q, q, mask).sum()).backward()
print(layer.values.grad is not None and q.grad is not None)
"""
MASKED = """
import sys, sparsek
sparsek.BlockMask.causal(1000, device="cpu") & sparsek.BlockMask.sliding_window(1000, 300, device="cpu")
print("torch._dynamo" in sys.modules)
"""
# A package called sparsek.attention would take the verb's place as soon as another name loads it.
VERB = "import sparsek as sk; sk.BlockMask; print(callable(sk.attention), callable(sk.linear))"
ALONE = {
    "the newer precision settings of torch do not break planning": (
        "import torch, sparsek as sk; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "a = sk.random_bsr(64, 64, 32, 0.5, seed=0); b = torch.randn(64, 8)\n"
        "assert sk.plan_spmm(a, b).problem.tf32; a @ b\n"
        "print('right')"
    ),
    "without Triton the other kernels run and say why it does not": (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sparsek as sk\n"
        "a = sk.random_bsr(64, 64, 32, 0.5, seed=0); b = torch.randn(64, 8)\n"
        "torch.testing.assert_close(a @ b, a.to_dense() @ b)\n"
        "assert 'hopper.spmm: does not import here: ' in sk.plan_spmm(a, b).explain()\n"
        "print('right')"
    ),
}
MATRICES = sampled(
    [
        "import sparsek as sk; A = sk.BSR.from_dense(ones(32, 32), 16, threshold=0)",
        "from sparsek.products.formats.random import random_bsr; A = random_bsr(32, 32, 16, 1.0)",
        "import sparsek as sk; A = sk.Semi24.from_dense(ones(32, 32))",
    ],
    1,
)
LEARNS = """
x = ones(32, 2, requires_grad=True)
if hasattr(A, "order"):
    A.requires_grad_()
(A @ x).sum().backward()
print(x.grad.shape)
"""
MODULES = """
import importlib, importlib.util, pkgutil, sparsek
# Importing transformers takes seconds, and tests/integrations does it.
left_out = ["sparsek.products.kernels.", "sparsek.attn.kernels.", "sparsek.integrations.transformers"]
if importlib.util.find_spec("peft") is None:
    left_out.append("sparsek.integrations.peft")
if importlib.util.find_spec("torchao") is None:
    left_out.append("sparsek.models.torchao")
for found in pkgutil.walk_packages(sparsek.__path__, "sparsek."):
    if not found.name.startswith(tuple(left_out)) and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
print("all")
"""
CODES = [
    LOADED,
    OF_LAYERS,
    OF_COMMANDS,
    GRADIENTS_OFF,
    MASKED,
    MODULES,
    VERB,
    *ALONE.values(),
    *(f"from torch import ones\n{each}{LEARNS}" for each in MATRICES),
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, str]":
    """What each of CODES prints."""
    return dict(zip(CODES, pythons(CODES, tmp_path_factory.mktemp("elsewhere")), strict=True))


@pytest.fixture
def loaded(printed: "dict[str, str]") -> dict:
    return json.loads(printed[LOADED])


def is_kernel(module: str) -> bool:
    """Of the kernels' room all but the table of names and the launcher, which need neither Triton nor a GPU."""
    others = (
        "sparsek.engine.table",
        "sparsek.engine.launch",
        "sparsek.engine.launch.driver",
        "sparsek.engine.launch.recorder",
    )
    rooms = ("sparsek.products.kernels.", "sparsek.attn.kernels.", "sparsek.engine.launch.")
    return module.startswith(rooms) and module not in others


def test_importing_sparsek_touches_no_cuda(loaded: dict) -> None:
    assert loaded["cuda"] is False


def test_importing_sparsek_loads_no_kernel_module(loaded: dict) -> None:
    assert [name for name in loaded["new"] if is_kernel(name)] == []


@pytest.mark.parametrize(
    "package", ["triton", "scipy", "typer", "rich", "hypothesis", "pytest", "transformers"]
)
def test_importing_sparsek_loads_nothing_that_it_can_do_without(loaded: dict, package: str) -> None:
    assert [name for name in loaded["new"] if name.split(".")[0] == package] == []


def test_importing_layers_touches_no_cuda_and_loads_no_kernel(printed: "dict[str, str]") -> None:
    found = json.loads(printed[OF_LAYERS])
    assert found["cuda"] is False
    assert [name for name in found["new"] if name.startswith("triton") or is_kernel(name)] == []


def test_gradients_that_are_off_while_sparsek_is_imported_come_on_again(printed: "dict[str, str]") -> None:
    assert printed[GRADIENTS_OFF] == "True"


def test_importing_sparsek_waits_with_torch_and_numpy_until_a_name_is_used(tmp_path: Path) -> None:
    code = """
import sys, sparsek
heavy = [name for name in ("torch", "numpy", "safetensors") if name in sys.modules]
print(heavy, set(sparsek.__all__) <= set(dir(sparsek)), sparsek.BSR.__name__, "torch" in sys.modules)
"""
    assert python(code, cwd=tmp_path, env=HERE) == "[] True BSR True"


def test_the_names_that_type_checkers_see_are_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(sparsek.__file__).read_text("utf-8"))
    seen = {}
    for block in (node for node in tree.body if isinstance(node, ast.If)):
        for line in block.body:
            assert isinstance(line, ast.ImportFrom)
            rooms = {each.name: f"sparsek.{each.name}" for each in line.names if each.name in sparsek.ROOMS}
            seen |= {each.name: line.module for each in line.names} | rooms
    assert seen == sparsek._HOMES
    assert sorted(seen) == sorted(sparsek.__all__)


def test_a_name_is_loaded_once_and_an_unknown_one_is_refused() -> None:
    assert all(getattr(sparsek, name) is vars(sparsek)[name] for name in sparsek.__all__)
    with pytest.raises(AttributeError, match="module 'sparsek' has no attribute 'spmv'"):
        sparsek.spmv  # noqa: B018


@pytest.mark.parametrize("code", CODES[-len(MATRICES) :], ids=MATRICES)
def test_a_matrix_multiplies_and_learns_however_it_came(code: str, printed: "dict[str, str]") -> None:
    assert printed[code] == "torch.Size([32, 2])"


HELP = """
import sys
from sparsek.tools.cli.__main__ import main
sys.argv = ["sparsek", *{words}]
try:
    main()
except SystemExit:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "named"), [([], command_line.COMMANDS), (["bench"], [*BENCHES, "all"])], ids=["all", "bench"]
)
def test_the_help_of_the_program_takes_no_torch_and_less_than_a_second(
    tmp_path: Path, words: list[str], named: Iterable[str]
) -> None:
    code, help_took, libraries_took, limit = HELP.format(words=[*words, "--help"]), [], [], 1.0

    def seconds(code: str) -> tuple[float, list[str]]:
        began = time.perf_counter()
        lines = python(code, cwd=tmp_path, env=HERE).splitlines()
        return time.perf_counter() - began, lines

    for _ in range(4):
        took, lines = seconds(code)
        help_took.append(took)
        assert lines[-1] == "False"
        assert all(any(name in line for line in lines) for name in named)
        if took < limit:
            break
        # On a slow or busy machine: four times what the libraries that print it take.
        libraries_took.append(seconds("import typer, rich.markdown")[0])
        limit = max(1.0, 4 * min(libraries_took))
    assert min(help_took) < limit


def test_the_help_of_the_program_says_what_each_command_says_of_itself() -> None:
    program, benchmarks = get_command(command_line.app), get_command(bench.app)
    assert isinstance(program, TyperGroup)
    assert isinstance(benchmarks, TyperGroup)
    assert list(program.commands) == list(command_line.COMMANDS)
    assert list(benchmarks.commands) == [*BENCHES, "all"]
    for name, shown in [*program.commands.items(), *benchmarks.commands.items()]:
        assert isinstance(shown, Deferred)
        assert shown.help == (shown.load().help or "").split("\n\n")[0].replace("\n", " "), name


def test_the_verb_of_attention_is_no_module(printed: "dict[str, str]") -> None:
    assert printed[VERB] == "True True"


@pytest.mark.parametrize("name", ALONE)
def test_in_a_process_of_its_own(name: str, printed: "dict[str, str]") -> None:
    assert printed[ALONE[name]] == "right"


def test_making_and_checking_a_mask_loads_no_dynamo(printed: "dict[str, str]") -> None:
    assert printed[MASKED] == "False"


def test_the_command_line_starts_without_cuda_and_without_kernels(printed: "dict[str, str]") -> None:
    found = json.loads(printed[OF_COMMANDS])
    assert found["cuda"] is False
    assert [name for name in found["new"] if name.startswith("triton") or is_kernel(name)] == []


def test_every_module_outside_the_kernels_imports_by_itself(printed: "dict[str, str]") -> None:
    assert printed[MODULES] == "all"
