"""Log lines, rates, memory: what a process says about itself while it runs.

In: events with fields, amounts with times. Out: lines on stderr (plain, or one JSON object each), amounts per second.
Invariants: knows no rank, no model and no request; nothing here is global but the standard library's logger tree.
Not here: the metrics page (`server.health`), figures of benchmarks (`bench`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = "baltoro"
_FIELDS = "baltoro_fields"


def logger(room: str) -> logging.Logger:
    """The logger of a room."""
    return logging.getLogger(f"{ROOT}.{room}")


def log(to: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log that `event` happened, with its fields; plain lines show them as key=value."""
    to.log(level, event, extra={_FIELDS: fields})


def setup_logging(level: str, *, is_json: bool) -> None:
    """Send the lines of this package to stderr. Called once per process, by its entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if is_json else PlainLines())
    root = logging.getLogger(ROOT)
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def resident_bytes(process_id: int | None = None) -> int:
    """Memory of this process, or of another, that is in RAM now; 0 if there is no such process, or no /proc."""
    status = Path(f"/proc/{process_id or 'self'}/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainLines(logging.Formatter):
    """A line for people: time, level, event, key=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items())])


class Rate:
    """Amount per second over the last `window_s` seconds. Single writer: whoever counts."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._events: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float) -> None:
        """Count `amount` now."""
        self._events.append((self._clock(), amount))
        self._sum += amount
        self._forget()

    def per_second(self) -> float:
        """The rate over the window; 0 when nothing was counted in it."""
        self._forget()
        return self._sum / self._window_s

    def _forget(self) -> None:
        limit = self._clock() - self._window_s
        while self._events and self._events[0][0] <= limit:
            self._sum -= self._events.popleft()[1]
