"""How hot the GPUs are, from the library of NVIDIA's driver (NVML), where there is one."""

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["hottest_c"]

_LIBRARY = "libnvidia-ml.so.1"
_TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t


def hottest_c(load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """Degrees Celsius of the hottest GPU of this machine; None if no driver tells."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = load(_LIBRARY)
        if nvml.nvmlInit_v2() == 0:
            try:
                return _hottest(nvml)
            finally:
                nvml.nvmlShutdown()
    return None


def _hottest(nvml: Any) -> int | None:
    count, found = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    for index in range(count.value):
        device, celsius = ctypes.c_void_p(), ctypes.c_uint()
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0
            and nvml.nvmlDeviceGetTemperature(device, _TEMPERATURE_GPU, ctypes.byref(celsius)) == 0
        ):
            found.append(celsius.value)
    return max(found, default=None)
