"""Judges that misbehave, for the pool: loaded by name in its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from baltoro.envs.base import Score


def good(answer: str) -> Score:
    return Score(1.0, "right", answer)


def zero(answer: str) -> Score:
    return Score(0.0, "wrong", answer)


def loops() -> Score:
    while True:
        continue


def hangs_in_c() -> Score:
    """Holds the interpreter: no exception could be raised in here."""
    return Score(float(len(str(pow(3, 10**9)))), "right")


def starts_others(word: str) -> Score:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", word])
    return Score(1.0, "right")


def raises() -> Score:
    raise ValueError("no such gold")


def dies() -> Score:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def dies_once(mark: str) -> Score:
    if Path(mark).exists():
        return Score(1.0, "right", "second time")
    Path(mark).touch()
    os._exit(3)


def no_score() -> float:
    return 1.0


def bad_score() -> dict[str, object]:
    return {"score": None, "reason": "wrong"}


def hungry() -> Score:
    return Score(float(len(bytearray(1 << 40))), "right")


def environment() -> Score:
    return Score(1.0, "right", " ".join(sorted(os.environ)))


def process() -> Score:
    return Score(1.0, "right", str(os.getpid()))
