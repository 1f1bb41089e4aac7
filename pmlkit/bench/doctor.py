"""What this machine can measure, and why not the rest."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pmlkit import environment, paths, registry
from pmlkit.hardware import match_gpu


class Finding(NamedTuple):
    """One examined thing. able: whether what depends on it works here."""

    thing: str
    able: bool
    detail: str


def examine() -> list[Finding]:
    """Return what was found, in the order in which things depend on each other."""
    about = environment.describe()
    return [_python(), *_packages(), *_cuda(about), *_subjects(), _quiet(about), _disk(), _kernel(), _git(about)]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), f"{version}; 3.11 or newer is needed")


def _packages() -> list[Finding]:
    found = []
    for package, why in (("torch", "every campaign"), ("triton", "kernels"), ("papermill", "reports in batch")):
        version = environment.installed(package)
        found.append(Finding(package, version is not None, version or f"not installed: no {why}"))
    return found


def _cuda(about: dict[str, Any]) -> list[Finding]:
    """Ask torch for a device, NVML for its state and the ledger for its peaks."""
    try:
        import torch
    except ImportError as error:
        return [Finding("CUDA", False, f"torch does not import: {error}")]
    if not torch.cuda.is_available():
        return [Finding("CUDA", False, "torch sees no device: the GPU campaigns cannot run, the CPU campaigns can")]
    found = [Finding("CUDA", True, f"torch {torch.__version__}, CUDA {torch.version.cuda}")]
    for gpu in about["gpus"]:
        board = match_gpu(gpu["name"], power_w=gpu["power_limit_w"])
        detail = f"{gpu['name']}, driver {gpu['driver']}, limit {gpu['power_limit_w']:g} W: "
        known = f"held against {board.title}" if board else "no such board in peaks.toml, so no percentage is given"
        found.append(Finding("peaks", board is not None, detail + known))
    return found


def _subjects() -> list[Finding]:
    """Say for every subject whether the release that it names is installed."""
    found = []
    for subject in registry.SUBJECTS.values():
        if subject.interpreter or subject.path:
            place = subject.interpreter or subject.path or ""
            found.append(Finding(subject.key, Path(place).exists(), f"{place} (another installation)"))
            continue
        version = environment.installed(subject.package) if subject.package else subject.version
        able = version == subject.version
        wanted = "" if able else f", the subject is {subject.version}: its records will say unsupported"
        found.append(Finding(subject.key, able, f"{version or 'not installed'}{wanted}"))
    return found


def _quiet(about: dict[str, Any]) -> Finding:
    cores, load = about["cores"], os.getloadavg()[0]
    quiet = load < 0.5 * cores
    return Finding("quiet", quiet, f"{cores} cores, load {load:.1f}{'' if quiet else ': other work will show in the noise'}")


def _disk() -> Finding:
    free = shutil.disk_usage(paths.data()).free
    return Finding("disk", free > 2**30, f"{free / 2**30:.1f} GiB free for records and reports")


def _kernel() -> Finding:
    from jupyter_client.kernelspec import KernelSpecManager

    able = "python3" in KernelSpecManager().find_kernel_specs()
    return Finding("kernel", able, "python3 is there" if able else "no kernel python3: pip install ipykernel")


def _git(about: dict[str, Any]) -> Finding:
    git = about["git"]
    state = "no repository: records will not name a commit" if git is None else git["commit"][:12]
    return Finding("commit", git is not None, state + (" with uncommitted changes" if git and git["dirty"] else ""))
