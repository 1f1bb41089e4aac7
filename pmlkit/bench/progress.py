"""Progress of a campaign: one bar in a terminal or a notebook, plain lines elsewhere."""

import os
import sys
import time
from collections import Counter

from tqdm import tqdm

from pmlkit.record import Record


class Progress:
    """Shows cases done, counts by status and the time left. Writes to standard error, which reports leave out.

    `PMLKIT_PROGRESS` is `bar` or `lines`; unset, a terminal and a notebook get the bar.
    """

    def __init__(self, title: str) -> None:
        interactive = sys.stderr.isatty() or "ipykernel" in sys.modules
        style = os.environ.get("PMLKIT_PROGRESS") or ("bar" if interactive else "lines")
        self.total, self.done, self.started = 0, 0, time.monotonic()
        self.counts: Counter[str] = Counter()
        self.bar = tqdm(total=0, desc=title, unit="case", ncols=100) if style == "bar" else None

    def expect(self, more: int) -> None:
        """Add a round's processes to the total."""
        self.total += more
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.refresh()

    def update(self, record: Record) -> None:
        """Count one finished case."""
        self.done += 1
        self.counts["ok" if record.status == "ok" else "failed"] += 1
        if self.bar is not None:
            self.bar.set_postfix_str(f"{self.counts['ok']} ok, {self.counts['failed']} failed")
            self.bar.update()
            return
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        print(
            f"[{self.done}/{self.total}] {record.case_id} {record.arm}: {record.status}"
            f" ({record.wall_s:.1f} s, about {left:.0f} s left)",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Release the terminal line."""
        if self.bar is not None:
            self.bar.close()
