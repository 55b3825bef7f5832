"""What this machine is: versions of packages, the driver of a GPU and its power limit."""

import shutil
import subprocess
from functools import cache
from importlib import metadata

from sparsek.core import env


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def smi_facts(index: int) -> tuple[str | None, float | None]:
    """Driver version and power limit in watts, by nvidia-smi; None for each that it does not print."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, None
    visible = env.visible_gpus()
    identity = visible[index] if index < len(visible) else str(index)
    question = ["--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        answer = subprocess.run(
            [program, *question], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        driver, power = (part.strip() for part in answer.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None
    try:
        return driver, float(power)
    except ValueError:
        return driver, None
