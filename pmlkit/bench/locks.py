"""One runner per folder, one measurement per device, and an interrupt that lets the process in flight finish."""

import fcntl
import hashlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pmlkit.errors import PmlkitError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process. Raises PmlkitError if another runner writes to it."""
    with _held(folder / "lock", f"run {folder.name} is being written by another process: wait for it, or start a new run"):
        yield


@contextmanager
def device_lock(device: str) -> Iterator[None]:
    """Hold the GPU that a campaign measures, by its UUID. Raises PmlkitError if another campaign measures on it.

    A processor is not locked: two campaigns on it disturb each other, and the records' load says so.
    """
    if device != "cuda":
        yield
        return
    card = visible_card()
    if not card:
        raise PmlkitError("this campaign needs a CUDA device, and torch sees none: `python -m pmlkit doctor` says why")
    path = Path(tempfile.gettempdir()) / f"pmlkit-{card}.lock"
    with _held(path, "another campaign is measuring on this GPU: wait for it, or choose another by CUDA_VISIBLE_DEVICES"):
        yield


def visible_card() -> str:
    """Return a hash of the UUID of the first GPU that torch may use, or "" without one.

    Asked of another process: this one must not open a context on the card that it is about to measure.
    """
    ask = "import torch; print(torch.cuda.get_device_properties(0).uuid if torch.cuda.is_available() else '')"
    uuid = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
    return hashlib.sha256(uuid.encode()).hexdigest()[:16] if uuid else ""


@contextmanager
def _held(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file. The lock belongs to the open file, so it is gone with the process, however that ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PmlkitError(busy) from None
        yield


class Interrupt:
    """Remembers the first Ctrl-C, so that the process in flight is recorded; a second one stops at once."""

    def __init__(self) -> None:
        self.seen = False
        self._old: Any = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
