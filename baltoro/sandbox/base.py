"""The contract of a sandbox: a place with a folder of its own where commands run that nobody vouches for.

In: commands, bytes for their stdin, files. Out: `Ended`: what they wrote and how they came to their end.
Invariants: whatever a command does, `exec` comes back within its wall time plus a moment, and nothing of the command
is alive then; a command that fails is a result; SandboxError means that the sandbox failed, and says nothing about the
command; after `close` the folder is gone.
Not here: judging what came out (`envs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from baltoro.errors import SandboxError

Reason = Literal["exit", "signal", "cpu_time", "wall_time", "output"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use. Time of the processor, memory and size are per process, the others for all of them.

    `cpu_s` whole seconds; `memory_bytes` of address space; `num_processes` threads count as well; `file_bytes` of one
    file; `output_bytes` of stdout and stderr together.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    num_processes: int = 16
    num_files: int = 64
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise SandboxError(f"limit {name} must be more than 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `code` is its exit status, or minus the signal that ended it; None where we ended it."""

    reason: Reason
    code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def is_ok(self) -> bool:
        return self.reason == "exit" and self.code == 0


class Sandbox(ABC):
    """One sandbox. Single writer: whoever opened it; one command at a time. Use it in a `with`.

    Paths are relative to the sandbox's folder, which is also where commands start.
    """

    @abstractmethod
    def exec(self, command: Sequence[str], *, stdin: bytes = b"", wall_s: float | None = None) -> Ended:
        """Run a command to its end. `wall_s` shortens the wall time of the limits.

        Errors: SandboxError where it could not be started or watched.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A file. Errors: SandboxError where there is none, or it is no ordinary file inside the folder."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Make or replace a file; folders on the way are made."""

    @abstractmethod
    def close(self) -> None:
        """Remove everything. May be called again."""

    def snapshot(self) -> str:
        """Keep the state of memory and files under the name that comes back."""
        raise self._cannot("snapshot")

    def fork(self) -> Sandbox:
        """A second sandbox in the same state, to judge it without side effects."""
        raise self._cannot("fork")

    def pause(self) -> None:
        """Give processor and memory back while the model thinks."""
        raise self._cannot("pause")

    def resume(self) -> None:
        """Go on after `pause`."""
        raise self._cannot("resume")

    def _cannot(self, ability: str) -> SandboxError:
        return SandboxError(f"{type(self).__name__} cannot {ability}: a backend with images of its state is needed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
