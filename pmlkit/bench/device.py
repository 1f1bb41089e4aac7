"""What explains noise: clocks, temperature, power, throttling and other work, by NVML on the very card in use."""

import os
from typing import Any

from pmlkit.bench.cores import Foreign
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
    """Reads the state of the device at the start and at the end of the timed part, and its clock after every block.

    Of the processor it reads the load, and what others do on the worker's cores.
    """

    def __init__(self, device: str) -> None:
        self.foreign = Foreign()
        self.conditions = Conditions(cores=sorted(self.foreign.cores))
        self.held: list[dict[str, int]] = []
        self.nvml: Any = None
        self.handle: Any = None
        self.pids: list[frozenset[int]] = []
        self.used: list[int] = []
        if device == "cuda":
            self._open()

    def read(self) -> None:
        """Add one reading."""
        self.conditions.load_1m.append(os.getloadavg()[0])
        self.conditions.foreign_cores = self.foreign.busy_cores()
        self.glance()
        if self.handle is None:
            return
        nvml, handle, conditions = self.nvml, self.handle, self.conditions
        conditions.temp_c.append(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        conditions.power_w.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        energy = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        conditions.energy_j = energy if conditions.energy_j is None else energy - conditions.energy_j
        self.held.append(self._held_back())
        conditions.held_back_ns = {name: now - self.held[0][name] for name, now in self.held[-1].items()}
        self.pids.append(frozenset(p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        self.used.append(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        conditions.other_processes = len(self.pids[-1] - {os.getpid()})

    def glance(self) -> None:
        """Read the clock and why it is not higher, in some 0.1 ms."""
        if self.handle is None:
            return
        self.conditions.sm_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        reasons = self.nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)
        seen = [name for name, bit in THROTTLE.items() if reasons & bit]
        self.conditions.throttle = sorted({*self.conditions.throttle, *seen})

    def flags(self) -> list[Flag]:
        """Return throttled; contended if processes or memory changed between two readings, or if others kept more than a
        core of the worker's busy; contention_unknown if blind.

        In a container the process ids may be the host's, or hidden: their set is compared, not who they are.
        """
        found: list[Flag] = ["throttled"] if self.conditions.throttle or any(self.conditions.held_back_ns.values()) else []
        if (self.conditions.foreign_cores or 0.0) > 1:
            found.append("contended")
        elif self.handle is None:
            pass
        elif len(set(self.pids)) > 1 or max(self.used) - min(self.used) > _FOREIGN_BYTES:
            found.append("contended")
        elif not self.pids or not self.pids[0]:
            found.append("contention_unknown")
        return found

    def _held_back(self) -> dict[str, int]:
        """Return the driver's counts of nanoseconds in which power or temperature held the clock down, where it counts."""
        nvml, counts = self.nvml, {}
        for name, policy in (("power", nvml.NVML_PERF_POLICY_POWER), ("thermal", nvml.NVML_PERF_POLICY_THERMAL)):
            try:
                counts[name] = nvml.nvmlDeviceGetViolationStatus(self.handle, policy).violationTime
            except nvml.NVMLError:
                continue
        return counts

    def _open(self) -> None:
        """Find the card by UUID: NVML's order is not CUDA's."""
        import pynvml as nvml
        import torch

        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.nvml = nvml
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
