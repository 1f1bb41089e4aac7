"""What a run ran on and with, collected once per run. Nothing private: host names are hashed, paths left out."""

import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from importlib.util import find_spec
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
        "cpu_governor": _line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "container": _container(),
        **_torch_build(),
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


def _line(path: str) -> str | None:
    """Return the only line of a file, or None where there is none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _container() -> str | None:
    """Return a hash of what names the container or machine instance, or None."""
    name = _line("/proc/self/cgroup") or ""
    return _digest(name.encode()) if len(name) > len("0::/") else None


def _torch_build() -> dict[str, Any]:
    """Return what the installed torch was built with, by its own small version file: torch itself is not imported."""
    spec = find_spec("torch")
    places = list(spec.submodule_search_locations or []) if spec else []
    found: dict[str, Any] = {}
    for place in places:
        text = _line(f"{place}/version.py") or ""
        found = {f"torch_{name}": value for name, value in re.findall(r"^(cuda|hip|git_version)\b.*= '([^']+)'", text, re.M)}
    libraries = {"cudnn": "nvidia-cudnn-cu", "nccl": "nvidia-nccl-cu"}
    for name, prefix in libraries.items():
        versions = [v for major in ("12", "13") if (v := installed(f"{prefix}{major}"))]
        found |= {name: versions[0]} if versions else {}
    return found


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
    """Return commit, dirty flag and a hash of what is not committed, new files included.

    Outside a repository it is the commit that `PMLKIT_COMMIT` states, for a tree that was copied to where it runs, with
    a hash of every source file in place of the flag; None where nobody states one.
    """

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root(), capture_output=True, check=True).stdout

    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        new = git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")
        content = git("diff", "HEAD") + b"".join((root() / name).read_bytes() for name in new if name)
    except (OSError, subprocess.CalledProcessError):
        stated = os.environ.get("PMLKIT_COMMIT")
        sources = b"".join(path.read_bytes() for path in sorted((root() / "pmlkit").rglob("*.py")))
        return {"commit": stated, "dirty": False, "stated": True, "sources": _digest(sources)} if stated else None
    return {"commit": commit, "dirty": bool(content), "diff": _digest(content) if content else None}


def _gpus() -> list[dict[str, Any]]:
    """Return what names each GPU and what bounds its speed; [] where there is no driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        driver = nvml.nvmlSystemGetDriverVersion()
        return [_gpu(nvml, handle) | {"driver": driver} for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    """Return the facts of one GPU; None for what its driver does not tell."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    modes = {"ecc": ask("nvmlDeviceGetEccMode"), "mig": ask("nvmlDeviceGetMigMode")}
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": _digest(nvml.nvmlDeviceGetUUID(handle).encode()),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "max_sm_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "max_memory_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        "bus_width_bits": ask("nvmlDeviceGetMemoryBusWidth"),
        "cores": ask("nvmlDeviceGetNumGpuCores"),
        "persistence": ask("nvmlDeviceGetPersistenceMode"),
        "vbios": ask("nvmlDeviceGetVbiosVersion"),
        **{name: mode[0] if mode is not None else None for name, mode in modes.items()},
        "cuda_driver": nvml.nvmlSystemGetCudaDriverVersion_v2(),
    }
