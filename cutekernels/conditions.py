"""A GPU's clock, temperature and power while kernels are measured on it, from NVML."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

_SM_CLOCK, _GPU_SENSOR = 1, 0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Medians over a measurement; None where the driver does not tell."""

    clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


@dataclass
class Watch:
    """Collects conditions: call it between measurements, then ask :attr:`seen`.

    Args:
        uuid: of the GPU, as ``nvidia-smi -L`` prints it.
        nvml: the loaded library; without one nothing is seen.
    """

    uuid: str
    nvml: Any = None
    _samples: list[Conditions] = field(default_factory=list)

    @classmethod
    def current(cls) -> Watch:
        """Watch over torch's current GPU; it sees nothing where NVML is not installed."""
        import torch

        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        except (OSError, AttributeError, RuntimeError, AssertionError):  # no library, an old torch, no GPU
            return cls("")
        return cls(uuid, nvml if nvml.nvmlInit_v2() == 0 else None)

    def __call__(self) -> None:
        """Look at the GPU once."""
        handle = ctypes.c_void_p()
        if self.nvml is None or self.nvml.nvmlDeviceGetHandleByUUID(self.uuid.encode(), ctypes.byref(handle)) != 0:
            return
        clock = self._query("nvmlDeviceGetClockInfo", handle, _SM_CLOCK)
        heat = self._query("nvmlDeviceGetTemperature", handle, _GPU_SENSOR)
        milliwatts = self._query("nvmlDeviceGetPowerUsage", handle)
        self._samples.append(Conditions(clock, heat, None if milliwatts is None else milliwatts / 1000))

    def _query(self, function: str, *words: Any) -> float | None:
        number = ctypes.c_uint()
        return float(number.value) if getattr(self.nvml, function)(*words, ctypes.byref(number)) == 0 else None

    @property
    def seen(self) -> Conditions:
        """The medians of all looks."""
        middle = {}
        for name in (f.name for f in fields(Conditions)):
            values = [v for s in self._samples if (v := getattr(s, name)) is not None]
            middle[name] = median(values) if values else None
        return Conditions(**middle)
