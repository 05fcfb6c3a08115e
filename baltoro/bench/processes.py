"""Servers as child processes, for measuring them side by side: ours and mlx-lm's on the same files.

In: a model folder. Out: the address and model name of a server that answers, and its resident memory; it ends with the
context.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baltoro.bench.evaluate import first_model
from baltoro.errors import WorkerLost
from baltoro.observe import resident_bytes

START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `start_s`: from the start of the process to the first answer of /health or /v1/models;
    `start_cpu_s`: what its processes computed in that time, on all cores, which other work does not lengthen."""

    name: str
    url: str
    model: str
    start_s: float
    start_cpu_s: float
    process_id: int

    def resident_bytes(self) -> int:
        """Of the process and its children."""
        return sum(resident_bytes(pid) for pid in _family(self.process_id))


@contextmanager
def our_server(folder: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """`baltoro serve FOLDER`."""
    port = free_port()
    command = [sys.executable, "-m", "baltoro", "serve", str(folder), "--port", str(port), *options]
    with _running("baltoro", command, port, "/health") as server:
        yield server


@contextmanager
def mlx_server(folder: Path, *, concurrency: int = 16) -> Iterator[Server]:
    """`mlx_lm server` on the same folder."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]
    command += ["--decode-concurrency", str(concurrency), "--prompt-concurrency", str(concurrency)]
    with _running("mlx-lm", command, port, "/v1/models", model=str(folder)) as server:
        yield server


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _running(name: str, command: list[str], port: int, probe: str, *, model: str | None = None) -> Iterator[Server]:
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while not _answers(url + probe):
            if process.poll() is not None:
                raise WorkerLost(f"{' '.join(command)} ended with code {process.returncode}")
            if time.perf_counter() - began > START_LIMIT_S:
                raise WorkerLost(f"{' '.join(command)} did not answer within {START_LIMIT_S:.0f} s")
            time.sleep(0.05)
        start_s = time.perf_counter() - began
        start_cpu_s = sum(_cpu_s(pid) for pid in _family(process.pid))
        yield Server(name, url, model or first_model(url), start_s, start_cpu_s, process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cpu_s(process_id: int) -> float:
    """Seconds in user and kernel mode so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _family(process_id: int) -> list[int]:
    children = Path(f"/proc/{process_id}/task/{process_id}/children")
    found = [process_id]
    if children.exists():
        for child in children.read_text().split():
            found += _family(int(child))
    return found
