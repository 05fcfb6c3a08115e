"""Entry of worker processes in tests: the scripted engine on an address; `orphan` starts one and leaves it behind."""

from __future__ import annotations

import subprocess
import sys

from baltoro.engine.engine import Engine
from baltoro.engine.worker import serve
from baltoro.errors import LeakError
from tests.engine.stub import make_engine


class _Leaking(Engine):
    """Finds a leak at its third step."""

    def step(self) -> list[object]:  # type: ignore[override]
        if self.scheduler.counts.steps == 2:
            raise LeakError("pages [7]: leaked: neither free nor held")
        return super().step()  # type: ignore[return-value]


def build(kind: str) -> Engine:
    engine = make_engine()
    if kind == "leaking":
        engine.__class__ = _Leaking
    return engine


def main() -> None:
    kind, address = sys.argv[1:]
    if kind == "orphan":
        child = subprocess.Popen([sys.executable, "-m", "tests.engine.worker_process", "plain", address])
        print(child.pid, flush=True)
        sys.stdin.readline()
        return
    serve(address, lambda: build(kind))


if __name__ == "__main__":
    main()
