"""What a run ran on and with, collected once per run. Nothing private: host names are hashed, paths left out."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from pmlkit.paths import root

PACKAGES = (
    "pmlkit", "torch", "triton", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "msgspec", "papermill",
    "nbconvert", "pytorch-metric-learning",
)  # fmt: skip
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OPENBLAS_CORETYPE")


def describe() -> dict[str, Any]:
    """Return the environment record: machine, processor, packages, commit, variables, GPUs."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "host": _digest(platform.node().encode()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "load_1m": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "freeze": _freeze_hash(),
        "variables": {name: _public(os.environ[name]) for name in VARIABLES if name in os.environ},
        "git": _git(),
        "gpus": _gpus(),
    }


def installed(package: str) -> str | None:
    """Return the version of an installed distribution without importing it, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _freeze_hash() -> str:
    frozen = sorted(f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions())
    return _digest("\n".join(frozen).encode())


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _public(value: str) -> str:
    """Return a variable's value, hashed if it may name a device or a folder."""
    return _digest(value.encode()) if "GPU-" in value or "MIG-" in value or "/" in value else value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _git() -> dict[str, Any] | None:
    """Return commit, dirty flag and a hash of what is not committed, new files included, or None outside a repository."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root(), capture_output=True, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        new = git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")
        content = git("diff", "HEAD") + b"".join((root() / name).read_bytes() for name in new if name)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "dirty": bool(content), "diff": _digest(content) if content else None}


def _gpus() -> list[dict[str, Any]]:
    """Return name, hashed UUID, memory, enforced power limit and driver of each GPU; [] where there is no driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        driver = nvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": nvml.nvmlDeviceGetName(handle),
                "uuid": _digest(nvml.nvmlDeviceGetUUID(handle).encode()),
                "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
                "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
                "driver": driver,
            }
            for handle in handles
        ]
    finally:
        nvml.nvmlShutdown()
