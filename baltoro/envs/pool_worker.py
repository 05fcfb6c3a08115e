"""The process of a judge: takes calls from its pool, one at a time.

In: argv: search path, descriptor, time limit, memory limit; then one JSON message a call. Out: {"began": true} once the
judge is loaded, then {"score": ...}; {"error": ...} as the last words where it raises.
Invariants: the alarm ends a call that its pool did not end, because the pool's process is gone; without a pool there is
no worker.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import msgspec


def main() -> None:
    """See the module."""
    descriptor, timeout_s, memory_bytes = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool's process decides what an interrupt ends

    def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        connection.send_bytes(msgspec.json.encode({"error": f"{kind.__name__}: {error}"[:2000]}))

    sys.excepthook = last_words
    while True:
        try:
            call = msgspec.json.decode(connection.recv_bytes())
        except EOFError:
            return
        judge = find(call["function"])
        connection.send_bytes(msgspec.json.encode({"began": True}))
        signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 5)
        score = judge(**call["arguments"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(msgspec.json.encode({"score": msgspec.to_builtins(score)}))


def find(name: str) -> Callable[..., Any]:
    """The function behind "package.module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
