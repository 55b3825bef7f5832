"""Makes the environments with uv. Needs only the standard library, and fetches nothing that is already there.

`env.py demo` makes .venv with sparsek, matplotlib and the demo's weights; `env.py test` also the tools of the tests,
.venv-triton-next and .venv-transformers-floor.

If this Python has torch >= 2.11 (with CUDA, where there is a GPU), .venv sees its packages and installs no torch;
without a network the tests then skip what is missing. Otherwise .venv has the pinned torch, without a GPU for CPUs.
uv is the one on the PATH, else UV, which pip installs into .venv-uv. pip's index-url and find-links apply, and uv's
variables, among them UV_PYTHON (then the torch of this Python is not used) and UV_TORCH_BACKEND.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import venv
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ROOT / ".venv/sparsek-env.json"  # the tests read what is missing
EXTRAS = {"demo": "plot,demo", "test": "dev,plot,scipy,demo,transformers"}
UV, TORCH = "uv==0.13.9", {"cpu": "torch==2.13.0", "gpu": "torch==2.11.0"}  # 2.11 comes with Triton 3.6
ADD = "uv pip install --python"


def main(stage: str) -> None:
    card = "cpu" if sh("nvidia-smi -L || ls /dev/nvidia0", quiet=True).returncode else "gpu"
    files = [ROOT / "pyproject.toml", Path(__file__), *sorted(ROOT.glob("constraints*.txt"))]
    inputs = hashlib.sha256(card.encode() + b"".join(map(Path.read_bytes, files))).hexdigest()
    made = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    there = (ROOT / ".venv/bin/python").exists() and made.get("root") == str(ROOT)  # and was not moved
    if there and made.get(stage) == inputs:
        return
    find_uv()
    if not there:
        made = {"root": str(ROOT), "kept": make_venv(card, clear=bool(made))}
        STAMP.write_text(json.dumps(made))
    for each in [each for each in EXTRAS if each in ("demo", stage) and made.get(each) != inputs]:
        made |= {"missing": install(each, card, made["kept"]), each: inputs}
        STAMP.write_text(json.dumps(made))
        print(f"env: {each} is", f"without {made['missing']}" if made["missing"] else "ready", flush=True)


def find_uv() -> None:
    """Puts uv on the PATH. It reads no pip.conf, so pip's settings become its variables."""
    python, pip = f"'{sys.executable}'", f"-m pip install --quiet --retries 1 {UV}"
    settings = sh(f"{python} -m pip config list", quiet=True).stdout
    for name, value in re.findall(r"\.(index-url|find-links)='(.*)'", settings):
        os.environ.setdefault({"index-url": "UV_DEFAULT_INDEX"}.get(name, "UV_FIND_LINKS"), value)
    os.environ["PATH"] += f"{os.pathsep}{ROOT}/.venv-uv/bin"
    sh(f"command -v uv || {python} {pip} --target .venv-uv || {python} -m venv .venv-uv", quiet=True)
    sh(f"command -v uv || .venv-uv/bin/python {pip}", quiet=True)


def make_venv(card: str, clear: bool) -> "list[str]":
    """Makes .venv, and returns what it takes from this Python and must not install."""
    sh("rm -rf .venv-triton-next .venv-transformers-floor")
    supported = (3, 10) <= sys.version_info < (3, 14) and "UV_PYTHON" not in os.environ
    if supported and util.find_spec("torch"):
        torch = import_module("torch")
        if torch.__version__ >= (2, 11) and (card == "cpu" or torch.version.cuda):
            venv.create(ROOT / ".venv", symlinks=True, clear=clear)  # uv ignores packages of the Python below
            see(".venv", [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))])
            return [name for name in ("torch", "triton", "numpy") if util.find_spec(name)]
    if sh(f"uv venv --seed {'--clear' * clear} --python '>=3.10,<3.14' .venv").returncode:
        sys.exit("env: uv could not make .venv, or there is no uv and pip could not install it")
    return []


def install(stage: str, card: str, kept: "list[str]") -> "list[str]":
    """Installs one stage. Returns what is missing, which is an error unless this Python's torch is used."""
    (ROOT / ".venv/sparsek-excludes.txt").write_text("\n".join(["sentence-transformers", *kept]))
    pins = "-c constraints.txt -b constraints.txt --excludes .venv/sparsek-excludes.txt"
    torch, indexes = "" if kept else TORCH[card], ["", "--offline"]
    if torch and (card == "gpu" or " nvidia-" in sh(f"{ADD} .venv --dry-run {torch}", quiet=True).stderr):
        indexes = ["--torch-backend=${UV_TORCH_BACKEND:-auto}", *indexes[: card == "gpu"]]
    tries = [f"{ADD} .venv {pins} -e '.[{EXTRAS[stage]}]' {torch} {index}" for index in indexes]
    missing = [f"some of {EXTRAS[stage]}"] if sh(" || ".join(tries)).returncode else []
    if missing and kept:
        sh(".venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .")
    for name in ("transformers-floor", "triton-next") if stage == "test" else ():
        new = f"uv venv --quiet --allow-existing --python .venv/bin/python .venv-{name}"
        if sh(f"{new} && {ADD} .venv-{name} --no-deps -r constraints-{name}.txt").returncode:
            missing += re.findall(r"^\w\S*==\S+", (ROOT / f"constraints-{name}.txt").read_text(), re.M)[:1]
        else:
            see(f".venv-{name}", [str(next(ROOT.glob(".venv/lib/python3*/site-packages")))])
    if (missing and not kept) or sh(".venv/bin/python -c 'import sparsek, safetensors, typer'").returncode:
        sys.exit(f"env: {stage} is incomplete; the error is above")
    return missing


def see(folder: str, sites: "list[str]") -> None:
    """Appends folders to the path of an environment, after its own packages."""
    lines = "".join(f"import site; site.addsitedir({site!r})\n" for site in sites)
    (next((ROOT / folder).glob("lib/python3*/site-packages")) / "sparsek-env.pth").write_text(lines)


def sh(command: str, quiet: bool = False) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, shell=True, cwd=ROOT, text=True, capture_output=quiet)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["test"]))
