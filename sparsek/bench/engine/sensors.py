"""Power and SM clock of a GPU while it is measured, as NVML gives them; nothing where NVML is missing."""

import ctypes
from collections.abc import Callable
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
# The names under which the means stand in the `env` of a record.
FIELDS = ("watts", "sm_mhz")


class Reading(NamedTuple):
    """One sample. NVML's power is a mean over about a second, its clock the present one."""

    watts: float
    sm_mhz: float


class Sensors:
    """Samples of one device, to be taken while the GPU works and the host only waits: each takes the host a while."""

    def __init__(self, device: torch.device) -> None:
        self._read = reader(device)
        self._samples: list[Reading] = []

    def sample(self) -> None:
        """Adds a reading, if there is one."""
        found = self._read() if self._read else None
        if found is not None:
            self._samples.append(found)

    def means(self) -> dict[str, float | None]:
        """Mean watts and mean MHz of the samples; null without any."""
        columns = zip(*self._samples, strict=True) if self._samples else [()] * len(FIELDS)
        means = (round(fmean(column), 1) if column else None for column in columns)
        return dict(zip(FIELDS, means, strict=True))


def reader(device: torch.device) -> Callable[[], Reading | None] | None:
    """Reads the sensors of a GPU, None where one cannot be read; None for a CPU, or where NVML is missing."""
    if device.type != "cuda":
        return None
    nvml = library()
    handle = None if nvml is None else _handle(nvml, device)
    if nvml is None or handle is None:
        return None

    def read() -> Reading | None:
        milliwatts, megahertz = ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)):
            return None
        if nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ctypes.byref(megahertz)):
            return None
        return Reading(milliwatts.value / 1e3, float(megahertz.value))

    return read


@cache
def library() -> Any:
    """NVML, ready; None where it is missing or refuses."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def _handle(nvml: Any, device: torch.device) -> ctypes.c_void_p | None:
    """NVML's handle of torch's device, by its UUID: torch counts visible devices alone."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle = ctypes.c_void_p()
    return None if nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) else handle
