"""The program between a process sandbox and its command; run by path, so it imports the standard library alone.

In: argv: a `Launch` as JSON, a file descriptor. Out: on that descriptor one JSON line: how the command ended, or
which step of setting up failed, and why. Three processes: the outer one waits for a SIGTERM or for the end; `init` is
process 1 of a namespace, so that everything in there dies with it; the command, which has a user of its own where we
are root, may write into its folder alone (Landlock), and has its limits.
Invariants: the outer process ends after everything that the command started; where its parent dies, it ends too.
Source: unshare(2), pid_namespaces(7), user_namespaces(7), landlock(7), setrlimit(2), prctl(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

NEW_USER, NEW_PID, NEW_NET, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
SET_DEATH_SIGNAL, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 1, 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
# write, remove and make in all forms (1, 4..12), then what later versions know: refer (13), truncate (14)
WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
REFER, TRUNCATE = 1 << 13, 1 << 14
SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


class Failed(Exception):
    """A step of setting up that is not permitted or not there."""

    def __init__(self, step: str, why: object) -> None:
        super().__init__(f"{step}: {why}")


def system(step: str, function: str, *arguments: Any) -> int:
    """Call a C function. Errors: Failed names the step."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(getattr(libc, function)(*arguments))
    if result < 0:
        raise Failed(step, os.strerror(ctypes.get_errno()))
    return result


def say(status: int, **what: object) -> None:
    """Tell the process that started us, one JSON line."""
    os.write(status, json.dumps(what).encode() + b"\n")


def enter_namespaces() -> None:
    """New namespaces of network, processes and System V objects; as an ordinary user, of users as well."""
    user, group = os.geteuid(), os.getegid()
    system("namespaces", "unshare", NEW_NET | NEW_PID | NEW_IPC | (NEW_USER if user else 0))
    if user:
        try:
            for name, line in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
        except OSError as error:
            raise Failed("namespaces", error) from error


def may_write_below(folder: str) -> None:
    """Refuse this process and its children to write to files anywhere else."""
    version = system("landlock", "syscall", LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    rights = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    handled = ctypes.c_uint64(rights)
    rules = system("landlock", "syscall", LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    on_files = rights & (1 << 1 | TRUNCATE)
    for path, allowed in [(folder, rights), *((device, on_files) for device in WRITABLE_DEVICES)]:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = allowed.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
        system("landlock", "syscall", LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(descriptor)
    system("landlock", "syscall", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def set_limits(spec: dict[str, Any]) -> None:
    """Limits of this process and its children."""
    for name, soft, hard in (
        ("RLIMIT_CPU", spec["cpu_s"], spec["cpu_s"] + 1),
        ("RLIMIT_AS", spec["memory_bytes"], spec["memory_bytes"]),
        ("RLIMIT_FSIZE", spec["file_bytes"], spec["file_bytes"]),
        ("RLIMIT_NOFILE", spec["num_files"], spec["num_files"]),
        ("RLIMIT_CORE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, name), (soft, hard))
    if spec["is_isolated"] or spec["user"] is not None:  # else all processes of the person who runs this would count
        resource.setrlimit(resource.RLIMIT_NPROC, (spec["num_processes"], spec["num_processes"]))


def become_command(spec: dict[str, Any]) -> NoReturn:
    """Turn this process into the command."""
    os.setsid()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    system("privileges", "prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if spec["is_isolated"]:
        may_write_below(spec["folder"])
    set_limits(spec)
    if spec["user"] is not None:
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])
    os.chdir(spec["folder"])
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def be_init(spec: dict[str, Any], status: int) -> NoReturn:
    """Start the command, wait for it, tell how it ended. What it left behind dies with this process."""
    system("init", "prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    command = os.fork()
    if command == 0:
        try:
            become_command(spec)
        except (OSError, ValueError, Failed) as error:
            say(status, error=str(error))
        os._exit(127)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        process, ended = os.wait()
        if process == command:
            say(status, code=os.waitstatus_to_exitcode(ended))
            os._exit(0)


def children(of: int) -> list[int]:
    """Living children of a process, zombies included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            found += [int(name)] if parent == of else []
    return found


def sweep() -> None:
    """End what has become our child because its parents died, until there is nothing."""
    while found := children(os.getpid()):
        for process in found:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def wait_for(init: int, parent: int) -> None:
    """Wait until `init` has ended; end it where SIGTERM comes (both signals are blocked) or the parent has died.

    Signals are taken, not handled: a handler in Python runs between two instructions, so one that comes between the
    last of them and a blocking call would never be seen.
    """
    if os.getppid() != parent:
        os.kill(init, signal.SIGKILL)
    while os.waitpid(init, os.WNOHANG)[0] == 0:
        if signal.sigwait(SIGNALS) == signal.SIGTERM:
            os.kill(init, signal.SIGKILL)


def main() -> None:
    """See the module."""
    spec, status = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from the start: none is to be lost between two steps
    try:
        if spec["is_isolated"]:
            enter_namespaces()
        system("parent", "prctl", SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # forgotten where a user changes
        system("parent", "prctl", SET_SUBREAPER, 1, 0, 0, 0)
    except Failed as error:
        say(status, error=str(error))
        sys.exit(1)
    init = os.fork()
    if init == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        be_init(spec, status)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    wait_for(init, spec["parent"])
    sweep()


if __name__ == "__main__":
    main()
