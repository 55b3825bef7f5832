"""Every environment variable of SparseK, each read in one function."""

import os
from pathlib import Path


def bench_records_dir() -> str:
    """SPARSEK_RECORDS: folder for benchmark records; default benchmarks/results in the working folder."""
    return os.environ.get("SPARSEK_RECORDS", "benchmarks/results")


def columns() -> int | None:
    """COLUMNS: the width of output; None for a missing, zero or non-numeric value, which shells use for "unknown"."""
    width = os.environ.get("COLUMNS", "")
    return int(width) or None if width.isascii() and width.isdigit() and len(width) < 6 else None


def visible_gpus() -> list[str]:
    """CUDA_VISIBLE_DEVICES: the GPUs visible to torch, in its order, by nvidia-smi's names; [] for all."""
    return [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]


def interpreting() -> bool:
    """TRITON_INTERPRET=1: plain Triton kernels run on CPU tensors, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def compiling_differently() -> bool:
    """Whether one of Triton's variables changes the machine code, or shows the compilation."""
    asking = (
        "ALWAYS_COMPILE",
        "DEBUG",
        "DEFAULT_FP_FUSION",
        "ENABLE_ASAN",
        "F32_DEFAULT",
        "INSTRUMENTATION_MODE",
    )
    asking += ("KERNEL_DUMP", "KERNEL_OVERRIDE", "OVERRIDE_ARCH")
    named = (*(f"TRITON_{name}" for name in asking), "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS")
    return any(os.environ.get(name) for name in named)


def cache_dir() -> str:
    """SPARSEK_CACHE: folder for compiled CUDA C++ kernels; default ~/.cache/sparsek. Without a home folder it is the
    null device, below which nothing can be written.

    Relative paths, also of HOME, are ignored: machine code is loaded from this folder, so a working folder must
    not choose it.
    """
    return _absolute(os.environ.get("SPARSEK_CACHE")) or _home_cache() or os.devnull


def _absolute(path: str | None) -> str:
    """The path, or "" for one that depends on the working folder."""
    return path if path and Path(path).is_absolute() else ""


def with_caches_in(folder: Path, bytecode: Path) -> dict[str, str]:
    """The environment of a process whose caches of compiled kernels are in a folder, and Python's own in another."""
    named = ("TRITON_CACHE_DIR", "SPARSEK_CACHE", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    caches = {name: str(folder / name.lower()) for name in named} | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    return {**os.environ, **caches, "PYTHONDONTWRITEBYTECODE": ""}


def _home_cache() -> str:
    try:
        return _absolute(str(Path("~/.cache/sparsek").expanduser()))
    except RuntimeError:
        return ""


def hub_cache() -> str:
    """The Hugging Face cache of models: HF_HUB_CACHE, else hub in HF_HOME, by default ~/.cache/huggingface."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    try:
        return str(Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser())
    except RuntimeError:
        return os.devnull


def nvrtc_path() -> str:
    """NVRTC: the file of NVIDIA's runtime compiler, libnvrtc.so; "" to search for it."""
    return os.environ.get("NVRTC", "")


def tuning() -> str:
    """SPARSEK_TUNING: once the file of tuned configs; it has no effect."""
    return os.environ.get("SPARSEK_TUNING", "")


def vllm_omni_options() -> str:
    """SPARSEK_VLLM_OMNI: the options of SparseK in vllm-omni, JSON; "" for none."""
    return os.environ.get("SPARSEK_VLLM_OMNI", "")


def vllm_options() -> str:
    """SPARSEK_VLLM: the options of SparseK's attention backend in vLLM, JSON; "" for none."""
    return os.environ.get("SPARSEK_VLLM", "")


def vllm_on_cpu() -> bool:
    """SPARSEK_VLLM_CPU=1: SparseK takes the place of vLLM's attention backend for CPUs, which has no other choice."""
    return os.environ.get("SPARSEK_VLLM_CPU", "0") == "1"
