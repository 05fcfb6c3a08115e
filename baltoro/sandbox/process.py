"""A sandbox made of one subprocess at a time: limits, a killed tree, a fresh folder, and no network.

In: commands. Out: `Ended`. `isolation="full"` needs namespaces (network, processes, System V objects) and Landlock,
and is refused with the reason where the machine does not permit them; "limits" does without, on purpose.
What holds in both: rlimits; wall time that ends everything the command started, in whatever session or group it hid;
an environment of three variables, none inherited; as root, a user id of its own; no new privileges.

What it does not isolate, whichever is asked for:
- reading: every file that its user may read is readable (as an ordinary user: all of yours); "limits" also writes them;
- the kernel: all of its system calls are open, there is no seccomp filter and no virtual machine;
- sums: memory, processor time and file size are limited per process, so their sum is that times `num_processes`, and
  the folder may fill the disk with files of the permitted size;
- sight of others: /proc still shows the machine's processes; abstract Unix sockets go with the network namespace;
- in "limits" without root: the number of processes is not limited, the network is yours, and so is the environment of
  your other processes, which /proc shows to their user (Landlock forbids that in "full").
For code that means harm use a backend that puts a kernel or a virtual machine in between.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from baltoro.errors import SandboxError
from baltoro.sandbox.base import Ended, Limits, Reason, Sandbox

Isolation = Literal["full", "limits"]
LAUNCHER = Path(__file__).with_name("launch.py")
PATH = "/usr/local/bin:/usr/bin:/bin"
GRACE_S = 5.0  # for the launcher to clear up; it kills and waits, so a moment is enough
PIECE_BYTES = 1 << 16


@cache
def python_for(isolation: Isolation) -> str:
    """A Python that commands of such a sandbox can start: ours, where their user may read it, or the system's.

    Errors: SandboxError with the reason where such a sandbox is not permitted here, or there is no such Python.
    """
    found = [
        sys.executable,
        os.path.realpath(sys.executable),
        *(shutil.which(n, path=PATH) or "" for n in ("python3",)),
    ]
    why = "no Python was found"
    for path in dict.fromkeys(path for path in found if path):
        with ProcessSandbox(Limits(memory_bytes=1 << 30), isolation=isolation) as sandbox:
            try:
                ended = sandbox.exec([path, "-I", "-S", "-c", "import json"])
            except SandboxError as error:
                why = str(error)
                continue
            if ended.is_ok:
                return path
            why = ended.stderr.decode(errors="replace")[-500:]
    raise SandboxError(f"no Python starts in a sandbox with isolation={isolation!r}: {why}")


@cache
def missing(isolation: Isolation) -> str | None:
    """Why such a sandbox is not permitted here; None where it is."""
    if not sys.platform.startswith("linux"):
        return f"process sandboxes need Linux, this is {sys.platform}"
    with tempfile.TemporaryDirectory(prefix="baltoro-sandbox-") as folder:
        try:
            _Run(_spec(["/bin/true"], Path(folder), Limits(), isolation, None), Limits()).end()
        except SandboxError as error:
            return str(error)
    return None


class ProcessSandbox(Sandbox):
    """See the module. Errors: SandboxError where `isolation` is not permitted here."""

    def __init__(self, limits: Limits | None = None, *, isolation: Isolation = "full") -> None:
        if why := missing(isolation):
            advice = "; isolation='limits' does without it" if isolation == "full" else ""
            raise SandboxError(f"a sandbox with isolation={isolation!r} is not permitted here: {why}{advice}")
        self.limits = limits or Limits()
        self.isolation = isolation
        self._user = _own_user() if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="baltoro-sandbox-"))
        self._give(self.folder)

    def exec(self, command: Sequence[str], *, stdin: bytes = b"", wall_s: float | None = None) -> Ended:
        program = shutil.which(command[0], path=PATH)
        if program is None:
            raise SandboxError(f"{command[0]} is not a program on {PATH}; name it by its full path")
        spec = _spec([program, *command[1:]], self.folder, self.limits, self.isolation, self._user)
        return _Run(spec, self.limits, stdin, wall_s).end()

    def read(self, path: str) -> bytes:
        place = self._inside(path)
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"{path} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SandboxError(f"{path} is no ordinary file")
            return file.read(self.limits.file_bytes)

    def write(self, path: str, content: bytes) -> None:
        place = self._inside(path)
        for folder in reversed(place.parents):
            if folder.is_relative_to(self.folder) and not folder.exists():
                folder.mkdir(mode=0o700)
                self._give(folder)
        place.unlink(missing_ok=True)  # never written through a link
        place.write_bytes(content)
        self._give(place)

    def close(self) -> None:
        for folder, names, _ in os.walk(self.folder):  # top down, so that what the command locked can be entered
            for name in names:
                if not os.path.islink(inner := os.path.join(folder, name)):
                    os.chmod(inner, 0o700)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _inside(self, path: str) -> Path:
        folder = (self.folder / path).parent.resolve()
        place = folder / Path(path).name
        if not folder.is_relative_to(self.folder.resolve()) or place == self.folder.resolve():
            raise SandboxError(f"{path} is not inside the sandbox's folder")
        return place

    def _give(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user, self._user, follow_symlinks=False)


def _own_user() -> int | None:
    """A user id that nobody has: out of the upper half of those that this root can become. None if it is alone."""
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    start, count = max(((int(line[0]), int(line[2])) for line in lines), key=lambda pair: pair[1])
    return start + count // 2 + secrets.randbelow(count // 4) if count >= 4 else None


def _spec(
    command: Sequence[str], folder: Path, limits: Limits, isolation: Isolation, user: int | None
) -> dict[str, Any]:
    return {
        **asdict(limits),
        "command": list(command),
        "folder": str(folder),
        "is_isolated": isolation == "full",
        "user": user,
        "parent": os.getpid(),
        "environment": {"PATH": PATH, "HOME": str(folder), "TMPDIR": str(folder)},
    }


class _Run:
    """One command from its start to its end. Single writer: `end`."""

    def __init__(self, spec: dict[str, Any], limits: Limits, stdin: bytes = b"", wall_s: float | None = None) -> None:
        self._limits = limits
        self._wall_s = min(limits.wall_s, wall_s if wall_s is not None else limits.wall_s)
        self._stdin = memoryview(stdin)
        self._texts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self._start = time.monotonic()
        status, theirs = os.pipe()
        self._status = os.fdopen(status, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(spec), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[theirs],
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._status.close()
            raise SandboxError(f"the launcher does not start: {error}") from error
        finally:
            os.close(theirs)

    def end(self) -> Ended:
        """Wait, and clear up whatever happens."""
        try:
            cut = self._follow()
        finally:
            self._stop()
        told = [json.loads(line) for line in bytes(self._texts["status"]).splitlines()]
        errors = [line["error"] for line in told if "error" in line]
        if errors:
            raise SandboxError(errors[0])
        code = next((line["code"] for line in told if "code" in line), None)
        if cut is None and code is None:
            raise SandboxError("the launcher was killed from outside, so nothing is known about the command")
        code = None if cut else code
        reason: Reason = cut or ("exit" if code is None or code >= 0 else "signal")
        reason = "cpu_time" if code == -signal.SIGXCPU else reason
        stdout, stderr = bytes(self._texts["stdout"]), bytes(self._texts["stderr"])
        return Ended(reason, code, stdout, stderr, time.monotonic() - self._start)

    def _follow(self) -> Reason | None:
        """Move bytes until everything is closed. Out: why it has to be ended, or None."""
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        with selectors.DefaultSelector() as selector:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr), ("status", self._status)):
                selector.register(pipe, selectors.EVENT_READ, name)
            while selector.get_map():
                left = self._start + self._wall_s - time.monotonic()
                if left <= 0:
                    return "wall_time"
                for key, _ in selector.select(left):
                    assert not isinstance(key.fileobj, int)
                    if not (self._feed(key.fd) if key.data == "stdin" else self._take(key.fd, key.data)):
                        selector.unregister(key.fileobj)
                        _close(key.fileobj)
                if len(self._texts["stdout"]) + len(self._texts["stderr"]) > self._limits.output_bytes:
                    return "output"
        return None

    def _feed(self, descriptor: int) -> bool:
        """Write a piece of stdin. Out: is there more?"""
        try:
            count = os.write(descriptor, self._stdin[:PIECE_BYTES])
        except BrokenPipeError:
            return False
        self._stdin = self._stdin[count:]
        return len(self._stdin) > 0

    def _take(self, descriptor: int, name: str) -> bool:
        """Read a piece. Out: may there be more?"""
        piece = os.read(descriptor, PIECE_BYTES)
        self._texts[name] += piece
        return bool(piece)

    def _stop(self) -> None:
        process = self._process
        try:
            process.terminate()
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr, self._status):
            _close(pipe)


def _close(pipe: Any | IO[bytes] | None) -> None:
    if pipe is not None and not pipe.closed:
        pipe.close()
