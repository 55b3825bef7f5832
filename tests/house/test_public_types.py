"""What pyright reveals of user code, outside the checkout, with the package installed as README says."""

import json
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from typing import Any

import pytest

from tests.house.tools import ROOT, need

need("pyright")
need("setuptools")

SETUP = """
import torch
from torch import Tensor

import sparsek as sk

w = torch.randn(256, 128)
x = torch.randn(8, 128)
A = sk.BSR.from_dense(w, 64, keep=0.5)
layer = sk.nn.BlockSparseLinear.from_dense(torch.nn.Linear(128, 256), 64, keep=0.5)
q = torch.randn(1, 2, 128, 64)
q8, _, v8 = sk.quantize_heads(q, q, q)
"""
REVEALED = {
    "A": "BSR",
    "A.T": "BSR",
    "A @ x.T": "Tensor",
    "x @ A.T": "Tensor",
    "A @ A.T": "BSR",
    "2 * A - A / 2": "BSR",
    "A.grad": "BSR | None",
    "A.shape": "tuple[int, int]",
    "A.size(0)": "int",
    'A.to("cpu", torch.bfloat16)': "BSR",
    "A.to(torch.float16)": "BSR",
    "A.sum(0)": "Tensor",
    "A.state_dict()": "dict[str, Tensor]",
    "sk.BSR.from_state_dict({})": "BSR",
    "sk.Semi24.from_dense(w) @ x.T": "Tensor",
    "sk.BSR24.from_dense(w, 64, keep=0.5).to_bsr()": "BSR",
    "sk.spmm(A, x.T)": "Tensor",
    'sk.linear(x, A, activation="gelu")': "Tensor",
    "sk.swiglu(x, A, A)": "Tensor",
    "sk.sddmm(w, x.T, A.pattern)": "BSR",
    "sk.spgemm(A, A.T)": "Tensor",
    'sk.spgemm(A, A.T, "bsr")': "BSR",
    "sk.quantize(A)": "Quantized",
    "sk.quantize(x)": "QuantizedTensor",
    "sk.plan_spmm(A, x.T)": "SpmmPlan",
    "layer": "BlockSparseLinear",
    "layer(x)": "Tensor",
    "layer.weight": "BSR",
    "sk.random_bsr(64, 64, 32, 0.5).pattern": "BlockPattern",
    "sk.choose_format(x, layer.weight)": "FormatChoice",
    'sk.load("file", kind=sk.BSR)': "BSR",
    'sk.load("file", "name", "cuda", kind=sk.Quantized)': "Quantized",
    "sk.BlockMask.causal(1024)": "BlockMask",
    "sk.attention(q, q, q)": "Tensor",
    "sk.attention(q, q, q, return_lse=True, plan=sk.plan_attention(q, q, q))": "tuple[Tensor, Tensor]",
    "sk.attention(*sk.quantize_heads(q, q, q))": "Tensor",
    "sk.attention(q8, q8, q8, plan=sk.plan_attention(q8, q8, q8), return_lse=True)": "tuple[Tensor, Tensor]",
    "sk.plan_attention(q8, q8, q8)": "AttentionFp8Plan",
}
WRONG = [
    'sk.linear(x, A, activation="tanh")',
    'sk.BSR.from_dense(w, 64, keep=0.5, scope="column")',
    'sk.quantize(A, scale="column")',
    'sk.quantize(x, scale="block")',
    'sk.spgemm(A, A.T, out="coo")',
    'sk.random_bsr(64, 64, 32, 0.5, pattern="diagonal")',
    "sk.spmm(A, [1.0])",
    "A @ 7",
    'sk.load("file", kind=sk.BSR).dequantize()',
    "sk.attention(q, q8, q8)",
    "sk.attention(q, q, q, return_lse=1)",
    "sk.attention(q, q, q, plan=sk.plan_spmm(A, x.T))",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The diagnostics of pyright for code with every expression, by an interpreter with an editable install."""
    folder = tmp_path_factory.mktemp("user")
    source, site = folder / "source", folder / "env"
    source.mkdir()
    (source / "sparsek").symlink_to(ROOT / "sparsek", target_is_directory=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_editable; build_editable({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    venv.create(site, symlinks=True)
    packages = next(site.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(folder.glob("sparsek-*.whl"))) as wheel:
        wheel.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    lines = [f"reveal_type({expression})" for expression in REVEALED]
    (folder / "code").mkdir()
    (folder / "code" / "user.py").write_text("\n".join([SETUP, *lines, *WRONG]))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(site / "bin" / "python")]
    done = subprocess.run(command, cwd=folder / "code", capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["generalDiagnostics"]


def test_the_main_verbs_have_types(found: list[dict[str, Any]]) -> None:
    texts = [each["message"] for each in found if each["severity"] == "information"]
    pairs = [re.fullmatch(r'Type of "(.*)" is "(.*)"', text, re.S) for text in texts]
    assert {pair[1]: pair[2] for pair in pairs if pair} == REVEALED


def test_words_and_operands_that_do_not_exist_are_errors(found: list[dict[str, Any]]) -> None:
    first = len(SETUP.split("\n")) + len(REVEALED)
    errors = {each["range"]["start"]["line"] - first for each in found if each["severity"] == "error"}
    assert errors == set(range(len(WRONG)))
