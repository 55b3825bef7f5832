"""Power and SM clock of a GPU while it is measured, as NVML gives them; nothing where NVML is missing."""

import ctypes
from functools import cache
from statistics import fmean
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1  # NVML_CLOCK_SM
# The names under which the means stand in the `env` of a record.
FIELDS = ("watts", "sm_mhz")


class Sensors:
    """Samples of one device, to be taken while the GPU works and the host only waits: each takes the host a while.

    NVML's power is a mean over about a second, its clock the present one.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = library() if device.type == "cuda" else None
        self._handle = ctypes.c_void_p()
        self._samples: list[tuple[float, float]] = []
        if self._nvml:
            # NVML's handle of torch's device, by its UUID: torch counts visible devices alone.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)):
                self._nvml = None

    def sample(self) -> None:
        """Adds watts and MHz, if they can be read."""
        if self._nvml is None:
            return
        milliwatts, megahertz = ctypes.c_uint(), ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts))
        failed = failed or self._nvml.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK, ctypes.byref(megahertz))
        if not failed:
            self._samples.append((milliwatts.value / 1e3, float(megahertz.value)))

    def means(self) -> dict[str, float | None]:
        """Mean watts and mean MHz of the samples; null without any."""
        columns = list(zip(*self._samples, strict=True)) or [None] * len(FIELDS)
        means = (round(fmean(each), 1) if each else None for each in columns)
        return dict(zip(FIELDS, means, strict=True))


@cache
def library() -> Any:
    """NVML, ready; None where it is missing or refuses."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None
