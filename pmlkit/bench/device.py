"""What explains noise: clocks, temperature, power, throttling and other work, by NVML on the very card in use."""

import os
from typing import Any

from pmlkit.record import Conditions, Flag

# Clock-event reasons that slow a kernel down. Idle and application clocks do not count.
THROTTLE = {
    "SwPowerCap": 0x4,
    "HwSlowdown": 0x8,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
}
_FOREIGN_BYTES = 50 * 2**20  # a change above this while timing, when nothing is allocated anew, is somebody else's


class Monitor:
    """Reads the state of the device at the start and at the end of the timed part. On the CPU it reads the load."""

    def __init__(self, device: str) -> None:
        self.conditions = Conditions()
        self.nvml: Any = None
        self.handle: Any = None
        self.pids: list[frozenset[int]] = []
        self.used: list[int] = []
        if device == "cuda":
            self._open()

    def read(self) -> None:
        """Add one reading."""
        self.conditions.load_1m.append(os.getloadavg()[0])
        if self.handle is None:
            return
        nvml, handle, conditions = self.nvml, self.handle, self.conditions
        conditions.sm_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        conditions.temp_c.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        conditions.power_w.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        energy = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        conditions.energy_j = energy if conditions.energy_j is None else energy - conditions.energy_j
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        seen = [name for name, bit in THROTTLE.items() if reasons & bit]
        conditions.throttle = sorted({*conditions.throttle, *seen})
        self.pids.append(frozenset(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        self.used.append(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        conditions.other_processes = len(self.pids[-1] - {os.getpid()})

    def flags(self) -> list[Flag]:
        """Return throttled; contended if processes or memory changed between two readings; contention_unknown if blind.

        In a container the process ids may be the host's, or hidden: their set is compared, not who they are.
        """
        found: list[Flag] = ["throttled"] if self.conditions.throttle else []
        if self.handle is None:
            return found
        if len(set(self.pids)) > 1 or max(self.used) - min(self.used) > _FOREIGN_BYTES:
            found.append("contended")
        elif not self.pids or not self.pids[0]:
            found.append("contention_unknown")
        return found

    def _open(self) -> None:
        """Find the card by UUID: NVML's order is not CUDA's."""
        import pynvml as nvml
        import torch

        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.nvml = nvml
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
