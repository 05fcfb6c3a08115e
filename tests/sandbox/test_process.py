"""The process sandbox: what a command may not do, what comes back of it, and that nothing of it stays.

The fork bomb is a loop of 64 at most, so it would be harmless without its limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baltoro.errors import SandboxError
from baltoro.sandbox import process
from baltoro.sandbox.base import Ended, Limits
from baltoro.sandbox.process import Isolation, ProcessSandbox, missing, python_for

QUICK = Limits(wall_s=10.0, cpu_s=1, memory_bytes=256 << 20, num_processes=8, output_bytes=100_000)


@pytest.fixture(params=["full", "limits"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    found: Isolation = request.param
    if why := missing(found):
        pytest.skip(f"isolation={found!r} is not permitted here: {why}")
    return found


@pytest.fixture
def sandbox(isolation: Isolation) -> Iterator[ProcessSandbox]:
    with ProcessSandbox(QUICK, isolation=isolation) as found:
        yield found


def run(sandbox: ProcessSandbox, program: str, *, stdin: bytes = b"", wall_s: float | None = None) -> Ended:
    command = [python_for(sandbox.isolation), "-I", "-S", "-c", program]
    return sandbox.exec(command, stdin=stdin, wall_s=wall_s)


def living(word: str) -> list[int]:
    """Processes with `word` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # ended meanwhile
    return [number for number in found if number != os.getpid()]


def until(is_done: Callable[[], object], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not (done := is_done()) and time.monotonic() < end:
        os.sched_yield()
    return bool(done)


def test_output_and_exit_code_come_back(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "import sys; print(sys.stdin.read()); sys.stderr.write('e'); sys.exit(3)", stdin=b"in")
    assert (ended.reason, ended.code, ended.stdout, ended.stderr) == ("exit", 3, b"in\n", b"e")
    assert not ended.is_ok


def test_a_signal_is_told_from_an_exit(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "import os; os.kill(os.getpid(), 11)")
    assert (ended.reason, ended.code) == ("signal", -signal.SIGSEGV)


def test_input_that_nobody_reads_does_not_block(sandbox: ProcessSandbox) -> None:
    assert run(sandbox, "print(1)", stdin=b"x" * 1_000_000).stdout == b"1\n"


def test_an_endless_loop_is_ended_by_its_wall_time(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "while True: pass", wall_s=0.4)
    assert (ended.reason, ended.code) == ("wall_time", None)
    assert ended.wall_s < 5


@pytest.mark.slow
def test_an_endless_loop_is_ended_by_its_processor_time(sandbox: ProcessSandbox) -> None:
    assert run(sandbox, "while True: pass").reason == "cpu_time"


def test_a_fork_bomb_meets_the_limit_of_processes(sandbox: ProcessSandbox) -> None:
    if sandbox.isolation == "limits" and os.geteuid():
        pytest.skip("without namespaces and without root the number of processes is not limited")
    bomb = "import os, time\nfor i in range(64):\n    if os.fork() == 0:\n        time.sleep(20)\n        os._exit(0)"
    ended = run(sandbox, bomb)
    assert ended.code == 1 and b"BlockingIOError" in ended.stderr


def test_a_memory_hog_gets_no_memory(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "x = bytearray(1 << 30)")
    assert ended.code == 1 and b"MemoryError" in ended.stderr


def test_big_output_ends_the_command(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "while True: print('x' * 1000)")
    assert ended.reason == "output"
    assert len(ended.stdout) < QUICK.output_bytes + 2 * process.PIECE_BYTES


def test_a_big_file_is_cut_off(isolation: Isolation) -> None:
    with ProcessSandbox(Limits(file_bytes=1000), isolation=isolation) as sandbox:
        ended = run(sandbox, "with open('big', 'wb') as f: f.write(bytes(5000))")
        assert b"File too large" in ended.stderr  # Python does not die of the signal
        assert len(sandbox.read("big")) <= 1000


def test_the_folder_is_the_only_place_to_write() -> None:
    """Into a folder that everybody may write to, so that it is Landlock that refuses."""
    if why := missing("full"):
        pytest.skip(f"not permitted here: {why}")
    with tempfile.TemporaryDirectory() as folder, ProcessSandbox(QUICK) as sandbox:
        outside = Path(folder) / "outside"
        outside.write_text("mine")
        outside.chmod(0o666)
        Path(folder).chmod(0o777)
        assert run(sandbox, f"open('inside', 'w').write(open({str(outside)!r}).read())").is_ok
        assert sandbox.read("inside") == b"mine"
        for change in (f"open({str(outside)!r}, 'w')", f"os.unlink({str(outside)!r})", f"os.mkdir({folder + '/x'!r})"):
            assert b"PermissionError" in run(sandbox, f"import os; {change}").stderr
        assert outside.read_text() == "mine" and os.listdir(folder) == ["outside"]


def test_there_is_no_network_with_full_isolation() -> None:
    if why := missing("full"):
        pytest.skip(f"not permitted here: {why}")
    connect = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    with ProcessSandbox(QUICK) as sandbox:
        assert b"Network is unreachable" in run(sandbox, connect).stderr


def test_no_environment_is_inherited(sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    ended = run(sandbox, "import os; print(sorted(os.environ)); print(open('/proc/self/environ').read())")
    assert b"SECRET_TOKEN" not in ended.stdout and b"'HOME'" in ended.stdout


def test_no_descriptor_of_ours_is_open(sandbox: ProcessSandbox) -> None:
    ended = run(sandbox, "import os; print(sorted(os.listdir('/proc/self/fd')))")
    assert ended.stdout == b"['0', '1', '2', '3']\n"  # 3 is the listing's own


@pytest.mark.parametrize("wall_s", [None, 0.5])
def test_what_hides_from_its_group_is_ended_too(sandbox: ProcessSandbox, wall_s: float | None) -> None:
    """Grandchildren in sessions of their own, whether the command ends or is ended."""
    word = f"stays-{os.getpid()}-{sandbox.folder.name}"
    program = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    {word!r}\n    time.sleep(60)\n"
    ended = run(sandbox, program + ("time.sleep(60)" if wall_s else ""), wall_s=wall_s)
    assert ended.reason == ("wall_time" if wall_s else "exit")
    assert not living(word)


def test_a_killed_owner_takes_the_command_with_it(isolation: Isolation, tmp_path: Path) -> None:
    """As after kill -9 of a rollout process."""
    word = f"orphan-{os.getpid()}-{isolation}"
    python = python_for(isolation)
    owner = (
        "import sys\nfrom baltoro.sandbox.process import ProcessSandbox\n"
        f"sandbox = ProcessSandbox(isolation={isolation!r})\nprint(sandbox.folder, flush=True)\n"
        f"sandbox.exec([{python!r}, '-I', '-S', '-c', 'import time; time.sleep(60)', {word!r}])"
    )
    started = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert started.stdout
    folder = started.stdout.readline().decode().strip()
    assert until(lambda: len([p for p in living(word) if p != started.pid]) >= 3), "the command never ran"
    started.kill()
    started.wait()
    started.stdout.close()
    assert until(lambda: not living(word)), f"still alive: {living(word)}"
    os.rmdir(folder)


def test_the_folder_is_gone_after_close_whatever_is_in_it(isolation: Isolation) -> None:
    with ProcessSandbox(QUICK, isolation=isolation) as sandbox:
        run(sandbox, "import os; os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)")
        assert sandbox.folder.exists()
    assert not sandbox.folder.exists()
    sandbox.close()


def test_files_go_in_and_out(sandbox: ProcessSandbox) -> None:
    sandbox.write("data/in.txt", b"21")
    assert run(sandbox, "open('out', 'w').write(str(2 * int(open('data/in.txt').read())))").is_ok
    assert sandbox.read("out") == b"42"


def test_reading_follows_no_link_and_waits_for_no_pipe(sandbox: ProcessSandbox) -> None:
    run(sandbox, "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'folder'); os.mkfifo('pipe')")
    for path in ("link", "folder/passwd", "pipe", "../x", "/etc/passwd", "nothing"):
        with pytest.raises(SandboxError):
            sandbox.read(path)


def test_writing_goes_through_no_link(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    run(sandbox, f"import os; os.symlink({str(outside)!r}, 'link'); os.symlink({str(tmp_path)!r}, 'folder')")
    sandbox.write("link", b"new")
    with pytest.raises(SandboxError):
        sandbox.write("folder/outside", b"new")
    assert outside.read_text() == "mine" and sandbox.read("link") == b"new"


def test_a_program_that_is_not_there_is_the_sandboxs_error(sandbox: ProcessSandbox) -> None:
    with pytest.raises(SandboxError, match="no-such-program"):
        sandbox.exec(["no-such-program"])


def test_refusal_names_the_reason_and_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that forbids namespaces."""
    text = process.LAUNCHER.read_text().replace('"unshare", NEW_NET', '"unshare", -1 & NEW_NET | 1')
    (tmp_path / "launch.py").write_text(text)
    monkeypatch.setattr(process, "LAUNCHER", tmp_path / "launch.py")
    monkeypatch.setattr(process, "missing", process.missing.__wrapped__)
    with pytest.raises(SandboxError, match=r"not permitted here: namespaces: .*isolation='limits'"):
        ProcessSandbox(QUICK)
    ProcessSandbox(QUICK, isolation="limits").close()


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(SandboxError, match="cpu_s"):
        Limits(cpu_s=0)


def test_what_needs_images_is_refused(sandbox: ProcessSandbox) -> None:
    with pytest.raises(SandboxError, match="cannot fork"):
        sandbox.fork()
