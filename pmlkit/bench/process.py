"""A worker process seen from the runner: start, wait for a line, end, and say how it died."""

import os
import platform
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from pmlkit.bench.outcome import Outcome
from pmlkit.campaign import Job
from pmlkit.paths import root

_TAIL = 2000
_ABSOLUTE = re.compile(r"(?<![\w<>./:-])/(?:[\w.@+-]+/)+[\w.@+-]+")


class Worker:
    """One worker process. It is started early to import, and measures only after `measure` was called.

    It may serve further jobs afterwards (`take`); all must name the same interpreter.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        threads = str(job.protocol.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else every worker starts a pool that competes with what is measured
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root()), os.environ.get("PYTHONPATH")])),
        }
        self.problem: Outcome | None = None
        self._buffer = b""
        self.deadline = time.monotonic() + job.protocol.timeout_s
        try:
            self.process = self._start(environment)
            self._send(msgspec.json.encode(job))
        except OSError as error:
            self.problem = Outcome(status="error", reason=f"cannot start {job.subject.interpreter}: {error.strerror}")

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.job.subject.interpreter or sys.executable, "-m", "pmlkit.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,
        )

    def take(self, job: Job) -> None:
        """Give the process, which has measured one job, another."""
        self.job, self.deadline = job, time.monotonic() + job.protocol.timeout_s
        self._send(msgspec.json.encode(job))
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the worker has imported everything; one that dies or is late will not compete with its neighbours."""
        if self.problem is None and self._line() != b'"ready"':
            self.problem = self._verdict()

    def measure(self) -> Outcome:
        """Let the worker measure; return its outcome, or the typed status of its death."""
        if self.problem is not None:
            return self.problem
        self.deadline = time.monotonic() + self.job.protocol.timeout_s
        self._send(b"go")
        line = self._line()
        if line is None:
            self.problem = self._verdict()
            return self.problem
        try:
            return msgspec.json.decode(line, type=Outcome)
        except msgspec.DecodeError as error:
            self.problem = Outcome(status="crashed", reason=f"the worker's answer is not an outcome: {error}")
            return self.problem

    def end(self) -> bool:
        """Say that there are no more jobs and wait briefly for the exit; True if it came, else end the worker and its own."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
            return True
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def kill(self) -> None:
        """End the worker at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # bytes for a dead worker are flushed once more on closing
                    stream.close()

    def close(self) -> None:
        """End the worker if it still lives and drop its log."""
        if hasattr(self, "process"):
            self.kill()
        self.log.close()

    def log_tail(self) -> str:
        """Return the end of what the worker printed, without paths of this machine."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - _TAIL))
        lines = self.log.read().decode(errors="replace").splitlines()
        return scrub("\n".join(line for line in lines if not line.startswith("USDT:")))  # torch's own profiler traces

    def _verdict(self) -> Outcome:
        """Return the typed status of a worker that gave no answer, and make sure that it is gone."""
        late = time.monotonic() >= self.deadline
        hung = not self.end()
        code = self.process.returncode
        if late:
            return Outcome(status="timeout", reason=f"no answer within {self.job.protocol.timeout_s:g} s")
        if hung:
            return Outcome(status="crashed", reason="the worker broke the protocol and had to be ended")
        if code == -signal.SIGKILL:
            return Outcome(status="host_oom", reason="killed by signal 9, most likely by the out-of-memory killer")
        if code < 0:
            return Outcome(status="crashed", reason=f"killed by signal {-code} ({signal.Signals(-code).name})")
        return Outcome(status="crashed", reason=f"exited with status {code} without an outcome")

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the worker is dead; its exit status says why

    def _line(self) -> bytes | None:
        """Return the next line of the answer, or None at the end of the stream or at the deadline."""
        assert self.process.stdout is not None
        while b"\n" not in self._buffer:
            wait = max(0.0, self.deadline - time.monotonic())  # what was said in time counts, however late it is read
            if not select.select([self.process.stdout], [], [], wait)[0]:
                return None
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                self.process.wait()
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


def scrub(text: str) -> str:
    """Replace what names this machine: its host name, and every absolute path by what it stands for."""
    known = [(str(root()), "<project>"), (sys.prefix, "<python>"), (str(Path.home()), "<home>")]
    for path, name in known:
        if len(path) > 1:
            text = text.replace(path, name)
    if len(platform.node()) > 3:
        text = text.replace(platform.node(), "<host>")
    return _ABSOLUTE.sub(lambda match: "<elsewhere>/" + match.group().rpartition("site-packages/")[2].rpartition("/")[2], text)
